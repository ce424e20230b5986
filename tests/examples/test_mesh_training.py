"""The mesh-tangling training: reading, checkpoints, and one run on many grids."""

import json
import signal
from functools import partial

import h5py
import pytest
import torch
from mpi4py import MPI

import distconv as dc
from distconv.data.checkpoint import checkpoints_in
from examples.mesh_tangling.data import LIMIT, MeshTanglingData
from examples.mesh_tangling.train import main
from tests.support.everywhere import ended_with_one_line, on_rank_zero
from tests.support.jobs import end_of, start
from tests.support.mesh_runs import REPOSITORY, SIZE, arguments, write_file

WORLD = MPI.COMM_WORLD

GRIDS = {1: [{}], 2: [{"sample": 2}, {"height": 2}], 4: [{"sample": 2, "height": 2}]}
every_size = pytest.mark.parallel([1, 2, 4])


@pytest.fixture
def file(folder):
    path = folder / "data.h5"
    on_rank_zero(lambda: write_file(path))
    return path


# Reading


@every_size
def test_a_rank_reads_its_own_box_and_the_rows_that_ranks_compare(file, monkeypatch):
    selected = []
    read_direct = h5py.Dataset.read_direct

    def recorded(dataset, into, source):
        selected.append(dataset[source].nbytes)
        read_direct(dataset, into, source)

    monkeypatch.setattr(h5py.Dataset, "read_direct", recorded)
    with h5py.File(file) as whole:
        state, tangled = whole["state"][:], whole["tangled"][:]
        mean = whole["channel_mean"][:].reshape(18, 1, 1)
        deviation = whole["channel_deviation"][:].reshape(18, 1, 1)
    for extents in GRIDS[WORLD.size]:
        grid = dc.ProcessGrid(**extents)
        data = MeshTanglingData(file, grid)
        assert data.bytes_read == 0
        requests = [[3, 0], [4, 1, 2], [2]]  # even, uneven, and too few for all of sample=2
        selected.clear()
        expected_bytes = 0
        loader = dc.data.Loader(data, batch_sampler=requests)
        for samples, (x, y) in zip(requests, loader, strict=True):
            assert x.shape == (len(samples), 18, SIZE, SIZE)
            assert y.shape == (len(samples), 1, SIZE, SIZE)
            mine = dc.local_box(x.shape, grid, x.grid_layout).slices
            expected = ((state[samples] - mean) / deviation).clip(-LIMIT, LIMIT)[mine]
            torch.testing.assert_close(x.to_local(), torch.from_numpy(expected))
            mine = dc.local_box(y.shape, grid, y.grid_layout).slices
            assert torch.equal(y.to_local(), torch.from_numpy(tangled[samples][mine]).float())
            expected_bytes += expected.nbytes + tangled[samples][mine].nbytes
        assert data.bytes_read == expected_bytes
        # The ranks compare a row of mini-batches 1 and 2.
        compared = 2 * SIZE * (4 + 1) if grid.size > 1 else 0
        assert sum(selected) == expected_bytes + compared
        assert WORLD.allreduce(data.bytes_read) == 6 * SIZE * SIZE * (18 * 4 + 1)


# Training


def serial(*command_line):
    """Train on this rank alone, whatever the number of ranks."""
    on_rank_zero(lambda: main(arguments(*command_line), comm=MPI.COMM_SELF))


def assert_same_run(output, reference):
    """Assert that two output folders hold the same course and result, to rounding."""
    ours, theirs = (
        torch.load(checkpoints_in(folder)[0], weights_only=True) for folder in (output, reference)
    )
    histories = (state["extra"]["history"] for state in (ours, theirs))
    for entry, expected in zip(*histories, strict=True):
        assert entry["step_losses"] == pytest.approx(expected["step_losses"], rel=1e-10)
        assert entry["loss"] == pytest.approx(expected["loss"], rel=1e-10)
        assert entry["iou"] == expected["iou"]
    close = partial(torch.testing.assert_close, rtol=1e-8, atol=1e-10)
    close(ours["model"], theirs["model"])
    average = ours["extra"].get("average", {"n_averaged": 1})
    assert average["n_averaged"] > 0
    close(average, theirs["extra"].get("average", {"n_averaged": 1}))


DEMO = "--network unet --loss overlap --recipe cosine --warmup-epochs 1 --ema 0.8".split()
"""The options of the demo, which the others go without."""


@pytest.mark.parallel([2, 4])
@pytest.mark.parametrize("options", [[], DEMO], ids=["published", "demo"])
def test_every_grid_trains_like_one_rank(file, folder, options):
    serial(file, folder / "serial", {}, 2, *options)
    for place, grid in enumerate(GRIDS[WORLD.size]):
        output = folder / f"grid{place}"
        main(arguments(file, output, grid, 2, *options))
        assert_same_run(output, folder / "serial")
        metrics = json.loads((output / "metrics.json").read_text())
        assert len(metrics["bytes_read_by_rank"]) == WORLD.size
        assert (output / "loss.png").stat().st_size > 0
        assert (output / "prediction.png").stat().st_size > 0


