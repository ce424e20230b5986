"""Tracing of a graph as it runs: calls of torch's dispatcher and of carriers, in one order.

Autograd, rules and hooks run as usual, above the dispatcher. So the trace is the forward pass and
the backward pass as graphs of torch.fx, on this rank's blocks, and messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import getitem
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate
from torch.utils.weak import WeakTensorKeyDictionary

from distconv.compiling.bindings import bound
from distconv.device.kinds import random_states
from distconv.grid.communicators import carried_by
from distconv.grid.interface import Grid
from distconv.grid.journal import WatchedTransport, WrappedTransport
from distconv.ops.support.in_place import noted_in
from distconv.tensor.dispatch import replay_trace
from distconv.torch_private import DispatchMode, Operator, is_mutable
from distconv.transport.interface import Message, Request, Transport

aten = torch.ops.aten

_ALIASES = (aten.detach.default, aten.alias.default)
"""Functions that return their argument where gradients are not recorded."""

_FRESH = aten.lift_fresh.default
"""The function by which torch returns a tensor made from numbers."""

_ZEROS = (aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default)

_READS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
"""The tags of functions with results, or shapes, that a program reads from elements."""

_COLLECTIVES = ("c10d", "_c10d_functional")
"""The names of torch.distributed's functions in the dispatcher."""

RANDOM = torch.Tag.nondeterministic_seeded

_BOUND = "bound"
"""The key under which a node has the function that a replay calls; see `bindings`."""


class Communication:
    """A method of a carrier, such as "exchange", as the function of a node.

    The node's arguments are those of the method up to `group`, which is empty or one communicator.
    """

    def __init__(self, transport: Transport, method: str, group: Any = ()) -> None:
        self.transport, self.method, self.group, self.__name__ = transport, method, group, method

    def __call__(self, *arguments: Any) -> Any:
        if self.method == "exchange":
            arguments = (*arguments, self.transport.next_tag())
        return getattr(self.transport, self.method)(*arguments, *self.group)


class OpaqueCall:
    """A function that reads values and sends what they ask for, as the function of a node."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self.__name__ = function, "opaque_call"

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        found: Sequence[Tensor] = self._function(*tensors)
        return found


def wait(request: Request) -> None:
    """Wait for a request; a node's function."""
    request.wait()


class Pass:
    """The trace of one pass, a graph that can be run.

    Attributes
    ----------
    graph: a node for each call. Messages are calls of a `Communication` and of `wait`.
    constants: the tensors that existed before, as parameters do, by the names in `get_attr` nodes.
        Calls may write to them.
    """

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.constants: dict[str, Tensor] = {}

    def constant(self, x: Tensor) -> fx.Node:
        """Return a new node for a tensor that existed before."""
        name = f"c{len(self.constants)}"
        self.constants[name] = x
        return self.graph.get_attr(name)

    def end(self, results: Sequence[fx.Node | None]) -> None:
        """End the graph, and remove calls that only make unused values."""
        self.results = results
        self.graph.output((*results,))
        self.graph.eliminate_dead_code(_has_effects)
        used = {node.target for node in self.graph.nodes if node.op == "get_attr"}
        self.constants = {name: x for name, x in self.constants.items() if name in used}

    def function(self) -> Any:
        """Return the graph as a function, which frees each value after its last use."""
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in self.graph.nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].target = node.meta.get(_BOUND, node.target)
        code = graph.python_code("self")
        names = dict(code.globals)
        exec(compile(code.src, "<a pass that distconv has traced>", "exec"), names)
        return partial(names["forward"], SimpleNamespace(**self.constants))

    @property
    def source(self) -> str:
        """Return the Python source of `function`."""
        return self.graph.python_code("self").src.strip()


def _has_effects(node: fx.Node) -> bool:
    """Return whether a node has to stay in its graph although nothing uses its result."""
    if isinstance(node.target, Operator):
        return RANDOM in node.target.tags or is_mutable(node.target)
    return node.op != "get_attr" and node.target is not getitem


