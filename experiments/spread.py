"""The median, least and greatest of every figure over several metrics.json, one per seed.

.venv/bin/python experiments/spread.py runs/language/scores-*/metrics.json
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

SETTINGS = ("sampler", "top_p", "temperature")


def flatten(value: Any, name: str = "") -> dict[str, float]:
    """Numbers by dotted name; the points of curves by sampler and setting; lists of other things are left out."""
    if isinstance(value, bool) or value is None:
        return {}
    if isinstance(value, int | float):
        return {name: float(value)}
    found: dict[str, float] = {}
    if isinstance(value, dict):
        for key, part in value.items():
            found |= flatten(part, f"{name}.{key}".lstrip("."))
    elif isinstance(value, list) and all(isinstance(part, dict) for part in value):
        for part in value:
            setting = " ".join(f"{part[key]}" for key in SETTINGS if key in part)
            scores = {k: v for k, v in part.items() if k not in SETTINGS}
            found |= flatten(scores, f"{name}[{setting}]")
    return found


def main() -> None:
    runs = [flatten(json.loads(Path(path).read_text(encoding="utf-8"))) for path in sys.argv[1:]]
    if not runs:
        raise SystemExit("give the metrics.json of each seed")
    for name in runs[0]:
        values = [run[name] for run in runs if name in run]
        print(
            f"{name:60}{statistics.median(values):12.4f}  ({min(values):.4f} to {max(values):.4f}, {len(values)} seeds)"
        )


if __name__ == "__main__":
    main()
