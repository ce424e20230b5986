"""Command lines that all ranks parse: all ranks accept them, or none does."""

from __future__ import annotations

import argparse
import sys

import pytest
from mpi4py import MPI

from distconv.tools.command_line import RankParser

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


def parser() -> RankParser:
    """Return a parser with a subcommand, of whose type one rank alone may complain."""

    def readable(text: str) -> str:
        if text == "absent" and RANK == SIZE - 1:
            raise argparse.ArgumentTypeError(f"no file {text}")
        return text

    parser = RankParser(prog="program")
    parser.add_argument("--steps", type=int, default=1)
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("read").add_argument("--file", type=readable)
    return parser


@pytest.mark.parallel([1, 2, 3])
def test_ranks_that_are_given_the_same_get_through() -> None:
    parsed = parser().parse_args(["--steps", "3", "read", "--file", "here"])
    assert (parsed.steps, parsed.command, parsed.file) == (3, "read", "here")
    parsed, rest = parser().parse_known_args(["--steps", "3", "--more"])
    assert (parsed.steps, rest) == (3, ["--more"])


@pytest.mark.parallel([2, 3])
@pytest.mark.parametrize("odd", [["--steps", "x"], ["--help"], ["--steps", "2"], []])
def test_arguments_that_differ_end_all_ranks(
    odd: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parser().parse_args(odd if RANK == SIZE - 1 else ["--steps", "3"])
    assert end.value.code == 2
    said = capsys.readouterr().err
    if RANK == 0:
        assert f"the arguments of rank {SIZE - 1} are {' '.join(odd)!r}" in said
    else:
        assert not said


@pytest.mark.parallel([1, 2, 3])
@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["--steps", "x"], 2, "program: error: argument --steps: invalid int value: 'x'"),
        (["--more"], 2, "program: error: unrecognized arguments: --more"),
        (["read", "--file", "absent"], 2, "program read: error: argument --file: no file absent"),
        (["--help"], 0, "usage: program [-h]"),
        (["read", "--help"], 0, "usage: program read [-h]"),
    ],
)
def test_what_one_rank_complains_of_ends_all_and_is_said_once(
    arguments: list[str], status: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parser().parse_args(arguments)
    assert end.value.code == status
    said = capsys.readouterr()
    assert (said.err if status else said.out).count(text) == (RANK == 0)
    assert ("(on rank" in said.err) == (RANK == 0 and "absent" in arguments and SIZE > 1)


@pytest.mark.parallel([2])
def test_ranks_of_a_communicator_parse_without_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["program", "--steps", str(RANK)])
    alone = RankParser(MPI.COMM_SELF)
    alone.add_argument("--steps", type=int)
    assert alone.parse_args().steps == RANK
