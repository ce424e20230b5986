"""Traced steps as a straight line of calls, and as a Python function that makes these calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from distconv.torch_private import Operator, is_mutable


@dataclass(frozen=True, slots=True)
class Value:
    """A placeholder in a traced step for an input, or a tensor or request that a call makes."""

    number: int


@dataclass(frozen=True, slots=True)
class Existing:
    """A placeholder in a traced step for a tensor that existed before the step, as parameters do.

    Calls may write to the tensor.
    """

    number: int


@dataclass(frozen=True)
class TracedCall:
    """One call in a traced step.

    Attributes
    ----------
    function: a function of torch's dispatcher, or one of the module `trace`, which sends or waits.
    arguments, options: its arguments, with `Value` and `Existing` in place of tensors.
    results: the number of the `Value` that is its result, or a tuple of numbers for several
        results; None stands for a result that is no new tensor.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)
    results: int | tuple[int | None, ...] | None = None

    @property
    def made(self) -> tuple[int, ...]:
        """Return the numbers of the values that the call makes."""
        results = self.results if isinstance(self.results, tuple) else (self.results,)
        return tuple(n for n in results if n is not None)

    @property
    def used(self) -> Iterator[Value | Existing]:
        """Yield the values and constants among the call's arguments."""
        return _within((self.arguments, self.options))

    @property
    def is_pure(self) -> bool:
        """Return whether the call writes to no tensor, and makes the same values each time."""
        if not isinstance(self.function, Operator):
            return False
        random = torch.Tag.nondeterministic_seeded in self.function.tags
        return not (random or is_mutable(self.function))


def _within(argument: Any) -> Iterator[Value | Existing]:
    if isinstance(argument, (Value, Existing)):
        yield argument
    elif isinstance(argument, (tuple, list)):
        for x in argument:
            yield from _within(x)
    elif isinstance(argument, dict):
        yield from _within(tuple(argument.values()))


@dataclass(frozen=True)
class TracedStep:
    """The calls of a traced step, from its inputs to its results.

    Attributes
    ----------
    inputs: the numbers of the `Value`s that are the step's inputs.
    constants: the tensors that `Existing` stands for, by number.
    """

    inputs: Sequence[int]
    calls: Sequence[TracedCall]
    results: Sequence[Value | Existing | None]
    constants: Mapping[int, Tensor]

    def reduced(self) -> TracedStep:
        """Return the step without calls that only make unused values.

        Values and constants are numbered anew, in the order in which they appear.
        """
        kept, live = [], {x.number for x in self.results if isinstance(x, Value)}
        for call in reversed(self.calls):
            if call.is_pure and live.isdisjoint(call.made):
                continue
            live.update(x.number for x in call.used if isinstance(x, Value))
            kept.append(call)
        numbering = _Numbering()
        inputs = [numbering.value(n) for n in self.inputs]
        calls = [numbering.call(call) for call in reversed(kept)]
        results = numbering.argument(tuple(self.results))
        constants = {new: self.constants[old] for old, new in numbering.constants.items()}
        return TracedStep(inputs, calls, results, constants)


class _Numbering:
    """New numbers for values and constants of a step, in the order in which they appear."""

    def __init__(self) -> None:
        self.values: dict[int, int] = {}
        self.constants: dict[int, int] = {}

    def value(self, number: int) -> int:
        return self.values.setdefault(number, len(self.values))

    def argument(self, x: Any) -> Any:
        if isinstance(x, Value):
            return Value(self.value(x.number))
        if isinstance(x, Existing):
            return Existing(self.constants.setdefault(x.number, len(self.constants)))
        if type(x) in (list, tuple):
            return type(x)(map(self.argument, x))
        return x

    def call(self, call: TracedCall) -> TracedCall:
        arguments = self.argument(call.arguments)
        options = {name: self.argument(x) for name, x in call.options.items()}
        results: Any = call.results
        if isinstance(results, int):
            results = self.value(results)
        elif results is not None:
            results = tuple(None if n is None else self.value(n) for n in results)
        return TracedCall(call.function, arguments, options, results)


class Program:
    """A Python function that makes the calls of a step, and frees each value after its last use.

    Attributes
    ----------
    source: the source of the function.
    run: the function of the step's inputs; it returns the results.
    """

    def __init__(self, step: TracedStep) -> None:
        self._names: dict[str, Any] = {f"c{n}": x for n, x in step.constants.items()}
        self._known: dict[int, str] = {}
        """The names of objects other than tensors, by their ids."""
        ends = self._ends(step)
        lines = [f"def step({', '.join(f'v{n}' for n in step.inputs)}):"]
        for call, over in zip(step.calls, ends, strict=True):
            lines.append(f"    {self._line(call)}")
            if over:
                lines.append(f"    {' = '.join(f'v{n}' for n in over)} = None")
        lines.append(f"    return {self._spelled(tuple(step.results))}")
        self.source = "\n".join(lines) + "\n"
        exec(compile(self.source, "<a step that distconv has traced>", "exec"), self._names)
        self.run: Callable[..., tuple[Tensor, ...]] = self._names["step"]

    @staticmethod
    def _ends(step: TracedStep) -> list[list[int]]:
        """Return, for each call, the numbers of the values whose last use it is."""
        last = dict.fromkeys(step.inputs, -1)
        for i, call in enumerate(step.calls):
            last |= dict.fromkeys(call.made, i)
            last |= {x.number: i for x in call.used if isinstance(x, Value)}
        ends: list[list[int]] = [[] for _ in step.calls]
        returned = {x.number for x in step.results if isinstance(x, Value)}
        for number, i in last.items():
            if i >= 0 and number not in returned:
                ends[i].append(number)
        return ends

    def _line(self, call: TracedCall) -> str:
        arguments = [*map(self._spelled, call.arguments)]
        arguments += [f"{name}={self._spelled(x)}" for name, x in call.options.items()]
        line = f"{self._named(call.function)}({', '.join(arguments)})"
        if isinstance(call.results, tuple) and call.made:
            targets = ("_" if n is None else f"v{n}" for n in call.results)
            return f"{', '.join(targets)}, = {line}"
        return f"v{call.results} = {line}" if isinstance(call.results, int) else line

    def _spelled(self, x: Any) -> str:
        if isinstance(x, Value):
            return f"v{x.number}"
        if isinstance(x, Existing):
            return f"c{x.number}"
        if isinstance(x, list):
            return f"[{', '.join(map(self._spelled, x))}]"
        if type(x) is tuple:
            return f"({''.join(f'{self._spelled(y)}, ' for y in x)})"
        if x is None or type(x) in (int, bool, str):
            return repr(x)
        return self._named(x)

    def _named(self, x: Any) -> str:
        """Return the global name of an object in the function's source."""
        if id(x) not in self._known:
            words = getattr(x, "__name__", "").replace(".", "_")
            name = f"{words if words.isidentifier() else 'x'}_{len(self._known)}"
            self._known[id(x)], self._names[name] = name, x
        return self._known[id(x)]
