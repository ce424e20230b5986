"""Compare training steps of two commits: `python -m benchmarks.commits OLD [--new NEW]`.

Both commits run all the time, each in a launch of its own, and take a few steps in turns, so that
whatever slows the machine for longer than a tenth of a second slows both. Where the memory of a
process happens to lie makes some launches faster than others; several launches even that out.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

from benchmarks.commit_steps import CASES
from examples.trainer.arguments import positive
from examples.trainer.launch import mpiexec

ROOT = Path(__file__).resolve().parent.parent
STEPS = Path(__file__).with_name("commit_steps.py")
DESCRIPTION = "Compare training steps of two commits, in launches that take turns."
BURST = 0.06
"""Seconds for which one commit takes steps before it is the other's turn."""


class Launch:
    """Take steps on the ranks of one commit, which otherwise sleep in the read of a connection.

    Raises
    ------
    RuntimeError
        Where the job ends before its time, with what it has said.
    """

    def __init__(self, tree: Path, ranks: int, said: Path) -> None:
        self._tree, self._said = tree, said
        self._ranks: list[IO[str]] = []
        with socket.create_server(("localhost", 0)) as server, said.open("w") as output:
            port = str(server.getsockname()[1])
            self._process = subprocess.Popen(
                [mpiexec(), "-n", str(ranks), sys.executable, str(STEPS), port],
                cwd=tree,
                env={**os.environ, "PYTHONPATH": str(tree)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            server.settimeout(0.2)
            while len(self._ranks) < ranks:
                with suppress(TimeoutError):
                    connection = server.accept()[0]
                    connection.settimeout(None)
                    self._ranks.append(connection.makefile("rw"))
                if self._process.poll() is not None:
                    raise self._failure()

    def seconds_of(self, case: str, steps: int) -> float:
        """Take steps of a case; return the seconds of one, on the slowest rank."""
        try:
            for rank in self._ranks:
                rank.write(f"{case} {steps}\n")
                rank.flush()
            return max(float(rank.readline()) for rank in self._ranks) / steps
        except (OSError, ValueError):  # an empty line is none of a rank that takes steps
            raise self._failure() from None

    def close(self) -> None:
        """Let the ranks leave, and wait for them."""
        for rank in self._ranks:
            with suppress(OSError):
                rank.close()
        self._process.wait(60)

    def _failure(self) -> RuntimeError:
        """End the job, and return in words how it went."""
        self._process.terminate()
        status = self._process.wait(60)
        said = self._said.read_text(errors="replace")[-4000:].strip() or "nothing"
        return RuntimeError(
            f"the job of {self._tree} has ended with status {status} before its time; it said:\n"
            f"{said}"
        )


def compare(
    old: Path, new: Path, case: str, arguments: argparse.Namespace, folder: Path, new_first: bool
) -> list[float]:
    """Return the ratios of new to old of a case, over pairs of bursts in one pair of launches.

    Parameters
    ----------
    arguments: those of the command, for the ranks, the steps before any is timed, and the seconds.
    new_first: whether the launch of the new commit begins.
    """
    trees = [("old", old), ("new", new)]
    if new_first:
        trees.reverse()
    with ExitStack() as stack:
        launches = {}
        for name, tree in trees:
            launches[name] = side = Launch(tree, arguments.ranks, folder / f"{name}.said")
            stack.callback(side.close)
            side.seconds_of(case, arguments.warm_up)
        sides = [launches["old"], launches["new"]]
        steps = max(1, round(BURST / sides[0].seconds_of(case, 5)))
        pairs = max(11, round(arguments.seconds / (2 * BURST)))
        ratios = []
        for i in range(pairs):
            turn = sides if i % 2 == 0 else sides[::-1]
            times = {id(side): side.seconds_of(case, steps) for side in turn}
            ratios.append(times[id(sides[1])] / times[id(sides[0])])
    return ratios


def tree_of(commit: str, folder: Path, stack: ExitStack) -> Path:
    """Check a commit out into a folder until the stack closes; take a checkout as it is."""
    if Path(commit).is_dir():
        return Path(commit).resolve()
    tree = folder / commit.replace("/", "_")
    subprocess.run(["git", "worktree", "add", "-q", "--detach", tree, commit], cwd=ROOT, check=True)
    stack.callback(
        lambda: subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)
    )
    return tree


def known_commit(text: str) -> str:
    """Return the name of a commit or the folder of a checkout; refuse what is neither."""
    seen = subprocess.run(
        ["git", "rev-parse", "-q", "--verify", f"{text}^{{commit}}"], cwd=ROOT, capture_output=True
    )
    if seen.returncode and not Path(text, "distconv").is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a commit nor a checkout of distconv")
    return text


def known_cases(text: str) -> list[str]:
    """Return the cases of a list with commas; refuse others."""
    cases = text.split(",")
    unknown = [case for case in cases if case not in CASES]
    if unknown:
        raise argparse.ArgumentTypeError(f"no case {unknown[0]!r}; there are {', '.join(CASES)}")
    return cases


def main() -> None:
    """Print a row for each case: the median of the launches' median ratios, and each of those."""
    parser = argparse.ArgumentParser(prog="benchmarks.commits", description=DESCRIPTION)
    parser.add_argument("old", type=known_commit, help="a commit, or the folder of a checkout")
    parser.add_argument(
        "--new", type=known_commit, default=str(ROOT), help="default: this checkout"
    )
    parser.add_argument("--ranks", type=positive(int), default=2)
    parser.add_argument("--launches", type=positive(int), default=5)
    parser.add_argument("--seconds", type=float, default=6.0, help="for a case in one launch")
    parser.add_argument(
        "--warm-up",
        type=positive(int),
        default=20,
        help="steps that are not timed: ranks compare the first 16 calls of a function",
    )
    parser.add_argument("--cases", type=known_cases, default=list(CASES))
    arguments = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        old, new = (tree_of(c, folder, stack) for c in (arguments.old, arguments.new))
        for case in arguments.cases:
            medians = []
            for launch in range(arguments.launches):
                place = folder / f"{case}-{launch}"
                place.mkdir()
                try:
                    ratios = compare(old, new, case, arguments, place, launch % 2 == 1)
                except RuntimeError as problem:
                    sys.exit(f"benchmarks.commits: error: {problem}")
                medians.append(statistics.median(ratios))
            each = " ".join(f"{median:.3f}" for median in sorted(medians))
            print(f"{case:14} {statistics.median(medians):.3f}   launches: {each}", flush=True)


if __name__ == "__main__":
    main()
