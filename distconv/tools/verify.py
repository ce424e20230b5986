"""`verify`: compare the results of a module on a grid with the serial ones, layer by layer."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from distconv.comm.checksums import checksum
from distconv.comm.ledger import without_counting
from distconv.device.kinds import ieee_float32, rehearsed
from distconv.geometry.layout import Layout
from distconv.grid.process_grid import ProcessGrid
from distconv.model.parallelize import parallelize
from distconv.planning.recorder import ModuleCalls, is_layer
from distconv.planning.table import Cell, table
from distconv.tensor.base import tensors_in
from distconv.tensor.dispatch import UnsupportedOperation
from distconv.tensor.dist_tensor import DistTensor, distribute_tensor

_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
"""The largest relative difference that rounding causes, by type, in networks that amplify rounding
moderately; a missing halo or a wrong count causes a larger one."""

_AMPLIFIED = 100
"""The largest accepted ratio of a difference to the measured effect of rounding. Only rounding of
inputs and parameters is measured, but every addition rounds."""

_MOST_ROUNDING = 0.2
"""The relative difference above which no deviation is accepted as rounding."""

_SHORT_TYPES = 64
"""The tolerance of types shorter than float32, in units of their machine epsilon."""

_NEGLIGIBLE = 1e-3
"""The fraction of the largest gradient of all parameters to which differences of smaller gradients
are relative."""

_RANDOM = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU),
)


@dataclass(frozen=True)
class TensorComparison:
    """A row of `Verification`: the difference of one tensor from the serial program's tensor."""

    layer: str
    """The layer, or the name of a parameter, a buffer, or an input."""
    kind: str
    """The tensor is an "output", "buffer" or "gradient"; "refused" is an unsupported layer."""
    difference: float
    """Largest difference, relative to the largest entry of the serial tensor."""
    rounding: float = 0.0
    """The difference between two serial runs whose inputs and parameters differ in their last
    place."""
    ok: bool = False
    """Whether the difference is within the tolerance."""
    note: str = ""

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Return the row in a table with the columns of `HEADING`."""
        verdict = "" if self.ok else "refused" if self.kind == "refused" else "deviates"
        numbers = ((f"{x:.1e}", x) for x in (self.difference, self.rounding))
        return (self.layer, self.kind, *numbers, verdict, self.note)


HEADING = ("layer", "kind", "difference", "rounding", "", "note")


@dataclass(frozen=True)
class Verification:
    """The result of `verify`: all tensors of a module against serial ones; prints as a table."""

    module: str
    grid: str
    tolerance: float
    rows: tuple[TensorComparison, ...]
    """Outputs in the order of the calls, buffers, and gradients from the last layer backwards."""
    notes: tuple[str, ...]
    """Remarks that are needed to read the rows correctly."""

    @property
    def first_deviation(self) -> TensorComparison | None:
        """Return the first row that deviates, a possible cause of later deviations; else None."""
        return next((row for row in self.rows if not row.ok), None)

    @property
    def ok(self) -> bool:
        """Return whether all rows agree within the tolerance."""
        return self.first_deviation is None

    def __str__(self) -> str:
        return "\n".join(
            [
                f"{self.module} on {self.grid} against serial, tolerance {self.tolerance:.1e}",
                table([HEADING, *(row.cells for row in self.rows if row.kind != "refused")]),
                *(f"note: {note}" for note in self.notes),
                self.verdict,
            ]
        )

    @property
    def verdict(self) -> str:
        """Return a sentence on the first row that deviates, or else on the largest difference."""
        first = self.first_deviation
        if first is None:
            largest = max(self.rows, key=lambda row: row.difference, default=None)
            return "all agree" + (
                f"; the largest difference is {largest.difference:.1e}, {largest.kind} of "
                f"{largest.layer}"
                if largest
                else ""
            )
        if first.kind == "refused":
            return f"{first.layer} is unsupported: {first.note}"
        return f"first deviation: {first.layer} ({first.kind}), by {first.difference:.1e}"


def verify(
    module: nn.Module,
    input: Tensor | Sequence[Tensor],
    grid: ProcessGrid | Mapping[str, int],
    *,
    layout: Layout | Sequence[Layout | None] | None = None,
    layouts: Mapping[str, Layout] | None = None,
    tolerance: float | None = None,
    backward: bool = True,
    seed: int = 0,
    show: bool = True,
    progress: Callable[[TensorComparison], object] = lambda comparison: None,
) -> Verification:
    """Compare, and print, the results of each layer of `module` on `grid` with the serial ones.

    Copies of the module run both ways with rank 0's parameters: every rank runs the serial program
    by itself, then all ranks together run the distributed program. Compared are the output of every
    call of a layer, the buffers after the run and, for a random gradient of the outputs, the
    gradients of all parameters and inputs. The module and the random state are not changed. Every
    rank needs memory for the serial run and for two copies of all outputs; use a small input.
    Collective.

    Random numbers on a grid differ from those of serial torch. Dropout layers therefore run in eval
    mode. The result notes these layers, and layers that draw random numbers by themselves. float32
    is computed without TF32.

    Raises TypeError or ValueError on every rank, for arguments that do not fit, or differ between
    ranks. Raises RuntimeError, naming the layer, if the module raises. The message states whether
    the serial program raised or only the program on the grid. An unsupported layer
    (`UnsupportedOperation`) raises nothing: it is the last row of the result.

    Parameters
    ----------
    module: any torch.nn.Module that runs on plain tensors as well.
    input: the whole plain input, or a sequence of them, equal on all ranks.
    grid: a grid, or the number of ranks along each axis; their product is the number of ranks of
        the job.
    layout: the layout of the input, or one for each input; by default every dimension is
        partitioned over the axis of its own name.
    layouts: layouts for the inputs of submodules, by patterns of names, as for `parallelize`.
    tolerance: the largest relative difference that is treated as rounding. By default 1e-10 in
        float64, 1e-4 in float32, and 64 times the rounding of shorter types; the coarsest type
        decides. Types within layers are not seen: a Fourier layer in complex64, say, needs 1e-4 in
        a float64 network, too. Wrong results stand out best in float64. By default, a tensor that
        amplifies rounding (behind a batch norm over a few elements, say) may also differ by a
        hundred times the difference that the serial program shows when its input and parameters are
        changed in their last place; or by a hundred times the serial program's own difference from
        float64, if the module runs in float64 as well and agrees there.
    backward: whether to compare gradients. Differences in the gradients of a layer's parameters are
        relative to the largest of these gradients, because a bias before a norm has a gradient that
        is zero up to rounding. Buffers are treated likewise: the running mean of values that a norm
        has centred is zero up to rounding, too.
    seed: the seed of the random gradient of the outputs.
    show: whether to print the table, on rank 0.
    progress: called with each comparison as it is ready, before its difference is judged.

    Examples
    --------
    >>> grid = dc.ProcessGrid(height=2)
    >>> net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)).double()
    >>> result = dc.verify(net, torch.randn(2, 1, 9, 7, dtype=torch.float64), grid, show=False)
    >>> result.ok
    True
    """
    if not isinstance(grid, ProcessGrid):
        axes: dict[str, Any] = dict(grid)
        grid = ProcessGrid(**axes)
    inputs = _agreed_inputs(module, input, grid, (layout, layouts, tolerance, backward, seed))
    alike: Any = [layout] * len(inputs)
    of_inputs = list(layout) if isinstance(layout, (tuple, list)) else alike
    if len(of_inputs) != len(inputs):
        raise ValueError(f"verify: {len(of_inputs)} layouts for {len(inputs)} inputs")
    gpus = [grid.device] if grid.computes_on_gpu else []
    forked = torch.random.fork_rng(gpus, device_type=rehearsed())
    with forked, torch.set_grad_enabled(backward), without_counting(), ieee_float32():
        how = of_inputs, layouts, grid, seed
        rows, notes, serial = _compare(module, inputs, *how, progress)
        allowance = 0.0
        if tolerance is None:
            tolerance, allowance = _tolerance(serial.dtypes), _AMPLIFIED
        judged = _judged(rows, tolerance, allowance, grid)
        short = any(torch.finfo(d).bits < 64 for d in serial.dtypes)
        if allowance and short and serial.random is None and not all(row.ok for row in judged):
            judged = _judged_by_float64(judged, module, inputs, how, serial)
    amplified = sum(row.ok and row.difference > tolerance for row in judged)
    if amplified:
        notes.append(
            f"{amplified} differences are beyond the tolerance and within {_AMPLIFIED} times the "
            "effect of rounding on the serial program; use float64 or a larger input for a clear "
            "result"
        )
    blurred = sum(allowance * row.rounding > _MOST_ROUNDING for row in judged)
    if blurred:
        notes.append(
            f"rounding changes {blurred} of the serial tensors by more than "
            f"{_MOST_ROUNDING / _AMPLIFIED:.0e}, too much for a comparison; use float64 or a "
            "larger input"
        )
    name = type(module).__name__
    verification = Verification(name, str(grid), tolerance, tuple(judged), tuple(notes))
    if show and grid.rank == 0:
        print(verification, flush=True)
    return verification


def _tolerance(dtypes: set[torch.dtype]) -> float:
    """Return the default tolerance for tensors of these types: that of the coarsest."""
    kinds = {d.to_real() if d.is_complex else d for d in dtypes}
    return max((_TOLERANCE.get(d, _SHORT_TYPES * torch.finfo(d).eps) for d in kinds), default=0)


def _judged(
    rows: Sequence[TensorComparison],
    tolerance: float,
    allowance: float,
    grid: ProcessGrid,
    most: float = _MOST_ROUNDING,
) -> list[TensorComparison]:
    """Return the rows with the maxima over all ranks, and with `ok` set accordingly. Collective.

    A difference is ok within the tolerance, or within `allowance` times the row's rounding, but at
    most `most`.
    """
    everywhere = grid.all_gather_object([(row.difference, row.rounding) for row in rows])
    judged = []
    for row, *each in zip(rows, *everywhere, strict=True):
        difference = max(math.inf if math.isnan(d) else d for d, _ in each)
        rounding = max(r if math.isfinite(r) else 0.0 for _, r in each)
        ok = difference <= max(tolerance, min(allowance * rounding, most))
        judged.append(replace(row, difference=difference, rounding=rounding, ok=ok))
    return judged


def _judged_by_float64(
    rows: list[TensorComparison],
    module: nn.Module,
    inputs: Sequence[Tensor],
    how: tuple[Any, Any, Any, Any],
    serial: _ModuleRun,
) -> list[TensorComparison]:
    """Return the rows; rows that deviate are judged again by runs in float64. Collective.

    Such a row is ok if grid and serial program agree in float64, and if they differ in their own
    types by at most 100 times the serial program's difference from its run in float64. If the
    module cannot compute in float64, the rows are unchanged.

    Parameters
    ----------
    how: the layouts of the inputs, the layouts by module, the grid and the seed.
    serial: the serial run in the module's own types.
    """
    grid: ProcessGrid = how[2]
    doubles = [
        x.to(torch.promote_types(x.dtype, torch.float64)) if _is_continuous(x) else x
        for x in inputs
    ]
    try:
        exact, _, precise = _compare(
            copy.deepcopy(module).double(), doubles, *how, lambda comparison: None
        )
    except (RuntimeError, TypeError, ValueError):
        return rows
    exact = _judged(exact, _tolerance(precise.dtypes), _AMPLIFIED, grid)
    agree = {(row.layer, row.kind) for row in exact if row.ok}
    precise.round_as(serial)
    # A small tensor may be exact by chance, so the largest difference in a layer counts.
    own: dict[tuple[str, str], float] = {}
    for row in _compared(precise, serial):
        of = _layer(row)
        own[of] = max(own.get(of, 0.0), row.difference)
    again = [replace(row, rounding=own.get(_layer(row), 0.0)) for row in rows]
    again = _judged(again, 0.0, _AMPLIFIED, grid, math.inf)
    return [
        new if not row.ok and new.ok and (row.layer, row.kind) in agree else row
        for row, new in zip(rows, again, strict=True)
    ]


def _layer(row: TensorComparison) -> tuple[str, str]:
    """Return the kind and the layer of a row; the layer of a parameter or buffer is its module."""
    return row.kind, row.layer if row.kind == "output" else row.layer.rpartition(".")[0]


def _agreed_inputs(module: Any, input: Any, grid: ProcessGrid, options: Any) -> list[Tensor]:
    """Return the inputs on the grid's device; raise unless arguments are equal on all ranks.

    Raises TypeError or ValueError on every rank. Collective.
    """
    inputs = list(input) if isinstance(input, (tuple, list)) else [input]
    problem = None
    if not isinstance(module, nn.Module):
        problem = f"{type(module).__name__} is not a torch.nn.Module"
    elif any(is_lazy(x) for x in (*module.parameters(), *module.buffers())):
        problem = "the module has layers without shape yet; first call it on a plain tensor"
    for x in inputs:
        if isinstance(x, DistTensor):
            problem = "the input is a DistTensor; pass the whole plain tensor, x.full_tensor()"
        elif not isinstance(x, Tensor):
            problem = f"the input is a {type(x).__name__}; pass tensors, torch.as_tensor(x)"
    mine = None
    if not problem:
        modes = [part.training for part in module.modules()]
        contents = [(tuple(x.shape), str(x.dtype), checksum(x, full=True)) for x in inputs]
        mine = contents, repr(options), (repr(module), modes)
    everyone = grid.all_gather_object((problem, mine))
    for rank, (theirs, _) in enumerate(everyone):
        if theirs:
            raise TypeError(f"verify: {theirs} (rank {rank})")
    for rank, (_, theirs) in enumerate(everyone):
        for value, first, differ in zip(theirs, everyone[0][1], _DIFFER, strict=True):
            if value != first:
                raise ValueError(f"verify: {differ.format(rank=rank, value=value, first=first)}")
    return [x.detach().to(grid.device) for x in inputs]


_DIFFER = (
    "the input of rank {rank} differs from rank 0's; pass the same whole tensor on every rank, "
    "such as one drawn from the same seed",
    "layout, layouts, tolerance, backward and seed are {value} on rank {rank} and {first} on rank "
    "0; pass the same on every rank",
    "the module of rank {rank} differs from rank 0's in structure or mode; build the same module "
    "on every rank",
)


def _compare(
    module: nn.Module,
    inputs: list[Tensor],
    of_inputs: list[Layout | None],
    layouts: Mapping[str, Layout] | None,
    grid: ProcessGrid,
    seed: int,
    progress: Callable[[TensorComparison], object],
) -> tuple[list[TensorComparison], list[str], _ModuleRun]:
    """Run a module serially and on the grid; return the comparison of all tensors. Collective.

    Returns the rows of the result, notes on layers that draw random numbers, and the serial run.
    `of_inputs` are the layouts of the inputs, `layouts` are those of submodules' inputs.
    """
    plain, model = copy.deepcopy(module).to(grid.device), copy.deepcopy(module)
    quiet = _without_dropout(plain)
    _without_dropout(model)
    parallelize(model, grid, layouts=layouts)
    with torch.no_grad():
        mine, theirs = ((*m.parameters(), *m.buffers()) for m in (plain, model))
        for own, of_rank_0 in zip(mine, theirs, strict=True):
            own.copy_(of_rank_0)
    for x in (*plain.parameters(), *model.parameters()):
        x.grad = None
    generator = torch.Generator().manual_seed(seed)
    shaken = copy.deepcopy(plain)
    for x in shaken.parameters():
        x.data = _perturbed(x.data, generator)

    torch.manual_seed(seed)
    serial = _ModuleRun(plain, [x.clone() for x in inputs], generator)
    torch.manual_seed(seed)
    again = _ModuleRun(shaken, [_shaken_input(x, generator) for x in inputs], generator, serial)
    rounding = {(row.layer, row.kind): row.difference for row in _compared(again, serial)}
    del again, shaken
    cut = [distribute_tensor(x, grid, k) for x, k in zip(inputs, of_inputs, strict=True)]
    rows = []
    for row in _compared(_ModuleRun(model, cut, generator, serial), serial):
        progress(row)
        rows.append(replace(row, rounding=rounding.get((row.layer, row.kind), 0.0)))
    notes = []
    if quiet:
        notes.append(
            f"{', '.join(quiet)} ran in eval mode: random numbers on a grid differ from those of "
            "serial torch"
        )
    if serial.random is not None:
        notes.append(
            f"{serial.random} draws random numbers, which on a grid differ from those of serial "
            "torch, so later differences are meaningless. Disable it (module.eval())"
        )
    return rows, notes, serial


class _ModuleRun(ModuleCalls):
    """A run of a module, forward and backward, that keeps all tensors to be compared.

    Outputs are copied, before later layers may write to them.

    Parameters
    ----------
    inputs: the inputs, which become leaves of autograd.
    generator: the source of random gradients of the outputs.
    serial: the serial run to compare with, whose gradients of the outputs are used again; None to
        draw new ones.
    """

    def __init__(
        self,
        module: nn.Module,
        inputs: Sequence[Tensor],
        generator: torch.Generator,
        serial: _ModuleRun | None = None,
    ):
        super().__init__(module)
        self.name = type(module).__name__
        self.outputs: dict[str, list[Tensor] | None] = {}
        """Outputs by the name of the call; None if an inner layer has just returned the same
        tensors."""
        self.buffers: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor | None] = {}
        """Gradients of the parameters, from the last parameter to the first."""
        self.of_inputs: dict[str, Tensor | None] = {}
        self.refusal: tuple[str, str] | None = None
        """The unsupported layer, and the reason."""
        self.random: str | None = None
        """The first layer that drew random numbers."""
        self.dtypes = {x.dtype for x in (*inputs, *module.parameters()) if _is_continuous(x)}
        """The types of inputs, parameters and outputs that have continuous numbers."""
        self._serial, self._generator = serial, generator
        self._last: list[tuple[Tensor, int | None]] = []
        self._state = torch.get_rng_state()
        try:
            self._pass(module, inputs)
        except UnsupportedOperation as refusal:
            self.refusal = self.where[0], str(refusal)
        except Exception as error:
            name, part = self.where
            where = f"verify: {name} ({type(part).__name__}) raised"
            what = f"{type(error).__name__}: {error}"
            if any(isinstance(x, DistTensor) for x in inputs):
                raise RuntimeError(f"{where} on the grid, but not serially: {what}") from error
            raise RuntimeError(
                f"{where} in the serial program, before anything ran on the grid: {what}. "
                "Correct the module or the input until module(input) runs on plain tensors"
            ) from error
        finally:
            self.remove()

    def _pass(self, module: nn.Module, leaves: Sequence[Tensor]) -> None:
        for x in leaves:
            x.requires_grad_(_is_continuous(x) and torch.is_grad_enabled())
        # Layers that write in place may not write to leaves.
        results = tensors_in(module(*(x.clone() for x in leaves)))
        # A backward pass through checkpoints calls layers again.
        self.remove()
        self.buffers = {name: x.detach().clone() for name, x in module.named_buffers()}
        self.shapes = [y.shape if y.requires_grad else None for y in results]
        serial = self._serial or self
        if serial is self:
            self.seeds = {
                i: torch.randn(y.shape, generator=self._generator, dtype=y.dtype, device="cpu")
                for i, y in enumerate(results)
                if y.requires_grad
            }
        self.stack.append(("backward", module))
        if self.shapes == serial.shapes:
            for i, seed in serial.seeds.items():
                last = i == max(serial.seeds)
                seed = seed.to(results[i].device, results[i].dtype)
                results[i].backward(seed, retain_graph=not last)
        self.gradients = {name: p.grad for name, p in reversed([*module.named_parameters()])}
        names = (f"input[{i}]" if i else "input" for i in range(len(leaves)))
        self.of_inputs = {name: x.grad for name, x in zip(names, leaves, strict=True)}

    def entered(self, module: nn.Module) -> None:
        self._look_for_random_numbers(self.stack[max(len(self.stack) - 2, 0)][0])

    def left(self, name: str, module: nn.Module, output: Any) -> None:
        self._look_for_random_numbers(name)
        tensors = tensors_in(output)
        if self._serial is not None:
            same = self._serial.outputs.get(name, []) is None
        else:
            last, self._last = self._last, [(x, _version(x)) for x in tensors]
            within = bool(self.stack) and not is_layer(module) and len(tensors) == len(last)
            same = within and all(
                x is y and _version(x) == written
                for x, (y, written) in zip(tensors, last, strict=True)
            )
        self.outputs[name] = None if same else [x.detach().clone() for x in tensors]
        self.dtypes |= {x.dtype for x in tensors if _is_continuous(x)}

    def round_as(self, other: _ModuleRun) -> None:
        """Convert all tensors to the types of the same tensors in another run."""
        for name, several in self.outputs.items():
            theirs = other.outputs.get(name)
            if several and theirs and len(several) == len(theirs):
                several[:] = [x.to(y.dtype) for x, y in zip(several, theirs, strict=True)]
        for mine, those in (
            (self.buffers, other.buffers),
            (self.gradients, other.gradients),
            (self.of_inputs, other.of_inputs),
        ):
            for name, x in mine.items():
                y = those.get(name)
                if x is not None and y is not None:
                    mine[name] = x.to(y.dtype)

    def _look_for_random_numbers(self, name: str) -> None:
        state = torch.get_rng_state()
        if self.random is None and not torch.equal(state, self._state):
            self.random = name
        self._state = state


def _compared(run: _ModuleRun, serial: _ModuleRun) -> Iterator[TensorComparison]:
    """Yield the comparison of each tensor of two runs. Collective for a run on a grid."""

    def differs(name: str, note: str, kind: str = "output") -> TensorComparison:
        return TensorComparison(name, kind, math.inf, note=note)

    for name, actual in run.outputs.items():
        if name not in serial.outputs:
            yield differs(name, "was called on the grid only")
            continue
        expected = serial.outputs[name]
        if actual is None or expected is None:
            continue
        if len(actual) != len(expected):
            note = f"returns {len(actual)} tensors, serially {len(expected)}"
            yield differs(name, note)
            continue
        for i, (x, y) in enumerate(zip(actual, expected, strict=True)):
            yield _comparison(f"{name}[{i}]" if i else name, "output", x, y)
    if run.refusal is not None:
        name, reason = run.refusal
        yield differs(name, reason, "refused")
        return
    for name in serial.outputs:
        if name not in run.outputs:
            yield differs(name, "was called serially only")
    largest = _largest_by_layer(serial.buffers)
    for name, buffer in run.buffers.items():
        scale = largest[name.rpartition(".")[0]]
        yield _comparison(name, "buffer", buffer, serial.buffers[name], scale)
    if run.shapes != serial.shapes:
        yield differs(run.name, "does not exist on the grid", "gradient")
        return
    largest = _largest_by_layer(serial.gradients)
    floor = _NEGLIGIBLE * max(largest.values(), default=0.0)
    scales = {name: max(largest[name.rpartition(".")[0]], floor) for name in serial.gradients}
    pairs = [(name, run.gradients[name], g, scales[name]) for name, g in serial.gradients.items()]
    pairs += [(name, run.of_inputs[name], g, 0.0) for name, g in serial.of_inputs.items()]
    for name, got, wanted, scale in pairs:
        if got is not None and wanted is not None:
            yield _comparison(name, "gradient", got, wanted, scale)
        elif got is not None or wanted is not None:
            where = "serially" if got is None else "on the grid"
            yield differs(name, f"has a gradient {where} only", "gradient")


def _is_continuous(x: Tensor) -> bool:
    """Return whether a tensor has floating-point or complex numbers."""
    return x.is_floating_point() or x.is_complex()


def _perturbed(x: Tensor, generator: torch.Generator) -> Tensor:
    """Return a copy of `x`; floating-point numbers are changed in their last place at random."""
    if not _is_continuous(x):
        return x.clone()
    up = torch.rand(x.shape, generator=generator, device="cpu").to(x.device) < 0.5
    return x * (1 + torch.finfo(x.dtype).eps * torch.where(up, 1, -1).to(x.dtype))


def _shaken_input(x: Tensor, generator: torch.Generator) -> Tensor:
    """Return a copy of an input whose numbers are changed in their last place at random.

    Whole numbers are not changed, as they may be indices.
    """
    shaken = _perturbed(x, generator)
    return torch.where(x == x.round(), x, shaken) if x.is_floating_point() else shaken


def _without_dropout(module: nn.Module) -> list[str]:
    """Put dropout layers into eval mode; return the names of those that were in training mode."""
    names = []
    for name, part in module.named_modules():
        if isinstance(part, _RANDOM) and part.training and getattr(part, "p", 1) > 0:
            part.eval()
            names.append(name or type(part).__name__)
    return names


def _version(x: Tensor) -> int | None:
    """Return the number of writes to `x`; None in inference mode, which does not count them."""
    return None if x.is_inference() else x._version


def _largest_by_layer(tensors: Mapping[str, Tensor | None]) -> dict[str, float]:
    """Return the largest magnitude in the tensors of each layer, by the layer's name."""
    largest: dict[str, float] = {}
    for name, x in tensors.items():
        layer = name.rpartition(".")[0]
        continuous = x is not None and _is_continuous(x)
        largest[layer] = max(largest.get(layer, 0.0), _largest(x) if continuous else 0.0)
    return largest


