"""Traced passes compiled by a backend of torch.compile, such as inductor.

Messages become functions of torch's dispatcher. Each function takes a token that the previous
message has returned, so that no compiler changes the order of messages. No function writes to its
arguments: the function that waits returns the received or summed tensors. The sent tensors are also
arguments of the wait, which keeps them alive.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import count
from operator import getitem
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, fx
from torch.fx.passes.split_module import split_module

from distconv.compiling.trace import Communication, OpaqueCall, Pass, wait
from distconv.grid.ranks import world
from distconv.torch_private import signature_of
from distconv.transport.interface import Request

aten, own = torch.ops.aten, torch.ops.distconv

_RANGES = (aten.arange.default, aten.arange.start, aten.arange.start_step)
"""Functions that inductor computes symbolically, without the integer wrap-around on which
computations of random numbers rely."""

_numbers = count()
_MESSAGES: WeakValueDictionary[int, _Posted] = WeakValueDictionary()
"""The messages of all graphs by their numbers, the arguments of functions of the dispatcher."""


class _Posted:
    """A call of a carrier in a pass, which each run of the pass starts once and waits for once.

    Attributes
    ----------
    leaving: the nodes of the tensors that this rank sends, or adds to a sum.
    arriving: the nodes of the tensors that the received message overwrites.
    """

    def __init__(self, call: Communication, args: Any) -> None:
        self._call, self._request, self._filled = call, None, list[Tensor]()
        both = args if call.method == "exchange" else ([(0, args[0])], [(0, args[0])])
        self.arriving, self.leaving = ([x for _, x in some] for some in both)
        self._from, self._to = ([rank for rank, _ in some] for some in both)
        self.number = next(_numbers)
        _MESSAGES[self.number] = self

    def start(self, leaving: Sequence[Tensor], like: Sequence[Tensor]) -> None:
        """Start to send the tensors `leaving`, and to receive new tensors like those in `like`."""
        if self._call.method == "exchange":
            filled = [self._call.transport.empty(tuple(x.shape), x) for x in like]
            sent = [(rank, x.contiguous()) for rank, x in zip(self._to, leaving, strict=True)]
            self._request = self._call(list(zip(self._from, filled, strict=True)), sent)
        elif self._call.method == "all_gather":
            filled = [self._call(leaving[0].contiguous())]
        else:
            filled = [leaving[0].clone(memory_format=torch.contiguous_format)]
            self._request = self._call(filled[0])
        self._filled = filled

    def wait(self) -> list[Tensor]:
        """Wait for the message, and return the received or summed tensors."""
        request: Request | None
        request, self._request = self._request, None
        if request is not None:
            request.wait()
        filled, self._filled = self._filled, []
        return filled

    def arrived(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Return uninitialised tensors with the shapes of the tensors that `wait` returns."""
        more = (self._call.group[0].size,) if self._call.method == "all_gather" else ()
        return [x.new_empty((*more, *x.shape)) for x in like]


def _start(message: int, token: Tensor, leaving: list[Tensor], like: list[Tensor]) -> Tensor:
    _MESSAGES[message].start(leaving, like)
    return torch.empty_like(token)


def _wait(message: int, token: Tensor, leaving: Any, like: Any) -> tuple[Tensor, list[Tensor]]:
    return torch.empty_like(token), _MESSAGES[message].wait()


def _filled(message: int, token: Tensor, leaving: Any, like: Any) -> tuple[Tensor, list[Tensor]]:
    return torch.empty_like(token), _MESSAGES[message].arrived(like)


_LIBRARY = torch.library.Library("distconv", "FRAGMENT")
_GIVEN = "(int message, Tensor token, Tensor[] leaving, Tensor[] like)"
for _name, _schema, _run, _rehearsed in (
    ("start", f"{_GIVEN} -> Tensor", _start, lambda _, token, *__: torch.empty_like(token)),
    ("wait", f"{_GIVEN} -> (Tensor, Tensor[])", _wait, _filled),
    ("opaque", "(Tensor x) -> Tensor", torch.clone, torch.empty_like),
):
    _LIBRARY.define(f"{_name}{_schema}")
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"distconv::{_name}", _rehearsed, lib=_LIBRARY)


_KEPT: dict[Callable[..., Any], Callable[..., Any]] = {}
"""Functions for which compilers generate slow code, each with a function that calls torch's kernel.

Inductor's loops for sums over all positions with channels last took 20 ms of a U-Net's step of 88
ms; torch's kernel takes 1 ms. With all three functions the step takes 70 ms (torch 2.13).
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
"""Options of inductor: torch's random numbers, and no checks of shapes, which are constant."""


