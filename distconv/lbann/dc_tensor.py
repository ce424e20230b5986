"""DCTensor: a DistTensor over the ranks of one replica, with LBANN's methods and halo exchanges."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.device_mesh import DeviceMesh

from distconv.comm.collectives import broadcast, mark_handed_out
from distconv.comm.transfer import accumulate, gather
from distconv.geometry.index_maps import IndexMap, Interval, Pad, Same
from distconv.geometry.layout import Layout, block, cutting_axes, dimension_names, effective_cuts
from distconv.geometry.plan import Plan, make_plan
from distconv.grid.process_grid import ProcessGrid
from distconv.tensor.base import DistTensorBase, tensors_in, whole_numbers
from distconv.tensor.conversion import check_plain, global_shape
from distconv.tensor.dispatch import innermost_call, refuse
from distconv.tensor.dist_tensor import DistTensor, local_box

# `ParallelStrategy`: how many ranks share a sample, and which dimensions are partitioned.


_AXES = ("depth", "height", "width")
"""The grid axes of the entries of `num_shards`, whichever tensor dimensions they partition."""


class ReplicaGrid(ProcessGrid):
    """The grid of the ranks of one replica, whose tensors are DCTensors.

    Attributes
    ----------
    strategy: the strategy that created the grid.
    """

    strategy: ParallelStrategy


class StrategyMesh(DeviceMesh):
    """A device mesh whose dimensions "dc0" and "dc1" have further names.

    If tensors are partitioned along one dimension, "dc" is "dc0", as in earlier versions of LBANN's
    package. If tensors are partitioned along one or two dimensions, "dc2", "dc3" and "dc4" name the
    mesh dimension that partitions tensor dimension 2, 3 or 4, by the current `shard_dim`.
    """

    strategy: ParallelStrategy

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """Return the mesh of the ranks that differ along the named dimensions only."""
        named = self._own(names) if isinstance(names, str) else tuple(map(self._own, names))
        return super().__getitem__(named)

    def get_group(self, mesh_dim: int | str | None = None) -> ProcessGroup:
        """Return the process group of a dimension, by number or name."""
        return super().get_group(self._own(mesh_dim) if isinstance(mesh_dim, str) else mesh_dim)

    def _own(self, name: str) -> str:
        """Return the mesh's own name, such as "dc0", of the dimension that is called `name`."""
        own = self.strategy.distconv_dim_names
        # With three dimensions "dc2" is the last, whichever tensor dimension it partitions.
        by_number = {f"dc{d}": n for d, n in zip(self.strategy.shard_dim, own, strict=True)}
        further = {1: {"dc": own[0]} | by_number, 2: by_number}.get(len(own), {})
        return further.get(name, name)


