"""The page of predictions for the fractal benchmark, and its step beside the published one."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.fractals import ASSUMPTIONS, MACHINE, PUBLISHED_STEP, main, run_of
from distconv.planning.machine import Machine


def test_the_published_step_is_predicted_within_a_third() -> None:
    run = run_of(Machine.load(MACHINE), 7, 1, False)
    assert 1e3 * run.prediction.seconds == pytest.approx(PUBLISHED_STEP, rel=1 / 3)
    # 90 million weights, 4 bytes each, and twice as much of Adam.
    assert run.prediction.memory["parameters"] == pytest.approx(4 * 90.3e6, rel=0.01)


def test_recomputed_activations_take_less_memory_and_more_time() -> None:
    machine = Machine.load(MACHINE)
    kept, again = (run_of(machine, 7, 2, recompute).prediction for recompute in (False, True))
    assert again.peak < 0.8 * kept.peak and again.seconds > kept.seconds


def test_sharded_weights_take_a_part_of_the_memory_of_whole_ones() -> None:
    machine = Machine.load(MACHINE)
    whole, sharded = (run_of(machine, 7, 2, False, way).prediction.memory for way in (False, True))
    # Two parts of 98% of them.
    assert sharded["parameters"] == pytest.approx(0.51 * whole["parameters"], rel=0.01)
    assert sharded["optimizer state"] == pytest.approx(0.51 * whole["optimizer state"], rel=0.01)


def test_the_page_has_a_row_for_each_grid_and_each_assumption(tmp_path: Path) -> None:
    main(tmp_path, scales=(7,), ways=(1, 2))
    page = (tmp_path / "fractals-mi300a.md").read_text()
    # On one rank in weak scaling and at scale 7, on eight with whole and with sharded weights.
    for row in ("| 7 | 1 | ", "| 1 | ", "| 8 | ", "| 7 | 8 | "):
        assert sum(line.startswith(row) for line in page.splitlines()) == 1
    assert all(f"| {number.name} | " in page for number in ASSUMPTIONS)
