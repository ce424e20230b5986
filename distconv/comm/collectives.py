"""All-reduce, all-gather and broadcast over the ranks along grid axes; some are differentiable."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from distconv.comm.packing import resolved_contiguous
from distconv.geometry.layout import replicating_axes
from distconv.geometry.topology import AXES
from distconv.grid.interface import Grid
from distconv.torch_private import ShardFunction


def all_reduce_with_grad(local: Tensor, grid: Grid, axes: Iterable[str]) -> Tensor:
    """Return the sum of `local` over the ranks along `axes` (collective); differentiable.

    Examples
    --------
    >>> from distconv import exchange
    >>> grid = dc.ProcessGrid(height=2)
    >>> own = torch.tensor([1.0 + grid.rank])  # 1 and 2
    >>> exchange.sum_over(own, grid, ["height"])
    tensor([3.])
    """
    return apply_along_axes(_AllReduce, local, grid, axes)


def all_gather_with_grad(local: Tensor, grid: Grid, axes: Iterable[str]) -> Tensor:
    """Stack the tensors `local` of all ranks along `axes`; differentiable.

    The ranks are in the order of the blocks of a dimension partitioned over `axes`: the first axis
    is the slowest. Collective over these ranks.

    Examples
    --------
    >>> from distconv import exchange
    >>> grid = dc.ProcessGrid(height=2)
    >>> exchange.parts_of(torch.tensor([1.0 + grid.rank, 0.0]), grid, ["height"])
    tensor([[1., 0.],
            [2., 0.]])
    """
    axes = tuple(axes)
    if grid.topology.parts(axes) == 1:
        return local.unsqueeze(0)
    gathered = apply_along_axes(_AllGather, local, grid, axes)
    by_rank = sorted(axes, key=AXES.index)
    if axes == tuple(by_rank):
        return gathered
    each = gathered.unflatten(0, [grid.topology.extent(axis) for axis in by_rank])
    order = [by_rank.index(axis) for axis in axes]
    return each.permute(*order, *range(len(axes), each.dim())).flatten(0, len(axes) - 1)


def apply_along_axes(
    function: type[ShardFunction], local: Tensor, grid: Grid, axes: Iterable[str]
) -> Tensor:
    """Apply an autograd `function` to `local`, `grid`, `axes`; return `local` for a single rank."""
    axes = tuple(axes)
    if grid.topology.parts(axes) == 1:
        return local
    result: Tensor = function.apply(local, grid, axes)
    return result


def all_reduce(local: Tensor, grid: Grid, axes: Iterable[str]) -> Tensor:
    """Return the sum of `local` over the ranks along `axes` (collective), without gradient."""
    total = resolved_contiguous(local.detach()).clone(memory_format=torch.contiguous_format)
    all_reduce_(total, grid, axes)
    return total


def all_reduce_(tensor: Tensor, grid: Grid, axes: Iterable[str]) -> None:
    """Overwrite a contiguous tensor by its sum over the ranks along `axes` (collective)."""
    grid.transport.all_reduce(tensor, grid.communicator(axes)).wait()


def all_reduce_coalesced(
    tensors: Sequence[Tensor], grid: Grid, axes: Iterable[str]
) -> list[Tensor]:
    """Return the sum of each tensor over the ranks along `axes`, without gradient.

    One all-reduce sums all tensors of an element type. With one rank along `axes` the tensors
    themselves are returned. Collective over these ranks.
    """
    sums, axes = list(tensors), tuple(axes)
    if grid.topology.parts(axes) == 1:
        return sums
    by_type: dict[torch.dtype, list[int]] = defaultdict(list)
    for i, x in enumerate(tensors):
        by_type[x.dtype].append(i)
    for numbers in by_type.values():
        flat = torch.cat([tensors[i].detach().reshape(-1) for i in numbers])
        all_reduce_(flat, grid, axes)
        pieces = flat.split([tensors[i].numel() for i in numbers])
        for i, piece in zip(numbers, pieces, strict=True):
            sums[i] = piece.view(tensors[i].shape)
    return sums


def all_gather(local: Tensor, grid: Grid, axes: Iterable[str]) -> Tensor:
    """Stack `local` of all ranks along `axes` (collective), in rank order and without gradient."""
    return grid.transport.all_gather(resolved_contiguous(local.detach()), grid.communicator(axes))


def broadcast(tensor: Tensor, grid: Grid, axes: Iterable[str] = AXES) -> None:
    """Overwrite `tensor` by the tensor of the first of the ranks along `axes` (collective).

    Examples
    --------
    >>> from distconv import exchange
    >>> grid = dc.ProcessGrid(height=2)
    >>> x = torch.tensor([5.0 + grid.rank])
    >>> exchange.broadcast(x, grid)
    >>> x
    tensor([5.])
    """
    axes = tuple(axes)
    if not tensor.numel() or grid.topology.parts(axes) == 1:
        return
    message = resolved_contiguous(tensor.detach())
    grid.transport.broadcast(message, grid.communicator(axes))
    if message.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(message)


class _AllReduce(ShardFunction):
    @staticmethod
    def forward(ctx: Any, local: Tensor, grid: Grid, axes: tuple[str, ...]) -> Tensor:
        ctx.movement = grid, axes
        return all_reduce(local, grid, axes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _AllReduce.apply(grads[0], *ctx.movement), None, None


class _AllGather(ShardFunction):
    @staticmethod
    def forward(ctx: Any, local: Tensor, grid: Grid, axes: tuple[str, ...]) -> Tensor:
        ctx.movement = grid, axes
        return all_gather(local, grid, axes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grid, axes = ctx.movement
        return _AllReduce.apply(grads[0], grid, axes)[grid.communicator(axes).rank], None, None


# Replicated values, as they enter and leave the distributed program.
#
# The gradient of a replicated value is the sum over its replicas.


HANDED_OUT, REPLICATED, OPERAND = "distconv_out", "distconv_replicated", "distconv_operand"
"""Marks in the metadata of autograd nodes: of plain tensors that `to_local` or `full_tensor`
returns, of results of `replicate`, and of plain operands of operators on DistTensors."""


def _marked(x: Tensor, mark: str) -> Tensor:
    if x.grad_fn is not None:
        notes: Any = x.grad_fn.metadata
        notes[mark] = True
    return x


def unreplicate(local: Tensor, grid: Grid, axes: Iterable[str]) -> Tensor:
    """Return a value replicated along `axes` as a plain tensor.

    In the backward pass each of the n ranks along `axes` divides its gradient by n.

    Examples
    --------
    >>> from distconv import exchange
    >>> grid = dc.ProcessGrid(height=2)
    >>> own = torch.tensor(1.0, requires_grad=True)
    >>> total = exchange.sum_over(own, grid, ["height"])  # 2, replicated
    >>> exchange.share(total, grid, ["height"]).backward()  # both ranks call it
    >>> own.grad
    tensor(1.)
    """
    shared = apply_along_axes(_Unreplicate, local, grid, axes)
    return mark_handed_out(shared) if grid.size > 1 else shared


def mark_handed_out(plain: Tensor) -> Tensor:
    """Mark the autograd node of `plain`, a result of `to_local` or `full_tensor`; return `plain`.

    Operators on DistTensors raise if a plain operand depends on a marked node (see
    `ownership.origins`).
    """
    return _marked(plain, HANDED_OUT)


def replicate(local: Tensor, grid: Grid, axes: Iterable[str]) -> Tensor:
    """Return `local`, equal on the ranks along `axes`; its gradient is summed over these ranks.

    Examples
    --------
    >>> from distconv import exchange
    >>> grid = dc.ProcessGrid(height=2)
    >>> weight = torch.ones(3, requires_grad=True)  # the same on both ranks
    >>> own = torch.full((3,), 1.0 + grid.rank)  # 1 and 2
    >>> (exchange.replicate(weight, grid, ["height"]) * own).sum().backward()
    >>> weight.grad
    tensor([3., 3., 3.])
    """
    return _marked(_Replicate.apply(local, grid, tuple(axes)), REPLICATED)


def as_replicated(plain: Tensor, grid: Grid) -> Tensor:
    """Return a plain tensor, equal on all ranks, as an operand of a distributed operator.

    Its gradient is summed over all ranks of the grid.
    """
    axes = replicating_axes((), grid.topology)
    return _marked(_Replicate.apply(plain, grid, axes), OPERAND)


class _Unreplicate(ShardFunction):
    @staticmethod
    def forward(ctx: Any, local: Tensor, grid: Grid, axes: tuple[str, ...]) -> Tensor:
        ctx.movement = grid, axes
        return alias(local)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # The gradient comes from plain tensors, which matters to second derivatives.
        grid, axes = ctx.movement
        return replicate(grads[0], grid, axes) / grid.topology.parts(axes), None, None


class _Replicate(ShardFunction):
    @staticmethod
    def forward(ctx: Any, local: Tensor, grid: Grid, axes: tuple[str, ...]) -> Tensor:
        ctx.movement = grid, axes
        return alias(local)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # The gradient goes to plain tensors.
        return unreplicate(all_reduce_with_grad(grads[0], *ctx.movement), *ctx.movement), None, None


def alias(tensor: Tensor) -> Tensor:
    """Return an alias of a tensor with the same strides, which view_as() may change."""
    alias: Tensor = torch.ops.aten.alias(tensor)
    return alias


# All-reduce of vectors by messages in half precision; the sums are computed in float32.
#
# With error feedback a rank adds its rounding error to the next vector (Karimireddy et al., "Error
# Feedback Fixes SignSGD and other Gradient Compression Schemes", arXiv:1901.09847).


WIRES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
"""The element types of messages in half precision, by name."""

WIDE = (torch.float32, torch.float64)
"""The element types of vectors that are sent in half precision."""


def wire_type(owner: str, wire: str) -> torch.dtype:
    """Return the torch type called `wire`, "bfloat16" or "float16".

    Raises ValueError for another name; its message begins with `owner`, the function to which the
    user has passed `wire`.
    """
    if wire not in WIRES:
        raise ValueError(f"{owner}: wire={wire!r} is unknown; choose {' or '.join(WIRES)}")
    return WIRES[wire]


class ErrorFeedback:
    """The rounding errors that this rank made in one sum of a vector, to add to the next vector.

    The last `exact` elements of a vector are counts, for which no rounding errors are kept.
    """

    def __init__(self, exact: int = 0):
        self._exact = exact
        self._left_out: Tensor | None = None

    def add_to(self, padded: Tensor) -> None:
        """Add the kept rounding errors to the next vector, `padded`, which ends with padding."""
        if self._left_out is not None:
            padded += self._left_out

    def keep(self, left_out: Tensor, elements: int) -> None:
        """Keep the rounding errors of a padded vector, of which `elements` are not padding."""
        left_out[elements - self._exact :] = 0.0
        # A value too large for the halves is lost: as a rounding error it would be infinite.
        self._left_out = left_out.nan_to_num_(0.0, 0.0, 0.0)


class HalfSum:
    """A started all-reduce of the vector `flat` in place, by messages in half precision.

    Collective over the ranks along `axes`, both the construction and `wait`, in the same order as
    their other exchanges. All ranks get the same sum. Each rank sums one section of the vector, so
    a rank sends and receives two numbers of type `wire` for each element. `feedback` carries
    rounding errors from one sum to the next. Sums in flight at the same time need different names
    `purpose`, one for each communicator.
    """

    def __init__(
        self,
        flat: Tensor,
        grid: Grid,
        axes: Sequence[str],
        wire: torch.dtype,
        purpose: str,
        feedback: ErrorFeedback | None = None,
    ):
        transport = grid.transport
        ranks = grid.topology.peers(grid.rank, axes)
        self._flat, self._transport, self._feedback = flat, transport, feedback
        self._group = grid.communicator(axes, purpose)
        self._own = ranks.index(grid.rank)
        length = -(-len(flat) // len(ranks))
        padded = flat.new_zeros(len(ranks) * length)
        padded[: len(flat)] = flat
        if feedback is not None:
            feedback.add_to(padded)
        self._leaving = padded.to(wire).view(len(ranks), length)
        # Without feedback nobody needs the rounding errors, so their memory is freed here.
        self._left_out = None if feedback is None else padded.sub_(self._leaving.view(-1))
        self._arriving = transport.empty((len(ranks), length), self._leaving)
        others = [i for i in range(len(ranks)) if i != self._own]
        self._request = transport.exchange(
            [(ranks[i], self._arriving[i]) for i in others],
            [(ranks[i], self._leaving[i]) for i in others],
            transport.next_tag(),
        )

    def wait(self) -> None:
        """Wait for the messages, and overwrite the vector `flat` by the sum."""
        self._request.wait()
        arriving, own, flat = self._arriving, self._own, self._flat
        arriving[own] = self._leaving[own]
        total = arriving[0].float()
        for piece in arriving[1:]:
            total += piece
        rounded = total.to(arriving.dtype)
        if self._feedback is not None and self._left_out is not None:
            self._left_out.view(arriving.shape)[own] += total - rounded
            self._feedback.keep(self._left_out, len(flat))
        flat.copy_(self._transport.all_gather(rounded, self._group).view(-1)[: len(flat)])
