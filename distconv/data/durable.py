"""Files that a crash never leaves half-written, with checksums that show later damage.

A new file is written under a temporary name in the same folder, flushed to the disk, and then
renamed in one step. If the process or the machine stops at any moment, either the old file or the
new file remains, complete. A checksum at the end of a file shows if a disk or a copy damages the
file later. A file can also be written in steps, so that an interrupted run resumes after the last
finished step.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from distconv.data.errors import DataError, on_rank_zero
from distconv.grid.interface import Grid

_MARK = b"\nsha256 "
_TRAILER = len(_MARK) + 2 * hashlib.sha256().digest_size + 1
"""The number of bytes appended to the content: the mark, the checksum in hexadecimal digits, and a
newline. Readers of zip archives, such as torch.load, ignore the appended bytes."""


_FRESH = re.compile(r"(.+)\.[0-9a-f]{16}\.partial")
"""Matches names that `fresh_name` makes; the group is the final name."""

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
"""Constants of the Linux system call renameat2: the working folder, and the flag to exchange."""


class DamagedFile(ValueError):
    """A file whose content was truncated or changed after it was written."""


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a new file in a `with` block, and replace the file `path` at the end of the block.

    Within the block `path` is unchanged. The new file has an unguessable name in the same folder,
    so no other user can have created a link of this name. At the end of the block all bytes are on
    the disk. Any error in the block removes the new file. Raises OSError, naming `path`, if the
    folder cannot be written to or the disk is full.
    """
    partial = fresh_name(path)
    with writing_to(path):
        try:
            # Mode "x" creates the file, and fails if a file or link of this name exists.
            with open(partial, "x+b") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
            sync_folder(path.parent)
        finally:
            partial.unlink(missing_ok=True)


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Call `write` with a new file that then replaces `path`; an error leaves `path` unchanged."""
    with replacing(path) as file:
        write(file)


def write_checksummed(path: Path, write: Callable[[BinaryIO], object]) -> str:
    """Write a file that replaces `path`, append a checksum of the content, and return the checksum.

    `write` is called with an object that has the methods `write` and `flush`, as torch.save needs.
    After an error `path` is unchanged.
    """
    with replacing(path) as file:
        summing = _Summing(file)
        try:
            write(summing)  # type: ignore[arg-type]
        finally:
            # Report the file's own error, such as a full disk, instead of torch.save's.
            if summing.error is not None:
                raise summing.error
        file.write(_trailer(summing.checksum))
    return summing.checksum


def read_checksummed(path: Path, checksum: str | None = None) -> bytes:
    """Return the content of a file written by `write_checksummed`, without the appended checksum.

    `checksum` is the expected checksum; None to compare the content with the appended checksum
    only. Raises DamagedFile if the content is truncated or changed, or its checksum is not
    `checksum`. Raises OSError if the file cannot be read.
    """
    content, trailer = _read(path)
    if trailer != _trailer(hashlib.sha256(content).hexdigest()):
        raise DamagedFile(f"{path} is damaged: its content does not match its checksum")
    if checksum is not None:
        _check_same(path, trailer, checksum)
    return content


def check_written(path: Path, checksum: str) -> None:
    """Raise `DamagedFile` unless the checksum at the end of the file is `checksum`.

    The content is not read. Raises OSError if the file cannot be read.
    """
    _check_same(path, _read(path, whole=False)[1], checksum)


def _check_same(path: Path, trailer: bytes, checksum: str) -> None:
    if trailer != _trailer(checksum):
        raise DamagedFile(f"{path} is not the file that was written under this name")


def _read(path: Path, whole: bool = True) -> tuple[bytes, bytes]:
    """Return the content of a file, b"" unless `whole`, and the appended checksum line.

    Raises DamagedFile if no checksum line is there, and OSError if the file cannot be read.
    """
    try:
        with open(path, "rb") as file:
            size = max(0, os.fstat(file.fileno()).st_size - _TRAILER)
            content = file.read(size) if whole else b""
            file.seek(size)
            trailer = file.read()
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path}: no such file") from error
    except OSError as error:
        raise OSError(f"{path} cannot be read: {error.strerror or error}") from error
    if not trailer.startswith(_MARK):
        raise DamagedFile(
            f"{path} does not end with its checksum: it is truncated or damaged, or was not "
            "written by distconv"
        )
    return content, trailer


def fresh_name(path: Path) -> Path:
    """Return an unguessable path beside `path`, for the unfinished file that will replace it."""
    return path.with_name(f"{path.name}.{secrets.token_hex(8)}.partial")


def remove_partial(folder: Path, names: str) -> None:
    """Remove the unfinished files and folders that killed processes have left in `folder`.

    `names` is a regular expression of the final names. Only names that `fresh_name` makes are
    removed: other files that end with `.partial` belong to other programs.
    """
    for partial in folder.glob("*.partial"):
        match = _FRESH.fullmatch(partial.name)
        if match and re.fullmatch(names, match[1]):
            remove(partial)


def remove(path: Path) -> None:
    """Remove the file, or the folder with its content, at `path`, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def move_into_place(partial: Path, path: Path) -> None:
    """Rename the complete file or folder `partial` to `path`, and flush the new name to the disk.

    An existing file or folder at `path` is replaced in one step, and an old folder is then removed.
    On systems that cannot exchange two folders in one step, the old folder is first renamed to a
    name from `fresh_name`: a process killed between the two steps leaves both folders under
    temporary names, and nothing at `path`.
    """
    before = None
    if path.is_dir() and not path.is_symlink():
        before = partial
        if not _exchange(partial, path):
            before = fresh_name(path)
            os.replace(path, before)
    if before != partial:
        try:
            os.replace(partial, path)
        except BaseException:
            if before is not None:
                os.replace(before, path)
            raise
    sync_folder(path.parent)
    if before is not None:
        remove(before)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two folders in one step, and return whether this was possible.

    Linux supports the exchange on most file systems. On failure nothing is changed.
    """
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 is None:
        return False
    names = (_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other))
    return bool(renameat2(*names, _RENAME_EXCHANGE) == 0)


def sync(path: Path) -> None:
    """Flush the content of a file to the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


