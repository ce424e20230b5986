"""What a program takes that is written by hand for one small layer on two ranks, and does no more.

`mpiexec -n 2 python -m benchmarks.handwritten` times a step of the layer 128 -> 128 of `bench
layer`: by distconv, by an autograd function of the fewest calls of torch and mpi4py, and without
communication. The function gathers the halo before the layer computes, and checks nothing; the
program adds up the gradient of the weights where autograd has made it. So its time is about the
least that any library takes whose operators are called from Python.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor, nn
from torch.autograd import Function

from distconv.model.parallelize import parallelize
from distconv.ops.conv.kernels import torch_gradients
from distconv.planning.alternation import Contender, alternate
from distconv.tensor.dist_tensor import distribute_tensor
from distconv.tools.bench.layer import CASES, Case, step_of
from distconv.tools.bench.report import Row, as_table, over
from distconv.tools.bench.settings import Settings, by


class HaloConvolution(Function):
    """A 3x3 convolution, padded by 1, of planes cut in height over the ranks 0 and 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        samples, channels, rows, columns = x.shape
        own, halo, outside, edge = _places(rows)
        messages = _Exchange(x[:, :, edge])
        buffer = x.new_empty(samples, channels, rows + 2, columns)
        buffer[:, :, outside] = 0
        buffer[:, :, own] = x
        buffer[:, :, halo] = messages.finish()
        ctx.save_for_backward(buffer, weight)
        return torch.conv2d(buffer, weight, padding=(0, 1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        buffer, weight = ctx.saved_tensors
        own, halo, _, edge = _places(buffer.shape[2] - 2)
        arguments = [1, 1], [0, 1], [1, 1], False, [0, 0], 1, [True, True, False]
        of_buffer, of_weight, _ = torch_gradients(grads[0], buffer, weight, None, *arguments)
        messages = _Exchange(of_buffer[:, :, halo])
        of_x = of_buffer[:, :, own]
        of_x[:, :, edge] += messages.finish()
        return of_x, of_weight


def _places(rows: int) -> tuple[slice, slice, slice, slice]:
    """Return the rows of the buffer that are the rank's own, the halo, and outside of the plane;
    and the row of its block that the other rank needs."""
    first, last = slice(0, 1), slice(rows + 1, rows + 2)
    own = slice(1, rows + 1)
    if MPI.COMM_WORLD.rank == 0:
        return own, last, first, slice(rows - 1, rows)
    return own, first, last, slice(0, 1)


class _Exchange:
    """A message to the other rank, and one as large from it."""

    def __init__(self, leaving: Tensor):
        comm = MPI.COMM_WORLD
        self._leaving, self._arriving = leaving.contiguous(), torch.empty(leaving.shape)
        self._requests = [
            comm.Irecv(self._arriving.numpy(), 1 - comm.rank),
            comm.Isend(self._leaving.numpy(), 1 - comm.rank),
        ]

    def finish(self) -> Tensor:
        MPI.Request.Waitall(self._requests)
        return self._arriving


class ByHand(nn.Module):
    """The layer of a rank."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        (self.weight,) = layer.parameters()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = HaloConvolution.apply(x, self.weight)
        return y


def step_by_hand(layer: ByHand, x: Tensor, dy: Tensor) -> Callable[[], None]:
    """Return a step: forward and backward, and the sum of the gradient over the ranks."""
    step = step_of(layer, x, dy)

    def run() -> None:
        step()
        gradient = layer.weight.grad
        assert gradient is not None
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, gradient.numpy())

    return run


def handwritten(settings: Settings, case: Case) -> Iterator[Row]:
    """Yield two rows of a layer with a 3x3 kernel, padding 1 and no bias; both ranks call it."""
    grid = settings.grid(4)
    torch.manual_seed(0)
    layer, x = case.make(), torch.randn(case.shape)
    dy = torch.randn(layer(x).shape)
    cut, dy_cut = distribute_tensor(x, grid), distribute_tensor(dy, grid)
    block, dy_block = cut.to_local().clone(), dy_cut.to_local().clone()
    runs = (
        step_of(parallelize(case.make(), grid), cut, dy_cut),
        step_by_hand(ByHand(layer), block.clone(), dy_block),
        step_of(case.make(), block, dy_block),
    )
    sides = [Contender(run, settings.threads) for run in runs]
    times = alternate(grid.comm, sides, settings.seconds)
    row = "handwritten", case.name, settings.configuration(grid, f"{by(block.shape)} on rank 0")
    yield over(row, "distconv over no communication", times[0], times[2], case.over_local)
    yield over(row, "by hand over no communication", times[1], times[2], None)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a table on rank 0; both ranks call it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.handwritten")
    parser.add_argument("--seconds", type=float, default=10.0, help="about how long it takes")
    settings = Settings(seconds=parser.parse_args(arguments).seconds)
    if settings.ranks != 2:
        parser.error("the function is written for two ranks; run it by mpiexec -n 2")
    torch.set_num_threads(settings.threads)
    (case,) = (case for case in CASES if case.name.startswith("128 -> 128"))
    rows = list(handwritten(settings, case))
    if MPI.COMM_WORLD.rank == 0:
        print(as_table(rows))


if __name__ == "__main__":
    main()
