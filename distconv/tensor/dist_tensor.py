"""DistTensor: a tensor of a global shape of which every rank holds one block."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from distconv.comm import collectives
from distconv.geometry.layout import (
    Box,
    Layout,
    default_cuts,
    dimension_names,
    rank_box,
    replicating_axes,
)
from distconv.grid.interface import Grid
from distconv.grid.process_grid import ProcessGrid, arranged, axes_of_mesh
from distconv.grid.words import CURRENT, NO_CALL, note_error, operator_name, running
from distconv.tensor import autocast
from distconv.tensor.aliasing import mark_of_parameter, update_views
from distconv.tensor.base import (
    DistTensorBase,
    Tensors,
    as_list,
    replaced,
    shards_of,
    tensors_in,
    whole_numbers,
)
from distconv.tensor.conversion import (
    Chunked,
    block_of_dtensor,
    check_block,
    check_out,
    check_plain,
    global_shape,
    to_dtensor,
)
from distconv.tensor.dispatch import (
    ALIASES,
    METADATA,
    RULES,
    UNCHECKED,
    WAYS_OUT,
    ShardNode,
    innermost_call,
    refuse,
    way_out_of,
)
from distconv.tensor.memory_format import channels_last
from distconv.tensor.one_rank import SERIAL, call_serial
from distconv.tensor.ownership import distributed_roots, undeclared
from distconv.tensor.recording import (
    MAY_IGNORE_FIRST,
    check_brought,
    check_recorded,
    check_untraced,
    gradient_seed,
    ignores_first,
)
from distconv.tensor.redistribution import cuts_of_layout, redistribute
from distconv.torch_private import (
    ShardFunction,
    autocast_is_on,
    mark_parameter,
    run_eagerly,
    without_torch_function,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class DistTensor(Chunked):
    """A tensor that is partitioned over the ranks of a grid; `.shape` is the global shape.

    Made by `distribute_tensor`, `DistTensor.from_local` and by operators on DistTensors. Operators
    without a rule raise `UnsupportedOperation`. Autograd records the operations on the shards.
    The attributes are described at the base class.

    Examples
    --------
    >>> x = dc.distribute_tensor(torch.ones(2, 3, 8, 8), dc.ProcessGrid(height=2))
    >>> x.shape  # of the whole tensor
    torch.Size([2, 3, 8, 8])
    >>> torch.nn.functional.max_pool2d(x, 2).shape
    torch.Size([2, 3, 4, 4])
    >>> tuple(x.shard.shape), x.replicas
    ((2, 3, 4, 8), 1)
    """

    unmerged: DistTensor | None = None

    @classmethod
    @run_eagerly
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        rule = RULES.get(func)
        if rule is not None:
            check_untraced(func, args, kwargs)  # before the call is noted anywhere
            serial = SERIAL.get(rule)
            if serial and args and isinstance(args[0], DistTensorBase) and args[0].grid.size == 1:
                result = call_serial(serial, args, kwargs or {})
                if result is not NotImplemented:
                    return result
            operands = tensors_in(*args, *kwargs.values()) if kwargs else tensors_in(*args)
            if CURRENT.call is not NO_CALL:
                return _run(rule, func, args, kwargs, operands)
            CURRENT.call = func, args, kwargs
            try:
                if func in _ONE_RANK_ALLOWED:
                    return _keep_journal_entry(args, _run(rule, func, args, kwargs, operands))
                for x in operands:
                    # One rank alone may print a tensor that is replicated on every rank.
                    if isinstance(x, DistTensorBase) and any(x.cuts):
                        x.grid.journal.enter_call(func)
                        break
                return _run(rule, func, args, kwargs, operands)
            except Exception as error:
                note_error(func, error)
                raise
            finally:
                CURRENT.call = NO_CALL
        if func in METADATA:
            with without_torch_function():
                return func(*args, **(kwargs or {}))
        check_untraced(func, args, kwargs)
        refuse(
            operator_name(func),
            "there is no rule for this function on distributed tensors",
            *tensors_in(args, kwargs),
            way_out=way_out_of(func),
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> NoReturn:
        check_untraced(str(func), args, kwargs)
        refuse(
            str(func),
            "a distributed tensor has reached an internal function of torch",
            *tensors_in(args, kwargs),
            way_out=WAYS_OUT.get(
                func,
                "Pass x.full_tensor() or x.to_local() to code that bypasses torch's functions; "
                "instead of torch.func's transforms use torch.autograd.grad and loops",
            ),
        )

    def as_subclass(self, cls: type[Any]) -> Any:
        """Return this tensor itself if `cls` is a class of MONAI; a MetaTensor's metadata are lost.

        Raises UnsupportedOperation for other classes.
        """
        # torch does not pass this function to `__torch_function__`.
        return self if cls.__module__.startswith("monai.") else super().as_subclass(cls)

    # From and to plain tensors

    @classmethod
    @run_eagerly
    def from_local(
        cls,
        local: Tensor,
        grid: ProcessGrid,
        layout: Layout | None = None,
        *,
        shape: Sequence[int] | None = None,
    ) -> DistTensor:
        """Return the global tensor of which every rank passes its own block.

        All ranks of the grid call it together; their shapes are compared, unless `shape` is given.
        The gradient of `local` is this rank's block of the global tensor's gradient, also if
        several ranks hold the same block.

        Parameters
        ----------
        local: this rank's block, of the shape of its canonical box, on the CPU or the grid's
            device, to which it is copied. To avoid a wait for the GPU, copy it before by
            `local.to(grid.device, non_blocking=True)` from pinned memory.
        layout: the layout of the global tensor; every dimension over the grid axis of its own name
            when not given.
        shape: the global shape, the same on every rank, if the program knows it. Then nothing is
            sent, and a rank whose block does not fit raises alone. With DISTCONV_DEBUG=1 the ranks
            are compared all the same.

        Raises
        ------
        ValueError
            On every rank, naming the rank whose block does not fit and the shape it should have.

        Examples
        --------
        >>> grid = dc.ProcessGrid(height=2)
        >>> rows = torch.full((1, 1, 3, 5), float(grid.rank))  # this rank's own block
        >>> x = dc.DistTensor.from_local(rows, grid)
        >>> tuple(x.shape), x.sum().item()
        ((1, 1, 6, 5), 15.0)
        """
        check_untraced("DistTensor.from_local")
        check_plain(local, "from_local: local")
        cuts = cuts_of_layout(layout, grid, local.dim())
        with running("DistTensor.from_local"):
            if shape is not None:
                check_block(local, grid, cuts, shape := whole_numbers(shape, "shape"))
            if shape is None or grid.journal.debug:
                shape = global_shape(local, grid, cuts, Layout.of(cuts), "from_local")
        axes = replicating_axes(cuts, grid.topology)
        if axes:
            check_brought("from_local", local)
        own = local.to(grid.device)
        shard = collectives.replicate(own, grid, axes)
        # Autograd forbids in-place writes to a tensor that a Function has returned unchanged.
        return cls(shard.clone() if shard.requires_grad else shard, shape, cuts, grid)

    @classmethod
    @run_eagerly
    def from_dtensor(
        cls, d: DTensor, grid: ProcessGrid | None = None, axes: Mapping[str, str] | None = None
    ) -> DistTensor:
        """Return a DTensor of torch as a DistTensor. All ranks of its mesh call it together.

        Nothing is copied between ranks if torch partitions dimensions as `Layout` does, for example
        if the number of ranks divides the size. Any other dimension is replicated first.
        Gradients flow back to the DTensor.

        Parameters
        ----------
        grid: a grid with the ranks of the DTensor's mesh; made from the mesh by default.
        axes: the grid axis for each name of a mesh dimension, if the names differ.

        Raises
        ------
        ValueError, TypeError
            On every rank, if mesh and grid do not fit, or a placement is none of `Shard`,
            `Replicate` and `Partial`.

        Examples
        --------
        >>> from torch.distributed.tensor import Shard, distribute_tensor
        >>> mesh = dc.ProcessGrid(height=2).device_mesh
        >>> d = distribute_tensor(torch.ones(1, 1, 8, 4), mesh, [Shard(2)])
        >>> x = dc.DistTensor.from_dtensor(d)
        >>> tuple(x.shape), x.grid_layout
        ((1, 1, 8, 4), Layout(height='height'))
        """
        named = axes_of_mesh(d.device_mesh, axes)
        ranks, _ = arranged(d.device_mesh, named)
        grid = ProcessGrid.from_device_mesh(d.device_mesh, axes) if grid is None else grid
        if tuple(ranks) != grid.ranks:
            raise ValueError(
                f"from_dtensor: the mesh has the ranks {ranks}, in the order of the axes, but the "
                f"grid has {list(grid.ranks)}; create the grid by ProcessGrid.from_device_mesh"
            )
        local, layout = block_of_dtensor(d, named, grid)
        return cls.from_local(local, grid, layout)

    @run_eagerly
    def to_dtensor(self) -> DTensor:
        """Return the tensor as a DTensor of torch on `grid.device_mesh`. All ranks call it.

        Both tensors share memory if torch partitions dimensions as this tensor's layout does. Any
        other dimension is replicated first. Gradients flow back from the DTensor. A plain loss of
        the DTensor's `to_local()` raises RuntimeError in the backward pass unless
        `grad_placements` is given, as with `DistTensor.to_local`.

        Examples
        --------
        >>> x = dc.distribute_tensor(torch.ones(1, 1, 8, 4), dc.ProcessGrid(height=2))
        >>> d = x.to_dtensor()
        >>> tuple(d.shape), d.placements
        ((1, 1, 8, 4), (Shard(dim=2),))
        """
        return to_dtensor(self)

    @run_eagerly
    def to_local(self, *, grad: str | None = None) -> Tensor:
        """Return this rank's block as a plain tensor that shares its memory.

        Its channels may be last in memory. No communication, except for a merged reshape, a pending
        Fourier transform and a view of elements on other ranks: all ranks compute the block
        together, at the first call and after each write to the base; an earlier copy keeps its
        values.

        If n ranks hold the block, each rank passes 1/n of its result's gradient on to the tensor.
        If the tensor is partitioned, each rank computes a different loss from its block. The
        backward pass of such a loss raises RuntimeError, unless `grad` is given. A block that
        becomes a DistTensor again by `from_local` needs no `grad`.

        Parameters
        ----------
        grad: "part" states that the serial loss is the sum of the losses that the ranks compute
            from their blocks, as in `((x - y) ** 2).sum() / n` with n elements in all. A mean over
            the block is no such loss. By default no plain loss may depend on the block.

        Raises
        ------
        ValueError
            If `grad` is another value.

        Examples
        --------
        >>> x = dc.distribute_tensor(torch.ones(1, 1, 8, 4), dc.ProcessGrid(height=2))
        >>> tuple(x.to_local().shape)
        (1, 1, 4, 4)
        """
        if grad not in (None, "part"):
            raise ValueError(f'to_local: grad={grad!r}; expected "part" or None')
        check_untraced("to_local", self)
        if self.replicas > 1:
            self._stay_distributed("to_local")
        if not self.requires_grad:
            self.materialize()  # what the program writes to the box is then the tensor's
        memory = self.__dict__.get("_memory")
        if memory is not None:
            memory.keep_for_readers()
        axes = replicating_axes(self.cuts, self.grid.topology)
        block = collectives.unreplicate(self.shard, self.grid, axes)
        if grad is not None or not any(self.cuts):
            return block
        return undeclared(block, f"{tuple(self.shape)} {self.grid_layout}")

    @run_eagerly
    def full_tensor(self) -> Tensor:
        """Return the global tensor as a plain, contiguous tensor on every rank. Collective.

        The result may share memory with a replicated tensor; clone the result before you write to
        it.

        Examples
        --------
        >>> grid = dc.ProcessGrid(height=2)
        >>> x = dc.distribute_tensor(torch.arange(4.0).reshape(1, 1, 4, 1), grid)
        >>> x.full_tensor().flatten()
        tensor([0., 1., 2., 3.])
        """
        check_untraced("full_tensor", self)
        if self.grid.size > 1:
            self._stay_distributed("full_tensor")
        with running("full_tensor", self):
            x = self.stored
            whole: Tensor = redistribute(x, ((),) * x.dim(), "full_tensor").to_local()
            return (whole if x is self else whole.reshape(self.shape)).contiguous()

    def _stay_distributed(self, operator: str) -> None:
        """Raise UnsupportedOperation within a parallelized module, if gradients are recorded.

        There a replicated value must not become a plain tensor. `operator` is the name of the
        calling method, for the error message.
        """
        if torch.is_grad_enabled() and innermost_call() is not None:
            refuse(
                operator,
                "within a parallelized module a replicated value must remain a DistTensor, or "
                "gradients of the parameters combined with it would be counted once for every rank",
                self,
                way_out="Use x.redistribute(Layout()) to replicate it on every rank, or inspect it "
                "under torch.no_grad()",
            )

    @run_eagerly
    def redistribute(self, layout: Layout) -> DistTensor:
        """Return the tensor in another layout on the same grid. All ranks call it together.

        Examples
        --------
        >>> grid = dc.ProcessGrid(height=2)
        >>> x = dc.distribute_tensor(torch.ones(1, 4, 8, 8), grid)
        >>> y = x.redistribute(dc.Layout(channel="height"))
        >>> tuple(x.to_local().shape), tuple(y.to_local().shape)
        ((1, 4, 4, 8), (1, 2, 8, 8))
        """
        check_untraced("redistribute", self)
        with running("redistribute", self, layout):
            return redistribute(self, cuts_of_layout(layout, self.grid, self.dim()), "redistribute")

    # Autograd, which records the operations on the shard

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """Return whether autograd records operations on the tensor."""
        return (self.pending or self.held).requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> DistTensor:
        """Let autograd record operations on this leaf; its `.grad` is then the serial gradient.

        Examples
        --------
        >>> x = dc.distribute_tensor(torch.ones(1, 1, 4, 2), dc.ProcessGrid(height=2))
        >>> _ = x.requires_grad_()
        >>> (x * x).sum().backward()
        >>> x.grad.full_tensor().flatten()
        tensor([2., 2., 2., 2., 2., 2., 2., 2.])
        """
        if requires_grad != self.requires_grad:
            self.materialize()
        fresh = requires_grad and not self.held.requires_grad
        if not requires_grad and self.leaf is not None:
            self.shard, self.leaf, self._memory.leaf = self.leaf, None, False
        if fresh and self.recipe is not None:
            # The block of a leaf stays. It and its base are not written while both are in use.
            self.shard = self.shard
            self.recipe, self._memory = None, self._memory.fork()
        self.held.requires_grad_(requires_grad)
        self.sync_requires_grad()
        axes = replicating_axes(self.cuts, self.grid.topology)
        if fresh and axes and not self.summed_by:
            # The shard keeps the hook, which therefore must not keep the shard.
            grid, shape = self.grid, self.shard.shape
            dtype, device = self.dtype, self.shard.device

            def add_up(part: Tensor | None) -> Tensor | None:
                # A rank without a part takes part in the sum, as others wait for it. The number
                # after the elements counts the ranks with a part.
                own = torch.zeros(shape, dtype=dtype, device=device) if part is None else part
                counted = torch.cat([own.reshape(-1), own.new_full((1,), part is not None)])
                total = collectives.all_reduce_with_grad(counted, grid, axes)
                if part is None and not total.is_meta and not total[-1].item():
                    return None
                return total[:-1].view(shape)

            self.shard.register_hook(add_up)
            self.summed_by = "hook"
        if fresh and self.summed_by == "hook" and not self.shard.is_inference():
            self.leaf, self._memory.leaf = self.shard, True
            with torch.enable_grad():
                self.shard = _Alias.apply(self.leaf)
        return self

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        """Return whether the tensor is a leaf of the autograd graph."""
        return not self.pending.requires_grad if self.pending else self.held.is_leaf

    @property
    def grad_fn(self) -> Any:  # type: ignore[override]
        """Return the autograd node that made the shard, without its hooks; None for a leaf.

        No communication. If the tensor is pending, the first use of the node computes its elements,
        which is collective.
        """
        check_recorded("grad_fn", self)
        if self.pending is not None:
            return ShardNode(lambda: self.held.grad_fn) if self.requires_grad else None
        node = self.held.grad_fn
        return None if node is None else ShardNode(lambda: node)

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        """Return the gradient of a leaf, or a retained one, in the tensor's own layout."""
        if self.gradient_hook is not None or self.pending is not None:
            return self.retained_gradient
        x = self.stored
        if x.held.grad is None:
            return None
        gradient = DistTensor(x.held.grad, x.shape, x.cuts, x.grid)
        return gradient if x is self else gradient.reshape(self.shape)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is None:
            self.held.grad = self.retained_gradient = None
            return
        if not isinstance(value, DistTensor) or (value.shape, value.cuts, value.grid) != (
            self.shape,
            self.cuts,
            self.grid,
        ):
            raise ValueError(
                f"the gradient of {tuple(self.shape)} {self.grid_layout} cannot be set to "
                f"{value!r}; set it to a DistTensor of the same shape, layout and grid"
            )
        if self.gradient_hook is not None:
            self.retained_gradient = value
        else:
            self.materialize()
            self.held.grad = value.shard

    @run_eagerly
    def backward(  # type: ignore[override]
        self,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Tensors | None = None,
    ) -> None:
        """Accumulate the gradients of the leaves on which this tensor depends. Collective.

        Parameters
        ----------
        gradient: the gradient of this tensor, of the same global shape, as a DistTensor or a plain
            tensor equal on all ranks; 1 when not given, for a tensor of one element only.

        Examples
        --------
        >>> x = dc.distribute_tensor(torch.ones(1, 1, 2, 2), dc.ProcessGrid(height=2))
        >>> y = 3 * x.requires_grad_()
        >>> y.backward(torch.ones(1, 1, 2, 2))  # the gradient of the whole tensor
        >>> x.grad.full_tensor()
        tensor([[[[3., 3.],
                  [3., 3.]]]])
        """
        with running("backward", self), distributed_roots([self.shard]):
            self.grid.journal.enter_call("backward")
            seed = gradient_seed(self, gradient, "backward")
            leaves = None if inputs is None else shards_of(inputs)
            torch.autograd.backward(self.shard, seed, retain_graph, create_graph, inputs=leaves)


