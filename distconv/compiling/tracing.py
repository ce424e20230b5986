"""Tracing of a step as it runs: calls of torch's dispatcher and of carriers, in one order.

Autograd, rules and hooks run as usual, above the dispatcher. So the trace is the forward pass, the
backward pass and the sums of gradients as plain functions on this rank's blocks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakTensorKeyDictionary

from distconv.compiling.program import Existing, TracedCall, Value
from distconv.device.kinds import random_states
from distconv.grid.communicators import carried_by
from distconv.grid.interface import Grid
from distconv.grid.program_lines import user_line
from distconv.grid.watched import WatchedTransport, WrappedTransport
from distconv.ops.support.in_place import noted_in
from distconv.tensor.eager import own_mode
from distconv.tensor.nested import shards_of
from distconv.torch_private import DispatchMode, Operator
from distconv.transport.interface import Message, Request, Transport

aten = torch.ops.aten

Result = TypeVar("Result")

_ALIASES = (aten.detach.default, aten.alias.default)
"""Functions that return their argument where gradients are not recorded."""

_FRESH = aten.lift_fresh.default
"""The function by which torch returns a tensor made from numbers."""

_READS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
"""The tags of functions with results, or shapes, that a program reads from elements."""

_COLLECTIVES = ("c10d", "_c10d_functional")
"""The names of torch.distributed's functions in the dispatcher."""

_SCHEDULES = (
    "it changes the settings of an optimizer, as a scheduler does; let the scheduler step outside"
)

_RANDOM = torch.Tag.nondeterministic_seeded


def _calling(method: str, name: str) -> Callable[..., Any]:
    """Return a function, called `name` in traced steps, that calls `method` of its argument 0."""

    def call(owner: Any, *arguments: Any) -> Any:
        return getattr(owner, method)(*arguments)

    call.__name__ = name
    return call


empty, wait = _calling("empty", "empty"), _calling("wait", "wait")
start_sum, gather = _calling("all_reduce", "start_sum"), _calling("all_gather", "gather")
broadcast = _calling("broadcast", "broadcast")


def start_exchange(
    transport: Transport, arriving: Sequence[Message], leaving: Sequence[Message]
) -> Request:
    """Start the messages of one exchange; a traced step contains it as a call."""
    return transport.exchange(arriving, leaving, transport.next_tag())


def give(leaf: Tensor, gradient: Tensor | None) -> None:
    """Set the gradient of a leaf; a traced step contains it as a call."""
    leaf.grad = gradient


