"""The base class of DistTensor: shard, partitioning (`cuts`), grid and metadata, without operators.

Modules that the module of DistTensor imports use this base class. To return DistTensors, they
construct results by `type(x)(...)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from functools import cached_property
from operator import attrgetter, index, is_
from typing import Any, NamedTuple, TypeVar, cast
from weakref import ReferenceType, WeakSet, WeakValueDictionary, ref

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Module

from distconv import torch_private
from distconv.geometry.layout import Box, Cuts, Layout, cutting_axes, rank_box
from distconv.grid.interface import Grid
from distconv.grid.words import module_calls, on_behalf_of

# Integers as torch accepts them: Python's, numpy's, and tensors of one integer.


_INTEGERS = frozenset({int})


def whole_number(value: Any, what: str) -> int:
    """Return `value` as an int; raise TypeError, which names `what`, for any other type.

    A float such as 2.0 is no integer.
    """
    try:
        return index(value)
    except TypeError:
        raise TypeError(f"{what}={value!r} is not a whole number") from None


def whole_numbers(value: Any, what: str) -> tuple[int, ...]:
    """Return `value`, an integer or a list or tuple of integers, as a tuple of ints.

    Raises TypeError, which names `what`, for other values.
    """
    if type(value) is tuple and _INTEGERS.issuperset(map(type, value)):
        return value
    if isinstance(value, int):
        return (value,)
    members = value if isinstance(value, (tuple, list)) else (value,)
    return tuple(whole_number(member, what) for member in members)


# Which DistTensors share memory in serial torch, although here some of them are copies.


class SharedMemory:
    """The memory shared by a DistTensor and its views, or a copy for a view of remote elements.

    A view whose elements are on other ranks than those of its base needs a copy. In serial torch
    the view and its base share one memory.

    Attributes
    ----------
    newest: whether this copy was written to, and its source has not been updated yet.
    of_parameter: whether the memory is that of a sharded parameter, or of `empty_like` of one.
    leaf: whether a leaf with gradients has this memory, and operators read the leaf through an
        alias. Autograd does not raise for writes to the alias.
    """

    newest = False
    of_parameter = False
    leaf = False
    _source: SharedMemory | None = None
    """For a copy, the memory from which it was copied."""
    _view: ReferenceType[Any] | None = None
    """For a copy, the view for which it was made."""
    _sharing: WeakValueDictionary[int, Any] | None = None
    """For a copy, the other tensors in the same memory, by their ids."""
    _readers: WeakSet[PendingElements] | None = None
    """The pending elements that will be computed from this memory."""
    _family: WeakSet[SharedMemory] | None = None
    """All `SharedMemory` objects in use that are, or may be, one memory in serial torch."""

    def fork(self) -> SharedMemory:
        """Return memory for a result that, in serial torch, is a view or a copy of this memory."""
        if self._family is None:
            self._family = WeakSet([self])
        twin = SharedMemory()
        twin._family, twin.of_parameter = self._family, self.of_parameter
        self._family.add(twin)
        return twin

    def copy(self, view: Any) -> SharedMemory:
        """Return the memory of a copy for `view`, whose elements are on other ranks.

        After a write to this memory, the block of `view` must be fetched again.
        """
        twin = self.fork()
        twin._source, twin._view = self, ref(view)
        return twin

    def note(self, view: Any) -> None:
        """Remember `view` as another tensor in this memory, if this memory is a copy."""
        if self._view is not None:
            if self._sharing is None:
                self._sharing = WeakValueDictionary()
            self._sharing[id(view)] = view

    def note_reader(self, pending: PendingElements) -> None:
        """Register `pending`, which will be computed from the present elements of this memory."""
        if self._readers is None:
            self._readers = WeakSet()
        self._readers.add(pending)

    def keep_for_readers(self) -> None:
        """Copy the present elements, before a write, for all pending elements that depend on them.

        No communication, as the pending tensors that are still in use may differ between ranks.
        """
        for memory in {self, *(self._family or ())}:
            for reader in memory._readers or ():
                reader.keep_source()
            memory._readers = None

    @property
    def alone(self) -> bool:
        """Return whether no fork of this memory is in use.

        A write to memory with a fork is ambiguous: serial torch might change the fork, too.
        """
        origin = self._origin()
        return all(memory._origin() is origin for memory in self._family or ())

    def _origin(self) -> SharedMemory:
        memory = self
        while memory._source is not None:
            memory = memory._source
        return memory

    def views(self) -> list[Any]:
        """Return the tensors in use that have this memory if it is a copy; else an empty list."""
        first = None if self._view is None else self._view()
        return [*([] if first is None else [first]), *(self._sharing or {}).values()]

    def followers(self) -> Iterator[Any]:
        """Yield the tensors in copies of this memory, which a write to this memory must update."""
        for memory in list(self._family or ()):
            source: SharedMemory | None = memory
            while source is not None and source is not self and not source.newest:
                source = source._source
            if source is self and memory is not self:
                yield from memory.views()


Distributed = TypeVar("Distributed", bound="DistTensorBase")
"""A type of DistTensor, for functions that return the type of their argument."""


Run = tuple[int, int, int]
"""The first position, the step and the number of positions of a slice."""


class ViewRecipe(NamedTuple):
    """Functions that recompute a view from its base, and write the view's elements to its base.

    base: the tensor of which the view is made.
    make: `make(base)` returns the view. Collective if elements are sent between ranks.
    write: `write(base, view)` copies the elements of a separate tensor `view` into the base.
        Collective. None if view and base share memory.
    writable: False if several elements of the view are one element of the base.
    place: for `base[indices]` the indices, by which `x[i] += y` recognises its own view; else None.
    recorded, inference: whether autograd recorded, and whether inference mode was on, when the view
        was first made.
    modules: for a merged tensor, the modules that were being called when the tensor was made. The
        ledger counts the later redistribution for these modules.
    """

    base: DistTensorBase
    make: Callable[[Any], DistTensorBase]
    write: Callable[[Any, Any], object] | None
    writable: bool
    place: Any
    recorded: bool
    inference: bool
    modules: list[Module] | None = None

    @classmethod
    def now(
        cls,
        base: DistTensorBase,
        make: Callable[[Any], DistTensorBase],
        write: Callable[[Any, Any], object] | None,
        writable: bool = True,
        place: Any = None,
    ) -> ViewRecipe:
        """Return a recipe that will call `make` in autograd's present modes."""
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        return cls(base, make, write, writable, place, *modes)

    @contextmanager
    def as_when_made(self) -> Iterator[None]:
        """Restore, within the context, autograd's modes and the called modules of the creation."""
        with (
            torch.inference_mode(self.inference),
            torch.set_grad_enabled(self.recorded),
            nullcontext() if self.modules is None else on_behalf_of(self.modules),
        ):
            yield

    def follow(self) -> Tensor:
        """Recompute the view and return its block. Collective if `make` communicates."""
        with self.as_when_made():
            return self.make(self.base).shard


