"""Rules of in-place functions, computed by functions that return a new tensor.

The written tensor may be plain. A plain tensor to which distributed values are written under
autograd becomes a DistTensor: the Python object stays the same. Outside autograd it stays plain,
and gets the global values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any
from weakref import getweakrefcount

import torch
from torch import Tensor
from torch.utils import swap_tensors

from distconv import torch_private
from distconv.geometry.layout import Cuts, cuts_of_broadcast, cutting_axes
from distconv.grid.interface import Grid
from distconv.ops.support.arguments import check_on_meta
from distconv.ops.support.operands import box_on_rank, common_grid, gather_whole
from distconv.ops.support.spectra import is_fresh_spectrum, zeros
from distconv.tensor.aliasing import prepare_write
from distconv.tensor.base import tensors_in
from distconv.tensor.dispatch import implements, refuse
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.ownership import enter, is_owned, origins


def implements_in_place(
    method: Callable[..., Any],
    rule: Callable[..., Any],
    into_plain: Callable[..., Any] | None = None,
) -> None:
    """Register `method` as the in-place form of `rule`, which writes to the first argument.

    `into_plain` writes to a plain first argument outside autograd. Without it, or if it returns
    `NotImplemented`, all other operands are gathered on every rank.
    """
    name = method.__name__

    @implements(method)
    def writing(input: Any, *args: Any, **kwargs: Any) -> Any:
        check_on_meta(method, input, *args, **kwargs)
        if not isinstance(input, DistTensor):
            operands = tensors_in(args, kwargs)
            if is_recorded((input, *operands)):
                return become_distributed(
                    name, input, operands, lambda x: writing(x, *args, **kwargs)
                )
            result = NotImplemented if into_plain is None else into_plain(input, *args, **kwargs)
            if result is NotImplemented:
                common_grid(name, operands)
                named = {key: gather_whole(x, name) for key, x in kwargs.items()}
                result = method(input, *(gather_whole(x, name) for x in args), **named)
            return result
        prepare_write(input, name)
        recorded = torch.is_grad_enabled() and input.requires_grad
        # The backward pass may need the overwritten values.
        before = input.clone() if recorded else input
        return input.copy_(rule(before, *args, **kwargs))


def is_recorded(tensors: Iterable[Tensor]) -> bool:
    """Return whether autograd records an operation on these tensors."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


_NOTES: list[MutableMapping[Tensor, Any]] = []


@contextmanager
def noted_in(*notes: MutableMapping[Tensor, Any]) -> Iterator[None]:
    """Allow plain tensors in the mappings `notes` to become distributed within this context.

    The mappings refer to tensors weakly; any other weak reference to a tensor would prevent the
    change. A tensor that becomes distributed is removed from the mappings.
    """
    _NOTES.extend(notes)
    try:
        yield
    finally:
        del _NOTES[-len(notes) :]


