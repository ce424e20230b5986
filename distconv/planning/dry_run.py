"""Dry runs: a single process runs one rank's part of a step on a grid of any size.

Tensors have no elements (torch's "meta" device), and no messages are sent. Operators decide from
global metadata alone, so they run as on a real grid; the transfers that they would make are
recorded (`ledger.trace_movements`).
"""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from numbers import Integral
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from distconv.geometry.layout import Layout, rank_box
from distconv.geometry.topology import AXES, Topology
from distconv.grid.interface import Grid
from distconv.grid.journal import Journal, Waiting
from distconv.planning.recording import Start
from distconv.tensor.dist_tensor import DistTensor
from distconv.tensor.memory_format import in_sample_format
from distconv.tensor.redistribution import cuts_of_layout
from distconv.torch_private import BatchNorm, address_of_memory, without_modes
from distconv.transport.interface import KEPT_BYTES, SMALL_BYTES, Message


class LiveMemory:
    """The bytes of all live tensors of a dry run, by kind (such as "halos"), now and at their peak.

    With `pools`, the memory of a message is kept for later messages of its size, as on CPUs. Such
    memory is also kept from step to step, so a step holds its largest amount from the beginning.
    """

    def __init__(self, pools: bool = True) -> None:
        self.pools = pools
        self._live: dict[int, tuple[int, str, weakref.ref[Any], str]] = {}
        self._kept: set[int] = set()
        self._bytes: Counter[str] = Counter()
        self.total = self._most = self._most_pooled = 0
        self._at_most: dict[str, int] = {}
        self._idle: Counter[int] = Counter()
        self._idle_bytes = 0

    def hold(self, tensors: Any, kind: str, layer: str = "") -> None:
        """Count the memory of `tensors` under `kind` until it is freed, unless counted already.

        `layer` is the name of the layer that made the tensors; "" for none.
        """
        for x in tensors:
            storage, key = x.untyped_storage(), address_of_memory(x)
            if key in self._live or not storage.nbytes():
                continue
            size = storage.nbytes()
            # The object of the storage lives as long as its memory.
            reference = weakref.ref(storage, partial(self._release, key))
            self._live[key] = size, kind, reference, layer
            if kind == "halos" and self._idle[size]:
                self._idle[size] -= 1
                self._idle_bytes -= size
                continue
            self._bytes[kind] += size
            self.total += size
            self._most_pooled = max(self._most_pooled, self.pooled)
            if self.total - self.pooled > self._most:
                self._most, self._at_most = self.total - self.pooled, dict(self._bytes)

    @property
    def pooled(self) -> int:
        """Return the bytes of messages, in use or kept for later messages; 0 without pools."""
        return self._bytes["halos"] if self.pools else 0

    @property
    def at_most(self) -> dict[str, int]:
        """Return the bytes by kind at the moment when their total was highest."""
        return self._at_most | ({"halos": self._most_pooled} if self._most_pooled else {})

    def turn_into(self, tensor: Tensor, kind: str) -> None:
        """Count the memory of a live tensor under another `kind` from now on."""
        key = address_of_memory(tensor)
        if key in self._live:
            size, before, reference, layer = self._live[key]
            self._live[key] = size, kind, reference, layer
            self._bytes[before] -= size
            self._bytes[kind] += size

    def keep(self, x: Tensor) -> int:
        """Mark the memory of `x` as saved for the backward pass, and return its bytes.

        Returns 0 for a parameter, and for memory that is marked already.
        """
        self.hold([x], "other")
        key = address_of_memory(x)
        size, kind, _, _ = self._live.get(key, (0, "", None, ""))
        if key in self._kept or kind == "parameters":
            return 0
        self._kept.add(key)
        return size

    def kind(self, x: Tensor) -> str:
        """Return the kind under which the memory of `x` counts, such as "halos"; "" for none."""
        return self._live.get(address_of_memory(x), (0, ""))[1]

    def turn(self) -> None:
        """End the forward pass: count live results of layers as "activations", not "other"."""
        for key, (size, kind, reference, layer) in self._live.items():
            if kind == "other" and layer:
                self._live[key] = size, "activations", reference, layer
                self._bytes["other"] -= size
                self._bytes["activations"] += size

    def _release(self, key: int, _: object) -> None:
        size, kind, _, _ = self._live.pop(key)
        self._kept.discard(key)
        if self.pools and kind == "halos" and SMALL_BYTES < size <= KEPT_BYTES:
            if self._idle_bytes + size > KEPT_BYTES:
                self._bytes[kind] -= self._idle_bytes
                self.total -= self._idle_bytes
                self._idle.clear()
                self._idle_bytes = 0
            self._idle[size] += 1
            self._idle_bytes += size
            return
        self._bytes[kind] -= size
        self.total -= size


