"""Runs the command: `python -m tfmp.migrate`."""

import sys

from tfmp.migrate.cli.command import main

if __name__ == "__main__":
    sys.exit(main())
