"""`count_traffic`: all bytes that other ranks send to this one, by layer and function.

Messages are counted at the transport, so that none is missed: halos, redistributions, reductions
and gradients, forward and backward.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from distconv import torch_private
from distconv.grid.communicators import carried_by
from distconv.grid.journal import WrappedTransport
from distconv.grid.words import CURRENT, module_path, operator_name
from distconv.planning.recording import received_bytes
from distconv.planning.table import size_cell, table
from distconv.tensor.dispatch import RULES
from distconv.transport.interface import Message, Request, Transport


@dataclass
class LayerTraffic:
    """The bytes that arrived at this rank for one function in one layer and phase.

    Examples
    --------
    >>> layer = dc.parallelize(nn.Conv2d(1, 1, 3, padding=1, bias=False), dc.ProcessGrid(height=2))
    >>> x = dc.distribute_tensor(torch.ones(1, 1, 8, 8), dc.ProcessGrid(height=2))
    >>> y = layer(x)  # the first call compares the parameters of the ranks
    >>> with dc.count_traffic() as traffic:
    ...     y = layer(x)
    >>> for entry in traffic.entries:
    ...     print(entry.operator, entry.phase, entry.times, entry.bytes)
    torch.nn.functional.conv2d forward 1 32
    """

    layer: str
    """The name of the module that was called, as in `named_modules`; "" for the outermost, and
    "gradients" for reductions of parameters' gradients."""
    operator: str
    """The function, such as "torch.conv2d"; "" outside of functions on DistTensors."""
    phase: str
    """ "forward" or "backward"."""
    times: int = 0
    """The number of exchanges and collectives."""
    bytes: int = 0
    """Bytes received from other ranks. An all-reduce of n bytes among p ranks counts as
    2 n (p - 1) / p."""


class TrafficCount:
    """The result of `count_traffic`; prints as a table."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str, str], LayerTraffic] = {}
        self._starts: list[int] = []
        self._labels: list[tuple[str, str]] = []

    @property
    def entries(self) -> list[LayerTraffic]:
        """Return a `LayerTraffic` for each layer, function and phase, in order of appearance."""
        return list(self._entries.values())

    @property
    def forward(self) -> int:
        """Return the bytes received outside of backward passes."""
        return sum(entry.bytes for entry in self.entries if entry.phase == "forward")

    @property
    def backward(self) -> int:
        """Return the bytes received in backward passes, including reductions of gradients."""
        return sum(entry.bytes for entry in self.entries if entry.phase == "backward")

    def __str__(self) -> str:
        heading = "layer", "function", "phase", "times", "received"
        rows = [
            (e.layer, e.operator, e.phase, str(e.times), size_cell(e.bytes)) for e in self.entries
        ]
        total = "total", "", "", "", size_cell(self.forward + self.backward)
        return table([heading, *rows, total])

    def count(self, bytes: int) -> None:
        """Add a message or collective, and the bytes received, to the running function."""
        layer, operator, phase = self._where()
        key = layer, operator, phase
        entry = self._entries.setdefault(key, LayerTraffic(layer, operator, phase))
        entry.times += 1
        entry.bytes += bytes

    def begin(self, function: Any) -> None:
        """Record that autograd nodes made from now on belong to `function`."""
        self._starts.append(torch_private.next_node_number())
        self._labels.append((module_path(), operator_name(function)))

    def _where(self) -> tuple[str, str, str]:
        """Return layer, function and phase of a message that starts now."""
        node, function = torch_private.current_node(), CURRENT.call[0]
        if node is None and function not in ("backward", "grad"):
            name = "" if function is None else operator_name(function)
            return module_path(), name, "forward"
        number = torch_private.node_number(node)
        if number is None:
            return "gradients", "", "backward"
        place = bisect_right(self._starts, number) - 1
        # Nodes that were made before the context began have no label.
        return (*(self._labels[place] if place >= 0 else ("", "")), "backward")


@contextmanager
def count_traffic() -> Iterator[TrafficCount]:
    """Count all bytes that arrive at this rank within the context, by layer, function and phase.

    The context yields an object that prints as a table. Its `entries` are a list of
    `LayerTraffic`; `forward` and `backward` are the bytes of each pass. No communication: ranks may
    use it alone, and each counts its own bytes. In a context around the backward pass alone, layers
    have no names.

    Examples
    --------
    >>> grid = dc.ProcessGrid(height=2)
    >>> layer = dc.parallelize(torch.nn.Conv2d(1, 1, 3, padding=1, bias=False), grid)
    >>> x = dc.distribute_tensor(torch.ones(1, 1, 8, 8), grid)
    >>> y = layer(x)  # the first call compares the parameters of the ranks
    >>> with dc.count_traffic() as traffic:
    ...     y = layer(x)
    >>> traffic.forward  # one row of 8 numbers
    32
    """
    count = TrafficCount()
    with (
        carried_by(lambda transport: _Counting(transport.carrier, count.count)),
        _Labelling(count.begin),
    ):
        yield count


class _Labelling(TorchFunctionMode):
    def __init__(self, begin: Callable[[Any], None]) -> None:
        super().__init__()
        self._begin = begin

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in RULES and torch_private.current_node() is None:
            self._begin(func)
        return func(*args, **(kwargs or {}))


class _Counting(WrappedTransport):
    def __init__(self, carrier: Transport, count: Callable[[int], None]) -> None:
        super().__init__(carrier)
        self._count = count

    def exchange(
        self, arriving: Sequence[Message], leaving: Sequence[Message], tag: int
    ) -> Request:
        if arriving:
            self._count(sum(tensor.nbytes for _, tensor in arriving))
        return self.carrier.exchange(arriving, leaving, tag)

    def all_reduce(self, tensor: Tensor, group: Any) -> Request:
        self._count(received_bytes("all_reduce", tensor.nbytes, group.size))
        return self.carrier.all_reduce(tensor, group)

    def all_gather(self, tensor: Tensor, group: Any) -> Tensor:
        self._count(received_bytes("all_gather", tensor.nbytes, group.size))
        return self.carrier.all_gather(tensor, group)

    def broadcast(self, tensor: Tensor, group: Any) -> None:
        if group.rank:
            self._count(tensor.nbytes)
        self.carrier.broadcast(tensor, group)
