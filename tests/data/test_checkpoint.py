"""A run resumes from its checkpoint on any grid; damaged and foreign files are refused by name."""

from __future__ import annotations

import io
import os
import re
import warnings
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import distconv as dc
from distconv.data import Dataset, Loader, checkpoint
from distconv.data.checkpoint import FORMAT, checkpoints_in
from distconv.data.durable import only_writer, read_checksummed, write_checksummed
from distconv.grid.journal import DivergenceError
from tests.support.everywhere import WORLD, fails_everywhere, on_rank_zero
from tests.support.mesh_runs import files_up_to
from tests.support.sample_files import X, Y
from tests.support.serial import raised_everywhere, told_on_one_rank

every_size = pytest.mark.parallel([1, 2, 4])
both = pytest.mark.parallel([1, 2])
several = pytest.mark.parallel([2, 4])

GRIDS: dict[int, list[dict[str, int]]] = {
    1: [{}, {}],
    2: [{"sample": 2}, {"width": 2}],
    4: [{"sample": 2, "height": 2}, {"channel": 2, "width": 2}],
}


class Run:
    """A small training program on a grid, with dropout, momentum and a schedule."""

    def __init__(self, extents: dict[str, int], shard: bool = False, wide: int = 4) -> None:
        torch.manual_seed(1)
        net = torch.nn.Sequential(
            torch.nn.Conv2d(3, wide, 3, padding=1),
            torch.nn.BatchNorm2d(wide),
            torch.nn.Dropout(0.3),
            torch.nn.Conv2d(wide, 4, 1),
        )
        grid = dc.ProcessGrid(**extents)
        self.model = dc.parallelize(net.double(), grid, shard_parameters=shard)
        self.opt = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.opt, [2, 4], 0.5)
        fields = {"x": X.astype("f8") / X.max(), "y": Y % 4}
        data = Dataset(fields, grid, dtype={"x": torch.float64})
        self.loader = Loader(data, batch_size=2, shuffle=True)

    @property
    def parts(self) -> tuple[Any, ...]:
        return self.model, self.opt, self.scheduler, self.loader

    def train(self, steps: int) -> list[float]:
        """Take the next `steps`, over as many epochs as needed, and return their losses."""
        losses: list[float] = []
        while len(losses) < steps:
            for x, y in self.loader:
                loss = torch.nn.functional.cross_entropy(self.model(x), y)
                loss.backward()
                self.opt.step()
                self.opt.zero_grad()
                self.scheduler.step()
                losses.append(loss.item())
                if len(losses) == steps:
                    break
        return losses


def names(folder: Path) -> list[str]:
    return [path.name for path in checkpoints_in(folder)]


