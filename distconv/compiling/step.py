"""`compile`: a training step that is traced, and replayed without Python around its work."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar, overload

from torch import Tensor, nn
from torch.optim import Optimizer

from distconv.compiling import cases
from distconv.compiling.cases import MOST_CASES, Calls, Results, check_backend
from distconv.compiling.module import CompiledModule
from distconv.compiling.program import TracedStep, Value
from distconv.compiling.tracing import Trace, is_under_way, modules_called, traced
from distconv.compiling.variables import Variables, changed_in
from distconv.grid.interface import Grid
from distconv.model.gradient_reduction import GradientReduction, reductions_noted_in
from distconv.tensor.nested import replaced, shards_of, tensors_in
from distconv.torch_private import hooks_of

Given = ParamSpec("Given")
Result = TypeVar("Result")

_CHANGES = "it changes {!r}, which a replay would not".format


@overload
def compile(  # type: ignore[overload-overlap]
    step: nn.Module, *, backend: str | None = None
) -> CompiledModule: ...


@overload
def compile(
    step: Callable[Given, Result], *, backend: str | None = None
) -> CompiledStep[Given, Result]: ...


def compile(
    step: Callable[..., Any], *, backend: str | None = None
) -> CompiledStep[..., Any] | CompiledModule:
    """Return a function equivalent to `step`, which is replayed from its fourth call on.

    A step is the part that a loop repeats: the forward pass, a loss, `backward()`, and the
    optimizer's step, or some of these. It is traced on all ranks as it runs: every function of
    torch on this rank's blocks, every message, in one order. A replay makes the same calls without
    modules, autograd, rules and hooks, and gives the same bits. All ranks of the grid call it
    together.

    The first call of a case runs as it is; the second and the third are traced, and must agree.
    Cases differ in shapes, types and layouts of tensors among the arguments, in other arguments, in
    modes, settings and hooks of modules, in modes of autograd and of autocast, in frozen
    parameters, in `no_sync`, in whether gradients exist, and in the variables that the code of the
    step mentions: global ones, those around it, and their attributes. Optimizers step with their
    present settings.

    In a replay Python runs no line of the step. Let schedulers step, and numbers be printed and
    counted, outside. A step that cannot be replayed, because it reads elements of a tensor
    (`loss.item()`), uses other numbers each time or changes a variable, runs unchanged, and warns
    once with the reason and the line.

    Tensors of the result have no gradients to compute. Tensors of arguments and results may be
    nested in lists, tuples and dictionaries.

    For a module, its forward and its backward pass are traced, each as one function of autograd;
    gradients are accumulated, summed over the ranks and used as usual. Call the result in place of
    the module, and use the module itself for parameters, states and modes.

    Parameters
    ----------
    step: a function of tensors, at least one of them a DistTensor, or a module.
    backend: a backend of torch.compile, such as "inductor", which makes fewer kernels of the calls
        between messages. Compiling takes about a minute at the fourth call, and results are equal
        to rounding. "graph" captures the calls of a step between optimizers as graphs of the GPU,
        messages by NCCL included, and replays them without the host. None replays the calls as
        they are.

    Raises
    ------
    ValueError
        For an unknown backend, and for a module and "graph".
    """
    check_backend(backend)
    if isinstance(step, nn.Module):
        if backend == cases.CAPTURE:
            raise ValueError(
                f"compile: backend={backend!r} captures a whole step; pass a function with the "
                "forward pass, backward() and the optimizer's step in place of the module"
            )
        # The module itself would lend the compiled step its attributes.
        return CompiledModule(step, CompiledStep(step.__call__, backend), backend)
    return CompiledStep(step, backend)


class CompiledStep(Generic[Given, Result]):
    """A step that `compile` returns: its calls are traced, and later replayed.

    Attributes
    ----------
    replays: the number of replayed calls.
    """

    def __init__(self, step: Callable[Given, Result], backend: str | None = None) -> None:
        self._step, self._backend = step, backend
        self._called: dict[nn.Module, None] = {}
        """All modules that were called within the step."""
        self._cases: dict[Any, list[_ReplayedStep]] = {}
        self._last: dict[Any, _TracedCase] = {}
        self._seen: set[Any] = set()
        """The cases that have run, whichever gradients existed."""
        self._eager: set[Any] = set()
        """The cases that are not replayed."""
        self._calls = Calls("step")
        self._variables = Variables(step, self._called)
        self._changes_variables = False
        self._noted: list[Any] = []
        """The variables as they were in the last case that was new."""
        self.replays = 0
        update_wrapper(self, step)

    def __reduce__(self) -> Any:
        return CompiledStep, (self._step, self._backend)

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Return the compiled step as a method of `instance`, which keeps it."""
        if instance is None:
            return self
        method: Any = self._step
        bound = CompiledStep(method.__get__(instance, owner), self._backend)
        vars(instance)[self._name] = bound
        return bound

    def __call__(self, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        """Run the step, replayed if the call's case is known, and return its result."""
        if is_under_way():
            return _without_gradients(self._step(*args, **kwargs))
        tensors = tensors_in(args, kwargs)
        call = cases.key_of_call(args, kwargs, tensors), self._variables.now()
        key = call, *_circumstances(self._called)
        outside = self._variables.tensors
        case = next((x for x in self._cases.get(key, ()) if x.fits(outside)), None)
        grid = cases.grid_of(tensors)
        number = self._number(key) if case is None else case.number
        if self._calls.agree(number, grid):
            if case is not None:
                self.replays += 1
                result: Result = case.replay(tensors)
                return result
            if number != cases.AS_IT_IS:
                return self._trace(key, tensors, args, kwargs)
            if key in self._eager or self._changes_variables:
                return _without_gradients(self._step(*args, **kwargs))
        is_known = key[:2] in self._seen
        if not is_known and not self._calls.take_another(len(self._seen), changed_in(self._noted)):
            return _without_gradients(self._step(*args, **kwargs))
        self._noted = self._variables.values()
        with modules_called(self._called):
            result = _without_gradients(self._step(*args, **kwargs))
        if self._seen and (changed := changed_in(self._noted)):
            self._changes_variables = True
            if grid.rank == 0:
                warnings.warn(
                    f"compile: the step runs as it is, as {_CHANGES(changed)}", stacklevel=2
                )
        # As it will be the next time, with the modules that are known now.
        call = call[0], self._variables.now()
        self._seen.add((call, _circumstances(self._called)[0]))
        return result

    @property
    def source(self) -> str:
        """Return the Python source of all replayed functions."""
        return "\n\n".join(case.source for cases in self._cases.values() for case in cases)

    def _number(self, key: Any) -> int:
        """Return the number, as in `Calls`, of a call with this key that is not replayed."""
        if key in self._eager or key[:2] not in self._seen or self._changes_variables:
            return cases.AS_IT_IS
        if key not in self._last and len(self._last) + self._calls.made >= 2 * MOST_CASES:
            return cases.AS_IT_IS
        return cases.TRACED - (key in self._last)

    def _trace(self, key: Any, tensors: Sequence[Tensor], args: Any, kwargs: Any) -> Result:
        before = self._last.pop(key, None)
        reductions = reductions_noted_in(self._called)
        optimizers = before.trace.optimizers if before else ()
        case = _TracedCase(tensors, [x for r in reductions for x in r.leaves], optimizers)
        if obstacle := cases.why_not_replayed(args, kwargs, tensors):
            case.trace.hinder(obstacle)
        grid, known = cases.grid_of(tensors), list(self._called)
        variables, outside = self._variables.values(), self._variables.tensors
        with traced(case.trace, grid), modules_called(self._called):
            result = self._step(*args, **kwargs)
        case.finish(tensors, result, reductions_noted_in(self._called))
        if changed := changed_in(variables):
            self._changes_variables = True
            case.trace.hinder(_CHANGES(changed))
        elif hash(_circumstances(known)[0]) != hash(key[1]):
            case.trace.hinder("it changes modes or settings of modules, which a replay would not")
        why = case.trace.obstacle or (before.difference(case) if before else "")
        if cases.obstacle_on_any_rank(why, grid, "the step", stacklevel=3):
            self._eager.add(key)
        elif before is None:
            self._last[key] = case
        else:
            backend = self._backend
            if backend == cases.CAPTURE:
                backend = None
                case.step = _captured(case.step, grid)
            replayed = _ReplayedStep(case, backend, self._calls.made, outside)
            self._cases.setdefault(key, []).append(replayed)
            self._calls.made += 1
        return _without_gradients(result)


def _captured(step: TracedStep, grid: Grid) -> TracedStep:
    """Return the step in graphs of the device; if that is impossible, warn and return the step.

    All ranks call it together.
    """
    from distconv.compiling import capture  # which most programs do without

    instead = "is replayed without graphs of the device"
    why = capture.why_not(step, grid)
    if cases.obstacle_on_any_rank(why, grid, "the step", stacklevel=4, instead=instead):
        return step
    return capture.captured(step, grid)


def _circumstances(modules: Iterable[nn.Module]) -> Any:
    """Return two parts of a case's key: the state of modules, and the state of gradients.

    The state of gradients says which exist, and which have not been summed over the ranks yet.
    """
    parameters = cases.parameters_of(modules)
    leaves = shards_of(parameters)
    reductions = reductions_noted_in(modules)
    hooks = tuple(tuple(hooks_of(x) or ()) for x in leaves)
    enabled = tuple(r.enabled for r in reductions)
    state = cases.key_of_modules(modules, parameters), hooks, enabled
    exist = tuple(x.grad is None for x in leaves)
    return state, (exist, tuple(tuple(r.parts) for r in reductions))


def _without_gradients(result: Any) -> Any:
    return replaced(result, {id(x): x.detach() for x in tensors_in(result)})


class _TracedCase:
    """The trace of one call of a step.

    Parameters
    ----------
    tensors: the tensors among the arguments.
    leaves: parameters whose `.grad` the step may set, also by an assignment that torch does not
        see.
    optimizers: optimizers that stepped in an earlier trace.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        leaves: Iterable[Tensor],
        optimizers: Iterable[Optimizer],
    ) -> None:
        self.trace = Trace(shards_of(tensors), optimizers)
        for x in leaves:
            self.trace.standing_for(x)
        self.strides = [x.stride() for x in shards_of(tensors)]
        self.results = Results(())
        self.step = TracedStep([], [], [], {}, [])
        self.added_to: list[Tensor] = []
        """The leaves whose gradients are further inputs, after the tensors."""
        self.parts: list[tuple[GradientReduction, list[bool]]] = []
        """The gradients that are parts of sums in the end."""

    def finish(
        self, arguments: Iterable[Tensor], result: Any, reductions: Iterable[GradientReduction]
    ) -> None:
        """Note the result of the traced step.

        `arguments` are the tensors among its arguments, `reductions` those of the modules it
        called.
        """
        self.parts = [(r, list(r.parts)) for r in reductions]
        trace, self.results = self.trace, Results(result)
        if self.results.holds_fractions:
            trace.hinder("it returns a fraction that is no tensor, which may change unseen")
        if any(x.requires_grad for x in arguments):
            trace.hinder("a tensor among its arguments requires gradients")
        results = trace.standing_for(self.results.blocks)
        gradients = trace.gradients()
        inputs = [*trace.inputs, *trace.found]
        step = TracedStep(inputs, trace.calls, results, trace.constants, gradients).reduced()
        used = step.left.union(*(call.used for call in step.calls))
        given = step.inputs[: len(trace.inputs)]
        found = zip(step.inputs[len(given) :], trace.found.values(), strict=True)
        added = {n: leaf for n, leaf in found if Value(n) in used}
        self.added_to = list(added.values())
        self.step = replace(step, inputs=[*given, *added])

    def difference(self, later: _TracedCase) -> str:
        """Return in words how a later call of the same case differs; "" if it agrees."""
        if self.results.words != later.results.words:
            return "its results differ each time"
        if [*map(id, self.added_to)] != [*map(id, later.added_to)]:
            return "it adds to the gradients of other tensors each time"
        return cases.difference(self.step, later.step)


def _kind(gradient: Tensor | None) -> Any:
    return None if gradient is None else (gradient.dtype, gradient.stride())


def _sizes(optimizer: Optimizer) -> list[int]:
    return [len(group["params"]) for group in optimizer.param_groups]


class _ReplayedStep:
    """The program that replays one case of a step.

    Parameters
    ----------
    case: a traced call of the case.
    number: the number of the case, the same on all ranks.
    outside: the tensors among the variables that the step's code mentions.
    """

    def __init__(
        self, case: _TracedCase, backend: str | None, number: int, outside: Sequence[Tensor]
    ) -> None:
        self.number = number
        program = cases.program_of(case.step, backend)
        self._run, self.source = program.run, program.source
        self._results, self._strides, self._parts = case.results, case.strides, case.parts
        self._added_to = case.added_to
        first = {id(leaf): gradient for leaf, gradient in case.trace.leaves.values()}
        self._kinds = [_kind(first[id(leaf)]) for leaf in case.added_to]
        constants = {id(None), *map(id, case.step.constants.values())}
        self._fixed = [x for x in case.trace.leaves.values() if id(x[1]) in constants]
        """Leaves whose gradients have to be the same objects, or None again."""
        self._outside = [
            (i, x)
            for i, (x, shard) in enumerate(zip(outside, shards_of(outside), strict=True))
            if id(shard) in constants
        ]
        """The variables that it uses."""
        self._optimizers = [(x, _sizes(x)) for x in case.trace.optimizers]

    def fits(self, outside: Sequence[Tensor]) -> bool:
        """Return whether the program may be replayed with the present tensors `outside`.

        `outside` are the tensors among the variables that the step's code mentions. They must be
        those of the trace, or small and equal; leaves must have gradients like those in the trace,
        and optimizers as many parameters.
        """
        return (
            all(cases.is_equal(*shards_of((x, outside[i]))) for i, x in self._outside)
            and all(leaf.grad is gradient for leaf, gradient in self._fixed)
            and [_kind(leaf.grad) for leaf in self._added_to] == self._kinds
            and all(_sizes(x) == sizes for x, sizes in self._optimizers)
        )

    def replay(self, tensors: Sequence[Tensor]) -> Any:
        """Run the program on these tensors, and return the step's result."""
        given = shards_of(tensors)
        with cases.as_traced():
            blocks = list(map(cases.restrided, given, self._strides))
            made = self._run(*blocks, *(leaf.grad for leaf in self._added_to))
            for x, block in zip(given, blocks, strict=True):
                if x.data_ptr() != block.data_ptr():
                    x.copy_(block)  # which the step may have written to
        for reduction, parts in self._parts:
            reduction.parts[:] = parts
        return self._results.of(made)
