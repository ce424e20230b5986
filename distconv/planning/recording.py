"""All that one rank does in a training step: local operators, messages, reductions and memory.

The step is run in a dry run, forward, backward and optimizer: torch's operators on the rank's
blocks are noted below autograd, so the record is that of the very code that will run, with its
order and its overlap.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from distconv.comm.ledger import without_counting
from distconv.geometry.layout import Layout
from distconv.model.buckets import fill_buckets
from distconv.model.gradient_reduction import axes_of_sum
from distconv.model.input_layouts import match_layouts, redistribute_inputs
from distconv.planning.dry_run import (
    CountingTransport,
    Done,
    DryGroup,
    DryRunGrid,
    without_elements,
)
from distconv.planning.module_calls import ModuleCalls
from distconv.tensor.dispatch import RULES, UnsupportedOperation
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.module_call import enter_call, leave_call
from distconv.tensor.nested import tensors_in
from distconv.tensor.ownership import own
from distconv.transport.buffers import KEPT_BYTES
from distconv.transport.interface import Message

Loss: TypeAlias = Callable[[Any], Tensor]
"""Takes what the module returns, and returns the scalar that is minimised."""

OptimizerFactory: TypeAlias = Callable[[Any], torch.optim.Optimizer]

PHASES = ("forward", "backward", "optimizer")

KINDS = ("parameters", "gradients", "optimizer state", "activations", "halos", "other")
"""The kinds of memory. Halos are what messages arrive in and leave from; others are inputs, and
results that live for a moment."""


class TensorSpec(NamedTuple):
    """A tensor that a local operator takes."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Return the bytes of its elements."""
        size = self.dtype.itemsize
        for n in self.shape:
            size *= n
        return size


@dataclass(frozen=True)
class LocalOperator:
    """An operator of torch below autograd, on tensors of these shapes."""

    name: str
    """Its name and overload, as `aten.convolution.default`."""
    arguments: tuple[Any, ...]
    """In order; a `TensorSpec` stands for a tensor."""
    keywords: tuple[tuple[str, Any], ...] = ()
    made: tuple[TensorSpec, ...] = ()
    """Its results."""

    @property
    def key(self) -> str:
        """Return text that is the same for operators that take as long."""
        return f"{self.name}{_text(self.arguments)}{_text(self.keywords) if self.keywords else ''}"

    @property
    def taken(self) -> list[TensorSpec]:
        """Return the tensors among the arguments."""
        return list(_specs((self.arguments, self.keywords)))


class Place(NamedTuple):
    """Where in a step something happens."""

    layer: str
    """The name of the module, as `named_modules` has it; of a loss and of what follows the backward
    pass, their own."""
    phase: str
    """One of `PHASES`."""


class Compute(NamedTuple):
    """A local operator runs."""

    operator: LocalOperator
    place: Place
    live: int = 0
    """Bytes that the rank holds when it has run."""


class HostWork(NamedTuple):
    """The host goes through a function of torch on distributed tensors, or back through it.

    Of a parameter's gradient and update the name is `parameter`.
    """

    function: str
    place: Place


class Start(NamedTuple):
    """Messages leave, or a reduction begins."""

    number: int
    collective: str | None
    """`all_reduce` or `all_gather`; None for messages."""
    arriving: tuple[tuple[int, int], ...]
    """Other ranks, and the bytes that each of them sends; in a collective each contributes them."""
    leaving: tuple[tuple[int, int], ...]
    place: Place


class Wait(NamedTuple):
    """The rank waits for what has started under a number."""

    number: int
    place: Place


Event: TypeAlias = Compute | HostWork | Start | Wait


@dataclass(frozen=True)
class Recording:
    """A training step as one rank sees it."""

    rank: int
    ranks: int
    events: tuple[Event, ...]
    memory: dict[str, int]
    """Bytes of each of `KINDS` at the moment when the rank holds the most."""
    kept: dict[str, int]
    """Bytes that each layer keeps for the backward pass."""
    layers: dict[str, str]
    """The layers in order, each with its type."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The shape of this rank's block of each layer's output."""

    @property
    def peak(self) -> int:
        """Return the most bytes that the rank holds in a step."""
        return sum(self.memory.values())

    @property
    def operators(self) -> Counter[LocalOperator]:
        """Return each local operator with how often it runs."""
        return Counter(e.operator for e in self.events if isinstance(e, Compute))


