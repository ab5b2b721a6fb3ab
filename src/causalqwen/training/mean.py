"""The mean of a row's number, as squared error asks for it (theory 3.11, docs/tables.md)."""

from dataclasses import dataclass

import numpy as np

FEWEST = 10
"""Rows that tell how far a law's mean can be trusted."""


@dataclass(frozen=True)
class FittedMean:
    """A correction that is added to the distribution's mean, by what rows that were held out missed.

        m + w_0 + w_1 (m - c_1) + w_2 (q - m - c_2) + sum_i w_i (a_i - m - c_i)

    m and q are the law's mean and its median, a_i what an expert says of the value. weights [K]: w, the first one alone.
    centers [K]: c, the first one 0. Fitted today: m + w (s - m), s what the mixture of the experts says; files of earlier
    versions hold all of it.
    """

    weights: np.ndarray
    centers: np.ndarray

    @classmethod
    def fit(
        cls, means: np.ndarray, mixed: np.ndarray, values: np.ndarray, weight: np.ndarray | None = None
    ) -> "FittedMean":
        """s + l (m - s): the mixture's answer, moved to the law's mean as far as rows that were held out ask for it.

            l = sum (y - s)(m - s) / sum (m - s)^2, less its standard error, within [0, 1]

        means [n]: m of these rows. mixed [n]: s, of experts that were fitted without the row. values [n]. weight [n]: how often
        a row counts.
        """
        unit = max(float(np.abs(column).max(initial=0.0)) for column in (values, means, mixed)) or 1.0
        often = np.ones(len(values)) if weight is None else weight
        apart, missed = (means - mixed) / unit, (values - mixed) / unit
        spread = float(often @ np.square(apart))
        share = 0.0
        if spread > 0:
            found = float(often @ (missed * apart)) / spread
            error = float(np.sqrt(often @ np.square((missed - found * apart) * apart))) / spread
            share = min(max(found - error, 0.0), 1.0)
        return cls(np.array([0.0, 0.0, 0.0, 1.0 - share]), np.zeros(4))

    def of(self, law: np.ndarray, answers: np.ndarray) -> np.ndarray:
        """The mean [n] of rows whose law has m and q [n, 2] and of which the experts say answers [n, experts]."""
        m, q = law.T
        facts = np.concatenate([np.ones((len(m), 1)), m[:, None], (q - m)[:, None], answers - m[:, None]], axis=1)
        means: np.ndarray = m + (facts - self.centers) @ self.weights
        return means