class _Summing:
    """A writer that writes all bytes to a file and computes their checksum.

    `error` is the first exception that the file raised; later bytes are dropped.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._sum = hashlib.sha256()
        self.error: BaseException | None = None

    def write(self, data: bytes) -> int:
        # torch.save would replace an error of the file by an error of its own.
        if self.error is None:
            try:
                self._file.write(data)
                self._sum.update(data)
            except BaseException as error:
                self.error = error
        return len(data)

    def flush(self) -> None:
        """Do nothing: the file is flushed once, when it is complete."""

    @property
    def checksum(self) -> str:
        """Return the checksum of the bytes written so far."""
        return self._sum.hexdigest()


def _trailer(checksum: str) -> bytes:
    return _MARK + checksum.encode() + b"\n"


def sync_folder(folder: Path) -> None:
    """Flush the list of file names of a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_no_url(path: Path) -> None:
    """Raise `ValueError` for a URL such as s3://bucket/x.zarr: files are written to disks only."""
    # A Path has no second slash.
    if re.match(r"(\w[\w+.-]*::)*[a-z][a-z0-9+.-]+:/", str(path), re.IGNORECASE):
        raise ValueError(
            f"{path} is a URL, and files are written to file systems only; write the file there, "
            "and copy it to the object store"
        )


@contextmanager
def writing_to(path: Path) -> Iterator[None]:
    """Turn OSErrors of the operating system in a `with` block into errors that name `path`."""
    try:
        yield
    except OSError as error:
        raise error if error.errno is None else unwritable(path, error) from error


def unwritable(path: Path, error: OSError, size: int | None = None) -> OSError:
    """Return an OSError that says that `size` bytes cannot be written to `path`, with a remedy.

    `error` is the error of the operating system; `size` is None if unknown.
    """
    amount = "" if size is None else f" ({size / 1e6:.1f} MB)"
    reason = " ".join(str(error.strerror or error).split())
    advice = "free space there, or choose a folder with write permission"
    if error.errno == errno.ENOENT:
        reason = "its folder, or the unfinished file in it, no longer exists"
        advice = "another job may write to this folder: choose a folder for each job"
    return OSError(f"{path} cannot be written{amount}: {reason}; {advice}")


