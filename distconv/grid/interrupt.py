"""Ending ranks that would wait in MPI for ever, after an interrupt or the loss of their launcher.

While a rank waits in MPI, Python raises no KeyboardInterrupt. Interrupted ranks would wait for
messages that are never sent. One thread watches for interrupts, for the launcher's end, and for an
abort of the job that does not come to its end; another one, in each worker process that
multiprocessing starts, ends the worker with its rank.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import threading
import time
from multiprocessing.util import register_after_fork

from distconv.grid.abort import ABANDONED, AT_LAST, flush_files, say
from distconv.transport.launch import launched

PATIENCE = 5.0
"""Seconds that a rank has after an interrupt, to report or to save its results."""

_INTERVAL = 1.0
"""Seconds between two looks at the parent process."""

_watched_in: int | None = None
"""The process in which the thread runs."""


def end_when_abandoned() -> None:
    """Start a thread that ends this process after an interrupt, or with its launcher.

    Five seconds after an interrupt (Ctrl-C) the process ends, even if it has caught the
    KeyboardInterrupt: an interrupted rank no longer knows which messages the others send it. If the
    program has a handler of its own for SIGINT, nothing is done then. When the launcher, or any
    other process that started this rank, is gone, the rank ends at once.
    """
    global _watched_in
    if _watched_in == os.getpid():
        return
    _watched_in = os.getpid()
    threading.Thread(
        target=_watch, args=(os.getppid(), _signals()), name="distconv interrupt", daemon=True
    ).start()


def _signals() -> int | None:
    """Return a pipe into which Python writes the numbers of arriving signals, or None.

    None if other code uses `signal.set_wakeup_fd`, or in a thread other than the main one.
    """
    if threading.current_thread() is not threading.main_thread():
        return None
    arriving, written = os.pipe()
    os.set_blocking(written, False)
    before = signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    if before == -1:
        return arriving
    signal.set_wakeup_fd(before)
    os.close(arriving)
    os.close(written)
    return None


def _watch(launcher: int, signals: int | None) -> None:
    """Wait for an interrupt, or the end of process `launcher`, and end this process."""
    last: float | None = None
    aborted: float | None = None
    while True:
        if ABANDONED.is_set():
            aborted = aborted or time.monotonic()
            if time.monotonic() > aborted + AT_LAST:
                os._exit(1)
        if signals is None:
            time.sleep(_INTERVAL)
        elif select.select([signals], [], [], _INTERVAL)[0]:
            interrupted = signal.SIGINT in os.read(signals, 2**12)
            ends = signal.getsignal(signal.SIGINT) is signal.default_int_handler
            if interrupted and ends and last is None:
                last = time.monotonic() + PATIENCE
        if last is not None and time.monotonic() > last:
            _end(
                f"ends {PATIENCE:g} s after an interrupt, as others may wait for it or it for "
                "them; a handler of the program's own, signal.signal(signal.SIGINT, ...), decides "
                "otherwise"
            )
        if os.getppid() != launcher:
            _end(f"ends, as process {launcher}, which has started it, is gone")


def _end(why: str) -> None:
    """Print `why`, flush files, and kill this process and its group. Any thread may call it."""
    try:
        say(f"distconv: process {os.getpid()} {why}")
        flush_files()
    finally:
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def _leave_signals_to_the_rank() -> None:
    """Detach a process forked from a rank from the rank's pipe of signals."""
    if _watched_in is not None:
        with contextlib.suppress(ValueError):  # raised in other threads than the main one
            signal.set_wakeup_fd(-1)


def _end_with_the_rank(_: object) -> None:
    """In a worker process of multiprocessing, start a thread that ends it with its rank.

    Without the thread, workers of a DataLoader end with their parent only, which is no rank under
    `forkserver`, and other workers do not end.
    """
    rank = multiprocessing.parent_process()
    if rank is None or not launched():
        return

    def wait() -> None:
        rank.join()
        os._exit(1)

    threading.Thread(target=wait, name="distconv worker", daemon=True).start()


os.register_at_fork(after_in_child=_leave_signals_to_the_rank)
register_after_fork(_end_with_the_rank, _end_with_the_rank)
_end_with_the_rank(None)  # in a worker that imports this late
