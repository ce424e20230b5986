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
"""Environment variables with which freed memory stays with the process, in huge pages where Linux
provides them on request (glibc 2.35 or later)."""

DESCRIBED = Path(__file__).with_name("machines")
"""The folder of the machine files that come with distconv."""

FORMAT = 2
"""The version of the format of machine files. Since version 2, operators on volumes are timed as
distconv computes them."""


@dataclass(frozen=True)
class Table:
    """A piecewise linear function from a size, such as a number of bytes, to seconds."""

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
        """Return the seconds for `size`: interpolated, or extrapolated beyond the last point."""
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
    """The seconds of a message between two ranks, or of a collective, each a table by bytes."""

    total: Table
    """Seconds from start to completion if the ranks do nothing else."""
    posted: Table
    """Seconds of the call that starts the message or collective, a part of `total`."""
    after: Table
    """Seconds of a wait that begins long after the start, with computation in between."""
    eager: float | None = None
    """The largest message, in bytes, that arrives while its sender computes; None if all do."""

    def waits_for_both(self, size: float) -> bool:
        """Return whether a message of `size` bytes is sent only while both ranks wait."""
        return self.eager is not None and size > self.eager

    @classmethod
    def described(
        cls, latency: float, bandwidth: float, posted: float = 0.0, after: float = 0.0
    ) -> LinkTimes:
        """Return the times of a link of given latency and bandwidth, which is not measured.

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
    """The roofline of a device that is described, not measured (Williams et al., CACM 2009)."""

    flops: Mapping[str, float]
    """Floating-point operations a second by type, such as `float32`."""
    bandwidth: float
    """Bytes of memory read or written a second."""
    efficiency: Mapping[str, float]
    """The fraction of `flops` or `bandwidth` that operators reach, by prefix of the operator's
    name; "" for all others."""
    smallest: float
    """The least seconds of an operator."""


@dataclass(frozen=True)
class Launch:
    """How jobs are started on a machine.

    Attributes
    ----------
    scheduler: the scheduler, such as "slurm", for which the command `launch` writes scripts.
    gpus_per_node: the number of devices of a node, each with a rank of its own; 0 without devices.
    directives: options of the scheduler in the script.
    options: further options of the command that starts the ranks, such as those of mpiexec.
    setup: shell commands that the script runs first.
    """

    scheduler: str
    gpus_per_node: int = 0
    directives: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()


@dataclass
class Machine:
    """A model of a machine, from which `predict` and `plan` compute the seconds of a step.

    Predictions time local operators and add them to `operators`. Everything else is measured by
    `calibrate`, or described in a file.

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
    """Times of messages, "within" a node and "between" nodes."""
    reductions: dict[str, dict[int, LinkTimes]]
    """Times of collectives, by name, such as "all_reduce within", and by number of ranks."""
    packing: Table
    """Seconds to copy data in rows of 64 bytes, by the number of bytes."""
    host: dict[str, Table]
    """Seconds of Python for each function on DistTensors, without its local operators, by the bytes
    that operators have read and written since the previous function; `*` is for functions not
    listed."""
    skew: Table = NO_TIME
    """Extra seconds of the slowest rank over the mean of all ranks, by the mean, in equal work."""
    asynchronous: bool = False
    """Whether the host continues while the device computes, as with GPUs."""
    roofline: Roofline | None = None
    operators: dict[str, dict[str, float]] = field(default_factory=dict)
    """Seconds of local operators, by the number of ranks of a node that compute at the same time,
    and by `LocalOperator.key`."""
    workspaces: dict[str, int] = field(default_factory=dict)
    """Bytes that local operators allocate temporarily beside their results, by
    `LocalOperator.key`."""
    memory: int | None = None
    """Bytes of memory that a rank may use."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables with which operators are timed and jobs run, such as the allocator's.
    The shell of a job expands `$NAME` and `${NAME:-/tmp}` in values, and nothing else."""
    launch: Launch | None = None
    """How jobs are started on the machine; None if its file has no such entry."""
    sources: dict[str, str] = field(default_factory=dict)
    """The origin of the numbers of each part, as text."""

    def node(self, rank: int) -> int:
        """Return the index of the node on which `rank` runs."""
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
        """Return this machine for steps that are replayed as a device graph, without Python.

        A graph, as captured by `dc.compile`, needs no Python between its kernels. Host times of
        parameters remain, as optimizers step outside of the graph. Both machines share the times of
        operators. Raises ValueError if the devices are CPUs, which have no graphs.

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
        """Return the machine in the file `path`, written by `save` or by hand.

        If there is no such file, a name without suffix, such as "frontier", selects a machine that
        comes with distconv. Raises ValueError for a missing file, and for a file that does not
        describe a machine, naming the wrong entry.

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
                given |= {"operators": {}, "workspaces": {}}  # to be timed again
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
    """Return the entry of `Machine.host` for all functions like `name`, such as "* across ranks".

    Functions are alike if both or neither send messages, and both or neither run backward.
    """
    across = " across ranks" if " across ranks" in name else ""
    return f"*{across}{' backward' if name.endswith(' backward') else ''}"


def names_of_machines() -> list[str]:
    """Return the names of the machine files that come with distconv."""
    return sorted(path.stem for path in DESCRIBED.glob("*.json"))


def allocator_here() -> dict[str, str]:
    """Return the variables of `ALLOCATOR` that are set in this process, with their values."""
    return {name: os.environ[name] for name in ALLOCATOR if name in os.environ}


def as_dict(machine: Machine) -> dict[str, Any]:
    """Return a machine as the JSON object of its file."""
    return {"format": FORMAT} | asdict(machine)


_POSITIVE = frozenset(("ranks_per_node", "threads", "memory", "bandwidth", "flops", "efficiency"))
"""Entries of a machine file that must be above 0."""

_BESIDE = frozenset(("format", "source", "copy"))
"""Entries of a machine file that are ignored; older files have `copy`."""

_KINDS = {bool: "true or false", str: "text", int: "a whole number", float: "a number"}


def _read(kind: Any, given: Any, key: str) -> Any:
    """Return the value of an entry in a machine's file as an object of type `kind`.

    `given` is the value as JSON, and `key` the name of the entry, for error messages. A number in
    place of a table is the same time at all sizes. A link may have `latency` and `bandwidth`
    instead of tables. Raises ValueError for any other value.
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
    """Return `make(**entries)`, with the entries of a JSON object converted to the declared types.

    `key` is the name of the object in the machine's file, for error messages. Raises ValueError for
    unknown, missing and wrong entries.
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
