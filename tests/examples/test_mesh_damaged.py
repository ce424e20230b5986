"""Foreign or damaged files, full disks and numbers that are not finite end a run with one line."""

from __future__ import annotations

import os
import random
import shutil
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
from examples.mesh_tangling import train
from examples.mesh_tangling.checkpoint import load_checkpoint, save_checkpoint
from examples.mesh_tangling.durable import previous_of, read_checksummed, write_checksummed
from examples.mesh_tangling.generate import generate
from examples.mesh_tangling.reader import MeshTanglingData
from examples.mesh_tangling.source import SampleFile
from examples.mesh_tangling.train import main
from tests.support.mesh_runs import SIZE, arguments, fails_everywhere, files_up_to, write_file

WORLD = MPI.COMM_WORLD
both = pytest.mark.parallel([1, 2])
alone = pytest.mark.parallel(1)
GRID = {"height": WORLD.size}

RECORD = {"step_losses": [0.5], "loss": 0.5, "iou": 0.5, "trivial_iou": 0.5}


@contextmanager
def unprivileged() -> Iterator[None]:
    """Be nobody: permissions do not bind root. MPI cannot reach the memory of such a process."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def on_rank_zero(action: Callable[[], object]) -> None:
    if WORLD.rank == 0:
        action()
    WORLD.barrier()


def ends_with_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The complaint of a run that has to end with one, and with no traceback."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    lines = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error: ")]
    assert len(lines) == (WORLD.rank == 0)
    return WORLD.bcast("".join(lines))


# Checkpoints


def model_and_optimizer(wide: int = 3) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(wide, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, wide)).sum().backward()
    optimizer.step()
    return model, optimizer


def content() -> dict[str, Any]:
    model, optimizer = model_and_optimizer()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "settings": {"seed": 1},
        "history": [dict(RECORD)],
    }


def changed(path: str, value: Any) -> dict[str, Any]:
    """The content of a checkpoint with another value at a path of names."""
    state = place = content()
    *names, last = path.split("/")
    for name in names:
        place = place[int(name) if name.isdecimal() else name]
    place[last] = value
    return state


class Planted:
    """What runs a function when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("planted",)


FOREIGN = {
    "list": (lambda: [1, 2], "it holds list"),
    "tensor": (lambda: torch.zeros(3), "it holds Tensor"),
    "none": (lambda: None, "it holds NoneType"),
    "plain state": (lambda: content()["model"], "'model' is missing, expected dict"),
    "no history": (lambda: changed("history", None), "'history' is NoneType, expected list"),
    "settings": (lambda: changed("settings", [1]), "'settings' is list, expected dict"),
    "other settings": (lambda: changed("settings/seed", 2), "with --seed 2, this run has --seed 1"),
    "lacking settings": (lambda: changed("settings", {}), "with --seed None, this run has"),
    "history of words": (lambda: changed("history", ["a"]), "epoch 1 of its history should"),
    "no losses": (lambda: changed("history/0/step_losses", []), "epoch 1 of its history should"),
    "loss of words": (lambda: changed("history/0/loss", "low"), "epoch 1 of its history should"),
    "keys": (lambda: changed("model", {"w": torch.ones(2)}), "of another model"),
    "shapes": (lambda: changed("model/weight", torch.ones(2, 4)), "of another model.*size"),
    "numbers": (lambda: changed("model/weight", 1.0), "of another model"),
    "optimizer": (lambda: changed("optimizer", {}), "of another model"),
    "groups": (lambda: changed("optimizer/param_groups", 3), "of another model"),
    "kept": (lambda: changed("optimizer/state/0/exp_avg", torch.ones(2, 4)), "exp_avg has shape"),
    "infinite": (
        lambda: changed("model/bias", torch.tensor([1.0, float("inf")])),
        "model.bias holds values that are not finite",
    ),
    "code": (lambda: changed("history", [Planted()]), "is not a checkpoint"),
}


@both
@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_checkpoint_is_refused_on_every_rank_in_one_line(folder: Path, kind: str) -> None:
    make, message = FOREIGN[kind]
    path = folder / "foreign.pt"
    on_rank_zero(lambda: write_checksummed(path, lambda file: torch.save(make(), file)))

    def load() -> None:
        load_checkpoint(path, WORLD, *model_and_optimizer(), {"seed": 1})

    fails_everywhere(load, f"^(?!.*\n).*foreign.pt.*{message}|^{message}.*foreign.pt")
    assert not Path("planted").exists()


@alone
def test_a_folder_and_a_file_without_permission_are_refused_as_checkpoints(folder: Path) -> None:
    def load(path: Path) -> None:
        with unprivileged():
            load_checkpoint(path, WORLD, *model_and_optimizer(), {})

    def forbid() -> None:
        (folder / "private").mkdir()
        (folder / "private" / "a.pt").touch()
        (folder / "private").chmod(0)

    on_rank_zero(forbid)
    fails_everywhere(lambda: load_checkpoint(folder, WORLD, *model_and_optimizer(), {}), "Is a dir")
    fails_everywhere(lambda: load(folder / "private" / "a.pt"), "a.pt.*Permission denied")
    on_rank_zero(lambda: (folder / "private").chmod(0o700))