def _largest(x: Tensor | None) -> float:
    return 0.0 if x is None or not x.numel() else x.abs().max().item()


@torch.no_grad()
def _comparison(
    name: str, kind: str, actual: Tensor, expected: Tensor, scale: float = 0.0
) -> TensorComparison:
    """Return the comparison of a tensor with the serial tensor. Collective for a DistTensor.

    `name` and `kind` are the layer and the kind of tensor, for the row of the result; `scale` is
    the largest magnitude in the layer's tensors, to which the difference is relative.
    """
    whole = actual.detach()
    if isinstance(whole, DistTensor):
        whole = whole.full_tensor()
    if (whole.shape, whole.dtype) != (expected.shape, expected.dtype):
        note = (
            f"is {tuple(whole.shape)} {whole.dtype}, serially {tuple(expected.shape)} "
            f"{expected.dtype}"
        )
        return TensorComparison(name, kind, math.inf, note=note)
    return TensorComparison(name, kind, _difference(whole, expected, scale))


def _difference(actual: Tensor, expected: Tensor, scale: float) -> float:
    """Return the largest difference from `expected`, relative to its largest magnitude.

    A larger `scale` replaces that magnitude. For integers, the result is the fraction of elements
    that differ.
    """
    if not expected.numel():
        return 0.0
    if not _is_continuous(expected):
        return (actual != expected).double().mean().item()
    finite = expected.isfinite()
    if not finite.all():
        same = torch.where(expected.isnan(), actual.isnan(), actual == expected)
        if not same[~finite].all():
            return math.inf
        actual, expected = actual[finite], expected[finite]
        return _difference(actual, expected, scale)
    if expected.dtype in (torch.float16, torch.bfloat16):
        actual, expected = actual.float(), expected.float()
    difference = (actual - expected).abs().max().item()
    return difference / max(_largest(expected), scale, 1e-300) if difference else 0.0
