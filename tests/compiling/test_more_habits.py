"""Further ways to keep a setting, as a table: compiled functions use the present values.

Each line has a function that makes the object with the setting, one that reads it within the
program, and one that sets it between calls.
"""

from __future__ import annotations

import argparse
import array
import bisect
import collections
import configparser
import contextlib
import copy
import ctypes
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import inspect
import itertools
import logging
import math
import operator
import os
import queue
import random
import statistics
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import distconv as dc
from tests.compiling.test_compile import identical
from tests.compiling.test_habits import Network, run
from tests.support.serial import told_once


class Setting:
    """An object with an attribute."""

    w: float = 1.0

    def __init__(self, w: float = 1.0) -> None:
        self.w = w

    def read(self) -> float:
        """Return the setting."""
        return self.w


def settings() -> Any:
    """Return an object with an attribute, of a kind without code of its own."""
    return SimpleNamespace(w=1.0)


def referred() -> Any:
    """Return an object to which weak references refer."""
    s = SimpleNamespace(of=Setting())
    s.weak, s.proxy = weakref.ref(s.of), weakref.proxy(s.of)
    s.by_name, s.by_object = (
        weakref.WeakValueDictionary(a=s.of),
        weakref.WeakKeyDictionary({s.of: 1.0}),
    )
    return s


def fresh(**attributes: Any) -> Any:
    """Return a class of its own with these attributes."""
    return type("Fresh", (), attributes)


class Attributes(dict):  # type: ignore[type-arg]
    """A dictionary whose keys are attributes."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__  # type: ignore[assignment]


class Defaulting(dict):  # type: ignore[type-arg]
    """A dictionary with a value for keys that it lacks."""

    def __missing__(self, key: str) -> float:
        return 1.0


class Tree:
    """A node of a configuration, as OmegaConf has it."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.__dict__["_content"] = content

    def __getattr__(self, name: str) -> Any:
        content = self.__dict__["_content"]
        if name not in content:
            raise AttributeError(name)
        found = content[name]
        return Tree(found) if isinstance(found, dict) else found

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__["_content"][name] = value


class Described:
    """A descriptor."""

    w = 1.0

    def __get__(self, of: Any, kind: type | None = None) -> float:
        return self.w

    def __set__(self, of: Any, value: float) -> None:
        self.w = value


class Remembering(Setting):
    """Keeps what it has computed."""

    @functools.cached_property
    def kept(self) -> float:
        return self.w

    @functools.lru_cache  # noqa: B019
    def cached(self) -> float:
        """Return the setting of the first call."""
        return self.w


@dataclasses.dataclass
class Recipe:
    """A dataclass."""

    w: float = 1.0
    stages: list[float] = dataclasses.field(default_factory=lambda: [1.0])


class Stage(enum.Enum):
    """Stages of a curriculum."""

    FIRST, SECOND, THIRD = 1.0, 0.5, 2.0


class Flags(enum.Flag):
    """Choices."""

    NONE, LARGE = 0, 1


class One:
    """There is one object of this class."""

    one: Any = None

    def __new__(cls) -> Any:
        if cls.one is None:
            cls.one = super().__new__(cls)
            cls.one.w = 1.0
        return cls.one


class Shared:
    """All objects have the same attributes."""

    state: dict[str, Any] = {"w": 1.0}  # noqa: RUF012

    def __init__(self) -> None:
        self.__dict__ = Shared.state


@contextlib.contextmanager
def at_half(s: Any) -> Iterator[None]:
    """Let a setting have half its value."""
    s.w /= 2
    try:
        yield
    finally:
        s.w *= 2


def within_a_context(s: Any) -> float:
    """Read a setting in a context that changes it."""
    with at_half(s):
        return s.w  # type: ignore[no-any-return]


def or_three(s: Any) -> Any:
    """Return an item, or 3 without it."""
    try:
        return s["w"]
    except KeyError:
        return 3.0


def attribute_or_three(s: Any) -> Any:
    """Return an attribute, or 3 without it."""
    try:
        return s.w
    except AttributeError:
        return 3.0


def matched(s: Any) -> Any:
    """Read a setting by a pattern."""
    match s:
        case {"kind": "a", "w": w}:
            return w
    return 3.0


def trainer() -> Any:
    """Return an optimizer and its schedule."""
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(1))], lr=1.0)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: epoch + 1.0)
    return SimpleNamespace(optimizer=optimizer, rate=rate)


