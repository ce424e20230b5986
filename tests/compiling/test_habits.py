"""Values that programs read in their own ways: compiled functions use the present ones."""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import enum
import functools
import importlib
import itertools
import json
import operator
import os
import random
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import distconv as dc
from tests.compiling.test_compile import identical
from tests.support.serial import told_once

VALUES = 1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 2.0
"""The values that a program's setting has in calls."""


class Network(nn.Module):
    """A layer whose result is scaled by what `read` returns."""

    scale: Any = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.read: Callable[[], Any] = lambda: 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) * self.read()


Habit = Callable[[Network], Callable[[float], object]]
"""Lets the network read a setting in some way; returns what sets it."""

WEIGHT = 1.0


def a_global_variable(net: Network) -> Callable[[float], object]:
    def set_to(value: float) -> None:
        global WEIGHT
        WEIGHT = value

    net.read = lambda: WEIGHT
    return set_to


def a_variable_around(net: Network) -> Callable[[float], object]:
    weight = 1.0

    def set_to(value: float) -> None:
        nonlocal weight
        weight = value

    net.read = lambda: weight
    return set_to


class Object:
    """An object with attributes."""

    w: float = 1.0
    inner: Any = None


def an_attribute(net: Network) -> Callable[[float], object]:
    config = Object()
    net.read = lambda: config.w
    return lambda value: setattr(config, "w", value)


def an_object_in_a_list(net: Network) -> Callable[[float], object]:
    configs = [Object()]
    net.read = lambda: configs[0].w
    return lambda value: setattr(configs[0], "w", value)


def a_deep_attribute(net: Network) -> Callable[[float], object]:
    first = Object()
    last = first
    for _ in range(6):
        last.inner = Object()
        last = last.inner
    net.read = lambda: first.inner.inner.inner.inner.inner.inner.w
    return lambda value: setattr(last, "w", value)


def a_name_of_getattr(net: Network) -> Callable[[float], object]:
    config, name = Object(), "w"
    net.read = lambda: getattr(config, name)
    return lambda value: setattr(config, "w", value)


def a_missing_attribute(net: Network) -> Callable[[float], object]:
    config = types.SimpleNamespace()
    net.read = lambda: getattr(config, "w", 1.0)
    return lambda value: None if value == 1 else setattr(config, "w", value)


def vars_of_an_object(net: Network) -> Callable[[float], object]:
    config = types.SimpleNamespace(w=1.0)
    net.read = lambda: vars(config)["w"]
    return lambda value: setattr(config, "w", value)


def a_dictionary_of_an_object(net: Network) -> Callable[[float], object]:
    config = types.SimpleNamespace(w=1.0)
    net.read = lambda: sum(config.__dict__.values())
    return lambda value: setattr(config, "w", value)


def a_default(net: Network) -> Callable[[float], object]:
    def read(w: float = 1.0) -> float:
        return w

    net.read = read
    return lambda value: setattr(read, "__defaults__", (value,))


def a_default_of_a_keyword(net: Network) -> Callable[[float], object]:
    def read(*, w: float = 1.0) -> float:
        return w

    net.read = read
    return lambda value: setattr(read, "__kwdefaults__", {"w": value})


def a_partial_function(net: Network) -> Callable[[float], object]:
    def set_to(value: float) -> None:
        net.read = functools.partial(float, value)

    set_to(1.0)
    return set_to


def keywords_of_a_partial_function(net: Network) -> Callable[[float], object]:
    def read(w: float) -> float:
        return w

    part = functools.partial(read, w=1.0)
    net.read = part
    return lambda value: part.keywords.update(w=value)


def the_environment(net: Network) -> Callable[[float], object]:
    os.environ["DISTCONV_TEST_WEIGHT"] = "1"
    net.read = lambda: float(os.environ["DISTCONV_TEST_WEIGHT"])
    return lambda value: os.environ.update(DISTCONV_TEST_WEIGHT=str(value))


def getenv(net: Network) -> Callable[[float], object]:
    set_to = the_environment(net)
    net.read = lambda: float(os.getenv("DISTCONV_TEST_WEIGHT", "1"))
    return set_to


