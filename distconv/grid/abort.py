"""Ending all ranks of the job if one rank raises, so that no other rank waits for messages."""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from io import StringIO
from multiprocessing.util import register_after_fork
from types import TracebackType
from typing import Any, NoReturn

from distconv.grid.words import hide_own_frames
from distconv.transport.launch import is_copy, launched, place_by_torch, running_mpi

_GRACE = 2.5
"""Seconds for which other ranks wait for the report of rank 0, so that a common error is printed
once."""

_ABORTING = 5.0
"""Seconds allowed for MPI's abort."""

_LAST = 4.0
"""Seconds allowed before the abort for functions registered with atexit, and again for flushing
files."""

_WRITING = 2.0
"""Seconds allowed for writing a report to a full pipe."""

AT_LAST = 2 * _LAST + _ABORTING + _WRITING
"""Seconds after which a process that aborts its job ends, even if its threads still wait."""

_FORWARDING = 0.5
"""Seconds allowed for the launcher to forward the report, which an abort may discard."""


def abort_when_a_rank_raises() -> None:
    """Install a hook by which an uncaught exception prints its traceback and ends all ranks.

    The traceback has no frames of the library, unless DISTCONV_DEBUG=1.

    If several ranks raise, usually only one rank prints its error: rank 0 at once, any other rank
    only if the job has not ended some seconds later. Processes started by a rank, such as workers,
    behave as before. `sys.exit` is not an uncaught exception for Python, and does not end the other
    ranks.
    """
    hook = getattr(sys, "excepthook", sys.__excepthook__)
    if not isinstance(hook, _Abort):
        sys.excepthook = _Abort(hook)


