"""`Recording`: one rank's training step as layers, local operators, messages, and memory.

`record_step` makes a recording by a dry run; `explain` shows its layers, `play` computes its time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from distconv.comm.ledger import Redistribution
from distconv.geometry.layout import Layout

KINDS = ("parameters", "gradients", "optimizer state", "activations", "halos", "other")
"""The kinds of memory. "halos" are all messages sent and received; "other" are inputs, and results
that are freed soon."""


class TensorSpec(NamedTuple):
    """The shape, strides and type of a tensor, recorded in place of the tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Return the bytes of the tensor's elements."""
        size = self.dtype.itemsize
        for n in self.shape:
            size *= n
        return size


@dataclass(frozen=True)
class LocalOperator:
    """An operator of torch below autograd, such as a convolution, with its arguments' shapes."""

    name: str
    """The operator's name and overload, such as `aten.convolution.default`."""
    arguments: tuple[Any, ...]
    """The positional arguments, with a `TensorSpec` in place of each tensor."""
    keywords: tuple[tuple[str, Any], ...] = ()
    made: tuple[TensorSpec, ...] = ()
    """The results of the operator."""

    @property
    def key(self) -> str:
        """Return a text that is equal for operators of equal names and arguments."""
        return f"{self.name}{_text(self.arguments)}{_text(self.keywords) if self.keywords else ''}"

    @cached_property
    def taken(self) -> list[TensorSpec]:
        """Return the tensors among the arguments, as `TensorSpec`s."""
        return list(_specs_in((self.arguments, self.keywords)))

    @property
    def nbytes(self) -> int:
        """Return the total bytes of all tensors among the arguments and results."""
        return sum(t.nbytes for t in (*self.taken, *self.made))

    @property
    def convolves(self) -> bool:
        """Return whether the operator is a convolution, or the backward pass of one."""
        return "convolution" in self.name


def spec_of(value: Any) -> Any:
    """Return `value` in a hashable form: a `TensorSpec` for each tensor, and tuples for lists."""
    if isinstance(value, Tensor):
        return TensorSpec(tuple(value.shape), tuple(value.stride()), value.dtype)
    if isinstance(value, (tuple, list)):
        # A fast path, as most of the millions of arguments are numbers.
        return tuple([x if type(x) in _PLAIN else spec_of(x) for x in value])
    return value


_PLAIN = frozenset({int, float, bool, type(None)})


def _specs_in(value: Any) -> Iterator[TensorSpec]:
    if isinstance(value, TensorSpec):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _specs_in(part)


def _text(value: Any) -> str:
    if isinstance(value, TensorSpec):
        dense = torch.empty(value.shape, device="meta").stride()
        shape = "x".join(map(str, value.shape))
        layout = "" if value.stride == dense else f"/{'x'.join(map(str, value.stride))}"
        return f"{str(value.dtype).removeprefix('torch.')}[{shape}{layout}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))})"
    return repr(value)


class Place(NamedTuple):
    """The layer and the phase of a step to which an event belongs."""

    layer: str
    """The name of the module in `named_modules`, or "loss", "gradients", "optimizer"."""
    phase: str
    """ "forward", "backward" or "optimizer"."""


class Compute(NamedTuple):
    """An event of a recording: a local operator runs."""

    operator: LocalOperator
    place: Place
    live: int = 0
    """Bytes that the rank holds after the operator has run."""


class HostWork(NamedTuple):
    """An event of a recording: Python runs a function on DistTensors, or its backward pass."""

    function: str
    """The name of the function; `parameter` for a parameter's gradient and update."""
    place: Place
    streamed: int = 0
    """Bytes that operators have read and written since the previous function."""


class Start(NamedTuple):
    """An event of a recording: messages, or a collective, are started."""

    number: int
    collective: str | None
    """`all_reduce` or `all_gather`; None for messages."""
    arriving: tuple[tuple[int, int], ...]
    """Other ranks, each with the bytes that it sends, or contributes to a collective."""
    leaving: tuple[tuple[int, int], ...]
    place: Place = Place("", "forward")

    @property
    def bytes(self) -> int:
        """Return the bytes that arrive from other ranks."""
        if self.collective is None:
            return sum(size for _, size in self.arriving)
        return received_bytes(self.collective, self.arriving[0][1], len(self.arriving) + 1)


def received_bytes(collective: str, size: int, ranks: int) -> int:
    """Return the bytes that a rank receives in an `all_reduce` or `all_gather` of `size` bytes.

    An all-reduce is counted as a reduce-scatter and an all-gather.
    """
    return 2 * size * (ranks - 1) // ranks if collective == "all_reduce" else size * (ranks - 1)


