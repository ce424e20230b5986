"""DistTensor: a tensor of global shape of which every rank holds one box."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar, Token
from sys import _getframe
from typing import Any, NoReturn, TypeVar
from weakref import ref

import torch
from torch import Tensor

from distconv import exchange
from distconv.blocks import global_shape
from distconv.checksums import CURE, due, names_of, unequal
from distconv.grid import ProcessGrid
from distconv.layout import (
    Box,
    Cuts,
    Layout,
    cutting_axes,
    default_cuts,
    effective_cuts,
    rank_box,
    replicating_axes,
)
from distconv.ledger import Movement, record, tracing
from distconv.memory import Memory
from distconv.ownership import OWNED, owned_among, started_at, watch
from distconv.plan import Plan, make_plan
from distconv.whereabouts import CURRENT, name_of, running, user_line
from distconv.whole import whole_numbers
from distconv.window import IndexMap, Same

Tensors = Tensor | Sequence[Tensor]
Rule = TypeVar("Rule", bound=Callable[..., Any])


class ModuleCall:
    """A call of a parallelized module, and of all that it calls: what is redistributed within."""

    def __init__(self) -> None:
        self._redistributed: list[ref[DistTensor]] = []

    def note(self, x: DistTensor) -> None:
        """Remember, for as long as it lives, a tensor that keeps what was made of it."""
        self._redistributed.append(ref(x))

    def end(self) -> None:
        """Let go of what tensors keep for the rest of the call; inputs may live much longer."""
        for each in self._redistributed:
            x = each()
            if x is not None:
                x._recuts.clear()
        self._redistributed.clear()


IN_MODULE: ContextVar[ModuleCall | None] = ContextVar("distconv_in_module", default=None)
"""The present outermost call of a parallelized module, whose parameters get parts of their
gradients; None where none is computing."""


def enter_call() -> Token[ModuleCall | None]:
    """Begin a call of a parallelized module, or go deeper within the present one."""
    return IN_MODULE.set(IN_MODULE.get() or ModuleCall())


def leave_call(entered: Token[ModuleCall | None]) -> None:
    """Leave what `enter_call` has begun, from the innermost outwards."""
    call = IN_MODULE.get()
    IN_MODULE.reset(entered)
    if call is not None and IN_MODULE.get() is None:
        call.end()


RULES: dict[Callable[..., Any], Callable[..., Any]] = {}
"""What each torch function means on DistTensors: a function of the same arguments."""


def implements(*functions: Callable[..., Any]) -> Callable[[Rule], Rule]:
    """Register the decorated rule as the meaning of torch functions on DistTensors.

    The rule is called on every rank of the grid with the arguments of the torch function, at least
    one of which is or contains a DistTensor. It decides from global metadata alone whether it
    supports them, and raises `UnsupportedOperation` before any message where it does not.
    """

    def register(rule: Rule) -> Rule:
        for function in functions:
            RULES[function] = rule
        return rule

    return register


class UnsupportedOperation(NotImplementedError):
    """An operator, or an argument of it, that is not supported on these layouts.

    Raised on every rank before any message is sent. The message names the operator, the layouts,
    and the way out.
    """


def refuse(operator: str, reason: str, *operands: Any, way_out: str) -> NoReturn:
    """Raise `UnsupportedOperation` for `operator` on these operands."""
    tensors = [x for x in operands if isinstance(x, DistTensor)]
    where = "; ".join(f"{tuple(x.shape)} {x.layout} on {x.grid}" for x in tensors)
    raise UnsupportedOperation(f"{operator}: {reason} [{where}]. {way_out}")


class DistTensor(torch.Tensor):
    """A tensor that is cut over the ranks of a grid; `.shape` is the global shape.

    Made by `distribute_tensor`, `DistTensor.from_local` and by operators on DistTensors. Operators
    without a rule raise `UnsupportedOperation`. Autograd records the operations on the shards.

    Attributes
    ----------
    grid: the grid over whose ranks it is cut.
    cuts: for each dimension, the grid axes it is cut over.
    shard: this rank's block as the autograd graph knows it. Gradients of a replicated shard are
        parts of the whole, which is their sum over the replicas; `to_local` accounts for that.
    """

    grid: ProcessGrid
    cuts: Cuts
    shard: Tensor
    _is_param: bool
    _shape: torch.Size
    _memory: Memory
    _summing: bool
    """Whether a hook, or a module, adds up the gradients of the leaf's replicas."""
    _keeper: Any
    """The hook that keeps the gradient of what is no leaf in `_retained`; None where none does."""
    _retained: Tensor | None
    _recuts: dict[Cuts, tuple[Any, DistTensor]]
    """What `recut_once` has made of it in the present call, and in which state of the tensor."""

    @staticmethod
    def __new__(
        cls, shard: Tensor, shape: Sequence[int], cuts: Cuts, grid: ProcessGrid
    ) -> DistTensor:
        self: DistTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, dtype=shard.dtype, device=shard.device, requires_grad=shard.requires_grad
        )
        self._shape = torch.Size(shape)
        self.shard, self.cuts, self.grid = shard, cuts, grid
        self._memory = Memory()
        self._summing = False
        self._keeper = None
        self._retained = None
        self._recuts = {}
        return self

    def __init__(self, *args: Any) -> None:
        super().__init__()

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        rule = RULES.get(func)
        if rule is not None:
            if CURRENT.function is not None:
                return _run(rule, func, args, kwargs)
            CURRENT.function, CURRENT.arguments, CURRENT.keywords = func, args, kwargs
            try:
                return _run(rule, func, args, kwargs)
            finally:
                CURRENT.function, CURRENT.arguments, CURRENT.keywords = None, (), None
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        refuse(
            name_of(func),
            "there is no rule for this function on distributed tensors",
            *tensors_in(args, kwargs),
            way_out=_WAYS_OUT.get(
                func,
                "Compute it on the whole tensor, x.full_tensor(), or, where it treats every "
                "element alone, on x.to_local()",
            ),
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> NoReturn:
        refuse(
            str(func),
            "a distributed tensor has reached torch below its functions",
            *tensors_in(args, kwargs),
            way_out=_WAYS_OUT.get(
                func, "Pass x.full_tensor() or x.to_local() to code below torch's functions"
            ),
        )

    # What it is

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The global shape."""
        return self._shape

    # Asked for so often that torch's way to them would tell.

    def dim(self) -> int:
        """The number of dimensions."""
        return len(self._shape)

    def numel(self) -> int:
        """The number of elements of the global tensor."""
        return self._shape.numel()

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """The type of its elements."""
        return self.shard.dtype

    @property
    def layout(self) -> Layout:  # type: ignore[override]
        """How it is cut; of a parameter, the first dimension is that of the filters."""
        return Layout.of(self.cuts, weight=getattr(self, "_is_param", False))

    @property
    def box(self) -> Box:
        """The box of global indices that this rank holds."""
        return rank_box(tuple(self.shape), self.cuts, self.grid.topology, self.grid.rank)

    @property
    def replicas(self) -> int:
        """The number of ranks that hold the same box."""
        return self.grid.size // self.grid.topology.parts(cutting_axes(self.cuts))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        value = f"{self.shard.item()!r}, " if self.dim() == 0 else ""
        node = self.shard.grad_fn
        gradient = f", grad_fn={node.name()}" if node is not None else ""
        return (
            f"DistTensor({value}shape={tuple(self.shape)}, "
            f"dtype={str(self.dtype).removeprefix('torch.')}, layout={self.layout}, "
            f"local={tuple(self.shard.shape)} on rank {self.grid.rank} of {self.grid}{gradient})"
        )

    def __hash__(self) -> int:
        return id(self)

    def __len__(self) -> int:
        if not self.dim():
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    # Into and out of the distributed world

    @classmethod
    def from_local(
        cls, local: Tensor, grid: ProcessGrid, layout: Layout | None = None
    ) -> DistTensor:
        """The global tensor of which every rank passes its own box.

        All ranks of the grid call it together; their shapes are compared. The gradient of `local`
        is that of the global tensor's box, also where several ranks hold the same box.

        Parameters
        ----------
        local: this rank's block, of the shape that the canonical cut gives it, on the CPU or the
            grid's device. It moves to the latter; without waiting for the GPU, where the program
            moves it before, `local.to(grid.device, non_blocking=True)` from pinned memory.
        layout: how the global tensor is cut; every dimension over the grid axis of its own name
            when not given.

        Raises
        ------
        ValueError
            On every rank, naming the rank whose block is off and what it should hold.
        """
        cuts = cuts_of(layout, grid, local.dim())
        with running("DistTensor.from_local"):
            shape = global_shape(local, grid, cuts, Layout.of(cuts), "from_local")
        axes = replicating_axes(cuts, grid.topology)
        if axes:
            _check_brought("from_local", local)
        own = local.to(grid.device)
        shard = exchange.replicate(own, grid, axes)
        # Autograd forbids to write in place to what a Function has passed on.
        return cls(shard.clone() if shard.requires_grad else shard, shape, cuts, grid)

    def to_local(self) -> Tensor:
        """This rank's box as a plain tensor, sharing memory; no communication.

        Where several ranks hold the box, its gradient is shared out equally among them.
        """
        if self.replicas > 1:
            self._stay_distributed("to_local")
        axes = replicating_axes(self.cuts, self.grid.topology)
        return exchange.share(self.shard, self.grid, axes)

    def full_tensor(self) -> Tensor:
        """The whole tensor as a plain tensor, on every rank; all ranks call it together."""
        if self.grid.size > 1:
            self._stay_distributed("full_tensor")
        with running("full_tensor", self):
            return recut(self, ((),) * self.dim(), "full_tensor").to_local()

    def _stay_distributed(self, operator: str) -> None:
        """Refuse to hand a replicated value to the plain world within a parallelized module."""
        if IN_MODULE.get() and torch.is_grad_enabled():
            refuse(
                operator,
                "within a parallelized module a replicated value has to stay distributed, or "
                "parameters that meet it would count their gradients once for every rank",
                self,
                way_out="Use x.redistribute(Layout()) to have it whole on every rank, or take it "
                "under torch.no_grad() to look at it",
            )

    def redistribute(self, layout: Layout) -> DistTensor:
        """The same tensor in another layout on the same grid; all ranks call it together."""
        with running("redistribute", self, layout):
            return recut(self, cuts_of(layout, self.grid, self.dim()), "redistribute")

    # Autograd, which lives on the shard

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """Whether operations on it are recorded."""
        return self.shard.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> DistTensor:
        """Record operations on this leaf; `.grad` is then the gradient, also on replicas."""
        fresh = requires_grad and not self.shard.requires_grad
        self.shard.requires_grad_(requires_grad)
        self._follow_shard()
        axes = replicating_axes(self.cuts, self.grid.topology)
        if fresh and axes and not self._summing:
            # The shard keeps the hook, which therefore must not keep the shard.
            grid, shape = self.grid, self.shard.shape
            dtype, device = self.dtype, self.shard.device

            def add_up(part: Tensor | None) -> Tensor | None:
                # A rank without a part takes part in the sum, for the sake of the others.
                own = torch.zeros(shape, dtype=dtype, device=device) if part is None else part
                total = exchange.sum_over(own, grid, axes)
                return None if part is None else total

            self.shard.register_hook(add_up)
            self._summing = True
        return self

    def gradients_are_summed(self) -> None:
        """Tell that somebody else adds up the gradients of its replicas from now on."""
        self._summing = True

    def _follow_shard(self) -> None:
        """Let torch know, below its functions, whether the shard requires gradients."""
        with torch._C.DisableTorchFunctionSubclass():
            torch._C.TensorBase.requires_grad_(self, self.shard.requires_grad)

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        """Whether it is a leaf of the autograd graph."""
        return self.shard.is_leaf

    @property
    def grad_fn(self) -> Any:  # type: ignore[override]
        """The autograd node that has made the shard."""
        check_recorded("grad_fn", self)
        if _getframe(1).f_globals.get("__name__") == torch.nn.Module.__module__:
            refuse(
                "register_backward_hook",
                "the hook of a module would see this rank's part of the gradients",
                self,
                way_out="Register a forward hook that calls register_hook on the module's output, "
                "whose hooks see the serial gradient",
            )
        return self.shard.grad_fn

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        """The gradient of a leaf, or a retained one, in the tensor's own layout."""
        if self._keeper is not None:
            return self._retained
        gradient = self.shard.grad
        if gradient is None:
            return None
        return DistTensor(gradient, self.shape, self.cuts, self.grid)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is None:
            self.shard.grad = self._retained = None
            return
        if not isinstance(value, DistTensor) or (value.shape, value.cuts, value.grid) != (
            self.shape,
            self.cuts,
            self.grid,
        ):
            raise ValueError(
                f"the gradient of {tuple(self.shape)} {self.layout} cannot be set to {value!r}; "
                "set it to a DistTensor of the same shape, layout and grid"
            )
        if self._keeper is not None:
            self._retained = value
        else:
            self.shard.grad = value.shard

    def backward(  # type: ignore[override]
        self,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Tensors | None = None,
    ) -> None:
        """Accumulate the gradients of the leaves; all ranks call it together.

        Parameters
        ----------
        gradient: of the same global shape, as a DistTensor or a plain tensor equal on all ranks;
            1 when not given, for a tensor of one element only.
        """
        with running("backward", self), started_at([self.shard]):
            seed = seed_of(self, gradient, "backward")
            leaves = None if inputs is None else shards_of(inputs)
            torch.autograd.backward(self.shard, seed, retain_graph, create_graph, inputs=leaves)


def as_parameter(x: DistTensor) -> DistTensor:
    """A leaf as what torch.nn takes for a Parameter."""
    x._is_param = True
    return x


def distribute_tensor(x: Tensor, grid: ProcessGrid, layout: Layout | None = None) -> DistTensor:
    """Cut a tensor that every rank holds in full; each rank keeps its own box.

    All ranks of the grid call it together, with equal tensors; their shapes are compared. The
    gradient of `x` is that of the whole tensor, on every rank.

    Parameters
    ----------
    x: the global tensor, on the CPU or the grid's device, to which each rank's box moves.
    layout: how to cut it; every dimension over the grid axis of its own name when not given.

    Raises
    ------
    ValueError
        On every rank, when the ranks' shapes or types differ.
    """
    if isinstance(x, DistTensor):
        raise TypeError("distribute_tensor: x is distributed already; use x.redistribute(layout)")
    if not isinstance(x, Tensor):
        raise TypeError(f"distribute_tensor: x is a {type(x).__name__}; pass torch.as_tensor(x)")
    cuts = cuts_of(layout, grid, x.dim())
    with running("distribute_tensor"):
        global_shape(x, grid, ((),) * x.dim(), Layout.of(cuts), "distribute_tensor")
    box = rank_box(tuple(x.shape), cuts, grid.topology, grid.rank)
    _check_brought("distribute_tensor", x)
    # Gradients are added up where the grid computes.
    whole = x.to(grid.device) if x.requires_grad else x
    whole = exchange.replicate(whole, grid, replicating_axes((), grid.topology))
    return DistTensor(whole[box.slices].to(grid.device, copy=True), x.shape, cuts, grid)


def _check_brought(operator: str, x: Tensor) -> None:
    """Refuse to distribute what depends on parameters whose gradients are added up already."""
    p = owned_among([x]) if x.requires_grad else None
    if p is not None:
        refuse(
            operator,
            f"the tensor {tuple(x.shape)} depends on a parameter of a parallelized module, of "
            f"shape {tuple(p.shape)}, whose gradient would be counted once for every rank",
            way_out="Parameters take part in operations with distributed tensors as they are",
        )


def default_layout(grid: ProcessGrid, ndim: int) -> Layout:
    """The layout of a tensor when none is given: each dimension over the axis of its own name."""
    return Layout.of(default_cuts(ndim, grid.topology))


def local_box(shape: Sequence[int], grid: ProcessGrid, layout: Layout | None = None) -> Box:
    """The box of a tensor of global `shape` that this rank holds; no communication."""
    sizes = whole_numbers(shape, "shape")
    if min(sizes, default=0) < 0:
        raise ValueError(f"local_box: shape={sizes} has a negative size")
    return rank_box(sizes, cuts_of(layout, grid, len(sizes)), grid.topology, grid.rank)


def gathered(
    x: DistTensor, needs: Sequence[IndexMap], cuts: Cuts, operator: str, fill: float = 0.0
) -> Tensor:
    """The inputs that this rank's block of an output cut by `cuts` needs, in one buffer.

    All ranks call it. Where the output is cut otherwise than `x`, that is a redistribution and
    recorded under `operator`.
    """
    if cuts == x.cuts and all(isinstance(need, Same) for need in needs):
        return x.shard
    plan = make_plan(x.grid.topology, x.grid.rank, tuple(x.shape), x.cuts, cuts, tuple(needs))
    note(x, plan, cuts, operator)
    return exchange.gather(x.shard, plan, x.grid, fill)


def reduce_scattered(
    partial: Tensor,
    shape: tuple[int, ...],
    source: Cuts,
    target: Cuts,
    grid: ProcessGrid,
    operator: str,
) -> Tensor:
    """This rank's block, cut by `target`, of the sum of blocks of `shape` cut by `source`.

    All ranks call it, each with its summand. The sum is over the ranks along the axes that only
    `target` cuts; `partial` itself where there are none.
    """
    if source == target:
        return partial
    plan = make_plan(grid.topology, grid.rank, shape, target, source, (Same(),) * len(shape))
    layouts = Layout.of(source), Layout.of(target)
    record(Movement(operator, *layouts, plan, partial.element_size(), adjoint=True))
    return exchange.accumulate(partial, plan, grid)


def note(x: DistTensor, plan: Plan, cuts: Cuts, operator: str) -> None:
    """Let the ledger know what `operator` moves of `x` to an output cut by `cuts`."""
    if cuts != x.cuts or tracing():
        itemsize = x.shard.element_size()
        target = Layout.of(cuts, weight=getattr(x, "_is_param", False))
        record(Movement(operator, x.layout, target, plan, itemsize))


def _run(
    rule: Callable[..., Any],
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any] | None,
) -> Any:
    """What a torch function means on these arguments, by its rule."""
    named = {_ALIASES.get(name, name): x for name, x in kwargs.items()} if kwargs else {}
    out = named.pop("out", None)
    if func not in _UNCHECKED:
        check_recorded(func, *tensors_in(*args, named))
    if out is None:
        return rule(*args, **named)
    operands = tensors_in(*args, named)
    _check_out(func, out, out, *operands)
    result = rule(*args, **named)
    _check_out(func, out, result, *operands)
    out.shard.copy_(result.shard)
    return out


