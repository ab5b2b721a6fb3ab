"""What people would use instead, on the same split, and the one mechanism by which every rival is fitted and scored.

A rival is a function fit(train, validation, seed) that gives predict(table), which gives a `Forecast`. Those here predict a
point; their distribution is that point plus the spread of its residuals on the validation rows (split conformal), and their
log score that of a Cauchy law fitted to those residuals. Others stand in `benchmarks/numbers`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from causalqwen.evaluation.number_table import NumberTable
from causalqwen.extras import extra
from causalqwen.losses import quantile_crps
from causalqwen.numbers import CRPS_LEVELS, ClassLaws, ValueLaw, ValueTransform
from causalqwen.training import LEVELS
from causalqwen.training.closed_form import KernelRidge

with extra("evaluate", "scoring rivals"):
    from scipy import stats
    from sklearn.feature_extraction.text import TfidfVectorizer


@dataclass(frozen=True)
class Forecast:
    """What a rival says about the n rows of a table, float64, in the data's units.

    quantiles: [n, 199] at `CRPS_LEVELS`, ascending. points: [n], its answer where it has to give one; the medians by default.
    log_prob: [n], log density at the table's values, where there is a density. crps: [n], where there is a closed form.
    raw: quantiles [n, 199] before a recalibration on validation rows, where there was one. notes: figures of its own.
    """

    quantiles: np.ndarray
    points: np.ndarray | None = None
    log_prob: np.ndarray | None = None
    crps: np.ndarray | None = None
    raw: np.ndarray | None = None
    notes: dict[str, float] = field(default_factory=dict)


MOST_RIDGE_ROWS = 5000

Predictor = Callable[[NumberTable], Forecast]
Rival = Callable[[NumberTable, NumberTable, int], Predictor]
"""fit(train, validation, seed) -> predict(table) -> Forecast."""


def with_residuals(
    points: Callable[[NumberTable], np.ndarray], validation: NumberTable, transform: ValueTransform
) -> Predictor:
    """The rival whose point is t^-1(points(table)) and whose spread is that of its residuals on the validation rows, on the
    axis of t."""
    residuals = on_axis(transform, validation.values) - points(validation)
    spread = np.quantile(residuals, CRPS_LEVELS.numpy())
    loc, scale = stats.cauchy.fit(residuals)

    def predict(table: NumberTable) -> Forecast:
        middle = points(table)
        density = stats.cauchy.logpdf(on_axis(transform, table.values) - middle, loc, scale)
        return Forecast(
            from_axis(transform, middle[:, None] + spread[None]),
            from_axis(transform, middle),
            density + transform.log_jacobian(torch.from_numpy(table.values)).numpy(),
        )

    return predict


def on_axis(transform: ValueTransform, values: np.ndarray) -> np.ndarray:
    """t, elementwise."""
    return transform.forward(torch.from_numpy(values)).numpy()


def from_axis(transform: ValueTransform, axis: np.ndarray) -> np.ndarray:
    """t^-1, elementwise."""
    return transform.inverse(torch.from_numpy(axis)).numpy()


def fit_constant(train: NumberTable, validation: NumberTable, seed: int) -> Predictor:
    """The median of the training values, for everybody."""
    median = np.median(train.values)
    return with_residuals(lambda table: np.full(len(table), median), validation, ValueTransform())


def fit_ngram_ridge(train: NumberTable, validation: NumberTable, seed: int) -> Predictor:
    """Ridge on TF-IDF of the prompts' character 2- to 5-grams, `KernelRidge`, on the rows of both tables: it needs none to
    choose by. Of more than `MOST_RIDGE_ROWS` rows some are drawn: the kernel is quadratic in them."""
    grams = TfidfVectorizer(analyzer="char", ngram_range=(2, 5), sublinear_tf=True)
    prompts, values = [*train.prompts, *validation.prompts], np.concatenate([train.values, validation.values])
    some = np.random.default_rng(seed).permutation(len(values))[:MOST_RIDGE_ROWS]
    known = grams.fit_transform([prompts[place] for place in some])
    ridge = KernelRidge((known @ known.T).toarray(), values[some])
    return lambda table: Forecast(ridge.predict((grams.transform(table.prompts) @ known.T).toarray()))


def fit_constant_cauchy(train: NumberTable, validation: NumberTable, seed: int) -> Predictor:
    """The Cauchy law fitted to the training values, for everybody."""
    loc, scale = stats.cauchy.fit(train.values)

    def predict(table: NumberTable) -> Forecast:
        values, count = torch.from_numpy(table.values), len(table)
        return Forecast(
            np.broadcast_to(stats.cauchy.ppf(CRPS_LEVELS.numpy(), loc, scale), (count, len(CRPS_LEVELS))),
            np.full(count, loc),
            stats.cauchy.logpdf(table.values, loc, scale),
            ValueLaw().crps(torch.full_like(values, loc), torch.full_like(values, scale), values).numpy(),
        )

    return predict


RIVALS: dict[str, Rival] = {
    "constant": fit_constant,
    "ngram_ridge": fit_ngram_ridge,
    "constant_cauchy": fit_constant_cauchy,
}
"""Rivals of `evaluate` and the demo, by name."""


def score_rivals(
    train: NumberTable, validation: NumberTable, test: NumberTable, law: ValueLaw | ClassLaws
) -> dict[str, dict[str, Any]]:
    """Scores of every rival on the test rows, keys as `score_values`; quantiles are clipped by `law` as the model's are.
    ValueError where there are too few numbers to fit them on, to give them a width, or to score."""
    for name, table, fewest in (("training", train, 2), ("validation", validation, 2), ("scored", test, 1)):
        if len(table) < fewest:
            raise ValueError(f"rivals need {fewest} numbers at least; the {name} rows hold {len(table)}")
    return {name: score_forecast(fit(train, validation, 0)(test), test.values, law) for name, fit in RIVALS.items()}


def score_forecast(forecast: Forecast, values: np.ndarray, law: ValueLaw | ClassLaws) -> dict[str, Any]:
    """mae, median_error, crps (closed where the forecast has one), quantile_crps, coverage and log_score, if any."""
    points = forecast.quantiles[:, len(CRPS_LEVELS) // 2] if forecast.points is None else forecast.points
    error = np.abs(values - points)
    crps = crps_of(forecast.quantiles, values, law).mean()
    scores = {
        "mae": float(error.mean()),
        "median_error": float(np.median(error)),
        "crps": float(crps if forecast.crps is None else forecast.crps.mean()),
        "quantile_crps": float(crps),
        "coverage": {str(level): float(inside(central(forecast.quantiles, level), values).mean()) for level in LEVELS},
    }
    if forecast.log_prob is not None:
        scores["log_score"] = float(forecast.log_prob.mean())
    return scores


def crps_of(quantiles: np.ndarray, values: np.ndarray, law: ValueLaw | ClassLaws) -> np.ndarray:
    """CRPS [n] from quantiles [n, 199], clipped by `law` (theory 3.11)."""
    return quantile_crps(torch.from_numpy(values), law.clip(torch.tensor(quantiles)), CRPS_LEVELS).numpy()


def central(quantiles: np.ndarray, level: float) -> np.ndarray:
    """The central interval at 0.5, 0.8 or 0.9, ends [n, 2], from quantiles [n, 199]."""
    low = round((1 - level) / 2 * 200) - 1
    return quantiles[:, [low, len(CRPS_LEVELS) - 1 - low]]


def inside(interval: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Which values [n] lie in intervals [n, 2], ends included: an end that went through t and back is off by its last bits."""
    rounding = 1e-9 * np.abs(values)
    return (interval[:, 0] - rounding <= values) & (values <= interval[:, 1] + rounding)
