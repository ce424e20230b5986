"""The command line: `python -m distconv`."""

import sys

from distconv.tools.command_line import main

if __name__ == "__main__":
    sys.exit(main())
