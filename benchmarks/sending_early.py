"""Halos that leave a whole layer before they are needed, against halos that leave when they are.

`mpiexec -n 2 python -m benchmarks.sending_early` times chains of convolutions with ReLUs, cut in
height over two ranks, forward and backward to inputs and weights, with no more calls of torch than
they take. Distconv's own convolutions send as late as the first of these:

- overlapped: the halo travels while the layer computes its block; then what the halo contributes to
  the row at the cut is added. Backward, the gradient of the halo leaves before the rest is done.
- early: the row at the cut is computed first, with its halo, and leaves for the next layer before
  the block is computed. Backward, the row at the cut of the input's gradient is computed first, and
  that of the halo of the layer before leaves.
- assembled: the halo is waited for, and the layer computes on a buffer with it; forward only.
- assembled, early: the row at the cut leaves for the next layer before the buffer is computed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from distconv.grid.process_grid import ProcessGrid
from distconv.ops.conv.kernels import torch_gradients
from distconv.planning.alternation import Contender, alternate
from distconv.tools.bench.report import Row, as_table, over
from distconv.tools.bench.settings import Settings, by
from distconv.transport.interface import Request


class Case(NamedTuple):
    """A chain of layers with as many channels everywhere, and its planes as a whole."""

    channels: int
    rows: int
    columns: int
    layers: int


CASES = (Case(32, 128, 128, 8), Case(64, 64, 64, 8), Case(64, 256, 256, 4), Case(128, 32, 32, 8))


class Result(NamedTuple):
    """A rank's blocks of the outputs and of the gradient of the inputs, and its parts of the
    gradients of the weights, the last layer's first."""

    outputs: Tensor
    of_inputs: Tensor
    of_weights: list[Tensor]


Saved = list[tuple[Tensor, Tensor]]
"""The block of inputs of each layer, and its halo."""


class Arriving(NamedTuple):
    """A row that is on its way here, while one as large goes the other way."""

    row: Tensor
    request: Request

    def finish(self) -> Tensor:
        """Wait for it."""
        self.request.wait()
        return self.row


