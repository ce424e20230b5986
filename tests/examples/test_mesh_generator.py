"""The data of examples/mesh_tangling: metrics, flow, label and file."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI

import distconv as dc
from examples.mesh_tangling import quality, simulation, store
from examples.mesh_tangling.generate import generate
from tests.support.mesh_runs import generate_alone

SIZE = 24
SCALE_FREE = [name for name in quality.METRICS if name not in ("Jacobian", "volume")]


def metrics(*points: tuple[float, float]) -> dict[str, float]:
    """Return the fourteen metrics of one zone."""
    zone = quality.Quadrilaterals(np.array(points, dtype=float).T)
    return {name: float(metric(zone)) for name, metric in quality.METRICS.items()}


HAND_COMPUTED = {
    "square sheared by 45 degrees": (
        [(0, 0), (1, 0), (2, 1), (1, 1)],
        {
            "aspect ratio": (2 + np.sqrt(2) * 2) * np.sqrt(2) / 4, "condition number": 1.5,
            "distortion": 1, "Jacobian": 1, "largest angle": 135, "oddy": 2.5,
            "scaled Jacobian": np.sqrt(0.5), "shape": 2 / 3, "shear": np.sqrt(0.5),
            "skew": np.sqrt(0.5), "smallest angle": 45, "stretch": np.sqrt(0.4), "taper": 0,
            "volume": 1,
        },
    ),
    "trapezoid": (
        [(0, 0), (4, 0), (3, 1), (1, 1)],
        {
            "aspect ratio": 4 * (6 + 2 * np.sqrt(2)) / 12, "condition number": 18 / 8,
            "distortion": 2 / 3, "Jacobian": 2, "largest angle": 135, "oddy": 65 / 8,
            "scaled Jacobian": np.sqrt(0.5), "shape": 4 / 9, "shear": np.sqrt(0.5), "skew": 0,
            "smallest angle": 45, "stretch": np.sqrt(0.4), "taper": 1, "volume": 3,
        },
    ),
    "dart with a reflex corner": (
        [(0, 0), (2, 1), (0, 2), (1, 1)],
        {
            "aspect ratio": np.sqrt(5) * (2 * np.sqrt(5) + 2 * np.sqrt(2)) / 4,
            "condition number": quality.CAP, "distortion": -2, "Jacobian": -2,
            "largest angle": 270, "oddy": 22.5, "scaled Jacobian": -1, "shape": 0, "shear": 0,
            "skew": 0.6,
            "smallest angle": np.degrees(np.arccos(3 / np.sqrt(10))),
            "stretch": 1, "taper": 3 / np.sqrt(5), "volume": 1,
        },
    ),
    "four coincident nodes": (
        [(1, 1), (1, 1), (1, 1), (1, 1)],
        {
            "aspect ratio": quality.CAP, "condition number": quality.CAP,
            "distortion": -quality.CAP, "Jacobian": 0, "largest angle": 0, "oddy": quality.CAP,
            "scaled Jacobian": 0, "shape": 0, "shear": 0, "skew": 0, "smallest angle": 360,
            "stretch": quality.CAP, "taper": quality.CAP, "volume": 0,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("zone", HAND_COMPUTED)
def test_metrics_equal_the_values_computed_by_hand(zone):
    points, expected = HAND_COMPUTED[zone]
    assert metrics(*points) == pytest.approx(expected, rel=1e-12, abs=1e-12)


coordinates = st.floats(-2.0, 2.0, width=32)
zones = st.lists(st.tuples(coordinates, coordinates), min_size=4, max_size=4)
# Invariances hold to rounding only for zones at some distance from degeneracy and from the cap.
displacements = st.lists(
    st.tuples(st.floats(-0.2, 0.2), st.floats(-0.2, 0.2)), min_size=4, max_size=4
)
valid_zones = displacements.map(
    lambda moved: np.array([(0, 0), (1, 0), (1, 1), (0, 1)]) + np.array(moved)
)


@given(zones)
def test_metrics_are_finite_and_bounded_for_any_four_nodes(points):
    values = metrics(*points)
    assert np.isfinite(list(values.values())).all()
    assert all(abs(values[name]) <= quality.CAP for name in SCALE_FREE if "angle" not in name)


@given(valid_zones, st.floats(0.0, 360.0), coordinates, st.floats(1e-3, 1e3), st.integers(0, 3))
def test_metrics_do_not_change_with_place_scale_and_first_node_and_areas_are_quadratic(
    zone, degrees, by, scale, first
):
    cos, sin = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    moved = scale * (np.roll(zone, first, axis=0) @ np.array([[cos, sin], [-sin, cos]]) + by)
    before, after = metrics(*zone), metrics(*moved)
    for name in SCALE_FREE:
        assert after[name] == pytest.approx(before[name], rel=1e-6, abs=1e-5)
    for name in ("Jacobian", "volume"):
        assert after[name] == pytest.approx(scale**2 * before[name], rel=1e-6, abs=1e-5 * scale**2)


def test_corner_jacobians_of_a_mesh_are_those_of_each_zone_by_itself():
    nodes = simulation.initial_nodes(3) + np.random.default_rng(0).normal(0, 0.05, (2, 4, 4))
    jacobians = quality.corner_jacobians(quality.corners_of(nodes))
    for row in range(3):
        for column in range(3):
            around = [(row, column), (row, column + 1), (row + 1, column + 1), (row + 1, column)]
            points = [nodes[:, i, j] for i, j in around]
            for k in range(4):
                out, back = points[(k + 1) % 4] - points[k], points[k - 1] - points[k]
                assert jacobians[k, row, column] == pytest.approx(
                    out[0] * back[1] - out[1] * back[0]
                )


@pytest.fixture(scope="module", params=range(2))
def flow(request):
    return simulation.draw_flow(3, request.param)


@pytest.fixture(scope="module")
def sample(flow):
    return simulation.simulate(flow, SIZE)


def test_mass_is_conserved_from_the_initial_mesh_to_the_snapshot(flow, sample):
    fraction = simulation.volume_fraction(flow.bubble, SIZE)
    volume = sample.fields["volume"]
    above_floor = volume > simulation.LEAST_AREA / SIZE**2
    np.testing.assert_allclose(
        (sample.fields["density"] * volume)[above_floor],
        simulation.zone_masses(flow, fraction)[above_floor],
    )


def test_density_is_finite_and_positive_even_in_tangled_zones(sample):
    assert np.isfinite(sample.fields["density"]).all()
    assert (sample.fields["density"] > 0).all()


def test_pressure_follows_the_adiabatic_law_of_each_gas(flow, sample):
    fields, gas = sample.fields, flow.bubble.gas
    for share, pure in ((0.0, simulation.AIR), (1.0, gas)):
        here = fields["bubble volume fraction"] == share
        expected = (fields["density"][here] / pure.density) ** pure.adiabatic_index
        np.testing.assert_allclose(fields["pressure"][here] / 101325.0, expected)


def test_gases_at_rest_are_at_ambient_pressure_however_mixed():
    share = np.linspace(0.0, 1.0, 11)
    at_rest = simulation.rest_density(simulation.HELIUM, share)
    pressure = simulation.adiabatic_pressure(simulation.HELIUM, share, at_rest)
    np.testing.assert_allclose(pressure, simulation.AMBIENT_PRESSURE)


def test_shock_compresses_the_gas_as_the_rankine_hugoniot_relations_say(flow):
    shock = flow.shock
    sound = np.sqrt(1.4 * simulation.AMBIENT_PRESSURE / simulation.AIR.density)
    mach = shock.speed / sound
    assert shock.speed / (shock.speed - shock.gas_speed) == pytest.approx(
        2.4 * mach**2 / (0.4 * mach**2 + 2)
    )


def test_circulation_on_a_closed_interface_sums_to_zero(flow):
    assert abs(flow.circulations.sum()) < 1e-9 * abs(flow.circulations).sum()


def test_fields_and_label_are_the_same_whatever_the_pieces_they_are_evaluated_in(
    flow, sample, monkeypatch
):
    monkeypatch.setattr(simulation, "BLOCK", 7)
    monkeypatch.setattr(simulation, "BAND", 5 * SIZE)
    again = simulation.simulate(flow, SIZE)
    np.testing.assert_array_equal(again.tangled, sample.tangled)
    for name, field in sample.fields.items():
        np.testing.assert_array_equal(again.fields[name], field)


@pytest.mark.parametrize("horizon", [simulation.HORIZON, 5e-4])
def test_label_is_every_zone_that_is_tangled_at_some_step_up_to_the_horizon(flow, sample, horizon):
    carried = simulation.Carried(0.0, simulation.initial_nodes(SIZE), flow.blobs)
    steps = list(carried.steps_until(flow, flow.snapshot_time))[-1:]
    steps += list(steps[0].steps_until(flow, flow.snapshot_time + horizon))
    assert steps[-1].time == pytest.approx(flow.snapshot_time + horizon)
    labelled = simulation.simulate(flow, SIZE, horizon).tangled
    corners = [quality.corner_jacobians(quality.corners_of(step.nodes)) for step in steps]
    tangled = (np.array(corners) <= 0).any((0, 1))
    np.testing.assert_array_equal(labelled, tangled)
    assert (labelled >= (sample.fields["Jacobian"] <= 0)).all()
    assert (labelled <= sample.tangled).all()
    assert 0 < labelled.mean() < 0.6


def test_flow_does_not_depend_on_the_mesh(flow):
    coarse, fine = (
        simulation.Carried(0.0, simulation.initial_nodes(size), flow.blobs) for size in (8, 16)
    )
    *_, coarse = coarse.steps_until(flow, flow.snapshot_time)
    *_, fine = fine.steps_until(flow, flow.snapshot_time)
    np.testing.assert_allclose(coarse.nodes, fine.nodes[:, ::2, ::2], rtol=1e-12)


def read(path):
    with h5py.File(path) as file:
        return {name: dataset[...] for name, dataset in file.items()}


def test_a_sample_depends_on_seed_and_index_alone(tmp_path):
    for name, samples, seed in (("two", 2, 5), ("three", 3, 5), ("other", 2, 6)):
        generate_alone(tmp_path / f"{name}.h5", samples, 16, seed)
    two, three, other = (read(tmp_path / f"{name}.h5") for name in ("two", "three", "other"))
    for name in ("state", "tangled"):
        np.testing.assert_array_equal(two[name], three[name][:2])
    assert not np.array_equal(two["state"], other["state"])
    assert not np.array_equal(two["state"][0], two["state"][1])


def test_file_holds_the_samples_with_names_units_and_statistics(tmp_path):
    path = tmp_path / "folder" / "train.h5"
    fraction = generate_alone(path, 2, 40, seed=1)
    sample = simulation.simulate(simulation.draw_flow(1, 1), 40)
    with h5py.File(path) as file:
        state, tangled = file["state"], file["tangled"]
        assert (state.shape, state.dtype) == ((2, 18, 40, 40), np.float32)
        assert (tangled.shape, tangled.dtype) == ((2, 1, 40, 40), np.uint8)
        assert state.chunks == (1, 18, 32, 32)
        assert list(state.attrs["names"]) == list(store.CHANNELS)
        assert list(state.attrs["units"]) == list(store.CHANNELS.values())
        assert dict(file.attrs) == {
            "format_version": 1, "samples": 2, "size": 40, "seed": 1,
            "horizon": simulation.HORIZON,
        }  # fmt: skip
        for place, name in enumerate(store.CHANNELS):
            expected = sample.fields[name].astype(np.float32)
            np.testing.assert_array_equal(state[1, place], expected)
        np.testing.assert_array_equal(tangled[1, 0], sample.tangled)
        assert tangled[...].mean() == pytest.approx(fraction)
        values = state[...].astype(float)
        np.testing.assert_allclose(file["channel_mean"], values.mean((0, 2, 3)), rtol=1e-5)
        np.testing.assert_allclose(file["channel_deviation"], values.std((0, 2, 3)), rtol=1e-5)
    assert list(path.parent.iterdir()) == [path]


def test_channels_are_the_published_ones_in_order():
    expected = (
        "density, pressure, radial velocity, bubble volume fraction, aspect ratio, "
        "condition number, distortion, Jacobian, largest angle, oddy, scaled Jacobian, shape, "
        "shear, skew, smallest angle, stretch, taper, volume"
    )
    assert ", ".join(store.CHANNELS) == expected


@pytest.mark.parallel([1, 2, 3])
def test_ranks_together_write_the_bytes_of_one(folder: Path) -> None:
    # Chunks of full and of partial tiles, and fewer samples than ranks.
    for samples, size in ((5, 16), (2, 40)):
        path = folder / f"{size}.h5"
        generate(path, samples, size, 3, dc.ProcessGrid(sample=-1))
        if MPI.COMM_WORLD.rank == 0:
            generate_alone(folder / "alone.h5", samples, size, seed=3)
            assert path.read_bytes() == (folder / "alone.h5").read_bytes()
            assert store.describe(path).samples == samples
            (folder / "alone.h5").unlink()
    MPI.COMM_WORLD.barrier()
    assert sorted(found.name for found in folder.iterdir()) == ["16.h5", "40.h5"]


def test_an_interrupted_generation_leaves_nothing(tmp_path):
    def interrupt(done):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(tmp_path / "train.h5", 2, 16, 1, dc.ProcessGrid(MPI.COMM_SELF), interrupt)
    assert list(tmp_path.iterdir()) == []


def test_a_file_with_samples_missing_is_refused_and_not_left(tmp_path):
    grid = dc.ProcessGrid(MPI.COMM_SELF)
    with pytest.raises(dc.data.DataError, match=r"samples \[0, 1\] were never written"):
        with store.create(grid, tmp_path / "train.h5", 2, 16, seed=0, horizon=1.0):
            pass
    assert list(tmp_path.iterdir()) == []