def become_distributed(
    operator: str,
    plain: Tensor,
    operands: Iterable[Tensor],
    write: Callable[[DistTensor], Any],
    cuts: Cuts | None = None,
) -> Any:
    """Turn a plain tensor into a DistTensor, and let `write` write to it. Collective.

    Returns the result of `write`, with the plain tensor in place of its argument. If `write`
    raises, the plain tensor does not change. A plain view, `base[...]` of integers and slices,
    becomes a view of `base`, and `base` becomes distributed even if `write` raises.

    Parameters
    ----------
    operator: the called function, for errors.
    plain: the tensor to change, equal on all ranks.
    operands: the written values, and their positions; some of them are distributed.
    write: takes the DistTensor, and writes to it.
    cuts: the grid axes that partition each dimension; by default the partition of the operands, the
        largest first.

    Raises UnsupportedOperation on every rank, before any message, if something else refers to the
    plain tensor.
    """
    distributed = [x for x in operands if isinstance(x, DistTensor)]
    grid, shape = common_grid(operator, distributed), tuple(plain.shape)
    base = torch_private.base_of(plain)
    place = None if base is None else _slices_of(base, plain)
    if base is None or place is None:
        reason = _hindrance(plain, distributed[0].device)
    else:
        reason = _hindrance(base, distributed[0].device, views=1)
        if torch_private.users_of(plain) > 1 or getweakrefcount(plain):
            reason = "its view is in use elsewhere"
    if reason is not None:
        refuse(
            operator,
            f"a plain tensor of shape {shape} is assigned distributed values under autograd, but "
            f"cannot become distributed itself: {reason}",
            *distributed,
            way_out="Return a new tensor, for example total = total + loss, write to a distributed "
            "tensor, such as out = distconv.distribute_tensor(out.clone(), x.grid) or "
            "x.new_zeros(...), or write x.detach() if no gradient is needed",
        )
    if cuts is None:
        fitting = (x for x in distributed if x.dim() <= len(shape))
        cuts = cuts_of_broadcast(tuple((tuple(x.shape), x.cuts) for x in fitting), shape)
    if base is not None and place is not None:
        # The base becomes distributed, and the plain view, which would keep it, a view of it.
        swap_tensors(plain, DistTensor(plain.new_empty(()), (), (), grid))
        along = iter(cuts)
        of_base = tuple(next(along) if isinstance(pick, slice) else () for pick in place)
        become_distributed(operator, base, distributed, lambda x: x, of_base)
        view = base[place]
        try:
            result = write(view)  # type: ignore[arg-type]
        finally:
            plain.become(view)  # type: ignore[attr-defined]
        return plain if result is view else result
    if cutting_axes(cuts) and is_fresh_spectrum(plain):
        target = zeros(shape, cuts, grid, plain)
    else:
        target = _block_of(plain, cuts, grid)
    result = write(target)
    if result is NotImplemented:  # Python then asks the other operand
        return result
    target.__dict__.update(plain.__dict__)
    for notes in _NOTES:
        notes.pop(plain, None)
    swap_tensors(plain, target)
    return plain if result is target else result


def _block_of(plain: Tensor, cuts: Cuts, grid: Grid) -> DistTensor:
    """Return a copy of a plain tensor as a DistTensor partitioned by `cuts`.

    If `plain` depends on a leaf outside of parallelized modules, the gradient of `plain` is summed
    over the ranks.
    """
    whole = plain
    if plain.requires_grad and grid.size > 1 and "free" in origins([plain.grad_fn], remember=True):
        whole = enter(plain, grid)
    block = whole[box_on_rank(plain.shape, cuts, grid).slices].clone()
    return DistTensor(block, plain.shape, cuts, grid)


def _slices_of(base: Tensor, view: Tensor) -> tuple[Any, ...] | None:
    """Return the integers and slices that select `view` from `base`, or None if there are none."""
    if not base.is_contiguous() or base.dtype != view.dtype or base.is_conj() != view.is_conj():
        return None
    left = int(view.storage_offset()) - int(base.storage_offset())
    picks: list[Any] = []
    runs = list(zip(view.shape, view.stride(), strict=True))
    for size, unit in zip(base.shape, base.stride(), strict=True):
        start, left = divmod(left, unit)
        n, stride = runs[0] if runs else (1, 0)
        step, rest = divmod(stride, unit)
        if runs and step and not rest and start + (n - 1) * step < size:
            picks.append(slice(start, start + max((n - 1) * step + 1, 0), step))
            del runs[0]
        else:
            picks.append(start)
    return None if runs else tuple(picks)


def _hindrance(x: Tensor, device: torch.device, views: int = 0) -> str | None:
    """Return the reason why a plain tensor cannot become a distributed one, or None if it can.

    `device` is the device of the grid; `views` is the number of views of `x` that may be in use.
    """
    memory = x.untyped_storage()
    if is_owned(x):
        return "it is a parameter or buffer of a parallelized module"
    if x.is_leaf and x.requires_grad:
        return "it is a leaf that requires gradients"
    if x.device != device:
        return f"it is on {x.device}, and the distributed values are on {device}"
    if torch_private.is_view(x):
        return "it is a view"
    if not memory.resizable():
        return "it shares memory with NumPy or with another process"
    # A tensor without other users has three: itself, its storage object, and the Python object.
    users = torch_private.users_of_memory(x), torch_private.users_of(x)
    if users[0] > 2 + views or users[1] > 1 + views:
        return "views of it are in use, or autograd has saved it for the backward pass"
    if x.retains_grad or getweakrefcount(x) > sum(x in notes for notes in _NOTES):
        return "it retains its gradient, or has a weak reference"
    if type(x) is not Tensor:
        return f"it is a {type(x).__name__}, and would lose this type"
    return None
