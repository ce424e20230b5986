"""All that one rank does in a training step: local operators, messages, reductions and memory.

The step is run in a dry run, forward, backward and optimizer: torch's operators on the rank's
blocks are noted below autograd, so the record is that of the very code that will run, with its
order and its overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from distconv.comm.ledger import without_counting
from distconv.geometry.layout import Layout
from distconv.model.input_layouts import match_layouts, redistribute_inputs
from distconv.planning.counted_messages import CountedMessages
from distconv.planning.dry_gradients import DryGradients
from distconv.planning.dry_run import DryRunGrid, without_elements
from distconv.planning.recorder import FunctionCalls, Recorder
from distconv.planning.recording import Place, Recording
from distconv.tensor.dispatch import UnsupportedOperation
from distconv.tensor.module_call import enter_call
from distconv.tensor.ownership import own

Loss: TypeAlias = Callable[[Any], Tensor]
"""Takes what the module returns, and returns the scalar that is minimised."""

OptimizerFactory: TypeAlias = Callable[[Any], torch.optim.Optimizer]


def record_step(
    module: nn.Module,
    shapes: Sequence[tuple[int, ...]],
    extents: Mapping[str, int],
    *,
    rank: int | None = None,
    layouts: Mapping[str, Layout] | None = None,
    layout: Layout | None = None,
    dtype: torch.dtype | None = None,
    loss: Loss,
    optimizer: OptimizerFactory,
    bucket_bytes: int = 2**20,
    input_gradients: bool = False,
    gpu: bool = False,
) -> Recording:
    """Return what a rank of a grid does in a training step; no communication, nothing is computed.

    Parameters
    ----------
    module: as it is before `parallelize`.
    shapes: the global shape of each input.
    extents: ranks along the axes of the grid.
    rank: the rank whose part is played; by default the one in the middle of every axis.
    layouts, bucket_bytes: as for `parallelize`.
    layout: how the inputs are cut; by default every dimension over the axis of its name.
    dtype: of the inputs; that of the first parameter by default.
    loss: takes the output, and returns the scalar whose gradients are taken.
    optimizer: takes the parameters.
    input_gradients: whether the inputs require gradients, too.
    gpu: whether the ranks compute on GPUs, for which some operators are written otherwise.

    Raises
    ------
    UnsupportedOperation
        Where the module cannot run on the grid.
    RuntimeError
        Where the step raises, naming the layer; also where it asks for the elements of a tensor.
    ValueError
        For a module that is parallelized, or has parameters without a shape.
    """
    transport = CountedMessages()
    grid = DryRunGrid(extents, rank, transport=transport, gpu=gpu)
    hollow = without_elements(module, "record_step")
    matched = match_layouts(hollow, layouts or {})
    recorder = Recorder(hollow, transport)
    redistribute_inputs(hollow, matched)
    parameters = list(hollow.parameters())
    own((*parameters, *hollow.buffers()), grid.size)
    if dtype is None:
        dtype = next((p.dtype for p in parameters if p.is_floating_point()), torch.float32)
    stepping = optimizer(parameters) if parameters else None
    state = [] if stepping is None else _make_state(stepping, parameters)
    recorder.memory.hold(parameters, "parameters")
    recorder.memory.hold(hollow.buffers(), "parameters")
    recorder.memory.hold([x for x in state if x.is_meta], "optimizer state")
    gradients = DryGradients(parameters, grid, bucket_bytes, recorder)
    inputs = [grid.tensor(shape, layout, dtype) for shape in shapes]
    recorder.memory.hold([x.shard for x in inputs], "other")
    if input_gradients:
        for x in inputs:
            x.requires_grad_()
    scope = enter_call()
    try:
        with without_counting(), recorder, FunctionCalls(recorder):
            try:
                output = hollow(*inputs)
            finally:
                scope.leave()
            recorder.move(Place("loss", "forward"))
            scalar = loss(output)
            del output
            recorder.turn()
            if scalar.requires_grad:
                scalar.backward()
            gradients.finish()
            del scalar
            recorder.place = Place("optimizer", "optimizer")
            recorder.going_back = False
            if stepping is not None:
                stepping.step()
    except UnsupportedOperation:
        raise
    except Exception as error:
        name, part = recorder.where
        raise RuntimeError(
            f"{name} ({type(part).__name__}) raised {type(error).__name__}: {error}"
        ) from error
    finally:
        recorder.remove()
        gradients.remove()
    return recorder.recording(grid)


def _make_state(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Let an optimizer make its state, as it does in the first step, and return it."""
    for p in parameters:
        p.grad = torch.empty_like(p) if p.requires_grad else None
    optimizer.step()
    optimizer.zero_grad()
    return [x for each in optimizer.state.values() for x in each.values() if torch.is_tensor(x)]