def compiled(one: Pass, backend: str) -> Callable[..., Any]:
    """Return a traced pass as a function that `backend`, a backend of torch.compile, compiles.

    The backend compiles the entire pass, or the sections between nodes that it does not support,
    such as convolutions of oneDNN. Each rank compiles separately, in the first call.
    """
    lowering = _Lowering(fx.GraphModule(one.constants, one.graph))
    whole = lowering.transform()
    apart, pieces = _apart(whole.graph), dict[fx.Node, int]()
    for node in whole.graph.nodes:
        before = next(reversed(pieces), node)
        pieces[node] = pieces.get(before, 0) + ((node in apart) != (before in apart))
    options: Any = _INDUCTOR if backend == "inductor" else None

    def taken(module: fx.GraphModule) -> Any:
        return torch.compile(
            module, backend=backend, options=options, fullgraph=True, dynamic=False
        )

    if apart:
        left = {f"submod_{pieces[node]}" for node in apart}
        run: Any = split_module(whole, whole, pieces.__getitem__, keep_original_order=True)
        for name, piece in list(run.named_children()):
            setattr(run, name, piece if name in left else taken(piece))
    else:
        run = taken(whole)
    constants, kept, is_compiled = tuple(one.constants.values()), lowering.messages, False

    def graph(*tensors: Tensor) -> tuple[Tensor, ...]:
        nonlocal is_compiled
        assert kept is not None
        with nullcontext() if is_compiled else _report_time(backend, len(one.graph.nodes)):
            made: tuple[Tensor, ...] = run(*tensors, *constants)
        is_compiled = True
        return made[:-1]

    return graph


def _apart(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that run uncompiled, between compiled functions.

    Compilers do not support oneDNN's convolution, computations in its memory layout, and opaque
    calls.
    """
    apart: set[fx.Node] = set()
    in_onednn: set[fx.Node] = set()
    unknown = aten.mkldnn_convolution.default, aten.to_mkldnn.default
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        of_apart = node.target is getitem and node.args[0] in apart
        opaque = isinstance(node.target, OpaqueCall)
        used = not in_onednn.isdisjoint(node.all_input_nodes)
        if opaque or of_apart or used or node.target in unknown:
            apart.add(node)
        if node.target is aten.to_mkldnn.default or (
            node in apart and node.target in (aten.convolution_backward.default, getitem)
        ):
            in_onednn.add(node)
    return apart


@contextmanager
def _report_time(backend: str, number: int) -> Iterator[None]:
    """Print on stderr of rank 0 that `backend` compiles `number` calls, and the time in seconds."""
    if world().rank != 0:
        yield
        return
    print(f"compile: {backend} compiles {number} calls", end=" ... ", file=sys.stderr, flush=True)
    begun = time.perf_counter()
    yield
    print(f"{time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)


class _Lowering(fx.Transformer):
    """A conversion of a traced pass to a graph in which messages are functions of the dispatcher.

    Constants become inputs of the new graph, after the inputs of the pass. The last result of the
    new graph is a token.

    Attributes
    ----------
    messages: the messages, which must live as long as the new graph.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.messages: list[_Posted] = []
        self._token: Any = None

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self.tracer.create_proxy("placeholder", target, (), {})

    def output(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().output(target, ((*args[0], self._before()),), kwargs)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is wait:
            return self._end(args[0])
        if not isinstance(target, Communication):
            made = self._add(_KEPT.get(target, target), *args, **kwargs)
            return self._add(own.opaque, made) if target in _RANGES else made
        if target.method == "empty":
            return self._add(aten.new_empty.default, args[1], list(args[0]))
        message = _Posted(target, args)
        self.messages.append(message)
        given = message.leaving, message.arriving
        self._token = self._add(own.start, message.number, self._before(), *given)
        if target.method == "all_gather":
            return self._arrived(message)[0]
        return self._end(message) if target.method == "broadcast" else message

    def _arrived(self, message: _Posted) -> Any:
        """Add a node that waits for `message`; return its node of received or summed tensors."""
        given = message.leaving, message.arriving
        both = self._add(own.wait, message.number, self._before(), *given)
        self._token = both[0]
        return both[1]

    def _end(self, message: _Posted) -> None:
        arrived = self._arrived(message)
        for i, x in enumerate(message.arriving):
            self._add(aten.copy_.default, x, arrived[i])

    def _before(self) -> Any:
        """Return the token of the previous message, or of a new node before the first message."""
        if self._token is None:
            self._token = self._add(aten.empty.memory_format, [0])
        return self._token

    def _add(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return super().call_function(function, args, options)
