"""The command line."""

from qfuse.cli.bisect import bisect_command
from qfuse.cli.main import main

# These commands use what the commands of `main` share, so they are added to it here.
main.add_command(bisect_command)

__all__ = ["main"]
