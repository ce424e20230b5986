"""Tracing of a graph as it runs: calls of torch's dispatcher and of carriers, in one order.

Autograd, rules and hooks run as usual, above the dispatcher. So the trace is the forward pass and
the backward pass as plain functions on this rank's blocks, and messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from distconv.compiling.program import Existing, TracedCall, Value
from distconv.device.kinds import random_states
from distconv.grid.communicators import WatchedTransport, WrappedTransport, carried_by
from distconv.grid.interface import Grid
from distconv.ops.support.in_place import noted_in
from distconv.tensor.dispatch import own_mode
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


def turn() -> None:
    """Mark the end of the forward pass and the beginning of the backward pass in a trace."""


class Trace:
    """The record of the passes of a graph that are being traced.

    Parameters
    ----------
    inputs: the blocks that the forward pass takes.

    Attributes
    ----------
    calls: the calls of the passes, in order.
    constants: tensors from before the call, by the numbers of their `Existing`.
    leaves: the constants whose gradients autograd makes.
    obstacle: the reason why the graph cannot be replayed; "" if it can.
    seen: the value or constant that stands for each tensor, weakly.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self.calls: list[TracedCall] = []
        self.constants: dict[int, Tensor] = {}
        self.leaves: list[Tensor] = []
        self.obstacle = ""
        self.paused = False
        self.seen = WeakTensorKeyDictionary()
        self._count = 0
        self._random = random_states()
        self.inputs = [self.new(x) for x in inputs]

    def new(self, x: Tensor | None = None) -> int:
        """Return the number of a new `Value`, which stands for `x`, or for a request."""
        self._count += 1
        if x is not None:
            self.seen[x] = Value(self._count)
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
            return self.seen.get(x) or self._constant(x)
        if type(x) in (list, tuple):
            return type(x)(map(self.standing_for, x))
        return x

    def _constant(self, x: Tensor) -> Existing:
        self.seen[x] = constant = Existing(len(self.constants))
        self.constants[constant.number] = x
        if x.is_leaf and x.requires_grad:
            self.leaves.append(x)
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
        """Note `why` the graph cannot be replayed; a first note stays."""
        self.obstacle = self.obstacle or why

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
            self.seen.setdefault(result, args[0])
            return
        if function is _FRESH:
            function = aten.clone.default
        if _RANDOM in tags:
            self._random = random_states()
        results: Any
        if isinstance(result, Tensor):
            results = None if result in self.seen else self.new(result)
        else:
            several = result if isinstance(result, (tuple, list)) else ()
            results = tuple(
                self.new(x) if isinstance(x, Tensor) and x not in self.seen else None
                for x in several
            )
        self.calls.append(TracedCall(function, args, options, results))

    def check_random(self) -> None:
        """Note an obstacle if the program has set the state of torch's random generators."""
        if not all(map(torch.equal, self._random, random_states())):
            self.hinder(
                "it sets the state of random numbers; pass preserve_rng_state=False to "
                "torch.utils.checkpoint where there is no dropout"
            )


class _Dispatcher(DispatchMode):
    """A torch dispatch mode that records every call of the dispatcher in a trace."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        trace, kwargs = self._trace, kwargs or {}
        if trace.paused:
            return func(*args, **kwargs)
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


@contextmanager
def traced(trace: Trace, grid: Grid) -> Iterator[None]:
    """Record this thread's calls and messages in `trace`, within the context.

    All ranks of the grid enter it together, and compare their traces before each message. Raises
    DivergenceError on every rank if these differ.
    """

    with ExitStack() as left:
        left.enter_context(noted_in(trace.seen))
        left.enter_context(grid.journal.comparing_all("traced pass"))
        left.enter_context(carried_by(lambda transport: _TracedCarrier(transport, trace)))
        with own_mode(_Dispatcher(trace)):
            yield


@contextmanager
def modules_called(found: dict[nn.Module, None]) -> Iterator[None]:
    """Add each module that is called within the context to `found`, and all its submodules."""
    handle = register_module_forward_pre_hook(lambda m, _: found.update(dict.fromkeys(m.modules())))
    try:
        yield
    finally:
        handle.remove()
