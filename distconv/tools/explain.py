"""Predict what a module does on a grid: layouts, halos, redistributions and memory.

The module's own Python runs on tensors without elements, as one rank of a grid that need not exist
(`planning.dry_run`); so the plan is that of the very code that will run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from distconv.comm.ledger import Movement, Redistribution, trace_movements, without_counting
from distconv.geometry.layout import Layout, dimension_names
from distconv.grid.process_grid import ProcessGrid
from distconv.model.input_layouts import match_layouts, redistribute_inputs
from distconv.planning.dry_run import DryRunGrid, without_elements
from distconv.planning.module_calls import ModuleCalls, is_layer
from distconv.planning.table import size, table
from distconv.tensor.dispatch import RULES, UnsupportedOperation
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.module_call import enter_call
from distconv.tensor.nested import tensors_in
from distconv.transport.world import world_if_rank

Shape = Sequence[int]


@dataclass(frozen=True)
class Halo:
    """The elements that an operator needs of other ranks' blocks, where the layout stays."""

    operator: str
    widths: dict[str, tuple[int, int]]
    """Elements before and after the rank's own, along every dimension that is cut."""
    bytes: int
    """Bytes received from other ranks."""


@dataclass(frozen=True)
class LayerPlan:
    """One call of a layer in the forward pass, or of a function between layers, on one rank."""

    name: str
    """The layer's place in the module; for a function, the module whose `forward` calls it."""
    kind: str
    """The type of the layer, or the name of the function."""
    shape: tuple[int, ...] | None
    """Global shape of the (first) output."""
    layout: Layout | None
    """How the output is cut; None for a plain tensor."""
    local_shape: tuple[int, ...] | None
    halos: tuple[Halo, ...]
    redistributions: tuple[Redistribution, ...]
    reduced_bytes: int
    """Bytes given to reductions in the forward pass."""
    kept_bytes: int
    """Memory kept for the backward pass, without parameters and what earlier layers keep."""
    parameter_bytes: int
    """The layer's own parameters, where they appear first."""
    refusal: str | None = None
    """The reason why the layer cannot run on this grid, if it cannot."""

    @property
    def halo_bytes(self) -> int:
        """Return the bytes received in halos."""
        return sum(halo.bytes for halo in self.halos)

    @property
    def redistributed_bytes(self) -> int:
        """Return the bytes received in redistributions."""
        return sum(moved.bytes for moved in self.redistributions)


@dataclass(frozen=True)
class Explanation:
    """The plan of a module on one rank of a grid; prints as a table."""

    module: str
    grid: str
    rank: int
    layers: tuple[LayerPlan, ...]
    """In the order of the forward pass; ends with the first layer that is refused."""
    parameter_bytes: int
    """All parameters, which every rank holds."""
    serial_kept_bytes: int | None
    """Memory that the serial program keeps for the backward pass; None where the module is written
    for distributed tensors alone."""

    @property
    def kept_bytes(self) -> int:
        """Return the memory that the rank keeps for the backward pass, without parameters."""
        return sum(layer.kept_bytes for layer in self.layers)

    @property
    def refusal(self) -> str | None:
        """Return why the module cannot run on this grid; None when it can."""
        return self.layers[-1].refusal if self.layers else None

    def __str__(self) -> str:
        moved = sum(layer.redistributed_bytes for layer in self.layers)
        received = sum(layer.halo_bytes for layer in self.layers)
        reduced = sum(layer.reduced_bytes for layer in self.layers)
        sums = *map(_size, (received, moved)), "", _size(reduced)
        memory = map(_size, (self.kept_bytes, self.parameter_bytes))
        total = "total", *("",) * 5, *sums, *memory
        lines = [
            f"{self.module} on rank {self.rank} of {self.grid}, forward",
            listed(self.layers, total),
        ]
        if self.refusal is not None:
            lines.append(f"{self.layers[-1].name} is refused: {self.refusal}")
        elif self.serial_kept_bytes is not None:
            kept, alone = self.kept_bytes, self.serial_kept_bytes
            times = f", {alone / kept:,.2f} times as much" if kept else ""
            lines.append(f"kept for backward: {size(kept)}; serially {size(alone)}{times}")
        return "\n".join(lines)