class Chain:
    """A rank's half of a chain of 3x3 convolutions with padding 1, each followed by a ReLU."""

    def __init__(
        self, grid: ProcessGrid, x: Tensor, weights: Sequence[Tensor], of_outputs: Tensor
    ) -> None:
        rows = x.shape[2]
        upper = grid.rank == 0
        self.x, self.weights, self.of_outputs = x, weights, of_outputs
        self._grid, self._upper = grid, upper
        self._cut = slice(rows - 1, rows) if upper else slice(0, 1)
        """The row at the cut, which the other rank needs."""
        self._two = slice(rows - 2, rows) if upper else slice(0, 2)
        """That and the one before."""
        self._tap = slice(2, 3) if upper else slice(0, 1)
        """The row of a kernel that meets the halo where the kernel is at the row at the cut."""
        self._taps = [w[:, :, self._tap].contiguous() for w in weights]

    def overlapped(self) -> Result:
        """Send each halo when its layer begins."""
        x, saved = self.x, []
        for weight, taps in zip(self.weights, self._taps, strict=True):
            arriving = self._send(x[:, :, self._cut])
            y = torch.conv2d(x, weight, padding=1)
            halo = arriving.finish()
            y[:, :, self._cut] += torch.conv2d(halo, taps, padding=(0, 1))
            saved.append((x, halo))
            x = y.relu_()
        return self._backward(x, saved)

    def early(self) -> Result:
        """Send each halo when the layer before its own begins, forward and backward."""
        return self._backward_early(*self._forward_early())

    def early_forward(self) -> Result:
        """Send each halo early, and its gradient when its layer begins."""
        return self._backward(*self._forward_early())

    def _forward_early(self) -> tuple[Tensor, Saved]:
        x, saved = self.x, []
        arriving = self._send(x[:, :, self._cut])
        for i, weight in enumerate(self.weights):
            halo = arriving.finish()
            row = torch.conv2d(
                self._beside(x[:, :, self._two], halo), weight, padding=(0, 1)
            ).relu_()
            if i + 1 < len(self.weights):
                arriving = self._send(row)
            y = torch.conv2d(x, weight, padding=1).relu_()
            y[:, :, self._cut] = row
            saved.append((x, halo))
            x = y
        return x, saved

    def _backward(self, y: Tensor, saved: Saved) -> Result:
        outputs, dy, of_weights = y, self.of_outputs, []
        for (x, halo), weight, taps in reversed(
            list(zip(saved, self.weights, self._taps, strict=True))
        ):
            dy = _relu_gradient(dy, y)
            dhalo, dtaps = _gradients(dy[:, :, self._cut], halo, taps, (0, 1))
            arriving = self._send(dhalo)
            dx, dweight = _gradients(dy, x, weight, (1, 1))
            dweight[:, :, self._tap] += dtaps
            dx[:, :, self._cut] += arriving.finish()
            of_weights.append(dweight)
            y, dy = x, dx
        return Result(outputs, dy, of_weights)

    def _backward_early(self, y: Tensor, saved: Saved) -> Result:
        of_weights = []
        dy = _relu_gradient(self.of_outputs, y)
        arriving = self._send_gradient(dy[:, :, self._cut], len(saved) - 1, saved)
        for i in reversed(range(len(saved))):
            (x, halo), weight = saved[i], self.weights[i]
            # The row at the cut: what this rank's last two rows give to it, and the other rank's.
            last = self._two
            two, _ = _gradients(dy[:, :, last], x[:, :, last], weight, (1, 1), of_weight=False)
            row = two[:, :, 1:] if self._upper else two[:, :, :1]
            row += arriving.finish()
            if i:
                row = _relu_gradient(row, x[:, :, self._cut])
                arriving = self._send_gradient(row, i - 1, saved)
            dx, dweight = _gradients(dy, x, weight, (1, 1))
            _, dtaps = _gradients(dy[:, :, self._cut], halo, self._taps[i], (0, 1), of_x=False)
            dweight[:, :, self._tap] += dtaps
            dy = _relu_gradient(dx, x) if i else dx
            dy[:, :, self._cut] = row
            of_weights.append(dweight)
        return Result(y, dy, of_weights)

    def assembled(self) -> Tensor:
        """Return the outputs; wait for each halo when its layer begins."""
        x = self.x
        for weight in self.weights:
            arriving = self._send(x[:, :, self._cut])
            x = torch.conv2d(self._buffer(x, arriving), weight, padding=(0, 1)).relu_()
        return x

    def assembled_early(self) -> Tensor:
        """Return the outputs; send each halo before the layer before its own computes its block."""
        x, rows = self.x, self.x.shape[2]
        arriving = self._send(x[:, :, self._cut])
        for i, weight in enumerate(self.weights):
            buffer = self._buffer(x, arriving)
            if i + 1 < len(self.weights):
                three = buffer[:, :, rows - 1 :] if self._upper else buffer[:, :, :3]
                arriving = self._send(torch.conv2d(three, weight, padding=(0, 1)).relu_())
            x = torch.conv2d(buffer, weight, padding=(0, 1)).relu_()
        return x

    def alone(self) -> None:
        """Compute on the block as if it were all, without messages."""
        inputs = [self.x]
        for weight in self.weights:
            inputs.append(torch.conv2d(inputs[-1], weight, padding=1).relu_())
        y, dy = inputs.pop(), self.of_outputs
        for weight in reversed(self.weights):
            x = inputs.pop()
            dy, _ = _gradients(_relu_gradient(dy, y), x, weight, (1, 1))
            y = x

    def alone_forward(self) -> None:
        """Do the forward pass of `alone`, and keep nothing."""
        x = self.x
        for weight in self.weights:
            x = torch.conv2d(x, weight, padding=1).relu_()

    def _send(self, row: Tensor) -> Arriving:
        transport, other = self._grid.transport, 1 - self._grid.rank
        arriving = torch.empty(row.shape, dtype=row.dtype)
        messages = [(other, arriving)], [(other, row.contiguous())]
        return Arriving(arriving, transport.exchange(*messages, transport.next_tag()))

    def _send_gradient(self, dy: Tensor, i: int, saved: Saved) -> Arriving:
        """Send the gradient of the halo of a layer, of that of its row at the cut."""
        dhalo, _ = _gradients(dy, saved[i][1], self._taps[i], (0, 1), of_weight=False)
        return self._send(dhalo)

    def _beside(self, rows: Tensor, halo: Tensor) -> Tensor:
        return torch.cat((rows, halo) if self._upper else (halo, rows), 2)

    def _buffer(self, x: Tensor, arriving: Arriving) -> Tensor:
        samples, channels, rows, columns = x.shape
        halo, outside = slice(rows + 1, rows + 2), slice(0, 1)
        if not self._upper:
            halo, outside = outside, halo
        shape = samples, channels, rows + 2, columns
        buffer = torch.empty(shape, dtype=x.dtype, memory_format=torch.channels_last)
        buffer[:, :, outside] = 0
        buffer[:, :, 1 : rows + 1] = x
        buffer[:, :, halo] = arriving.finish()
        return buffer


