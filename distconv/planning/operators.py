"""`OperatorTimes`: the seconds of local operators, timed on this machine or by a roofline.

They are timed as in a step: under the machine's allocator settings, on memory that the process
already has, and by one process for each rank of a node at the same time.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any, TypeAlias

import torch

from distconv.planning.machine import Machine, Roofline, Table
from distconv.planning.operator_timing import FEWEST, MOST, SECONDS, time_together
from distconv.planning.recording import LocalOperator, TensorSpec

_Kind: TypeAlias = tuple[Any, ...]
"""An operator's name and weights: times of one kind are proportional to their work."""

BUDGET = 30.0
"""Seconds for timing the operators of some steps, by default."""
_LEAST = 2**16
"""Operations or bytes below which an operator's time is taken as constant."""
_MEMORY = 2**30
"""Bytes of a rank's memory where the machine does not say."""
_PARTS = 16
"""An operator whose operands and results take more than this fraction (1 / `_PARTS`) of a rank's
memory is estimated, as the process that times it holds many of them."""


class OperatorTimes:
    """The seconds of local operators, and the bytes that convolutions allocate beside results.

    `at_once` ranks of a node compute at the same time. `prepare` adds new times to the machine.
    """

    def __init__(self, machine: Machine, at_once: int):
        self._machine, self._at_once = machine, at_once
        self._known = machine.operators.setdefault(str(at_once), {})
        self._estimated: dict[str, tuple[float, int]] = {}
        """Seconds and workspaces by key."""
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
        """Time the operators of some steps, or a selection that takes at most about `seconds`.

        The selection leaves out operators too large for the memory. The time of an operator that is
        left out is estimated from timed operators of its kind, between their sizes, or in
        proportion beyond the largest one. Two operators are of one kind if they have the same name
        and, for convolutions, weights of one shape and the same options; the size of an operator is
        the number of its operations or its bytes, whichever is larger. A kind without any timed
        operator is estimated from other kinds, of the same name if possible.

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
    """Return a function through known points, which estimates the value for any size.

    `known` has values by size. Beyond the largest size the value grows in proportion to the size.
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
    """Return the floating-point operations of an operator: multiplication and addition are two.

    Operators other than convolutions and matrix products count one for each element.
    """
    # Not at the top, as it imports Triton where that is installed.
    from torch.utils.flop_counter import flop_registry

    count = flop_registry.get(getattr(torch.ops.aten, operator.name.split(".")[1]))
    if count is None:
        return max((prod(t.shape) for t in (*operator.taken, *operator.made)), default=0)
    made = _like(operator.made)
    if operator.name.startswith("aten.convolution_backward"):
        # None for the gradients that were not asked for.
        remaining = iter(made)
        made = [next(remaining, None) if wanted else None for wanted in operator.arguments[-1]]
    result = made[0] if len(made) == 1 else tuple(made)
    keywords = {k: _like(v) for k, v in operator.keywords}
    return int(count(*_like(operator.arguments), **keywords, out_val=result))


def roofline_seconds(operator: LocalOperator, device: Roofline) -> float:
    """Return the seconds of an operator: the longer of its arithmetic and its memory traffic."""
    tensors = [*operator.taken, *operator.made]
    kind = str(tensors[0].dtype).removeprefix("torch.") if tensors else "float32"
    rate = device.flops.get(kind, device.flops["float32"])
    chosen = [part for part in device.efficiency if part and operator.name.startswith(part)]
    reached = device.efficiency[max(chosen, key=len, default="")]
    longest = max(flops_of(operator) / rate, operator.nbytes / device.bandwidth)
    return max(longest / reached, device.smallest)


def _like(value: Any) -> Any:
    """Return arguments with an empty meta tensor in place of each `TensorSpec`."""
    if isinstance(value, TensorSpec):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return [_like(part) for part in value] if isinstance(value, tuple) else value