def damage(path: Path) -> None:
    stored = bytearray(path.read_bytes())
    stored[len(stored) // 2] ^= 16
    path.write_bytes(stored)


@every_size
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("shard", [False, True])
def test_a_run_goes_on_in_the_middle_of_an_epoch_on_another_grid(
    folder: Path, shard: bool, sharded: bool
) -> None:
    first, second = GRIDS[WORLD.size]
    expected = Run(first).train(7)
    before = Run(first, shard)
    assert before.train(4) == pytest.approx(expected[:4], rel=1e-9)
    path = dc.save_checkpoint(
        folder, *before.parts, step=4, extra={"note": [1, "two"]}, sharded=sharded
    )
    assert path == folder / "checkpoint-0000000004.pt"
    after = Run(second, shard and (sharded or "channel" not in second))
    torch.manual_seed(99)
    found = dc.load_checkpoint(folder, *after.parts)
    assert found is not None
    assert (found.path, found.step, found.extra) == (path, 4, {"note": [1, "two"]})
    assert after.train(3) == pytest.approx(expected[4:], rel=1e-9)


@every_size
def test_each_rank_writes_its_share_once(folder: Path) -> None:
    run = Run(GRIDS[WORLD.size][-1], shard=True)
    run.train(1)
    dc.save_checkpoint(folder, *run.parts, step=1, sharded=True)
    WORLD.barrier()
    sizes = []
    for path in folder.glob("*.shard"):
        blocks = torch.load(io.BytesIO(read_checksummed(path)), weights_only=True)
        sizes.append(sum(block.numel() for block in blocks.values()))
    states = dc.full_state_dict(run.model), dc.full_state_dict(run.opt)["state"]
    tensors = [*states[0].values(), *(x for kept in states[1].values() for x in kept.values())]
    assert len(sizes) == WORLD.size and sum(sizes) == sum(x.numel() for x in tensors)
    assert WORLD.size * max(sizes) < 2 * sum(sizes)


@both
def test_a_damaged_or_missing_shard_gives_way_to_the_checkpoint_before(folder: Path) -> None:
    run = Run({"height": WORLD.size})
    paths = [dc.save_checkpoint(folder, run.model, step=n, sharded=True) for n in (1, 2, 3)]
    WORLD.barrier()
    assert len(list(folder.glob("*.shard"))) == 2 * WORLD.size
    on_rank_zero(lambda: damage(max(folder.glob("checkpoint-0000000003.*.shard"))))
    fails_everywhere(
        lambda: dc.load_checkpoint(paths[2], run.model), "0003.*.shard is damaged: its content"
    )
    with told_on_one_rank("0003"):
        found = dc.load_checkpoint(folder, run.model)
    assert found is not None and found.step == 2
    on_rank_zero(lambda: min(folder.glob("checkpoint-0000000002.*.shard")).unlink())
    fails_everywhere(lambda: dc.load_checkpoint(folder, run.model), "shard: no such file; there is")


@both
def test_a_shard_that_cannot_be_read_now_costs_no_checkpoint(folder: Path) -> None:
    run = Run({"height": WORLD.size})
    for step in (1, 2):
        dc.save_checkpoint(folder, run.model, step=step, sharded=True)
    WORLD.barrier()
    shard = max(folder.glob("checkpoint-0000000002.*.shard"))
    aside = folder / "aside"
    WORLD.barrier()
    on_rank_zero(lambda: (shard.rename(aside), shard.mkdir()))
    fails_everywhere(lambda: dc.load_checkpoint(folder, run.model), "shard cannot be read")
    on_rank_zero(lambda: (shard.rmdir(), aside.rename(shard)))
    found = dc.load_checkpoint(folder, run.model)
    assert found is not None and found.step == 2


@both
def test_shards_go_with_their_checkpoints_and_those_of_killed_writers_too(folder: Path) -> None:
    run = Run({"height": WORLD.size})
    left = folder / f"checkpoint-0000000009.{'0' * 16}-0.shard"
    on_rank_zero(left.touch)
    for step in (1, 2, 2, 3):
        dc.save_checkpoint(folder, run.model, step=step, sharded=True)
    WORLD.barrier()
    assert len(list(folder.iterdir())) == 2 * (1 + WORLD.size) and not left.exists()
    WORLD.barrier()
    dc.save_checkpoint(folder, run.model, step=3, keep=1)
    WORLD.barrier()
    assert [path.name for path in folder.iterdir()] == names(folder)
    found = dc.load_checkpoint(folder, run.model)
    assert found is not None and found.step == 3


@both
def test_serial_torch_takes_the_state_without_distconv(folder: Path) -> None:
    run = Run(GRIDS[WORLD.size][-1])
    run.train(1)
    path = dc.save_checkpoint(folder, run.model)
    serial = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3, padding=1),
        torch.nn.BatchNorm2d(4),
        torch.nn.Dropout(),
        torch.nn.Conv2d(4, 4, 1),
    ).double()
    serial.load_state_dict(torch.load(path, weights_only=True)["model"])
    assert torch.equal(serial[0].weight, run.model.state_dict()["0.weight"])


@both
def test_the_last_few_are_kept_and_what_killed_writers_left_is_removed(folder: Path) -> None:
    run = Run({"height": WORLD.size})
    on_rank_zero((folder / "checkpoint-0000000001.pt.0123456789abcdef.partial").touch)
    for step in (1, 2, 3, 10):
        dc.save_checkpoint(folder, run.model, step=step, keep=3)
    assert names(folder) == [f"checkpoint-{step:010d}.pt" for step in (10, 3, 2)]
    assert len(list(folder.iterdir())) == 3
    WORLD.barrier()
    fails_everywhere(
        lambda: dc.save_checkpoint(folder, run.model, step=5), "0010.pt is of a later step than"
    )
    fails_everywhere(lambda: dc.save_checkpoint(folder, run.model, step=11, keep=0), "keep=0")
    assert len(names(folder)) == 3


@both
def test_a_damaged_checkpoint_gives_way_to_the_one_before(folder: Path) -> None:
    run = Run({"height": WORLD.size})
    paths = [dc.save_checkpoint(folder, run.model, step=step) for step in (1, 2)]
    on_rank_zero(lambda: damage(paths[1]))

    def load() -> int:
        found = dc.load_checkpoint(folder, run.model)
        assert found is not None
        return found.step

    for _ in range(2):
        with told_on_one_rank("0002.pt is damaged.*continuing from .*0001.pt"):
            assert load() == 1
        assert sorted(folder.iterdir()) == paths  # a reader changes nothing in the folder
    WORLD.barrier()
    dc.save_checkpoint(folder, run.model, step=2)
    assert load() == 2
    on_rank_zero(lambda: [os.truncate(path, 100) for path in paths])
    for _ in range(2):
        fails_everywhere(
            load, "0002.pt does not end with its checksum.*0001.pt.*there is no earlier checkpoint"
        )
    on_rank_zero(paths[1].unlink)
    on_rank_zero(paths[0].unlink)
    fails_everywhere(load, "no checkpoint in this folder")
    assert dc.load_checkpoint(folder, run.model, missing_ok=True) is None