def step(optimizer: Optimizer, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Let an optimizer step with its present settings; a traced step contains it as a call."""
    optimizer.step(*arguments, **options)


def turn() -> None:
    """Mark the end of the forward pass and the beginning of the backward pass in a trace."""


class Trace:
    """The record of a step that is being traced.

    Parameters
    ----------
    inputs: the blocks that the step gets.
    optimizers: optimizers that stepped in an earlier trace of the step.

    Attributes
    ----------
    calls: the calls of the step, in order.
    constants: tensors from before the step, by the numbers of their `Existing`.
    leaves: the constants whose gradients autograd makes, each with its gradient when the step first
        used it.
    found: leaves whose earlier gradients the step reads, as further inputs; by the number of the
        `Value` that stands for the gradient.
    optimizers: the optimizers that stepped, each with its settings then.
    obstacle: the reason why the step cannot be replayed; "" if it can.
    notes: weak mappings from tensors to their stand-ins, and from tensors made during a pause.
    """

    def __init__(self, inputs: Sequence[Tensor], optimizers: Iterable[Optimizer] = ()) -> None:
        self._settings = {x: _settings(x) for x in optimizers}
        self.calls: list[TracedCall] = []
        self.constants: dict[int, Tensor] = {}
        self.leaves: dict[int, tuple[Tensor, Tensor | None]] = {}
        self.found: dict[int, Tensor] = {}
        self.optimizers: dict[Optimizer, list[dict[str, Any]]] = {}
        self.obstacle = ""
        self.paused = False
        self._steps = 0
        """The number of optimizers' steps under way, one within the other."""
        self._seen = WeakTensorKeyDictionary()
        """The value or constant that stands for each tensor."""
        self._apart = WeakTensorKeyDictionary()
        """The tensors that were made while the trace was paused."""
        self.notes = self._seen, self._apart
        self._count = 0
        self._random = random_states()
        self._outside = _states_outside()
        self.inputs = [self.new(x) for x in inputs]

    def new(self, x: Tensor | None = None) -> int:
        """Return the number of a new `Value`, which stands for `x`, or for a request."""
        self._count += 1
        if x is not None:
            self._seen[x] = Value(self._count)
        return self._count

    def go_on(self, gradients: Sequence[Tensor]) -> None:
        """Continue the trace with a backward pass, whose inputs are `gradients`.

        Calls and random numbers since the forward pass do not count.
        """
        self.inputs += [self.new(x) for x in gradients]
        self._random = random_states()

    def standing_for(self, x: Any) -> Any:
        """Return `x` with a `Value` or an `Existing` in place of each tensor."""
        if isinstance(x, Tensor):
            return self._seen.get(x) or self._constant(x)
        if type(x) in (list, tuple):
            return type(x)(map(self.standing_for, x))
        return x

    def _constant(self, x: Tensor) -> Existing:
        if x in self._apart:
            self.hinder("it uses a tensor that an optimizer's step has made")
        self._seen[x] = constant = Existing(len(self.constants))
        self.constants[constant.number] = x
        if x.is_leaf and x.requires_grad:
            self.leaves[constant.number] = x, x.grad
            if x.grad is not None and x.grad not in self._seen:
                self.found[self.new(x.grad)] = x
        return constant

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Record nothing within the context."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def hinder(self, why: str) -> None:
        """Note `why` the step cannot be replayed, with the program's line; a first note stays."""
        self.obstacle = self.obstacle or f"{why}, at {user_line()}"

    def note(
        self,
        function: Operator,
        args: Any,
        options: dict[str, Any],
        result: Any,
        by_positions: bool = False,
    ) -> None:
        """Record a call of torch's dispatcher.

        Parameters
        ----------
        args, options: its arguments, with `Value` and `Existing` in place of tensors.
        by_positions: True if it indexes a tensor by positions, not by a mask: the shape of the
            result then does not depend on elements.
        """
        if function.namespace in _COLLECTIVES:
            self.hinder(f"it sends by torch.distributed itself ({function})")
        tags = function.tags
        if any(tag in tags for tag in _READS) and not by_positions:
            self.hinder(f"it reads elements of a tensor ({function})")
        if function in _ALIASES:
            self._seen.setdefault(result, args[0])
            return
        if function is _FRESH:
            function = aten.clone.default
        if _RANDOM in tags:
            self._random = random_states()
        results: Any
        if isinstance(result, Tensor):
            results = None if result in self._seen else self.new(result)
        else:
            several = result if isinstance(result, (tuple, list)) else ()
            results = tuple(
                self.new(x) if isinstance(x, Tensor) and x not in self._seen else None
                for x in several
            )
        self.calls.append(TracedCall(function, args, options, results))

    def leave_out(self, result: Any) -> None:
        """Remember tensors that were made during a pause, which the step must not use."""
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, Tensor):
                self._apart[x] = True

    def check_random(self) -> None:
        """Note an obstacle if the program has set the state of torch's random generators."""
        if not all(map(torch.equal, self._random, random_states())):
            self.hinder("it sets the state of random numbers, as torch.utils.checkpoint does")

    def end(self) -> None:
        """Note an obstacle if Python's or numpy's random state, or an optimizer, has changed."""
        if _states_outside() != self._outside:
            self.hinder("it draws random numbers of Python or numpy; pass them as arguments")
        for optimizer, before in self.optimizers.items():
            if _settings(optimizer) != before:
                self.hinder(_SCHEDULES)

    def gradients(self) -> list[tuple[Existing, Any]]:
        """Return pairs for leaves whose gradients have changed: stand-ins of leaf and gradient."""
        given = {call.arguments[0].number for call in self.calls if call.function is give}
        leaves = list(self.leaves.items())
        changed = (x for n, (x, first) in leaves if n in given or x.grad is not first)
        return [self.standing_for((x, x.grad)) for x in changed]

    def before_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Pause the trace before an optimizer's step; in replays the optimizer steps by itself."""
        self._steps += 1
        if self._steps > 1:
            return  # the step of a base class, as part of the step of its subclass
        if any(map(callable, (*args[1:], *kwargs.values()))):
            self.hinder("an optimizer evaluates a closure")
        if any(getattr(optimizer, x, None) is not None for x in ("grad_scale", "found_inf")):
            self.hinder("a GradScaler lets an optimizer step")
        settings = _settings(optimizer)
        if self._settings.get(optimizer, settings) != settings:
            self.hinder(_SCHEDULES)
        self.optimizers.setdefault(optimizer, settings)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for p in shards_of(parameters):
            self.calls.append(TracedCall(give, self.standing_for((p, p.grad))))
        self.paused = True

    def after_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Record an optimizer's step as one call, and end the pause."""
        self._steps -= 1
        if self._steps:
            return
        self.paused = False
        self.calls.append(TracedCall(step, (optimizer, tuple(args[1:]), dict(kwargs))))