class ParallelStrategy:
    """All ranks of the job as replicas of the model; the ranks of a replica share its samples.

    All ranks of the job create it together. Consecutive ranks share samples.

    Parameters
    ----------
    num_shards: the number of parts of each partitioned dimension, at most three.
    shard_dim: the indices of the partitioned tensor dimensions, from 2 on, one for each of
        `num_shards`. The attribute may be assigned again later.
    device_type: "cuda" or "cpu".

    Attributes
    ----------
    total_num_shards: the ranks of a replica.
    ddp_ranks, ddp_ind: the number of replicas, and the index of this rank's replica.
    shard_ind: the index of this rank's shard along each partitioned dimension.
    device_mesh: all ranks as a mesh of torch.distributed, with dimensions named "ddp" and
        `distconv_dim_names`, which are "dc0", "dc1", ...
    grid: the process grid of this replica's ranks, and of the replica's DCTensors.
    job: the process grid of all ranks.

    Raises
    ------
    ValueError
        On every rank, if the number of ranks is no multiple of the parts of a sample, or
        `shard_dim` does not fit `num_shards`.

    Examples
    --------
    >>> from distconv.lbann import ParallelStrategy
    >>> strategy = ParallelStrategy(num_shards=2, shard_dim=2, device_type="cpu")
    >>> strategy.ddp_ranks, strategy.total_num_shards
    (1, 2)
    """

    def __init__(
        self,
        num_shards: int | Sequence[int],
        shard_dim: int | Sequence[int] = (2,),
        device_type: str = "cuda",
    ):
        self.num_shards = whole_numbers(num_shards, "ParallelStrategy: num_shards")
        if not 1 <= len(self.num_shards) <= len(_AXES) or min(self.num_shards) < 1:
            raise ValueError(
                f"ParallelStrategy: num_shards={num_shards!r}; expected 1 to {len(_AXES)} numbers "
                "of shards, each 1 or more"
            )
        self.shard_dim = shard_dim
        extents: dict[str, Any] = dict(zip(_AXES, self.num_shards, strict=False))
        self.job = ProcessGrid(sample=-1, **extents, device=device_type)
        self.total_num_shards = prod(self.num_shards)
        self.rank, self.world_size = self.job.rank, self.job.size
        self.ddp_ranks = self.world_size // self.total_num_shards
        self.ddp_ind = self.job.coords["sample"]
        self.shard_ind = [self.job.coords[axis] for axis in extents]
        first = self.ddp_ind * self.total_num_shards
        members = self.job.ranks[first : first + self.total_num_shards]
        self.grid = ReplicaGrid(members, **extents, device=device_type)
        self.grid.strategy = self
        self.distconv_dim_names = tuple(f"dc{i}" for i in range(len(self.num_shards)))
        self.device_mesh = self._mesh()

    @property
    def shard_dim(self) -> tuple[int, ...]:
        """Return the partitioned tensor dimensions, one for each number in `num_shards`."""
        return self._shard_dim

    @shard_dim.setter
    def shard_dim(self, value: int | Sequence[int]) -> None:
        dims = whole_numbers(value, "ParallelStrategy: shard_dim")
        if len(dims) != len(self.num_shards) or len(set(dims)) < len(dims) or min(dims) < 2:
            raise ValueError(
                f"ParallelStrategy: shard_dim={value!r} does not fit "
                f"num_shards={self.num_shards}; expected one dimension for each number, all "
                "different and 2 or more"
            )
        self._shard_dim = dims

    def shard_to_rank(self, shard_ind: int | Sequence[int]) -> int:
        """Return the number in the job of this replica's rank that holds the shard `shard_ind`.

        `shard_ind` has an index for each partitioned dimension, from 0; index -1 is the last shard.
        """
        parts = whole_numbers(shard_ind, "ParallelStrategy.shard_to_rank: shard_ind")
        place = 0
        for part, n in zip(parts, self.num_shards, strict=True):
            place = place * n + part % n
        return self.grid.ranks[place]

    def layout(self, ndim: int) -> Layout:
        """Return the layout of tensors of `ndim` dimensions; raise `ValueError` for too few."""
        names = dimension_names(ndim)
        if max(self.shard_dim) >= ndim:
            raise ValueError(
                f"DCTensor: shard_dim={self.shard_dim} is partitioned, but the tensor has {ndim} "
                "dimensions; add a dimension of size 1 by unsqueeze, or choose another shard_dim"
            )
        return Layout(**{names[d]: axis for d, axis in zip(self.shard_dim, _AXES, strict=False)})

    def _mesh(self) -> StrategyMesh:
        kind = self.job.device_mesh.device_type  # with the default group, where there is none
        ranks = torch.arange(self.world_size).view(self.ddp_ranks, *self.num_shards)
        mesh = StrategyMesh(kind, ranks, mesh_dim_names=("ddp", *self.distconv_dim_names))
        mesh.strategy = self
        return mesh


def check_strategy(given: object, where: str) -> None:
    """Raise TypeError unless `given` is a ParallelStrategy; `where` begins the message."""
    if not isinstance(given, ParallelStrategy):
        kind = type(given).__name__
        raise TypeError(
            f"{where}: {kind} is not a ParallelStrategy; create a ParallelStrategy and pass it"
        )


