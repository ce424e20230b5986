"""The order in which a GPU runs the kernels of several communicators of NCCL."""

from __future__ import annotations

import os

_OLDEST = 2, 26
"""The first version of NCCL that can keep the order of the host."""


def why_too_old(version: tuple[int, ...]) -> str | None:
    """Return why a version of NCCL cannot be used; None where it can.

    Kernels of NCCL wait for other ranks. In orders that differ between ranks those of two
    communicators could wait for each other for ever.
    """
    if version >= _OLDEST:
        return None
    found, needed = (".".join(map(str, numbers)) for numbers in (version, _OLDEST))
    return (
        f"NCCL {found} does not start kernels in the order of the host; install {needed} or newer"
    )


def keep_order() -> None:
    """Let NCCL run the kernels of all communicators in the order in which the host starts them.

    It reads the variable when it makes the first communicator of the process.
    """
    os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