def _gradients(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    padding: tuple[int, int],
    of_x: bool = True,
    of_weight: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of a convolution's input and weight, as far as they are asked for."""
    arguments = [1, 1], padding, [1, 1], False, [0, 0], 1, [of_x, of_weight, False]
    dx, dweight, _ = torch_gradients(dy, x, weight, None, *arguments)
    return dx, dweight


def _relu_gradient(dy: Tensor, y: Tensor) -> Tensor:
    """Return the gradient of a ReLU's input, by its output."""
    dx: Tensor = torch.ops.aten.threshold_backward(dy, y, 0)
    return dx


def chain_of(case: Case, grid: ProcessGrid, dtype: torch.dtype = torch.float32) -> Chain:
    """Return this rank's half of a chain of random numbers; all ranks draw the same."""
    x, of_outputs, weights = numbers(case, dtype)
    half = case.rows // 2
    own = slice(0, half) if grid.rank == 0 else slice(half, case.rows)
    form = torch.channels_last
    blocks = (t[:, :, own].contiguous(memory_format=form) for t in (x, of_outputs))
    return Chain(grid, next(blocks), weights, next(blocks))


def numbers(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return the whole input, the gradient of the whole output, and the weights."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype)

    plane = 1, case.channels, case.rows, case.columns
    scale = (2 / (9 * case.channels)) ** 0.5
    weights = [scale * draw(case.channels, case.channels, 3, 3) for _ in range(case.layers)]
    return draw(*plane), draw(*plane), weights


def sending_early(settings: Settings, cases: Sequence[Case] = CASES) -> Iterator[Row]:
    """Yield the rows of each case; both ranks call it."""
    for case in cases:
        grid = settings.grid(4)
        chain = chain_of(case, grid)
        name = f"{case.layers} layers {case.channels} -> {case.channels}"
        configuration = settings.configuration(grid, by(chain.x.shape) + " on each rank")
        row = "sending_early", name, configuration
        whole = chain.overlapped, chain.alone, chain.early, chain.early_forward
        overlapped, alone, early, early_forward = _times(whole, grid, settings)
        yield over(row, "overlapped over alone", overlapped, alone, None)
        yield over(row, "early over overlapped", early, overlapped, None)
        yield over(row, "early, forward only, over overlapped", early_forward, overlapped, None)
        forward = chain.assembled, chain.alone_forward, chain.assembled_early
        assembled, alone, early = _times(forward, grid, settings)
        yield over(row, "assembled over alone, forward pass", assembled, alone, None)
        yield over(row, "assembled, early, over assembled, forward pass", early, assembled, None)


def _times(
    runs: Sequence[Callable[[], object]], grid: ProcessGrid, settings: Settings
) -> tuple[list[float], ...]:
    sides = [Contender(run, settings.threads) for run in runs]
    return alternate(grid.comm, sides, settings.seconds)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a table on rank 0; both ranks call it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sending_early")
    parser.add_argument("--seconds", type=float, default=8.0, help="about how long each half takes")
    settings = Settings(seconds=parser.parse_args(arguments).seconds)
    if settings.ranks != 2:
        parser.error("the chains are cut in two; run it by mpiexec -n 2")
    torch.set_num_threads(settings.threads)
    rows = list(sending_early(settings))
    if settings.grid(4).rank == 0:
        print(as_table(rows))


if __name__ == "__main__":
    main()