@both
@pytest.mark.parametrize("sharded", [False, True])
def test_a_damaged_checkpoint_of_a_later_step_makes_room_for_a_save_and_is_still_there(
    folder: Path, sharded: bool
) -> None:
    run = Run({"height": WORLD.size})
    for step in (1, 5):
        path = dc.save_checkpoint(folder, run.model, step=step, sharded=sharded)
    save = partial(dc.save_checkpoint, folder, run.model, sharded=sharded)
    fails_everywhere(lambda: save(step=3), "0005.pt is of a later step")
    WORLD.barrier()
    on_rank_zero(lambda: damage(max(folder.glob("checkpoint-0000000005.*[td]"))))
    if sharded:
        assert names(folder)[0] == path.name
    save(step=3)
    assert names(folder) == ["checkpoint-0000000003.pt", "checkpoint-0000000001.pt"]
    on_rank_zero(lambda: [damage(folder / name) for name in names(folder)])
    for missing_ok in (False, True):
        # Also after a requeue, a run must not start anew by itself.
        load = partial(dc.load_checkpoint, folder, run.model, missing_ok=missing_ok)
        fails_everywhere(load, "there is no earlier checkpoint")
    on_rank_zero(lambda: [(folder / name).unlink() for name in names(folder)])
    load = partial(dc.load_checkpoint, folder, run.model, missing_ok=True)
    fails_everywhere(
        load, "0005.damaged.pt is damaged; there is no.*remove it to start from the beginning"
    )


@both
def test_a_checkpoint_that_is_saved_again_while_it_is_read_is_read_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run({"height": WORLD.size})
    save = partial(dc.save_checkpoint, folder, run.model, step=1, sharded=True)
    save(extra={"number": 1})
    WORLD.barrier()
    read, turns = checkpoint.bytes_of_rank_zero, []

    def saved_again(*arguments: Any) -> bytes:
        found = read(*arguments)
        if not turns:
            turns.append(1)
            save(extra={"number": 2})
        return found

    monkeypatch.setattr(checkpoint, "bytes_of_rank_zero", saved_again)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = dc.load_checkpoint(folder, run.model)
    assert found is not None and found.extra == {"number": 2}
    assert names(folder) == ["checkpoint-0000000001.pt"]


@both
@pytest.mark.parametrize("sharded", [False, True])
def test_another_model_is_not_saved_to_the_same_folder(folder: Path, sharded: bool) -> None:
    grid = dc.ProcessGrid(height=-1)
    generator, discriminator = (
        dc.parallelize(torch.nn.Linear(*sizes), grid) for sizes in ((2, 3), (3, 1))
    )
    save = partial(dc.save_checkpoint, folder, sharded=sharded)
    save(generator, step=1)
    for step in (1, 2):
        fails_everywhere(
            lambda step=step: save(discriminator, step=step),
            "0001.pt holds another model.*'bias'.*separate folder",
        )
    larger = torch.nn.Linear(2, 3)
    larger.register_parameter("more", torch.nn.Parameter(torch.zeros(1)))
    dc.parallelize(larger, grid)
    fails_everywhere(lambda: save(larger, step=2), "another model, which differs in .'more'.;")
    WORLD.barrier()
    generator.register_buffer("grown", torch.zeros(1))
    save(generator, step=1)
    generator.register_buffer("grown", torch.zeros(2))
    save(generator, step=2)
    generator.grown = None
    save(generator, step=3)
    fails_everywhere(lambda: save(generator, step=1), "0003.pt is of a later step")


