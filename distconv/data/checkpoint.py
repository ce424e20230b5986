"""Checkpoints of training runs: the last few are kept, and a crash never leaves a damaged one.

A checkpoint holds plain tensors under the names of the serial program and nothing about the grid,
so a run can be resumed on any other grid, or on one rank without distconv.
"""

from __future__ import annotations

import hashlib
import io
import operator
import os
import pickle
import re
import secrets
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from distconv.data.durable import (
    DamagedFile,
    check_no_url,
    check_written,
    only_writer,
    read_checksummed,
    remove_partial,
    unseen,
    write_checksummed,
)
from distconv.data.errors import DataError, bytes_of_rank_zero, check_call, on_rank_zero, together
from distconv.data.shards import (
    Divided,
    check_loadable,
    divide,
    for_module,
    for_optimizer,
    gathered,
    numbered,
    restored,
    storable,
)
from distconv.grid.interface import Grid
from distconv.model.consistency import check_in_sync, not_finite
from distconv.model.gradient_reduction import required_reduction
from distconv.model.state_dicts import full_state_dict, load_full_state_dict
from distconv.torch_private import inner_schedulers, set_versions_in_state, versions_in_state
from distconv.transport.interface import ObjectCommunicator

FORMAT = 1
"""The format number of checkpoints that hold global tensors in one file."""

SHARDED = 2
"""The format number of checkpoints whose tensors are in one shard file per rank."""

_NAME = "checkpoint-{step:010d}.pt"
_SHARDS = re.compile(r"checkpoint-(\d{10,})\.([0-9a-f]{16})-\d+\.shard")
_NAMES = re.compile(r"checkpoint-(\d{10,})\.pt")

_PARTS = {"step": int, "model": dict, "random": Tensor, "extra": dict}
"""The entries of every checkpoint, and their types."""


class Stateful(Protocol):
    """An object whose state a checkpoint saves, such as a scheduler or a `Loader`."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state in types that `torch.load` accepts with weights_only."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Restore a state that `state_dict` returned."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that `load_checkpoint` has loaded.

    Attributes
    ----------
    path: the path of the file.
    step: the step under which the checkpoint was saved.
    extra: the value that was passed as `extra` to `save_checkpoint`.

    Examples
    --------
    >>> model = dc.parallelize(nn.Conv2d(1, 1, 3), dc.ProcessGrid(height=2))
    >>> path = dc.save_checkpoint("run", model, step=120, extra={"loss": 0.25})
    >>> found = dc.load_checkpoint("run", model)
    >>> found.step, found.extra
    (120, {'loss': 0.25})
    """

    path: Path
    step: int
    extra: dict[str, Any]


