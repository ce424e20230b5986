"""Questions about a tensor that one rank alone may ask: no message, no collective step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch

import distconv as dc
from tests.support.verdicts import one_verdict

QUESTIONS: dict[str, Callable[[dc.DistTensor], Any]] = {
    **{
        name: lambda x, name=name: getattr(x, name)
        for name in (
            *("shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "grad", "grad_fn"),
            *("ndim", "nbytes", "itemsize", "is_cuda", "is_sparse", "grid", "box", "replicas"),
            *("data", "retains_grad"),
        )
    },
    **{
        f"{name}()": lambda x, name=name: getattr(x, name)()
        for name in (
            *("stride", "type", "size", "dim", "numel", "element_size", "get_device", "nelement"),
            *("is_contiguous", "is_floating_point", "is_complex", "is_conj", "is_neg", "__len__"),
            *("__repr__", "__str__", "__hash__", "to_local", "detach", "clone", "contiguous"),
        )
    },
    "size(1)": lambda x: x.size(1),
    "stride(1)": lambda x: x.stride(1),
    "stride by name": lambda x: x.stride(dim=-1),
    "torch.numel": torch.numel,
    "torch.is_tensor": torch.is_tensor,
    "is_floating_point": torch.is_floating_point,
    "isinstance": lambda x: isinstance(x, torch.Tensor),
    "f-string": lambda x: f"{x}" if x.dim() else None,  # of one element, it is item()
    "another type's name": lambda x: x.detach().type(),
}


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("name", QUESTIONS)
def test_one_rank_alone_may_ask(name: str, debug: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = dc.ProcessGrid(height=-1)
    monkeypatch.setattr(grid.journal, "debug", debug)
    whole = torch.arange(48.0).reshape(2, 3, 8, 1)
    leaf = dc.distribute_tensor(whole, grid).requires_grad_()
    for x in (leaf, leaf * 2, leaf[:, 1:], leaf.mean(), dc.distribute_tensor(whole, grid)):
        if not x.dim() and name in ("size(1)", "stride(1)", "stride by name", "__len__()"):
            continue
        with ExitStack() as stack, one_verdict():
            sends = [
                stack.enter_context(mock.patch.object(grid.transport, kind))
                for kind in ("exchange", "all_reduce", "all_gather", "broadcast")
            ]
            if grid.rank == 0:
                before = grid.journal.latest(), grid.journal.number
                QUESTIONS[name](x)
                assert (grid.journal.latest(), grid.journal.number) == before, "a collective step"
                assert not any(send.called for send in sends), "a message"
    assert float((leaf * 2).sum().detach()) == 2 * float(whole.sum())