def unseen(path: Path) -> FileNotFoundError:
    """Return the error for a path that another rank has created but this rank cannot see."""
    return FileNotFoundError(
        f"{path}: another rank has created it, but it is not visible on this rank; use a file "
        "system that all ranks share"
    )


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder in a `with` block, so that one job at a time writes to the folder.

    Raises BlockingIOError if another process holds the lock. On file systems without locks of
    folders nothing is locked.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BlockingIOError(
                f"{folder}: another job is writing to this folder; choose a folder for each job"
            ) from error
        except OSError:
            pass  # a file system without locks of folders, such as NFS
        try:
            yield
        finally:
            with suppress(OSError):
                # Closing the descriptor would not free the lock if a forked process holds it, too.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


# Files that are written in steps.


class StepwiseFile:
    """A file that all ranks write in steps, in a `with` block. Collective.

    The unfinished file has the final name with the suffix `.partial`. A JSON file in the same
    folder records the finished steps and the task. At the end of the block the file is renamed to
    the final name. If a step raises DataError, finished steps are kept and the message names the
    unfinished file; if no step is finished, the unfinished file is removed.

    Parameters
    ----------
    path: the final name.
    task: facts about the run by name; a later run resumes if its facts are equal.
    create: creates the unfinished file; returns values for `state`. Called on rank 0.
    finish: renames the complete file to the final name. Called on rank 0.
    restart: whether to discard the steps of an earlier run.

    Attributes
    ----------
    partial: the unfinished file.
    state: the values from `create`, the values passed to `keep`, and "finished": the number of
        finished steps; equal on all ranks.

    Raises DataError on every rank if an earlier run with another task is unfinished.
    """

    def __init__(
        self,
        grid: Grid,
        path: Path,
        task: Mapping[str, str],
        create: Callable[[Path], Mapping[str, Any]],
        finish: Callable[[Path], object],
        restart: bool,
    ) -> None:
        self._grid, self._path, self._finish = grid, path, finish
        self.partial = path.with_name(f"{path.name}.partial")
        self._notes = path.with_name(f"{path.name}.partial.json")
        self.state: dict[str, Any] = on_rank_zero(
            grid, writing_to(path)(lambda: self._begun(dict(task), create, restart))
        )
        self._kept = bool(self.state.pop("continued"))

    def _begun(
        self, task: dict[str, str], create: Callable[[Path], Mapping[str, Any]], restart: bool
    ) -> dict[str, Any]:
        if restart:
            self._remove()
        if self._notes.exists() and self.partial.exists():
            state: dict[str, Any] = json.loads(self._notes.read_text())
            other = [k for k in {**task, **state["task"]} if state["task"].get(k) != task.get(k)]
            if other:
                raise DataError(
                    f"{self.partial} belongs to another run, with other {', '.join(other)}; finish "
                    "that one, or discard its results by restart=True (--restart)"
                )
            return state | {"continued": True}
        if self.partial.exists():
            raise FileExistsError(
                f"{self.partial} exists without {self._notes.name}, which lists its finished "
                "steps; remove it, or discard it by restart=True (--restart)"
            )
        try:
            state = {"task": task, **create(self.partial), "finished": 0}
            self._write(state)
        except BaseException:
            with suppress(OSError):
                self._remove()
            raise
        return state | {"continued": False}

    def keep(self, **values: Any) -> None:
        """Record that steps are on the disk, by new `values` of `state`. Collective.

        Pass `finished=n` for the number of finished steps.
        """
        self.state.update(values)
        self._kept = True
        on_rank_zero(self._grid, writing_to(self._path)(lambda: self._write(self.state)))

    def _write(self, state: Mapping[str, Any]) -> None:
        write_atomically(self._notes, lambda file: file.write(json.dumps(state).encode()))
        sync_folder(self._path.parent)

    def _remove(self) -> None:
        remove(self.partial)
        self._notes.unlink(missing_ok=True)

    def _complete(self) -> None:
        self._finish(self.partial)
        self._notes.unlink()

    def __enter__(self) -> StepwiseFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            try:
                on_rank_zero(self._grid, writing_to(self._path)(self._complete))
            except DataError as failure:
                error = failure
        if not isinstance(error, DataError):
            return  # other errors may be those of one rank; a later run resumes
        if not self._kept:
            on_rank_zero(self._grid, writing_to(self._path)(self._remove))
            raise error
        raise DataError(
            f"{error}. {self.partial} keeps {self.state['finished']} finished steps: the same call "
            "continues there, and restart=True (--restart) discards them"
        ) from error
