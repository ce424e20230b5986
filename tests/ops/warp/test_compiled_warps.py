"""Replays of compiled warps move the boxes of their own call, with the bits of eager warps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor

import distconv as dc
from distconv.compiling import capture
from distconv.compiling.trace import OpaqueCall, Pass
from tests.ops.warp.test_warp_properties import identity, no_plane_is_small
from tests.support.arriving import arriving
from tests.support.verdicts import one_verdict

__all__ = ["no_plane_is_small"]  # a fixture that all tests of this file use

PLANE = (40, 6, 5)
SHIFTS = 0.0, 0.5, 1.5, 6.0, 0.0, 20.0
"""The displacements in voxels of the calls, of which the third and later ones are replays."""


def _warped_twice(image: Tensor, flow: Tensor, weight: Tensor) -> Tensor:
    """Return a loss of an image that is warped by a flow, and of the flow composed with itself."""
    points = identity(PLANE, True, flow.dtype) + flow
    moved = F.grid_sample(image * weight, points, padding_mode="border", align_corners=True)
    again = F.grid_sample(flow.movedim(-1, 1), points, align_corners=True)
    return (moved.tanh() * weight).sum() + again.square().mean()


def _inputs(shift: float, grid: dc.ProcessGrid) -> tuple[dc.DistTensor, dc.DistTensor]:
    """Return an image, and a flow by up to `shift` voxels along the first dimension."""
    g = torch.Generator().manual_seed(3)
    image = dc.distribute_tensor(torch.randn(1, 5, *PLANE, generator=g), grid)
    flow = torch.rand(1, *PLANE, 3, generator=g) * torch.tensor([0.0, 0.1, 2 * shift / 39])
    cuts = image.grid_layout.cuts(5)
    spread = dc.distribute_tensor(flow, grid, dc.Layout.of((cuts[0], *cuts[2:], ())))
    return image.requires_grad_(), spread.requires_grad_()


def _call(program: Callable[..., Any], shift: float, grid: dc.ProcessGrid) -> Any:
    """Return the loss and the gradients of a call, and the bytes that arrive in both passes."""
    image, flow = _inputs(shift, grid)
    weight = torch.full((1,), 0.5)
    with arriving(grid) as sizes:
        loss = program(image, flow, weight)
        loss.backward()
    assert image.grad is not None and flow.grad is not None
    return [x.to_local() for x in (loss.detach(), image.grad, flow.grad)], sum(sizes)


def _check(grid: dc.ProcessGrid, backend: str | None = None) -> None:
    compiled = dc.compile(_warped_twice, backend=backend)
    moved = []
    with one_verdict():
        for shift in SHIFTS:
            expected, bytes_of_eager = _call(_warped_twice, shift, grid)
            actual, arrived = _call(compiled, shift, grid)
            assert all(map(torch.equal, actual, expected))
            assert 0 <= arrived - bytes_of_eager < 512  # the ranks compare their cases
            moved.append(bytes_of_eager)
        assert compiled.replays == len(SHIFTS) - 2
        assert max(moved[2:]) > 2 * min(moved[2:])


@pytest.mark.parallel([2, 3, 4])
@pytest.mark.filterwarnings("error:compile")
def test_replays_have_the_bits_and_the_bytes_of_eager_warps() -> None:
    four = MPI.COMM_WORLD.size == 4
    _check(dc.ProcessGrid(depth=2, height=2) if four else dc.ProcessGrid(depth=-1))


@pytest.mark.parallel([2])
@pytest.mark.filterwarnings("error:compile")
def test_warps_stay_out_of_the_graphs_of_compilers() -> None:
    _check(dc.ProcessGrid(depth=-1), "aot_eager")


@pytest.mark.parallel([2])
@pytest.mark.filterwarnings("error:compile")
def test_replays_without_gradients_and_of_kept_graphs() -> None:
    grid = dc.ProcessGrid(depth=-1)
    compiled = dc.compile(_warped_twice)
    with torch.no_grad():
        for shift in SHIFTS[:4]:
            image, flow = _inputs(shift, grid)
            found, expected = (f(image, flow, torch.ones(1)) for f in (compiled, _warped_twice))
            assert torch.equal(found.to_local(), expected.to_local())
    assert compiled.replays == 2
    for shift in SHIFTS[:4]:
        image, flow = _inputs(shift, grid)
        loss = compiled(image, flow, torch.ones(1))
        loss.backward(retain_graph=True)
        once = [x.grad.to_local().clone() for x in (image, flow)]
        loss.backward()
        for x, first in zip((image, flow), once, strict=True):
            assert torch.equal(x.grad.to_local(), 2 * first)
    assert compiled.replays == 4


@pytest.mark.parallel([1])
def test_opaque_calls_are_not_captured_in_graphs_of_a_device() -> None:
    one = Pass()
    one.graph.call_function(OpaqueCall(lambda: ()))
    assert "boxes that depend on values" in capture.why_not(one, torch.device("cpu"))