def steps(s: Any, value: float) -> None:
    """Let an optimizer and its schedule step."""
    s.optimizer.step()
    s.rate.step()


def closure() -> Any:
    """Return a function with a variable of the function around it."""
    w = 1.0
    return lambda: w


def w(s: Any, value: float) -> None:
    """Set the attribute."""
    s.w = value


def item(s: Any, value: float) -> None:
    """Set the item."""
    s["w"] = value


def first(s: Any, value: float) -> None:
    """Set the first item."""
    s[0] = value


def only_later(change: Callable[[Any, float], object]) -> Callable[[Any, float], object]:
    """Return a function that makes a change for other values than 1."""
    return lambda s, value: change(s, value) if value != 1 else None


def environment(s: Any, value: float) -> None:
    """Set or delete a variable."""
    if value == 0.5:
        os.environ["DISTCONV_TEST_LARGE"] = "1"
    else:
        os.environ.pop("DISTCONV_TEST_LARGE", None)


def parsed() -> Any:
    """Return a parsed file of settings."""
    found = configparser.ConfigParser()
    found.read_string("[a]\nw=1.0")
    return found


def names(s: Any, value: float) -> None:
    """Choose another name."""
    s.name = "b" if value == 0.5 else "a"


Kind = tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any, float], object]]

