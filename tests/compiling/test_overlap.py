"""Replayed and compiled passes start messages before the work that hides them, in one order."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch import nn

import distconv as dc
from distconv.compiling import graph
from tests.compiling.test_compile import CALLS, batches

Call = tuple[str, list[str]]
"""The name of a call of a replayed step, and the words of its arguments."""


def trained(backend: str | None = None) -> Any:
    """Return a compiled step, after some replays, of overlapped layers with a sum for each."""
    grid = dc.ProcessGrid(height=2)
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, 2, 1), nn.BatchNorm2d(4)]
    model = dc.parallelize(
        nn.Sequential(*layers, nn.Conv2d(4, 2, 5, padding=2)), grid, bucket_bytes=1
    )

    compiled = dc.compile(model, backend=backend)
    with dc.method("overlapped"):
        for x, _ in batches(grid):
            model.zero_grad()
            compiled(x).square().mean().backward()
    assert compiled.replays == CALLS - 2
    return compiled


def calls_of(source: str) -> list[tuple[str, Call]]:
    """Return the calls of a replayed function, each with the name of its result."""
    lines = re.findall(r"^ +(\w+) = ([\w.]+)\((.*?)\)(?:;|$)", source, re.MULTILINE)
    return [(made, (name, re.findall(r"\w+", arguments))) for made, name, arguments in lines]


@pytest.mark.parallel(2)
def test_a_trace_starts_halos_before_and_waits_behind_the_block_of_a_convolution() -> None:
    calls = calls_of(trained().source)
    names = [name for _, (name, _) in calls]
    between = []
    for i, (made, (name, _)) in enumerate(calls):
        if name.startswith("distconv_compiling_trace_exchange"):
            wait = "distconv_compiling_trace_wait", [made]
            end = next(j for j, (_, call) in enumerate(calls) if call == wait and j > i)
            between.append([x for x in names[i:end] if ".convolution" in x])
    # Three layers forward, and two backward: nobody asks for the gradient of the images.
    assert [set(x) for x in between] == [{"torch.ops.aten.convolution.default"}] * 3 + [
        {"torch.ops.aten.convolution_backward.default"}
    ] * 2


@pytest.mark.parallel(2)
def test_compiled_code_keeps_messages_in_the_order_of_the_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []
    for name in ("start", "wait"):
        run = getattr(graph._Posted, name)

        def noted(self: Any, *given: Any, run: Any = run, name: str = name) -> Any:
            made.append((name, self))
            return run(self, *given)

        monkeypatch.setattr(graph._Posted, name, noted)
    orders = []
    for backend in ("eager", "inductor"):
        made.clear()
        trained(backend)
        replay = made[: len(made) // (CALLS - 2)]
        assert len(replay) * (CALLS - 2) == len(made)
        messages = list(dict.fromkeys(message for _, message in replay))
        orders.append([(name, messages.index(message)) for name, message in replay])
    assert orders[0] == orders[1] and len(orders[0]) > 10
    assert MPI.COMM_WORLD.allgather(orders[1]) == [orders[1]] * 2
