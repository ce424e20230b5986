"""Recurrent layers and cells: mini-batches stay cut.

Layers need whole sequences and features: the axes that cut them move to the mini-batch for the
call, if it has a sample for each rank, and back. Otherwise sequences and features are gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distconv.ops.support.arguments import check_on_meta
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
        given_x = as_distributed(input, grid)
        along = {0, 1, 2} - {batch}
        moved = moved_elsewhere(given_x.shape, given_x.cuts, along, grid.topology)
        x = uncut(given_x, along, name) if moved is None else redistribute(given_x, moved, name)
        cuts = (), x.cuts[batch], ()

        def own(operand: Tensor) -> Tensor:
            if any(operand is state for state in states):
                return local_operand(operand, tuple(operand.shape), cuts, grid, name)
            return gather_whole(operand, name)

        begun = own(hx) if isinstance(hx, Tensor) else tuple(map(own, hx))
        output, *ends = function(x.shard, begun, list(map(own, params)), *options)
        shape = (*x.shape[:2], output.shape[2])
        result = DistTensor(output, shape, x.cuts, grid)
        return result if moved is None else redistribute(result, given_x.cuts, name), *(
            DistTensor(end, state.shape, cuts, grid)
            for end, state in zip(ends, states, strict=True)
        )


for _function in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu):
    _recurrent(_function)


def _gates(
    input: Any, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return a cell's linear functions of its input and of its state."""
    return F.linear(input, w_ih, b_ih), F.linear(hx, w_hh, b_hh)


def _lstm_cell(input: Any, hx: Sequence[Any], *weights: Any) -> tuple[Tensor, Tensor]:
    new, before = _gates(input, hx[0], *weights)
    i, f, g, o = (new + before).chunk(4, -1)
    state = f.sigmoid() * hx[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * state.tanh(), state


def _gru_cell(input: Any, hx: Any, *weights: Any) -> Tensor:
    (r, z, n), (r_before, z_before, n_before) = (
        gates.chunk(3, -1) for gates in _gates(input, hx, *weights)
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
_cell(torch.rnn_tanh_cell, lambda *operands: torch.add(*_gates(*operands)).tanh())
_cell(torch.rnn_relu_cell, lambda *operands: torch.add(*_gates(*operands)).relu())