@pytest.mark.parallel([1, 2])
def test_an_epoch_prints_one_line_on_a_pipe_and_validates_averaged_weights(file, folder, capfd):
    main(arguments(file, folder / "raw", {"sample": WORLD.size}, 2))
    printed = capfd.readouterr()
    main(arguments(file, folder / "averaged", {"sample": WORLD.size}, 2, "--ema", "0.999"))
    if WORLD.rank:
        return
    lines = printed.out.splitlines()
    assert [line[:17] for line in lines[:2]] == ["epoch 1/2: loss 0", "epoch 2/2: loss 0"]
    assert all("samples/s; validation: loss" in line for line in lines[:2])
    assert "sample" not in printed.err
    raw, averaged = (
        json.loads((folder / name / "metrics.json").read_text())["history"]
        for name in ("raw", "averaged")
    )
    assert [entry["step_losses"] for entry in raw] == [entry["step_losses"] for entry in averaged]
    assert raw[0]["loss"] == averaged[0]["loss"]  # after one step, the first weights averaged
    assert raw[1]["loss"] != averaged[1]["loss"]


@pytest.mark.parallel([4])
@pytest.mark.parametrize("options", [[], ["--ema", "0.8", "--loss", "overlap"]])
def test_a_run_continues_on_another_grid_with_the_same_result(file, folder, options):
    [first], second = GRIDS[4], {"height": 2, "width": 2}
    output = folder / "continued"
    main(arguments(file, output, first, 1, *options))
    main(arguments(file, output, second, 2, "--resume", str(output), *options))
    serial(file, output, {}, 3, "--resume", str(output), *options)
    main(arguments(file, folder / "straight", first, 3, *options))
    assert_same_run(output, folder / "straight")


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--grid", "sample=7"], "sample=7 does not divide"),
        (["--ema", "1"], "'1' is not a number between 0 and 1"),
        (["--method", "easgd", "--ema", "0.5"], "--ema is for --method sync"),
        (["--batch-size", "6"], "batch size 6 is larger than the 5 samples"),
        (["--network", "2k", "--data", "absent.h5"], "absent.h5: no such file"),
        (["--resume", "absent.pt"], "absent.pt: no such file"),
    ],
)
def test_a_wrong_argument_is_reported_once(file, folder, wrong, message, capsys):
    words = arguments(file, folder / "run", {"sample": WORLD.size}, 1, *wrong)
    ended_with_one_line(lambda: main(words), message, capsys)


@pytest.mark.parallel(1)
def test_the_checkpoint_of_another_run_is_not_overwritten(file, folder, capsys):
    main(arguments(file, folder, {}, 1))
    message = "checkpoint-0000000001.pt exists; continue it with --resume"
    ended_with_one_line(lambda: main(arguments(file, folder, {}, 1)), message, capsys)


INTERRUPTED = """
import os, sys
from mpi4py import MPI
from distconv.data import durable
from examples.mesh_tangling import train
from examples.trainer.progress import Progress

replace, saves = os.replace, []

def replace_once_then_die(old, new):
    if new.suffix == ".pt":
        saves.append(new)
    if len(saves) == 2:
        os.kill(os.getpid(), {signal})
    replace(old, new)

def step_once_then_die(progress, loss, samples, step=Progress.step, steps=[]):
    steps.append(loss)
    if len(steps) == 2 and MPI.COMM_WORLD.rank == {rank}:
        os.kill(os.getpid(), {signal})
    step(progress, loss, samples)

if {rank} == 0:
    durable.os.replace = replace_once_then_die
else:
    Progress.step = step_once_then_die
train.main(sys.argv[1:])
"""


@pytest.mark.parallel(1)
def test_an_interrupted_run_continues_from_its_last_checkpoint(file, folder):
    main(arguments(file, folder / "straight", {}, 2))
    # Rank 0 dies between writing and renaming the second checkpoint, rank 1 in the second epoch.
    for rank, sent in ((0, signal.SIGKILL), (1, signal.SIGINT)):
        output = folder / f"interrupted-{rank}"
        program = INTERRUPTED.format(rank=rank, signal=int(sent))
        script = folder / "program.py"
        script.write_text(program)
        words = arguments(file, output, {"height": 2}, 2)
        ended = end_of(start(script, 2, *words, fresh=False, PYTHONPATH=str(REPOSITORY)))
        assert ended.returncode != 0
        [checkpoint] = checkpoints_in(output)
        state = torch.load(checkpoint, weights_only=True)
        assert len(state["extra"]["history"]) == 1, ended.stderr
        main(arguments(file, output, {}, 2, "--resume", str(output)))
        assert_same_run(output, folder / "straight")
