"""The command line. Heavy imports stand inside the commands, so that `--help` answers at once."""

import os

# Before torch is loaded: threads that spin while they wait for each other take a shared machine's cores from who works.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from causalqwen_cli.app import main

__all__ = ["main"]
