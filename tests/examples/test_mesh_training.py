"""The mesh-tangling training: reading, checkpoints, and one run on many grids."""

import json
import os
import re
import signal
import threading

import h5py
import numpy as np
import pytest
import torch
from mpi4py import MPI

import distconv as dc
from examples.mesh_tangling.checkpoint import load_checkpoint, save_checkpoint
from examples.mesh_tangling.durable import write_atomically
from examples.mesh_tangling.prefetch import prefetched
from examples.mesh_tangling.reader import (
    LIMIT,
    MeshTanglingData,
    check_batch_size,
    ordered_batches,
    shuffled_batches,
)
from examples.mesh_tangling.together import rank_zero, together
from examples.mesh_tangling.train import main
from tests.support.mesh_runs import SIZE, arguments, fails_everywhere, launched, write_file

WORLD = MPI.COMM_WORLD

GRIDS = {
    1: [{}],
    2: [{"sample": 2}, {"height": 2}],
    4: [{"sample": 2, "height": 2}],
}
every_size = pytest.mark.parallel([1, 2, 4])


@pytest.fixture
def file(folder):
    path = folder / "data.h5"
    if WORLD.rank == 0:
        write_file(path)
    WORLD.barrier()
    return path


def opened(path):
    return MeshTanglingData(path, dc.ProcessGrid(sample=-1))


# Reading


@every_size
def test_a_rank_reads_its_own_box_and_nothing_else(file, monkeypatch):
    selected = []
    read_direct = h5py.Dataset.read_direct

    def recorded(dataset, into, source, destination):
        selected.append(dataset[source].nbytes)
        read_direct(dataset, into, source, destination)

    monkeypatch.setattr(h5py.Dataset, "read_direct", recorded)
    with h5py.File(file) as whole:
        state, tangled = whole["state"][:], whole["tangled"][:]
        mean = whole["channel_mean"][:].reshape(18, 1, 1)
        deviation = whole["channel_deviation"][:].reshape(18, 1, 1)
    for extents in GRIDS[WORLD.size]:
        grid = dc.ProcessGrid(**extents)
        data = MeshTanglingData(file, grid)
        requests = [[3, 0], [4, 1, 2], [2]]  # even, uneven, and too few for all of sample=2
        selected.clear()
        expected_bytes = 0
        for samples, (x, y) in zip(requests, data.batches(requests), strict=True):
            assert x.shape == (len(samples), 18, SIZE, SIZE)
            assert y.shape == (len(samples), 1, SIZE, SIZE)
            mine = dc.local_box(x.shape, grid, x.layout).slices
            expected = ((state[samples] - mean) / deviation).clip(-LIMIT, LIMIT)[mine]
            torch.testing.assert_close(x.to_local(), torch.from_numpy(expected))
            mine = dc.local_box(y.shape, grid, y.layout).slices
            assert torch.equal(y.to_local(), torch.from_numpy(tangled[samples][mine]).float())
            expected_bytes += expected.nbytes + tangled[samples][mine].nbytes
        assert data.bytes_read == sum(selected) == expected_bytes
        assert WORLD.allreduce(data.bytes_read) == 6 * SIZE * SIZE * (18 * 4 + 1)


@every_size
def test_the_shuffle_is_the_same_on_all_ranks_and_new_in_every_epoch():
    epochs = [shuffled_batches(10, 3, seed=7, epoch=epoch) for epoch in range(3)]
    assert all(epochs == other for other in WORLD.allgather(epochs))
    assert epochs[0] != epochs[1] != epochs[2]
    for batches in epochs:
        assert [len(batch) for batch in batches] == [3, 3, 3]
        assert len({sample for batch in batches for sample in batch}) == 9


@pytest.mark.parametrize(("samples", "batch_size"), [(7, 3), (6, 3), (1, 4)])
def test_validation_sees_every_sample_once(samples, batch_size):
    batches = ordered_batches(samples, batch_size)
    assert [sample for batch in batches for sample in batch] == list(range(samples))
    assert max(map(len, batches)) <= batch_size


@every_size
def test_a_file_missing_on_one_rank_is_an_error_on_every_rank(file):
    path = file if WORLD.rank < WORLD.size - 1 else file.with_name("elsewhere.h5")
    fails_everywhere(lambda: opened(path), "elsewhere.h5: no such file")


