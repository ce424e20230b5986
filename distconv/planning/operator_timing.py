"""Timing of local operators as they run in a step, by several processes at the same time.

`time_together` writes the operators to a folder, starts `python -m
distconv.planning.operator_timing FOLDER NUMBER PROCESSES THREADS MEMORY` for each process, and
reads the times from the folder.
"""

from __future__ import annotations

import mmap
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from distconv.ops.conv.volumes import convolution, convolution_gradients
from distconv.planning.recording import LocalOperator, TensorSpec
from distconv.torch_private import is_mutable

_POOL = 2**24
"""Elements of the memory from which operands are taken in turn, so large that an operand has left
the caches when it is used again, as in a step."""

SECONDS = 0.02
"""Approximate seconds of timing for one operator, after its first runs."""
FEWEST, MOST = 3, 12
"""The smallest and largest number of timed runs, after the first ones."""

_HELD = 2**26
"""Bytes of results that are kept, as a step keeps activations, before the oldest are freed."""

_HEAP = 2**30
"""Bytes that a process touches before timing; at most a quarter of its memory."""

_OF_LAUNCHERS = ("PMI_", "PMIX_", "OMPI_", "SLURM_", "MPI_", "HYDRA_", "RANK", "WORLD_SIZE")

_OF_VOLUMES: dict[str, Callable[..., object]] = {
    "aten.convolution.default": convolution,
    "aten.convolution_backward.default": convolution_gradients,
}
"""distconv's implementations of operators on volumes."""


class Operands:
    """A pool of memory from which the operands of timed operators are taken in turn.

    The pool is large enough for the operands of any one of `operators`. The first operand of an
    operator is copied to fresh memory, so it does not stay in the pool.
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
        copied to fresh memory. Integers are indices from 0 below `places`, the size of the plane
        that they index.
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

    The first operand is copied to fresh memory, as if the operator before it in a step had just
    written it; if the operator writes to one of its operands, all operands are copied.
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

    Operators take turns, as in a step: each finds its code and its operands outside the caches,
    which makes small ones take up to half as long again as in a loop.
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
            if turn >= 0:  # the first run fills the caches of the others
                taken.append(seconds)
            size = sum(made.nbytes for made in operator.made)
            held.append((size, result))
            holding += size
            del run, result
            while holding > _HELD:
                holding -= held.popleft()[0]
    return [median(taken) for taken in times]


def workspace_of(run: Callable[[], object]) -> int:
    """Return the most bytes that an operator allocates at any moment beside its results."""
    most, left = tensor_bytes(run)
    return max(most - max(left, 0), 0)


def tensor_bytes(run: Callable[[], object]) -> tuple[int, int]:
    """Return the most bytes of tensors at any moment of a call, and the bytes of its results."""
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

    A workspace is the bytes that an operator allocates beside its results. Every process is new,
    and has the variables of `environment`; it sends no messages, and uses about `memory` bytes at
    most.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_OF_LAUNCHERS)}
    kept |= {**environment, "OMP_NUM_THREADS": str(threads)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "operators").write_bytes(pickle.dumps(operators))
        (folder / "counters").write_bytes(bytes(8 * processes))
        command = [sys.executable, "-m", "distconv.planning.operator_timing", name]
        numbers = [map(str, (i, processes, threads, memory)) for i in range(processes)]
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

    The processes wait for one another, so that after a failure the others would never end.
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


def time_in_folder(folder: Path, number: int, processes: int, threads: int, memory: int) -> None:
    """Time the operators that `time_together` wrote to a folder, in process `number` of several."""
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    operators: list[LocalOperator] = pickle.loads((folder / "operators").read_bytes())
    # Memory that the process has from now on.
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
    time_in_folder(Path(sys.argv[1]), *map(int, sys.argv[2:6]))
