"""`Recorder`: records the operators, messages, functions, layers and memory of a dry run.

A dispatch mode sees the operators below autograd, a function mode the functions on DistTensors, and
hooks the calls of modules.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from distconv import torch_private
from distconv.comm.ledger import Movement, Redistribution
from distconv.comm.packing import empty_in_format
from distconv.geometry.layout import Layout, dimension_names
from distconv.planning.dry_run import DryRunGrid, LiveMemory
from distconv.planning.recording import (
    KINDS,
    Completion,
    Compute,
    Halo,
    HostWork,
    LayerPlan,
    LocalOperator,
    Place,
    RecordedEvent,
    Recording,
    Start,
    backward_of,
    spec_of,
    with_backward,
)
from distconv.tensor.base import tensors_in
from distconv.tensor.dispatch import RULES
from distconv.tensor.dist_tensor import DistTensor
from distconv.torch_private import address_of_memory


def is_layer(module: nn.Module) -> bool:
    """Return whether a module has no submodules."""
    return next(module.children(), None) is None


class ModuleCalls:
    """Hooks that follow the calls of a module and its submodules.

    Subclasses override `entered`, called at the beginning of each call, and `left`, called at its
    end. `stack` has the names and modules of the active calls.
    """

    def __init__(self, module: nn.Module):
        super().__init__()
        self.stack: list[tuple[str, nn.Module]] = []
        self._module = module
        self._paths = {part: path or type(part).__name__ for path, part in module.named_modules()}
        self._count: Counter[nn.Module] = Counter()
        self._hooks = [
            hook
            for part in self._paths
            for hook in (
                part.register_forward_pre_hook(self._enter),
                part.register_forward_hook(self._leave),
            )
        ]

    def entered(self, module: nn.Module) -> None:
        """Handle the begin of a call of `module`, now the last on `stack`; for subclasses."""

    def left(self, name: str, module: nn.Module, output: Any) -> None:
        """Handle the end of the call `name` of `module`, no longer on `stack`; for subclasses."""

    @property
    def where(self) -> tuple[str, nn.Module]:
        """Return the name and module of the innermost active call, or of a call that raised."""
        return self.stack[-1] if self.stack else (self._paths[self._module], self._module)

    def remove(self) -> None:
        """Remove the hooks from the module."""
        for hook in self._hooks:
            hook.remove()

    def _enter(self, module: nn.Module, _: Any) -> None:
        self._count[module] += 1
        again = f" (call {self._count[module]})" if self._count[module] > 1 else ""
        self.stack.append((self._paths[module] + again, module))
        self.entered(module)

    def _leave(self, module: nn.Module, _: Any, output: Any) -> None:
        # Calls that ended with an exception, which their caller caught, are still there.
        while self.stack[-1][1] is not module:
            self.stack.pop()
        name, _ = self.stack.pop()
        self.left(name, module, output)


class _Origin(NamedTuple):
    """Autograd nodes from the sequence number `start` on, made at one place of the step."""

    start: int
    place: Place
    function: str | None
    """The function on distributed tensors that made the nodes; "" if none did."""


class _Output(NamedTuple):
    """The first tensor of a layer's result. A plain tensor has a shape only."""

    shape: tuple[int, ...] | None = None
    layout: Layout | None = None
    local_shape: tuple[int, ...] | None = None


def _first_of(result: Any) -> _Output:
    for x in tensors_in(result):
        if isinstance(x, DistTensor):
            return _Output(tuple(x.shape), x.grid_layout, tuple(x.box.shape))
        return _Output(tuple(x.shape))
    return _Output()