# Sums of DCTensors that an LBANN program all-reduces once more, which must not change the sums.
#
# With LBANN's class, a reduction covers the rank's block only, and the program extends it to the
# sample by `torch.distributed.all_reduce`. Here a reduction covers the sample from the start, so
# `add_up` leaves a sum unchanged. A mean that the program divides by the number of ranks after the
# all-reduce would be too small.


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
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], result: DistTensorBase
) -> frozenset[str]:
    """Return the grid axes over which a program for LBANN's DistConv would all-reduce `result`.

    `result` is `func(*args, **kwargs)`. LBANN's DCTensor sums the rank's block only, so the program
    all-reduces the sums itself; here `result` is the global sum already. Returns no axes if
    `result` is not known to be a sum over ranks.
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
    """Replace `torch.distributed.all_reduce` for a tensor that is already the sum over `group`.

    The arguments are those of `all_reduce`. `tensor` is left unchanged. All ranks of the group call
    it, and all-reduce one zero to stay synchronized; returns the result of this call: None, or a
    work handle if `async_op` is true. Raises UnsupportedOperation if the tensor is not such a sum.
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
            else "it is already the reduction of the whole sample, like every reduction of a "
            "DCTensor, not of this rank's shard",
            tensor,
            way_out="Remove the all_reduce and the division by the number of ranks; to reduce over "
            "replicas, pass x.to_replicate().detach()",
        )
    tensor.summands -= axes
    return distributed.all_reduce(torch.zeros(1, device=tensor.device), op, group, async_op)


class DCTensor(DistTensor):
    """A DistTensor that is partitioned over the ranks of one replica, with LBANN's methods.

    `.shape` is the global shape, and functions, also sums, means, norms and losses, compute on the
    global tensor. The results are DCTensors.

    Attributes
    ----------
    summands: the grid axes over which LBANN's program would sum the tensor by
        `torch.distributed.all_reduce`; here that call leaves the tensor unchanged.

    Examples
    --------
    >>> from distconv.lbann import DCTensor, ParallelStrategy
    >>> strategy = ParallelStrategy(2, 2, "cpu")
    >>> x = DCTensor.distribute(torch.ones(2, 3, 8, 8), strategy)
    >>> tuple(x.shape), tuple(x._tensor.shape)
    ((2, 3, 8, 8), (2, 3, 4, 8))
    >>> tuple(x.to_replicate().shape), tuple(x.to_ddp().shape)
    ((2, 3, 8, 8), (1, 3, 8, 8))
    >>> tuple(DCTensor.from_shard(torch.ones(2, 3, 4, 8), strategy).shape)
    (2, 3, 8, 8)
    """

    summands: frozenset[str] = frozenset()

    @staticmethod
    def __new__(
        cls: type[DCTensor], tensor: Tensor, parallel_strategy: Any, *parts: Any
    ) -> DCTensor:
        """Make a DCTensor whose block on this rank is `tensor`; all ranks of a replica call it.

        Like `from_shard`. If `tensor` is a leaf of autograd that requires gradients, the result's
        `grad` is filled, too. Operators of this library instead pass all arguments of `DistTensor`.
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
        """Return the `ParallelStrategy` of the tensor's grid."""
        grid: Any = self.grid
        return grid.strategy  # type: ignore[no-any-return]

    @classmethod
    def from_shard(cls, tensor: Tensor, parallel_strategy: ParallelStrategy) -> DistTensor:
        """Make a DCTensor whose block on this rank is `tensor`; all ranks of a replica call it.

        Of n elements over p ranks, the first n mod p ranks must have one element more. Gradients
        reach `tensor`. Raises `ValueError` on all ranks of the replica if a block has another
        shape.
        """
        _check(tensor, parallel_strategy, "from_shard")
        ps = parallel_strategy
        return cls.from_local(tensor, ps.grid, ps.layout(tensor.dim()))

    @classmethod
    def distribute(cls, tensor: Tensor, parallel_strategy: ParallelStrategy) -> DistTensor:
        """Partition the tensor of a replica's first rank. Collective over the replica.

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
        """Return the global tensor on every rank of the replica. Collective over the replica.

        The result is a plain tensor. In the backward pass the gradients of all ranks are summed and
        divided by the number of ranks, so a loss that every rank computes counts once. Within a
        module of `DistConvDDP` the result is a DCTensor, replicated on every rank, so that
        gradients of parameters multiplied by the result count once, too.
        """
        if innermost_call() is not None:
            return self.redistribute(Layout())
        return mark_handed_out(self.full_tensor())

    def to_ddp(self) -> Tensor:
        """Return this rank's share of the samples, unpartitioned. Collective over the replica.

        The result is a plain tensor, and within a module of `DistConvDDP` a DCTensor. Raises
        `ValueError` on all ranks of the replica if torch's `Shard(0)` would give ranks other
        samples than this library does.
        """
        extents = {axis: n for axis, n in self.grid.shape.items() if n > 1}
        n, parts = len(self), self.grid.size
        if [len(range(*block(n, parts, i))) for i in range(parts)] != _chunks(n, *extents.values()):
            raise ValueError(
                f"to_ddp: torch would partition {n} samples over {parts} ranks differently from "
                "distconv; use to_replicate()"
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

    `method` is the name of the method, for the error message.
    """
    check_plain(tensor, f"DCTensor.{method}: tensor")
    check_strategy(parallel_strategy, f"DCTensor.{method}")


