"""Traced steps as graphs of torch.fx, for the compilers of torch.compile.

In such a graph messages are functions of torch's dispatcher. Each takes a token that the message
before has made, so that no compiler changes their order. None writes to its arguments: the function
that waits returns the received or summed tensors. The sent tensors are arguments of the wait, too,
which keeps them alive.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import count, groupby
from operator import getitem
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, fx, nn

from distconv.compiling import trace
from distconv.compiling.program import Existing, TracedCall, TracedStep, Value
from distconv.grid.ranks import world
from distconv.torch_private import signature_of
from distconv.transport.interface import Request, Transport

aten, own = torch.ops.aten, torch.ops.distconv

_RANGES = (aten.arange.default, aten.arange.start, aten.arange.start_step)
"""Functions that inductor computes symbolically; random numbers need their wrap-around."""

_STARTS = (trace.start_exchange, trace.start_sum)

_numbers = count()
_MESSAGES: WeakValueDictionary[int, _Posted] = WeakValueDictionary()
"""The messages of all graphs by number, as functions of the dispatcher refer to them."""


class _Posted:
    """A message or reduction of a step, which each run of the step starts and waits for once.

    Parameters
    ----------
    call: the call of the traced step that starts it.
    """

    def __init__(self, call: TracedCall) -> None:
        self._function = call.function
        self._transport: Transport = call.arguments[0]
        self._rest = call.arguments[1:]
        self._request: Request | None = None
        self._filled: list[Tensor] = []
        self.number = next(_numbers)
        _MESSAGES[self.number] = self

    @property
    def leaving(self) -> list[Any]:
        """Return the values and constants that this rank sends, or adds to a sum."""
        if self._function is trace.start_exchange:
            return [x for _, x in self._rest[1]]
        return [self._rest[0]]

    @property
    def arriving(self) -> list[Any]:
        """Return the values and constants that the message overwrites when it arrives."""
        if self._function is trace.start_exchange:
            return [x for _, x in self._rest[0]]
        return [self._rest[0]]

    def start(self, leaving: Sequence[Tensor], like: Sequence[Tensor]) -> None:
        """Send the tensors `leaving`, and receive into new memory like the tensors `like`."""
        transport = self._transport
        if self._function is trace.start_exchange:
            filled = [transport.empty(tuple(x.shape), x) for x in like]
            from_whom, to_whom = ([rank for rank, _ in some] for some in self._rest)
            arriving = list(zip(from_whom, filled, strict=True))
            sent = [(rank, x.contiguous()) for rank, x in zip(to_whom, leaving, strict=True)]
            self._request = trace.start_exchange(transport, arriving, sent)
        else:
            filled = [leaving[0].clone(memory_format=torch.contiguous_format)]
            self._request = self._function(transport, filled[0], self._rest[1])
        self._filled = filled

    def wait(self) -> list[Tensor]:
        """Wait for the message, and return the received or summed tensors."""
        request, self._request = self._request, None
        if request is not None:
            request.wait()
        filled, self._filled = self._filled, []
        return filled

    def gather(self, x: Tensor) -> Tensor:
        """Return `x` of all ranks of the message's group, stacked in rank order."""
        return trace.gather(self._transport, x.contiguous(), self._rest[1])

    def ranks(self) -> int:
        """Return the number of ranks in the message's group."""
        size: int = self._rest[1].size
        return size


def _start(message: int, token: Tensor, leaving: list[Tensor], like: list[Tensor]) -> Tensor:
    _MESSAGES[message].start(leaving, like)
    return torch.empty_like(token)


def _wait(message: int, token: Tensor, leaving: Any, like: Any) -> tuple[Tensor, list[Tensor]]:
    return torch.empty_like(token), _MESSAGES[message].wait()