def _states_outside() -> Any:
    """Return the states of Python's and numpy's random generators."""
    numbers: Any = np.random.get_state()
    return random.getstate(), numbers[1].tobytes(), numbers[2:]


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]


class _Dispatcher(DispatchMode):
    """A torch dispatch mode that records every call of the dispatcher in a trace."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        trace, kwargs = self._trace, kwargs or {}
        if trace.paused:
            result = func(*args, **kwargs)
            trace.leave_out(result)
            return result
        if _RANDOM in func.tags:
            trace.check_random()
        stood_for = trace.standing_for(args)
        options = {name: trace.standing_for(x) for name, x in kwargs.items()}
        result = func(*args, **kwargs)
        by_positions = func is aten.index.Tensor and not any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        trace.note(func, stood_for, options, result, by_positions)
        return result


class _TracedRequest:
    """A request whose `wait` is recorded in the trace."""

    __slots__ = ("_number", "_request", "_trace")

    def __init__(self, trace: Trace, request: Request, number: int) -> None:
        self._trace, self._request, self._number = trace, request, number

    def wait(self) -> None:
        """Wait for the request."""
        with self._trace.pause():
            self._request.wait()
        self._trace.calls.append(TracedCall(wait, (Value(self._number),)))


class _TracedCarrier(WrappedTransport):
    """A carrier that records its messages in `trace`, as calls of `transport`, which it serves."""

    def __init__(self, transport: WatchedTransport, trace: Trace) -> None:
        super().__init__(transport.carrier)
        self._transport, self._trace = transport, trace
        self.empty = self._empty

    def _empty(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        return self._call(empty, (shape, like), self.carrier.empty, shape, like)

    def exchange(
        self, arriving: Sequence[Message], leaving: Sequence[Message], tag: int
    ) -> Request:
        arguments, run = ([*arriving], [*leaving]), self.carrier.exchange
        return self._call(start_exchange, arguments, run, arriving, leaving, tag)

    def all_reduce(self, tensor: Tensor, group: Any) -> Request:
        return self._call(start_sum, (tensor, group), self.carrier.all_reduce, tensor, group)

    def all_gather(self, tensor: Tensor, group: Any) -> Tensor:
        return self._call(gather, (tensor, group), self.carrier.all_gather, tensor, group)

    def broadcast(self, tensor: Tensor, group: Any) -> None:
        self._call(broadcast, (tensor, group), self.carrier.broadcast, tensor, group)

    def _call(
        self, function: Callable[..., Any], arguments: Any, run: Callable[..., Result], *given: Any
    ) -> Result:
        """Run `run(*given)`, a method of the carrier, and record it as `function(*arguments)`."""
        trace = self._trace
        if trace.paused:
            return run(*given)
        arguments = trace.standing_for(arguments)
        with trace.pause():
            result: Any = run(*given)
        number = None
        if isinstance(result, Tensor):
            number = trace.new(result)
        elif result is not None:
            number = trace.new()
            result = _TracedRequest(trace, result, number)
        trace.calls.append(TracedCall(function, (self._transport, *arguments), {}, number))
        return result  # type: ignore[no-any-return]


_traces: list[Trace] = []
"""The traces that are being made."""


def is_under_way() -> bool:
    """Return whether a step or module is being traced now."""
    return bool(_traces)


@contextmanager
def traced(trace: Trace, grid: Grid) -> Iterator[None]:
    """Record this thread's calls and messages in `trace`, within the context.

    All ranks of the grid enter it together. Before each message and each optimizer's step they
    compare their traces. Raises DivergenceError on every rank if these differ.
    """

    def compare(optimizer: Optimizer, *_: Any) -> None:
        grid.journal.take(f"{type(optimizer).__name__}.step")

    with ExitStack() as left:
        _traces.append(trace)
        left.callback(_traces.pop)
        left.enter_context(noted_in(*trace.notes))
        left.enter_context(grid.journal.comparing_all("traced pass"))
        left.enter_context(carried_by(lambda transport: _TracedCarrier(transport, trace)))
        for handle in (
            register_optimizer_step_pre_hook(compare),
            register_optimizer_step_pre_hook(trace.before_optimizer),
            register_optimizer_step_post_hook(trace.after_optimizer),
        ):
            left.callback(handle.remove)
        with own_mode(_Dispatcher(trace)):
            yield
        trace.end()


@contextmanager
def modules_called(found: dict[nn.Module, None]) -> Iterator[None]:
    """Add each module that is called within the context to `found`, and all its submodules."""
    handle = register_module_forward_pre_hook(lambda m, _: found.update(dict.fromkeys(m.modules())))
    try:
        yield
    finally:
        handle.remove()