class PendingElements:
    """Elements of a tensor that are computed at the first read; see `DistTensorBase.pending`."""

    @property
    def requires_grad(self) -> bool:
        """Return whether the elements will require gradients."""
        raise NotImplementedError

    def block(self) -> Tensor:
        """Return this rank's block of all elements. Collective."""
        raise NotImplementedError

    def keep_source(self) -> None:
        """Copy the block that determines the elements, before a write to it. No communication."""

    def part(self, x: Any, index: tuple[Any, ...], runs: Sequence[Run]) -> Any:
        """Return `x[index]`, computed without the other elements of `x`. Collective.

        Return None if that would communicate more than to compute all elements.

        Parameters
        ----------
        x: the tensor with these pending elements.
        index: an integer or slice for each dimension of `x`.
        runs: the first position, step and number of positions of each entry of `index`.
        """
        return None

    def assign(self, x: Any, index: tuple[Any, ...], runs: Sequence[Run], value: Any) -> bool:
        """Set the elements `x[index]` to `value`, and return True. Collective.

        Return False if all elements must be computed before the assignment. The other arguments are
        those of `part`.
        """
        return False

    def rolled(self, x: Any, shifts: Mapping[int, int]) -> Any:
        """Return `x` rolled by `shifts` (by dimension) as a pending tensor; None if unsupported."""
        return None


