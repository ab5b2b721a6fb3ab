"""The command line. Heavy imports stand inside the commands, so that `--help` answers at once."""

import os

# Before torch is loaded: threads that spin for long take a shared machine's cores; those that never do are slow on an idle one.
os.environ |= {} if "OMP_WAIT_POLICY" in os.environ else {"GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "10000")}

from causalqwen_cli.app import main

__all__ = ["main"]