class Recorder(ModuleCalls, torch_private.DispatchMode):
    """A context that records the step of a module on one rank of a grid."""

    def __init__(
        self,
        module: nn.Module,
        grid: DryRunGrid,
        progress: Callable[[LayerPlan], object] = lambda layer: None,
    ):
        super().__init__(module)
        self.memory, self.movements = LiveMemory(not grid.computes_on_gpu), list[Movement]()
        self._grid, self._progress = grid, progress
        self._events: list[RecordedEvent] = []
        self._layers: list[LayerPlan] = []
        self._types: dict[str, str] = {}
        self._blocks: dict[str, tuple[int, ...]] = {}
        self._place = Place("", "forward")
        self._backward = self._repeats = False
        self._begun = 0
        """The number of events before the current mini-batch."""
        self._origins: list[_Origin] = []
        self._starts: list[int] = []
        self._seen: set[int] = set()
        self._operators: dict[LocalOperator, LocalOperator] = {}
        self._streamed = self._reduced = self._received = self._kept = 0
        self._parameters: set[nn.Parameter] = set()
        self._last = _Output()
        self._nodes: list[Any] = []
        carrier = grid.transport
        carrier.started = self._start
        carrier.waited = lambda number: self._events.append(Completion(number, self._where()))

    # Operators and messages.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.is_view:
            result = func(*args, **kwargs)
            self._where()
            return result
        arguments, keywords = given = spec_of((args, tuple(kwargs.items())))
        result = _result_of(func, args, kwargs, given)
        if func is torch.ops.aten.empty.memory_format and kwargs.get("dtype") is None:
            return result  # of a shape only
        place = self._where()
        several = result if isinstance(result, (tuple, list)) else (result,)
        made = [x for x in several if isinstance(x, Tensor) and x.is_meta]
        if self._grid.transport.allocates:
            kind = "halos"
        else:
            kind = "gradients" if place.layer == "gradients" else "other"
        self.memory.hold(made, kind, place.layer if place.phase == "forward" else "")
        if str(func) not in _FREE:
            operator = LocalOperator(str(func), arguments, keywords, spec_of(tuple(made)))
            operator = self._operators.setdefault(operator, operator)
            if operator.taken or operator.made:
                live = self.memory.total - self.memory.pooled
                self._events.append(Compute(operator, place, live))
                self._streamed += operator.nbytes
        return result

    def _start(self, start: Start) -> None:
        self._events.append(start._replace(place=self._where()))
        if not self._backward:
            self._received += start.bytes
            if start.collective is not None:
                self._reduced += start.arriving[0][1]

    def work(self, function: str, place: Place) -> None:
        """Record that Python runs a function at this place of the step."""
        self._events.append(HostWork(function, place, self._streamed))
        self._streamed = 0

    # The current place in the step.

    def move(self, place: Place) -> None:
        """Set the place of later events: a place of the forward pass, or the optimizer."""
        self._place, self._backward = place, False
        self._origins.append(_Origin(torch_private.next_node_number(), place, None))

    def turn(self) -> None:
        """End the forward pass: later events belong to the backward pass."""
        self.memory.turn()
        self._backward = True
        self._starts = [origin.start for origin in self._origins]

    def watch_gradients(self, leaves: Iterable[Tensor]) -> None:
        """Record an event when autograd has computed the gradient of each parameter in `leaves`."""
        name = "parameter across ranks" if self._grid.size > 1 else "parameter"

        def comes(gradients: Sequence[Tensor | None]) -> None:
            self.work(name, Place("gradients", "backward"))
            for gradient in gradients:
                if gradient is not None:
                    self.memory.turn_into(gradient, "gradients")

        for p in leaves:
            if p.requires_grad:
                node: Any = p.view_as(p).grad_fn
                ((accumulates, _),) = node.next_functions
                accumulates.register_prehook(comes)
                self._nodes.append(accumulates)  # to keep the node, and its hook, alive

    def _where(self) -> Place:
        if not self._backward:
            return self._place
        number = torch_private.node_number(torch_private.current_node())
        if number is None:
            return Place("gradients", "backward")
        i = bisect_right(self._starts, number) - 1
        if i < 0:
            return Place("loss", "backward")
        origin = self._origins[i]
        place = Place(origin.place.layer, "backward")
        if origin.function is not None and i not in self._seen:
            self._seen.add(i)
            self.work(f"{origin.function} backward", place)
        return place

    # Functions and layers, with transfers, reductions and kept bytes since the previous record.

    def keep(self, x: Tensor) -> Tensor:
        """Count a tensor that autograd saves for the backward pass, and return it."""
        if not self._backward:
            self._kept += self.memory.keep(x.held if isinstance(x, DistTensor) else x)
        return x

    def offload(self, x: Tensor) -> Callable[[], Tensor]:
        """Return a function that recreates `x`, a tensor that autograd saves for the backward pass.

        In between, `x` is on the host and takes no memory of the device. Parameters stay on the
        device.
        """
        if self.memory.kind(x) == "parameters":
            return lambda: x
        shape, stride, dtype = spec_of(x)
        return lambda: torch.empty_strided(shape, stride, dtype=dtype, device="meta")

    def repeat(self) -> None:
        """Begin the forward pass of the next mini-batch, whose layers are recorded already."""
        self._repeats = True
        self._begun = len(self._events)
        self._count.clear()
        self.move(Place("", "forward"))

    def call(self, func: Any, types: Sequence[type], args: Any, kwargs: Any) -> Any:
        """Call `func`, which has a rule for DistTensors; record the call, and return the result."""
        start, before = torch_private.next_node_number(), len(self._events)
        between = bool(self.stack) and not is_layer(self.stack[-1][1]) and not self._backward
        distributed = any(issubclass(t, DistTensor) for t in types)
        # Not within a transfer that has been recorded, and is about to start.
        between = between and (distributed or not self.movements)
        if between:
            self._between(*self.stack[-1])
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        if between:
            self._close(self.stack[-1][0], name, _first_of(result))
        if distributed:
            name += _communication_suffix(self._events[before:])
            if not self._backward:
                self._origins.append(_Origin(start, self._place, name))
                self.work(name, self._place)
            elif self.stack:  # a checkpoint recomputes
                self.work(name, self._where())
        return result

    def entered(self, module: nn.Module) -> None:
        """Set the place of later events to `module`, whose call begins, in the forward pass."""
        if self._backward:
            return
        if len(self.stack) > 1:
            self._between(*self.stack[-2])
        name, _ = self.stack[-1]
        self._types.setdefault(name, type(module).__name__)
        self.move(Place(name, "forward"))

    def left(self, name: str, module: nn.Module, output: Any) -> None:
        """Record a module's call as the layer `name`; set the place to the calling module again."""
        if self._backward:
            return
        if not is_layer(module) and any(moved.redistributes for moved in self.movements):
            self._between(name, module)
        own = set(module.parameters(recurse=False)) - self._parameters
        self._parameters |= own
        result = _first_of(output)
        if result.local_shape is not None:
            self._blocks[name] = result.local_shape
        # The outermost module has a row if its result differs from the last row's.
        always = is_layer(module) or (not self.stack and result != self._last)
        weight = sum(bytes_here(p) for p in own)
        self._close(name, type(module).__name__, result, weight, always=always)
        if self.stack:
            self.move(Place(self.stack[-1][0], "forward"))

    def refuse(self, reason: str) -> None:
        """Record that the active call is unsupported, with the reason."""
        name, module = self.where
        self._close(name, type(module).__name__, always=True, refusal=reason)

    def _between(self, name: str, module: nn.Module) -> None:
        """Record, as layer `name`, a module's own work since its last submodule or function."""
        operators = {moved.operator: None for moved in self.movements}
        self._close(name, ", ".join(operators) or type(module).__name__)

    def _close(
        self,
        name: str,
        kind: str,
        output: _Output | None = None,
        parameters: int = 0,
        *,
        always: bool = False,
        refusal: str | None = None,
    ) -> None:
        """Record transfers, reductions and kept bytes since the previous record as a layer.

        If there are none, nothing is recorded, unless `always`. `name` and `kind` are the name and
        type of the layer, `output` is its result, `parameters` the bytes of its parameters, and
        `refusal` the reason if it is unsupported.
        """
        reduced, kept, received = self._reduced, self._kept, self._received
        self._reduced = self._kept = self._received = 0
        moved = [m for m in self.movements if m.redistributes or not m.plan.identity]
        self.movements.clear()
        if self._repeats or not (always or moved or received or kept or parameters):
            return
        output = self._last = output or _Output()
        halos = tuple(halo_of_movement(m) for m in moved if not m.redistributes)
        redistributions = tuple(
            Redistribution(m.operator, m.source, m.target, name, 1, m.bytes)
            for m in moved
            if m.redistributes
        )
        layer = LayerPlan(
            *(name, kind, *output, halos, redistributions, reduced, kept, parameters, refusal),
            forward_bytes=received,
        )
        self._layers.append(layer)
        self._progress(layer)

    def recording(self) -> Recording:
        """Return the recording of the step."""
        memory = self.memory.at_most
        pooled = memory.get("halos", 0) if self.memory.pools else 0
        return Recording(
            self._grid.rank,
            self._grid.size,
            tuple(
                event._replace(live=event.live + pooled) if isinstance(event, Compute) else event
                for event in self._events
            ),
            {kind: memory.get(kind, 0) for kind in KINDS},
            with_backward(self._layers, backward_of(self._events[self._begun :])),
            self._types | {name: "" for name in _OTHERS if name not in self._types},
            sum(map(bytes_here, self._module.parameters())),
            self._blocks,
        )