@both
def test_nothing_is_written_to_a_url(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    grid = dc.ProcessGrid(height=-1)
    model = dc.parallelize(torch.nn.Linear(2, 3), grid)
    x = dc.distribute_tensor(torch.ones(1, 2, 8), grid)
    fails_everywhere(lambda: dc.save_checkpoint("s3://bucket/run", model), "run is a URL")
    for url in ("s3://bucket/x.npy", "S3://bucket/x.npy", "simplecache::s3://bucket/x.npy"):
        fails_everywhere(lambda url=url: dc.data.save(url, x), "x.npy is a URL")
    fails_everywhere(lambda: dc.data.convert(X, "s3://bucket/x.zarr", grid), "x.zarr is a URL")
    assert not list(folder.iterdir())


@both
def test_one_file_can_be_named_and_nothing_else_is_taken_for_it(folder: Path) -> None:
    run = Run({"height": WORLD.size})
    paths = [dc.save_checkpoint(folder, run.model, step=step) for step in (1, 2)]
    found = dc.load_checkpoint(paths[0], run.model)
    assert found is not None and found.step == 1
    on_rank_zero(lambda: damage(paths[1]))
    fails_everywhere(lambda: dc.load_checkpoint(paths[1], run.model), "0002.pt is damaged")
    fails_everywhere(lambda: dc.load_checkpoint(folder / "absent", run.model), "no such file or f")


class Planted:
    """An object that runs a function when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("planted",)


def content() -> dict[str, Any]:
    """Return the content of a checkpoint of `Run`."""
    net = torch.nn.Linear(3, 2)
    opt = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 3)).sum().backward()
    opt.step()
    return {
        "format": FORMAT,
        "step": 1,
        "random": torch.get_rng_state(),
        "extra": {},
        "model": net.state_dict(),
        "optimizer": opt.state_dict(),
        "optimizer of": {"class": "Adam", "parameters": [["weight", "bias"]]},
        "scheduler": {},
    }


def changed(path: str, value: Any) -> dict[str, Any]:
    """Return the content of a checkpoint with another value at a path of names."""
    state = place = content()
    *outer, last = path.split("/")
    for name in outer:
        place = place[int(name) if name.isdecimal() else name]
    place[last] = value
    return state


FOREIGN: dict[str, tuple[Callable[[], Any], str]] = {
    "list": (lambda: [1, 2], "it holds list"),
    "tensor": (lambda: torch.zeros(3), "it holds Tensor"),
    "plain state": (lambda: content()["model"], "its format is None"),
    "format": (lambda: changed("format", 99), "its format is 99, expected 1"),
    "no step": (lambda: changed("step", None), "'step' is NoneType, expected int"),
    "no model": (lambda: changed("model", [1]), "'model' is list, expected dict"),
    "keys": (lambda: changed("model", {"w": torch.ones(2)}), "of another model"),
    "shapes": (lambda: changed("model/weight", torch.ones(2, 4)), "of another model.*size"),
    "numbers": (lambda: changed("model/weight", 1.0), "of another model"),
    "optimizer": (lambda: changed("optimizer", {}), "of another model"),
    "no optimizer": (lambda: changed("optimizer", None), "holds no state of the optimizer"),
    "groups": (lambda: changed("optimizer/param_groups", 3), "of another model"),
    "no loader": (content, "holds no state of the loader"),
    "loader": (lambda: changed("loader", {"epoch": 1}), "does not fit the loader"),
    "code": (lambda: changed("extra", Planted()), "is not a checkpoint"),
}


@both
@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_checkpoint_is_refused_on_every_rank_in_one_line(folder: Path, kind: str) -> None:
    make, message = FOREIGN[kind]
    path = folder / "foreign.pt"
    on_rank_zero(lambda: write_checksummed(path, lambda file: torch.save(make(), file)))
    grid = dc.ProcessGrid(sample=-1)
    model = dc.parallelize(torch.nn.Linear(3, 2), grid)
    optimizer = torch.optim.Adam(model.parameters())
    loader = Loader(Dataset(X, grid))

    def load() -> None:
        dc.load_checkpoint(path, model, optimizer, loader=loader)

    fails_everywhere(load, f"^(?!.*\n).*foreign.pt.*{message}|^{message}.*foreign.pt")
    assert not Path("planted").exists()


@both
def test_what_could_not_be_loaded_safely_is_not_saved(folder: Path) -> None:
    run = Run({"height": WORLD.size})
    fails_everywhere(
        lambda: dc.save_checkpoint(folder, run.model, extra={"grid": [1, Planted()]}),
        r"objects that cannot be loaded safely: extra\['grid'\]\[1\] is of type Planted",
    )
    assert not names(folder) and not Path("planted").exists()


@both
def test_a_full_disk_leaves_the_checkpoints_that_there_are(folder: Path) -> None:
    run = Run({"height": WORLD.size}, wide=500)
    path = dc.save_checkpoint(folder, run.model, step=1)
    with files_up_to(20_000):
        fails_everywhere(
            lambda: dc.save_checkpoint(folder, run.model, step=2), "0002.pt cannot be written"
        )
    with files_up_to(20_000):
        fails_everywhere(
            lambda: dc.save_checkpoint(folder, run.model, step=2, sharded=True),
            "shard cannot be written",
        )
    WORLD.barrier()
    assert list(folder.iterdir()) == [path]
    read_checksummed(path)
    WORLD.barrier()
    on_rank_zero((folder / "file").touch)
    fails_everywhere(lambda: dc.save_checkpoint(folder / "file", run.model), "cannot be created")


def skip_a_step(run: Run) -> None:
    run.opt.step = lambda: None  # type: ignore[assignment, method-assign]


def take_another_rate(run: Run) -> None:
    run.opt.param_groups[0]["lr"] *= 3


@pytest.mark.parallel(2)
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("change", [skip_a_step, take_another_rate])
def test_a_state_that_differs_between_ranks_is_not_saved(
    folder: Path, change: Callable[[Run], None], sharded: bool
) -> None:
    run = Run({"sample": 2})
    run.train(2)
    dc.save_checkpoint(folder, *run.parts, step=2)
    if WORLD.rank:
        change(run)
    run.train(1)
    save = partial(dc.save_checkpoint, step=3, keep=1, sharded=sharded)
    message = raised_everywhere(RuntimeError, save, folder, *run.parts)
    assert "save_checkpoint" in message and "is not the same on all ranks: rank 1" in message
    assert names(folder) == ["checkpoint-0000000002.pt"]


@pytest.mark.parallel(2)
def test_functions_that_differ_late_are_found_when_a_state_is_saved(folder: Path) -> None:
    run = Run({"height": 2})
    x = dc.distribute_tensor(torch.arange(64.0).reshape(1, 1, 8, 8), run.loader.grid)
    for function in (torch.special.erfcx, torch.special.log_ndtr):
        function(x)
    (torch.special.log_ndtr if WORLD.rank else torch.special.erfcx)(x)
    message = raised_everywhere(DivergenceError, dc.save_checkpoint, folder, run.model)
    assert "erfcx" in message and "log_ndtr" in message
    assert names(folder) == []


def test_a_module_that_is_not_parallelized_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="call parallelize"):
        dc.save_checkpoint(tmp_path, torch.nn.Linear(2, 2))


def last() -> bool:
    """Return whether this is the rank that does something else than the others."""
    return WORLD.rank == WORLD.size - 1


CALLS: dict[str, Callable[[Run], tuple[dict[str, Any], str]]] = {
    "step": lambda run: ({"step": 2 + last()}, "step is 2 on .* and 3 on rank"),
    "keep": lambda run: ({"keep": 1 + last()}, "keep is 1 on"),
    "sharded": lambda run: ({"sharded": last()}, "sharded is False on"),
    "check_finite": lambda run: ({"check_finite": last()}, "check_finite is False on"),
    "optimizer": lambda run: ({"optimizer": None if last() else run.opt}, "optimizer is 'Adam' on"),
    "loader": lambda run: ({"loader": run.loader if last() else None}, "loader is 'NoneType' on"),
}


@several
@pytest.mark.parametrize("kind", CALLS)
def test_arguments_that_differ_between_ranks_are_refused_on_every_rank(
    folder: Path, kind: str
) -> None:
    run = Run({"height": WORLD.size})
    path = dc.save_checkpoint(folder, run.model, step=1)
    arguments, message = CALLS[kind](run)
    arguments = {"step": 2, **arguments}
    fails_everywhere(lambda: dc.save_checkpoint(folder, run.model, **arguments), message)
    elsewhere = folder / "other" if last() else folder
    for sharded in (False, True):
        save = partial(dc.save_checkpoint, elsewhere, run.model, step=2, sharded=sharded)
        fails_everywhere(save, "the path is .* on rank")
    fails_everywhere(lambda: dc.load_checkpoint(elsewhere, run.model), "the path is .* on rank")
    assert list(folder.iterdir()) == [path]


@several
def test_state_of_the_optimizer_on_some_ranks_only_is_refused_on_every_rank(folder: Path) -> None:
    run = Run({"height": WORLD.size})
    run.train(1)
    if last():
        run.opt.state.clear()
    save = partial(dc.save_checkpoint, folder, run.model, run.opt)
    assert "nothing instead" in raised_everywhere(RuntimeError, save)
    assert not names(folder)


@several
@pytest.mark.parametrize("there", [False, True])
def test_shards_in_folders_of_each_node_make_no_checkpoint_and_lose_none(
    folder: Path, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = folder / f"node-{WORLD.rank // (WORLD.size // 2)}"
    own.mkdir(exist_ok=True)
    WORLD.barrier()
    monkeypatch.chdir(own)
    # One path, which is another folder in each process.
    run, path = Run({"height": WORLD.size}), Path("/proc/self/cwd/run")
    if there:
        path.mkdir(exist_ok=True)
    dc.save_checkpoint(path, run.model, step=1)
    WORLD.barrier()
    before = sorted(folder.rglob("*"))
    WORLD.barrier()
    save = partial(dc.save_checkpoint, path, run.model, step=2, keep=1, sharded=True)
    fails_everywhere(save, "is not visible on this rank")
    WORLD.barrier()
    assert sorted(folder.rglob("*")) == before
    dc.load_checkpoint(path, run.model)
    # A checkpoint that some ranks do not see is whole, and stays.
    dc.save_checkpoint(folder, run.model, step=3, sharded=True)
    WORLD.barrier()
    monkeypatch.chdir(own if last() else folder)
    load = partial(dc.load_checkpoint, "/proc/self/cwd", run.model)
    fails_everywhere(load, "is not visible on this rank")
    assert names(folder) == ["checkpoint-0000000003.pt"]


@several
@pytest.mark.parametrize("source", ["another step", "another rank"])
def test_a_shard_of_another_step_or_rank_is_not_taken(folder: Path, source: str) -> None:
    run = Run({"height": WORLD.size})
    for step in (1, 2):
        dc.save_checkpoint(folder, run.model, step=step, sharded=True)
    WORLD.barrier()
    shards = sorted(folder.glob("*.shard"))
    wrong = shards[0] if source == "another step" else shards[-2]
    on_rank_zero(lambda: shards[-1].write_bytes(wrong.read_bytes()))
    with told_on_one_rank("not the file that was written.*continuing"):
        found = dc.load_checkpoint(folder, run.model)
    assert found is not None and found.step == 1


class Point(NamedTuple):
    """A tuple with names."""

    x: Any
    y: Any


class Attributes(dict):
    """A dictionary with attributes, as configurations are kept in."""

    __getattr__ = dict.__getitem__


class Several(list):
    """A list of a class of its own."""


class Annotated(torch.Tensor):
    """A tensor with something beside it."""


def annotated(x: torch.Tensor) -> torch.Tensor:
    tensor = x.as_subclass(Annotated)
    tensor.source = Planted  # type: ignore[attr-defined]
    return tensor


HELD: dict[str, Callable[[], tuple[Any, Any]]] = {
    "namedtuple": lambda: (Point(1, [2, (3,)]), (1, [2, (3,)])),
    "attributes": lambda: (Attributes(a=Attributes(b=1)), {"a": {"b": 1}}),
    "defaultdict": lambda: (defaultdict(Planted, a=Several([1])), {"a": [1]}),
    "tensor": lambda: (annotated(torch.arange(3)), torch.arange(3)),
    "parameter": lambda: (torch.nn.Parameter(annotated(torch.ones(2))), torch.ones(2)),
    "within": lambda: (Point(annotated(torch.ones(2)), {1}), (torch.ones(2), {1})),
    "dataclass": lambda: (Setting(2, deque([np.int64(1)])), {"rate": 2, "last": [1]}),
    "deque": lambda: (deque([(1, Path("a"))], maxlen=3), [(1, "a")]),
    "numpy": lambda: ([np.float64(0.5), np.bool_(True), np.float32(2)], [0.5, True, 2.0]),
    "array": lambda: (np.arange(3.0).astype(">f8"), torch.arange(3.0).double()),
    "sparse": lambda: (torch.eye(2).to_sparse(), torch.eye(2).to_sparse()),
}


@dataclass
class Setting:
    """Values that belong together."""

    rate: float
    last: Any


class Holding(torch.nn.Linear):
    """A layer with more state than tensors."""

    def __init__(self, held: Any) -> None:
        super().__init__(4, 4)
        self.held = (held,)  # a module would take a bare parameter for its own
        self.register_buffer("own", annotated(torch.arange(3.0)))

    def get_extra_state(self) -> Any:
        return self.held[0]

    def set_extra_state(self, state: Any) -> None:
        self.held = (state,)


@both
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("kind", HELD)
def test_objects_of_derived_classes_are_saved_as_plain_ones(
    folder: Path, kind: str, sharded: bool
) -> None:
    held, expected = HELD[kind]()
    model = dc.parallelize(Holding(held), dc.ProcessGrid(sample=-1))
    dc.save_checkpoint(folder, model, extra={"held": held}, sharded=sharded)
    model.held = (None,)
    found = dc.load_checkpoint(folder, model)
    assert found is not None
    for got in (found.extra["held"], *model.held):
        same(got, expected)


@both
def test_distributed_tensors_among_extra_values_are_saved_whole(folder: Path) -> None:
    grid = dc.ProcessGrid(height=-1)
    model = dc.parallelize(torch.nn.Linear(2, 2), grid)
    x = torch.arange(24.0).reshape(1, 2, 4, 3)
    extra = {"x": [dc.distribute_tensor(x, grid)], "loss": dc.distribute_tensor(x, grid).mean()}
    for sharded in (False, True):
        dc.save_checkpoint(folder, model, step=1, extra=extra, sharded=sharded)
        found = dc.load_checkpoint(folder, model)
        assert found is not None
        same(found.extra, {"x": [x], "loss": x.mean()})
    grid.journal.compare()  # all ranks have counted the same steps
    if WORLD.size > 1:
        mine = extra if WORLD.rank else {}
        fails_everywhere(lambda: dc.save_checkpoint(folder, model, step=2, extra=mine), "DistTens")


WRONG: dict[str, tuple[Callable[[Run], dict[str, Any]], str]] = {
    "step": (lambda run: {"step": 1.5}, "step=1.5 is not a whole number"),
    "keep": (lambda run: {"keep": "2"}, "keep='2' is not a whole number"),
    "optimizer": (lambda run: {"optimizer": {}}, "optimizer is of type dict; expected"),
    "order": (lambda run: {"optimizer": run.scheduler}, "optimizer is of type MultiStepLR"),
    "loader": (lambda run: {"loader": [1]}, "loader is of type list"),
}


@both
@pytest.mark.parametrize("kind", WRONG)
def test_arguments_of_other_types_are_refused_by_name(folder: Path, kind: str) -> None:
    run = Run({"height": WORLD.size})
    arguments, message = WRONG[kind]
    given = arguments(run)
    fails_everywhere(lambda: dc.save_checkpoint(folder, run.model, **given), message)
    if kind not in ("step", "keep"):
        dc.save_checkpoint(folder, *run.parts)
        fails_everywhere(lambda: dc.load_checkpoint(folder, run.model, **given), message)


@both
def test_a_step_of_numpy_is_a_step(folder: Path) -> None:
    run = Run({"height": WORLD.size})
    path = dc.save_checkpoint(folder, run.model, step=np.int64(3) if WORLD.rank == 0 else 3)
    assert path == folder / "checkpoint-0000000003.pt"
    found = dc.load_checkpoint(folder, run.model)
    assert found is not None and type(found.step) is int


def joined(opt: torch.optim.Optimizer, *inner: Any) -> Any:
    """Return schedulers one after the other."""
    return torch.optim.lr_scheduler.SequentialLR(opt, [make(opt) for make in inner], [3])


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda opt: torch.optim.lr_scheduler.StepLR(opt, 2),
    "CosineAnnealingLR": lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 5),
    "SequentialLR(ConstantLR, ExponentialLR)": lambda opt: joined(
        opt,
        torch.optim.lr_scheduler.ConstantLR,
        partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9),
    ),
    "SequentialLR(LinearLR, ConstantLR)": lambda opt: joined(
        opt, torch.optim.lr_scheduler.LinearLR, torch.optim.lr_scheduler.ConstantLR
    ),
}


@both
def test_state_of_another_scheduler_is_refused_before_anything_changes(folder: Path) -> None:
    model = dc.parallelize(torch.nn.Linear(2, 2), dc.ProcessGrid(height=-1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for name, make in SCHEDULERS.items():
        dc.save_checkpoint(folder / name, model, optimizer, make(optimizer))
        before = model.weight.detach().clone()
        with torch.no_grad():
            model.weight += 1
        for other, other_make in SCHEDULERS.items():
            load = partial(
                dc.load_checkpoint, folder / name, model, optimizer, other_make(optimizer)
            )
            if other != name:
                fails_everywhere(load, f"another scheduler: .*{re.escape(f'{name}, that')}")
                assert torch.equal(model.weight, before + 1)
        dc.load_checkpoint(folder / name, model, optimizer, make(optimizer))
        assert torch.equal(model.weight, before)


FORGED: dict[str, tuple[list[Any], str]] = {
    "nothing": ([], "do not cover"),
    "half": ([(0, (0, 0), (1, 2))], "do not cover"),
    "a hole": ([(0, (0, 0), (1, 2)), (0, (1, 1), (2, 2))], "do not cover"),
    "twice": ([(0, (0, 0), (1, 2)), (0, (0, 0), (2, 2))], "do not cover"),
    "beyond": ([(0, (0, 0), (3, 2))], "do not cover"),
    "block": ([(0, (0, 0), (1, 2)), (0, (1, 0), (2, 2))], "holds a block of"),
}


@both
@pytest.mark.parametrize("kind", FORGED)
def test_shards_that_do_not_cover_a_tensor_are_refused(folder: Path, kind: str) -> None:
    grid = dc.ProcessGrid(height=-1)
    model = dc.parallelize(torch.nn.Linear(2, 2, bias=False), grid)
    path = dc.save_checkpoint(folder, model, sharded=True)
    places, message = FORGED[kind]

    def forge() -> None:
        state = torch.load(io.BytesIO(read_checksummed(path)), weights_only=True)
        state["shards"]["tensors"] = [([2, 2], places)]
        write_checksummed(path, lambda file: torch.save(state, file))

    dc.load_checkpoint(path, model)
    on_rank_zero(forge)
    fails_everywhere(lambda: dc.load_checkpoint(path, model), message)


def same(a: Any, b: Any) -> None:
    """Assert that two states are equal, and of the same classes."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a.to_dense(), b.to_dense())
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            same(one, other)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        same(list(a.values()), list(b.values()))
    else:
        assert a == b


@both
def test_a_checkpoint_that_cannot_be_loaded_safely_gives_way_to_the_one_before(
    folder: Path,
) -> None:
    run = Run({"height": WORLD.size})
    path = dc.save_checkpoint(folder, run.model, step=1)
    newer = folder / "checkpoint-0000000002.pt"
    stored = {**torch.load(path, weights_only=True), "step": 2, "extra": {"a": Point(1, 2)}}
    on_rank_zero(lambda: write_checksummed(newer, lambda file: torch.save(stored, file)))
    fails_everywhere(lambda: dc.load_checkpoint(newer, run.model), "loaded safely")
    with told_on_one_rank("continuing from"):
        found = dc.load_checkpoint(folder, run.model)
    assert found is not None and found.step == 1 and names(folder) == [newer.name, path.name]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adafactor": torch.optim.Adafactor,
    "LBFGS": partial(torch.optim.LBFGS, max_iter=3),
    "RMSprop": partial(torch.optim.RMSprop, momentum=0.5, centered=True),
}


