"""nn.LSTM, nn.GRU and nn.RNN, and their cells, on partitioned mini-batches.

A layer computes on complete sequences and features. If the mini-batch has a sample for each rank,
the grid axes that partition sequences or features partition the mini-batch during the call, and the
result is redistributed back. Otherwise sequences and features are gathered. Rows of images, as
sequences, are merged samples (`support/merged.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distconv.geometry.layout import Cuts
from distconv.ops.support.arguments import check_on_meta
from distconv.ops.support.merged import factors_of, in_blocks, merge_as, unmerge, unmerged
from distconv.ops.support.operands import (
    as_distributed,
    common_grid,
    gather_whole,
    local_operand,
    moved_elsewhere,
    uncut,
)
from distconv.tensor.dispatch import implements, refuse
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.redistribution import redistribute


def _recurrent(function: Callable[..., Any]) -> None:
    name = function.__name__

    @implements(function)
    def rule(
        input: Tensor,
        hx: Tensor | Sequence[Tensor],
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool = False,
    ) -> tuple[DistTensor, ...]:
        states = [hx] if isinstance(hx, Tensor) else list(hx)
        random = dropout and train and num_layers > 1
        if random or input.dim() != 3 or not isinstance(params, (tuple, list)):
            what = "dropout between layers" if random else "a packed sequence"
            way_out = "Use dropout layers between recurrent ones, and sequences of one length"
            refuse(name, f"{what} is not supported", input, *states, way_out=way_out)
        grid = common_grid(name, (input, *states, *params))
        options = has_biases, num_layers, dropout, train, bidirectional, batch_first
        given = hx if isinstance(hx, Tensor) else tuple(hx)
        check_on_meta(function, input, given, tuple(params), *options)
        batch = 0 if batch_first else 1
        x = as_distributed(input, grid)
        if any(len(run) > 1 for d, run in enumerate(factors_of(x)) if d != batch):
            x = as_distributed(in_blocks(x), grid)
        # Merged samples, such as rows of images, are several dimensions of `apart`.
        factors = factors_of(x)[batch]
        n = len(factors)
        lead = slice(batch, batch + n)
        apart = x if n == 1 else unmerged(x)
        along = set(range(apart.dim())) - set(range(apart.dim())[lead])
        moved = moved_elsewhere(apart.shape, apart.cuts, along, grid.topology)
        own = uncut(apart, along, name) if moved is None else redistribute(apart, moved, name)
        cuts = (), *own.cuts[lead], ()

        def of_samples(operand: Tensor) -> Tensor:
            if any(operand is state for state in states):
                whole = unmerge(operand, ((operand.shape[0],), factors, (operand.shape[2],)))
                part: Tensor = local_operand(whole, tuple(whole.shape), cuts, grid, name)
                return part.flatten(1, n)
            return gather_whole(operand, name)

        begun = of_samples(hx) if isinstance(hx, Tensor) else tuple(map(of_samples, hx))
        block = own.shard.flatten(batch, batch + n - 1)
        output, *ends = function(block, begun, list(map(of_samples, params)), *options)
        here = own.shard.shape[lead]

        def whole(block: Tensor, place: int, shape: Sequence[int], cuts: Cuts) -> DistTensor:
            """Return this rank's `block` of a result as a DistTensor.

            `shape` is the global shape of the result, and `place` is its dimension of samples.
            `cuts` are the grid axes that partition each dimension after merged samples are split
            into their factors.
            """
            split = *shape[:place], *factors, *shape[place + 1 :]
            return DistTensor(block.unflatten(place, here), split, cuts, grid)

        result = whole(output, batch, (*x.shape[:2], output.shape[2]), own.cuts)
        result = result if moved is None else redistribute(result, apart.cuts, name)
        made = (
            result,
            *(whole(end, 1, state.shape, cuts) for end, state in zip(ends, states, strict=True)),
        )
        shapes = (*x.shape[:2], output.shape[2]), *(state.shape for state in states)
        return made if n == 1 else tuple(map(merge_as, made, shapes))


for _function in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu):
    _recurrent(_function)


def _linear_terms(
    input: Any, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the linear functions of a cell's input and state from which gates are computed."""
    return F.linear(input, w_ih, b_ih), F.linear(hx, w_hh, b_hh)


def _lstm_cell(input: Any, hx: Sequence[Any], *weights: Any) -> tuple[Tensor, Tensor]:
    new, before = _linear_terms(input, hx[0], *weights)
    i, f, g, o = (new + before).chunk(4, -1)
    state = f.sigmoid() * hx[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * state.tanh(), state


def _gru_cell(input: Any, hx: Any, *weights: Any) -> Tensor:
    (r, z, n), (r_before, z_before, n_before) = (
        gates.chunk(3, -1) for gates in _linear_terms(input, hx, *weights)
    )
    new = (n + (r + r_before).sigmoid() * n_before).tanh()
    return new + (z + z_before).sigmoid() * (hx - new)


def _cell(function: Callable[..., Any], rule: Callable[..., Any]) -> None:
    @implements(function)
    def checked(
        input: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None
    ) -> Any:
        given = tuple(hx) if isinstance(hx, (tuple, list)) else hx
        check_on_meta(function, input, given, w_ih, w_hh, b_ih, b_hh)
        return rule(input, given, w_ih, w_hh, b_ih, b_hh)


_cell(torch.lstm_cell, _lstm_cell)
_cell(torch.gru_cell, _gru_cell)
_cell(torch.rnn_tanh_cell, lambda *operands: torch.add(*_linear_terms(*operands)).tanh())
_cell(torch.rnn_relu_cell, lambda *operands: torch.add(*_linear_terms(*operands)).relu())
