"""Foreign or damaged files, full disks and numbers that are not finite end a run with one line."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from mpi4py import MPI

import distconv as dc
from distconv.data import Checkpoint, HDF5Source
from distconv.data.checkpoint import checkpoints_in
from distconv.data.durable import read_checksummed
from examples.mesh_tangling import train
from examples.mesh_tangling.data import MeshTanglingData
from examples.mesh_tangling.generate import generate
from examples.mesh_tangling.store import describe
from examples.mesh_tangling.train import MeshTangling, main
from examples.trainer import training
from examples.trainer.checkpoint import check_checkpoint, check_finite_state
from examples.trainer.progress import Progress
from tests.support.everywhere import fails_everywhere, on_rank_zero
from tests.support.mesh_runs import SIZE, arguments, files_up_to, write_file

WORLD = MPI.COMM_WORLD
both = pytest.mark.parallel([1, 2])
alone = pytest.mark.parallel(1)
GRID = {"height": WORLD.size}

RECORD = {"step_losses": [0.5], "loss": 0.5, "iou": 0.5, "trivial_iou": 0.5}
SCORES = MeshTangling().scores()


@contextmanager
def unprivileged() -> Iterator[None]:
    """Run as nobody, as permissions do not bind root; MPI cannot reach such a process's memory."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def ends_with_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the error of a run that has to end with one line and without a traceback."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    lines = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error: ")]
    assert len(lines) == (WORLD.rank == 0)
    return WORLD.bcast("".join(lines))


# Checkpoints


FOREIGN: dict[str, tuple[dict[str, Any], str]] = {
    "plain": ({}, "it has no settings and history"),
    "no history": ({"settings": {"seed": 1}}, "it has no settings and history"),
    "settings": ({"settings": [1], "history": []}, "it has no settings and history"),
    "other settings": (
        {"settings": {"seed": 2}, "history": []},
        "was written with --seed 2, this run has --seed 1",
    ),
    "lacking settings": ({"settings": {}, "history": []}, "with --seed None, this run has"),
    "history of words": (
        {"settings": {"seed": 1}, "history": ["a"]},
        "epoch 1 of its history should",
    ),
    "no losses": (
        {"settings": {"seed": 1}, "history": [RECORD | {"step_losses": []}]},
        "epoch 1 of its history should",
    ),
    "loss of words": (
        {"settings": {"seed": 1}, "history": [RECORD, RECORD | {"loss": "low"}]},
        "epoch 2 of its history should",
    ),
}


@alone
@pytest.mark.parametrize("kind", FOREIGN)
def test_the_checkpoint_of_another_run_is_refused(kind: str) -> None:
    extra, message = FOREIGN[kind]
    with pytest.raises(ValueError, match=f"^run/a.pt.*{message}"):
        check_checkpoint(Checkpoint(Path("run/a.pt"), 1, extra), {"seed": 1}, SCORES)
    check_checkpoint(
        Checkpoint(Path("a.pt"), 1, {"settings": {"seed": 1}, "history": [RECORD]}),
        {"seed": 1},
        SCORES,
    )


@alone
def test_a_state_that_is_not_finite_is_refused() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    check_finite_state(model, optimizer)
    optimizer.state[model.bias]["exp_avg"][0] = float("inf")
    with pytest.raises(ValueError, match="optimizer.bias.exp_avg holds values that are not finite"):
        check_finite_state(model, optimizer)
    with torch.no_grad():
        model.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="model.weight holds values that are not finite"):
        check_finite_state(model, optimizer)


# Training