class Completion(NamedTuple):
    """An event of a recording: the rank waits for the messages of the `Start` of this number."""

    number: int
    place: Place


RecordedEvent: TypeAlias = Compute | HostWork | Start | Completion


@dataclass(frozen=True)
class Halo:
    """The halo of one operator: the elements that it needs of other ranks' blocks, on one rank."""

    operator: str
    widths: dict[str, tuple[int, int]]
    """The numbers of elements before and after the rank's own block, by partitioned dimension."""
    bytes: int
    """Bytes received from other ranks."""


@dataclass(frozen=True)
class LayerPlan:
    """A row of `explain`: one call of a layer, or of a function between layers, on one rank."""

    name: str
    """The layer's name in the module; for a function, the name of the module that calls it."""
    kind: str
    """The type of the layer, or the name of the function."""
    shape: tuple[int, ...] | None
    """Global shape of the (first) output."""
    layout: Layout | None
    """The layout of the output; None for a plain tensor."""
    local_shape: tuple[int, ...] | None
    halos: tuple[Halo, ...]
    redistributions: tuple[Redistribution, ...]
    reduced_bytes: int
    """Bytes that this rank contributes to collectives in the forward pass."""
    kept_bytes: int
    """Bytes kept for the backward pass, without parameters and tensors that earlier layers keep."""
    parameter_bytes: int
    """Bytes of this rank's blocks of the layer's own parameters, in the row of their first use."""
    refusal: str | None = None
    """The reason why the layer cannot run on this grid; None if it can."""
    forward_bytes: int = 0
    """All bytes received in the forward pass: halos, redistributions and collectives."""
    backward_bytes: int = 0
    """All bytes received in the backward pass of all calls of the layer, in the row of the last
    call; without reductions of parameters' gradients."""

    @property
    def halo_bytes(self) -> int:
        """Return the bytes received as halos."""
        return sum(halo.bytes for halo in self.halos)

    @property
    def redistributed_bytes(self) -> int:
        """Return the bytes received by redistributions."""
        return sum(moved.bytes for moved in self.redistributions)


def with_backward(calls: Sequence[LayerPlan], received: Mapping[str, int]) -> tuple[LayerPlan, ...]:
    """Return `calls` with the bytes of each layer's backward pass in the row of its last call.

    `received` has the bytes by the name of the layer.
    """
    last = {layer.name: i for i, layer in enumerate(calls)}
    return tuple(
        replace(layer, backward_bytes=received[layer.name])
        if last[layer.name] == i and received.get(layer.name)
        else layer
        for i, layer in enumerate(calls)
    )


def backward_of(events: Iterable[RecordedEvent]) -> Counter[str]:
    """Return the bytes that each layer receives in the backward pass, by the name of the layer.

    Reductions of parameters' gradients are counted as "gradients", messages of the loss as "loss".
    """
    received: Counter[str] = Counter()
    for event in events:
        if isinstance(event, Start) and event.place.phase == "backward":
            received[event.place.layer] += event.bytes
    return received


@dataclass(frozen=True)
class Recording:
    """A training step, or its forward pass, as `record_step` recorded it on one rank."""

    rank: int
    ranks: int
    events: tuple[RecordedEvent, ...]
    memory: dict[str, int]
    """Bytes of each of `KINDS` at the moment when the rank holds the most memory."""
    calls: tuple[LayerPlan, ...]
    """The calls of layers and functions in order; ends with the first unsupported call."""
    layers: dict[str, str]
    """The names of the layers in order, each with its type."""
    parameter_bytes: int = 0
    """Bytes of the parameters that the rank holds."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The shape of this rank's block of the output, by the name of the layer."""

    @property
    def peak(self) -> int:
        """Return the most bytes that the rank holds at any moment of the step."""
        return sum(self.memory.values())

    @property
    def refusal(self) -> str | None:
        """Return the reason why the module cannot run on this grid; None when it can."""
        return self.calls[-1].refusal if self.calls else None

    @property
    def kept(self) -> Counter[str]:
        """Return the bytes that each layer keeps for the backward pass."""
        kept: Counter[str] = Counter()
        for call in self.calls:
            kept[call.name] += call.kept_bytes
        return kept

    @property
    def operators(self) -> Counter[LocalOperator]:
        """Return each local operator with the number of times that it runs."""
        return Counter(e.operator for e in self.events if isinstance(e, Compute))