def _check_out(operator: Callable[..., Any], out: Any, result: Any, *operands: Tensor) -> None:
    """Refuse an `out` that cannot take the result of an operator."""
    if not (
        isinstance(out, DistTensor)
        and isinstance(result, DistTensor)
        and any(isinstance(x, DistTensor) for x in operands)
        and (out.shape, out.cuts, out.grid) == (result.shape, result.cuts, result.grid)
        and out.dtype == result.dtype
        and not any(x.requires_grad for x in (out, *operands) if torch.is_grad_enabled())
    ):
        refuse(
            name_of(operator),
            "out= has to be a distributed tensor of the shape, layout and type of the result, "
            "outside autograd",
            *tensors_in(out, *operands),
            way_out="Use the returned tensor",
        )
    check_writable(out, name_of(operator))


def check_recorded(operator: Callable[..., Any] | str, *operands: Any) -> None:
    """Refuse operands whose gradients would be lost, or shared out over the ranks twice.

    A torch.autograd.Function sees no shards, and so records nothing. Autograd lives on the shards;
    below torch's functions the wrapper only remembers that they require gradients, so that torch
    marks what a Function has returned. A value that was handed out to the plain world, where every
    rank computes the same with it, is no parameter, of which every rank computes a part.
    """
    plain = []
    for x in operands:
        if isinstance(x, DistTensor):
            with torch._C.DisableTorchFunctionSubclass():
                lost = _GRAD_FN(x) is not None
            if lost:
                refuse(
                    name_of(operator),
                    "a torch.autograd.Function was applied to a distributed tensor, which loses "
                    "its gradients",
                    x,
                    way_out="Wrap it in a function with a rule (distconv.elementwise, .windowed, "
                    ".implements), or use torch functions; in torch.utils.checkpoint set "
                    "use_reentrant=False; instead of a full backward hook register a forward hook "
                    "that calls register_hook on the module's output",
                )
        elif not isinstance(x, Tensor) or OWNED in x.__dict__:
            continue
        elif x.grad_fn is not None and exchange.handed_out(x):
            refuse(
                name_of(operator),
                f"the plain tensor {tuple(x.shape)} depends on what to_local() or full_tensor() "
                "has handed out, and meets distributed tensors again",
                *operands,
                way_out="Use x.redistribute(Layout()) to have it whole on every rank, or bring it "
                "back by distribute_tensor or DistTensor.from_local",
            )
        else:
            plain.append(x)
    if plain:
        _check_plain(operator, plain, [x for x in operands if isinstance(x, DistTensor)])


