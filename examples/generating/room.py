"""Room on a disk for files that take long to write."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from distconv.data.durable import fresh_name, unwritable


def check_room(path: Path, size: int) -> None:
    """Raise `OSError` unless `size` bytes can be written beside `path` now.

    The bytes are allocated and given back, so quotas and limits are found as well as a full disk.
    A system that cannot allocate them passes, and reports a full disk at the write.
    """
    partial = fresh_name(path)
    try:
        try:
            with open(partial, "xb") as file:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, size)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise unwritable(path, error, size) from error