def explain(
    module: nn.Module,
    input_shape: Shape | Sequence[Shape],
    grid: ProcessGrid | Mapping[str, int],
    *,
    dtype: torch.dtype | Sequence[torch.dtype] | None = None,
    layout: Layout | Sequence[Layout | None] | None = None,
    layouts: Mapping[str, Layout] | None = None,
    rank: int | None = None,
    show: bool = True,
    progress: Callable[[LayerPlan], object] = lambda layer: None,
) -> Explanation:
    """Tell, and print, what each layer of `module` does on one rank of `grid`, without running it.

    The forward pass runs on tensors without elements, in the mode the module is in;
    nothing of the size of the model or its input is allocated, and the module stays as it is. No
    communication: one process suffices for any grid. Under `torch.no_grad()` layers
    keep no memory for a backward pass.

    Parameters
    ----------
    module: any torch.nn.Module, before `parallelize`.
    input_shape: the global shape of its input, or a sequence of one for each input.
    grid: a grid, or the ranks along its axes, such as {"height": 64, "width": 64}.
    dtype: the type of the input, or one for each input; the type of the parameters by default.
    layout: the layout of the input, or one for each input; by default every dimension is cut over
        the axis of its own name.
    layouts: layouts for the inputs of modules within, by patterns of names, as for `parallelize`.
    rank: the rank whose part is shown; by default the rank in the middle of every axis.
    show: whether to print the table, on rank 0.
    progress: is called with each line of the table as it comes.

    Raises
    ------
    TypeError, ValueError
        For arguments that do not fit: no Module, no shape, or another number of types or layouts
        than of inputs.
    RuntimeError
        Where the forward pass raises, naming the layer; also where it asks for the elements of a
        tensor. A layer that is refused raises nothing: it is the last row of the table.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"explain: {type(module).__name__} is not a torch.nn.Module")
    shapes = _shapes(input_shape)
    if dtype is None:
        dtype = dtype_of(module, torch.get_default_dtype())
    of_inputs = _each(layout, len(shapes), "layout")
    of_modules = match_layouts(module, layouts or {})
    dtypes = _each(dtype, len(shapes), "dtype")
    extents = grid.shape if isinstance(grid, ProcessGrid) else grid
    dry_run = DryRunGrid(extents, rank)
    cut = map(dry_run.tensor, shapes, of_inputs, dtypes)
    layers = _dry_run(without_elements(module, "explain"), list(cut), dry_run, of_modules, progress)
    whole = [torch.empty(s, dtype=d, device="meta") for s, d in zip(shapes, dtypes, strict=True)]
    try:
        serial = _dry_run(without_elements(module, "explain"), whole, DryRunGrid({}), {})
    except RuntimeError:
        serial = None
    explanation = Explanation(
        type(module).__name__,
        str(dry_run),
        dry_run.rank,
        tuple(layers),
        sum(p.nbytes for p in module.parameters()),
        None if serial is None else sum(layer.kept_bytes for layer in serial),
    )
    comm = grid if isinstance(grid, ProcessGrid) else world_if_rank()
    if show and (comm is None or comm.rank == 0):
        print(explanation, flush=True)
    return explanation


def dtype_of(module: nn.Module, otherwise: torch.dtype) -> torch.dtype:
    """Return the type of a module's parameters, or `otherwise` where it has none."""
    floating = (p.dtype for p in module.parameters() if p.is_floating_point())
    return next(floating, otherwise)


def _shapes(given: Any) -> list[tuple[int, ...]]:
    several = list(given) if given and all(isinstance(s, Sequence) for s in given) else [given]
    shapes = [tuple(shape) for shape in several]
    for shape in shapes:
        if not all(isinstance(n, int) and n >= 0 for n in shape):
            raise ValueError(f"explain: {shape} is no shape; write (1, 18, 256, 256), say")
    return shapes


def _each(value: Any, count: int, what: str) -> list[Any]:
    """Return one `what` for each of `count` inputs."""
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"explain: {what} has {len(value)} entries for {count} inputs")
    return list(value)