def _check_plain(
    operator: Callable[..., Any] | str, plain: list[Tensor], distributed: list[DistTensor]
) -> None:
    """Raise on every rank where plain operands differ between ranks; looks at some calls only.

    Parameters that belong to no parallelized module are watched; those of one are compared as a
    whole, elsewhere.
    """
    x = next(iter(distributed), None)
    if x is None or x.grid.size == 1:
        return
    watch(plain)
    # One rank alone may compute with what it has in full, to print it, say.
    if not (any(x.cuts) or x.shard.requires_grad):
        return
    if not due((operator, x.shape), x.grid, first=2, then=256):
        return
    found = unequal(names_of(plain), x.grid)
    if found:
        name, ranks = found
        raise ValueError(
            f"{name_of(operator)} at {user_line()}: a plain tensor, {name}, takes part and is not "
            f"the same on all ranks: {ranks}. Plain tensors have the global shape and equal "
            f"values: {CURE}; a rank's own block becomes distributed by DistTensor.from_local"
        )


def seed_of(x: DistTensor, gradient: Tensor | None, operator: str) -> Tensor:
    """This rank's share of the gradient with which a backward pass starts at `x`.

    A replicated value's gradient is the sum over its replicas. All ranks call it.
    """
    check_recorded(operator, x)
    if gradient is None:
        if x.numel() != 1:
            raise RuntimeError(
                f"{operator}: grad can be implicitly created only for scalar outputs, not for "
                f"shape {tuple(x.shape)}; pass the gradient"
            )
        return torch.ones_like(x.shard) / x.replicas
    if gradient.shape != x.shape:
        raise RuntimeError(
            f"{operator}: gradient has shape {tuple(gradient.shape)}, expected {tuple(x.shape)}"
        )
    if not isinstance(gradient, DistTensor):
        axes = replicating_axes((), x.grid.topology)
        return exchange.replicate(gradient, x.grid, axes)[x.box.slices] / x.replicas
    if gradient.grid != x.grid:
        raise ValueError(
            f"{operator}: the gradient lives on {gradient.grid}, the tensor on {x.grid}; make "
            "them on one grid"
        )
    own = recut(gradient, x.cuts, operator).shard
    return own / x.replicas if x.replicas > 1 else own