@dataclasses.dataclass(slots=True)
class Slotted:
    """A configuration with slots."""

    w: float = 1.0


def a_slotted_dataclass(net: Network) -> Callable[[float], object]:
    config = Slotted()
    net.read = lambda: config.w
    return lambda value: setattr(config, "w", value)


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A configuration that is replaced as a whole."""

    w: float = 1.0


def a_frozen_dataclass(net: Network) -> Callable[[float], object]:
    config = Object()
    config.inner = Frozen()
    net.read = lambda: config.inner.w
    return lambda value: setattr(config, "inner", dataclasses.replace(config.inner, w=value))


def an_attribute_of_a_base_class(net: Network) -> Callable[[float], object]:
    base: Any = type("Base", (), {"w": 1.0})
    config = type("Derived", (base,), {})()
    net.read = lambda: config.w
    return lambda value: setattr(base, "w", value)


def an_attribute_that_a_class_gets(net: Network) -> Callable[[float], object]:
    base: Any = type("Base", (), {"w": 1.0})
    derived: Any = type("Derived", (base,), {})
    config = derived()
    net.read = lambda: config.w
    return lambda value: None if value == 1 else setattr(derived, "w", value)


def an_attribute_that_a_network_gets(net: Network) -> Callable[[float], object]:
    kind: Any = type("Derived", (Network,), {})
    net.__class__ = kind
    net.read = lambda: net.scale
    return lambda value: None if value == 1 else setattr(kind, "scale", value)


def a_method_that_changes(net: Network) -> Callable[[float], object]:
    kind: Any = type("Config", (), {"w": lambda self: 1.0})
    config = kind()
    net.read = lambda: config.w()
    return lambda value: setattr(kind, "w", lambda self: value)


class Searched:
    """A configuration that looks names up itself."""

    def __init__(self) -> None:
        self.values = {"w": 1.0}

    def __getattr__(self, name: str) -> float:
        return self.__dict__["values"][name]  # type: ignore[no-any-return]

    def __getitem__(self, name: str) -> float:
        return self.values[name]


def a_name_that_is_looked_up(net: Network) -> Callable[[float], object]:
    config = Searched()
    net.read = lambda: config.w
    return lambda value: config.values.update(w=value)


def a_name_that_hides_the_looked_up_one(net: Network) -> Callable[[float], object]:
    config = Searched()
    net.read = lambda: config.w
    return lambda value: None if value == 1 else setattr(config, "w", value)


def an_item(net: Network) -> Callable[[float], object]:
    config = Searched()
    net.read = lambda: config["w"]
    return lambda value: config.values.update(w=value)


def a_property(net: Network) -> Callable[[float], object]:
    config: Any = type("Config", (), {"_w": 1.0, "w": property(lambda self: self._w)})()
    net.read = lambda: config.w
    return lambda value: setattr(config, "_w", value)


def a_dictionary(net: Network) -> Callable[[float], object]:
    config = {"a": {"w": 1.0}}
    net.read = lambda: config["a"]["w"]
    return lambda value: config["a"].update(w=value)


def a_default_dictionary(net: Network) -> Callable[[float], object]:
    config = collections.defaultdict(lambda: 1.0)
    net.read = lambda: config["w"]
    return lambda value: config.update(w=value)


def a_chain_of_dictionaries(net: Network) -> Callable[[float], object]:
    config = collections.ChainMap({}, {"w": 1.0})
    net.read = lambda: config["w"]
    return lambda value: config.update(w=value)


def a_view_of_a_dictionary(net: Network) -> Callable[[float], object]:
    config = {"w": 1.0}
    view = types.MappingProxyType(config)
    net.read = lambda: view["w"]
    return lambda value: config.update(w=value)


def a_deque(net: Network) -> Callable[[float], object]:
    last = collections.deque([1.0], maxlen=1)
    net.read = lambda: last[0]
    return last.append


def a_tuple_with_names(net: Network) -> Callable[[float], object]:
    class Config(NamedTuple):
        w: float = 1.0

    config = Object()
    config.inner = Config()
    net.read = lambda: config.inner.w
    return lambda value: setattr(config, "inner", Config(value))


def an_enumeration(net: Network) -> Callable[[float], object]:
    class Weights(enum.Enum):
        ONE, HALF, TWO = 1.0, 0.5, 2.0

    config = Object()
    config.inner = Weights.ONE
    net.read = lambda: config.inner.value
    return lambda value: setattr(config, "inner", Weights(value))


def a_number_of_numpy(net: Network) -> Callable[[float], object]:
    config = Object()
    config.inner = np.float64(1.0)
    net.read = lambda: config.inner
    return lambda value: setattr(config, "inner", np.float64(value))


def an_element_of_numpy(net: Network) -> Callable[[float], object]:
    weights = np.ones(2)
    net.read = lambda: float(weights[0])
    return lambda value: weights.fill(value)


def an_array_as_a_tensor(net: Network) -> Callable[[float], object]:
    weights = np.ones(1, np.float32)
    net.read = lambda: torch.from_numpy(weights)
    return lambda value: weights.fill(value)


def a_tensor(net: Network) -> Callable[[float], object]:
    config = Object()
    config.inner = torch.ones(1)
    net.read = lambda: config.inner
    return lambda value: setattr(config, "inner", torch.tensor([value]))


def a_tensor_that_changes_in_place(net: Network) -> Callable[[float], object]:
    weight = torch.ones(1)
    net.read = lambda: weight
    return lambda value: weight.fill_(value)


def a_rate(net: Network) -> Callable[[float], object]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    net.read = lambda: optimizer.param_groups[0]["lr"]
    return lambda value: optimizer.param_groups[0].update(lr=value)


def a_variable_of_a_hook(net: Network) -> Callable[[float], object]:
    config = Object()
    net.conv.register_forward_hook(lambda module, given, result: result * config.w)
    return lambda value: setattr(config, "w", value)


def another_hook(net: Network) -> Callable[[float], object]:
    handles: list[Any] = []

    def set_to(value: float) -> None:
        for handle in handles:
            handle.remove()
        handles[:] = [net.conv.register_forward_pre_hook(lambda module, given: given[0] * value)]

    return set_to


def another_forward(net: Network) -> Callable[[float], object]:
    def set_to(value: float) -> None:
        net.forward = lambda x: net.conv(x) * value  # type: ignore[method-assign]

    return set_to


def another_forward_of_a_part(net: Network) -> Callable[[float], object]:
    def set_to(value: float) -> None:
        weight = net.conv.weight
        net.conv.forward = lambda x: F.conv2d(x, weight, padding=1) * value  # type: ignore[method-assign]

    return set_to


def other_code(net: Network) -> Callable[[float], object]:
    def read() -> float:
        return 1.0

    codes = {1.0: read.__code__, 0.5: (lambda: 0.5).__code__, 2.0: (lambda: 2.0).__code__}
    net.read = read
    return lambda value: setattr(read, "__code__", codes[value])


def an_attribute_of_a_function(net: Network) -> Callable[[float], object]:
    def read() -> Any:
        return vars(read)["w"]

    vars(read)["w"] = 1.0
    net.read = read
    return lambda value: vars(read).update(w=value)


def a_callable_object(net: Network) -> Callable[[float], object]:
    class Reads:
        w = 1.0

        def __call__(self) -> float:
            return self.w

    net.read = Reads()
    return lambda value: setattr(net.read, "w", value)


def a_cached_function(net: Network) -> Callable[[float], object]:
    config = Object()
    read = functools.cache(lambda: config.w)
    net.read = read
    # As the program has it, the first value stays until the cache is cleared.
    return lambda value: (setattr(config, "w", value), value == 2 and read.cache_clear())


def a_getter(net: Network) -> Callable[[float], object]:
    config = Object()
    config.inner = Object()
    read = operator.attrgetter("inner.w")
    net.read = lambda: read(config)
    return lambda value: setattr(config.inner, "w", value)


def a_context_variable(net: Network) -> Callable[[float], object]:
    weight = contextvars.ContextVar("weight", default=1.0)
    net.read = weight.get
    return weight.set


def a_module(net: Network) -> Callable[[float], object]:
    name = "distconv_test_settings"
    module: Any = sys.modules.setdefault(name, types.ModuleType(name))

    def read() -> Any:
        import distconv_test_settings  # type: ignore[import-not-found]

        return distconv_test_settings.w

    net.read = read
    return lambda value: setattr(module, "w", value)


def an_installed_package(net: Network) -> Callable[[float], object]:
    module: Any = importlib.import_module("distconv_test_package")
    net.read = module.read
    return lambda value: module.SETTINGS.update(w=value)


def an_iterator(net: Network) -> Callable[[float], object]:
    values = itertools.cycle([1.0, 0.5])
    net.read = lambda: next(values)
    return lambda value: None


def a_generator(net: Network) -> Callable[[float], object]:
    config = Object()

    def values() -> Iterator[float]:
        while True:
            yield config.w

    made = values()
    net.read = lambda: next(made)
    return lambda value: setattr(config, "w", value)


def a_counter(net: Network) -> Callable[[float], object]:
    config = Object()

    def read() -> float:
        config.w += 1
        return config.w

    net.read = read
    return lambda value: setattr(config, "w", value)


def a_list_that_grows(net: Network) -> Callable[[float], object]:
    seen: list[float] = []

    def read() -> int:
        seen.append(1.0)
        return len(seen) % 2

    net.read = read
    return lambda value: seen.clear() if value == 2 else None


def random_numbers(net: Network) -> Callable[[float], object]:
    random.seed(0)
    net.read = random.random
    return lambda value: None


def random_numbers_of_numpy(net: Network) -> Callable[[float], object]:
    np.random.seed(0)
    net.read = lambda: float(np.random.rand())
    return lambda value: None


def a_text(net: Network) -> Callable[[float], object]:
    config = Object()
    config.inner = '{"w": 1.0}'
    net.read = lambda: json.loads(config.inner)["w"]
    return lambda value: setattr(config, "inner", json.dumps({"w": value}))


def a_condition_on_a_set(net: Network) -> Callable[[float], object]:
    stages: set[float] = set()
    net.read = lambda: 2.0 if 0.5 in stages else 1.0
    return stages.add


def a_random_dropout(net: Network) -> Callable[[float], object]:
    config = Object()
    net.register_forward_hook(lambda module, given, result: F.dropout(result, config.w / 4))
    return lambda value: setattr(config, "w", value)


HABITS = [
    habit
    for name, habit in list(globals().items())
    if isinstance(habit, types.FunctionType) and habit.__annotations__.get("net") == "Network"
]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package with a setting."""
    folder = tmp_path / "site-packages" / "distconv_test_package"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(
        "SETTINGS = {'w': 1.0}\ndef read():\n    return SETTINGS['w']\n"
    )
    monkeypatch.syspath_prepend(folder.parent)
    monkeypatch.delitem(sys.modules, "distconv_test_package", raising=False)


