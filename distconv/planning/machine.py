"""A model of a machine, measured or described: tables of seconds, each with its source."""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from math import inf
from pathlib import Path
from typing import Any

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

FORMAT = 2
"""The version of the files. Since 2, operators on volumes are timed as distconv computes them."""


@dataclass(frozen=True)
class Table:
    """Seconds against a size, linear between the points."""

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.sizes or len(self.sizes) != len(self.seconds):
            raise ValueError(
                f"a table has {len(self.sizes)} sizes and {len(self.seconds)} times; give one time "
                "for each size, and at least one"
            )
        if not all(0 <= s < inf for s in self.seconds):
            raise ValueError(f"the times of a table are seconds from 0, and are {self.seconds}")
        if any(b <= a for a, b in zip(self.sizes, self.sizes[1:], strict=False)):
            raise ValueError(f"the sizes of a table have to grow, and are {self.sizes}")

    def at(self, size: float) -> float:
        """Return the seconds for a size; beyond the last point by the last slope."""
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
    """The seconds that bytes take between ranks: in messages, or in a collective of some ranks."""

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
        """Return the link of a latency (seconds) and a bandwidth (bytes a second)."""
        sizes = 0.0, 2.0**30
        return cls(
            Table(sizes, (latency, latency + 2**30 / bandwidth)),
            Table((0.0,), (posted,)),
            Table((0.0,), (after,)),
        )


@dataclass(frozen=True)
class Roofline:
    """The speed of a described device (Williams et al., "Roofline", CACM 2009)."""

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
    """The numbers of a machine from which steps are predicted.

    `operators` grows as predictions time local operators on the machine; everything else is
    measured by `calibrate`, or described in a file.
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
    shell of a job replaces `$NAME` in them."""
    launch: Launch | None = None
    """How jobs start there, if the file says so."""
    sources: dict[str, str] = field(default_factory=dict)
    """The source of the numbers of each part."""

    def node(self, rank: int) -> int:
        """Return the number of the node of a rank."""
        return rank // self.ranks_per_node

    def where(self, ranks: Sequence[int]) -> str:
        """Return `within` where all `ranks` are on one node, else `between`."""
        return "within" if len({self.node(rank) for rank in ranks}) == 1 else "between"

    def at_once(self, ranks: int) -> int:
        """Return the largest number of a job's ranks that compute on one node."""
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

    def save(self, path: str | Path) -> None:
        """Write the machine as JSON; the file is whole at any moment."""
        text = json.dumps(as_dict(self), indent=1)
        write_atomically(Path(path), lambda file: file.write(text.encode()))

    @classmethod
    def load(cls, path: str | Path) -> Machine:
        """Return the machine in a file that `save` or a person wrote.

        Raises ValueError for a file that holds no machine, naming the missing entry.
        """
        path = Path(path)
        try:
            given = json.loads(path.read_text())
            if given["format"] == 1:
                given |= {"operators": {}, "workspaces": {}}  # to be timed anew
            elif given["format"] != FORMAT:
                raise ValueError(f"its format is {given['format']}, expected {FORMAT}")
            memory = given.get("memory")
            if not (memory is None or (isinstance(memory, int) and memory > 0)):
                raise ValueError(f"its memory is {memory!r}, expected the bytes that a rank has")
            return _from_dict(given)
        except FileNotFoundError:
            raise ValueError(
                f"there is no machine in {str(path)!r}; make it by python -m distconv calibrate "
                f"--output {path}"
            ) from None
        except OSError as error:
            raise ValueError(f"{str(path)!r} cannot be read: {error.strerror}") from None
        except (KeyError, TypeError, ValueError) as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{str(path)!r} describes no machine: {what}") from None


def allocator_here() -> dict[str, str]:
    """Return the variables of `ALLOCATOR` in this process's environment."""
    return {name: os.environ[name] for name in ALLOCATOR if name in os.environ}


def as_dict(machine: Machine) -> dict[str, Any]:
    """Return the content of a machine's file."""
    return {"format": FORMAT} | asdict(machine)


def _from_dict(given: Mapping[str, Any]) -> Machine:
    """Return the machine in a file's content, where sections may name their source."""
    known: dict[str, Any] = {f.name: given[f.name] for f in fields(Machine) if f.name in given}
    roofline = given.get("roofline")
    if roofline is not None:
        roofline = Roofline(**{k: v for k, v in roofline.items() if k != "source"})
    links = {where: _link(link) for where, link in given["links"].items()}
    reductions = {
        kind: {int(ranks): _link(link) for ranks, link in links.items()}
        for kind, links in given.get("reductions", {}).items()
    }
    host = {name: _table(table) for name, table in given["host"].items()}
    more: dict[str, Any] = {"roofline": roofline, "links": links, "reductions": reductions}
    more["packing"] = _table(given["packing"])
    more |= {"host": host, "skew": _table(given.get("skew", 0.0)), "sources": given["sources"]}
    if given.get("launch") is not None:
        items = given["launch"].items()
        launch: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in items}
        more["launch"] = Launch(**launch)
    return Machine(**({"threads": 1} | known | more))


def _table(given: Mapping[str, Any] | float) -> Table:
    """Return a table in a file; a number stands for the same time at all sizes."""
    if isinstance(given, int | float):
        return Table((0.0,), (given,))
    return Table(tuple(given["sizes"]), tuple(given["seconds"]))


def _link(given: Mapping[str, Any]) -> LinkTimes:
    """Return a link given by tables, or by a latency and a bandwidth."""
    if "latency" in given:
        numbers = ("latency", "bandwidth", "posted", "after")
        return LinkTimes.described(**{name: given[name] for name in numbers if name in given})
    total, posted, after = (_table(given[name]) for name in ("total", "posted", "after"))
    return LinkTimes(total, posted, after, given.get("eager"))