def as_parameter(x: DistTensor) -> DistTensor:
    """Make `isinstance(x, torch.nn.Parameter)` true for a leaf `x`, and return `x`."""
    mark_parameter(x)
    mark_of_parameter(x)
    return x


@run_eagerly
def distribute_tensor(x: Tensor, grid: ProcessGrid, layout: Layout | None = None) -> DistTensor:
    """Partition a tensor that every rank holds in full; each rank keeps its own block.

    All ranks of the grid call it together, with equal tensors; their shapes are compared. The
    gradient of `x` is the serial gradient, on every rank. On CPUs, blocks of planes have channels
    last in memory if convolutions are then faster; DISTCONV_CHANNELS_LAST=1 or 0 decides for planes
    and volumes on any device. Warns without a layout if no axis partitions a sample.

    Parameters
    ----------
    x: the global tensor, on the CPU or the grid's device, to which each rank's block is copied.
    layout: the layout; every dimension over the grid axis of its own name when not given.

    Raises
    ------
    ValueError
        On every rank, when the ranks' shapes or types differ.

    Examples
    --------
    >>> grid = dc.ProcessGrid(height=2)
    >>> x = dc.distribute_tensor(torch.ones(1, 3, 8, 8), grid)
    >>> tuple(x.shape), tuple(x.to_local().shape)
    ((1, 3, 8, 8), (1, 3, 4, 8))
    """
    check_plain(x, "distribute_tensor: x")
    check_untraced("distribute_tensor")
    cuts = cuts_of_layout(layout, grid, x.dim())
    if layout is None and x.dim() > 3 and grid.size > 1 and not any(cuts):
        names = ", ".join(dimension_names(x.dim()))
        warnings.warn(
            f"distribute_tensor: {grid} partitions none of the dimensions {names}, so every rank "
            "holds the whole tensor; name one of them in ProcessGrid, or pass a layout, for "
            "example Layout.like(x, without='channel') for labels of x",
            stacklevel=2,
        )
    with running("distribute_tensor"):
        global_shape(x, grid, ((),) * x.dim(), Layout.of(cuts), "distribute_tensor")
    box = rank_box(tuple(x.shape), cuts, grid.topology, grid.rank)
    check_brought("distribute_tensor", x)
    # Gradients are summed on the grid's device.
    whole = x.to(grid.device) if x.requires_grad else x
    whole = collectives.replicate(whole, grid, replicating_axes((), grid.topology))
    form = None if x.requires_grad else channels_last(x.shape, x.dtype, cuts, grid)
    kept = form or torch.preserve_format
    block = whole[box.slices].to(grid.device, copy=True, memory_format=kept)
    return DistTensor(block, x.shape, cuts, grid)