def learn(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, grid: dc.ProcessGrid
) -> list[float]:
    """Take two steps and return the losses."""
    x = dc.distribute_tensor(torch.as_tensor(X[:4].astype("f8") / X.max()), grid)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    losses = []
    for _ in range(2):
        loss = closure()
        losses.append(loss.item())
        optimizer.step(closure)
    return losses


@pytest.mark.parallel([2])
@pytest.mark.parametrize(("shard", "sharded"), [(False, True), (True, False)])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_state_of_an_optimizer_that_is_not_shaped_like_the_parameter_is_loaded(
    folder: Path, kind: str, shard: bool, sharded: bool
) -> None:
    def make() -> tuple[Any, ...]:
        torch.manual_seed(1)
        net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 3, 1)).double()
        grid = dc.ProcessGrid(**GRIDS[WORLD.size][-1])
        model = dc.parallelize(net, grid, shard_parameters=shard)
        return model, OPTIMIZERS[kind](model.parameters()), grid

    model, optimizer, grid = make()
    learn(model, optimizer, grid)
    dc.save_checkpoint(folder, model, optimizer, sharded=sharded)
    expected = learn(model, optimizer, grid)
    model, optimizer, grid = make()
    dc.load_checkpoint(folder, model, optimizer)
    assert learn(model, optimizer, grid) == pytest.approx(expected, rel=1e-12)


