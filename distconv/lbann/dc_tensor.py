"""DCTensor: a DistTensor over the ranks of one replica, with the methods of LBANN's class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, distributed

from distconv.comm.collectives import broadcast
from distconv.comm.replication import mark_handed_out
from distconv.geometry.layout import Layout, block
from distconv.lbann.strategy import ParallelStrategy, ReplicaGrid, check_strategy
from distconv.lbann.sums import add_up, summands_of
from distconv.tensor.dist_tensor import DistTensor, local_box
from distconv.tensor.module_call import innermost_call
from distconv.tensor.validation import check_plain


class DCTensor(DistTensor):
    """A DistTensor whose samples are cut over the ranks of one replica, with LBANN's methods.

    `.shape` is the global shape, and functions compute on the whole tensor: sums, means, norms and
    losses, too. Their results are DCTensors.

    Attributes
    ----------
    summands: the grid axes over which LBANN's program would add up the tensor by
        `torch.distributed.all_reduce`; here that call leaves it as it is.
    """

    summands: frozenset[str] = frozenset()

    @staticmethod
    def __new__(
        cls: type[DCTensor], tensor: Tensor, parallel_strategy: Any, *parts: Any
    ) -> DCTensor:
        """Make a DCTensor whose block on this rank is `tensor`; all ranks of a replica call it.

        Like `from_shard`. If `tensor` is a leaf of autograd that requires gradients, the result's
        `grad` is filled, too. The operators of this library pass the arguments of `DistTensor`.
        """
        if parts:
            return super().__new__(cls, tensor, parallel_strategy, *parts)
        x: Any = cls.from_shard(tensor, parallel_strategy)
        if tensor.requires_grad and tensor.is_leaf:
            x.retain_grad()
        return x  # type: ignore[no-any-return]

    @property
    def _tensor(self) -> Tensor:
        """Return this rank's block, as `to_local` does."""
        return self.to_local()

    @property
    def _parallel_strategy(self) -> ParallelStrategy:
        """Return the strategy by which the ranks of the replica are arranged."""
        grid: Any = self.grid
        return grid.strategy  # type: ignore[no-any-return]

    @classmethod
    def from_shard(cls, tensor: Tensor, parallel_strategy: ParallelStrategy) -> DistTensor:
        """Make a DCTensor whose block on this rank is `tensor`; all ranks of a replica call it.

        Of n elements over p parts the first n mod p must have one more. Gradients reach `tensor`.
        Raises `ValueError` on all ranks of the replica if a block has another shape.
        """
        _check(tensor, parallel_strategy, "from_shard")
        ps = parallel_strategy
        return cls.from_local(tensor, ps.grid, ps.layout(tensor.dim()))

    @classmethod
    def distribute(cls, tensor: Tensor, parallel_strategy: ParallelStrategy) -> DistTensor:
        """Cut the tensor of a replica's first rank; the ranks of the replica call it together.

        The result is a leaf of autograd, with the `requires_grad` and memory format of `tensor`.
        Raises `ValueError` on all ranks of the replica if their tensors differ in shape or type.
        """
        _check(tensor, parallel_strategy, "distribute")
        grid, layout = parallel_strategy.grid, parallel_strategy.layout(tensor.dim())
        kinds = grid.all_gather_object((tuple(tensor.shape), tensor.dtype, tensor.requires_grad))
        if len(set(kinds)) > 1:
            raise ValueError(
                f"DCTensor.distribute: the ranks of a replica pass {kinds}; expected one shape, "
                "type and requires_grad"
            )
        whole = tensor.detach().to(grid.device, copy=True)
        broadcast(whole, grid)
        own = whole[local_box(whole.shape, grid, layout).slices].clone()
        x = cls.from_local(own, grid, layout, shape=whole.shape)
        return x.requires_grad_() if tensor.requires_grad else x

    def to_replicate(self) -> Tensor:
        """Return the whole tensor on every rank of the replica, which call it together.

        The result is a plain tensor. In the backward pass the gradients of all ranks are added up
        and divided by the number of ranks, so a loss that every rank computes counts once. Within a
        module of `DistConvDDP` the result is a DCTensor, whole on every rank, so that gradients of
        parameters which it is multiplied by count once, too.
        """
        if innermost_call() is not None:
            return self.redistribute(Layout())
        return mark_handed_out(self.full_tensor())

    def to_ddp(self) -> Tensor:
        """Return this rank's share of whole samples; the ranks of the replica call it together.

        The result is a plain tensor, and within a module of `DistConvDDP` a DCTensor. Raises
        `ValueError` on all ranks of the replica if torch's `Shard(0)` would give ranks other
        samples than this library does.
        """
        extents = {axis: n for axis, n in self.grid.shape.items() if n > 1}
        n, parts = len(self), self.grid.size
        if [len(range(*block(n, parts, i))) for i in range(parts)] != _chunks(n, *extents.values()):
            raise ValueError(
                f"to_ddp: torch would cut {n} samples over {parts} ranks in another way than this "
                "library; use to_replicate()"
            )
        x = self.redistribute(Layout(sample=tuple(extents)))
        return x if innermost_call() is not None else mark_handed_out(x.to_local(grad="part"))

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is distributed.all_reduce:
            return add_up(*args, **(kwargs or {}))
        result = super().__torch_function__(func, types, args, kwargs)
        if isinstance(result, DCTensor):
            summands = summands_of(func, args, kwargs or {}, result)
            if summands or result.summands:
                result.summands = summands
        elif func is Tensor.__setitem__ and isinstance(args[0], DCTensor):
            args[0].summands = frozenset()
        return result


ReplicaGrid.tensor_type = DCTensor


def _check(tensor: Tensor, parallel_strategy: ParallelStrategy, method: str) -> None:
    """Raise TypeError unless a method got a plain tensor and a ParallelStrategy.

    `method` is its name, for the error message.
    """
    check_plain(tensor, f"DCTensor.{method}: tensor")
    check_strategy(parallel_strategy, f"DCTensor.{method}")


def _chunks(n: int, *parts: int) -> list[int]:
    """Return the numbers of samples into which `Shard(0)` divides `n` over a mesh of `parts`."""
    if not parts:
        return [n]
    most = -(-n // parts[0])
    kept = (max(0, min(most, n - most * i)) for i in range(parts[0]))
    return [m for k in kept for m in _chunks(k, *parts[1:])]
