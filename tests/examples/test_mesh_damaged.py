"""Foreign or damaged files, full disks and numbers that are not finite end a run with one line."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
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
from examples.mesh_tangling.data import MeshTanglingData
from examples.mesh_tangling.store import describe
from examples.mesh_tangling.train import MeshTangling, main
from examples.trainer.checkpoint import check_checkpoint, check_finite_state
from examples.trainer.progress import Progress
from tests.support.everywhere import fails_everywhere, on_rank_zero
from tests.support.mesh_runs import SIZE, arguments, files_up_to, generate_alone, write_file

WORLD = MPI.COMM_WORLD
both = pytest.mark.parallel([1, 2])
alone = pytest.mark.parallel(1)
GRID = {"height": WORLD.size}

RECORD = {"step_losses": [0.5], "loss": 0.5, "iou": 0.5, "trivial_iou": 0.5}
SCORES = MeshTangling().scores()


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
    "no history": ({"settings": {"seed": 1}}, "it has no settings and history"),
    "other settings": (
        {"settings": {"seed": 2}, "history": []},
        "was written with --seed 2, this run has --seed 1",
    ),
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
    validated = folder / "validated"
    on_rank_zero(lambda: [file.rename(folder / "spoiled.h5"), write_file(file)])
    words = arguments(file, validated, GRID, 1, "--validation", str(folder / "spoiled.h5"))
    error = ends_with_one_line(words, capsys)
    assert "the validation loss is nan in epoch 1 after step 1; there is no checkpoint" in error
    assert not checkpoints_in(validated)


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


# Data


def changed(path: Path, change: Callable[[h5py.File], object], *missing: str) -> None:
    """Write a file, without some datasets, and change it."""
    write_file(path, **dict.fromkeys(missing))
    with h5py.File(path, "a") as file:
        change(file)


def virtual(file: h5py.File) -> None:
    layout = h5py.VirtualLayout((5, 1, SIZE, SIZE), np.uint8)
    layout[:] = h5py.VirtualSource("absent.h5", "tangled", (5, 1, SIZE, SIZE))
    file.create_virtual_dataset("tangled", layout)


LINK = {"tangled": h5py.SoftLink("/absent")}

CHANGED: dict[str, tuple[Callable[[h5py.File], object], list[str], str]] = {
    "link": (lambda f: f.update(LINK), ["tangled"], "'tangled' is a link"),
    "virtual": (virtual, ["tangled"], "'tangled' are in other files"),
    "group": (lambda f: f.create_group("tangled"), ["tangled"], "'tangled' is a Group"),
    "nothing": (lambda f: None, ["tangled"], "no dataset 'tangled'; choose from"),
    "names": (
        lambda f: f["state"].attrs.update({"names": ["x"] * 18}),
        [],
        "the channels of 'state' are",
    ),
    "version": (lambda f: f.attrs.update(format_version=99), [], "format_version is 99, expected"),
}

REPLACED: dict[str, tuple[str, np.ndarray, str]] = {
    "channels": ("state", np.zeros((5, 17, 64, 64), "f4"), r"\(5, 17.*, expected \(5, 18, 64, 64"),
    "dimensions": ("state", np.zeros((5, 18, 64), "f4"), r"\(5, 18, 64\), expected \(samples, 18"),
    "samples": ("tangled", np.zeros((4, 1, 64, 64), "u1"), r"\(4, 1, .*, expected \(5, 1, 64"),
    "text": ("channel_mean", np.array([b"a"] * 18), "'channel_mean' has values of type"),
    "mean": ("channel_mean", np.full(18, np.nan, "f4"), "channel_mean must be finite"),
    "deviation": ("channel_deviation", np.zeros(18, "f4"), "channel_deviation must be positive"),
}

DATA: dict[str, tuple[Callable[[Path], object], str]] = {
    name: (lambda path, change=change, missing=missing: changed(path, change, *missing), message)
    for name, (change, missing, message) in CHANGED.items()
} | {
    kind: (lambda path, name=name, values=values: write_file(path, **{name: values}), message)
    for kind, (name, values, message) in REPLACED.items()
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


def test_a_flipped_bit_of_the_data_is_refused_by_name_or_changes_no_value(tmp_path: Path) -> None:
    path = tmp_path / "data.h5"
    generate_alone(path, 2, 16)
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
        generate_alone(file, 4, 64)
        with h5py.File(file) as whole:
            chunk = whole["state"].id.get_chunk_info(9)
        stored = bytearray(file.read_bytes())
        stored[chunk.byte_offset + chunk.size // 2] ^= 1
        file.write_bytes(stored)

    on_rank_zero(damaged)
    error = ends_with_one_line(arguments(file, folder / "run", GRID, 1), capsys)
    assert "data.h5: cannot read 'state' of sample 2" in error