def run(habit: Habit, compiled: bool) -> tuple[list[Any], Any]:
    """Return the results of calls with changing values, the gradients, and what was called."""
    torch.manual_seed(0)
    grid = dc.ProcessGrid(height=-1)
    net = Network()
    set_to = habit(net)
    model = dc.parallelize(net, grid)
    f: Any = dc.compile(model) if compiled else model
    found = []
    for i, value in enumerate(VALUES):
        set_to(value)
        x = torch.randn(2, 2, 6, 5, generator=torch.Generator().manual_seed(i))
        y = f(dc.distribute_tensor(x, grid))
        y.square().mean().backward()
        found.append(y.detach())
    return [*found, *(p.grad for p in model.parameters() if p.grad is not None)], f


@pytest.mark.parallel(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("habit", HABITS, ids=lambda f: f.__name__)
def test_present_values_are_used(habit: Habit, package: None) -> None:
    expected, (actual, _) = run(habit, False)[0], run(habit, True)
    assert [
        i for i, (x, y) in enumerate(zip(actual, expected, strict=True)) if not identical(x, y)
    ] == []


OFTEN_REPLAYED = an_attribute, an_object_in_a_list, a_deep_attribute, a_default, a_rate, a_module


@pytest.mark.parallel(2)
@pytest.mark.parametrize("habit", OFTEN_REPLAYED, ids=lambda f: f.__name__)
def test_programs_with_plain_settings_are_replayed(habit: Habit) -> None:
    assert run(habit, True)[1].replays == 2


@pytest.mark.parallel(2)
@pytest.mark.parametrize("habit", [getenv, a_cached_function], ids=lambda f: f.__name__)
def test_what_is_not_guarded_is_named(habit: Habit) -> None:
    with told_once("runs uncompiled: it calls"):
        assert run(habit, True)[1].replays == 0


@pytest.mark.parallel(2)
def test_a_value_that_changes_in_each_call_ends_in_a_warning() -> None:
    grid = dc.ProcessGrid(height=-1)
    config, model = Object(), dc.parallelize(nn.Conv2d(2, 2, 3), grid)
    f = dc.compile(lambda x: model(x) * config.w)
    x = dc.distribute_tensor(torch.randn(1, 2, 6, 6), grid)
    with told_once("runs uncompiled: it reads values that change too often"):
        for i in range(12):
            config.w = float(i)
            assert identical(f(x).detach(), (model(x) * config.w).detach())


@pytest.mark.parallel(2)
def test_a_method_is_compiled_for_each_object() -> None:
    grid = dc.ProcessGrid(height=-1)

    class Training:
        def __init__(self, weight: float) -> None:
            self.model, self.weight = dc.parallelize(nn.Conv2d(2, 2, 3), grid), weight

        def plain_loss(self, x: Tensor, *, power: int = 2) -> Tensor:
            return self.model(x).pow(power).mean() * self.weight

        loss = dc.compile(plain_loss)

    one, other = Training(1.0), Training(2.0)
    for i in range(4):
        x = dc.distribute_tensor(
            torch.randn(1, 2, 6, 6, generator=torch.Generator().manual_seed(i)), grid
        )
        for t in (one, other):
            assert identical(t.loss(x, power=4).detach(), t.plain_loss(x, power=4).detach())
            t.loss(x, power=4).backward()
    assert Training.loss.replays > 4


@pytest.mark.parallel(2)
def test_arguments_and_results_keep_their_structure() -> None:
    grid = dc.ProcessGrid(height=-1)
    model = dc.parallelize(nn.Conv2d(2, 2, 3, padding=1), grid)

    class Losses(NamedTuple):
        whole: Tensor
        parts: dict[str, Any]

    @dc.compile
    def losses(batch: dict[str, Any], *, flag: bool) -> Losses:
        x, (y,) = batch["x"], batch["rest"]
        z = model(x)
        return Losses((z - y).square().mean(), {"x": x, "flag": flag, "z": [z]})

    for i in range(4):
        g = torch.Generator().manual_seed(i)
        x, y = (dc.distribute_tensor(torch.randn(1, 2, 6, 6, generator=g), grid) for _ in "xy")
        found = losses({"x": x, "rest": (y,)}, flag=True)
        assert found.parts["x"] is x and found.parts["flag"] is True
        z = model(x)
        assert identical(found.parts["z"][0].detach(), z.detach())
        assert identical(found.whole.detach(), (z - y).square().mean().detach())
        found.whole.backward()
    assert losses.replays == 2


@pytest.mark.parallel(2)
def test_side_effects_happen_in_replays_too() -> None:
    grid = dc.ProcessGrid(height=-1)
    model = dc.parallelize(nn.Conv2d(2, 2, 3), grid)
    kept = Object()

    def loss(x: Tensor) -> Tensor:
        kept.inner = {"x": x, "y": model(x)}
        kept.w = 3.0
        return kept.inner["y"].mean()

    f = dc.compile(loss)
    for _ in range(4):
        x = dc.distribute_tensor(torch.randn(1, 2, 6, 6), grid)
        kept.w = 1.0
        f(x).backward()
        assert kept.inner["x"] is x and kept.w == 3.0
        assert identical(kept.inner["y"].detach(), model(x).detach())
    assert f.replays == 2
