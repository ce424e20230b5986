"""The command line, `python -m distconv COMMAND`: examines modules, predicts, starts jobs."""

from __future__ import annotations

import os
import sys

from distconv.tools.command_line import BadArguments, RankParser, is_first
from distconv.tools.commands.files import DATA, INFER
from distconv.tools.commands.launch import LAUNCH
from distconv.tools.commands.modules import CALIBRATE, EXPLAIN, PLAN, PREDICT, TIMELINE, VERIFY
from distconv.tools.commands.scale import SCALE
from distconv.tools.version import __version__

COMMANDS = {
    "explain": EXPLAIN,
    "verify": VERIFY,
    "calibrate": CALIBRATE,
    "predict": PREDICT,
    "plan": PLAN,
    "scale": SCALE,
    "launch": LAUNCH,
    "timeline": TIMELINE,
    "infer": INFER,
    "data": DATA,
}


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit status. Collective."""
    parser = RankParser(prog="python -m distconv", description=__doc__)
    parser.add_argument("--version", action="version", version=f"distconv {__version__}")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, command in COMMANDS.items():
        of_command = commands.add_parser(name, help=command.purpose, description=command.purpose)
        command.options(of_command)
        of_command.set_defaults(command=command, named=of_command.prog)
    parsed = parser.parse_args(arguments)
    if parsed.command is None:
        if is_first():
            parser.print_help()
        return 2
    try:
        status: int = parsed.command.run(parsed)
    except BadArguments as error:
        if is_first():
            text = str(error).removeprefix(f"{parsed.named.rpartition(' ')[2]}: ")
            print(f"{parsed.named}: error: {text}", file=sys.stderr, flush=True)
        sys.exit(2)
    return status


def console() -> int:
    """Run the command `distconv`; modules are also found in the current folder, as by `-m`."""
    sys.path.insert(0, os.getcwd())
    return main()


if __name__ == "__main__":
    sys.exit(main())