def spoil(path: Path) -> None:
    """Put a file in the place of this one that has a NaN in every sample."""
    other = path.with_name("spoiled.h5")
    write_file(other)
    with h5py.File(other, "r+") as file:
        file["state"][:, 3, SIZE // 2, 7] = np.nan
    os.replace(other, path)


@pytest.mark.parallel(2)
def test_a_loss_that_is_not_finite_stops_training_and_keeps_the_checkpoint(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, output = folder / "data.h5", folder / "run"
    on_rank_zero(lambda: write_file(file))
    main(arguments(file, output, GRID, 1))
    [checkpoint] = checkpoints_in(output)
    there = checkpoint.read_bytes()
    on_rank_zero(lambda: spoil(file))
    words = arguments(file, output, GRID, 3, "--resume", str(output))
    error = ends_with_one_line(words, capsys)
    assert "the loss is nan in epoch 2 after step 1" in error
    assert f"{output} holds the state after epoch 1" in error and "--learning-rate" in error
    assert checkpoint.read_bytes() == there


@pytest.mark.parallel(2)
def test_a_validation_loss_that_is_not_finite_stops_training(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, other = folder / "data.h5", folder / "validation.h5"
    on_rank_zero(lambda: [write_file(file), write_file(other), spoil(other)])
    words = arguments(file, folder / "run", GRID, 1, "--validation", str(other))
    error = ends_with_one_line(words, capsys)
    assert "the validation loss is nan in epoch 1 after step 1; there is no checkpoint" in error
    assert not checkpoints_in(folder / "run")


def never(*arguments: object) -> None:
    """Fail: the test has called a function that must not be called."""
    raise AssertionError("a step was taken")


@both
def test_an_output_folder_that_cannot_be_written_to_is_found_before_the_first_step(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Progress, "step", never)
    file = folder / "data.h5"
    on_rank_zero(lambda: write_file(file))
    assert "is a file; choose a folder" in ends_with_one_line(
        arguments(file, file, GRID, 1), capsys
    )
    assert "run cannot be made: Not a directory" in ends_with_one_line(
        arguments(file, file / "run", GRID, 1), capsys
    )
    with files_up_to(1_000_000):
        error = ends_with_one_line(arguments(file, folder / "full", GRID, 1), capsys)
    assert "checkpoint cannot be written" in error and "free space there" in error
    assert not list((folder / "full").iterdir())


@alone
def test_an_output_folder_of_somebody_else_is_found_before_the_first_step(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = folder / "data.h5"
    write_file(file)
    monkeypatch.setattr(Progress, "step", never)
    for place in (folder, *folder.parents[:3]):
        place.chmod(0o755)
    (folder / "others").mkdir(mode=0o555)
    with unprivileged():
        error = ends_with_one_line(arguments(file, folder / "others", GRID, 1), capsys)
    assert "checkpoint cannot be written" in error and "Permission denied" in error


@pytest.mark.parallel(2)
def test_a_disk_that_fills_up_while_training_keeps_the_last_checkpoint(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, output = folder / "data.h5", folder / "run"
    on_rank_zero(lambda: write_file(file))
    main(arguments(file, output, GRID, 1))
    there = sorted(output.iterdir())
    monkeypatch.setattr(training, "make_room", lambda *arguments: None)
    with files_up_to(10_000):
        words = arguments(file, output, GRID, 2, "--resume", str(output))
        error = ends_with_one_line(words, capsys)
    assert "checkpoint-0000000002.pt cannot be written: File too large; free space" in error
    assert sorted(output.iterdir()) == there
    read_checksummed(checkpoints_in(output)[0])


# Data


def replace(path: Path, name: str, make: Callable[[h5py.File], object]) -> None:
    write_file(path, **{name: None})
    with h5py.File(path, "a") as file:
        make(file)


def renamed(path: Path) -> None:
    write_file(path)
    with h5py.File(path, "a") as file:
        file["state"].attrs["names"] = ["x"] * 18


def virtual(file: h5py.File) -> None:
    layout = h5py.VirtualLayout((5, 1, SIZE, SIZE), np.uint8)
    layout[:] = h5py.VirtualSource("absent.h5", "tangled", (5, 1, SIZE, SIZE))
    file.create_virtual_dataset("tangled", layout)


def version(path: Path) -> None:
    write_file(path)
    with h5py.File(path, "a") as file:
        file.attrs["format_version"] = 99


DATA: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda path: path.touch(), "not a whole HDF5 file"),
    "folder": (lambda path: path.mkdir(), "is a folder"),
    "text": (lambda path: path.write_text("samples" * 999), "not a whole HDF5 file"),
    "dangling file": (lambda path: path.symlink_to("absent"), "no such file"),
    "soft link": (
        lambda path: replace(
            path, "tangled", lambda f: f.update({"tangled": h5py.SoftLink("/absent")})
        ),
        "'tangled' is a link",
    ),
    "external link": (
        lambda path: replace(
            path, "tangled", lambda f: f.update({"tangled": h5py.ExternalLink("absent.h5", "/")})
        ),
        "'tangled' is a link",
    ),
    "virtual": (lambda path: replace(path, "tangled", virtual), "'tangled' lie in other files"),
    "group": (
        lambda path: replace(path, "tangled", lambda f: f.create_group("tangled")),
        "'tangled' is a Group",
    ),
    "text values": (
        lambda path: write_file(path, channel_mean=np.array([b"a"] * 18)),
        "'channel_mean' has values of type",
    ),
    "complex": (
        lambda path: write_file(path, state=np.zeros((5, 18, SIZE, SIZE), complex)),
        "'state' has values of type complex128, expected floating point",
    ),
    "no shape": (
        lambda path: replace(path, "state", lambda f: f.update({"state": h5py.Empty("f")})),
        "'state' has shape None",
    ),
    "mean": (
        lambda path: write_file(path, channel_mean=np.full(18, np.nan, np.float32)),
        "channel_mean must be finite",
    ),
    "deviation": (
        lambda path: write_file(path, channel_deviation=np.full(18, np.inf, np.float32)),
        "channel_deviation must be positive",
    ),
    "names": (renamed, "the channels of 'state' are"),
    "version": (version, "format_version is 99, expected 1"),
}


@both
@pytest.mark.parametrize("kind", DATA)
def test_a_foreign_data_file_is_refused_on_every_rank_in_one_line(folder: Path, kind: str) -> None:
    make, message = DATA[kind]
    on_rank_zero(lambda: make(folder / "data.h5"))
    grid = dc.ProcessGrid(sample=-1)
    fails_everywhere(
        lambda: MeshTanglingData(folder / "data.h5", grid), f"^(?!.*\n).*data.h5.*{message}"
    )


@alone
def test_data_without_permission_are_refused(folder: Path) -> None:
    def forbid() -> None:
        (folder / "private").mkdir()
        write_file(folder / "private" / "data.h5")
        (folder / "private").chmod(0)

    on_rank_zero(forbid)
    grid = dc.ProcessGrid(sample=-1)
    with unprivileged():
        fails_everywhere(
            lambda: MeshTanglingData(folder / "private" / "data.h5", grid),
            "Permission denied.*data.h5",
        )
    on_rank_zero(lambda: (folder / "private").chmod(0o700))


def test_a_flipped_bit_of_the_data_is_refused_by_name_or_changes_no_value(tmp_path: Path) -> None:
    path = tmp_path / "data.h5"
    generate(path, 2, 16)
    whole, draw = path.read_bytes(), random.Random(0)

    def values() -> list[bytes]:
        described = describe(path)
        read = [described.mean.tobytes(), described.deviation.tobytes()]
        for name in ("state", "tangled"):
            source = HDF5Source(path, name)
            source.facts()
            for sample in range(source.samples):
                values = np.empty(source.shape, source.dtype)
                source.read_into(values, sample, dc.Box((0, 0, 0), source.shape))
                read.append(values.tobytes())
        return read

    expected, refused = values(), 0
    for _ in range(200):
        damaged, place = bytearray(whole), draw.randrange(8 * len(whole))
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        try:
            assert values() == expected
        except (OSError, ValueError) as error:
            assert str(path) in str(error)
            refused += 1
    # The rest lies between what is used.
    assert refused > 150


@pytest.mark.parallel(2)
def test_a_flipped_bit_of_the_data_ends_the_run_with_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = folder / "data.h5"

    def damaged() -> None:
        generate(file, 4, 64)
        with h5py.File(file) as whole:
            chunk = whole["state"].id.get_chunk_info(9)
        stored = bytearray(file.read_bytes())
        stored[chunk.byte_offset + chunk.size // 2] ^= 1
        file.write_bytes(stored)

    on_rank_zero(damaged)
    error = ends_with_one_line(arguments(file, folder / "run", GRID, 1), capsys)
    assert "data.h5: cannot read 'state' of sample 2" in error


@both
def test_data_without_checksums_are_told_of(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = folder / "plain.h5", folder / "summed.h5"
    on_rank_zero(lambda: [write_file(files[0]), generate(files[1], 1, 8)])
    grid = dc.ProcessGrid(sample=-1)
    train.tell_of_unchecked(WORLD.rank, *(MeshTanglingData(path, grid) for path in files))
    told = capsys.readouterr().out
    assert ("plain.h5 has no checksums" in told) == (WORLD.rank == 0)
    assert "summed.h5" not in told
