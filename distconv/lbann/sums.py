"""Sums of DCTensors that an LBANN program adds up over ranks once more, which must change nothing.

With LBANN's class, a reduction covers the rank's block only, and the program extends it to the
sample by `torch.distributed.all_reduce`. Here it covers the sample from the start. So `add_up`
leaves a sum as it is. A mean divided by the number of ranks after adding up would be too small.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed
from torch.distributed import ReduceOp

from distconv.geometry.layout import cutting_axes
from distconv.tensor.base import DistTensorBase
from distconv.tensor.dispatch import refuse
from distconv.tensor.nested import tensors_in

_SUMS = frozenset((torch.sum, Tensor.sum, torch.nansum, Tensor.nansum, torch.count_nonzero))

_LOSSES = frozenset((F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss, F.binary_cross_entropy))

_KEEPING = frozenset(
    (
        *(torch.clone, torch.detach, torch.stack, torch.cat, torch.squeeze, torch.unsqueeze),
        *(Tensor.clone, Tensor.detach, Tensor.squeeze, Tensor.unsqueeze, Tensor.__getitem__),
        *(Tensor.to, Tensor.float, Tensor.double, Tensor.contiguous, Tensor.reshape, Tensor.view),
    )
)

_ADDING = frozenset((torch.add, torch.sub, Tensor.__add__, Tensor.__sub__, Tensor.add, Tensor.sub))

_SCALING = frozenset(
    (
        *(torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.neg, Tensor.__neg__),
        *(torch.div, Tensor.div, Tensor.__truediv__),
    )
)


def summands_of(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    result: DistTensorBase,
) -> frozenset[str]:
    """Return the grid axes over which a program for LBANN's DistConv would all-reduce `result`.

    `result` is `func(*args, **kwargs)`. LBANN's DCTensor sums the rank's block only, so the program
    adds up the ranks' sums itself; here `result` is the whole sum already. Empty if `result` is no
    sum over ranks, or not known to be one.
    """
    tensors = tensors_in(args, kwargs)
    operands = [x for x in tensors if isinstance(x, DistTensorBase)]
    if func in _SUMS or (func in _LOSSES and kwargs.get("reduction") == "sum"):
        over = {axis for x in operands for axis in cutting_axes(x.cuts)}
        return frozenset(over - set(cutting_axes(result.cuts))).union(*map(_summands, operands))
    alike = len(set(map(_summands, operands))) == 1 and len(operands) == len(tensors)
    rounded = kwargs.get("rounding_mode") or not result.is_floating_point()
    if not alike or rounded or not isinstance(args[0], (DistTensorBase, tuple, list)):
        return frozenset()
    linear = (
        func in _KEEPING
        or (func in _ADDING and len(operands) == 2)
        or (func in _SCALING and len(operands) == 1)
    )
    return _summands(operands[0]) if linear else frozenset()


def _summands(x: Any) -> frozenset[str]:
    found: frozenset[str] = x.summands
    return found


def add_up(tensor: Any, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
    """Return a tensor that is already the sum over the ranks of `group`, without adding it up.

    It stands in for `torch.distributed.all_reduce`, whose arguments it has. All ranks of the group
    call it, and exchange one number to stay in step. Raises UnsupportedOperation if the tensor is
    no such sum.
    """
    grid, ranks = tensor.grid, distributed.get_process_group_ranks(group)
    outside = sorted(set(ranks) - set(grid.ranks))
    places = [grid.topology.coordinates(grid.ranks.index(r)) for r in ranks if r in grid.ranks]
    axes = {axis for axis in places[0] if len({place[axis] for place in places}) > 1}
    if outside or not axes <= tensor.summands or (axes and op != ReduceOp.SUM):
        refuse(
            "torch.distributed.all_reduce",
            f"the ranks {outside} have other samples"
            if outside
            else "it is no sum over the ranks of the group, but of the whole sample already, as "
            "every reduction of a DCTensor",
            tensor,
            way_out="Leave the all_reduce out, and what divides by the number of ranks; to reduce "
            "over replicas, pass x.to_replicate().detach()",
        )
    tensor.summands -= axes
    return distributed.all_reduce(torch.zeros(1, device=tensor.device), op, group, async_op)