def save_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Stateful | None = None,
    loader: Stateful | None = None,
    step: int = 0,
    *,
    keep: int = 2,
    extra: Mapping[str, Any] | None = None,
    sharded: bool = False,
    check_finite: bool = True,
) -> Path:
    """Write the state of a run to a new file in `folder`, and return its path. Collective.

    Rank 0 writes a temporary file that ends with a checksum, flushes the file to the disk, and then
    renames the file in one step. Afterwards, older checkpoints beyond the last `keep` and leftovers
    of killed writers are removed. Before anything is written, the ranks compare the arguments, the
    steps they have taken, their parameters and buffers, and the optimizer's state; of large tensors
    the ranks compare some elements.

    Parameters
    ----------
    folder: the folder, created if missing. Each model needs a separate folder.
    model: a parallelized module; sharded parameters are gathered.
    optimizer, scheduler, loader: further objects whose state is saved.
    step: a number that grows from one checkpoint to the next. A damaged checkpoint of a later step
        is renamed, so that it is not the newest.
    keep: the largest number of checkpoints in the folder.
    extra: plain values and tensors, the same on all ranks. DistTensors are saved as global tensors,
        dataclasses as dictionaries, deques as lists, NumPy's numbers and arrays as Python's numbers
        and tensors, paths as strings, and instances of subclasses of dict, list, tuple and Tensor
        as instances of the base class.
    sharded: whether every rank writes a shard file in `folder`: its blocks of sharded parameters,
        which are then not gathered, and its share of the other tensors. The checkpoint can be
        loaded on any grid whose ranks see the folder, and in one process. Rank 0, which must see
        the files of all ranks, writes its file last; the checkpoint is then complete.
    check_finite: whether parameters that are not finite, and NaN in buffers and in the optimizer's
        state, are an error.

    Raises
    ------
    DataError
        On every rank, if the ranks pass different arguments, the state is not finite, another
        job is writing to the folder, the folder holds a later step or another model, the file
        cannot be written, or it would hold objects that `torch.load` does not load with
        weights_only. The earlier checkpoints remain.
    RuntimeError
        On every rank, if the models of the ranks differ, for example because one rank skipped an
        optimizer step, or if the ranks called different functions.

    Examples
    --------
    >>> model = dc.parallelize(nn.Conv2d(1, 1, 3), dc.ProcessGrid(height=2))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> dc.save_checkpoint("run", model, optimizer, step=120).name
    'checkpoint-0000000120.pt'
    """
    grid = required_reduction("save_checkpoint", model).grid
    grid.journal.compare()
    parts = {"optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    step, keep = together(grid, lambda: (_number("step", step), _number("keep", keep)))
    settings = {"step": step, "keep": keep, "sharded": sharded, "check_finite": check_finite}
    check_call("save_checkpoint", grid, folder, settings | _kinds(parts))
    together(grid, lambda: _check_kinds("save_checkpoint", parts))
    check_in_sync("save_checkpoint", model, optimizer, full=False)
    if check_finite:
        together(grid, lambda: _check_finite(model, optimizer))
    folder, path = Path(folder), path_of(Path(folder), step)
    state = {
        "format": SHARDED if sharded else FORMAT,
        "step": step,
        "random": torch.get_rng_state(),
        **gathered(together(grid, lambda: _rest_of_run(extra, scheduler, loader)), grid),
    }
    learned, divided = _learned(model, optimizer, grid, sharded)
    state |= learned

    def prepare() -> str:
        if keep < 1 or step < 0:
            raise ValueError(f"step={step} must be at least 0, and keep={keep} at least 1")
        state.update(storable(state))
        check_loadable(state)
        _make(folder)
        alone.enter_context(only_writer(folder))
        _check_newest(folder, path)
        _check_model(folder, model, _shapes(state["model"], divided.table if divided else ()))
        return secrets.token_hex(8)

    with ExitStack() as alone:
        token = on_rank_zero(grid, prepare)
        if divided is None:
            on_rank_zero(
                grid, lambda: write_checksummed(path, lambda file: torch.save(state, file))
            )
        else:
            _write_with_shards(path, state, divided, token, grid)
        on_rank_zero(grid, lambda: _clean(path, token, keep))
    return path


def _learned(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, grid: Grid, sharded: bool
) -> tuple[dict[str, Any], Divided | None]:
    """Return the states of the model and the optimizer, and the tensors by shard file. Collective.

    Without `sharded` the states hold global tensors, and the second result is None.
    """
    learned: dict[str, nn.Module | torch.optim.Optimizer] = {"model": model}
    described = {}
    if optimizer is not None:
        learned["optimizer"] = optimizer
        described["optimizer of"] = _described(optimizer, model)
    if not sharded:
        return described | {name: full_state_dict(part) for name, part in learned.items()}, None
    states = {name: part.state_dict() for name, part in learned.items()}
    divided = together(grid, lambda: divide(states, grid))
    versions = dict(versions_in_state(model.state_dict()) or {})
    return described | divided.skeleton | {"versions": versions}, divided


def _rest_of_run(
    extra: Mapping[str, Any] | None, scheduler: Stateful | None, loader: Stateful | None
) -> dict[str, Any]:
    """Return `extra` and the states of scheduler and loader, in types that a checkpoint stores."""
    found: dict[str, Any] = {"extra": dict(extra or {})}
    for name, part in (("scheduler", scheduler), ("loader", loader)):
        if part is not None:
            found |= {name: part.state_dict(), f"{name} of": _class_of(part)}
    return dict(storable(found))


def _write_with_shards(
    path: Path, state: dict[str, Any], divided: Divided, token: str, grid: Grid
) -> None:
    """Write a sharded checkpoint: every rank its shard file, and then rank 0 the file `path`.

    Collective. Raises DataError on every rank if a file cannot be written.

    Parameters
    ----------
    state: the content of the file `path`, to which the checksums of the shard files are added.
    divided: the tensors that this rank writes, and the places of all blocks.
    token: the random string in the names of this checkpoint's shard files.
    """
    shard = _shard(path, token, grid.rank)

    def write_shard() -> str:
        if not path.parent.is_dir():
            raise unseen(path.parent)
        check_loadable(divided.mine)
        return write_checksummed(shard, lambda file: torch.save(divided.mine, file))

    def write() -> None:
        for number, checksum in enumerate(checksums):
            _check_visible(_shard(path, token, number), checksum)
        write_checksummed(path, lambda file: torch.save(state, file))

    try:
        checksums = grid.all_gather_object(together(grid, write_shard))
        state["shards"] = {
            "token": token,
            "count": grid.size,
            "checksums": checksums,
            "tensors": divided.table,
        }
        on_rank_zero(grid, write)
    except DataError:
        # A DataError is raised on all ranks, so the checkpoint was not written. After an interrupt
        # rank 0 may have written it, so shards stay; `_clean` removes shards without a checkpoint.
        with suppress(OSError):
            shard.unlink()
        raise


def _clean(path: Path, token: str, keep: int) -> None:
    """Remove checkpoints beyond the last `keep`, and leftovers of killed writers.

    `path` is the file of the checkpoint just written, and `token` is in its shard files' names.
    """
    folder = path.parent
    for old in checkpoints_in(folder)[keep:]:
        old.unlink(missing_ok=True)
    _remove_shards(folder, path, token)
    for names in (_NAMES, _SHARDS):
        remove_partial(folder, names.pattern)


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Stateful | None = None,
    loader: Stateful | None = None,
    *,
    missing_ok: bool = False,
    check: Callable[[Checkpoint], object] | None = None,
) -> Checkpoint | None:
    """Load a checkpoint into a model and the other objects, on this grid. Collective.

    Rank 0 reads the file and sends the content to all ranks; each rank reads the shard files that
    hold elements of its blocks. In a folder, the newest checkpoint that is undamaged and loads with
    weights_only is used; damaged checkpoints are reported in a warning. Nothing is written or
    renamed, so a program may read the checkpoints of a program that is still saving. torch's random
    numbers continue with the state of rank 0.

    Parameters
    ----------
    path: the folder, or a file of a checkpoint.
    model: a parallelized module, on any grid.
    optimizer, scheduler, loader: objects whose state is loaded. The saved state of an object that
        is not passed is ignored.
    missing_ok: return None if there is no checkpoint, not even a damaged one.
    check: called on every rank with the checkpoint before anything is changed; raises ValueError to
        reject the checkpoint.

    Returns the checkpoint.

    Raises
    ------
    DataError
        On every rank, if there is no whole checkpoint, a file cannot be read now, the checkpoint is
        of another model, optimizer, scheduler or loader, or the ranks pass different arguments. A
        part of the state may have been loaded before the error.

    Examples
    --------
    >>> model = dc.parallelize(nn.Conv2d(1, 1, 3), dc.ProcessGrid(height=2))
    >>> dc.load_checkpoint("empty", model, missing_ok=True) is None
    True
    >>> path = dc.save_checkpoint("mine", model, step=7)
    >>> dc.load_checkpoint("mine", model).step
    7
    """
    grid = required_reduction("load_checkpoint", model).grid
    parts = {"optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    check_call("load_checkpoint", grid, path, {"missing_ok": missing_ok} | _kinds(parts))
    together(grid, lambda: _check_kinds("load_checkpoint", parts))
    complaints: dict[Path, str] = {}
    while True:
        content = b""

        def read() -> Path | None:
            nonlocal content
            found, content = newest_whole(Path(path), missing_ok, complaints)
            return found

        found = on_rank_zero(grid, read)
        if found is None:
            return None
        content = bytes_of_rank_zero(grid, content)

        state, own = together(grid, partial(_examined, found, content, grid.rank, grid.size))
        damage = dict.fromkeys(filter(None, grid.all_gather_object(own)))
        if not damage:
            break
        if on_rank_zero(grid, partial(_unchanged, found, content)):
            complaints[found] = "; ".join(damage)

    def load() -> Checkpoint:
        checkpoint = Checkpoint(found, state["step"], state["extra"])
        if check is not None:
            check(checkpoint)
        others = {"scheduler": scheduler, "loader": loader}
        for name, part in others.items():
            if part is not None:
                _check_same(found, name, state.get(f"{name} of"), _class_of(part))
        try:
            _load_learned(found, state, model, optimizer)
        except (DataError, OSError):
            raise
        except Exception as error:  # torch does not check the types of its arguments
            raise ValueError(f"{found} is the checkpoint of another model: {error!r}") from error
        for name, part in others.items():
            if part is not None:
                try:
                    part.load_state_dict(_part(found, state, name))
                except (KeyError, TypeError, ValueError) as error:
                    raise ValueError(f"{found} does not fit the {name}: {error}") from error
        torch.set_rng_state(state["random"])
        return checkpoint

    return together(grid, load)


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the paths of the checkpoints in a folder, latest step first."""
    found = [path for path in folder.glob("checkpoint-*.pt") if step_of(path) >= 0]
    return sorted(found, key=step_of, reverse=True)


def path_of(folder: Path, step: int) -> Path:
    """Return the path in `folder` of the checkpoint saved under `step`."""
    return folder / _NAME.format(step=step)


def last_in_common(folder: Path, comm: ObjectCommunicator, *, looks: bool = True) -> Path | None:
    """Return the path in `folder` of the last step that all ranks have saved, or None.

    Collective over `comm`; folders may differ between ranks. A rank passes looks=False to skip its
    folder, if another rank searches the same folder.
    """
    found = [set(map(step_of, checkpoints_in(folder)))] if looks else []
    steps = [own for theirs in comm.allgather(found) for own in theirs]
    common = set.intersection(*steps)
    return path_of(folder, max(common)) if common else None


def _make(folder: Path) -> None:
    check_no_url(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"{folder} cannot be created: {error.strerror}; choose another folder"
        ) from error


def _check_newest(folder: Path, path: Path) -> None:
    """Raise `FileExistsError` if the folder holds a checkpoint of a later step than `path`.

    A damaged checkpoint of a later step is renamed instead. The caller has locked the folder.
    """
    for newest in checkpoints_in(folder):
        if step_of(newest) <= step_of(path):
            break
        if not _damage(newest):
            raise FileExistsError(
                f"{newest} is of a later step than {path.name} and would remain the newest "
                f"checkpoint; choose another folder, or remove {newest.name}"
            )
        os.replace(newest, newest.with_name(f"{newest.stem}.damaged{newest.suffix}"))


def _damage(path: Path) -> str:
    """Return a text about damage in a checkpoint or its shard files, "" for none found."""
    try:
        return _examined(path, read_checksummed(path))[1]
    except DamagedFile as error:
        return str(error)
    except (OSError, ValueError):  # not readable now, or by this version: not known to be damaged
        return ""


def _shapes(model: Mapping[str, Any], table: Sequence[Any]) -> dict[str, list[int]]:
    """Return the shapes of the tensors in the model state `model` of a checkpoint, by name.

    `table` describes the tensors in shard files; see `Divided`.
    """
    found = {name: list(x.shape) for name, x in model.items() if isinstance(x, Tensor)}
    return found | {name: list(table[n][0]) for name, n in numbered(model).items()}


def _check_model(folder: Path, model: nn.Module, own: dict[str, list[int]]) -> None:
    """Raise `FileExistsError` if the newest checkpoint in the folder is of another model.

    `own` has the shapes of the tensors of `model` by name. Buffers of `model` may be new, absent or
    of other shapes, as forward passes may create or enlarge buffers. Elements are not compared.
    """
    for path in checkpoints_in(folder)[:1]:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            other = _shapes(state["model"], state.get("shards", {}).get("tensors", ()))
        except Exception:  # torch raises any error of its unpickler; there is no model to keep
            return
        trained = own.keys() & dict(model.named_parameters(remove_duplicate=False))
        differ = {name for name in trained if own[name] != other.get(name)}
        if differ:
            raise FileExistsError(
                f"{path} holds another model, which differs in {sorted(differ)[:3]}; save each "
                f"model to a separate folder, such as {folder}/generator and "
                f"{folder}/discriminator, or both as one torch.nn.ModuleDict; a model that has "
                "changed needs a new folder, too"
            )


def step_of(path: Path) -> int:
    """Return the step in the file name of a checkpoint; -1 for any other name."""
    match = _NAMES.fullmatch(path.name)
    return int(match[1]) if match else -1


def _number(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(
            f"save_checkpoint: {name}={value!r} is not a whole number; pass an int"
        ) from None


def _kinds(parts: Mapping[str, Any]) -> dict[str, str]:
    return {name: type(part).__name__ for name, part in parts.items()}


def _check_kinds(caller: str, parts: Mapping[str, Any]) -> None:
    """Raise `TypeError` unless each argument in `parts`, by name, is None or has a state.

    The state is in `state_dict` and `load_state_dict`, and for an optimizer in `param_groups` and
    `state`. `caller` begins the message.
    """
    for name, part in parts.items():
        needs = ["state_dict", "load_state_dict"]
        if name == "optimizer":
            needs += ["param_groups", "state"]
        if part is not None and not all(hasattr(part, need) for need in needs):
            raise TypeError(
                f"{caller}: {name} is of type {type(part).__name__}; expected an object with "
                f"{', '.join(needs)}, or None"
            )


def _class_of(part: Any) -> str:
    """Return the class name of a scheduler or loader, with the names of its inner schedulers."""
    inner = ", ".join(map(_class_of, inner_schedulers(part)))
    return f"{type(part).__name__}({inner})" if inner else type(part).__name__


def _check_finite(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    for name in not_finite(model, optimizer):
        raise ValueError(
            f"save_checkpoint: {name} holds values that are not finite; continue from the "
            "previous checkpoint, which is kept, or pass check_finite=False to save it anyway"
        )


def _check_visible(shard: Path, checksum: str) -> None:
    """Raise `OSError` if this rank cannot read a shard file, `DamagedFile` for another checksum."""
    try:
        check_written(shard, checksum)
    except FileNotFoundError:
        raise unseen(shard) from None


def newest_whole(
    path: Path, missing_ok: bool, known: Mapping[Path, str]
) -> tuple[Path | None, bytes]:
    """Return the path and content of `path`, or of the newest undamaged checkpoint in a folder.

    Warns of damaged checkpoints that are skipped. Raises DamagedFile if all checkpoints are
    damaged, also if a writer has renamed the damaged ones, and FileNotFoundError if there is none.

    Parameters
    ----------
    path: a file or a folder.
    missing_ok: return None and b"" if there is no checkpoint.
    known: checkpoints to skip, each with the damage found.
    """
    if path.is_file() and path not in known:
        return path, read_checksummed(path)
    complaints = list(known.values())
    for candidate in checkpoints_in(path):
        if candidate in known:
            continue
        try:
            content = read_checksummed(candidate)
        except DamagedFile as error:
            complaints.append(str(error))
            continue
        except FileNotFoundError:
            if os.path.lexists(candidate):
                raise
            # A writer has saved a newer checkpoint and removed this one since.
            return newest_whole(path, missing_ok, known)
        if complaints:
            warnings.warn(f"{'; '.join(complaints)}; continuing from {candidate}", stacklevel=6)
        return candidate, content
    complaints += [f"{aside} is damaged" for aside in sorted(path.glob("checkpoint-*.damaged.pt"))]
    if complaints:
        before = "" if path.is_file() else "; there is no earlier checkpoint"
        raise DamagedFile(
            f"{'; '.join(complaints)}{before}; restore a copy, or remove it to start from the "
            "beginning"
        )
    if missing_ok:
        return None, b""
    raise FileNotFoundError(
        f"{path}: {'no checkpoint in this folder' if path.is_dir() else 'no such file or folder'}"
    )


def _examined(
    path: Path, content: bytes, first: int = 0, stride: int = 1
) -> tuple[dict[str, Any], str]:
    """Return the state in a checkpoint, and a text about damage, "" for none.

    `content` is the content of the file `path`. Shard files number `first`, `first + stride`, ...
    are read, so that each rank can check some of the files. Raises OSError if a shard file cannot
    be read now, or if this rank does not see `path`: the checkpoint may be undamaged, so an older
    checkpoint must not be loaded instead.
    """
    state: dict[str, Any] = {}
    try:
        state = _state(path, content)
        if state["format"] == SHARDED and not path.exists():
            raise OSError(str(unseen(path)))
        shards: Any = state["shards"] if state["format"] == SHARDED else {"count": 0}
        for number in range(first, shards["count"], stride):
            checksum = shards["checksums"][number]
            read_checksummed(_shard(path, shards["token"], number), checksum)
    except (DamagedFile, FileNotFoundError) as error:
        return state, str(error)
    return state, ""


def _unchanged(path: Path, content: bytes) -> bool:
    """Return whether the file `path` still ends with the checksum of `content`.

    False if the checkpoint was removed, or saved again with other content.
    """
    try:
        check_written(path, hashlib.sha256(content).hexdigest())
    except (DamagedFile, FileNotFoundError):
        return False
    return True


def _shard(path: Path, token: str, number: int) -> Path:
    """Return the path of shard file `number` of the checkpoint `path`.

    `token` is a random string for each attempt to write the checkpoint.
    """
    return path.with_name(f"{path.stem}.{token}-{number}.shard")


def _remove_shards(folder: Path, newest: Path, token: str) -> None:
    """Remove shard files without a checkpoint, and those of `newest` that do not have `token`."""
    kept = {step_of(path) for path in checkpoints_in(folder)}
    for shard in folder.glob("checkpoint-*.shard"):
        match = _SHARDS.fullmatch(shard.name)
        if match and (
            int(match[1]) not in kept or (int(match[1]) == step_of(newest) and match[2] != token)
        ):
            shard.unlink(missing_ok=True)


def _load_learned(
    path: Path, state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> None:
    """Load the states of the model and the optimizer from the checkpoint `path`.

    `state` is the content of the file `path`; of a sharded checkpoint, this rank also reads shard
    files. Raises DataError if the checkpoint is of another optimizer, or lacks its state.
    """
    learned = state["model"], {} if optimizer is None else _part(path, state, "optimizer")
    if optimizer is not None:
        own = _described(optimizer, model)
        for what, value in state["optimizer of"].items():
            _check_same(path, "optimizer", value, own[what], what)
    if state["format"] == SHARDED:
        shards = state["shards"]

        @cache
        def opened(number: int) -> Mapping[int, Tensor]:
            shard = _shard(path, shards["token"], number)
            if not shard.exists():
                raise FileNotFoundError(
                    f"{shard}: not visible on this rank, or removed while the checkpoint was "
                    "loaded. Use a file system that all ranks share; if another job has saved "
                    "meanwhile, load again"
                )
            blocks: Mapping[int, Tensor] = torch.load(
                shard, map_location="cpu", weights_only=True, mmap=True
            )
            return blocks

        stored = restored(list(learned), shards["tensors"], opened)
        whole: Any = OrderedDict(for_module(stored[0], model))
        set_versions_in_state(whole, state["versions"])
        learned = whole, {} if optimizer is None else for_optimizer(stored[1], optimizer)
    load_full_state_dict(model, learned[0])
    if optimizer is not None:
        load_full_state_dict(optimizer, learned[1])


def _state(path: Path, content: bytes) -> dict[str, Any]:
    """Return the state in `content`, the content of the checkpoint `path`.

    Raises ValueError if `content` is not a checkpoint that this version can read, and DamagedFile
    if `content` cannot be loaded with weights_only.
    """
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise DamagedFile(
            f"{path} is not a checkpoint that can be loaded safely: {error}"
        ) from error
    except Exception as error:  # torch raises any error of its unpickler
        raise ValueError(f"{path} is not a checkpoint: {error}") from error
    if not isinstance(state, dict):
        raise ValueError(
            f"{path} is not a checkpoint of distconv: it holds {type(state).__name__}, expected a "
            f"dict with {sorted(_PARTS)}"
        )
    if state.get("format") not in (FORMAT, SHARDED):
        raise ValueError(
            f"{path} is not a checkpoint that this version of distconv can read: its format is "
            f"{state.get('format')}, expected {FORMAT} or {SHARDED}"
        )
    for name, kind in _PARTS.items():
        if not isinstance(state.get(name), kind):
            found = type(state[name]).__name__ if name in state else "missing"
            raise ValueError(
                f"{path} is not a checkpoint of distconv: {name!r} is {found}, expected "
                f"{kind.__name__}"
            )
    return state


def _part(path: Path, state: dict[str, Any], name: str) -> dict[str, Any]:
    if not isinstance(state.get(name), dict):
        raise DataError(f"{path} holds no state of the {name}; load it without {name}")
    part: dict[str, Any] = state[name]
    return part


def _described(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    """Return the class name of an optimizer, and the parameter names of each parameter group."""
    inner: Any = optimizer
    while isinstance(getattr(inner, "optimizer", None), torch.optim.Optimizer):
        inner = inner.optimizer  # LARC and similar wrappers keep no state of their own
    names = {p: name for name, p in model.named_parameters()}
    return {
        "class": type(inner).__name__,
        "parameters": [
            [names.get(p, f"another of shape {tuple(p.shape)}") for p in group["params"]]
            for group in optimizer.param_groups
        ],
    }


def _check_same(path: Path, name: str, saved: Any, own: Any, what: str = "class") -> None:
    """Raise `DataError` if `saved`, a property in a checkpoint, is not `own`, the program's.

    `name` is the object with the property, such as "scheduler", and `what` the property, such as
    "class". A value `saved` of None is not compared.
    """
    if saved not in (None, own):
        raise DataError(
            f"{path} holds the state of another {name}: its {what} is {saved}, that of this "
            f"{name} is {own}; create the same {name}, or load the checkpoint without it"
        )
