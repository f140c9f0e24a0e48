"""The command line."""

from qfuse.cli.main import main

__all__ = ["main"]