class DistTensorBase(torch.Tensor):
    """A tensor that is partitioned over the ranks of a grid; `.shape` is the global shape.

    Attributes
    ----------
    grid: the grid over whose ranks the tensor is partitioned.
    cuts: for each dimension, the grid axes over which the dimension is partitioned.
    shard: this rank's block, a plain tensor of the autograd graph. If several ranks hold the block,
        the tensor's gradient is the sum of the gradients of their shards; `to_local` accounts for
        this sum.
    """

    grid: Grid
    cuts: Cuts
    unmerged: DistTensorBase | None = None
    """For a merged tensor, the tensor of which it is a reshape; None for any other. A partitioned
    dimension of `unmerged` is an inner factor of a dimension of the merged tensor, of which no rank
    therefore holds a block."""
    recipe: ViewRecipe | None = None
    """For a view whose block may have to be computed again, its recipe; None for any other tensor.
    Such a view has elements on other ranks than its base, or is a view of such a view or of a
    merged tensor."""
    pending: PendingElements | None = None
    """For a pending tensor, its elements, which are computed when `shard` is first read; None for
    any other tensor."""
    made_after: int | None = None
    """The number of the journal entry after which the tensor was made, if the entry has arguments;
    else None."""
    _shape: torch.Size
    leaf: Tensor | None = None
    """The leaf of the autograd graph if its hooks send messages, else None.

    `shard` is then an alias of the leaf, which all operators read. Ranks may build an operator from
    different autograd nodes. If such nodes read the leaf directly, the hooks would run at different
    times on different ranks."""
    summed_by = ""
    """The place where the gradient of a leaf is summed over its replicas: "hook" for a hook of the
    leaf; "module" for a parallelized module, which sums the gradients accumulated in a backward
    pass; else ""."""
    gradient_hook: Any = None
    """The hook that keeps a non-leaf's gradient in `retained_gradient`, or None."""
    retained_gradient: Tensor | None = None

    @staticmethod
    def __new__(
        cls: type[Distributed], shard: Tensor, shape: Sequence[int], cuts: Cuts, grid: Grid
    ) -> Distributed:
        kind = grid.tensor_type or cls
        self: Distributed = torch_private.make_wrapper(
            kind, shape, dtype=shard.dtype, device=shard.device, requires_grad=shard.requires_grad
        )
        self._shape = shape if type(shape) is torch.Size else torch.Size(shape)
        self.shard, self.cuts, self.grid = shard, cuts, grid
        if grid.journal.place is not None:
            self.made_after = grid.journal.latest()
        return self

    # These attributes are created when first read: few tensors need them, but every operator makes
    # a tensor.

    @cached_property
    def _memory(self) -> SharedMemory:
        """Return the memory that the tensor shares with its views."""
        return SharedMemory()

    @cached_property
    def _redistributed(self) -> dict[Cuts, tuple[Any, Any]]:
        """Return the cache of `redistribute_once`: a state and a block for each target `cuts`.

        The state holds the call of a module, autograd's modes and the version of this tensor. The
        block is reused only while the state is the same.
        """
        return {}

    @classmethod
    def with_pending(
        cls: type[Distributed],
        pending: PendingElements,
        shape: Sequence[int],
        cuts: Cuts,
        grid: Grid,
        example: Tensor,
    ) -> Distributed:
        """Return a pending tensor, whose elements `pending` computes when they are first read.

        `example` is a plain tensor of the element type and device of the result; `shape` is the
        global shape. No communication.
        """
        self = cls(example.detach(), shape, cuts, grid)
        self.pending = pending
        del self.__dict__["shard"]
        self.sync_requires_grad()
        return self

    @classmethod
    def merging(
        cls: type[Distributed],
        unmerged: DistTensorBase,
        shape: Sequence[int],
        cuts: Cuts,
        make: Callable[[Any], DistTensorBase],
        write: Callable[[Any, Any], object],
    ) -> Distributed:
        """Return a merged tensor, a reshape of `unmerged` whose blocks are spread over other ranks.

        The result shares memory and autograd node of `unmerged` until an operator needs its blocks,
        which `make` then gathers. `make` and `write` are those of a `ViewRecipe`. No communication.
        """
        self = cls(unmerged.shard, shape, cuts, unmerged.grid)
        self.unmerged, self._memory = unmerged, unmerged._memory
        self.recipe = ViewRecipe.now(unmerged, make, write)._replace(modules=module_calls())
        del self.__dict__["shard"]
        return self

    @cached_property
    def shard(self) -> Tensor:
        """Return this rank's block. Collective for merged and pending tensors, and some views.

        All ranks fetch the block of a merged or pending tensor at the first call, and the block of
        a view on other ranks again after each write to its base. For any other tensor nothing is
        sent.
        """
        if self.pending is not None:
            block = self.pending.block()
            self.__dict__["shard"], self.pending = block, None
            self.sync_requires_grad()
            return block
        if self.recipe is None:
            raise AttributeError("shard")
        block = self.recipe.follow()
        if self.recipe.write is not None and self._memory is self.recipe.base._memory:
            self._memory = self._memory.copy(self)
        self.__dict__["shard"] = block
        self.sync_requires_grad()
        return block

    def outdate(self) -> None:
        """Delete the block of a view after a write to its base; `shard` fetches a new block."""
        block = self.__dict__.pop("shard", None)
        self.__dict__.pop("_redistributed", None)
        if block is None or self.recipe is None or self.recipe.write is None:
            return
        # Values that autograd saved are no longer those of the serial program.
        if not block.is_inference() and not is_view_of(block, self.recipe.base.held):
            increment_version(block)

    @property
    def held(self) -> Tensor:
        """Return this rank's block, or the base's block if the own block has not been fetched.

        The base's block has the same type, device and `requires_grad`, but other elements. For a
        leaf, return the leaf of the autograd graph. No communication, except for a pending tensor.
        """
        if self.leaf is not None:
            return self.leaf
        if self.pending is not None:
            return self.shard
        if self.unmerged is not None:
            return self.unmerged.held
        block: Tensor | None = self.__dict__.get("shard")
        if block is not None:
            return block
        assert self.recipe is not None
        elements = self.recipe.base.held
        return elements if self.recipe.recorded else elements.detach()

    @property
    def stored(self: Distributed) -> Distributed:
        """Return the tensor whose blocks the ranks hold: `unmerged`, or this tensor itself."""
        return self if self.unmerged is None else cast(Distributed, self.unmerged)

    @property
    def example(self) -> Tensor:
        """Return any plain tensor of the same element type and device. No communication."""
        if self.pending is not None:
            return torch.empty(0, dtype=self.dtype, device=self.device)
        return self.held

    @property
    def brought(self) -> bool:
        """Return whether this rank holds the tensor's own block: `shard` needs no message."""
        return "shard" in self.__dict__

    def materialize(self) -> None:
        """Compute the block of a merged or pending tensor, with an autograd node of its own.

        Collective for merged and pending tensors; no effect on any other tensor.
        """
        if self.pending is not None:
            self.shard  # noqa: B018
        if self.unmerged is not None:
            self.shard = self.shard
            self.unmerged = None

    # These are read so often that torch's own, slower attributes would take noticeable time.

    shape: torch.Size = property(  # type: ignore[assignment]
        attrgetter("_shape"), doc="Return the global shape."
    )

    def dim(self) -> int:
        """Return the number of dimensions."""
        return len(self._shape)

    def numel(self) -> int:
        """Return the number of elements of the global tensor."""
        return self._shape.numel()

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """Return the type of the elements."""
        block: Tensor | None = self.__dict__.get("shard")
        # A view may have another type than its base.
        of_torch: Any = torch.Tensor.dtype
        return of_torch.__get__(self) if block is None else block.dtype  # type: ignore[no-any-return]

    @property
    def grid_layout(self) -> Layout:
        """Return the layout on the grid: the axes over which each dimension is partitioned.

        The first dimension is called `filter` if the tensor is a parameter. The attribute `layout`
        is torch's memory layout, `torch.strided`.

        Examples
        --------
        >>> x = dc.distribute_tensor(torch.ones(1, 1, 8, 4), dc.ProcessGrid(height=2))
        >>> x.grid_layout
        Layout(height='height')
        >>> x.relu().grid_layout == x.grid_layout
        True
        """
        return Layout.of(self.cuts, weight=torch_private.is_marked_parameter(self))

    @property
    def box(self) -> Box:
        """Return the box of global indices that this rank holds.

        Examples
        --------
        >>> grid = dc.ProcessGrid(height=2)
        >>> x = dc.distribute_tensor(torch.ones(1, 1, 7, 4), grid)
        >>> [box.slices[2] for box in grid.all_gather_object(x.box)]
        [slice(0, 4, None), slice(4, 7, None)]
        """
        return rank_box(tuple(self.shape), self.cuts, self.grid.topology, self.grid.rank)

    def become(self, view: DistTensorBase) -> None:
        """Turn this tensor object into `view`, a view of it, as `t_()` and `unsqueeze_()` do.

        A new tensor replaces this object as the base of the views made earlier.
        """
        memory = self._memory
        before = type(self)(self.held, self.shape, self.cuts, self.grid)
        del before.__dict__["shard"]
        before.__dict__.update(self.__dict__, _redistributed={})
        memory.note(before)
        for other in (*memory.views(), *memory.followers()):
            if other.recipe is not None and other.recipe.base is self:
                other.recipe = other.recipe._replace(base=before)
        self.__dict__.pop("shard", None)
        self.leaf, memory.leaf = None, False
        if self.summed_by == "hook":
            self.summed_by = ""
        self.__dict__.update({k: v for k, v in view.__dict__.items() if k == "shard"})
        self.unmerged, self.recipe, self.cuts = view.unmerged, view.recipe, view.cuts
        self._shape, self._memory = view._shape, view._memory
        self._memory.note(self)
        self._redistributed.clear()

    def sync_requires_grad(self) -> None:
        """Copy the shard's `requires_grad` to the wrapping tensor that torch sees."""
        with torch_private.without_torch_function():
            Tensor.requires_grad_(self, (self.pending or self.held).requires_grad)

    @property
    def replicas(self) -> int:
        """Return the number of ranks that hold the same block.

        Examples
        --------
        >>> grid = dc.ProcessGrid(height=2)
        >>> dc.distribute_tensor(torch.ones(1, 1, 8, 4), grid).replicas
        1
        >>> dc.distribute_tensor(torch.ones(8), grid, dc.Layout()).replicas
        2
        """
        return self.grid.size // self.grid.topology.parts(cutting_axes(self.cuts))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        value = f"{self.shard.item()!r}, " if self.dim() == 0 else ""
        value = "pending, " if self.pending is not None else value
        node = None if self.pending is not None else self.held.grad_fn
        gradient = f", grad_fn={node.name()}" if node is not None else ""
        return (
            f"DistTensor({value}shape={tuple(self.shape)}, "
            f"dtype={str(self.dtype).removeprefix('torch.')}, grid_layout={self.grid_layout}, "
            f"local={self.box.shape} on rank {self.grid.rank} of {self.grid}{gradient})"
        )

    def __format__(self, spec: str) -> str:
        # As in torch, only a tensor of one element is formatted as a number.
        return str(self) if self.dim() and not spec else str(super().__format__(spec))

    def __hash__(self) -> int:
        return id(self)

    def __len__(self) -> int:
        if not self.dim():
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]