@both
def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "a.pt"
    model, optimizer = model_and_optimizer()

    def load() -> int:
        return len(load_checkpoint(path, WORLD, *model_and_optimizer(), {}))

    def damage(path: Path) -> None:
        stored = bytearray(path.read_bytes())
        stored[len(stored) // 2] ^= 16
        path.write_bytes(stored)

    def save() -> None:
        for epochs in (1, 2):
            save_checkpoint(path, model, optimizer, {}, [RECORD] * epochs)

    on_rank_zero(save)
    assert load() == 2
    on_rank_zero(lambda: damage(path))
    capsys.readouterr()
    assert load() == 1
    told = capsys.readouterr().err
    if WORLD.rank == 0:
        assert "a.pt is damaged" in told and "continuing from" in told and "a.previous.pt" in told
    on_rank_zero(path.unlink)
    assert load() == 1
    on_rank_zero(lambda: shutil.copy(previous_of(path), path))
    on_rank_zero(lambda: [damage(path), damage(previous_of(path))])
    fails_everywhere(load, "a.pt is damaged.*so is the one before.*a.previous.pt is damaged")


@both
def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(folder: Path) -> None:
    file, output = folder / "data.h5", folder / "run"
    path = output / "checkpoint.pt"
    on_rank_zero(lambda: write_file(file))
    main(arguments(file, output, GRID, 2))
    on_rank_zero(lambda: os.truncate(path, 1000))
    main(arguments(file, output, GRID, 3, "--resume", str(path)))
    epochs = [
        len(torch.load(path, weights_only=True)["history"]) for path in (path, previous_of(path))
    ]
    assert epochs == [3, 2]
    assert (output / "checkpoint.damaged.pt").stat().st_size == 1000


@both
def test_a_model_that_is_not_finite_is_not_saved(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    path = tmp_path / "a.pt"
    save_checkpoint(path, model, optimizer, {}, [])
    there = path.read_bytes()
    with torch.no_grad():
        model.bias[0] = float("nan")
    with pytest.raises(ValueError, match="model.bias holds values that are not finite"):
        save_checkpoint(path, model, optimizer, {}, [RECORD])
    assert path.read_bytes() == there


# Training


def spoil(path: Path) -> None:
    """Put a file in the place of this one that has a NaN in every sample."""
    other = path.with_name("spoiled.h5")
    write_file(other)
    with h5py.File(other, "r+") as file:
        file["state"][:, 3, SIZE // 2, 7] = np.nan
    os.replace(other, path)


@both
def test_a_loss_that_is_not_finite_stops_training_and_keeps_the_checkpoint(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, output = folder / "data.h5", folder / "run"
    checkpoint = output / "checkpoint.pt"
    on_rank_zero(lambda: write_file(file))
    main(arguments(file, output, GRID, 1))
    there = checkpoint.read_bytes()
    on_rank_zero(lambda: spoil(file))
    words = arguments(file, output, GRID, 3, "--resume", str(checkpoint))
    error = ends_with_one_line(words, capsys)
    assert "the loss is nan in epoch 2 after step 1" in error
    assert f"{checkpoint} holds the state after epoch 1" in error and "--learning-rate" in error
    assert checkpoint.read_bytes() == there


@both
def test_a_validation_loss_that_is_not_finite_stops_training(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, other = folder / "data.h5", folder / "validation.h5"
    on_rank_zero(lambda: [write_file(file), write_file(other), spoil(other)])
    words = arguments(file, folder / "run", GRID, 1, "--validation", str(other))
    error = ends_with_one_line(words, capsys)
    assert "the validation loss is nan in epoch 1 after step 1; there is no checkpoint" in error
    assert not (folder / "run" / "checkpoint.pt").exists()


def never(*arguments: object) -> None:
    """Stand for what must not happen."""
    raise AssertionError("a step was taken")


@both
def test_an_output_folder_that_cannot_be_written_to_is_found_before_the_first_step(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train.Progress, "step", never)
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
    assert "checkpoint.pt cannot be written" in error and "free space there" in error
    assert not list((folder / "full").iterdir())


@alone
def test_an_output_folder_of_somebody_else_is_found_before_the_first_step(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = folder / "data.h5"
    write_file(file)
    monkeypatch.setattr(train.Progress, "step", never)
    for place in (folder, *folder.parents[:2]):
        place.chmod(0o755)
    (folder / "others").mkdir(mode=0o555)
    with unprivileged():
        error = ends_with_one_line(arguments(file, folder / "others", GRID, 1), capsys)
    assert "checkpoint.pt cannot be written" in error and "Permission denied" in error


@both
def test_a_disk_that_fills_up_while_training_keeps_the_last_checkpoint(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, output = folder / "data.h5", folder / "run"
    checkpoint = output / "checkpoint.pt"
    on_rank_zero(lambda: write_file(file))
    main(arguments(file, output, GRID, 1))
    there = sorted(output.iterdir())
    monkeypatch.setattr(train, "make_room", lambda *arguments: None)
    with files_up_to(10_000):
        words = arguments(file, output, GRID, 2, "--resume", str(checkpoint))
        error = ends_with_one_line(words, capsys)
    assert "checkpoint.pt cannot be written: File too large; free space" in error
    assert sorted(output.iterdir()) == there
    read_checksummed(checkpoint)


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
        file = SampleFile(path)
        file.facts()
        read = [file.mean.tobytes(), file.deviation.tobytes()]
        for name in ("state", "tangled"):
            for sample in range(file.samples):
                box = np.empty((1, *file.shape(name)[1:]), file.dtype(name))
                file.read_into(box, 0, name, sample, ())
                read.append(box.tobytes())
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


@both
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