KINDS: dict[str, Kind] = {
    # objects and classes
    "weak reference": (referred, lambda s: s.weak().w, lambda s, v: w(s.of, v)),
    "weak values": (referred, lambda s: s.by_name["a"].w, lambda s, v: w(s.of, v)),
    "weak keys": (
        referred,
        lambda s: s.by_object[s.of],
        lambda s, v: s.by_object.update({s.of: v}),
    ),
    "proxy": (referred, lambda s: s.proxy.w, lambda s, v: w(s.of, v)),
    "dead reference": (
        referred,
        lambda s: 2.0 if s.weak() is None else 1.0,
        lambda s, v: s.__dict__.pop("of", None) if v == 0.5 else None,
    ),
    "class of an object": (lambda: fresh(w=1.0)(), lambda s: type(s).w, lambda s, v: w(type(s), v)),
    "class method": (lambda: fresh(w=1.0, r=classmethod(lambda c: c.w)), lambda s: s.r(), w),
    "another static method": (
        lambda: fresh(r=staticmethod(lambda: 1.0)),
        lambda s: s.r(),
        lambda s, v: setattr(s, "r", staticmethod(lambda: v)),
    ),
    "another property": (
        lambda: fresh(w=property(lambda self: 1.0))(),
        lambda s: s.w,
        lambda s, v: setattr(type(s), "w", property(lambda self: v)),
    ),
    "descriptor": (lambda: fresh(w=Described())(), lambda s: s.w, w),
    "counter of a class": (
        lambda: fresh(count=1),
        lambda s: s.count,
        only_later(lambda s, v: setattr(s, "count", s.count + 1)),
    ),
    "another class": (
        lambda: SimpleNamespace(of=fresh(w=1.0)()),
        lambda s: s.of.w,
        lambda s, v: setattr(s.of, "__class__", fresh(w=v)),
    ),
    "attribute that goes": (
        lambda: fresh(w=2.0)(),
        lambda s: s.w,
        lambda s, v: w(s, v) if v == 1 else s.__dict__.pop("w", None),
    ),
    "attribute that a handler misses": (fresh(), attribute_or_three, only_later(w)),
    "one object": (One, lambda s: One().w, w),
    "shared state": (Shared, lambda s: Shared().w, lambda s, v: item(Shared.state, v)),
    "configuration tree": (
        lambda: Tree({"a": {"b": {"w": 1.0}}}),
        lambda s: s.a.b.w,
        lambda s, v: w(s.a.b, v),
    ),
    "missing node": (
        lambda: Tree({"a": {}}),
        lambda s: getattr(s.a, "w", 1.0),
        only_later(lambda s, v: w(s.a, v)),
    ),
    "cached property": (
        Remembering,
        lambda s: s.kept,
        lambda s, v: (w(s, v), s.__dict__.pop("kept", None) if v == 2 else None),
    ),
    "cached method": (Remembering, lambda s: s.cached(), w),
    "bound method": (
        lambda: (lambda of: SimpleNamespace(of=of, read=of.read))(Setting()),
        lambda s: s.read(),
        lambda s, v: w(s.of, v),
    ),
    "method by name": (Setting, operator.methodcaller("read"), w),
    "static lookup": (Setting, lambda s: inspect.getattr_static(s, "w"), w),
    "copy": (Setting, lambda s: copy.copy(s).w, w),
    "deep copy": (
        lambda: {"w": [1.0]},
        lambda s: copy.deepcopy(s)["w"][0],
        lambda s, v: item(s, [v]),
    ),
    "fields of a dataclass": (
        Recipe,
        lambda s: [getattr(s, field.name) for field in dataclasses.fields(s)][0],
        w,
    ),
    "dataclass as a dictionary": (Recipe, lambda s: dataclasses.asdict(s)["w"], w),
    "list of a dataclass": (Recipe, lambda s: s.stages[0], lambda s, v: first(s.stages, v)),
    "name that changes": (
        lambda: SimpleNamespace(a=1.0, b=2.0, name="a"),
        lambda s: getattr(s, s.name),
        names,
    ),
    "stage": (
        lambda: SimpleNamespace(w=Stage.FIRST),
        lambda s: 2.0 if s.w is Stage.SECOND else 1.0,
        lambda s, v: w(s, Stage(v)),  # type: ignore[arg-type]
    ),
    "flags": (
        lambda: SimpleNamespace(w=Flags.NONE),
        lambda s: 2.0 if Flags.LARGE in s.w else 1.0,
        lambda s, v: setattr(s, "w", Flags.LARGE if v == 0.5 else Flags.NONE),
    ),
    # dictionaries, lists and sets
    "keys as attributes": (lambda: Attributes(w=1.0), lambda s: s.w, w),
    "missing key of a subclass": (Defaulting, lambda s: s["w"], only_later(item)),
    "missing key": (dict, lambda s: s.get("w", 1.0), only_later(item)),
    "key that a handler misses": (dict, or_three, only_later(item)),
    "key in a dictionary": (
        dict,
        lambda s: 2.0 if "w" in s else 1.0,
        lambda s, v: item(s, v) if v == 0.5 else s.clear(),
    ),
    "order of keys": (
        lambda: {"a": 1.0, "b": 2.0},
        lambda s: next(iter(s.values())),
        lambda s, v: s.update(a=s.pop("a")) if v == 0.5 else None,
    ),
    "ordered dictionary": (
        lambda: collections.OrderedDict(a=1.0, b=2.0),
        lambda s: next(iter(s.values())),
        lambda s, v: s.move_to_end("a" if v == 0.5 else "b"),
    ),
    "user dictionary": (lambda: collections.UserDict(w=1.0), lambda s: s["w"], item),
    "pattern": (
        lambda: {"kind": "a", "w": 1.0},
        matched,
        lambda s, v: s.update(w=v, kind="b" if v == 2 else "a"),
    ),
    "sum of a list": (lambda: [1.0, 1.0], sum, first),
    "largest of objects": (
        lambda: [Setting(), Setting(0.1)],
        lambda s: max(map(Setting.read, s)),
        lambda s, v: w(s[0], v),
    ),
    "list in a tuple in a list": (
        lambda: [([1.0],)],
        lambda s: s[0][0][0],
        lambda s, v: first(s[0][0], v),
    ),
    "list in a tuple": (
        lambda: SimpleNamespace(of=([1.0],)),
        lambda s: s.of[0][0],
        lambda s, v: first(s.of[0], v),
    ),
    "set in a tuple": (lambda: ({1.0}, 2), lambda s: sum(s[0]), lambda s, v: s[0].add(v)),
    "subclass of a list": (lambda: type("L", (list,), {})([1.0]), lambda s: s[0], first),
    "chain of lists": (
        lambda: [[1.0], [2.0]],
        lambda s: sum(itertools.chain(*s)),
        lambda s, v: first(s[0], v),
    ),
    "mean of a deque": (
        lambda: collections.deque([1.0] * 3, 3),
        lambda s: sum(s) / len(s),
        lambda s, v: s.append(v),
    ),
    "queue": (
        queue.Queue,
        lambda s: s.queue[0] if s.queue else 1.0,
        lambda s, v: (s.queue.clear(), s.put(v)),
    ),
    # schedules and annealing
    "milestones": (
        lambda: SimpleNamespace(at=[0.7, 1.5], w=1.0),
        lambda s: 1.0 + bisect.bisect_right(s.at, s.w),
        w,
    ),
    "cosine": (settings, lambda s: math.cos(math.pi * s.w / 9), w),
    "mean": (lambda: [1.0, 1.0], statistics.mean, first),
    "interpolated": (settings, lambda s: float(np.interp(s.w, [0, 3], [0, 9])), w),
    "another schedule": (
        lambda: SimpleNamespace(of=lambda: 1.0),
        lambda s: s.of(),
        lambda s, v: setattr(s, "of", lambda: v),
    ),
    "last rate": (trainer, lambda s: s.rate.get_last_lr()[0], steps),
    "epoch": (trainer, lambda s: 1.0 + s.rate.last_epoch, steps),
    "momentum": (
        trainer,
        lambda s: s.optimizer.param_groups[-1]["betas"][0],
        lambda s, v: s.optimizer.param_groups[-1].update(betas=(v, 0.9)),
    ),
    "temporary setting": (settings, within_a_context, w),
    # numbers
    "array without dimensions": (lambda: np.array(1.0), float, lambda s, v: s.fill(v)),
    "item of an array": (lambda: np.ones(3), lambda s: s[1].item(), lambda s, v: s.fill(v)),
    "shape of an array": (
        lambda: SimpleNamespace(of=np.ones(2)),
        lambda s: float(s.of.shape[0]),
        lambda s, v: setattr(s, "of", np.ones(int(v * 2))),
    ),
    "table of a schedule": (
        lambda: SimpleNamespace(table=np.linspace(1, 2, 9), w=0),
        lambda s: s.table[s.w],
        lambda s, v: w(s, int(v * 2)),
    ),
    "integer of numpy": (
        lambda: SimpleNamespace(w=np.int32(1)),
        lambda s: s.w,
        lambda s, v: setattr(s, "w", np.int32(v * 2)),
    ),
    "array of Python": (lambda: array.array("d", [1.0]), lambda s: s[0], first),
    "number of C": (
        lambda: ctypes.c_double(1.0),
        lambda s: s.value,
        lambda s, v: setattr(s, "value", v),
    ),
    "fraction": (
        lambda: SimpleNamespace(w=fractions.Fraction(1)),
        lambda s: float(s.w),
        lambda s, v: setattr(s, "w", fractions.Fraction(v)),
    ),
    "decimal": (
        lambda: SimpleNamespace(w=decimal.Decimal(1)),
        lambda s: float(s.w),
        lambda s, v: setattr(s, "w", decimal.Decimal(v)),
    ),
    "time": (
        lambda: SimpleNamespace(w=datetime.timedelta(seconds=1)),
        lambda s: s.w.total_seconds(),
        lambda s, v: setattr(s, "w", datetime.timedelta(seconds=v)),
    ),
    "formatted number": (settings, lambda s: float(f"{s.w:.2f}"), w),
    "no number": (
        settings,
        lambda s: 1.0 if s.w != s.w else 2.0,
        lambda s, v: w(s, math.nan if v < 1 else v),
    ),
    "number as a tensor": (
        lambda: SimpleNamespace(of=torch.ones(())),
        lambda s: float(s.of),
        lambda s, v: s.of.fill_(v),
    ),
    "condition on a tensor": (
        lambda: SimpleNamespace(of=torch.ones(())),
        lambda s: 2.0 if s.of > 0.7 else 1.0,
        lambda s, v: s.of.fill_(v),
    ),
    "type of a tensor": (
        lambda: SimpleNamespace(of=torch.ones(1)),
        lambda s: 2.0 if s.of.dtype == torch.float64 else 1.0,
        lambda s, v: setattr(
            s, "of", torch.ones(1).to(torch.float64 if v == 0.5 else torch.float32)
        ),
    ),
    "attribute of a tensor": (
        lambda: SimpleNamespace(of=torch.ones(1)),
        lambda s: getattr(s.of, "w", 1.0),
        only_later(lambda s, v: w(s.of, v)),
    ),
    # random numbers
    "generator of torch": (
        lambda: torch.Generator().manual_seed(0),
        lambda s: torch.rand(1, generator=s),
        lambda s, v: s.manual_seed(int(v * 2)),
    ),
    "generator of Python": (lambda: random.Random(0), lambda s: s.random(), lambda s, v: None),
    "numbers of Python": (
        lambda: random.seed(0),
        lambda s: random.uniform(1, 2),
        lambda s, v: None,
    ),
    "generator of numpy": (
        lambda: np.random.default_rng(0),
        lambda s: float(s.random()),
        lambda s, v: None,
    ),
    # functions and modules of Python
    "cell of a closure": (
        closure,
        lambda s: s(),
        lambda s, v: setattr(s.__closure__[0], "cell_contents", v),
    ),
    "partial of a partial": (
        lambda: [functools.partial(functools.partial(operator.mul, 2.0), 1.0)],
        lambda s: s[0](),
        lambda s, v: first(s, functools.partial(functools.partial(operator.mul, 2.0), v)),  # type: ignore[arg-type]
    ),
    "attribute of a partial": (lambda: functools.partial(float), lambda s: getattr(s, "w", 1.0), w),
    "signature": (
        lambda: lambda w=1.0: w,
        lambda s: inspect.signature(s).parameters["w"].default,
        lambda s, v: setattr(s, "__defaults__", (v,)),
    ),
    "function in a register": (
        lambda: {"w": lambda: 1.0},
        lambda s: s["w"](),
        lambda s, v: s.update(w=lambda: v),
    ),
    "variable of the environment": (
        dict,
        lambda s: 2.0 if "DISTCONV_TEST_LARGE" in os.environ else 1.0,
        environment,
    ),
    "option of the command line": (lambda: argparse.Namespace(w=1.0), lambda s: s.w, w),
    "parsed file": (parsed, lambda s: s.getfloat("a", "w"), lambda s, v: s.set("a", "w", str(v))),
    "level of a logger": (
        lambda: logging.getLogger("distconv test"),
        lambda s: 2.0 if s.isEnabledFor(10) else 1.0,
        lambda s, v: s.setLevel(10 if v == 0.5 else 30),
    ),
    "variable of a thread": (
        lambda: (lambda s: (w(s, 1.0), s)[1])(threading.local()),
        lambda s: s.w,
        w,
    ),
    "version of a tensor": (
        lambda: argparse.Namespace(w=torch.ones(1)),
        lambda s: 1.0 + s.w._version,
        lambda s, v: s.w.fill_(v),
    ),
    "event": (
        threading.Event,
        lambda s: 2.0 if s.is_set() else 1.0,
        lambda s, v: s.set() if v == 0.5 else s.clear(),
    ),
}