def recut(x: DistTensor, cuts: Cuts, operator: str) -> DistTensor:
    """`x` with other cuts, recorded as a redistribution on behalf of `operator`."""
    if cuts == x.cuts:
        return x
    shard = gathered(x, (Same(),) * x.dim(), cuts, operator)
    return DistTensor(shard, x.shape, cuts, x.grid)


def recut_once(x: DistTensor, cuts: Cuts, operator: str) -> DistTensor:
    """`x` with other cuts for one of several consumers within a call of a parallelized module.

    They share what has been made for the first. To the program the result is `x` itself, so it
    counts as a view of it.
    """
    if cuts == x.cuts:
        return x
    call, state = IN_MODULE.get(), None
    # Tensors of the inference mode count no versions, and what is made without gradients has none.
    if call is not None and not x.shard.is_inference():
        state = call, torch.is_grad_enabled(), x.shard.requires_grad, x.shard._version
        made = x._recuts.get(cuts)
        if made is not None and made[0] == state:
            return made[1]
    twin = view_of(x, recut(x, cuts, operator).shard, x.shape, cuts, copied=True)
    if call is not None and state is not None:
        call.note(x)
        x._recuts[cuts] = state, twin
    return twin


def view_of(
    x: DistTensor, shard: Tensor, shape: Sequence[int], cuts: Cuts, *, copied: bool
) -> DistTensor:
    """What torch makes a view of `x`; `copied` where its elements may lie elsewhere.

    Whether they may has to follow from global metadata. Writing to one of the two is then refused
    for as long as the other is in use (`check_writable`).
    """
    view = DistTensor(shard, shape, cuts, x.grid)
    view._memory = x._memory.copy() if copied else x._memory
    return view