class _Abort:
    def __init__(self, report: object):
        self._report = report

    def __call__(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        hide_own_frames(error)
        traceback = error.__traceback__
        rank, ranks = _place()
        if ranks == 1:
            self._report(kind, error, traceback)  # type: ignore[operator]
            if is_copy():
                sys.stderr.flush()
                os._exit(1)  # otherwise Python would finalize MPI, which waits for other ranks
            return

        def report() -> None:
            if rank:
                time.sleep(_GRACE + min(0.1 * rank, 2.0))
            with contextlib.suppress(Exception):  # standard output may be closed
                sys.stdout.flush()
            print(f"distconv: rank {rank} of {ranks} raised", file=sys.stderr)
            self._report(kind, error, traceback)  # type: ignore[operator]
            if isinstance(sys.stderr, StringIO) and sys.__stderr__ is not None:
                # The hook of torch.distributed buffers the report, and would print it after this
                # line.
                print(sys.stderr.getvalue(), file=sys.__stderr__, flush=True)

        try:
            if not rank:
                report()
        finally:
            # Rank 0 reports before functions registered with atexit run, and the other ranks after
            # that, so that the report of rank 0 comes first.
            abort_job(report if rank else None)


def _place() -> tuple[int, int]:
    """Return this process's rank and the number of ranks; (0, 1) for a process that is not a rank.

    Before MPI has started, the rank is known only under torchrun and MPICH's launcher. Other
    launchers end the job by themselves when a process ends.
    """
    if is_copy():
        return 0, 1
    if place := place_by_torch():
        return place
    if multiprocessing.parent_process() is not None:
        return 0, 1
    if MPI := running_mpi():
        return MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    try:
        os.fstat(int(os.environ["PMI_FD"]))  # raises in processes that ranks have started
        return int(os.environ["PMI_RANK"]), int(os.environ["PMI_SIZE"])
    except (KeyError, ValueError, OSError):
        return 0, 1


def flush_files() -> None:
    """Flush all open files of the program, for at most four seconds, as a full pipe blocks."""
    flushing = threading.Thread(target=_flush_files, daemon=True)
    try:
        flushing.start()
    except RuntimeError:  # no thread can be started
        _flush_files()
    else:
        flushing.join(_LAST)


def _flush_files() -> None:
    """Flush all open files of the program: first text layers, then the buffers below them."""
    texts: list[io.IOBase] = []
    buffers: list[io.IOBase] = []
    others: list[io.IOBase] = []
    gc.unfreeze()  # so that gc finds files that were open when the program called gc.freeze
    for thing in gc.get_objects():
        kind = type(thing)
        if issubclass(kind, io.TextIOBase):
            texts.append(thing)
        elif issubclass(kind, (io.BufferedWriter, io.BufferedRandom)):
            buffers.append(thing)
        elif issubclass(kind, io.IOBase):
            others.append(thing)
    for file in (*texts, *others, *buffers):
        with contextlib.suppress(Exception):
            file.flush()


ABANDONED = threading.Event()
"""Set when the job is about to be aborted, so that no thread waits for other ranks any longer."""


def say(text: str) -> None:
    """Write a line to standard error, within two seconds.

    Text that a full pipe does not accept in this time is dropped. Raise nothing.
    """
    left = memoryview(f"{text}\n".encode(errors="replace"))
    until = time.monotonic() + _WRITING
    with contextlib.suppress(OSError):
        while left and _takes_more(until - time.monotonic()):
            left = left[os.write(2, left[: select.PIPE_BUF]) :]


def _takes_more(seconds: float) -> bool:
    """Return whether standard error accepts more bytes within `seconds`."""
    waiting = select.poll()
    waiting.register(2, select.POLLOUT)
    return bool(waiting.poll(1000 * max(seconds, 0)))


def abort_job(report: Callable[[], None] | None = None) -> NoReturn:
    """End all ranks of the job, and this process.

    First, functions registered with atexit run and open files are flushed, for at most four seconds
    each. Then `report` is called, to print an error. If a step neither returns nor lets another
    thread start, the thread of `end_when_abandoned` ends the process. Does not return.
    """
    try:
        ABANDONED.set()
        limit = _timer(_LAST, _abort, report)
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()  # without MPI's finalization, which waits for other ranks
        limit.cancel()
        _abort(report)
    finally:
        os._exit(1)


def _abort(report: Callable[[], None] | None) -> NoReturn:
    """Flush files, call `report`, and end all ranks. Any thread may call this function."""
    try:
        # MPI may be busy in another thread's wait; the launcher ends the other ranks in any case.
        _timer(_LAST + _ABORTING, os._exit, 1)
        flush_files()
        if report is not None:
            with contextlib.suppress(Exception):
                report()
        time.sleep(_FORWARDING)
        _end_all()
    finally:
        os._exit(1)


def _end_all() -> None:
    """End all ranks by MPI or the launcher; under torchrun return, as it ends the other ranks."""
    if place_by_torch():
        return  # torchrun ends the other ranks when this process ends, or restarts all
    if MPI := running_mpi():
        if not _takes_more(0):  # writing its message, MPI would block all threads of the process
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        MPI.COMM_WORLD.Abort(1)
    # Before MPI has started, MPICH's launcher treats any exit status as success. It ends the job
    # for a process that a signal kills, and for a request to abort, which MPI sends as this line.
    with contextlib.suppress(KeyError, ValueError, OSError):
        os.write(int(os.environ["PMI_FD"]), b"cmd=abort exitcode=1\n")
        time.sleep(_FORWARDING)
    os.kill(os.getpid(), signal.SIGKILL)


def _timer(seconds: float, act: Callable[..., object], argument: Any) -> threading.Timer:
    """Call `act(argument)` in a thread after `seconds`, and return the timer, to cancel the call.

    If no thread can be started, `act` is not called.
    """
    timer = threading.Timer(seconds, act, (argument,))
    timer.daemon = True
    with contextlib.suppress(RuntimeError):
        timer.start()
    return timer


# Ending ranks that would wait in MPI forever, after an interrupt or the loss of their launcher.
#
# While a rank waits in MPI, Python raises no KeyboardInterrupt. Interrupted ranks would wait for
# messages that are never sent. One thread watches for interrupts, for the end of the launcher, and
# for an abort that takes too long. In each worker process that multiprocessing starts, another
# thread ends the worker when its rank ends.


PATIENCE = 5.0
"""Seconds for which a rank runs after an interrupt, to report or to save its results."""

_INTERVAL = 1.0
"""Seconds between two checks of the parent process."""

_watched_in: int | None = None
"""The id of the process in which `end_when_abandoned` has started its thread; None before."""


def end_when_abandoned() -> None:
    """Start a thread that ends this process after an interrupt, or when its launcher has ended.

    The process ends five seconds after an interrupt (Ctrl-C), even if the program has caught the
    KeyboardInterrupt, as the ranks' messages no longer match after an interrupt. The thread ignores
    interrupts if the program has its own handler for SIGINT. When the launcher, or another process
    that started this rank, has ended, the rank ends within about a second.
    """
    global _watched_in
    if _watched_in == os.getpid():
        return
    _watched_in = os.getpid()
    threading.Thread(
        target=_watch, args=(os.getppid(), _signals()), name="distconv interrupt", daemon=True
    ).start()


def _signals() -> int | None:
    """Return the file descriptor of a pipe to which Python writes the numbers of arriving signals.

    Return None if other code uses `signal.set_wakeup_fd`, and in any thread but the main thread.
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
    """End this process some seconds after an interrupt, and when process `launcher` has ended.

    `signals` is the file descriptor from which to read numbers of signals, or None. The process
    also ends if an abort of the job takes too long.
    """
    last: float | None = None
    aborted: float | None = None
    arriving = select.poll()  # unlike select(), also for a program with more than 1,024 files
    if signals is not None:
        arriving.register(signals, select.POLLIN)
    while True:
        if ABANDONED.is_set():
            aborted = aborted or time.monotonic()
            if time.monotonic() > aborted + AT_LAST:
                os._exit(1)
        if arriving.poll(1000 * _INTERVAL) and signals is not None:
            interrupted = signal.SIGINT in os.read(signals, 2**12)
            ends = signal.getsignal(signal.SIGINT) is signal.default_int_handler
            if interrupted and ends and last is None:
                last = time.monotonic() + PATIENCE
        if last is not None and time.monotonic() > last:
            _end(
                f"ends {PATIENCE:g} s after an interrupt, because ranks may wait for each other; "
                "to change this, install a handler by signal.signal(signal.SIGINT, ...)"
            )
        if os.getppid() != launcher:
            _end(f"ends, because its launcher, process {launcher}, has ended")


def _end(why: str) -> None:
    """Print the reason `why`, flush files, and kill this process; with its group, if it leads one.

    Any thread may call this function.
    """
    try:
        say(f"distconv: process {os.getpid()} {why}")
        flush_files()
    finally:
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def _leave_signals_to_the_rank() -> None:
    """In a process forked from a rank, stop writing signal numbers to the rank's pipe."""
    if _watched_in is not None:
        with contextlib.suppress(ValueError):  # raised in any thread but the main thread
            signal.set_wakeup_fd(-1)


def _end_with_the_rank(_: object) -> None:
    """In a worker process of multiprocessing, start a thread that ends the worker with its rank.

    Without this thread, workers of a DataLoader would end only with their parent process, which
    under `forkserver` is not a rank, and other workers would not end at all.
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
