"""How long local operators take: timed once on the machine at hand, or by roofline.

They are timed as they run in a step: under the machine's allocator settings, on memory that the
process already has, and by as many processes at the same time as a node has ranks.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from distconv.planning.machine import Machine, Table
from distconv.planning.operator_timing import FEWEST, MOST, SECONDS
from distconv.planning.recording import LocalOperator
from distconv.planning.roofline import bytes_of, flops_of, roofline_seconds

_Kind: TypeAlias = tuple[Any, ...]
"""What operators share whose times are proportional to their work, the name first."""

_OF_LAUNCHERS = ("PMI_", "PMIX_", "OMPI_", "SLURM_", "MPI_", "HYDRA_", "RANK", "WORLD_SIZE")


BUDGET = 30.0
"""Seconds for timing the operators of some steps, where a caller says nothing else."""
_LEAST = 2**16
"""Operations or bytes up to which operators take as long as one another."""
_MEMORY = 2**30
"""Bytes that a rank has where the machine does not say."""
_PARTS = 16
"""An operator whose operands and results take more than one of so many parts of a rank's memory is
estimated, as the process that times it has many of them."""


class OperatorTimes:
    """Seconds of local operators on a machine, of which many ranks compute at the same time, and
    the bytes that convolutions allocate beside their results.

    Parameters
    ----------
    at_once: how many ranks of a node compute at the same time.
    measure: whether to time operators that the machine has no times for; else that is an error.
    progress: is called with the operators timed so far, and all that are to be.
    """

    def __init__(
        self,
        machine: Machine,
        at_once: int,
        *,
        measure: bool = True,
        progress: Callable[[int, int], object] = lambda done, of: None,
    ):
        self._machine, self._progress = machine, progress
        self.measure = measure
        self._at_once = at_once
        self._known = machine.operators.setdefault(str(at_once), {})
        self._estimated: dict[str, float] = {}
        self._estimated_spaces: dict[str, int] = {}
        self._timed: defaultdict[_Kind, dict[str, LocalOperator]] = defaultdict(dict)
        """By kind and key, the operators from which others are estimated."""

    def __getitem__(self, operator: LocalOperator) -> float:
        """Return the seconds of an operator that has been prepared."""
        if self._machine.roofline is not None:
            return roofline_seconds(operator, self._machine.roofline)
        key = operator.key
        return self._known[key] if key in self._known else self._estimated[key]

    def workspace(self, operator: LocalOperator) -> int:
        """Return the bytes that an operator allocates beside its results, as far as known."""
        spaces, key = self._machine.workspaces, operator.key
        return spaces[key] if key in spaces else self._estimated_spaces.get(key, 0)

    def prepare(self, operators: Iterable[LocalOperator]) -> None:
        """Time those operators whose times are not known.

        Raises
        ------
        ValueError
            Where they are not to be timed.
        """
        if self._machine.roofline is not None:
            return
        missing = {o.key: o for o in operators if o.key not in self._known}
        if not missing:
            return
        if not self.measure:
            raise ValueError(
                f"{self._machine.name} has no times of {len(missing)} local operators, such as "
                f"{next(iter(missing))}, for {self._at_once} ranks at once, and may not measure "
                "them; predict once on the machine itself"
            )
        times, spaces = time_together(
            list(missing.values()),
            self._at_once,
            self._machine.threads,
            self._machine.memory or _MEMORY,
            self._machine.environment,
            self._progress,
        )
        self._known.update(zip(missing, times, strict=True))
        self._machine.workspaces.update(
            (key, n) for key, n in zip(missing, spaces, strict=True) if n
        )

    def prepare_approximately(
        self,
        steps: Sequence[Mapping[LocalOperator, int]],
        progress: Callable[[str], object] = lambda what: None,
        seconds: float = BUDGET,
    ) -> None:
        """Time the operators of some steps, or where that takes longer than `seconds` or too much
        memory, some sizes of each kind; others lie between these, or in proportion beyond.

        A kind is an operator with its weights; its size its arithmetic, or its bytes. Kinds for
        which there is no time, or no memory, take as long as others of the same name.
        """
        if self._machine.roofline is not None:
            return
        every = {o.key: o for step in steps for o in step}
        for key, o in every.items():
            if key in self._known:
                self._timed[_kind(o)][key] = o
        every = {key: o for key, o in every.items() if key not in self._known}
        largest = self._machine.memory // _PARTS if self._machine.memory else sys.maxsize
        few = sum(_cost(o) for o in every.values()) <= seconds
        if not self.measure or (few and all(bytes_of(o) <= largest for o in every.values())):
            progress(f"{len(every)} local operators are timed")
            self.prepare(every.values())
            return
        kinds: dict[_Kind, list[LocalOperator]] = defaultdict(list)
        for o in every.values():
            kinds[_kind(o)].append(o)
        fitting = {
            kind: [o for o in operators if bytes_of(o) <= largest]
            for kind, operators in kinds.items()
        }
        for kind, operators in _chosen(fitting, seconds).items():
            self._timed[kind] |= {o.key: o for o in operators}
        for kind, operators in kinds.items():
            smallest = min(operators, key=_work)
            alone = all(other[0] != kind[0] for other in self._timed)
            if alone and bytes_of(smallest) <= largest:
                self._timed[kind][smallest.key] = smallest
        missing = [
            o for timed in self._timed.values() for o in timed.values() if o.key not in self._known
        ]
        progress(f"{len(missing)} of {len(every)} local operators are timed")
        self.prepare(missing)
        for kind, operators in kinds.items():
            known = self._alike(kind) or operators[:1]
            self.prepare(known)
            seconds_of = _curve({_work(o): self._known[o.key] for o in known})
            space_of = _curve({_work(o): self.workspace(o) for o in known})
            for o in operators:
                self._estimated[o.key] = seconds_of(_work(o))
                self._estimated_spaces[o.key] = round(space_of(_work(o)))

    def _alike(self, kind: _Kind) -> list[LocalOperator]:
        """Return the operators from which to estimate those of a kind: of the same kind, else of
        the same name, else all."""
        if kind in self._timed:  # which has no empty entries
            return list(self._timed[kind].values())
        every = [(other[0], o) for other, timed in self._timed.items() for o in timed.values()]
        return [o for name, o in every if name == kind[0]] or [o for _, o in every]


def _curve(known: Mapping[float, float]) -> Callable[[float], float]:
    """Return a function through known points; beyond the last one it is proportional."""
    sizes, values = zip(*sorted(known.items()), strict=True)
    curve = Table(sizes, values)

    def at(size: float) -> float:
        if len(sizes) > 1 and size <= sizes[-1]:
            return curve.at(size)
        return float(values[-1] * max(size / sizes[-1], 1e-3))

    return at


def _work(operator: LocalOperator) -> float:
    return float(max(flops_of(operator), bytes_of(operator), _LEAST))


def _cost(operator: LocalOperator) -> float:
    """Return about how many seconds it takes to time an operator; it need not be right."""
    once = max(flops_of(operator) / 3e10, bytes_of(operator) / 5e9, 1e-5)
    return 0.002 + once * (2 + min(max(SECONDS / once, FEWEST), MOST))


def _kind(operator: LocalOperator) -> _Kind:
    if "convolution" not in operator.name:
        return (operator.name,)
    weight = operator.arguments[2 if "backward" in operator.name else 1]
    return operator.name, weight.shape, operator.arguments[-7:]


def _chosen(
    kinds: Mapping[_Kind, Sequence[LocalOperator]], seconds: float
) -> dict[_Kind, list[LocalOperator]]:
    """Return some operators of each kind, which together take about so many seconds to time: the
    smallest, and larger ones while there is time; the kinds with the most operators first."""
    chosen: dict[_Kind, list[LocalOperator]] = defaultdict(list)
    ordered = {kind: sorted(operators, key=_work) for kind, operators in kinds.items()}
    for step in range(4):
        for kind, operators in sorted(ordered.items(), key=lambda item: -len(item[1])):
            if not operators:
                continue
            operator = operators[round(step * (len(operators) - 1) / 3)]
            cost = _cost(operator)
            if operator not in chosen[kind] and cost <= seconds:
                seconds -= cost
                chosen[kind].append(operator)
    return {kind: operators for kind, operators in chosen.items() if operators}


def time_together(
    operators: list[LocalOperator],
    processes: int,
    threads: int,
    memory: int,
    environment: dict[str, str],
    progress: Callable[[int, int], object] = lambda done, of: None,
) -> tuple[list[float], list[int]]:
    """Return the seconds of each operator, timed by some processes at the same time, and the bytes
    that it allocates beside its results.

    Every process is new, and has the variables of `environment`; it sends no messages. It may use
    about `memory` bytes.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_OF_LAUNCHERS)}
    kept |= environment | {"OMP_NUM_THREADS": str(threads)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "operators").write_bytes(pickle.dumps(operators))
        (folder / "counters").write_bytes(bytes(8 * processes))
        command = [sys.executable, "-m", "distconv.planning.operator_worker", name]
        workers = [
            subprocess.Popen(
                [*command, *map(str, (i, processes, threads, memory))],
                env=kept,
                stderr=subprocess.PIPE,
            )
            for i in range(processes)
        ]
        try:
            wait_for_all(workers)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        every = [pickle.loads((folder / f"times {i}").read_bytes()) for i in range(processes)]
    progress(len(operators), len(operators))
    seconds = [sum(s) / processes for s in zip(*(times for times, _ in every), strict=True)]
    return seconds, every[0][1]


def wait_for_all(workers: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait until all processes have ended; raise RuntimeError as soon as one has failed.

    They wait for one another, so the others of one that was killed would never end.
    """
    running = list(workers)
    while running:
        for worker in list(running):
            try:
                _, said = worker.communicate(timeout=0.2)
            except subprocess.TimeoutExpired:
                continue
            if worker.returncode:
                raise RuntimeError(
                    "a process that times local operators has ended with status "
                    f"{worker.returncode}: {said.decode()[-2000:]}"
                )
            running.remove(worker)
