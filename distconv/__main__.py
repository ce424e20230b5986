"""The command line: `python -m distconv`, and the command `distconv`, which does the same."""

import os
import sys

from distconv.tools.command_line import main


def console() -> int:
    """Run the command `distconv`; modules are also found in the current folder, as by `-m`."""
    sys.path.insert(0, os.getcwd())
    return main()


if __name__ == "__main__":
    sys.exit(main())
