"""Scores of results, with bootstrap intervals over the test rows."""

from typing import Any

import numpy as np
import torch

from causalqwen.evaluation.rivals import central, crps_of, inside
from causalqwen.numbers import ValueLaw, symlog
from causalqwen.training import LEVELS

DRAWS = 2000
"""Resamplings of the test rows."""


def row_scores(result: dict[str, Any], law: ValueLaw) -> dict[str, np.ndarray]:
    """What each test row scores, [n]: crps, crps_log (of symlog quantiles and values), error (of the median), log_score where
    there is a density, and whether its intervals hold the value: cover_0.5, raw_0.5 and so on."""
    values, quantiles = result["values"], result["quantiles"]
    scores = {"crps": crps_of(quantiles, values, law), "crps_log": crps_log(quantiles, values, law)}
    scores["error"] = np.abs(quantiles[:, quantiles.shape[1] // 2] - values)
    if "log_prob" in result:
        scores["log_score"] = result["log_prob"]
    kinds = {"cover": quantiles} | ({"raw": result["raw"]} if "raw" in result else {})
    if "raw" in result:
        scores["crps_raw"] = crps_of(result["raw"], values, law)
    for level in LEVELS:
        for kind, those in kinds.items():
            scores[f"{kind}_{level}"] = inside(central(those, level), values)
    return {name: column.astype(np.float64) for name, column in scores.items()}


def crps_log(quantiles: np.ndarray, values: np.ndarray, law: ValueLaw) -> np.ndarray:
    """CRPS [n] of symlog(value) from symlog of the clipped quantiles."""
    clipped = symlog(law.clip(torch.tensor(quantiles))).numpy()
    return crps_of(clipped, symlog(torch.from_numpy(values)).numpy(), ValueLaw())


def resampled_means(column: np.ndarray) -> np.ndarray:
    """Means [2000] of resamplings of the test rows [n]: the same resamplings for every column of that length."""
    picks = np.random.default_rng(0).integers(len(column), size=(DRAWS, len(column)))
    return column[picks].mean(1)


def interval_of(draws: np.ndarray) -> dict[str, float]:
    """The central 95% of the draws."""
    low, high = np.quantile(draws, [0.025, 0.975])
    return {"low": float(low), "high": float(high)}