def default_layout(grid: Grid, ndim: int) -> Layout:
    """Return the default layout: each dimension is partitioned over the axis of its own name.

    Examples
    --------
    >>> dc.default_layout(dc.ProcessGrid(height=2), 4)
    Layout(height='height')
    """
    return Layout.of(default_cuts(ndim, grid.topology))


def local_box(shape: Sequence[int], grid: Grid, layout: Layout | None = None) -> Box:
    """Return the box of a tensor of global `shape` that this rank holds; no communication.

    Examples
    --------
    >>> grid = dc.ProcessGrid(height=2)
    >>> box = dc.local_box((4, 3, 101, 50), grid)
    >>> box.slices[2] in (slice(0, 51), slice(51, 101))
    True
    """
    sizes = whole_numbers(shape, "shape")
    if min(sizes, default=0) < 0:
        raise ValueError(f"local_box: shape={sizes} has a negative size")
    return rank_box(sizes, cuts_of_layout(layout, grid, len(sizes)), grid.topology, grid.rank)


class _Alias(ShardFunction):
    """The autograd function of an alias of a leaf, in the same memory.

    For autograd the alias is not a view. A view would get a new node at the first read after each
    write to the leaf, which may happen at different times on different ranks.
    """

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Tensor | None:
        return grads[0]


