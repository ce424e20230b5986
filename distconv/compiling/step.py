"""`compile`: a training step that is traced, and replayed without Python around its work."""

from __future__ import annotations

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
from distconv.grid.interface import Grid
from distconv.model.gradient_reduction import GradientReduction, reductions_noted_in
from distconv.tensor.nested import replaced, shards_of, tensors_in

Given = ParamSpec("Given")
Result = TypeVar("Result")


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
    modes of modules, of autograd and of autocast, in frozen parameters, in `no_sync`, and in
    whether gradients exist. Optimizers step with their present settings.

    In a replay Python runs no line of the step: numbers read from variables are those of the trace.
    Let schedulers step, and numbers be printed, outside. A step that cannot be replayed, because it
    reads elements of a tensor (`loss.item()`) or uses other numbers each time, runs unchanged, and
    warns once with the reason and the line.

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
        return CompiledModule(step, CompiledStep(lambda *x, **y: step(*x, **y), backend), backend)
    return CompiledStep(step, backend)


class CompiledStep(Generic[Given, Result]):
    """A step that is replayed; see `compile`.

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
        self.replays = 0
        update_wrapper(self, step)

    def __call__(self, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        """Run the step."""
        if is_under_way():
            return _without_gradients(self._step(*args, **kwargs))
        tensors = tensors_in(args, kwargs)
        key = cases.key_of_call(args, kwargs, tensors), *_circumstances(self._called)
        case = next((x for x in self._cases.get(key, ()) if x.fits()), None)
        grid = cases.grid_of(tensors)
        number = self._number(key) if case is None else case.number
        if self._calls.agree(number, grid):
            if case is not None:
                self.replays += 1
                result: Result = case.replay(tensors)
                return result
            if number != cases.AS_IT_IS:
                return self._trace(key, tensors, args, kwargs)
            if key in self._eager:
                return _without_gradients(self._step(*args, **kwargs))
        if key[:2] not in self._seen and not self._calls.take_another(len(self._seen)):
            return _without_gradients(self._step(*args, **kwargs))
        with modules_called(self._called):
            result = _without_gradients(self._step(*args, **kwargs))
        # As it will be the next time, with the modules that are known now.
        self._seen.add((key[0], _circumstances(self._called)[0]))
        return result

    @property
    def source(self) -> str:
        """Return the replayed functions, in Python."""
        return "\n\n".join(case.source for cases in self._cases.values() for case in cases)

    def _number(self, key: Any) -> int:
        """Return the number by which ranks tell apart cases that are not replayed."""
        if key in self._eager or key[:2] not in self._seen:
            return cases.AS_IT_IS
        if key not in self._last and len(self._last) + len(self._cases) >= 2 * MOST_CASES:
            return cases.AS_IT_IS
        return cases.TRACED - (key in self._last)

    def _trace(self, key: Any, tensors: Sequence[Tensor], args: Any, kwargs: Any) -> Result:
        before = self._last.pop(key, None)
        reductions = reductions_noted_in(self._called)
        case = _TracedCase(tensors, [x for r in reductions for x in r.leaves])
        if obstacle := cases.why_not_replayed(args, kwargs, tensors):
            case.trace.hinder(obstacle)
        grid = cases.grid_of(tensors)
        with traced(case.trace, grid), modules_called(self._called):
            result = self._step(*args, **kwargs)
        case.finish(tensors, result, reductions_noted_in(self._called))
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
            self._cases.setdefault(key, []).append(_ReplayedStep(case, backend, self._calls.made))
            self._calls.made += 1
        return _without_gradients(result)


def _captured(step: TracedStep, grid: Grid) -> TracedStep:
    """Return a step in graphs of the device; the step itself, with a warning, where none can be.

    All ranks call it together.
    """
    from distconv.compiling import capture  # which most programs do without

    instead = "is replayed without graphs of the device"
    why = capture.why_not(step, grid)
    if cases.obstacle_on_any_rank(why, grid, "the step", stacklevel=4, instead=instead):
        return step
    return capture.captured(step, grid)


def _circumstances(modules: Iterable[nn.Module]) -> Any:
    """Return two parts of a case's key: of the state of modules, and of gradients: which exist, and
    which are parts of sums.
    """
    parameters = cases.parameters_of(modules)
    reductions = reductions_noted_in(modules)
    state = cases.key_of_modules(modules, parameters), tuple(r.enabled for r in reductions)
    exist = tuple(x.grad is None for x in shards_of(parameters))
    return state, (exist, tuple(r.parts for r in reductions))


def _without_gradients(result: Any) -> Any:
    return replaced(result, {id(x): x.detach() for x in tensors_in(result)})


class _TracedCase:
    """One traced call of a step.

    Parameters
    ----------
    tensors: the tensors among the arguments.
    leaves: parameters whose gradients it may set, also without a call of torch.
    """

    def __init__(self, tensors: Sequence[Tensor], leaves: Iterable[Tensor]) -> None:
        self.trace = Trace(shards_of(tensors))
        for x in leaves:
            self.trace.standing_for(x)
        self.strides = [x.stride() for x in shards_of(tensors)]
        self.results = Results(())
        self.step = TracedStep([], [], [], {}, [])
        self.added_to: list[Tensor] = []
        """The leaves whose gradients are further inputs, after the tensors."""
        self.parts: list[tuple[GradientReduction, tuple[bool, ...]]] = []
        """The gradients that are parts of sums in the end."""

    def finish(
        self, arguments: Iterable[Tensor], result: Any, reductions: Iterable[GradientReduction]
    ) -> None:
        """Note the result of the step.

        Parameters
        ----------
        arguments: the tensors among its arguments.
        reductions: the reductions of the modules that it has called.
        """
        self.parts = [(r, r.parts) for r in reductions]
        trace, self.results = self.trace, Results(result)
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
        """Return a message that says how a later call of the case differs; "" if it does not."""
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
    """A step in its replayed form.

    Parameters
    ----------
    number: the number of the case, the same on all ranks.
    """

    def __init__(self, case: _TracedCase, backend: str | None, number: int) -> None:
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
        self._optimizers = [(x, _sizes(x)) for x in case.trace.optimizers]

    def fits(self) -> bool:
        """Return whether gradients are like those of the trace, and optimizers have no other
        parameters.
        """
        return (
            all(leaf.grad is gradient for leaf, gradient in self._fixed)
            and [_kind(leaf.grad) for leaf in self._added_to] == self._kinds
            and all(_sizes(x) == sizes for x, sizes in self._optimizers)
        )

    def replay(self, tensors: Sequence[Tensor]) -> Any:
        """Return the result of the step for these tensors."""
        given = shards_of(tensors)
        with cases.as_traced():
            blocks = list(map(cases.restrided, given, self._strides))
            made = self._run(*blocks, *(leaf.grad for leaf in self._added_to))
            for x, block in zip(given, blocks, strict=True):
                if x.data_ptr() != block.data_ptr():
                    x.copy_(block)  # which the step may have written to
        for reduction, parts in self._parts:
            reduction.give_parts(parts)
        return self._results.of(made)