def is_view_of(block: Tensor, other: Tensor) -> bool:
    """Return whether `block` is a view of `other` in torch, or both are views of one tensor."""
    root = torch_private.base_of(block)
    root = block if root is None else root
    return root is other or root is torch_private.base_of(other)


# Tensors within arguments: one, several, or nested in lists, tuples and dictionaries.


Tensors = Tensor | Sequence[Tensor]


def as_list(tensors: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """Return a list of the given tensor, or of all given tensors."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def shards_of(tensors: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """Return the plain tensors that autograd records: shards of DistTensors, and plain tensors.

    For a merged tensor it is the shard of its `unmerged`. A pending tensor is computed, which is
    collective.
    """
    return [x.held if isinstance(x, DistTensorBase) else x for x in as_list(tensors)]


def tensors_in(*arguments: Any) -> list[Tensor]:
    """Return all tensors in arguments, also in nested lists, tuples and dictionaries."""
    found: list[Tensor] = []
    for argument in arguments:
        if type(argument) in _SIMPLE:
            continue
        if isinstance(argument, Tensor):
            found.append(argument)
        elif isinstance(argument, (tuple, list)):
            if not _SIMPLE.issuperset(map(type, argument)):
                found += tensors_in(*argument)
        elif isinstance(argument, dict) and argument:
            found += tensors_in(*argument.values())
    return found


def replaced(argument: Any, others: Mapping[int, Any]) -> Any:
    """Return a nested argument in which `others[id(x)]`, if it exists, replaces each tensor `x`."""
    if isinstance(argument, Tensor):
        return others.get(id(argument), argument)
    if isinstance(argument, (tuple, list)):
        items = [replaced(x, others) for x in argument]
        if all(map(is_, items, argument)):
            return argument
        if type(argument) is list:
            return items
        kind: Any = type(argument)
        return kind(*items) if hasattr(kind, "_fields") else kind(items)
    if isinstance(argument, dict):
        found = {key: replaced(x, others) for key, x in argument.items()}
        if type(argument) is dict:
            return found
        (other := copy(argument)).update(found)
        return other
    return argument


_SIMPLE = {int, float, bool, str, type(None), torch.dtype}
"""Types of arguments that contain no tensors, for a fast path."""