def record_step(
    module: nn.Module,
    shapes: Sequence[tuple[int, ...]],
    extents: Mapping[str, int],
    *,
    rank: int | None = None,
    layouts: Mapping[str, Layout] | None = None,
    layout: Layout | None = None,
    dtype: torch.dtype | None = None,
    loss: Loss,
    optimizer: OptimizerFactory,
    bucket_bytes: int = 2**20,
    input_gradients: bool = False,
    gpu: bool = False,
) -> Recording:
    """Return what a rank of a grid does in a training step; no communication, nothing is computed.

    Parameters
    ----------
    module: as it is before `parallelize`.
    shapes: the global shape of each input.
    extents: ranks along the axes of the grid.
    rank: the rank whose part is played; by default the one in the middle of every axis.
    layouts, bucket_bytes: as for `parallelize`.
    layout: how the inputs are cut; by default every dimension over the axis of its name.
    dtype: of the inputs; that of the first parameter by default.
    loss: takes the output, and returns the scalar whose gradients are taken.
    optimizer: takes the parameters.
    input_gradients: whether the inputs require gradients, too.
    gpu: whether the ranks compute on GPUs, for which some operators are written otherwise.

    Raises
    ------
    UnsupportedOperation
        Where the module cannot run on the grid.
    RuntimeError
        Where the step raises, naming the layer; also where it asks for the elements of a tensor.
    ValueError
        For a module that is parallelized, or has parameters without a shape.
    """
    transport = _Transport()
    grid = DryRunGrid(extents, rank, transport=transport, gpu=gpu)
    hollow = without_elements(module, "record_step")
    matched = match_layouts(hollow, layouts or {})
    recorder = _Recorder(hollow, transport)
    redistribute_inputs(hollow, matched)
    parameters = list(hollow.parameters())
    own((*parameters, *hollow.buffers()), grid.size)
    if dtype is None:
        dtype = next((p.dtype for p in parameters if p.is_floating_point()), torch.float32)
    stepping = optimizer(parameters) if parameters else None
    state = [] if stepping is None else _make_state(stepping, parameters)
    recorder.memory.hold(parameters, "parameters")
    recorder.memory.hold(hollow.buffers(), "parameters")
    recorder.memory.hold([x for x in state if x.is_meta], "optimizer state")
    gradients = _Gradients(parameters, grid, bucket_bytes, recorder)
    inputs = [grid.tensor(shape, layout, dtype) for shape in shapes]
    recorder.memory.hold([x.shard for x in inputs], "other")
    if input_gradients:
        for x in inputs:
            x.requires_grad_()
    scope = enter_call()
    try:
        with without_counting(), recorder, _Calls(recorder):
            try:
                output = hollow(*inputs)
            finally:
                leave_call(scope)
            recorder.move(Place("loss", "forward"))
            scalar = loss(output)
            del output
            recorder.turn()
            if scalar.requires_grad:
                scalar.backward()
            gradients.finish()
            del scalar
            recorder.place = Place("optimizer", "optimizer")
            recorder.going_back = False
            if stepping is not None:
                stepping.step()
    except UnsupportedOperation:
        raise
    except Exception as error:
        name, part = recorder.where
        raise RuntimeError(
            f"{name} ({type(part).__name__}) raised {type(error).__name__}: {error}"
        ) from error
    finally:
        recorder.remove()
        gradients.remove()
    return recorder.recording(grid)