def _dry_run(
    module: nn.Module,
    inputs: Sequence[Tensor],
    grid: DryRunGrid,
    layouts: Mapping[str, Layout],
    progress: Callable[[LayerPlan], object] = lambda layer: None,
) -> list[LayerPlan]:
    """Return the plan of a module without elements on the rank that the dry `grid` stands for."""
    within = enter_call()
    accounts = _LayerRecorder(module, grid, progress)
    # After the hooks of the accounts, so that a layer's line has the cost of its input.
    redistribute_inputs(module, layouts)
    try:
        with trace_movements() as accounts.movements, without_counting():
            keeping = saved_tensors_hooks(accounts.keep, lambda x: x)
            # A tensor that a forward makes without naming a device has no elements either.
            with torch.random.fork_rng(devices=[]), torch.device("meta"):
                with keeping, _Functions(accounts):
                    module(*inputs)
    except UnsupportedOperation as refusal:
        accounts.refuse(str(refusal))
    except Exception as error:
        name, part = accounts.where
        raise RuntimeError(
            f"explain: {name} ({type(part).__name__}) raised {type(error).__name__}: {error}"
            + (
                ". A plan has shapes and no elements: what depends on values, such as .item(), "
                "can be verified, not explained"
                if "meta" in str(error)
                else ""
            )
        ) from error
    finally:
        within.leave()
    return accounts.layers


_Output = tuple[tuple[int, ...], Layout | None, tuple[int, ...] | None]
"""Global shape, layout and local shape; a plain tensor has the first alone."""


def _first_of(result: Any) -> _Output | None:
    """Return the first tensor of a result."""
    for x in tensors_in(result):
        if isinstance(x, DistTensor):
            return tuple(x.shape), x.layout, x.box.shape
        return tuple(x.shape), None, None
    return None


class _LayerRecorder(ModuleCalls):
    """A record, call by call, of all that was moved, reduced and kept since the call before."""

    def __init__(
        self, module: nn.Module, grid: DryRunGrid, progress: Callable[[LayerPlan], object]
    ):
        super().__init__(module)
        self.layers: list[LayerPlan] = []
        self.movements: list[Movement] = []
        self._grid, self._progress = grid, progress
        self._reduced = 0
        self._kept = 0
        state = (*module.parameters(), *module.buffers())
        # Storages are held, so that no other takes the address of one that has gone.
        self._storages = {s._cdata: s for s in (x.untyped_storage() for x in state)}
        self._parameters: set[nn.Parameter] = set()
        self._last: _Output | None = None

    def keep(self, x: Tensor) -> Tensor:
        """Count a tensor that is kept for the backward pass."""
        storage = (x.held if isinstance(x, DistTensor) else x).untyped_storage()
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = storage
            self._kept += storage.nbytes()
        return x

    def entered(self, module: nn.Module) -> None:
        if len(self.stack) > 1:
            self.between(*self.stack[-2])

    def left(self, name: str, module: nn.Module, output: Any) -> None:
        own = set(module.parameters(recurse=False)) - self._parameters
        self._parameters |= own
        weight = sum(p.nbytes for p in own)
        result = _first_of(output)
        # The last line belongs to the module's result.
        always = is_layer(module) or (not self.stack and result != self._last)
        self.close(name, type(module).__name__, result, weight, always=always)

    def between(self, name: str, module: nn.Module) -> None:
        """Write down what has happened in a module since its last layer or function."""
        operators = {moved.operator: None for moved in self.movements}
        self.close(name, ", ".join(operators) or type(module).__name__)

    def refuse(self, text: str) -> None:
        """Write down that the call under way is refused."""
        name, module = self.where
        self.close(name, type(module).__name__, always=True, refusal=text)

    def close(
        self,
        name: str,
        kind: str,
        output: _Output | None = None,
        parameters: int = 0,
        *,
        always: bool = False,
        refusal: str | None = None,
    ) -> None:
        """Write down what has happened since this was last called, if anything has, or `always`."""
        reduced, self._reduced = self._grid.reduced - self._reduced, self._grid.reduced
        kept, self._kept = self._kept, 0
        moved = [m for m in self.movements if m.redistributes or not m.plan.identity]
        self.movements.clear()
        if not (always or moved or reduced or kept or parameters):
            return
        self._last = output
        shape, layout, local_shape = output or (None, None, None)
        self.layers.append(
            LayerPlan(
                name,
                kind,
                shape,
                layout,
                local_shape,
                tuple(_halo(m) for m in moved if not m.redistributes),
                tuple(
                    Redistribution(m.operator, m.source, m.target, name, 1, m.bytes)
                    for m in moved
                    if m.redistributes
                ),
                reduced,
                kept,
                parameters,
                refusal,
            )
        )
        self._progress(self.layers[-1])