@every_size
def test_a_truncated_file_is_an_error_on_every_rank(file):
    if WORLD.rank == 0:
        os.truncate(file, file.stat().st_size // 2)
    WORLD.barrier()
    fails_everywhere(lambda: opened(file), "data.h5: .*truncated")


@every_size
@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("tangled", None, "no dataset 'tangled'; the file has"),
        ("state", (5, 17, 64, 64), "'state' has shape (5, 17, 64, 64), expected (5, 18, 64, 64)"),
        ("state", (5, 18, 64), "'state' has shape (5, 18, 64), expected (samples, 18, S, S)"),
        ("state", (0, 18, 64, 64), "'tangled' has shape (5, 1, 64, 64), expected (0, 1, 64, 64)"),
        ("tangled", (4, 1, 64, 64), "'tangled' has shape (4, 1, 64, 64), expected (5, 1, 64, 64)"),
        ("channel_mean", (1,), "'channel_mean' has shape (1,), expected (18,)"),
        ("channel_deviation", (18,), "channel_deviation must be positive"),
    ],
)
def test_a_misshapen_file_is_an_error_that_names_it(folder, name, shape, message):
    path = folder / "wrong.h5"
    if WORLD.rank == 0:
        dtype = np.uint8 if name == "tangled" else np.float32
        write_file(path, **{name: shape and np.zeros(shape, dtype)})
    WORLD.barrier()
    fails_everywhere(lambda: opened(path), f"wrong.h5: .*{re.escape(message)}")


@pytest.mark.parallel(2)
def test_a_batch_size_that_does_not_fit_is_an_error_with_the_way_out(file):
    data = MeshTanglingData(file, dc.ProcessGrid(sample=2))
    check_batch_size(2, data)
    with pytest.raises(ValueError, match="batch size 6 is larger than the 5 samples .* at most 5"):
        check_batch_size(6, data)
    with pytest.raises(ValueError, match="batch size 1 leaves .* choose at least 2"):
        check_batch_size(1, data)


def test_items_are_read_ahead_in_order():
    read = []
    items = prefetched(lambda n: read.append(n) or n, range(10), ahead=2)
    assert next(items) == 0
    assert list(items) == list(range(1, 10)) == read[1:]


def test_an_abandoned_iteration_ends_its_thread_and_reads_no_further():
    read = []
    items = prefetched(lambda n: read.append(n) or n, range(1000), ahead=2)
    next(items)
    items.close()
    assert len(read) <= 3
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def test_an_error_in_the_background_is_raised_where_its_item_would_be():
    items = prefetched(lambda n: 1 // n, [1, 1, 0, 1])
    assert [next(items), next(items)] == [1, 1]
    with pytest.raises(ZeroDivisionError):
        next(items)


@every_size
def test_an_error_on_one_rank_is_raised_on_all(folder):
    def only_the_last_fails():
        if WORLD.rank == WORLD.size - 1:
            raise OSError("disk on fire")

    fails_everywhere(lambda: together(WORLD, only_the_last_fails), "disk on fire")
    assert rank_zero(WORLD, lambda: WORLD.rank) == 0


# Checkpoints


def test_an_interrupted_write_leaves_the_old_content(tmp_path):
    path = tmp_path / "checkpoint.pt"
    write_atomically(path, lambda file: file.write(b"old"))

    def interrupted(file):
        file.write(b"half of the n")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, interrupted)
    assert path.read_bytes() == b"old"
    write_atomically(path, lambda file: file.write(b"new"))
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