def _make_state(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Let an optimizer make its state, as it does in the first step, and return it."""
    for p in parameters:
        p.grad = torch.empty_like(p) if p.requires_grad else None
    optimizer.step()
    optimizer.zero_grad()
    return [x for each in optimizer.state.values() for x in each.values() if torch.is_tensor(x)]


class _Transport(CountingTransport):
    """A carrier that tells the recorder what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.started: Callable[[Start], None] = lambda start: None
        self.waited: Callable[[int], None] = lambda number: None
        self.made: Callable[[Tensor], None] = lambda message: None
        self._number = 0

    def empty(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        message = super().empty(shape, like)
        self.made(message)
        return message

    def exchange(
        self, arriving: Sequence[Message], leaving: Sequence[Message], tag: int
    ) -> _Request:
        into, out = (tuple((rank, t.nbytes) for rank, t in x) for x in (arriving, leaving))
        return self._start(None, into, out, (arriving, leaving))

    def all_reduce(self, tensor: Tensor, group: DryGroup) -> _Request:
        return self._collective("all_reduce", tensor, group)

    def all_gather(self, tensor: Tensor, group: DryGroup) -> Tensor:
        gathered = tensor.new_empty((group.size, *tensor.shape))
        self._collective("all_gather", tensor, group).wait()
        return gathered

    def _collective(self, kind: str, tensor: Tensor, group: DryGroup) -> _Request:
        others = (peer for i, peer in enumerate(group.ranks) if i != group.rank)
        contributions = tuple((peer, tensor.nbytes) for peer in others)
        return self._start(kind, contributions, (), tensor)

    def _start(
        self,
        kind: str | None,
        arriving: tuple[tuple[int, int], ...],
        leaving: tuple[tuple[int, int], ...],
        memory: Any,
    ) -> _Request:
        self._number += 1
        nothing = not arriving and not leaving
        if not nothing:
            self.started(Start(self._number, kind, arriving, leaving, _NOWHERE))
        return _Request(None if nothing else self._number, self, memory)


_NOWHERE = Place("", "forward")


class _Request(Done):
    """Messages under way, which hold their memory until somebody waits for them."""

    def __init__(self, number: int | None, transport: _Transport, memory: Any):
        self._number, self._transport, self._memory = number, transport, memory

    def wait(self) -> None:
        """Tell the recorder that the rank waits here."""
        number, self._number, self._memory = self._number, None, None
        if number is not None:
            self._transport.waited(number)


class _Memory:
    """The tensors that live, by kind, and the moment at which they are the most.

    Messages of a CPU come from a pool, which keeps those that are not used for later ones of the
    same size (`transport.buffers`).
    """

    def __init__(self) -> None:
        self._live: dict[int, tuple[int, str, weakref.ref[Any], str]] = {}
        self._bytes: Counter[str] = Counter()
        self._total = self._most = 0
        self.at_most: dict[str, int] = {}
        self._idle: Counter[int] = Counter()
        self._idle_bytes = 0

    @property
    def total(self) -> int:
        """Return the bytes that live now."""
        return self._total

    def hold(self, tensors: Any, kind: str, layer: str = "") -> None:
        """Count tensors whose memory has not been seen."""
        for x in tensors:
            storage = x.untyped_storage()
            key = storage._cdata
            if key in self._live or not storage.nbytes():
                continue
            size = storage.nbytes()
            # The object of the storage lives as long as its memory.
            reference = weakref.ref(storage, self._releasing(key))
            self._live[key] = size, kind, reference, layer
            if kind == "halos" and self._idle[size]:
                self._idle[size] -= 1
                self._idle_bytes -= size
                continue
            self._bytes[kind] += size
            self._total += size
            if self._total > self._most:
                self._most, self.at_most = self._total, dict(self._bytes)

    def turn_into(self, tensor: Tensor, kind: str) -> None:
        """Change the kind of a tensor that lives."""
        key = tensor.untyped_storage()._cdata
        if key in self._live:
            size, before, reference, layer = self._live[key]
            self._live[key] = size, kind, reference, layer
            self._bytes[before] -= size
            self._bytes[kind] += size

    def keep(self) -> dict[str, int]:
        """Take what lives at the end of the forward pass as kept for backward; return its bytes by
        layer.
        """
        kept: Counter[str] = Counter()
        for key, (size, kind, reference, layer) in self._live.items():
            if kind in ("other", "halos") and layer:
                kept[layer] += size
            if kind == "other" and layer:
                self._live[key] = size, "activations", reference, layer
                self._bytes["other"] -= size
                self._bytes["activations"] += size
        return dict(kept)

    def _releasing(self, key: int) -> Callable[[object], None]:
        return lambda _: self._release(key)

    def _release(self, key: int) -> None:
        size, kind, _, _ = self._live.pop(key)
        if kind == "halos" and size <= KEPT_BYTES:
            if self._idle_bytes + size > KEPT_BYTES:
                self._bytes[kind] -= self._idle_bytes
                self._total -= self._idle_bytes
                self._idle.clear()
                self._idle_bytes = 0
            self._idle[size] += 1
            self._idle_bytes += size
            return
        self._bytes[kind] -= size
        self._total -= size


class _Call(NamedTuple):
    """A function on distributed tensors, or what a module does beside such functions."""

    start: int
    """The first number that autograd gives to what it records there."""
    place: Place
    function: str | None


class _Recorder(TorchDispatchMode):
    """Notes what torch's operators, messages and modules do, in order."""

    def __init__(self, module: nn.Module, transport: _Transport):
        super().__init__()
        self.events: list[Event] = []
        self.memory = _Memory()
        self.place = Place("", "forward")
        self.going_back = False
        self.calls: list[_Call] = []
        self.kept: dict[str, int] = {}
        self.blocks: dict[str, tuple[int, ...]] = {}
        self._starts: list[int] = []
        self._seen: set[int] = set()
        self._operators: dict[LocalOperator, LocalOperator] = {}
        self._message = False
        self._watched = _Modules(module, self)
        transport.started = lambda start: self.events.append(start._replace(place=self._where()))
        transport.waited = lambda number: self.events.append(Wait(number, self._where()))
        transport.made = lambda message: self.memory.turn_into(message, "halos")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = _result(func, args, kwargs)
        if func is torch.ops.aten.empty.memory_format and kwargs.get("dtype") is None:
            return result  # of a shape only
        place = self._where()
        made = [
            x
            for x in (result if isinstance(result, (tuple, list)) else (result,))
            if isinstance(x, Tensor) and x.is_meta
        ]
        if not func.is_view:
            self.memory.hold(made, "other", place.layer if place.phase == "forward" else "")
            name = str(func)
            if name not in _FREE:
                self._note(name, args, kwargs, made, place)
        return result

    def _note(
        self, name: str, args: Any, kwargs: Any, made: Sequence[Tensor], place: Place
    ) -> None:
        arguments = _spec(args)
        operator = LocalOperator(
            name, arguments, tuple((k, _spec(v)) for k, v in kwargs.items()), _spec(tuple(made))
        )
        if not any(True for _ in _specs((operator.arguments, operator.keywords, operator.made))):
            return
        operator = self._operators.setdefault(operator, operator)
        self.events.append(Compute(operator, place, self.memory.total))

    def turn(self) -> None:
        """Go from the forward to the backward pass."""
        self.kept = self.memory.keep()
        self.going_back = True
        self._starts = [call.start for call in self.calls]

    def move(self, place: Place) -> None:
        """Go to another place of the forward pass."""
        self.place = place
        self.calls.append(_Call(_sequence_number(), place, None))

    def call(self, start: int, function: str) -> None:
        """Note a function on distributed tensors of the forward pass."""
        self.calls.append(_Call(start, self.place, function))
        self.events.append(HostWork(function, self.place))

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
            self.events.append(HostWork(f"{call.function} backward", place))
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


def _sequence_number() -> int:
    """Return the number that autograd gives to what it records next."""
    number: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
    return number


class _Modules(ModuleCalls):
    """Tells the recorder which module is called."""

    def __init__(self, module: nn.Module, recorder: _Recorder):
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


class _Calls(TorchFunctionMode):
    """Tells the recorder of each function that is called with distributed tensors."""

    def __init__(self, recorder: _Recorder):
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        start = _sequence_number()
        ours = func in RULES and any(issubclass(t, DistTensor) for t in types)
        before = len(self._recorder.events)
        result = func(*args, **(kwargs or {}))
        if ours and not self._recorder.going_back:
            talks = any(isinstance(e, Start) for e in self._recorder.events[before:])
            name = getattr(func, "__name__", str(func))
            self._recorder.call(start, f"{name} across ranks" if talks else name)
        return result


class _Gradients:
    """Buckets of gradients as a parallelized module fills and adds them up (`model.buckets`)."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        grid: DryRunGrid,
        bucket_bytes: int,
        recorder: _Recorder,
    ):
        self._grid, self._recorder = grid, recorder
        trained = [(p, axes_of_sum(p, grid)) for p in parameters if p.requires_grad]
        self._buckets = fill_buckets(trained, bucket_bytes)
        self._missing = [len(chosen) for _, chosen in self._buckets]
        self._place_of = {
            p: (b, i) for b, (_, chosen) in enumerate(self._buckets) for i, p in enumerate(chosen)
        }
        self._memory: dict[int, Tensor] = {}
        self._started = 0
        self._requests: list[_Request] = []
        self._hooks = [p.register_post_accumulate_grad_hook(self._accumulated) for p, _ in trained]

    def _accumulated(self, p: Tensor) -> None:
        assert p.grad is not None
        across = " across ranks" if self._grid.size > 1 else ""
        self._recorder.events.append(HostWork(f"parameter{across}", Place("gradients", "backward")))
        if self._grid.size == 1:
            self._recorder.memory.turn_into(p.grad, "gradients")
            return
        b, i = self._place_of[p]
        _, chosen = self._buckets[b]
        if b not in self._memory:
            elements = sum(q.numel() for q in chosen) + len(chosen)
            self._memory[b] = torch.empty(elements, dtype=p.dtype, device=p.device)
            self._recorder.memory.turn_into(self._memory[b], "gradients")
        start = sum(q.numel() for q in chosen[:i])
        place = self._memory[b][start : start + p.numel()].view(p.shape)
        p.grad = place.copy_(p.grad)
        self._missing[b] -= 1
        while self._started < len(self._buckets) and not self._missing[self._started]:
            self._start_next()

    def _start_next(self) -> None:
        axes, _ = self._buckets[self._started]
        flat = self._memory.get(self._started)
        self._started += 1
        if flat is not None:
            group = self._grid.communicator(axes, "gradients")
            self._requests.append(self._grid.transport.all_reduce(flat, group))  # type: ignore[arg-type]

    def finish(self) -> None:
        """Start what is left, and wait for all, as at the end of `backward()`."""
        while self._grid.size > 1 and self._started < len(self._buckets):
            self._start_next()
        for request in self._requests:
            request.wait()
        self._memory.clear()

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()


_RESULTS: dict[Any, Any] = {}
"""What operators have made of operands like these; at most `_REMEMBERED` of them."""

_REMEMBERED = 2**16


def _result(func: Any, args: Any, kwargs: Any) -> Any:
    """Return what an operator returns, without asking torch's slow stand-ins the same twice."""
    if func.is_view or torch.Tag.inplace_view in func.tags:
        return func(*args, **kwargs)
    given = args, tuple(kwargs.items())
    # 2 equals 2.0, and makes another type of numbers.
    key = func, _spec(given), _types(given)
    made = _RESULTS.get(key)
    if made is None:
        result = func(*args, **kwargs)
        several = result if isinstance(result, (tuple, list)) else (result,)
        if all(isinstance(x, Tensor) and x.is_meta for x in several):
            if len(_RESULTS) >= _REMEMBERED:
                _RESULTS.clear()
            if func._schema.is_mutable:
                made = "first" if result is args[0] else None
            elif not {_address(x) for x in several} & {_address(x) for x in tensors_in(args)}:
                made = tuple(_spec(x) for x in several), type(result)
            if made is not None:
                _RESULTS[key] = made
        return result
    if made == "first":
        return args[0]
    specs, kind = made
    tensors = [torch.empty_strided(s.shape, s.stride, dtype=s.dtype, device="meta") for s in specs]
    return tensors[0] if issubclass(kind, Tensor) else kind(tensors)


def _address(x: Tensor) -> int:
    number: int = x.untyped_storage()._cdata
    return number


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


def _spec(value: Any) -> Any:
    """Return arguments with a `TensorSpec` for each tensor, to be compared and hashed."""
    if isinstance(value, Tensor):
        return TensorSpec(tuple(value.shape), tuple(value.stride()), value.dtype)
    if isinstance(value, (tuple, list)):
        return tuple(_spec(x) for x in value)
    return value


def _types(value: Any) -> Any:
    """Return the types of arguments, in tuples like theirs."""
    return tuple(map(_types, value)) if isinstance(value, (tuple, list)) else type(value)


def _specs(value: Any) -> Iterator[TensorSpec]:
    if isinstance(value, TensorSpec):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _specs(part)


def _text(value: Any) -> str:
    if isinstance(value, TensorSpec):
        dense = _contiguous(value.shape)
        shape = "x".join(map(str, value.shape))
        layout = "" if value.stride == dense else f"/{'x'.join(map(str, value.stride))}"
        return f"{str(value.dtype).removeprefix('torch.')}[{shape}{layout}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))})"
    return repr(value)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))
