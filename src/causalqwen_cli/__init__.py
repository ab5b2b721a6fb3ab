"""The command line. Heavy imports stand inside the commands, so that `--help` answers at once."""

from causalqwen_cli.app import main

__all__ = ["main"]
