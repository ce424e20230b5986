"""Ranks that are started one by one, and so live and die one by one; they meet without MPI."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from tests.support.jobs import forked, started


def start_ranks(
    script: Path, ranks: int, *arguments: str, **more: str
) -> list[subprocess.Popen[str]]:
    """Start a program as so many ranks of torch.distributed, without any launcher.

    `more` are variables of their environment.
    """
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    return [
        started(
            [sys.executable, "-S", "-E", *forked(script), *arguments],
            RANK=str(rank),
            WORLD_SIZE=str(ranks),
            MASTER_ADDR="localhost",
            MASTER_PORT=str(port),
            **more,
        )
        for rank in range(ranks)
    ]
