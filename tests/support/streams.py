"""Stand-ins for the streams of a GPU, which do all work at once."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch


class Stream:
    """A stand-in for torch.Stream."""

    device, native_handle = torch.device("cpu"), 7

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def wait_stream(self, stream: Stream) -> None:
        pass

    def wait_event(self, event: Stream) -> None:
        pass

    def record_event(self) -> Stream:
        return self

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False


def replace_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the library these streams."""
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.accelerator, "current_stream", Stream)
    monkeypatch.setattr(torch.accelerator, "set_stream", Stream)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)


def replace_modules(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    """Let imports find these modules, parents before their children."""
    for module in modules:
        monkeypatch.setitem(sys.modules, module.__name__, module)
        parent, _, child = module.__name__.rpartition(".")
        if parent:
            monkeypatch.setattr(sys.modules[parent], child, module, raising=False)
