"""Numbers in closed form: ridge in the space of a kernel, everything chosen by exact leave-one-out.

    loc(x)       = sum_i a_i k(x, x_i)         a = (K + λ I)^-1 y,    y_i = t(value_i) on an axis t
    r_i          = a_i / (K + λ I)^-1_ii       the residual of row i under a fit of all other rows
    log scale(x) = sum_i b_i k(x, x_i)         b = (K + μ I)^-1 log(|r| + sd(r) / 20)
    level p      = t^-1(loc + scale q_p)       q_p: the p-quantile of r_i / scale_-i, scale_-i without row i too; on the axis
                                               no further from the training values than they spread

One eigendecomposition of K gives r for all λ and all axes. The kernel has a mean diagonal of 1 over the rows, and a constant of
10 is added to it, which holds the intercept: features that all rows together centre make K singular along the constant, and
leave-one-out then looks best at next to no ridge.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from causalqwen.extras import extra
from causalqwen.numbers import CRPS_LEVELS

with extra("tables", "ridge in closed form"):
    from scipy.linalg import eigh

INTERCEPT = 10.0
RIDGES = np.logspace(-5, 3, 33)
"""λ and μ that are tried; the kernel's mean diagonal is 1."""

AXES: dict[str, tuple[Callable[[np.ndarray], np.ndarray], Callable[[np.ndarray], np.ndarray]]] = {
    "identity": (lambda values: values, lambda axis: axis),
    "log": (np.log, np.exp),
    "symlog": (lambda v: np.sign(v) * np.log1p(np.abs(v)), lambda a: np.sign(a) * np.expm1(np.abs(a))),
}
"""t and its inverse, by name; "log" is tried for positive values alone."""

_LEVELS = CRPS_LEVELS.numpy()
_TRIED_LEVELS = np.arange(1, 40) / 40
_FLOOR = 1 / 20  # of the residuals' standard deviation: no residual is taken for less


class Solution(NamedTuple):
    """A ridge's coefficients [n], its predictions of each row without that row [n], and λ."""

    coefficients: np.ndarray
    left_out: np.ndarray
    ridge: float


class KernelRidge:
    """The distribution of a number given k(x, x_i), after values [n] with kernel [n, n], float64, without its intercept.

    axis: the name of t. location, log_scale: both `Solution`s. error: what was least when they were chosen.
    quantiles: q_p at `CRPS_LEVELS` [199].
    ValueError for fewer than three rows, for values or a kernel that are not finite, or a kernel without a diagonal.
    """

    def __init__(self, kernel: np.ndarray, values: np.ndarray) -> None:
        if len(values) < 3 or not (np.isfinite(values).all() and np.isfinite(kernel).all() and np.trace(kernel) > 0):
            raise ValueError(f"a ridge needs three rows at least, finite values and a kernel; got {len(values)} rows")
        self.unit = float(np.trace(kernel)) / len(values)
        self._roots, self._vectors = eigh(kernel / self.unit + INTERCEPT)
        self._roots = self._roots.clip(0)
        self._squares = self._vectors**2
        self.error, self.axis, self.location = self._choose(values)
        y = AXES[self.axis][0](values)
        self.reach = 2 * y.min() - y.max(), 2 * y.max() - y.min()
        residuals = y - self.location.left_out
        floor = _FLOOR * residuals.std() + np.finfo(float).tiny
        spread = np.log(np.abs(residuals) + floor)
        tried = [self._solve(spread, ridge) for ridge in RIDGES]
        self.log_scale = min(tried, key=lambda of: np.square(spread - of.left_out).sum())
        ratios = residuals / np.exp(self.log_scale.left_out)
        self.quantiles = np.quantile(ratios, _LEVELS, method="weibull")
        del self._roots, self._vectors, self._squares

    def predict(self, kernel: np.ndarray) -> np.ndarray:
        """Quantiles [m, 199] at `CRPS_LEVELS`, in the units of the values, of rows with kernel k(x, x_i) [m, n]."""
        scaled = kernel / self.unit + INTERCEPT
        return self._levels(scaled @ self.location.coefficients, scaled @ self.log_scale.coefficients)

    def _levels(self, loc: np.ndarray, log_scale: np.ndarray) -> np.ndarray:
        levels = loc[:, None] + np.exp(log_scale)[:, None] * self.quantiles
        return AXES[self.axis][1](levels.clip(*self.reach))

    def _solve(self, y: np.ndarray, ridge: float) -> Solution:
        shrunk = 1 / (self._roots + ridge)
        coefficients = self._vectors @ (shrunk * (self._vectors.T @ y))
        return Solution(coefficients, y - coefficients / (self._squares @ shrunk), float(ridge))

    def _choose(self, values: np.ndarray) -> tuple[float, str, Solution]:
        """The axis and λ of the least CRPS left out, in units times on a symmetric logarithm, so that neither size nor unit
        decides, and the logarithm of that product. The residuals' own quantiles are the distribution here, with one scale.
        """
        unit, common, found = np.median(np.abs(values)) or 1.0, AXES["symlog"][0], {}
        for name, (forward, inverse) in AXES.items():
            if name == "log" and values.min() <= 0:
                continue
            y = forward(values)
            for solution in (self._solve(y, ridge) for ridge in RIDGES):
                spread = np.quantile(y - solution.left_out, _TRIED_LEVELS)
                told = inverse(solution.left_out[:, None] + spread)
                errors = _crps(values, told), _crps(common(values / unit), common(told / unit))
                found[sum(np.log(max(error, 1e-300)) for error in errors)] = name, solution
        return min(found), *found[min(found)]


def _crps(values: np.ndarray, quantiles: np.ndarray) -> float:
    """The mean CRPS of quantiles [n, 39] at `_TRIED_LEVELS`."""
    above = values[:, None] - quantiles
    return float(2 * np.maximum(_TRIED_LEVELS * above, (_TRIED_LEVELS - 1) * above).mean())
