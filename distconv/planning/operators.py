"""`OperatorTimes`: the seconds of local operators, timed on this machine or from a roofline.

Operators are timed under the conditions of a step: with the machine's allocator settings, on memory
that the process already has, and in one process for each rank of a node at the same time.
"""

from __future__ import annotations

import mmap
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from math import prod
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from distconv.ops.conv.local_convolution import convolution, convolution_gradients
from distconv.planning.machine import Machine, Roofline, Table
from distconv.planning.recording import LocalOperator, TensorSpec
from distconv.torch_private import is_mutable

# Timing of local operators as they run in a step, by several processes at the same time.
#
# `time_together` writes the operators to a folder, starts `python -m
# distconv.planning.operators FOLDER NUMBER PROCESSES THREADS MEMORY` for each process, and
# reads the times from the folder.


_POOL = 2**24
"""Elements of the memory from which operands are taken in turn. The pool is so large that an
operand has left the caches before its memory is used again, as in a step."""

SECONDS = 0.02
"""Approximate seconds of timed runs for each operator."""
FEWEST, MOST = 3, 12
"""The smallest and largest number of timed runs of an operator, after one untimed run."""

_HELD = 2**26
"""Bytes of results that are kept, as a step keeps activations, before the oldest are freed."""

_HEAP = 2**30
"""Bytes that a timing process writes first, to own the memory; at most a quarter of its memory."""

_OF_LAUNCHERS = ("PMI_", "PMIX_", "OMPI_", "SLURM_", "MPI_", "HYDRA_", "RANK", "WORLD_SIZE")

_OF_VOLUMES: dict[str, Callable[..., object]] = {
    "aten.convolution.default": convolution,
    "aten.convolution_backward.default": convolution_gradients,
}
"""distconv's implementations of operators, which are timed for tensors (N, C, D, H, W)."""


