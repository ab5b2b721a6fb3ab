"""The mean of a row's number, as squared error asks for it (theory 3.11, docs/tables.md)."""

from dataclasses import dataclass

import numpy as np

from causalqwen.extras import extra

with extra("tables", "the mean of a number"):
    from sklearn.linear_model import RidgeCV

_PENALTIES = np.logspace(-2, 8, 21)
_LEAST = 1e-6  # spread of a fact, in the largest of the values

FEWEST = 10
"""Rows that tell more of a mean than fitting it to them takes."""


@dataclass(frozen=True)
class FittedMean:
    """What is added to the law's mean, by what rows that were held out missed.

        m + w_0 + w_1 (m - c_1) + w_2 (q - m - c_2) + sum_i w_i (a_i - m - c_i)

    m and q are the law's mean and its median, a_i what each expert says of the value. weights [K]: w, the first one alone.
    centers [K]: c, the first one 0.
    """

    weights: np.ndarray
    centers: np.ndarray

    @classmethod
    def fit(
        cls, law: np.ndarray, answers: np.ndarray, values: np.ndarray, weight: np.ndarray | None = None
    ) -> "FittedMean":
        """Ridge regression of values - m, whose penalty is chosen by leaving each row out; so large a penalty is among them
        that nothing is added where nothing is known.

        law [n, 2]: m and q of the rows that were held out. answers [n, experts]: of experts that were fitted without the row.
        values [n]. weight [n]: how often a row counts.
        """
        unit = max(float(np.abs(column).max(initial=0.0)) for column in (values, law, answers)) or 1.0
        facts = _facts(law / unit, answers / unit)
        centers, widths = facts.mean(0), facts.std(0)
        centers[0], widths[0] = 0.0, 1.0
        widths = np.where(widths > _LEAST, widths, np.inf)  # rounding, or what is the same in all rows, tells nothing
        missed = values / unit - law[:, 0] / unit
        scale = float(np.sqrt(np.mean(np.square(missed)))) or 1.0
        ridge = RidgeCV(_PENALTIES, fit_intercept=False).fit((facts - centers) / widths, missed / scale, weight)
        weights = ridge.coef_ * scale / widths
        weights[0] *= unit
        return cls(weights, centers * unit)

    def of(self, law: np.ndarray, answers: np.ndarray) -> np.ndarray:
        """The mean [n] of rows whose law has m and q [n, 2] and of which the experts say answers [n, experts]."""
        means: np.ndarray = law[:, 0] + (_facts(law, answers) - self.centers) @ self.weights
        return means


def _facts(law: np.ndarray, answers: np.ndarray) -> np.ndarray:
    m, q = law.T
    return np.concatenate([np.ones((len(m), 1)), m[:, None], (q - m)[:, None], answers - m[:, None]], axis=1)
