"""The report: one self-contained HTML page."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from causalqwen.evaluation import figures
from causalqwen.evaluation.page import figure, number_row, write_page
from causalqwen.modeling import CausalQwenForCausalLM
from causalqwen.numbers import ClassLaws, ValueLaw

NAMES = {
    "constant": "median of the training values",
    "constant_cauchy": "one Cauchy for all training values",
    "ridge": "ridge on the same features",
    "gradient_boosting": "gradient boosting on character n-grams",
}
HEADS = ["median error", "mean error", "CRPS", "log score", "inside 50%", "inside 80%", "inside 90%"]


CLASS_HEADS = [
    "numbers",
    "levels",
    "median error",
    *(f"{kind}inside {p}%" for kind in ("", "raw ") for p in (50, 80, 90)),
]


def table_rows(metrics: dict[str, Any], name: str = "CausalQwen") -> list[dict[str, Any]]:
    """Rows of the comparison: the model, and its rivals where there are any."""
    rows = [{"name": name, "own": True, "cells": _cells(metrics)}]
    for key, scores in metrics.get("rivals", {}).items():
        rows.append({"name": NAMES.get(key, key), "own": False, "cells": _cells(scores)})
    return rows


def _cells(scores: dict[str, Any]) -> list[str]:
    numbers = [figure(scores[key]) for key in ("median_error", "mae", "quantile_crps")]
    numbers.append(f"{scores['log_score']:.2f}" if "log_score" in scores else "–")
    return numbers + _shares(scores["coverage"])


def _shares(coverage: dict[str, float]) -> list[str]:
    return [f"{100 * coverage[level]:.0f}%" for level in ("0.5", "0.8", "0.9")]


def class_rows(metrics: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of the table of classes; none where no rows name one."""
    return [
        {
            "name": name,
            "cells": [
                f"{scores['numbers']:,}",
                "its own" if scores["own_levels"] else "the model's",
                figure(scores["median_error"]),
                *_shares(scores["coverage"]),
                *_shares(scores["coverage_raw"]),
            ],
        }
        for name, scores in metrics.get("classes", {}).items()
    ]


def value_figures(law: ValueLaw | ClassLaws, values: dict[str, torch.Tensor], unit: str) -> dict[str, str]:
    """Scatter and calibration of held-out numbers, as SVG; calibration is that of new numbers, which stand in no context.

    law, values: those of `evaluate`.
    """
    observed, new = values["value"].numpy(), ~values["stands"] if "stands" in values else slice(None)
    central = law.spread_levels(*(values[name][new] for name in ("loc", "scale", "value"))).numpy()
    levels = law.levels_at(values["scale"])[new]
    drawn = {"scatter": figures.predicted_against_true(observed, values["interval"].numpy(), unit, 0.9)}
    return drawn | ({"calibration": figures.calibration(central, levels)} if len(central) else {})


def example_rows(
    model: CausalQwenForCausalLM,
    prompts: Sequence[str],
    values: dict[str, torch.Tensor],
    count: int = 12,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Held-out numbers taken at random, so that the page shows ordinary ones, each with its law."""
    chosen = np.random.default_rng(seed).permutation(len(prompts))[:count].tolist()
    laws = model.predict_number([prompts[place] for place in chosen])
    return [
        number_row(f"{prompts[place]} …", values["value"][place].item(), law)
        for place, law in zip(chosen, laws, strict=True)
    ]


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file; none where it is missing."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_report(path: Path, **content: Any) -> None:
    """Render the report. Unset parts of the template are left out."""
    write_page(path, "report.html", heads=HEADS, class_heads=CLASS_HEADS, **content)