class _Functions(TorchFunctionMode):
    """Gives every torch function that is called between layers a line of its own."""

    def __init__(self, accounts: _LayerRecorder):
        super().__init__()
        self._accounts = accounts

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        stack = self._accounts.stack
        between = func in RULES and bool(stack) and not is_layer(stack[-1][1])
        if between:
            self._accounts.between(*stack[-1])
        result = func(*args, **(kwargs or {}))
        if between:
            kind = getattr(func, "__name__", str(func))
            self._accounts.close(stack[-1][0], kind, _first_of(result))
        return result


def _halo(movement: Movement) -> Halo:
    plan = movement.plan
    ndim = len(plan.buffer_shape)
    widths = {}
    for d, axes in enumerate(movement.source.cuts(ndim)):
        if axes:
            own = [target[d] for _, target in plan.own]
            start = min((s.start for s in own), default=0)
            stop = max((s.stop for s in own), default=0)
            runs = {(box[d].start, box[d].stop) for r in plan.receives for box in r.boxes}
            before = sum(b - a for a, b in runs if b <= start)
            after = sum(b - a for a, b in runs if a >= stop)
            widths[dimension_names(ndim)[d]] = before, after
    return Halo(movement.operator, widths, movement.bytes)


_HEADING = (
    *("layer", "type", "output", "layout", "local", "halo", "received", "moved"),
    *("redistribution", "reduced", "kept", "parameters"),
)


def listed(layers: Sequence[LayerPlan], *more: tuple[str, ...]) -> str:
    """Return layers as a table, with `more` rows below them."""
    return table([_HEADING, *map(_cells, layers), *more], right=(6, 7, 9, 10, 11))


def _cells(layer: LayerPlan) -> tuple[str, ...]:
    """Return the row of the table."""
    moved = [
        f"{_cut(r.source)} -> {_cut(r.target)}" + (f" by {how}" if how else "")
        for r in layer.redistributions
        for how in (_operator_suffix(layer.kind.lower(), r.operator),)
    ]
    halos = [
        " ".join(f"{name} {before}+{after}" for name, (before, after) in widths if before + after)
        for widths in (halo.widths.items() for halo in layer.halos)
    ]
    return (
        layer.name,
        layer.kind,
        "x".join(map(str, layer.shape)) if layer.shape is not None else "",
        "refused" if layer.refusal is not None else _layout_of(layer),
        "x".join(map(str, layer.local_shape)) if layer.local_shape is not None else "",
        "; ".join(filter(None, dict.fromkeys(halos))),
        _size(layer.halo_bytes),
        _size(layer.redistributed_bytes),
        "; ".join(dict.fromkeys(moved)),
        _size(layer.reduced_bytes),
        _size(layer.kept_bytes),
        _size(layer.parameter_bytes),
    )


def _operator_suffix(kind: str, operator: str) -> str:
    """Return the part of an operator's name that the kind of its layer does not say."""
    return "" if operator in kind else operator.removeprefix(f"{kind}, ")


def _layout_of(layer: LayerPlan) -> str:
    if layer.layout is None:
        return "plain" if layer.shape is not None else ""
    return _cut(layer.layout)


def _cut(layout: Layout) -> str:
    """Return a layout in few letters: dimensions, with their grid axes where the names differ."""
    text = repr(layout).removeprefix("Layout(").removesuffix(")")
    return re.sub(r"\b(\w+)='\1'", r"\1", text) or "whole"


def _size(count: int) -> str:
    """Return a number of bytes as text; nothing for none, so that the others stand out."""
    return size(count) if count else ""