class DryGroup(NamedTuple):
    """A communicator of a dry run: its size, this rank's index, its ranks, and its purpose."""

    size: int
    rank: int
    ranks: tuple[int, ...]
    purpose: str = "reductions"


@lru_cache(maxsize=256)
def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros on the CPU for a message; equal shapes and types share one tensor."""
    with without_modes():
        return torch.zeros(shape, dtype=dtype, device="cpu")


class DryRequest:
    """A request of a dry run: `wait` calls `waited` and frees `memory`, the message tensors."""

    def __init__(self, waited: Callable[[], object], memory: Any):
        self._waited: Callable[[], object] | None = waited
        self._memory = memory

    def wait(self) -> None:
        waited, self._waited, self._memory = self._waited, None, None
        if waited is not None:
            waited()


class DryTransport:
    """A transport that sends nothing, and reports all starts and waits to a `Recorder`.

    The recorder sets two functions: `started` is called with each exchange or collective that
    starts, and `waited` with its number when the rank waits for it.

    Attributes
    ----------
    allocates: True while `empty` allocates the memory of a message.
    """

    name, ordered = "rehearsal", False

    def __init__(self) -> None:
        self.started: Callable[[Start], object] = lambda start: None
        self.waited: Callable[[int], object] = lambda number: None
        self.allocates = False
        self._number = 0

    def next_tag(self) -> int:
        return 0

    def empty(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        if like.is_cpu:
            # Zeros, as nothing will arrive, and CPUs are slow on memory that looks like denormals.
            # With `data`, autograd has a separate version counter for each message.
            return _zeros(shape, like.dtype).data
        self.allocates = True
        message = like.new_empty(shape)
        self.allocates = False
        return message

    def exchange(
        self, arriving: Sequence[Message], leaving: Sequence[Message], tag: int
    ) -> DryRequest:
        into = tuple([(rank, t.nbytes) for rank, t in arriving])
        out = tuple([(rank, t.nbytes) for rank, t in leaving])
        return self._start(None, into, out, (arriving, leaving))

    def all_reduce(self, tensor: Tensor, group: DryGroup) -> DryRequest:
        return self._collective("all_reduce", tensor, group)

    def all_gather(self, tensor: Tensor, group: DryGroup) -> Tensor:
        gathered = tensor.new_empty((group.size, *tensor.shape))
        self._collective("all_gather", tensor, group).wait()
        return gathered

    def broadcast(self, tensor: Tensor, group: DryGroup) -> None:
        pass

    def _collective(self, kind: str, tensor: Tensor, group: DryGroup) -> DryRequest:
        others = (peer for i, peer in enumerate(group.ranks) if i != group.rank)
        return self._start(kind, tuple((peer, tensor.nbytes) for peer in others), (), tensor)

    def _start(
        self,
        kind: str | None,
        arriving: tuple[tuple[int, int], ...],
        leaving: tuple[tuple[int, int], ...],
        memory: Any,
    ) -> DryRequest:
        # Every rank counts every call, also without messages, so numbers agree between ranks.
        self._number = number = self._number + 1
        if not arriving and not leaving:
            return DryRequest(lambda: None, None)
        self.started(Start(number, kind, arriving, leaving))
        return DryRequest(lambda: self.waited(number), memory)


_ALONE = (
    "a rehearsal cannot communicate with other ranks; create its tensors by rehearsal.tensor(shape)"
)


class DryRunGrid(Grid):
    """A grid of any size, seen from one of its ranks, in a single process without MPI.

    `extents` has the ranks along each axis. `rank` is by default the rank in the middle of every
    axis. Tensors are made by `tensor`, and have no elements. With `gpu` the ranks compute on GPUs.
    """

    transport: DryTransport  # type: ignore[assignment]

    def __init__(self, extents: Mapping[str, int], rank: int | None = None, *, gpu: bool = False):
        for axis, n in extents.items():
            if axis not in AXES:
                raise ValueError(
                    f"{axis!r} is not an axis of a grid; choose from {', '.join(AXES)}"
                )
            if isinstance(n, bool) or not isinstance(n, Integral) or n < 1:
                raise ValueError(
                    f"{axis}={n!r} cannot be inferred, because no ranks have been started; give "
                    "every axis its number of ranks, 1 or more"
                )
        topology = Topology(tuple(int(extents.get(axis, 1)) for axis in AXES))
        if rank is None:
            rank = topology.rank({axis: topology.extent(axis) // 2 for axis in AXES})
        if not 0 <= rank < topology.size:
            raise ValueError(
                f"rank={rank} is not on a grid of {topology.size} ranks; choose from 0 to "
                f"{topology.size - 1}"
            )
        self._alike = False
        journal = Journal(None, Waiting())
        carrier: Any = DryTransport()
        super().__init__(topology, rank, torch.device("meta"), carrier, journal, gpu)

    @property
    def comm(self) -> NoReturn:
        """Raise RuntimeError: a dry run has no communicator."""
        raise RuntimeError(_ALONE)

    def communicator(self, axes: Iterable[str], purpose: str = "reductions") -> Any:
        peers = self.topology.peers(self.rank, axes)
        return DryGroup(len(peers), peers.index(self.rank), tuple(peers), purpose)

    @contextmanager
    def all_alike(self) -> Iterator[None]:
        """Let `all_gather_object` work in a `with` block, as if all ranks passed equal objects."""
        self._alike = True
        try:
            yield
        finally:
            self._alike = False

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return `[value]` in a block of `all_alike`; raise RuntimeError elsewhere."""
        if not self._alike:
            raise RuntimeError(_ALONE)
        return [value]

    def tensor(
        self, shape: tuple[int, ...], layout: Layout | None = None, dtype: torch.dtype | None = None
    ) -> DistTensor:
        """Return a DistTensor of global `shape` without elements, partitioned by `layout`.

        The default layout is that of `distribute_tensor`.
        """
        cuts = cuts_of_layout(layout, self, len(shape))
        box = rank_box(shape, cuts, self.topology, self.rank)
        block = torch.empty(box.shape, dtype=dtype, device="meta")
        return DistTensor(in_sample_format(block, shape, cuts, self), shape, cuts, self)