def _gather(message: int, token: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(token), _MESSAGES[message].gather(x)


def _filled(message: int, token: Tensor, leaving: Any, like: Any) -> tuple[Tensor, list[Tensor]]:
    return torch.empty_like(token), [x.new_empty(x.shape) for x in like]


_ENDED = "(int message, Tensor token, Tensor[] leaving, Tensor[] like) -> (Tensor, Tensor[])"
_LIBRARY = torch.library.Library("distconv", "FRAGMENT")
for _name, _schema, _run, _rehearsed in (
    (
        "start",
        "(int message, Tensor token, Tensor[] leaving, Tensor[] like) -> Tensor",
        _start,
        lambda message, token, leaving, like: torch.empty_like(token),
    ),
    ("wait", _ENDED, _wait, _filled),
    (
        "opaque",
        "(Tensor x) -> Tensor",
        torch.clone,
        torch.empty_like,
    ),
    (
        "gather",
        "(int message, Tensor token, Tensor x) -> (Tensor, Tensor)",
        _gather,
        lambda message, token, x: (
            torch.empty_like(token),
            x.new_empty((_MESSAGES[message].ranks(), *x.shape)),
        ),
    ),
):
    _LIBRARY.define(f"{_name}{_schema}")
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"distconv::{_name}", _rehearsed, lib=_LIBRARY)


_KEPT: dict[Callable[..., Any], Callable[..., Any]] = {}
"""Functions of torch that compilers write slower, each with a function that calls torch's kernel.

Inductor's loops for sums over all positions of channels last took 20 of 88 ms of a U-Net's step,
where torch's kernel takes 1; with all three its step takes 70 (torch 2.13).
"""

for _function in (
    aten.native_batch_norm_backward.default,
    aten.max_pool2d_with_indices_backward.default,
    aten.threshold_backward.default,
):
    _name = _function.overloadpacket.__name__
    _LIBRARY.define(_name + signature_of(_function))
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"distconv::{_name}", _function, lib=_LIBRARY)
    _KEPT[_function] = getattr(own, _name).default


_INDUCTOR = {"fallback_random": True, "size_asserts": False}
"""Options of inductor: random numbers by torch, and no checks of shapes, which a case fixes."""


def compiled(step: TracedStep, backend: str) -> TracedStep:
    """Return the step with its calls compiled as a function, or several around calls `_apart`.

    Each rank compiles a function for itself before the function's first run. `backend` is one of
    torch.compile.
    """
    apart = _apart(step.calls)
    messages = {call.results: _Posted(call) for call in step.calls if call.function in _STARTS}
    return _in_pieces(step, apart, lambda x, made: _Graph(messages, x).call(made, backend))


def _apart(calls: Sequence[TracedCall]) -> set[int]:
    """Return the ids of the calls that stay in Python, between compiled functions.

    Compilers do not know these: oneDNN's convolution, and computations in its memory layout.
    """
    apart: set[int] = set()
    in_onednn: set[Value | Existing] = set()
    unknown = aten.mkldnn_convolution.default, aten.to_mkldnn.default
    for call in calls:
        if call.function in unknown or not in_onednn.isdisjoint(call.used):
            apart.add(id(call))
        if call.function is aten.to_mkldnn.default or (
            id(call) in apart and call.function is aten.convolution_backward.default
        ):
            in_onednn.update(Value(n) for n in call.made)
    return apart


