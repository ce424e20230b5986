"""Notes what torch's operators, messages and modules do in a dry run, below autograd and above."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from distconv.planning.counted_messages import CountedMessages
from distconv.planning.dry_run import DryRunGrid
from distconv.planning.live_memory import LiveMemory
from distconv.planning.local_operators import LocalOperator, spec_of
from distconv.planning.module_calls import ModuleCalls
from distconv.planning.recording import (
    KINDS,
    Compute,
    Event,
    HostWork,
    Place,
    Recording,
    Start,
    Wait,
)
from distconv.planning.remembered_results import result_of
from distconv.planning.roofline import bytes_of
from distconv.tensor.dispatch import RULES
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.nested import tensors_in


class _Call(NamedTuple):
    """A function on distributed tensors, or what a module does beside such functions."""

    start: int
    """The first number that autograd gives to what it records there."""
    place: Place
    function: str | None


class Recorder(TorchDispatchMode):
    """Notes what torch's operators, messages and modules do, in order."""

    def __init__(self, module: nn.Module, transport: CountedMessages):
        super().__init__()
        self.events: list[Event] = []
        self.memory = LiveMemory()
        self.place = Place("", "forward")
        self.going_back = False
        self.calls: list[_Call] = []
        self.kept: dict[str, int] = {}
        self.blocks: dict[str, tuple[int, ...]] = {}
        self._starts: list[int] = []
        self._seen: set[int] = set()
        self._operators: dict[LocalOperator, tuple[LocalOperator, int]] = {}
        """Each operator so far, as it was first noted, with its bytes."""
        self._streamed = 0
        self._watched = _Modules(module, self)
        transport.started = lambda start: self.events.append(start._replace(place=self._where()))
        transport.waited = lambda number: self.events.append(Wait(number, self._where()))
        transport.made = lambda message: self.memory.turn_into(message, "halos")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.is_view:
            result = func(*args, **kwargs)
            self._where()
            return result
        arguments, keywords = given = spec_of((args, tuple(kwargs.items())))
        result = result_of(func, args, kwargs, given)
        if func is torch.ops.aten.empty.memory_format and kwargs.get("dtype") is None:
            return result  # of a shape only
        place = self._where()
        made = [
            x
            for x in (result if isinstance(result, (tuple, list)) else (result,))
            if isinstance(x, Tensor) and x.is_meta
        ]
        self.memory.hold(made, "other", place.layer if place.phase == "forward" else "")
        name = str(func)
        if name not in _FREE:
            self._note(LocalOperator(name, arguments, keywords, spec_of(tuple(made))), place)
        return result

    def _note(self, operator: LocalOperator, place: Place) -> None:
        known = self._operators.get(operator)
        if known is None:
            if not (operator.taken or operator.made):
                return
            known = self._operators[operator] = operator, bytes_of(operator)
        operator, streamed = known
        self.events.append(Compute(operator, place, self.memory.total))
        self._streamed += streamed

    def turn(self) -> None:
        """Go from the forward to the backward pass."""
        self.kept = self.memory.keep()
        self.going_back = True
        self._starts = [call.start for call in self.calls]

    def move(self, place: Place) -> None:
        """Go to another place of the forward pass."""
        self.place = place
        self.calls.append(_Call(sequence_number(), place, None))

    def call(self, start: int, function: str) -> None:
        """Note a function on distributed tensors of the forward pass."""
        self.calls.append(_Call(start, self.place, function))
        self.work(function, self.place)

    def work(self, function: str, place: Place) -> None:
        """Note that the host goes through a function."""
        self.events.append(HostWork(function, place, self._streamed))
        self._streamed = 0

    def _where(self) -> Place:
        if not self.going_back:
            return self.place
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return Place("gradients", "backward")
        number = node._sequence_nr()
        if number >= 2**62:
            return Place("gradients", "backward")
        i = bisect_right(self._starts, number) - 1
        if i < 0:
            return Place("loss", "backward")
        call = self.calls[i]
        place = Place(call.place.layer, "backward")
        if call.function is not None and i not in self._seen:
            self._seen.add(i)
            self.work(f"{call.function} backward", place)
        return place

    @property
    def where(self) -> tuple[str, nn.Module]:
        """Return the call under way, or the one that has raised."""
        return self._watched.where

    def recording(self, grid: DryRunGrid) -> Recording:
        """Return all that has been noted."""
        memory = {kind: self.memory.at_most.get(kind, 0) for kind in KINDS}
        layers = dict(self._watched.kinds)
        for name in ("loss", "gradients", "optimizer"):
            layers.setdefault(name, "")
        return Recording(
            grid.rank,
            grid.size,
            tuple(self.events),
            memory,
            self.kept,
            layers,
            self.blocks,
        )

    def remove(self) -> None:
        """Take the hooks off the module."""
        self._watched.remove()


def sequence_number() -> int:
    """Return the number that autograd gives to what it records next."""
    number: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
    return number


class _Modules(ModuleCalls):
    """Tells the recorder which module is called."""

    def __init__(self, module: nn.Module, recorder: Recorder):
        super().__init__(module)
        self._recorder = recorder
        self.kinds: dict[str, str] = {}

    def entered(self, module: nn.Module) -> None:
        name, _ = self.stack[-1]
        self.kinds.setdefault(name, type(module).__name__)
        self._recorder.move(Place(name, "forward"))

    def left(self, name: str, module: nn.Module, output: Any) -> None:
        for x in tensors_in(output):
            if isinstance(x, DistTensor):
                self._recorder.blocks[name] = tuple(x.shard.shape)
            break
        if self.stack:
            self._recorder.move(Place(self.stack[-1][0], "forward"))


class FunctionCalls(TorchFunctionMode):
    """Tells the recorder of each function that is called with distributed tensors."""

    def __init__(self, recorder: Recorder):
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        start = sequence_number()
        ours = func in RULES and any(issubclass(t, DistTensor) for t in types)
        before = len(self._recorder.events)
        result = func(*args, **(kwargs or {}))
        if ours and not self._recorder.going_back:
            name = getattr(func, "__name__", str(func))
            self._recorder.call(start, name + _way(self._recorder.events[before:]))
        return result


def _way(events: Sequence[Event]) -> str:
    """Return how the name of a function ends that has done this: whether it talks to other ranks,
    and computes meanwhile."""
    way = ""
    under_way = set[int]()
    for event in events:
        if isinstance(event, Start):
            way = way or " across ranks"
            under_way.add(event.number)
        elif isinstance(event, Wait):
            under_way.discard(event.number)
        elif isinstance(event, Compute) and under_way:
            if "conv" in event.operator.name or "pool" in event.operator.name:
                way = " overlapped across ranks"
    return way


_FREE = frozenset(
    f"aten.{name}"
    for name in (
        "empty.memory_format",
        "empty_strided.default",
        "empty_like.default",
        "new_empty.default",
        "new_empty_strided.default",
        "detach.default",
        "detach_.default",
        "_unsafe_view.default",
        "_reshape_alias.default",
        "lift_fresh.default",
        "squeeze_.dim",
        "unsqueeze_.default",
        "set_.source_Tensor",
        "_local_scalar_dense.default",
    )
)
"""Operators that touch no elements."""
