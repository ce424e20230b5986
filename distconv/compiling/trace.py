"""Tracing of a program while it runs: calls of torch's dispatcher and of carriers, in order.

Autograd, rules and hooks run as usual, above the dispatcher. The results are the forward pass and
the backward pass as graphs of torch.fx, of kernels on this rank's blocks and of messages.
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
"""The function of the dispatcher for a tensor made from Python numbers."""

_ZEROS = (aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default)

_READS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
"""The tags of functions that return Python values, or shapes, that depend on elements."""

_COLLECTIVES = ("c10d", "_c10d_functional")
"""The namespaces of torch.distributed's functions in the dispatcher."""

RANDOM = torch.Tag.nondeterministic_seeded

_BOUND = "bound"
"""The key in a node's metadata of the function that a replay calls; see `bindings`."""


class Communication:
    """A call of a carrier's `method`, such as "exchange", as the function of a node.

    The node has the arguments of the method except a tag and the communicator. `group` is empty or
    has the communicator.
    """

    def __init__(self, transport: Transport, method: str, group: Any = ()) -> None:
        self.transport, self.method, self.group, self.__name__ = transport, method, group, method

    def __call__(self, *arguments: Any) -> Any:
        if self.method == "exchange":
            arguments = (*arguments, self.transport.next_tag())
        return getattr(self.transport, self.method)(*arguments, *self.group)


class OpaqueCall:
    """A function whose messages depend on values of tensors, as the function of a node."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self.__name__ = function, "opaque_call"

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        found: Sequence[Tensor] = self._function(*tensors)
        return found


def wait(request: Request) -> None:
    """Wait for `request`; the function of a node."""
    request.wait()


class Pass:
    """The trace of a forward or a backward pass: a graph that can be run.

    Attributes
    ----------
    graph: a node for each call. Messages are calls of a `Communication` and of `wait`.
    constants: the tensors that existed before the pass, such as parameters, by the names in
        `get_attr` nodes. Calls may write to these tensors.
    """

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.constants: dict[str, Tensor] = {}

    def constant(self, x: Tensor) -> fx.Node:
        """Return a new node for the tensor `x`, which existed before the pass."""
        name = f"c{len(self.constants)}"
        self.constants[name] = x
        return self.graph.get_attr(name)

    def end(self, results: Sequence[fx.Node | None]) -> None:
        """End the graph with the nodes `results`, and remove calls whose results are unused."""
        self.results = results
        self.graph.output((*results,))
        self.graph.eliminate_dead_code(_has_effects)
        used = {node.target for node in self.graph.nodes if node.op == "get_attr"}
        self.constants = {name: x for name, x in self.constants.items() if name in used}

    def function(self) -> Any:
        """Return the graph as a Python function, which frees each tensor after its last use."""
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
    """Return whether a node has side effects, and stays in its graph if its result is unused."""
    if isinstance(node.target, Operator):
        return RANDOM in node.target.tags or is_mutable(node.target)
    return node.op != "get_attr" and node.target is not getitem


class Trace(DispatchMode):
    """A mode of torch's dispatcher that records a forward and a backward pass.

    Parameters
    ----------
    inputs: the blocks that are the inputs of the forward pass.

    Attributes
    ----------
    passes: the forward pass, and the backward pass once it has begun.
    obstacle: the reason why the passes cannot be replayed; "" if they can.
    seen: the node of each tensor; the tensors are not kept alive.
    paused: whether recording is paused.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.passes: list[Pass] = []
        self.obstacle, self.paused = "", False
        self.seen = WeakTensorKeyDictionary()
        self._kept: dict[fx.Node, fx.Node] = {}
        """The nodes of the forward pass that the backward pass uses, each with its node there."""
        self.begin(inputs)

    @property
    def is_backward(self) -> bool:
        """Return whether the backward pass has begun, or the only pass has ended."""
        return len(self.passes) > 1

    def begin(self, inputs: Sequence[Tensor]) -> None:
        """Begin to record a pass whose inputs are the tensors `inputs`.

        Calls and random numbers since the end of the previous pass are not recorded.
        """
        self.passes.append(Pass())
        self.graph = self.passes[-1].graph
        for i, x in enumerate(inputs):
            self.seen[x] = self.graph.placeholder(f"x{i}")
        self._random = random_states()

    def end(self, results: Sequence[fx.Node], found: Sequence[fx.Node | None]) -> None:
        """End the passes: the forward pass returns `results`, the backward pass `found`.

        Further results of the forward pass, which are saved, become the first inputs of the
        backward pass.
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
        """Return whether a recorded call has made `x` as zeros, and no recorded call has used it.

        The version of `x` would not count writes through `x.data`.
        """
        node = self.seen.get(x)
        return node is not None and node.target in _ZEROS and not node.users

    def standing_for(self, x: Any) -> Any:
        """Return nested arguments `x` with each tensor replaced by its node in the current pass."""
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
        """Call `function`, record it with its messages as one node, and return its results.

        Results may have different shapes in each replay if only opaque functions use them.
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
        """Pause recording within the context."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def hinder(self, why: str) -> None:
        """Record the reason `why` the passes cannot be replayed, unless there is one already."""
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
        """Record an obstacle if the program has set the state of torch's random generators."""
        if not all(map(torch.equal, self._random, random_states())):
            self.hinder(
                "it sets the state of the random number generator; pass preserve_rng_state=False "
                "to torch.utils.checkpoint if the block has no dropout"
            )


class _TracedCarrier(WrappedTransport):
    """A carrier that records its messages in `trace`, as calls of the watched `transport`."""

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
        """Call and record `method` of the carrier; `last` is a communicator or a tag."""
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
    """Record this thread's calls and messages in `trace` within the context. Collective.

    Ranks compare their journals before each message. Raises DivergenceError on every rank if the
    journals differ.
    """

    with ExitStack() as left:
        left.enter_context(noted_in(trace.seen))
        left.enter_context(grid.journal.comparing_all("traced pass"))
        left.enter_context(carried_by(lambda transport: _TracedCarrier(transport, trace)))
        left.enter_context(replay_trace(trace))
        yield
