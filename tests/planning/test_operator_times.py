"""Local operators are timed as they run in a step, and others estimated from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from distconv.ops.conv.functions import method
from distconv.planning.host_work import seconds_of_kernels
from distconv.planning.machine import Machine
from distconv.planning.operators import (
    MOST,
    Operands,
    OperatorTimes,
    call_of,
    times_of,
    workspace_of,
)
from distconv.planning.recorded_step import mean_square, record_step
from distconv.planning.recording import HostWork, LocalOperator, TensorSpec, spec_of
from tests.planning.machines import described


def spec(*shape: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
    made: TensorSpec = spec_of(torch.empty(shape, dtype=dtype, device="meta"))
    return made


def relu(*shape: int) -> LocalOperator:
    return LocalOperator("aten.relu.default", (spec(*shape),), (), (spec(*shape),))


def convolution(channels: int, extent: int) -> LocalOperator:
    x, weight = spec(1, channels, extent, extent), spec(channels, channels, 3, 3)
    arguments = x, weight, None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1
    return LocalOperator("aten.convolution.default", arguments, (), (x,))


def test_operators_write_to_operands_of_their_own() -> None:
    add = LocalOperator("aten.add_.Tensor", (spec(4, 5), spec(4, 5)), (), (spec(4, 5),))
    memory = Operands([add])
    before = memory.tensor(spec(2**24)).clone()
    result = call_of(add, memory)()
    assert isinstance(result, Tensor) and bool(((result > 1) & (result < 3)).all())
    assert torch.equal(memory.tensor(spec(2**24)), before)


class _Counting(TorchDispatchMode):
    """Counts the operators of each call that `before` times, as the network of a calibration."""

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.counts = Operands([]), list[int]()

    def before(self, run: Callable[[], object]) -> tuple[float, None]:
        self.counts.append(0)
        with self:
            run()
        return 1.0, None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[-1] += 1
        return func(*args, **(kwargs or {}))


def test_kernels_of_a_function_are_timed_one_after_the_other_as_it_runs_them() -> None:
    # Each behind the network, the ten kernels of a batch norm took as long as all of the function.
    counting: Any = _Counting()
    assert seconds_of_kernels([relu(8), relu(9), relu(10)], counting) == 1.0
    assert set(counting.counts) == {3}


def test_operands_have_their_shapes_types_and_places_of_maxima() -> None:
    x, indices = spec(2, 3, 8, 6), spec(2, 3, 4, 3, dtype=torch.int64)
    options = (2, 2), (2, 2), (0, 0), (1, 1), False
    backward = LocalOperator(
        "aten.max_pool2d_with_indices_backward.default",
        (indices._replace(dtype=torch.float32), x, *options, indices),
        (),
        (x,),
    )
    result = call_of(backward, Operands([backward]))()
    assert isinstance(result, Tensor) and result.shape == (2, 3, 8, 6)


@pytest.mark.parametrize("stride", [(1, 6), (8, 1), (0, 1)])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool])
def test_operands_have_their_strides_also_in_memory_of_their_own(
    stride: tuple[int, int], own: bool, dtype: torch.dtype
) -> None:
    given = TensorSpec((6, 4), stride, dtype)
    made = Operands([]).tensor(given, own=own)
    assert (tuple(made.shape), made.stride(), made.dtype) == given


def test_small_operators_run_in_each_of_the_rounds_that_all_processes_begin_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    operators = [relu(4, 4), convolution(4, 16), relu(0, 4)]
    done: list[object] = []

    def call(operator: LocalOperator, memory: Operands) -> Callable[[], object]:
        return lambda: done.append(operator)

    monkeypatch.setattr("distconv.planning.operators.call_of", call)
    times = times_of(operators, Operands(operators), lambda: done.append("round"))
    assert len(times) == 3 and all(seconds > 0 for seconds in times)
    assert done == ["round", *operators] * (1 + MOST)


def test_what_an_operator_allocates_beside_its_result_is_counted_without_it() -> None:
    memory = Operands([])
    assert workspace_of(call_of(relu(64, 64), memory)) == 0
    assert workspace_of(lambda: F.relu(torch.ones(2**16)) + torch.ones(2**16)) >= 2**18


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[LocalOperator]:
    """Let each operator take a nanosecond for each element that it makes; return all timed."""
    every: list[LocalOperator] = []

    def seconds(operators: Iterable[LocalOperator], *_: object) -> tuple[list[float], list[int]]:
        every.extend(operators)
        return [1e-9 * o.made[0].nbytes / 4 for o in operators], [0 for _ in operators]

    monkeypatch.setattr("distconv.planning.operators.time_together", seconds)
    return every


def measured() -> Machine:
    return replace(described(), assumed=False, roofline=None, operators={})


def test_operators_without_enough_memory_to_time_them_are_in_proportion_to_smaller_ones(
    timed: list[LocalOperator],
) -> None:
    small, large = relu(2**20), relu(2**26)
    times = OperatorTimes(measured(), 2)
    times.prepare_approximately([{small: 1, large: 1}])
    assert timed == [small]
    assert times[small] == pytest.approx(1e-9 * 2**20)
    assert times[large] == pytest.approx(1e-9 * 2**26)
    # Whose kind has been timed before.
    another = relu(2**25)
    times.prepare_approximately([{another: 1}])
    assert timed == [small] and times[another] == pytest.approx(1e-9 * 2**25)


def test_kinds_without_time_take_as_long_as_others_of_their_name(
    timed: list[LocalOperator],
) -> None:
    common, seldom = [convolution(8, n) for n in (32, 64, 128)], convolution(16, 64)
    times = OperatorTimes(measured(), 2)
    times.prepare_approximately([dict.fromkeys([seldom, *common], 1)], seconds=0.004)
    assert timed == common[:1]
    # In proportion to the arithmetic: twice the channels on four times the positions.
    assert times[seldom] == pytest.approx(16 * times[common[0]])
    # A name that nothing else has is timed, whatever it takes.
    product = LocalOperator("aten.mm.default", (spec(9, 9), spec(9, 9)), (), (spec(9, 9),))
    times.prepare_approximately([{product: 1}], seconds=0.0)
    assert timed == [common[0], product]


def test_a_search_goes_on_from_what_the_machine_knows(timed: list[LocalOperator]) -> None:
    machine = measured()
    known = [convolution(8, 32), relu(2**12)]
    OperatorTimes(machine, 2).prepare(known)
    times = OperatorTimes(machine, 2)
    others = [convolution(8, 64), convolution(16, 32), relu(2**13)]
    times.prepare_approximately([dict.fromkeys([*known, *others], 1)], seconds=0.0)
    assert timed == known
    assert times[others[0]] == pytest.approx(4 * times[known[0]])


def test_a_name_that_takes_too_much_memory_is_estimated_from_others(
    timed: list[LocalOperator],
) -> None:
    machine = measured()
    times = OperatorTimes(machine, 2)
    small = LocalOperator("aten.sigmoid.default", (spec(2**20),), (), (spec(2**20),))
    times.prepare_approximately([{relu(2**26): 1, small: 1}])
    assert timed == [small] and times[relu(2**26)] == pytest.approx(64 * times[small])


@pytest.mark.parametrize("way", ["assembled", "overlapped"])
def test_a_recording_tells_which_functions_compute_while_halos_travel(way: str) -> None:
    with method(way):
        recording = record_step(
            nn.Conv2d(2, 2, 3, padding=1),
            [(1, 2, 16, 16)],
            {"height": 2},
            loss=mean_square,
            optimizer="sgd",
            input_gradients=True,
        )
    named = [e.function for e in recording.events if isinstance(e, HostWork)]
    name = "conv2d overlapped across ranks" if way == "overlapped" else "conv2d across ranks"
    assert name in named and f"{name} backward" in named