@contextmanager
def _told(backend: str, number: int) -> Iterator[None]:
    """Print on stderr of rank 0 that `number` calls are compiled, and the seconds it takes."""
    if world().rank != 0:
        yield
        return
    print(f"compile: {backend} compiles {number} calls", end=" ... ", file=sys.stderr, flush=True)
    begun = time.perf_counter()
    yield
    print(f"{time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)


def _in_pieces(
    step: TracedStep,
    apart: Container[int],
    taken: Callable[[Sequence[TracedCall], Sequence[Value]], TracedCall],
) -> TracedStep:
    """Return a step in which single calls replace the sequences of calls between the calls `apart`.

    Parameters
    ----------
    apart: the ids of calls that stay as they are.
    taken: `taken(calls, results)` returns the call that replaces the sequence `calls`; `results`
        are the values that it has to make.
    """
    pieces = [list(some) for _, some in groupby(step.calls, lambda call: id(call) in apart)]
    calls: list[TracedCall] = []
    live = {x for x in step.results if x is not None}
    for piece in reversed(pieces):
        if id(piece[0]) not in apart:
            made = {Value(n) for call in piece for n in call.made}
            piece = [taken(piece, sorted(made & live, key=lambda x: x.number))]
        calls += reversed(piece)
        live.update(x for call in piece for x in call.used)
    return replace(step, calls=calls[::-1])


class _Graph:
    """Consecutive calls of a step as a graph of torch.fx.

    Parameters
    ----------
    messages: all messages of the step, by the numbers of their requests.
    """

    def __init__(self, messages: Mapping[Any, _Posted], calls: Sequence[TracedCall]) -> None:
        self._messages, self._kept = messages, list(messages.values())
        self._graph = fx.Graph()
        self._nodes: dict[Any, fx.Node] = {}
        self._inputs: list[Value | Existing] = []
        made = {n for call in calls for n in call.made}
        for call in calls:
            for x in self._used(call):
                if x not in self._nodes and not (isinstance(x, Value) and x.number in made):
                    self._inputs.append(x)
                    self._nodes[x] = self._graph.placeholder(f"x{len(self._inputs)}")
        self._token = self._add(aten.empty.memory_format, [0])
        self._number = len(calls)
        for call in calls:
            self._take(call)

    def _used(self, call: TracedCall) -> Iterator[Value | Existing]:
        if call.function is trace.wait:
            message = self._messages[call.arguments[0].number]
            yield from (*message.leaving, *message.arriving)
        else:
            yield from call.used

    def call(self, results: Sequence[Value], backend: str) -> TracedCall:
        """Compile the graph, and return a call of the step that runs it and makes `results`."""
        self._graph.output((*map(self._node, results), self._token))
        options: Any = _INDUCTOR if backend == "inductor" else None
        run: Any = torch.compile(
            fx.GraphModule(nn.Module(), self._graph),
            backend=backend,
            options=options,
            fullgraph=True,
            dynamic=False,
        )
        kept, number, is_compiled = self._kept, self._number, False

        def graph(*tensors: Tensor) -> tuple[Tensor, ...]:
            nonlocal is_compiled
            assert kept is not None
            with nullcontext() if is_compiled else _told(backend, number):
                made: tuple[Tensor, ...] = run(*tensors)
            is_compiled = True
            return made[:-1]

        return TracedCall(graph, tuple(self._inputs), {}, tuple(x.number for x in results))

    def _node(self, x: Any) -> Any:
        if isinstance(x, (Value, Existing)):
            return self._nodes[x]
        if type(x) in (list, tuple):
            return type(x)(map(self._node, x))
        return x

    def _add(self, function: Callable[..., Any], *args: Any, **options: Any) -> fx.Node:
        return self._graph.call_function(function, args, options)

    def _take(self, call: TracedCall) -> None:
        if call.function in _STARTS:
            self._start(self._messages[call.results])
        elif call.function is trace.wait:
            self._end(self._messages[call.arguments[0].number])
        elif call.function is trace.broadcast:
            message = _Posted(call)
            self._kept.append(message)
            self._start(message)
            self._end(message)
        elif call.function is trace.gather:
            message = _Posted(call)
            self._kept.append(message)
            both = self._add(own.gather, message.number, self._token, *self._node(message.leaving))
            self._token = self._add(getitem, both, 0)
            self._nodes[Value(call.made[0])] = self._add(getitem, both, 1)
        elif call.function is trace.empty:
            _, shape, like = call.arguments
            memory = self._add(aten.new_empty.default, self._node(like), list(shape))
            self._nodes[Value(call.made[0])] = memory
        else:
            options = {name: self._node(x) for name, x in call.options.items()}
            function = _KEPT.get(call.function, call.function)
            made = self._add(function, *self._node(call.arguments), **options)
            if call.function in _RANGES:
                made = self._add(own.opaque, made)
            if isinstance(call.results, int):
                self._nodes[Value(call.results)] = made
            for i, n in enumerate(call.results if isinstance(call.results, tuple) else ()):
                if n is not None:
                    self._nodes[Value(n)] = self._add(getitem, made, i)

    def _start(self, message: _Posted) -> None:
        given = self._node(message.leaving), self._node(message.arriving)
        self._token = self._add(own.start, message.number, self._token, *given)

    def _end(self, message: _Posted) -> None:
        """Add nodes that wait for a message, and copy what arrived to its place."""
        given = self._node(message.leaving), self._node(message.arriving)
        both = self._add(own.wait, message.number, self._token, *given)
        self._token = self._add(getitem, both, 0)
        filled = self._add(getitem, both, 1)
        for i, x in enumerate(message.arriving):
            self._add(aten.copy_.default, self._node(x), self._add(getitem, filled, i))
