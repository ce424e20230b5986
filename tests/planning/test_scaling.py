"""Scaling studies: which cases they have, what their numbers mean, and how they are continued."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI
from torch import nn

from distconv.planning.scaling import (
    STRONG,
    WEAK,
    Case,
    Study,
    cases_of,
    measure,
    predict_all,
    usual_grid,
)
from tests.planning.machines import described

SHAPE = (4, 3, 16, 16)


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1))


def study(kind: str = STRONG, *times: tuple[dict[str, int], list[float]], **more: Any) -> Study:
    """A study with the times of each grid."""
    cases = cases_of(kind, [SHAPE], [grid for grid, _ in times])
    for case, (_, seconds) in zip(cases, times, strict=True):
        case.seconds = seconds
    return Study(kind, "a:b", cases, {"host": "here", "cores": "2", "threads": "1"}, **more)


def test_weak_scaling_makes_each_dimension_as_long_as_the_ranks_along_it() -> None:
    grids = [{"sample": 2}, {"height": 2, "width": 3}, {"height": 1}]
    grown = [case.shapes for case in cases_of(WEAK, [SHAPE, (4, 1, 8)], grids[:1])]
    assert grown == [[(8, 3, 16, 16), (8, 1, 8)]]
    assert [c.shapes for c in cases_of(WEAK, [SHAPE], grids[1:])] == [[(4, 3, 32, 48)], [SHAPE]]
    assert all(c.shapes == [SHAPE] for c in cases_of(STRONG, [SHAPE], grids))


@pytest.mark.parametrize(
    "kind, grids, said",
    [
        (WEAK, [{"channel": 2}], "cannot grow along channel=2"),
        (WEAK, [{"depth": 2}], "cannot grow along depth=2"),
        (STRONG, [{"height": 2}, {"height": 2, "width": 1}], "height=2 appears twice"),
        (STRONG, [{"heigth": 2}], "heigth=2 is not an axis"),
    ],
)
def test_grids_that_make_no_study_are_refused(
    kind: str, grids: list[dict[str, int]], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        cases_of(kind, [SHAPE], grids)


@given(st.integers(1, 96), st.lists(st.integers(8, 512), min_size=1, max_size=3))
def test_the_usual_grid_has_all_ranks_and_blocks_near_cubes(ranks: int, sizes: list[int]) -> None:
    grid = usual_grid(STRONG, (2, 3, *sizes), ranks)
    assert prod(grid.values()) == ranks and "sample" not in grid
    assert usual_grid(WEAK, (2, 3, *sizes), ranks) == {"sample": ranks}


def test_efficiency_is_paired_by_rounds() -> None:
    # The machine was half as fast in the second round, for both cases.
    s = study(STRONG, ({}, [1.0, 2.0, 1.0]), ({"height": 4}, [0.5, 1.0, 0.5]))
    assert s.efficiency(s.cases[1]) == (0.5, 0.5, 0.5) and s.ideal(4) == 0.25
    weak = study(WEAK, ({}, [1.0, 2.0]), ({"sample": 4}, [1.25, 2.5]))
    assert weak.efficiency(weak.cases[1]) == (0.8, 0.8, 0.8) and weak.ideal(4) == 1.5


def test_the_base_is_the_fastest_case_on_the_fewest_ranks() -> None:
    s = study(STRONG, ({"height": 2}, [3.0]), ({"width": 2}, [2.0]), ({"height": 4}, [1.0]))
    assert s.base is s.cases[1]
    s.cases[0].predicted, s.cases[2].predicted = 3.0, 2.0
    assert s.predicted_base is s.cases[0] and s.predicted_efficiency(s.cases[2]) == 0.75


def test_a_study_comes_back_from_its_file(tmp_path: Path) -> None:
    s = study(STRONG, ({}, [1.0, 2.0]), ({"height": 2}, [0.5, 1.0]), machine="lassen")
    s.cases.append(Case({"height": 4}, [SHAPE], measured=False, predicted=0.3))
    s.save(tmp_path / "s.json")
    assert Study.load(tmp_path / "s.json") == s
    for text in ("[]", "{}", '{"format": 1}', "{"):
        (tmp_path / "s.json").write_text(text)
        with pytest.raises(ValueError, match="not a scaling study"):
            Study.load(tmp_path / "s.json")
    with pytest.raises(ValueError, match="cannot read"):
        Study.load(tmp_path / "t.json")


def test_an_interrupted_study_keeps_its_complete_rounds_and_no_others() -> None:
    begun = study(STRONG, ({}, [1.0, 2.0, 3.0]), ({"height": 2}, [0.5, 1.0]), machine="lassen")
    begun.cases[0].predicted = 0.9
    again = study(STRONG, ({}, []), ({"height": 2}, []), machine="lassen").resumed_from(begun)
    assert [case.seconds for case in again.cases] == [[1.0, 2.0], [0.5, 1.0]]
    assert again.rounds == 2 and again.cases[0].predicted == 0.9
    other = study(STRONG, ({}, []), ({"height": 2}, []), machine="h100").resumed_from(begun)
    assert other.cases[0].predicted is None and other.rounds == 2


def test_a_study_of_something_else_is_not_continued() -> None:
    begun = study(STRONG, ({}, [1.0]), ({"height": 2}, [0.5]))
    with pytest.raises(ValueError, match="measured cases"):
        study(STRONG, ({}, [])).resumed_from(begun)
    elsewhere = study(STRONG, ({}, []), ({"height": 2}, []))
    elsewhere.facts["host"] = "there"
    with pytest.raises(ValueError, match="begun with host here"):
        elsewhere.resumed_from(begun)


def test_predictions_of_more_ranks_take_less_time_up_to_the_messages() -> None:
    s = study(STRONG, ({}, []), ({"height": 2}, []), ({"height": 16}, []))
    for case in s.cases:
        case.shapes = [(4, 3, 1024, 1024)]
    predict_all(s, network, described())
    first, second, last = (case.predicted for case in s.cases)
    assert first and second and last and first > second > last
    efficiency = s.predicted_efficiency(s.cases[2])
    assert efficiency is not None and 0 < efficiency < 1


@pytest.mark.parallel([1, 2, 4])
def test_cases_run_on_their_first_ranks_in_turns_and_go_on_where_they_were() -> None:
    comm = MPI.COMM_WORLD
    grids = [{"height": n} for n in (1, 2, 4) if n <= comm.size]
    s = Study(STRONG, "a:b", cases_of(STRONG, [SHAPE], grids))
    s.cases[0].seconds = [0.5]  # a round that is not complete, where there are other cases
    seen: list[int] = []
    begun = s.rounds
    measure(s, network, comm, 2, finished=seen.append)
    assert seen == list(range(begun + 1, 3)) and s.rounds == 2
    assert (
        comm.allgather([c.seconds for c in s.cases]) == [[c.seconds for c in s.cases]] * comm.size
    )
    assert all(t > 0 for case in s.cases for t in case.seconds)
    measure(s, network, comm, 2, finished=seen.append)
    assert s.rounds == 2


@pytest.mark.parallel([2])
def test_a_case_of_too_many_ranks_is_refused_on_every_rank() -> None:
    s = Study(STRONG, "a:b", cases_of(STRONG, [SHAPE], [{"height": 4}]))
    with pytest.raises(ValueError, match="mpiexec -n 4"):
        measure(s, network, MPI.COMM_WORLD, 2)