class Operands:
    """A memory pool for the operands of timed operators, which operands use piece by piece.

    The pool is large enough for each of `operators`. The first operand of an operator is copied to
    fresh memory, so it does not stay in the pool.
    """

    def __init__(self, operators: Iterable[LocalOperator]):
        self._elements = _POOL
        for operator in operators:
            first, *others = map(_extent, operator.taken or [TensorSpec((), (), torch.float32)])
            self._elements = max(self._elements, first, sum(others))
        self._numbers: dict[torch.dtype, Tensor] = {}
        self._next = 0

    def tensor(self, spec: TensorSpec, places: int = 0, *, own: bool = False) -> Tensor:
        """Return a tensor with the shape, strides and type in `spec`, to run an operator on.

        Floating-point elements are random numbers from 0.5 to 1.5 in the pool; with `own` they are
        copied to fresh memory. Integers are indices into a plane of `places` elements.
        """
        elements = _extent(spec)
        if not prod(spec.shape):
            return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype)
        if spec.dtype.is_floating_point or spec.dtype.is_complex:
            if spec.dtype not in self._numbers:
                numbers = torch.rand(self._elements).add_(0.5).to(spec.dtype)
                self._numbers[spec.dtype] = numbers
            if self._next + elements > self._elements:
                self._next = 0
            memory = self._numbers[spec.dtype][self._next : self._next + elements]
            self._next += -(-elements // 16) * 16
            memory = memory.clone() if own else memory
        else:
            per_plane = max(prod(spec.shape[2:]), 1)
            memory = torch.arange(elements).remainder_(per_plane).mul_(places)
            memory = memory.div_(per_plane, rounding_mode="floor").to(spec.dtype)
        return memory.as_strided(spec.shape, spec.stride, memory.storage_offset())


def _extent(spec: TensorSpec) -> int:
    """Return the number of elements in memory from a tensor's first to its last, inclusive."""
    return 1 + sum((n - 1) * s for n, s in zip(spec.shape, spec.stride, strict=True))


def call_of(operator: LocalOperator, memory: Operands) -> Callable[[], object]:
    """Return a function that runs an operator once, on operands from `memory`.

    The first operand is copied to fresh memory, as if the previous operator of a step had just
    written it. All operands are copied if the operator writes to one of them.
    """
    _, name, overload = operator.name.split(".")
    function: Any = getattr(getattr(torch.ops.aten, name), overload)
    volume = any(len(spec.shape) == 5 for spec in operator.taken)
    compute = _OF_VOLUMES.get(operator.name, function) if volume else function
    places_of_maxima = "max_pool" in name and "backward" in name
    plane = prod(operator.arguments[1].shape[2:]) if places_of_maxima else 0
    operands: list[Tensor] = []

    def made(value: Any) -> Any:
        if isinstance(value, TensorSpec):
            own = is_mutable(function) or not operands
            operands.append(memory.tensor(value, plane, own=own))
            return operands[-1]
        return [made(part) for part in value] if isinstance(value, tuple) else value

    arguments = [made(value) for value in operator.arguments]
    keywords = {name: made(value) for name, value in operator.keywords}
    if "device" in keywords:
        keywords["device"] = "cpu"
    return lambda: compute(*arguments, **keywords)


def times_of(
    operators: Sequence[LocalOperator], memory: Operands, meet: Callable[[], object]
) -> list[float]:
    """Return the median seconds of each operator over several runs; `meet` waits for all processes.

    Operators run in turn, as in a step, so the caches do not hold their code and operands. Small
    operators then take up to 1.5 times as long as in a loop.
    """
    clock = time.perf_counter
    held: deque[tuple[int, object]] = deque()
    holding = 0
    times: list[list[float]] = [[] for _ in operators]
    for turn in range(-1, MOST):
        meet()
        for operator, taken in zip(operators, times, strict=True):
            if len(taken) >= FEWEST and sum(taken) > SECONDS:
                continue
            run = call_of(operator, memory)
            start = clock()
            result = run()
            seconds = clock() - start
            if turn >= 0:  # the first run is a warm-up
                taken.append(seconds)
            size = sum(made.nbytes for made in operator.made)
            held.append((size, result))
            holding += size
            del run, result
            while holding > _HELD:
                holding -= held.popleft()[0]
    return [median(taken) for taken in times]


def workspace_of(run: Callable[[], object]) -> int:
    """Return the peak bytes that an operator allocates while `run()` runs, without its results."""
    most, left = tensor_bytes(run)
    return max(most - max(left, 0), 0)


def tensor_bytes(run: Callable[[], object]) -> tuple[int, int]:
    """Return the peak bytes of tensors during `run()`, and the bytes of its results."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        result = run()
    del result
    changes = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = most = 0
    for change in sorted(changes, key=lambda e: e.start_ns()):
        live += change.nbytes()
        most = max(most, live)
    return most, live


def time_together(
    operators: list[LocalOperator],
    processes: int,
    threads: int,
    memory: int,
    environment: Mapping[str, str],
) -> tuple[list[float], list[int]]:
    """Time operators in several processes at once; return their seconds and their workspaces.

    A workspace is the bytes that an operator allocates beside its results. The `processes` are new
    ones with `threads` threads each and the variables of `environment`; a process sends no
    messages, and uses about `memory` bytes at most.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_OF_LAUNCHERS)}
    kept |= {**environment, "OMP_NUM_THREADS": str(threads)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "operators").write_bytes(pickle.dumps(operators))
        (folder / "counters").write_bytes(bytes(8 * processes))
        command = [sys.executable, "-m", "distconv.planning.operators", name]
        numbers = [map(str, (i, threads, memory)) for i in range(processes)]
        workers = [
            subprocess.Popen([*command, *each], env=kept, stderr=subprocess.PIPE)
            for each in numbers
        ]
        try:
            wait_for_all(workers)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        every = [pickle.loads((folder / f"times {i}").read_bytes()) for i in range(processes)]
    seconds = [sum(s) / processes for s in zip(*(times for times, _ in every), strict=True)]
    return seconds, every[0][1]


def wait_for_all(workers: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait until all processes have ended; raise RuntimeError as soon as one has failed.

    The processes wait for one another, so after a failure the others would never end.
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
                    f"a process that times local operators ended with status {worker.returncode}: "
                    f"{said.decode()[-2000:]}"
                )
            running.remove(worker)