class Trace(DispatchMode):
    """The record of the passes of a graph that are being traced: a mode of torch's dispatcher.

    Parameters
    ----------
    inputs: the blocks that the forward pass takes.

    Attributes
    ----------
    passes: the forward pass, and the backward pass once it has begun.
    obstacle: the reason why the graph cannot be replayed; "" if it can.
    seen: the node that stands for each tensor, weakly.
    paused: whether nothing is recorded now.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.passes: list[Pass] = []
        self.obstacle, self.paused = "", False
        self.seen = WeakTensorKeyDictionary()
        self._kept: dict[fx.Node, fx.Node] = {}
        """The nodes of the forward pass that the backward pass uses, with their nodes there."""
        self.begin(inputs)

    @property
    def is_backward(self) -> bool:
        """Return whether the backward pass has begun, or the only pass has ended."""
        return len(self.passes) > 1

    def begin(self, inputs: Sequence[Tensor]) -> None:
        """Begin a pass. Calls and random numbers since the pass before do not count."""
        self.passes.append(Pass())
        self.graph = self.passes[-1].graph
        for i, x in enumerate(inputs):
            self.seen[x] = self.graph.placeholder(f"x{i}")
        self._random = random_states()

    def end(self, results: Sequence[fx.Node], found: Sequence[fx.Node | None]) -> None:
        """End both passes: `results` and `found` are what they return.

        Further results of the forward pass are the first inputs of the backward pass.
        """
        first, *second = self.passes
        for one in second:
            one.end(found)
            for node in [x for x in self._kept.values() if x.op == "placeholder"][::-1]:
                if node.users:
                    next(iter(one.graph.nodes)).prepend(node)
                else:
                    one.graph.erase_node(node)
        kept = (x for x, there in self._kept.items() if there.op == "placeholder" and there.users)
        first.end([*results, *kept])

    def has_made_zeros(self, x: Tensor) -> bool:
        """Return whether `x` is zeros that a call of this trace has made, and no other has taken.

        Writes through `x.data` count in no version of `x`.
        """
        node = self.seen.get(x)
        return node is not None and node.target in _ZEROS and not node.users

    def standing_for(self, x: Any) -> Any:
        """Return `x` with a node of the current pass in place of each tensor."""
        return map_aggregate(x, lambda y: self._node(y) if isinstance(y, Tensor) else y)

    def _node(self, x: Tensor) -> fx.Node:
        node = self.seen.get(x)
        if node is None:
            self.seen[x] = node = self.passes[-1].constant(x)
        if node.graph is self.graph:
            return node
        if node not in self._kept:
            constant = self.passes[0].constants.get(str(node.target))
            if constant is None:
                self._kept[node] = self.graph.placeholder(f"kept{len(self._kept)}")
            else:
                self._kept[node] = self.passes[-1].constant(constant)
        return self._kept[node]

    def opaque(self, function: Callable[..., Any], *tensors: Tensor) -> Sequence[Tensor]:
        """Return the results of `function`, which is recorded as one node, with its messages.

        Its results may have other shapes in each replay, if only such functions use them.
        """
        given, call = self.standing_for(tensors), OpaqueCall(function)
        with self.pause():
            results = call(*tensors)
        node = self.graph.call_function(call, given)
        for i, x in enumerate(results):
            self.seen[x] = self.graph.call_function(getitem, (node, i))
        return results

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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        if RANDOM in func.tags:
            self._check_random()
        if func.namespace in _COLLECTIVES:
            self.hinder(f"it calls torch.distributed directly ({func})")
        # The shape of a tensor that is indexed by positions does not depend on elements.
        by_positions = func is aten.index.Tensor and not any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if any(tag in func.tags for tag in _READS) and not by_positions:
            self.hinder(f"it reads the values of a tensor ({func})")
        given, options = self.standing_for((args, kwargs))
        faster = bound(func, args, kwargs)
        result = func(*args, **kwargs)
        if func in _ALIASES:
            self.seen.setdefault(result, given[0])
            return result
        if RANDOM in func.tags:
            self._random = random_states()
        node = self.graph.call_function(func, given, options)
        if func is _FRESH:
            node.target = aten.clone.default
        else:
            node.meta[_BOUND] = faster
        if isinstance(result, Tensor):
            self.seen.setdefault(result, node)
        for i, x in enumerate(result if isinstance(result, (tuple, list)) else ()):
            if isinstance(x, Tensor) and x not in self.seen:
                self.seen[x] = self.graph.call_function(getitem, (node, i))
        return result

    def _check_random(self) -> None:
        """Note an obstacle if the program has set the state of torch's random generators."""
        if not all(map(torch.equal, self._random, random_states())):
            self.hinder(
                "it sets the state of the random number generator; pass preserve_rng_state=False "
                "to torch.utils.checkpoint if the block has no dropout"
            )


class _TracedCarrier(WrappedTransport):
    """A carrier that records its messages in `trace`, as calls of `transport`, which it serves."""

    def __init__(self, transport: WatchedTransport, trace: Trace) -> None:
        super().__init__(transport.carrier)
        self._transport, self._trace = transport, trace
        self.empty = partial(self._call, "empty")

    def exchange(
        self, arriving: Sequence[Message], leaving: Sequence[Message], tag: int
    ) -> Request:
        request: Request = self._call("exchange", [*arriving], [*leaving], last=(tag,))
        return request

    def all_reduce(self, tensor: Tensor, group: Any) -> Request:
        request: Request = self._call("all_reduce", tensor, last=(group,))
        return request

    def all_gather(self, tensor: Tensor, group: Any) -> Tensor:
        made: Tensor = self._call("all_gather", tensor, last=(group,))
        return made

    def broadcast(self, tensor: Tensor, group: Any) -> None:
        self._call("broadcast", tensor, last=(group,))

    def _call(self, method: str, *arguments: Any, last: tuple[Any, ...] = ()) -> Any:
        """Call a method of the carrier and record it; `last` is a communicator or a tag."""
        trace, run = self._trace, getattr(self.carrier, method)
        if trace.paused:  # the message is part of an opaque call
            return run(*arguments, *last)
        given = trace.standing_for(arguments)
        with trace.pause():
            result = run(*arguments, *last)
        group = () if method == "exchange" else last
        node = trace.graph.call_function(Communication(self._transport, method, group), given)
        if isinstance(result, Tensor):
            trace.seen[result] = node
        elif result is not None:
            result = SimpleNamespace(wait=partial(self._wait, result, node))
        return result

    def _wait(self, request: Request, node: fx.Node) -> None:
        with self._trace.pause():
            request.wait()
        self._trace.graph.call_function(wait, (node,))


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
        left.enter_context(replay_trace(trace))
        yield
