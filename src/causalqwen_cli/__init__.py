"""The command line. Heavy imports stand inside the commands, so that `--help` answers at once."""

import os

# Before torch is loaded: threads that spin for long while they wait for each other take a shared machine's cores from who
# works, and threads that never spin are slower on an idle one.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

from causalqwen_cli.app import main

__all__ = ["main"]