def _keep_journal_entry(args: Sequence[Any], copy: Any) -> Any:
    """Set the journal entry of `copy` to that of `args[0]`, the copied tensor, and return `copy`.

    One rank alone may copy a tensor. Later journal entries must name the copy and its source in the
    same way, to be equal on all ranks.
    """
    if args and isinstance(copy, DistTensorBase):
        copy.made_after = getattr(args[0], "made_after", None)
    return copy


_ONE_RANK_ALLOWED = {
    *UNCHECKED,
    *(getattr(torch.Tensor, name) for name in ("detach", "clone", "contiguous", "cpu")),
    *(getattr(torch.Tensor, name) for name in ("register_hook", "retain_grad", "stride", "type")),
    *(getattr(torch.Tensor, f"is_{name}") for name in ("contiguous", "conj", "neg", "same_size")),
    *(getattr(torch.Tensor, name).__get__ for name in ("data", "retains_grad")),
    torch.Tensor.register_post_accumulate_grad_hook,
    torch.clone,
    torch.detach,
}
"""Functions that change no value, so that a rank may call them alone."""


WITHOUT_MERGED: dict[Callable[..., Any], Callable[..., Any]] = {}
"""For each rule that supports merged tensors without their blocks, the rule for all other tensors.

A rule without an entry reads `shard`, which gathers the blocks of a merged tensor."""