def check_writable(x: DistTensor, operator: str) -> None:
    """Refuse an in-place operation that serial torch would let a view, here a copy, see as well."""
    x._recuts.clear()
    if not x._memory.alone:
        refuse(
            operator,
            "the tensor is written in place while a view of it, or a tensor that it is a view of, "
            "is in use; their elements lie on different ranks",
            x,
            way_out="Use the function that returns a new tensor, or .clone() the view; where "
            "parallelize(layouts=...) has made it, let the layout begin one module later",
        )


def cuts_of(layout: Layout | None, grid: ProcessGrid, ndim: int) -> Cuts:
    """How a tensor of `ndim` dimensions is cut in a layout, or in the default one for None."""
    if layout is None:
        return default_cuts(ndim, grid.topology)
    if not isinstance(layout, Layout):
        raise TypeError(f"layout={layout!r} is not a Layout; write Layout(height='height'), say")
    return effective_cuts(layout.cuts(ndim), grid.topology)


def listed(tensors: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """One tensor or several as a list."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def shards_of(tensors: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """The tensors that autograd knows."""
    return [x.shard if isinstance(x, DistTensor) else x for x in listed(tensors)]


def tensors_in(*arguments: Any) -> list[Tensor]:
    """The tensors in arguments, also within lists, tuples and dictionaries of them."""
    found: list[Tensor] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            found.append(argument)
        elif isinstance(argument, (tuple, list)):
            found += tensors_in(*argument)
        elif isinstance(argument, dict):
            found += tensors_in(*argument.values())
    return found


_GRAD_FN: Any = vars(torch._C.TensorBase)["grad_fn"].__get__

_SAVE = (
    "Save x.full_tensor(), or every rank its x.to_local(); of sharded parameters and their "
    "optimizers distconv.full_state_dict(...)"
)
_PARAMETRIZE = "Apply parametrizations, such as weight_norm or spectral_norm, before parallelize"
_CONVERT = "Convert a module before parallelize, or a tensor by x.to(...)"
_WAYS_OUT: dict[Any, str] = {
    torch.Tensor.__reduce_ex__: _SAVE,
    torch._has_compatible_shallow_copy_type: _CONVERT,
    torch.Tensor.data.__set__: _CONVERT,  # type: ignore[attr-defined]
    torch.norm_except_dim: _PARAMETRIZE,
    torch.Tensor.H.__get__: f"Use x.mT.conj(). {_PARAMETRIZE}",  # type: ignore[attr-defined]
    torch.ops.aten.set_.source_Tensor: _PARAMETRIZE,
    **{
        getattr(torch, f"_fused_{name}_"): "Make the optimizer with fused=False"
        for name in ("adam", "adamw", "adagrad", "sgd")
    },
}
"""What to do instead of functions for which the whole tensor is no way out."""

_UNCHECKED = {torch.autograd.grad, torch.autograd.backward, torch.Tensor.__deepcopy__}
"""Functions that take plain tensors as plain ones, or what has been copied before."""

_ALIASES = {"axis": "dim", "keepdims": "keepdim"}
"""numpy's names, which torch takes for its own."""

_PROPERTIES = (
    *("dtype", "device", "ndim", "itemsize", "nbytes"),
    *("is_cpu", "is_cuda", "is_meta", "is_mps", "is_nested", "is_quantized", "is_sparse", "is_xpu"),
)

_METADATA: set[Any] = {
    *(getattr(torch.Tensor, name).__get__ for name in _PROPERTIES),
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.ndimension,
    torch.Tensor.numel,
    torch.Tensor.nelement,
    torch.Tensor.element_size,
    torch.Tensor.get_device,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
    torch.Tensor.is_signed,
    torch.Tensor.is_inference,
    torch.is_inference,
    torch.is_floating_point,
    torch.is_complex,
    torch.is_signed,
    torch.numel,
}
