"""The command line: each command is one call into the library."""

from featcal.cli.app import main

__all__ = ["main"]
