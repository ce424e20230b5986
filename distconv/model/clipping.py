"""Norms of many tensors, also of sharded ones, in few messages, and clipping of gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from distconv.comm.collectives import all_gather
from distconv.geometry.layout import cutting_axes
from distconv.grid.interface import Grid
from distconv.ops.support.operands import shard_of
from distconv.tensor.base import as_list, shards_of
from distconv.tensor.dist_tensor import DistTensor


def tensor_norms(tensors: Sequence[Tensor], order: float = 2.0) -> list[Tensor]:
    """Return the norm of order `order` of each tensor, as plain scalar tensors without gradient.

    The norm of a DistTensor is the norm of the global tensor. Collective: one all-gather serves all
    tensors partitioned over the same axes of a grid. Plain tensors need no message.
    """
    with torch.no_grad():
        norms = [_norm(shard_of(x), order) for x in tensors]
        cut: dict[tuple[Grid, tuple[str, ...], torch.dtype], list[int]] = defaultdict(list)
        for i, x in enumerate(tensors):
            if isinstance(x, DistTensor):
                cut[x.grid, cutting_axes(x.cuts), norms[i].dtype].append(i)
        for (grid, axes, _), numbers in cut.items():
            blocks = all_gather(torch.stack([norms[i] for i in numbers]), grid, axes)
            whole = torch.linalg.vector_norm(blocks, order, dim=0)
            for i, norm in zip(numbers, whole.unbind(), strict=True):
                norms[i] = norm
    return norms


def _norm(block: Tensor, order: float) -> Tensor:
    # A block may be empty, and torch raises for the maximum of an empty tensor.
    if not block.numel():
        return block.new_zeros((), dtype=block.dtype.to_real())
    return torch.linalg.vector_norm(block, order)


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale all gradients down to a norm of at most `max_norm`, in few messages.

    This is torch.nn.utils.clip_grad_norm_ for models with sharded parameters. All ranks of the grid
    call it together, after `backward()`. One message carries the norms of all parameters sharded
    over the same axes; torch's own function sends a message for each parameter, and returns a
    DistTensor.

    Parameters
    ----------
    parameters: parameters; those without a gradient are ignored.
    max_norm, norm_type, error_if_nonfinite: as torch's; orders are positive.

    Returns
    -------
    The norm of all gradients before they are scaled, a tensor of one number, the same on all ranks.

    Raises
    ------
    ValueError
        Where `norm_type` is not positive.
    RuntimeError
        Where `error_if_nonfinite` is set and the norm is not finite.

    Examples
    --------
    >>> grid = dc.ProcessGrid(height=2)
    >>> model = dc.parallelize(nn.Conv2d(1, 1, 1, bias=False), grid)
    >>> model(dc.distribute_tensor(torch.ones(1, 1, 2, 2), grid)).sum().backward()
    >>> dc.clip_grad_norm_(model.parameters(), 1.0)
    tensor(4.)
    >>> round(model.weight.grad.item(), 4)
    1.0
    """
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(
            f"clip_grad_norm_: norm_type={norm_type} is not positive; choose 2.0, 1.0 or inf, for "
            "example"
        )
    gradients = [p.grad for p in as_list(parameters) if p.grad is not None]
    with torch.no_grad():
        norms = tensor_norms(gradients, norm_type)
        if not norms:
            return torch.tensor(0.0)
        total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(
                f"clip_grad_norm_: the norm of order {norm_type} of all gradients is {total}; "
                "pass error_if_nonfinite=False to scale them anyway"
            )
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for block in shards_of(gradients):
            block.mul_(factor)
    return total
