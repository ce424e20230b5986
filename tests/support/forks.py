"""Ranks that begin where torch and distconv have been imported already, which takes seconds.

A server imports it once, and forks. What a launcher starts instead of a rank is a client that hands
its streams and its connection to the launcher over, waits, and ends as the rank does; the rank ends
with it. An interrupt of the client is one of the rank. This serves jobs that do not look at their
parents.

`python forks.py SOCKET` is the server, `python forks.py SOCKET SCRIPT ARGUMENTS...` a client.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys

IMPORTED = (
    "torch",
    "torch._dynamo",
    "torch.distributed.run",
    "numpy",
    "mpi4py",
    "h5py",
    "matplotlib.figure",
    "distconv.training",
)
"""Modules that the server imports; none of them starts MPI or a thread. Optimizers import
torch._dynamo when they are made."""


def blank(figure: object, file: object, **options: object) -> None:
    """Write a picture with nothing on it, in place of matplotlib's `Figure.savefig`."""
    file.write(b"<svg/>")


def ask(path: str, words: list[str]) -> None:
    """Let the server run a script, and end as it ends."""
    handles = [0, 1, 2]
    if "PMI_FD" in os.environ:
        handles.append(int(os.environ["PMI_FD"]))
    request = repr((os.getcwd(), dict(os.environ), words)).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        socket.send_fds(connection, [len(request).to_bytes(8, "big")], handles)
        connection.sendall(request)

        def pass_on(number: int, frame: object) -> None:
            with contextlib.suppress(OSError):  # the rank has just ended
                connection.sendall(b"i")

        signal.signal(signal.SIGINT, pass_on)
        status = int(connection.makefile().read() or "1")  # nothing where the server has failed
    if status < 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


def serve(path: str) -> list[str]:
    """Fork for each client until the parent ends; return in the child that is to run a script."""
    for name in IMPORTED:
        __import__(name)
    gc.freeze()
    started_by = os.getppid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they end
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{path}.new")
        server.listen(64)
        server.settimeout(1.0)
        os.rename(f"{path}.new", path)
        while os.getppid() == started_by:
            try:
                connection, _ = server.accept()
            except TimeoutError:
                continue
            if os.fork() == 0:
                break
            connection.close()
        else:
            sys.exit()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    connection.setblocking(True)
    return answer(connection)


def answer(connection: socket.socket) -> list[str]:
    """Fork a rank, and tell the client how it ends; return, in the rank, the script's words."""
    import ast
    import select

    head, handles, _, _ = socket.recv_fds(connection, 8, 4)
    request = connection.makefile("rb").read(int.from_bytes(head, "big"))
    folder, environment, words = ast.literal_eval(request.decode())
    rank = os.fork()
    if rank == 0:
        connection.close()
        for stream, handle in enumerate(handles[:3]):
            os.dup2(handle, stream)
            os.close(handle)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        if handles[3:]:
            os.environ["PMI_FD"] = str(handles[3])
        if "DISTCONV_DEBUG" in os.environ:  # which distconv reads while it is imported
            for name in [name for name in sys.modules if name.split(".")[0] == "distconv"]:
                del sys.modules[name]
        return words
    for handle in handles:
        os.close(handle)
    ended = os.pidfd_open(rank)
    while ended not in select.select([ended, connection], [], [])[0]:
        interrupted = connection.recv(1)  # nothing where the client is gone
        signal.pidfd_send_signal(ended, signal.SIGINT if interrupted else signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])
    try:
        connection.sendall(str(status).encode())
    except BrokenPipeError:
        pass
    os._exit(0)


if __name__ == "__main__":
    _, path, *words = sys.argv
    if words:
        ask(path, words)
    sys.argv = serve(path)
    for stream in (sys.stdout, sys.stderr):  # whole lines, between those of other ranks
        stream.reconfigure(line_buffering=True, write_through=False)
    from distconv.grid.abort import abort_when_a_rank_raises
    from distconv.transport.launch import launched

    if launched():  # as where a rank itself imports distconv
        abort_when_a_rank_raises()
    sys.modules["matplotlib.figure"].Figure.savefig = blank
    script = sys.argv[0]
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [os.path.dirname(script), *filter(None, paths)]
    sys.modules["__main__"] = main = type(sys)("__main__")
    main.__file__ = script
    with open(script) as file:
        exec(compile(file.read(), script, "exec"), main.__dict__)