def read_by(kind: Kind) -> Callable[[Network], Callable[[float], object]]:
    """Return a habit: it lets a network read a setting, and returns what sets it."""
    make, read, change = kind

    def habit(net: Network) -> Callable[[float], object]:
        state = make()
        net.read = lambda: read(state)
        return lambda value: change(state, value)

    return habit


@pytest.mark.parallel(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", KINDS)
def test_present_values_are_used(name: str) -> None:
    habit = read_by(KINDS[name])
    expected, (actual, _) = run(habit, False)[0], run(habit, True)
    assert [
        i for i, (x, y) in enumerate(zip(actual, expected, strict=True)) if not identical(x, y)
    ] == []


@pytest.mark.parallel(2)
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("cached method", "functools.cache"),
        ("shape of an array", "a NumPy array"),
        ("generator of Python", "Python's random"),
        ("version of a tensor", "x._version"),
    ],
)
def test_what_is_not_guarded_is_named(name: str, why: str) -> None:
    with told_once("runs uncompiled: it ") as said:
        assert run(read_by(KINDS[name]), True)[1].replays == 0
    assert why in said[0]


@pytest.mark.parallel(2)
def test_an_attribute_that_the_program_does_not_read_leaves_replays_as_they_are() -> None:
    def habit(net: Network) -> Callable[[float], object]:
        state = Setting()
        net.read = state.read
        return lambda value: setattr(state, f"note{value}", value)

    assert run(habit, True)[1].replays == 5


@pytest.mark.parallel(2)
def test_cached_functions_of_einops_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their results depend on their arguments alone."""
    module = ModuleType("einops.packing")
    code = "import functools\n@functools.lru_cache\ndef doubled(n):\n    return 2 * n\n"
    exec(code, vars(module))
    for name in ("einops", "einops.packing"):
        monkeypatch.setitem(sys.modules, name, module)
    grid = dc.ProcessGrid(height=2)
    compiled = dc.compile(lambda x, n: x * module.doubled(n))
    x = dc.distribute_tensor(torch.ones(1, 1, 4, 4), grid).requires_grad_()
    for n in (1, 1, 1, 3, 3, 3):
        y = compiled(x, n)
        assert y.full_tensor().unique().tolist() == [2 * n]
        y.sum().backward()
    assert compiled.replays == 2