@every_size
def test_a_checkpoint_that_cannot_be_used_is_an_error_on_every_rank(folder):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = folder / "checkpoint.pt"
    if WORLD.rank == 0:
        save_checkpoint(path, model, optimizer, {"seed": 1}, history=[])

    def load(seed):
        return load_checkpoint(path, WORLD, model, optimizer, {"seed": seed})

    assert load(seed=1) == []
    fails_everywhere(lambda: load(seed=2), "checkpoint.pt was written with --seed 1, .* --seed 2")
    if WORLD.rank == 0:
        os.truncate(path, path.stat().st_size // 2)
    WORLD.barrier()
    fails_everywhere(lambda: load(seed=1), "checkpoint.pt does not end with its checksum")
    if WORLD.rank == 0:
        path.unlink()
    WORLD.barrier()
    fails_everywhere(lambda: load(seed=1), "checkpoint.pt: no such file")


# Training


def serial(*command_line):
    """Train on this rank alone, whatever the number of ranks."""
    rank_zero(WORLD, lambda: main(arguments(*command_line), comm=MPI.COMM_SELF))


def assert_same_run(output, reference):
    """Assert that two output folders hold the same course and result, to rounding."""
    ours, theirs = (
        torch.load(folder / "checkpoint.pt", weights_only=True) for folder in (output, reference)
    )
    for entry, expected in zip(ours["history"], theirs["history"], strict=True):
        assert entry["step_losses"] == pytest.approx(expected["step_losses"], rel=1e-10)
        assert entry["loss"] == pytest.approx(expected["loss"], rel=1e-10)
        assert entry["iou"] == expected["iou"]
    torch.testing.assert_close(ours["model"], theirs["model"], rtol=1e-8, atol=1e-10)


@every_size
def test_every_grid_trains_like_one_rank(file, folder):
    serial(file, folder / "serial", {}, 2)
    for place, grid in enumerate(GRIDS[WORLD.size]):
        output = folder / f"grid{place}"
        main(arguments(file, output, grid, 2))
        assert_same_run(output, folder / "serial")
        metrics = json.loads((output / "metrics.json").read_text())
        assert len(metrics["bytes_read_by_rank"]) == WORLD.size
        assert (output / "loss.png").stat().st_size > 0
        assert (output / "prediction.png").stat().st_size > 0


@pytest.mark.parallel([2, 4])
def test_a_run_continues_on_another_grid_with_the_same_result(file, folder):
    first, second = GRIDS[WORLD.size]
    output = folder / "continued"
    checkpoint = output / "checkpoint.pt"
    main(arguments(file, output, first, 1))
    main(arguments(file, output, second, 2, "--resume", str(checkpoint)))
    serial(file, output, {}, 3, "--resume", str(checkpoint))
    main(arguments(file, folder / "straight", first, 3))
    assert_same_run(output, folder / "straight")


@every_size
def test_the_comparison_with_one_rank_finds_no_difference(file, folder, capsys):
    main(arguments(file, folder / "run", GRIDS[WORLD.size][-1], 1, "--compare-serial", "2"))
    comparison = json.loads((folder / "run" / "metrics.json").read_text())["compare_serial"]
    for name in ("loss", "parameters"):
        assert comparison["grid"][name] < 1e-13 + 100 * comparison["rounding"][name]
    assert ("and one rank: " in capsys.readouterr().out) == (WORLD.rank == 0)


@every_size
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--grid", "sample=7"], "sample=7 does not divide"),
        (["--grid", "sample=two"], "'two' is not a whole number"),
        (["--grid", "time=2"], "'time=2' is not an axis"),
        (["--batch-size", "6"], "batch size 6 is larger than the 5 samples"),
        (["--network", "2k", "--data", "absent.h5"], "absent.h5: no such file"),
        (["--epochs", "0"], "'0' is not a positive int"),
        (["--resume", "absent.pt"], "absent.pt: no such file"),
    ],
)
def test_a_wrong_argument_is_reported_once(file, folder, wrong, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments(file, folder / "run", {"sample": WORLD.size}, 1, *wrong))
    assert caught.value.code == 2
    reported = capsys.readouterr().err
    assert (message in reported) if WORLD.rank == 0 else not reported


@pytest.mark.parallel(1)
def test_the_checkpoint_of_another_run_is_not_overwritten(file, folder, capsys):
    main(arguments(file, folder, {}, 1))
    with pytest.raises(SystemExit):
        main(arguments(file, folder, {}, 1))
    assert "checkpoint.pt exists; continue it with --resume" in capsys.readouterr().err


INTERRUPTED = """
import os, sys
from mpi4py import MPI
from examples.mesh_tangling import durable, train

replace, saves = os.replace, []

def replace_once_then_die(old, new):
    saves.append(new)
    if len(saves) == 2:
        os.kill(os.getpid(), {signal})
    replace(old, new)

def step_once_then_die(progress, loss, samples, step=train.Progress.step, steps=[]):
    steps.append(loss)
    if len(steps) == 2 and MPI.COMM_WORLD.rank == {rank}:
        os.kill(os.getpid(), {signal})
    step(progress, loss, samples)

if {rank} == 0:
    durable.os.replace = replace_once_then_die
else:
    train.Progress.step = step_once_then_die
train.main(sys.argv[1:])
"""


@pytest.mark.parallel(1)
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_interrupted_run_continues_from_its_last_checkpoint(file, folder, rank, sent):
    # Rank 0 dies between writing and renaming the second checkpoint, rank 1 in the second epoch.
    output = folder / "interrupted"
    program = INTERRUPTED.format(rank=rank, signal=int(sent))
    ended = launched(program, arguments(file, output, {"height": 2}, 2))
    assert ended.returncode != 0
    checkpoint = output / "checkpoint.pt"
    assert len(torch.load(checkpoint, weights_only=True)["history"]) == 1, ended.stderr
    main(arguments(file, output, {}, 2, "--resume", str(checkpoint)))
    main(arguments(file, folder / "straight", {}, 2))
    assert_same_run(output, folder / "straight")
