"""What people would use instead, on the same split: a constant, ridge on the same features, boosting on n-grams.

A rival is a point predictor. Its distribution is its point plus the spread of its residuals on the validation rows
(split conformal), which treats every rival alike; its log score is that of a Cauchy law fitted to those residuals.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import stats
from sklearn.decomposition import TruncatedSVD
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import RidgeCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from causalqwen.losses import quantile_crps
from causalqwen.numbers import CRPS_LEVELS, ValueLaw
from causalqwen.training import LEVELS


@dataclass(frozen=True)
class NumberTable:
    """Numbers to predict: the text before each, the features there [n, H], and its value [n]."""

    prompts: list[str]
    features: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.prompts)


Predictor = Callable[[NumberTable], np.ndarray]


def fit_constant(train: NumberTable) -> Predictor:
    """The median of the training values, for everybody."""
    median = np.median(train.values)
    return lambda table: np.full(len(table), median)


def fit_ridge(train: NumberTable) -> Predictor:
    """Ridge regression on the standardized features, its penalty chosen by leave-one-out on the training rows."""
    model = make_pipeline(StandardScaler(), RidgeCV(np.logspace(0, 5, 11))).fit(train.features, train.values)
    return lambda table: model.predict(table.features)


def fit_boosting(train: NumberTable) -> Predictor:
    """Gradient boosting (absolute error) on 128 principal components of character 1- to 4-grams of the text."""
    components = min(128, len(train) - 1)
    grams = make_pipeline(
        TfidfVectorizer(analyzer="char", ngram_range=(1, 4), min_df=2, sublinear_tf=True),
        TruncatedSVD(components, random_state=0),
    )
    boosting = HistGradientBoostingRegressor(loss="absolute_error", max_iter=400, learning_rate=0.05, random_state=0)
    boosting.fit(grams.fit_transform(train.prompts), train.values)
    return lambda table: boosting.predict(grams.transform(table.prompts))


RIVALS: dict[str, Callable[[NumberTable], Predictor]] = {
    "constant": fit_constant,
    "ridge": fit_ridge,
    "gradient_boosting": fit_boosting,
}


def score_rivals(
    train: NumberTable, validation: NumberTable, test: NumberTable, law: ValueLaw
) -> dict[str, dict[str, Any]]:
    """Scores of every rival on the test rows, keys as `score_values`; quantiles are clipped by `law` as the model's are.

    "constant" has one row more, "constant_cauchy": the Cauchy law fitted to the training values.
    """
    scores: dict[str, dict[str, Any]] = {}
    for name, fit in RIVALS.items():
        predict = fit(train)
        residuals = np.sort(validation.values - predict(validation))
        scores[name] = _score(predict(test), residuals, test.values, law)
    loc, scale = stats.cauchy.fit(train.values)
    quantiles = torch.from_numpy(stats.cauchy.ppf(CRPS_LEVELS.numpy(), loc, scale)).expand(len(test), -1)
    scores["constant_cauchy"] = _score_quantiles(quantiles, np.full(len(test), loc), test.values, law)
    scores["constant_cauchy"]["log_score"] = float(stats.cauchy.logpdf(test.values, loc, scale).mean())
    values = torch.from_numpy(test.values)
    closed = ValueLaw().crps(torch.full_like(values, loc), torch.full_like(values, scale), values)
    scores["constant_cauchy"]["crps"] = closed.mean().item()
    return scores


def _score(points: np.ndarray, residuals: np.ndarray, values: np.ndarray, law: ValueLaw) -> dict[str, Any]:
    quantiles = points[:, None] + np.quantile(residuals, CRPS_LEVELS.numpy())[None]
    scores = _score_quantiles(torch.from_numpy(quantiles), points, values, law)
    loc, scale = stats.cauchy.fit(residuals)
    scores["log_score"] = float(stats.cauchy.logpdf(values - points, loc, scale).mean())
    return scores


def _score_quantiles(quantiles: torch.Tensor, points: np.ndarray, values: np.ndarray, law: ValueLaw) -> dict[str, Any]:
    observed = torch.from_numpy(values)
    crps = quantile_crps(observed, law.clip(quantiles), CRPS_LEVELS).mean().item()
    coverage = {}
    for level in LEVELS:
        low = round((1 - level) / 2 * 200) - 1
        inside = (quantiles[:, low] <= observed) & (observed <= quantiles[:, len(CRPS_LEVELS) - 1 - low])
        coverage[str(level)] = inside.double().mean().item()
    error = np.abs(values - points)
    return {
        "mae": float(error.mean()),
        "median_error": float(np.median(error)),
        "crps": crps,
        "quantile_crps": crps,
        "coverage": coverage,
    }
