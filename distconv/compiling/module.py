"""Compiled modules: forward and backward pass are traced, and replayed as one autograd function."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from distconv.comm.shard_function import ShardFunction
from distconv.compiling import cases, tracing
from distconv.compiling.cases import Calls, Results
from distconv.compiling.program import Existing, TracedCall, TracedStep, Value
from distconv.compiling.tracing import Trace, modules_called, traced
from distconv.compiling.variables import Variables, told
from distconv.grid.interface import Grid
from distconv.model.gradient_reduction import reduction_of
from distconv.tensor.nested import replaced, shards_of, tensors_in
from distconv.torch_private import hooks_of

_MOST_TRACES = 8
"""The most traced calls from which two with a backward pass must come."""


class CompiledModule:
    """A module that `compile` returns: its calls are traced, and later replayed.

    Parameters
    ----------
    evaluated: the compiled step for calls under torch.no_grad().

    Attributes
    ----------
    replays: the number of replayed calls with gradients.
    """

    def __init__(self, module: nn.Module, evaluated: Any, backend: str | None) -> None:
        self._module, self._evaluated, self._backend = module, evaluated, backend
        self._called: dict[nn.Module, None] = {}
        """All modules that were called within it."""
        self._cases: dict[Any, _ReplayedModule | None] = {}
        """The decided cases: None for those that are not replayed."""
        self._traces: dict[Any, list[_Traced]] = {}
        self._calls = Calls("module")
        self._variables = Variables(module, self._called)
        self.replays = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's result, replayed if the call's case is known."""
        if tracing.is_under_way():
            return self._module(*args, **kwargs)
        if not torch.is_grad_enabled():
            return self._evaluated(*args, **kwargs)
        tensors = tensors_in(args, kwargs)
        key = self._key(args, kwargs, tensors)
        grid = cases.grid_of(tensors)
        if not self._calls.agree(self._number(key), grid):
            if key in self._cases or key in self._traces:
                return self._module(*args, **kwargs)
        elif key not in self._cases and key in self._traces:
            self._decide(key, cases.why_not_replayed(args, kwargs, tensors), grid)
            if key not in self._cases:
                return self._trace(self._traces[key], tensors, args, kwargs)
        if key in self._cases:
            case = self._cases[key]
            if case is None:
                return self._module(*args, **kwargs)
            self.replays += 1
            return self._replay(case, tensors)
        if not self._calls.take_another(len(self._traces)):
            return self._module(*args, **kwargs)
        with modules_called(self._called):
            result = self._module(*args, **kwargs)
        # As it will be the next time, with the modules that are known now.
        self._traces.setdefault(self._key(args, kwargs, tensors), [])
        return result

    @property
    def source(self) -> str:
        """Return the Python source of all replayed functions."""
        return "\n\n".join(case.source for case in self._cases.values() if case is not None)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"compile: a compiled module has no attribute {name!r}; use the module that was "
            "compiled for parameters, states and modes"
        )

    def __reduce__(self) -> Any:
        return CompiledModule, (self._module, self._evaluated, self._backend)

    def _key(self, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> Any:
        parameters = cases.parameters_of(self._called)
        return (
            cases.key_of_call(args, kwargs, tensors),
            cases.key_of_modules(self._called, parameters),
            self._variables.now(),
            told(self._variables.tensors, tensors=True),
        )

    def _number(self, key: Any) -> int:
        """Return the number, as in `Calls`, of a call whose case has this key."""
        case = self._cases.get(key)
        if case is not None:
            return case.number
        if key in self._cases or key not in self._traces:
            return cases.AS_IT_IS
        return cases.TRACED - len(self._traces[key])

    def _decide(self, key: Any, why: str, grid: Grid) -> None:
        """Decide with all ranks whether the case `key` is replayed, once two calls are traced.

        `why` is the reason not to replay that the arguments give; "" if there is none.
        """
        traces = self._traces[key]
        complete = [x for x in traces if x.complete][:2]
        number = min(grid.all_gather_object(len(complete)))
        why = why or next((x.trace.obstacle for x in traces if x.trace.obstacle), "")
        if not why and number == 2:
            why = complete[0].difference(complete[1])
        elif not why and len(traces) == _MOST_TRACES:
            why = "no backward pass has followed; call it under torch.no_grad() where none will"
        if cases.obstacle_on_any_rank(why, grid, "the module", stacklevel=3):
            self._cases[key] = None
        elif number == 2:
            self._cases[key] = _ReplayedModule(complete[1], self._backend, self._calls.made)
            self._calls.made += 1
        if key in self._cases:
            traces.clear()

    def _trace(self, traces: list[_Traced], tensors: Sequence[Tensor], args: Any, kw: Any) -> Any:
        """Run and trace the module, and return its result as that of one autograd function."""
        # The graph within begins at these, and ends at what the module returns.
        inner = [x.detach().requires_grad_(x.requires_grad) for x in tensors]
        call = _Traced(inner, cases.grid_of(tensors))
        traces.append(call)
        args, kw = replaced((args, kw), dict(zip(map(id, tensors), inner, strict=True)))
        known = list(self._called)
        before = cases.key_of_modules(known, cases.parameters_of(known))
        with traced(call.trace, call.grid), modules_called(self._called):
            returned = self._module(*args, **kw)
        if hash(cases.key_of_modules(known, cases.parameters_of(known))) != hash(before):
            call.trace.hinder("it changes settings of modules, which a replay would not")
        call.finish_forward(returned)
        live = _Live(call, shards_of(inner))
        return self._applied(live, call.results, shards_of(tensors), call.leaves)

    def _replay(self, case: _ReplayedModule, tensors: Sequence[Tensor]) -> Any:
        reduction = reduction_of(self._module)
        if reduction is not None:
            reduction.prepare()
        given = shards_of(tensors)
        return self._applied(_Once(case, given), case.results, given, case.leaves)

    def _applied(
        self,
        passes: _Live | _Once,
        results: Results,
        given: Sequence[Tensor],
        leaves: Sequence[Tensor],
    ) -> Any:
        blocks = _Apart.apply(passes, *(x for x in (*given, *leaves) if x.requires_grad))
        reduction = reduction_of(self._module)
        if reduction is not None:
            reduction.keep_for(blocks)
        return results.of(blocks)


class _Apart(ShardFunction):
    """The autograd function that stands for a whole module, in traced and in replayed calls.

    Its inputs are the blocks and leaves that require gradients. The first argument, a `_Live` or
    `_Once`, computes both passes.
    """

    @staticmethod
    def forward(ctx: Any, passes: _Live | _Once, *_: Tensor) -> tuple[Tensor, ...]:
        ctx.passes = passes
        # A result on which the loss does not depend has no gradient, not one of zeros.
        ctx.set_materialize_grads(False)
        results = passes.forward(ctx)
        ctx.mark_non_differentiable(
            *(x for x, has in zip(results, passes.differentiable, strict=True) if not has)
        )
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return (None, *ctx.passes.backward(ctx, gradients))


class _Traced:
    """The trace of one call of a module, and of the backward pass through it.

    Parameters
    ----------
    tensors: the tensors among the arguments.
    grid: the grid of these tensors.
    """

    def __init__(self, tensors: Sequence[Tensor], grid: Grid) -> None:
        self.grid = grid
        self._given = shards_of(tensors)
        self._versions = [x._version for x in self._given]
        self.trace = Trace(self._given)
        self.strides = [x.stride() for x in self._given]
        self.results = Results(())
        self.differentiable: list[bool] = []
        """For each tensor of the results whether it is differentiable."""
        self.leaves: list[Tensor] = []
        """The parameters, and other leaves, whose gradients the backward pass makes."""
        self.reached: list[bool] = []
        """For each tensor of the results whether the loss depends on it."""
        self.gradient_strides: list[tuple[int, ...]] = []
        self.step = TracedStep([], [], [], {}, [])
        """Both passes, with the call of `tracing.turn` between them."""
        self.complete = False

    def finish_forward(self, returned: Any) -> None:
        """Note the module's result `returned`, at the end of the traced forward pass."""
        trace, self.results = self.trace, Results(returned)
        blocks = self.results.blocks
        self.differentiable = [x.requires_grad for x in blocks]
        self.leaves = [leaf for leaf, _ in trace.leaves.values()]
        if self._versions != [x._version for x in self._given]:
            trace.hinder("it writes to a tensor among its arguments")
        if any(isinstance(x, Existing) for x in trace.standing_for(blocks)):
            trace.hinder("it returns a parameter or a buffer")
        self._made = trace.standing_for(blocks)
        self._given = []
        trace.calls.append(TracedCall(tracing.turn, ()))

    def finish_backward(self, gradients: Sequence[Tensor], found: Sequence[Tensor | None]) -> None:
        """Note the end of the traced backward pass.

        `gradients`, of the module's results, were its inputs. `found`, of the module's inputs and
        of leaves, are its results; None for a tensor without a gradient.
        """
        trace = self.trace
        if any(
            isinstance(x, Value) and x.number in trace.found for c in trace.calls for x in c.used
        ):
            trace.hinder("it uses the gradients of parameters")
        self.gradient_strides = [x.stride() for x in gradients]
        results = [*self._made, *trace.standing_for(list(found))]
        step = TracedStep(trace.inputs, trace.calls, results, trace.constants, [])
        self.step = step.reduced()
        self.complete = True

    def difference(self, later: _Traced) -> str:
        """Return in words how a later call of the same case differs; "" if it agrees."""
        if self.results.words != later.results.words:
            return "its results differ each time"
        if self.reached != later.reached:
            return "the loss depends on other results of it each time"
        return cases.difference(self.step, later.step)


class _Live:
    """The passes of a call that is being traced: they run the module's own autograd graph."""

    def __init__(self, call: _Traced, given: Sequence[Tensor]) -> None:
        self._call, self.differentiable = call, call.differentiable
        self._results = call.results.blocks
        self._ends = [x for x in (*given, *call.leaves) if x.requires_grad]
        call.results.blocks = []

    def forward(self, ctx: Any) -> list[Tensor]:
        # torch refuses a second backward pass where something has been saved.
        ctx.save_for_backward(torch.empty(0))
        return [x.detach() for x in self._results]

    def backward(self, ctx: Any, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        _ = ctx.saved_tensors
        call, trace = self._call, self._call.trace
        reached = [x is not None for x in gradients]
        given = [x.contiguous() if cases.is_expanded(x) else x for x in gradients if x is not None]
        roots = list(compress(self._results, reached))
        if call.complete:
            return self._gradients(roots, given)
        call.reached = reached
        with traced(trace, call.grid):
            trace.go_on(given)
            found = self._gradients(roots, given)
        call.finish_backward(given, found)
        return found

    def _gradients(
        self, roots: Sequence[Tensor], given: Sequence[Tensor]
    ) -> tuple[Tensor | None, ...]:
        # Hooks of leaves are called where `_Apart` hands out their gradients.
        hooks = [(of, dict(of)) for x in self._call.leaves if (of := hooks_of(x))]
        for of, _ in hooks:
            of.clear()
        try:
            return torch.autograd.grad(
                roots, self._ends, given, retain_graph=True, allow_unused=True
            )
        except RuntimeError as error:
            if "use_reentrant" not in str(error):
                raise
            raise RuntimeError(
                "compile: torch.utils.checkpoint with use_reentrant=True does not work within a "
                "compiled module; pass use_reentrant=False, or compile the whole step"
            ) from error
        finally:
            for of, before in hooks:
                of.update(before)


class _ReplayedModule:
    """The program that replays one case of a module: a forward and a backward function.

    Parameters
    ----------
    call: a traced call of the case.
    number: the number of the case, the same on all ranks.
    """

    def __init__(self, call: _Traced, backend: str | None, number: int) -> None:
        self.number = number
        self.results, self.strides = call.results, call.strides
        self.differentiable, self.reached = call.differentiable, call.reached
        self.gradient_strides = call.gradient_strides
        self.leaves = call.leaves
        step, given = call.step, len(call.strides)
        turn = next(i for i, x in enumerate(step.calls) if x.function is tracing.turn)
        first, second = step.calls[:turn], step.calls[turn + 1 :]
        own = len(self.differentiable)
        results, found = step.results[:own], step.results[own:]
        inputs, gradients = step.inputs[:given], step.inputs[given:]
        there = {*inputs, *(n for x in first for n in x.made)}
        used = dict.fromkeys(x for call in second for x in call.used)
        used |= dict.fromkeys(x for x in found if x is not None)
        kept = [x for x in used if isinstance(x, Value) and x.number in there]
        self.constants = [step.constants[x.number] for x in used if isinstance(x, Existing)]
        """The tensors that the backward pass reads, which must not change until then."""
        forward = cases.program_of(
            TracedStep(inputs, first, [*results, *kept], step.constants, []), backend
        )
        numbers = [*(x.number for x in kept), *gradients]
        backward = cases.program_of(TracedStep(numbers, second, found, step.constants, []), backend)
        self.run_forward, self.run_backward = forward.run, backward.run
        self.source = f"{forward.source}\n\n{backward.source}"


class _Once:
    """The passes of one replayed call: they run the functions of a `_ReplayedModule`."""

    def __init__(self, case: _ReplayedModule, given: Sequence[Tensor]) -> None:
        self._case, self._given, self.differentiable = case, given, case.differentiable
        self._kept = 0

    def forward(self, ctx: Any) -> list[Tensor]:
        case = self._case
        with cases.as_traced():
            blocks = map(cases.restrided, self._given, case.strides)
            made = case.run_forward(*blocks)
        self._given = []
        number = len(case.differentiable)
        results, kept = made[:number], made[number:]
        self._kept = len(kept)
        ctx.save_for_backward(*kept, *case.constants)
        # Autograd knows each result once.
        return [
            x.detach() if any(x is y for y in results[:i]) else x for i, x in enumerate(results)
        ]

    def backward(self, ctx: Any, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        case = self._case
        kept = ctx.saved_tensors[: self._kept]
        if case.reached != [x is not None for x in gradients]:
            raise RuntimeError(
                "compile: the loss depends on other results of the module than in the calls that "
                "were traced; compile it for each such loss, dc.compile(model), or return what "
                "the loss takes"
            )
        present = (x for x in gradients if x is not None)
        given = map(cases.restrided, present, case.gradient_strides)
        with cases.as_traced():
            return case.run_backward(*kept, *given)