OTHERS: dict[str, Callable[[torch.nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "Adamax": lambda model: torch.optim.Adamax(model.parameters()),
    "parameters": lambda model: torch.optim.Adam([*model.parameters()][::-1]),
}


@both
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("kind", OTHERS)
def test_state_of_another_optimizer_is_refused_before_anything_changes(
    folder: Path, kind: str, sharded: bool
) -> None:
    run = Run({"height": WORLD.size})
    run.train(1)
    dc.save_checkpoint(folder, run.model, run.opt, sharded=sharded)
    other = OTHERS[kind](run.model)
    run.train(1)
    before = {name: x.clone() for name, x in run.model.state_dict().items()}
    load = partial(dc.load_checkpoint, folder, run.model, other)
    fails_everywhere(load, f"another optimizer: .*{kind}")
    assert not other.state and kind == "parameters" or "betas" in run.opt.param_groups[0]
    assert all(torch.equal(x, before[name]) for name, x in run.model.state_dict().items())


SPOILED: dict[str, tuple[Callable[[Run], torch.Tensor], float]] = {
    "0.weight": (lambda run: run.model[0].weight, float("nan")),
    "3.bias": (lambda run: run.model[3].bias, float("inf")),
    "1.running_var": (lambda run: run.model[1].running_var, float("nan")),
    "exp_avg of 3.weight": (
        lambda run: run.opt.state[run.model[3].weight]["exp_avg"],
        float("nan"),
    ),
}


@pytest.mark.parallel([2])
@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("kind", SPOILED)
def test_what_is_not_finite_is_not_saved_unless_it_is_asked_for(
    folder: Path, kind: str, shard: bool
) -> None:
    run = Run(GRIDS[WORLD.size][-1], shard)
    run.model.register_buffer("mask", torch.full((2,), -torch.inf))
    run.train(1)
    path = dc.save_checkpoint(folder, *run.parts, step=1)
    find, value = SPOILED[kind]
    tensor = find(run).detach()
    own = tensor.shard if isinstance(tensor, dc.DistTensor) else tensor
    # Of a tensor that is cut, some ranks alone have the value.
    if own is tensor or run.loader.grid.coords["channel"]:
        own.view(-1)[-1] = value
    for sharded in (False, True):
        save = partial(dc.save_checkpoint, folder, *run.parts, step=2, sharded=sharded)
        fails_everywhere(save, f"{kind} holds values that are not finite.*check_finite=False")
    assert list(folder.iterdir()) == [path]
    WORLD.barrier()
    dc.save_checkpoint(folder, *run.parts, step=2, check_finite=False)
    assert len(names(folder)) == 2


@both
@pytest.mark.parametrize("sharded", [False, True])
def test_another_job_in_the_folder_is_told_of_and_loses_nothing(
    folder: Path, sharded: bool
) -> None:
    run = Run({"height": WORLD.size})
    path = dc.save_checkpoint(folder, run.model, step=1)
    save = partial(dc.save_checkpoint, folder, run.model, step=2, keep=1, sharded=sharded)
    if WORLD.rank == 0:
        unfinished = folder / "checkpoint-0000000003.pt.0123456789abcdef.partial"
        unfinished.touch()
        with only_writer(folder):
            fails_everywhere(save, "another job is writing to this folder; choose a folder")
        assert sorted(folder.iterdir()) == [path, unfinished]
    else:
        fails_everywhere(save, "another job is writing to this folder; choose a folder")
    WORLD.barrier()
    save()
    assert names(folder) == ["checkpoint-0000000002.pt"]