def _chunks(n: int, *parts: int) -> list[int]:
    """Return each rank's number of samples when `Shard(0)` divides `n` over a mesh of `parts`."""
    if not parts:
        return [n]
    most = -(-n // parts[0])
    kept = (max(0, min(most, n - most * i)) for i in range(parts[0]))
    return [m for k in kept for m in _chunks(k, *parts[1:])]


# Halo exchanges of plain blocks, for kernels that programs for LBANN's package define.


@dataclass(frozen=True)
class _Halos:
    """An index map by which each block needs a halo of `size` elements on either side."""

    size: int
    mode: str

    @property
    def _pad(self) -> Pad:
        return Pad(self.size, self.size, self.mode)

    def output_size(self, size: int) -> int:
        return self._pad.output_size(size) - 2 * self.size

    def intervals(self, size: int, start: int, stop: int) -> tuple[Interval, ...]:
        return self._pad.intervals(size, start, stop + 2 * self.size)

    def dependents(self, size: int, start: int, stop: int) -> tuple[Interval, ...]:
        padded = self._pad.dependents(size, start, stop)
        return tuple((max(first - 2 * self.size, 0), min(last, size)) for first, last in padded)


def forward_halo_exchange(
    tensor: Tensor,
    halo_size: int,
    parallel_strategy: ParallelStrategy,
    dim_index: int = 0,
    is_periodic: bool = False,
) -> Tensor:
    """Return this rank's block with the neighbours' halos on both sides of one dimension.

    All ranks of a replica call it together. Differentiable: gradients of halos are added on the
    ranks that own the elements. To exchange along several dimensions, corners included, call the
    function for one dimension after the other.

    Parameters
    ----------
    tensor: this rank's block, a plain tensor. Of n elements over p ranks, the first n mod p ranks
        have one element more.
    halo_size: the number of elements on either side. Halos beyond the ends of the global tensor are
        zeros.
    dim_index: the position of the dimension in `parallel_strategy.shard_dim`.
    is_periodic: whether the elements beyond one end are those at the other end.

    Raises
    ------
    ValueError
        On every rank of the replica, if blocks do not fit, arguments differ between ranks, a block
        is empty, the size is negative, or there is no such dimension.
    RuntimeError
        On every rank of the replica, if a periodic dimension is shorter than the halo.

    Examples
    --------
    >>> from distconv.lbann import ParallelStrategy, forward_halo_exchange
    >>> strategy = ParallelStrategy(2, 2, "cpu")
    >>> block = torch.full((1, 1, 2, 1), 1.0 + strategy.shard_ind[0])  # 1 and 2
    >>> rows = forward_halo_exchange(block, 1, strategy).flatten().tolist()
    >>> dc.ProcessGrid(height=2).all_gather_object(rows)
    [[0.0, 1.0, 1.0, 2.0], [1.0, 2.0, 2.0, 0.0]]
    """
    options = (parallel_strategy, dim_index, is_periodic)
    found = _halo_plan("forward_halo_exchange", tensor, halo_size, *options, with_halos=False)
    return gather(tensor, found, parallel_strategy.grid)


def backward_halo_exchange(
    tensor: Tensor,
    halo_size: int,
    parallel_strategy: ParallelStrategy,
    dim_index: int = 0,
    is_periodic: bool = False,
) -> Tensor:
    """Add halos to the blocks of the ranks that own the elements, and return this rank's block.

    This is the adjoint of `forward_halo_exchange`, with the same parameters and errors. `tensor` is
    a block with halos, in the shape that `forward_halo_exchange` returns. Collective over the
    replica. Differentiable.

    Examples
    --------
    >>> from distconv.lbann import ParallelStrategy, backward_halo_exchange
    >>> strategy = ParallelStrategy(2, 2, "cpu")
    >>> rows = backward_halo_exchange(torch.ones(1, 1, 4, 1), 1, strategy).flatten().tolist()
    >>> dc.ProcessGrid(height=2).all_gather_object(rows)
    [[1.0, 2.0], [2.0, 1.0]]
    """
    options = (parallel_strategy, dim_index, is_periodic)
    found = _halo_plan("backward_halo_exchange", tensor, halo_size, *options, with_halos=True)
    return accumulate(tensor, found, parallel_strategy.grid)


def _halo_plan(
    caller: str,
    tensor: Tensor,
    halo_size: int,
    parallel_strategy: ParallelStrategy,
    dim_index: Any,
    is_periodic: bool,
    with_halos: bool,
) -> Plan:
    """Return this rank's plan for a halo exchange by the function `caller`. Collective.

    `with_halos` says whether `tensor` has the halos already. The other parameters, and errors, are
    those of `forward_halo_exchange`.
    """
    check_plain(tensor, f"{caller}: tensor")
    check_strategy(parallel_strategy, caller)
    ps, grid = parallel_strategy, parallel_strategy.grid
    layout = ps.layout(tensor.dim())
    cuts = effective_cuts(layout.cuts(tensor.dim()), grid.topology)
    given = dict(halo_size=halo_size, dim_index=dim_index, is_periodic=is_periodic)
    shape = list(global_shape(tensor, grid, cuts, layout, caller, **given))
    if type(dim_index) is not int or not 0 <= dim_index < len(ps.shard_dim):
        raise ValueError(
            f"{caller}: dim_index={dim_index!r}; expected the position of a dimension in "
            f"shard_dim={ps.shard_dim}, counted from 0; pass is_periodic by name"
        )
    if halo_size < 0:
        raise ValueError(f"{caller}: halo_size={halo_size}; expected 0 or more")
    along = ps.shard_dim[dim_index]
    if with_halos:
        shape[along] -= 2 * halo_size * ps.num_shards[dim_index]
    if shape[along] < ps.num_shards[dim_index]:
        raise ValueError(
            f"{caller}: dimension {along} has {shape[along]} elements for "
            f"{ps.num_shards[dim_index]} ranks, and an empty block has no halo; use fewer ranks "
            "along this dimension"
        )
    needs: list[IndexMap] = [Same()] * tensor.dim()
    needs[along] = _Halos(halo_size, "circular" if is_periodic else "constant")
    return make_plan(grid.topology, grid.rank, tuple(shape), cuts, cuts, tuple(needs))