def without_elements(module: nn.Module, caller: str) -> nn.Module:
    """Return a copy of a module whose parameters, buffers and other tensors have no elements.

    Raises ValueError, which names `caller`, for a module that is parallelized or has lazy
    parameters, which have no shape yet.
    """
    memo: dict[int, Any] = {}
    for part in module.modules():
        if any(name.startswith("_distconv") for name in vars(part)):
            raise ValueError(
                f"{caller}: the module is parallelized; pass the module before parallelize(), "
                "which has the same plan"
            )
        attributes = (x for x in vars(part).values() if isinstance(x, Tensor))
        for x in (*part.parameters(False), *part.buffers(False), *attributes):
            if is_lazy(x):
                raise ValueError(
                    f"{caller}: {type(part).__name__} has no shape yet; first call the module on "
                    "a small plain tensor"
                )
            hollow = torch.empty_like(x, device="meta", requires_grad=False)
            if isinstance(x, nn.Parameter):
                hollow = nn.Parameter(hollow, x.requires_grad)
            memo.setdefault(id(x), hollow)
    copied = copy.deepcopy(module, memo)
    for part in copied.modules():
        if isinstance(part, BatchNorm) and part.momentum is None:
            # A cumulative average reads the value of the batch counter, which has no elements.
            part.momentum = 0.1
    return copied