def time_in_folder(folder: Path, number: int, threads: int, memory: int) -> None:
    """Time the operators in a folder, as process `number` of several, and write the times there.

    `time_together` has written the operators. `memory` is the bytes that the process may use.
    """
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    operators: list[LocalOperator] = pickle.loads((folder / "operators").read_bytes())
    # The process keeps this memory after it is freed.
    torch.empty(min(_HEAP, memory // 4), dtype=torch.uint8).fill_(0)
    operands = Operands(operators)
    with open(folder / "counters", "r+b") as file, mmap.mmap(file.fileno(), 0) as counters:
        turns = memoryview(counters).cast("q")

        def meet() -> None:
            turns[number] += 1
            while min(turns) < turns[number]:
                time.sleep(0)

        times = times_of(operators, operands, meet)
        turns.release()
    spaces = [workspace_of(call_of(o, operands)) if o.convolves else 0 for o in operators]
    (folder / f"times {number}").write_bytes(pickle.dumps((times, spaces)))


if __name__ == "__main__":
    time_in_folder(Path(sys.argv[1]), *map(int, sys.argv[2:5]))


_Kind: TypeAlias = tuple[Any, ...]
"""An operator's name and, for convolutions, the shape of its weights and its options. The times of
operators of one kind follow from their work."""

BUDGET = 30.0
"""Seconds for timing the operators of several steps, by default."""
_LEAST = 2**16
"""Operations or bytes below which an operator's time is treated as constant."""
_MEMORY = 2**30
"""Bytes of a rank's memory if the machine has no number."""
_PARTS = 16
"""An operator whose operands and results exceed 1 / `_PARTS` of a rank's memory is estimated,
because the process that times it holds many of them."""


class OperatorTimes:
    """The seconds of local operators, and the bytes that convolutions allocate beside results.

    `at_once` ranks of a node compute at the same time. `prepare` adds new times to the machine.
    """

    def __init__(self, machine: Machine, at_once: int):
        self._machine, self._at_once = machine, at_once
        self._known = machine.operators.setdefault(str(at_once), {})
        self._estimated: dict[str, tuple[float, int]] = {}
        """Seconds and workspace bytes of operators that are not timed, by key."""
        self._timed: defaultdict[_Kind, dict[str, LocalOperator]] = defaultdict(dict)
        """The timed operators, by kind and key, from which others are estimated."""

    def __getitem__(self, operator: LocalOperator) -> float:
        """Return the seconds of an operator that was passed to `prepare` before."""
        if self._machine.roofline is not None:
            return roofline_seconds(operator, self._machine.roofline)
        key = operator.key
        return self._known[key] if key in self._known else self._estimated[key][0]

    def workspace(self, operator: LocalOperator) -> int:
        """Return the bytes that an operator allocates beside its results; 0 if unknown."""
        spaces, key = self._machine.workspaces, operator.key
        return spaces[key] if key in spaces else self._estimated.get(key, (0.0, 0))[1]

    def prepare(self, operators: Iterable[LocalOperator]) -> None:
        """Time the operators that have no time in the machine yet."""
        missing = {o.key: o for o in operators if o.key not in self._known}
        if not missing or self._machine.roofline is not None:
            return
        machine = self._machine
        settings = machine.threads, machine.memory or _MEMORY, machine.environment
        times, spaces = time_together(list(missing.values()), self._at_once, *settings)
        self._known.update(zip(missing, times, strict=True))
        machine.workspaces.update((k, n) for k, n in zip(missing, spaces, strict=True) if n)

    def prepare_approximately(
        self,
        steps: Sequence[Mapping[LocalOperator, int]],
        progress: Callable[[str], object] = lambda what: None,
        seconds: float = BUDGET,
    ) -> None:
        """Time the operators of `steps`, or a selection in about `seconds`, and estimate the rest.

        Operators too large for the memory are never selected. The time of an operator that is not
        selected is interpolated by size between timed operators of the same kind, or is in
        proportion to the size beyond the largest one. Two operators are of one kind if they have
        the same name and, for convolutions, weights of one shape and the same options; the size of
        an operator is the number of its operations or its bytes, whichever is larger. A kind
        without any timed operator is estimated from other kinds, of the same name if possible.

        Parameters
        ----------
        steps: for each step, its operators with the number of calls.
        progress: called with a text on the number of operators that are timed.
        """
        if self._machine.roofline is not None:
            return
        every = {o.key: o for step in steps for o in step}
        for key, o in every.items():
            if key in self._known:
                self._timed[_kind(o)][key] = o
        every = {key: o for key, o in every.items() if key not in self._known}
        largest = self._machine.memory // _PARTS if self._machine.memory else sys.maxsize
        few = sum(map(_cost, every.values())) <= seconds
        if few and all(o.nbytes <= largest for o in every.values()):
            progress(f"{len(every)} local operators are timed")
            self.prepare(every.values())
            return
        kinds: dict[_Kind, list[LocalOperator]] = defaultdict(list)
        for o in sorted(every.values(), key=_work):
            kinds[_kind(o)].append(o)
        fitting = {k: [o for o in os if o.nbytes <= largest] for k, os in kinds.items()}
        for step in range(4):  # the smallest ones first, and kinds with the most operators
            for kind, operators in sorted(fitting.items(), key=lambda item: -len(item[1])):
                if operators:
                    o = operators[round(step * (len(operators) - 1) / 3)]
                    if o.key not in self._timed[kind] and _cost(o) <= seconds:
                        seconds -= _cost(o)
                        self._timed[kind][o.key] = o
        for kind, operators in fitting.items():
            alone = not any(timed for k, timed in self._timed.items() if k[0] == kind[0])
            if alone and operators:
                self._timed[kind][operators[0].key] = operators[0]
        timed = [o for each in self._timed.values() for o in each.values()]
        missing = [o for o in timed if o.key not in self._known]
        progress(f"{len(missing)} of {len(every)} local operators are timed")
        self.prepare(missing)
        for kind, operators in kinds.items():
            same_name = [o for o in timed if o.name == kind[0]]
            known = list(self._timed[kind].values()) or same_name or timed or operators[:1]
            self.prepare(known)
            seconds_of = _curve({_work(o): self._known[o.key] for o in known})
            space_of = _curve({_work(o): self.workspace(o) for o in known})
            for o in operators:
                self._estimated[o.key] = seconds_of(_work(o)), round(space_of(_work(o)))


def _curve(known: Mapping[float, float]) -> Callable[[float], float]:
    """Return a function that estimates the value for any size from `known` values by size.

    Values are interpolated. Beyond the largest size, or from a single point, the value is in
    proportion to the size.
    """
    sizes, values = zip(*sorted(known.items()), strict=True)
    curve = Table(sizes, values)

    def at(size: float) -> float:
        if len(sizes) > 1 and size <= sizes[-1]:
            return curve.at(size)
        return float(values[-1] * max(size / sizes[-1], 1e-3))

    return at


def _work(operator: LocalOperator) -> float:
    return float(max(flops_of(operator), operator.nbytes, _LEAST))


def _cost(operator: LocalOperator) -> float:
    """Estimate the seconds that timing an operator takes."""
    once = max(flops_of(operator) / 3e10, operator.nbytes / 5e9, 1e-5)
    return 0.002 + once * (2 + min(max(SECONDS / once, FEWEST), MOST))


def _kind(operator: LocalOperator) -> _Kind:
    if not operator.convolves:
        return (operator.name,)
    weight = operator.arguments[2 if "backward" in operator.name else 1]
    return operator.name, weight.shape, operator.arguments[-7:]


@lru_cache(maxsize=65536)
def flops_of(operator: LocalOperator) -> int:
    """Return the number of floating-point operations of an operator; a multiply-add counts as two.

    Operators other than convolutions and matrix products count one operation for each element of
    their largest tensor.
    """
    # Not at the top, as it imports Triton where that is installed.
    from torch.utils.flop_counter import flop_registry

    count = flop_registry.get(getattr(torch.ops.aten, operator.name.split(".")[1]))
    if count is None:
        return max((prod(t.shape) for t in (*operator.taken, *operator.made)), default=0)
    made = _like(operator.made)
    if operator.name.startswith("aten.convolution_backward"):
        # None for gradients that were not requested.
        remaining = iter(made)
        made = [next(remaining, None) if wanted else None for wanted in operator.arguments[-1]]
    result = made[0] if len(made) == 1 else tuple(made)
    keywords = {k: _like(v) for k, v in operator.keywords}
    return int(count(*_like(operator.arguments), **keywords, out_val=result))


def roofline_seconds(operator: LocalOperator, device: Roofline) -> float:
    """Return the seconds of an operator on a described device.

    The longer of arithmetic and memory traffic counts, at the efficiency that operators of this
    name reach.
    """
    tensors = [*operator.taken, *operator.made]
    kind = str(tensors[0].dtype).removeprefix("torch.") if tensors else "float32"
    rate = device.flops.get(kind, device.flops["float32"])
    chosen = [part for part in device.efficiency if part and operator.name.startswith(part)]
    reached = device.efficiency[max(chosen, key=len, default="")]
    longest = max(flops_of(operator) / rate, operator.nbytes / device.bandwidth)
    return max(longest / reached, device.smallest)


def _like(value: Any) -> Any:
    """Return `value` with empty meta tensors in place of `TensorSpec`s, and lists for tuples."""
    if isinstance(value, TensorSpec):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return [_like(part) for part in value] if isinstance(value, tuple) else value