def _run(
    rule: Callable[..., Any],
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any] | None,
    operands: list[Tensor],
) -> Any:
    """Call `rule`, the rule of the torch function `func`, and return its result.

    Check the operands, convert types as autocast does, and handle `out=`. `operands` are the
    tensors in `args` and `kwargs`. Collective if the rule is.
    """
    for x in operands:
        if isinstance(x, DistTensorBase) and x.unmerged is not None:
            break
    else:
        rule = WITHOUT_MERGED.get(rule, rule)
    named = dict(kwargs) if kwargs else {}
    for alias, name in ALIASES.items():
        if alias in named:
            named[name] = named.pop(alias)
    out = named.pop("out", None)
    if out is not None:
        operands = tensors_in(*args, *named.values())
    entered: dict[int, Tensor] = {}
    if func not in UNCHECKED:
        unused = func in MAY_IGNORE_FIRST and ignores_first(func, args, named)
        entered = check_recorded(func, *operands, unused_first=unused)
    if func not in UNCHECKED and autocast_is_on():
        rule = autocast.under_autocast(rule, func, operands)
    if out is None:
        if entered:
            return _run_with(entered, rule, func, args, named)
        return rule(*args, **named)
    for x in as_list(out):
        check_out(func, x, x, *operands)
    result = rule(*args, **named)
    pairs: list[Any] = list(zip(as_list(out), as_list(result), strict=True))
    for x, made in pairs:
        check_out(func, x, made, *operands)
    for x, made in pairs:
        x.shard.copy_(made.shard)
        update_views(x)
    return replaced(result, {id(made): x for x, made in pairs})


def _run_with(
    entered: dict[int, Tensor],
    rule: Callable[..., Any],
    func: Callable[..., Any],
    args: Sequence[Any],
    named: dict[str, Any],
) -> Any:
    """Call `rule` with some plain operands replaced by tensors of `entered`; return its result.

    `entered` maps the id of a plain tensor to a copy whose gradient is summed over the ranks.
    """
    name = func.__name__
    if name == "__setitem__" or name.startswith("__i") or name.rstrip("_") + "_" == name:
        # The written tensor is the program's own, and no view of it may stay in use.
        others, named = replaced(args[1:], entered), replaced(named, entered)
        entered.clear()
        return rule(*args[:1], *others, **named)
    result = rule(*replaced(args, entered), **replaced(named, entered))
    if any(x.requires_grad and not isinstance(x, DistTensor) for x in tensors_in(result)):
        # A plain result, as of plain.type_as(x), has met nothing distributed.
        return rule(*args, **named)
    return result
