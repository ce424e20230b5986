"""Room on a disk for files that take long to write."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import BinaryIO

from distconv.data.durable import fresh_name, unwritable


def reserve(file: BinaryIO, size: int) -> None:
    """Reserve `size` bytes of the disk and of the writer's quota for a new file, on systems that
    can.

    A later write then does not find the disk full. Raises OSError where it is full now.
    """
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        # A file system that cannot reserve space reports a full disk later.
        if error.errno != errno.EOPNOTSUPP:
            raise


def check_room(path: Path, size: int) -> None:
    """Raise `OSError` unless `size` bytes can be written beside `path` now.

    The bytes are allocated and given back, so quotas and limits are found as well as a full disk.
    """
    partial = fresh_name(path)
    try:
        try:
            with open(partial, "xb") as file:
                reserve(file, size)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise unwritable(path, error, size) from error
