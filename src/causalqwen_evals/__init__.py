"""Grafted models in other people's evaluation harnesses: lm-evaluation-harness and inspect-ai. See docs/fitting_in.md.

Nothing here imports either until it is asked for.
"""

from pathlib import Path

TASKS = Path(__file__).parent / "tasks"
"""Folder of tasks in lm-evaluation-harness's own YAML: `TaskManager(include_path=str(TASKS))`, or `--include_path`."""

__all__ = ["TASKS"]
