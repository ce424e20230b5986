"""`Machine`: a model of a machine, measured or described: tables of seconds, and their sources."""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from inspect import Parameter, signature
from math import inf
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from distconv.data.durable import write_atomically
from distconv.planning.table import table

ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "MALLOC_TOP_PAD_": "134217728",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""Environment variables with which freed memory stays with the process, and lies in huge pages
where Linux gives them on request (glibc 2.35 or later)."""

DESCRIBED = Path(__file__).with_name("machines")
"""The folder of files of machines that distconv describes."""

FORMAT = 2
"""The version of the files. Since 2, operators on volumes are timed as distconv computes them."""


@dataclass(frozen=True)
class Table:
    """Seconds as a function of a size, such as bytes: points, and straight lines between them."""

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.sizes or len(self.sizes) != len(self.seconds):
            raise ValueError(
                f"a table has {len(self.sizes)} sizes and {len(self.seconds)} times; expected one "
                "time for each size, and at least one size"
            )
        if not all(0 <= s < inf for s in self.seconds):
            raise ValueError(
                f"the times of a table are {self.seconds}; expected seconds of 0 or more"
            )
        if any(b <= a for a, b in zip(self.sizes, self.sizes[1:], strict=False)):
            raise ValueError(f"the sizes of a table are {self.sizes}; expected ascending sizes")

    def at(self, size: float) -> float:
        """Return the seconds for a size; beyond the last point the last slope goes on."""
        sizes, seconds = self.sizes, self.seconds
        if size <= sizes[0] or len(sizes) == 1:
            return seconds[0]
        i = min(bisect_right(sizes, size), len(sizes) - 1)
        slope = (seconds[i] - seconds[i - 1]) / (sizes[i] - sizes[i - 1])
        if size > sizes[-1]:
            slope = max(slope, 0.0)
        return seconds[i - 1] + slope * (size - sizes[i - 1])


NO_TIME = Table((0.0,), (0.0,))
"""A table of zero seconds."""


@dataclass(frozen=True)
class LinkTimes:
    """The seconds of messages between two ranks, or of a collective of some ranks, by bytes."""

    total: Table
    """Seconds from start to end where the ranks do nothing else."""
    posted: Table
    """Seconds of the call that starts it, a part of `total`."""
    after: Table
    """Seconds of a wait that comes long after the start, behind computation."""
    eager: float | None = None
    """The largest message, in bytes, that arrives while its sender computes; None where all do."""

    def waits_for_both(self, size: float) -> bool:
        """Return whether a message of `size` bytes moves only while both ranks wait."""
        return self.eager is not None and size > self.eager

    @classmethod
    def described(
        cls, latency: float, bandwidth: float, posted: float = 0.0, after: float = 0.0
    ) -> LinkTimes:
        """Return the times of a link that is described by numbers, not measured.

        Parameters
        ----------
        latency: seconds of an empty message.
        bandwidth: bytes a second.
        posted: seconds of the call that starts a message.
        after: seconds of a wait for a message that has arrived already.
        """
        sizes = 0.0, 2.0**30
        return cls(
            Table(sizes, (latency, latency + 2**30 / bandwidth)),
            Table((0.0,), (posted,)),
            Table((0.0,), (after,)),
        )


@dataclass(frozen=True)
class Roofline:
    """The speed of a described, not measured, device (Williams et al., "Roofline", CACM 2009)."""

    flops: Mapping[str, float]
    """Floating-point operations a second by type, such as `float32`."""
    bandwidth: float
    """Bytes of memory read or written a second."""
    efficiency: Mapping[str, float]
    """The fraction of either that operators reach, by the beginning of their names; "" for
    others."""
    smallest: float
    """Seconds of the smallest operator."""


@dataclass(frozen=True)
class Launch:
    """How jobs are started on a machine.

    Attributes
    ----------
    scheduler: the scheduler's name for the command `launch`.
    gpus_per_node: the devices of a node, each with a rank of its own.
    directives: options of the scheduler.
    options: further options of the command that starts the ranks.
    setup: lines of shell that come first.
    """

    scheduler: str
    gpus_per_node: int = 0
    directives: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()


@dataclass
class Machine:
    """A machine from whose numbers `predict` and `plan` compute the seconds of a step.

    Predictions add the times of local operators to `operators`; `calibrate` measures, or a file
    describes, everything else.

    Examples
    --------
    >>> machine = dc.planning.Machine.load("perlmutter")
    >>> machine.name, machine.assumed, machine.ranks_per_node
    ('Perlmutter (described)', True, 4)
    """

    name: str
    assumed: bool
    """Whether the numbers are described, not measured on the machine."""
    ranks_per_node: int
    threads: int
    """Threads of each rank."""
    links: dict[str, LinkTimes]
    """Messages `within` a node and `between` nodes."""
    reductions: dict[str, dict[int, LinkTimes]]
    """Times of reductions, by name, such as `all_reduce within`, and number of ranks."""
    packing: Table
    """Seconds to copy bytes in rows of 64."""
    host: dict[str, Table]
    """Seconds of Python for each function on distributed tensors, beside its local operators,
    against the bytes that operators read and wrote since the function before; `*` is for functions
    not listed."""
    skew: Table = NO_TIME
    """The extra seconds of a node's slowest rank over the mean for equal work, against the mean."""
    asynchronous: bool = False
    """Whether the device computes while the host goes on, as GPUs do."""
    roofline: Roofline | None = None
    operators: dict[str, dict[str, float]] = field(default_factory=dict)
    """Seconds of local operators, by the number of a node's ranks that compute at the same time."""
    workspaces: dict[str, int] = field(default_factory=dict)
    """Bytes that local operators allocate beside their results, and free again."""
    memory: int | None = None
    """Bytes of memory of a rank."""
    environment: dict[str, str] = field(default_factory=dict)
    """The variables with which operators are timed, such as the allocator's, and jobs run. The
    shell of a job replaces `$NAME` and `${NAME:-/tmp}` in them, and nothing else."""
    launch: Launch | None = None
    """How jobs start there, if the file says so."""
    sources: dict[str, str] = field(default_factory=dict)
    """The source of the numbers of each part."""

    def node(self, rank: int) -> int:
        """Return the number of the node of a rank."""
        return rank // self.ranks_per_node

    def where(self, ranks: Sequence[int]) -> str:
        """Return "within" if all `ranks` are on one node, else "between"."""
        return "within" if len({self.node(rank) for rank in ranks}) == 1 else "between"

    def at_once(self, ranks: int) -> int:
        """Return the largest number of ranks that compute on one node at the same time.

        `ranks` is the number of ranks of the job.
        """
        return min(ranks, self.ranks_per_node)

    def __str__(self) -> str:
        devices = f"{self.ranks_per_node} ranks a node, {self.threads} threads each"
        rows = [("", "8 B", "64 KiB", "1 MiB", "16 MiB")]
        tables = {f"messages {where}": link.total for where, link in self.links.items()}
        for kind, links in self.reductions.items():
            tables |= {f"{kind}, {n} ranks": link.total for n, link in links.items()}
        for name, t in tables.items():
            times = (f"{t.at(size) * 1e6:.4g}" for size in (8, 2**16, 2**20, 2**24))
            rows.append((name, *times))  # type: ignore[arg-type]
        times_in = [table(rows, right=(1, 2, 3, 4)), "times in microseconds"] if tables else []
        assumed = " (assumed)" if self.assumed else ""
        return "\n".join((f"{self.name}{assumed}: {devices}", *times_in))

    def in_graph(self) -> Machine:
        """Return the machine as a step sees it that is replayed as a graph of the device.

        Such a graph, as `dc.compile` captures it, needs no Python between its kernels. The host's
        time for parameters stays, as optimizers step outside of the graph. Times of operators are
        shared with this machine. Raises ValueError if the devices are CPUs, which have no graphs.

        Examples
        --------
        >>> machine = dc.planning.Machine.load("h100")
        >>> net, shape = nn.Conv3d(1, 8, 3, padding=1), (1, 1, 64, 64, 64)
        >>> eager = dc.planning.predict(net, shape, {}, machine)
        >>> replayed = dc.planning.predict(net, shape, {}, machine.in_graph())
        >>> replayed.seconds < eager.seconds
        True
        """
        if not self.asynchronous:
            raise ValueError(
                f"{self.name} computes on CPUs, which have no graphs; predict the eager step"
            )
        kept = {name: table for name, table in self.host.items() if name.startswith("parameter")}
        return replace(self, host=kept)

    def save(self, path: str | Path) -> None:
        """Write the machine as JSON, into a new file that replaces an old one in one step."""
        text = json.dumps(as_dict(self), indent=1)
        write_atomically(Path(path), lambda file: file.write(text.encode()))

    @classmethod
    def load(cls, path: str | Path) -> Machine:
        """Return the machine in a file, written by `save` or by hand.

        A name without suffix, such as "frontier", stands for a machine that distconv describes,
        where no file has this name. Raises ValueError for a file that holds no machine, naming the
        wrong entry.

        Examples
        --------
        >>> dc.planning.Machine.load("frontier").ranks_per_node
        8
        """
        path = Path(path)
        described = DESCRIBED / f"{path}.json"
        if path.name == str(path) and not path.is_file() and described.is_file():
            path = described
        try:
            given = json.loads(path.read_text())
            if not isinstance(given, dict):
                raise ValueError(f"it is {given!r}, expected an object with named entries")
            if given.get("format") == 1:
                given |= {"operators": {}, "workspaces": {}}  # to be timed anew
            elif given.get("format") != FORMAT:
                raise ValueError(f"format is {given.get('format')!r}, expected {FORMAT}")
            machine: Machine = _made(Machine, {"threads": 1, "reductions": {}} | given, "")
            return machine
        except FileNotFoundError:
            raise ValueError(
                f"there is no machine file {str(path)!r}; create it by python -m distconv "
                f"calibrate --output {path}, or name one of {', '.join(names_of_machines())}"
            ) from None
        except OSError as error:
            raise ValueError(f"{str(path)!r} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise ValueError(f"{str(path)!r} describes no machine: {error}") from None


def kind_of_function(name: str) -> str:
    """Return the entry of `Machine.host` for functions of one kind, such as "* across ranks".

    Functions of a kind send messages or not, and run forward or backward.
    """
    across = " across ranks" if " across ranks" in name else ""
    return f"*{across}{' backward' if name.endswith(' backward') else ''}"


def names_of_machines() -> list[str]:
    """Return the names of the machines that distconv describes."""
    return sorted(path.stem for path in DESCRIBED.glob("*.json"))


def allocator_here() -> dict[str, str]:
    """Return the variables of `ALLOCATOR` that are set in this process, with their values."""
    return {name: os.environ[name] for name in ALLOCATOR if name in os.environ}


def as_dict(machine: Machine) -> dict[str, Any]:
    """Return a machine as JSON for its file."""
    return {"format": FORMAT} | asdict(machine)


_POSITIVE = frozenset(("ranks_per_node", "threads", "memory", "bandwidth", "flops", "efficiency"))
"""The entries of a file that are divided by, or counted from 1."""

_BESIDE = frozenset(("format", "source", "copy"))
"""Entries that make no part of a machine; `copy` is of older files."""

_KINDS = {bool: "true or false", str: "text", int: "a whole number", float: "a number"}


def _read(kind: Any, given: Any, key: str) -> Any:
    """Return the value of an entry in a machine's file as an object of type `kind`.

    `given` is the value as JSON, and `key` the name of the entry, for error messages. In place of a
    table, a number stands for the same time at all sizes; in place of a link's times, a latency and
    a bandwidth may be given. Raises ValueError for any other value.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return None if given is None else _read(inner[0], given, key)
    if kind in (int, float):
        least = "above 0" if _POSITIVE & set(key.split(".")) else "from 0"
        number = isinstance(given, int | kind) and not isinstance(given, bool)
        if number and (given > 0 or (given == 0 and least == "from 0")):
            return given
        raise ValueError(f"{key} is {given!r}, expected {_KINDS[kind]} {least}")
    if kind in _KINDS:
        if isinstance(given, kind):
            return given
        raise ValueError(f"{key} is {given!r}, expected {_KINDS[kind]}")
    if origin is tuple:
        if not isinstance(given, list):
            raise ValueError(f"{key} is {given!r}, expected a list")
        return tuple(_read(inner[0], each, f"{key}.{i}") for i, each in enumerate(given))
    if kind is Table and isinstance(given, int | float):
        return Table((0.0,), (_read(float, given, key),))
    if not isinstance(given, dict):
        names = "" if origin else " of " + ", ".join(signature(kind).parameters)
        raise ValueError(f"{key} is {given!r}, expected an object{names}")
    if origin is None:
        described = kind is LinkTimes and "latency" in given
        return _made(LinkTimes.described if described else kind, given, key)
    counts = inner[0] is int
    if counts and not all(map(str.isdecimal, given)):
        raise ValueError(f"{key} has the entries {list(given)}, expected numbers of ranks")
    read = {name: _read(inner[1], each, f"{key}.{name}") for name, each in given.items()}
    return {int(name): each for name, each in read.items()} if counts else read


def _made(make: Callable[..., Any], entries: Mapping[str, Any], key: str) -> Any:
    """Call a class or function with the entries of a JSON object, or raise ValueError.

    `key` is the name of the object in the machine's file, for error messages.
    """
    hints, parameters, prefix = get_type_hints(make), signature(make).parameters, key and f"{key}."
    unknown = sorted(entries.keys() - parameters.keys() - _BESIDE)
    if unknown:
        raise ValueError(f"{prefix}{unknown[0]} is unknown, expected {', '.join(parameters)}")
    for name, parameter in parameters.items():
        if name not in entries and parameter.default is Parameter.empty:
            raise ValueError(f"{prefix}{name} is missing")
    given = {name: each for name, each in entries.items() if name in parameters}
    arguments = {name: _read(hints[name], each, prefix + name) for name, each in given.items()}
    try:
        return make(**arguments)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None