_OTHERS = "loss", "gradients", "optimizer"
"""The places of a step that are not modules."""


class RuleCalls(TorchFunctionMode):
    """A context in which functions with rules for DistTensors are called through a `Recorder`."""

    def __init__(self, recorder: Recorder):
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in RULES:
            return self._recorder.call(func, types, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def bytes_here(x: Tensor) -> int:
    """Return the bytes of a plain tensor, or of this rank's block of a DistTensor."""
    return x.shard.nbytes if isinstance(x, DistTensor) else x.nbytes


def _communication_suffix(events: Sequence[RecordedEvent]) -> str:
    """Return a suffix for a function's name that says how the function sends, from its events.

    The suffix is empty for a function that sends nothing, " across ranks" for one that sends, and "
    overlapped across ranks" for one that convolves while its messages are in flight.
    """
    way = ""
    under_way = set[int]()
    for event in events:
        if isinstance(event, Start):
            way = way or " across ranks"
            under_way.add(event.number)
        elif isinstance(event, Completion):
            under_way.discard(event.number)
        elif isinstance(event, Compute) and under_way:
            if event.operator.convolves:
                way = " overlapped across ranks"
    return way


def halo_of_movement(movement: Movement) -> Halo:
    """Return the halo that an operator needs on this rank, from the transfer in `movement`."""
    plan = movement.plan
    ndim = len(plan.buffer_shape)
    widths = {}
    for d, axes in enumerate(movement.source.cuts(ndim)):
        if axes:
            own = [target[d] for _, target in plan.own]
            start = min((s.start for s in own), default=0)
            stop = max((s.stop for s in own), default=0)
            runs = {(box[d].start, box[d].stop) for r in plan.receives for box in r.boxes}
            before = sum(b - a for a, b in runs if b <= start)
            after = sum(b - a for a, b in runs if a >= stop)
            widths[dimension_names(ndim)[d]] = before, after
    return Halo(movement.operator, widths, movement.bytes)


_FREE = frozenset(
    f"aten.{name}"
    for name in (
        *("empty.memory_format", "empty_strided.default", "empty_like.default"),
        *("new_empty.default", "new_empty_strided.default", "detach.default", "detach_.default"),
        *("_unsafe_view.default", "_reshape_alias.default", "lift_fresh.default", "squeeze_.dim"),
        *("unsqueeze_.default", "set_.source_Tensor", "_local_scalar_dense.default"),
    )
)
"""Names of operators that read and write no elements."""


_RESULTS: dict[Any, Any] = {}
"""Cached results of operators, at most `_REMEMBERED`: torch's meta kernels are slow, and without
the cache a recording would take twice as long."""

_REMEMBERED = 2**16


def _result_of(func: Any, args: Any, kwargs: Any, given: Any) -> Any:
    """Return the result of the operator `func`, which makes no view, from the cache if known.

    `given` has the arguments as returned by `spec_of`.
    """
    if torch.Tag.inplace_view in func.tags:
        return func(*args, **kwargs)
    # 2 equals 2.0, but gives another type of result.
    key = func, given, _kinds(args), _kinds(tuple(kwargs.items()))
    made = _RESULTS.get(key)
    if made is None:
        result = func(*args, **kwargs)
        if func is torch.ops.aten.convolution.default:
            # Kernels keep the memory format "channels last"; torch's meta kernels do not.
            result = empty_in_format(tuple(result.shape), args[0])
        several = result if isinstance(result, (tuple, list)) else (result,)
        if all(isinstance(x, Tensor) and x.is_meta for x in several):
            if len(_RESULTS) >= _REMEMBERED:
                _RESULTS.clear()
            if torch_private.is_mutable(func):
                made = "first" if result is args[0] else None
            elif set(map(address_of_memory, several)).isdisjoint(
                map(address_of_memory, tensors_in(args))
            ):
                made = tuple(spec_of(x) for x in several), type(result)
            if made is not None:
                _RESULTS[key] = made
        return result
    if made == "first":
        return args[0]
    specs, kind = made
    tensors = [torch.empty_strided(s.shape, s.stride, dtype=s.dtype, device="meta") for s in specs]
    return tensors[0] if issubclass(kind, Tensor) else kind(tensors)


def _kinds(value: Any) -> Any:
    """Return the types of values, in tuples nested as the values are."""
    return tuple(map(_kinds, value)) if isinstance(value, (tuple, list)) else type(value)
