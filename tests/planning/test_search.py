"""The grid and layouts that are found are the best ones, and fit."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from distconv import Layout
from distconv.__main__ import main
from distconv.planning import plan, predict
from distconv.planning.dry_run import DryRunGrid, without_elements
from distconv.planning.layer_layouts import chain_of, plan_layouts, shortest_path
from distconv.planning.recording import LocalOperator
from distconv.planning.search import grids_of
from tests.planning.machines import described
from tests.planning.test_prediction import network

SHAPE = (4, 3, 64, 64)


@given(
    st.integers(1, 4),
    st.lists(st.integers(1, 3), min_size=1, max_size=5),
    st.randoms(use_true_random=False),
)
def test_the_shortest_path_is_that_of_all_paths(kinds: int, sizes: list[int], random: Any) -> None:
    choices = [range(min(n, kinds)) for n in sizes]
    vertices = {(i, s): random.random() for i, c in enumerate(choices) for s in c}
    edges = {
        (i, a, b): random.random() for i in range(len(sizes)) for a in range(3) for b in range(3)
    }

    def cost(path: tuple[int, ...]) -> float:
        before = (0, *path)
        return sum(vertices[i, s] + edges[i, before[i], s] for i, s in enumerate(path))

    found = shortest_path(choices, lambda i, s: vertices[i, s], lambda i, a, b: edges[i, a, b], 0)
    assert cost(tuple(found)) == pytest.approx(min(map(cost, product(*choices))))


@pytest.mark.parametrize(("ranks", "axes"), [(1, None), (6, None), (8, ("sample", "height"))])
def test_grids_are_all_factorizations_that_leave_no_rank_empty(
    ranks: int, axes: tuple[str, ...] | None
) -> None:
    names = axes or ("sample", "channel", "height", "width")
    most = dict(zip(("sample", "channel", "height", "width"), SHAPE, strict=True))
    expected = Counter(
        frozenset((a, n) for a, n in zip(names, extents, strict=True) if n > 1)
        for extents in product(range(1, ranks + 1), repeat=len(names))
        if torch.tensor(extents).prod() == ranks
        and all(n <= most[a] for a, n in zip(names, extents, strict=True))
    )
    found = [frozenset(g.items()) for g in grids_of(ranks, SHAPE, axes) if "filter" not in g]
    assert Counter(found) == expected


def test_the_plan_ranks_grids_by_their_own_predictions() -> None:
    machine = described(ranks_per_node=2)
    axes = "sample", "height", "width"
    found = plan(network(), SHAPE, 4, machine, axes=axes)
    times = {
        tuple(g.items()): predict(network(), SHAPE, g, machine).seconds
        for g in grids_of(4, SHAPE, axes)
    }
    assert found.best.seconds == pytest.approx(min(times.values()))
    assert times[tuple(found.grid.items())] == pytest.approx(found.best.seconds)
    seconds = [p.seconds for p in found.fitting[:4]]
    assert seconds == sorted(seconds)
    assert "longer" in found.reason and str(found).startswith("Sequential on 4 ranks of round")


def test_a_grid_that_needs_more_memory_than_there_is_is_not_chosen() -> None:
    machine = described()
    shape, axes = (3, *SHAPE[1:]), ("sample", "height")
    free = plan(network(), shape, 2, machine, axes=axes)
    # Of three samples the first rank has two.
    assert free.candidates[0].prediction is not None
    least = min(p.peak for p in free.fitting)
    most = max(p.peak for p in free.fitting)
    assert least < most
    tight = plan(network(), shape, 2, machine, axes=axes, memory=(least + most) // 2)
    assert tight.grid == {"height": 2}
    (out,) = (c for c in tight.candidates if c.refusal is not None)
    assert out.grid == {"sample": 2} and "needs" in str(out.refusal)


def test_where_nothing_fits_it_is_said_what_would() -> None:
    machine = described()
    pairs = [(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(12)]
    deep = nn.Sequential(*(nn.Sequential(*sum(pairs[i : i + 3], ())) for i in range(0, 12, 3)))
    shape = (1, 8, 64, 64)
    needed = predict(deep, shape, {"height": 2}, machine).peak
    found = plan(deep, shape, 2, machine, memory=int(0.7 * needed))
    assert not found.fitting
    ways = {way.what.split()[0]: way for way in found.ways_out}
    assert ways["checkpointing"].peak < needed
    # The loss is still added up in float32.
    assert ways["bfloat16"].fits and needed / 2 < ways["bfloat16"].peak < 0.7 * needed
    assert any(way.fits and "ranks as" in way.what for way in found.ways_out)
    with pytest.raises(ValueError, match="no grid of 2 ranks fits"):
        _ = found.grid


def test_where_channels_are_cut_weights_that_are_sharded_fit() -> None:
    machine, shape = described(), (1, 64, 4, 4)
    wide = nn.Sequential(*(nn.Conv2d(64, 64, 3, padding=1, bias=False) for _ in range(4)))
    whole = predict(wide, shape, {"channel": 4}, machine).peak
    sharded = predict(wide, shape, {"channel": 4}, machine, shard_parameters=True).peak
    assert sharded < whole / 2
    memory = (whole + sharded) // 2
    found = plan(wide, shape, 4, machine, memory=memory, axes=("channel", "height"))
    assert not found.fitting
    (way,) = (way for way in found.ways_out if way.what.startswith("shard_parameters=True"))
    assert way.fits and "channel=" in way.what
    fits = plan(wide, shape, 4, machine, memory=memory, shard_parameters=True)
    assert fits.grid == {"channel": 4} and fits.best.peak == sharded


def test_ways_out_count_what_convolutions_allocate_beside_their_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deep = nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1) for _ in range(6)))
    peaks = []
    for space in (0, 2**30):

        def timed(
            operators: list[LocalOperator], *_: Any, space: int = space
        ) -> tuple[list[float], list[int]]:
            found = [space if "convolution" in o.name else 0 for o in operators]
            return [1e-6] * len(operators), found

        monkeypatch.setattr("distconv.planning.operators.time_together", timed)
        machine = dataclasses.replace(described(), roofline=None)
        found = plan(deep, (1, 8, 64, 64), 2, machine, memory=2**10)
        peaks.append([way.peak for way in found.ways_out])
    without, with_space = peaks
    assert len(without) == len(with_space) > 3
    assert max(without) < 2**30 < min(with_space)


def test_wrong_numbers_of_ranks_and_axes_are_refused() -> None:
    with pytest.raises(ValueError, match="expected 1 or more"):
        plan(network(), SHAPE, 0, described())
    with pytest.raises(ValueError, match="cannot be laid out"):
        plan(network(), SHAPE, 131, described(), axes=("height",))
    with pytest.raises(ValueError, match="not an axis"):
        plan(network(), SHAPE, 2, described(), axes=("rows",))


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x)


def names(module: nn.Module, shape: tuple[int, ...]) -> list[str]:
    hollow = without_elements(module, "test")
    return [link.name for link in chain_of(hollow, DryRunGrid({}), [shape])]


def test_a_chain_goes_through_nested_modules_and_takes_branches_as_one() -> None:
    nested = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()), Branching(), nn.ReLU())
    assert names(nested, (1, 3, 8, 8)) == ["0.0", "0.1", "1", "2"]
    assert names(Branching(), (1, 4, 8, 8)) == [""]


def shrinking() -> nn.Sequential:
    """A network of large planes first and many channels in the end."""
    layers: list[nn.Module] = []
    for a, b in ((8, 64), (64, 256), (256, 512)):
        layers += [nn.Conv2d(a, b, 4, 4, bias=False), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Conv2d(512, 512, 3, padding=1, bias=False), nn.ReLU()]
    return nn.Sequential(*layers)


def test_layouts_of_layers_gain_as_predicted_and_are_what_parallelize_takes() -> None:
    machine = described(ranks_per_node=8)
    grid, shape = {"height": 8}, (8, 8, 256, 256)
    found = plan_layouts(shrinking(), shape, grid, machine)
    again = predict(shrinking(), shape, grid, machine, layouts=found.layouts)
    assert found.prediction.seconds == pytest.approx(again.seconds)
    assert found.prediction.seconds <= found.uniform.seconds
    assert found.layouts, "planes of 4 rows over 8 ranks leave half of them without work"
    assert all(isinstance(layout, Layout) for layout in found.layouts.values())
    assert set(found.layouts) <= {name for name, _ in shrinking().named_modules()}
    assert json.loads(json.dumps(found.as_json()))["seconds"] == found.prediction.seconds


def test_plan_prints_the_grids_or_what_would_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("from tests.planning.test_prediction import network as Net")
    dataclasses.replace(described(), memory=2**30).save("machine.json")
    line = ["plan", "./own.py:Net", "--shape", "4,3,64,64", "--ranks", "4"]
    assert main([*line, "--per-layer"]) == 0
    assert "grids fit" in capsys.readouterr().out
    assert main([*line, "--json", "--axes", "sample,height"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told["grid"]) <= {"sample", "height"} and told["candidates"]
    assert main([*line, "--memory", "1KiB"]) == 1
    assert "no grid of 4 ranks fits" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*line, "--memory", "much"])
    assert "16GiB" in capsys.readouterr().err
