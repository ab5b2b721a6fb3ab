"""Numbers in closed form: ridge in the space of a kernel over blocks of features, everything chosen by exact leave-one-out.

    loc(x)       = sum_i a_i k(x, x_i)         a = (K + λ I)^-1 y,    y_i = t(value_i) on an axis t
    r_i          = a_i / (K + λ I)^-1_ii       the residual of row i under a fit of all other rows
    log scale(x) = sum_i b_i k(x, x_i)         b = (K + μ I)^-1 log(|r| + sd(r) / 20)
    level p      = t^-1(loc + scale q_p)       q_p: the p-quantile of r_i / scale_-i, scale_-i without row i too; on the axis
                                               no further from the training values than they spread

One eigendecomposition of K gives r for all λ and all axes. The kernel has a mean diagonal of 1 over the rows, and a constant of
10 is added to it, which holds the intercept: features that all rows together centre make K singular along the constant, and
leave-one-out then looks best at next to no ridge.

k is the mean over the blocks of a kernel of each, linear or Gaussian of the block's distances, and a weight times that of the
n-grams of the text. Which, how wide, and the weight are chosen on a thousand rows at most.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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
        self.left_out = self._levels(self.location.left_out, self.log_scale.left_out)
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


KINDS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Kernels that are tried: widths of a Gaussian one in units of a block's median distance; 0 for the linear one."""

WEIGHTS = (0.0, 0.25, 0.5, 1.0)
_FIRST_WEIGHT, _CHOOSING = 0.5, 1000


class _Block:
    """One block of the training rows, [n, d] dense or sparse, standardised where it is dense; products with other rows."""

    def __init__(self, rows: Any) -> None:
        self.dense = isinstance(rows, np.ndarray)
        if self.dense:
            self.mean, spread = rows.mean(0), rows.std(0)
            self.used = spread > 1e-6 * np.abs(self.mean)  # else it is rounding's
            self.width = spread[self.used] * np.sqrt(max(self.used.sum(), 1))
        self.rows = self._read(rows)
        self.squares = self._squares(self.rows)
        self.median = 1.0

    def _read(self, rows: Any) -> Any:
        return (rows - self.mean)[:, self.used] / self.width if self.dense else rows

    @staticmethod
    def _squares(rows: Any) -> np.ndarray:
        return np.asarray(
            (rows * rows).sum(-1) if isinstance(rows, np.ndarray) else rows.multiply(rows).sum(-1)
        ).ravel()

    def kernel(self, kind: float, rows: Any = None, among: Any = slice(None)) -> np.ndarray:
        """k(x, x_i) [m, n] of new rows, or of the rows themselves; `among` some of them."""
        known, squares = self.rows[among], self.squares[among]
        new = known if rows is None else self._read(rows)
        products = new @ known.T
        products = products if isinstance(products, np.ndarray) else products.toarray()
        if not kind:
            return products
        distances = ((squares if rows is None else self._squares(new))[:, None] + squares - 2 * products).clip(0)
        if rows is None:
            self.median = float(np.median(distances)) or 1.0
        return np.exp(-distances / (2 * kind**2 * self.median))


class ClosedForm:
    """The distribution of a number given blocks of features and n-grams, after training rows.

    blocks: arrays float [n, d]; grams: a sparse matrix [n, G] of unit rows, or None. kind: of `KINDS`; weight: of the n-grams.
    ValueError for features that are not finite, and where nothing varies.
    """

    def __init__(self, blocks: Sequence[np.ndarray], grams: Any, values: np.ndarray) -> None:
        made = [_Block(np.asarray(rows, dtype=np.float64)) for rows in blocks]
        self.used = [place for place, block in enumerate(made) if block.used.any()]
        self.blocks = [made[place] for place in self.used]
        self.grams = None if grams is None else _Block(grams)
        if not (self.blocks or grams is not None) or not all(np.isfinite(block.mean).all() for block in made):
            raise ValueError("features to read a number from have to be finite, and one of them has to vary")
        some = np.random.default_rng(0).permutation(len(values))[:_CHOOSING]
        weights = WEIGHTS if self.blocks and self.grams is not None else (1.0,)
        tried: dict[tuple[float, float], float] = {}
        for kind in KINDS:
            parts, weight = self._parts(kind, among=some), min(_FIRST_WEIGHT, weights[-1])
            tried[kind, weight] = KernelRidge(self._joined(parts, weight), values[some]).error
        self.kind = min(tried, key=lambda pair: tried[pair])[0]
        parts = self._parts(self.kind, among=some)
        for weight in weights:
            tried[self.kind, weight] = KernelRidge(self._joined(parts, weight), values[some]).error
        self.weight = min(weights, key=lambda weight: tried[self.kind, weight])
        self.ridge = KernelRidge(self._joined(self._parts(self.kind), self.weight), values)

    def predict(self, blocks: Sequence[np.ndarray], grams: Any) -> np.ndarray:
        """Quantiles [m, 199] at `CRPS_LEVELS` of new rows, with n-grams where there were some. ValueError where they lack."""
        if (grams is None) != (self.grams is None):
            raise ValueError("give new rows the n-grams that the training rows had, or none where these had none")
        return self.ridge.predict(self._joined(self._parts(self.kind, blocks, grams), self.weight))

    def _parts(self, kind: float, blocks: Any = None, grams: Any = None, among: Any = slice(None)) -> list[Any]:
        """The mean kernel of the blocks, and that of the n-grams; None for what there is not."""
        new = [None if blocks is None else blocks[place] for place in self.used]
        dense = sum(block.kernel(kind, rows, among) for block, rows in zip(self.blocks, new, strict=True))
        return [
            dense / len(self.blocks) if self.blocks else None,
            None if self.grams is None else self.grams.kernel(kind, grams, among),
        ]

    @staticmethod
    def _joined(parts: list[Any], weight: float) -> np.ndarray:
        dense, grams = parts
        if dense is None or grams is None:
            return grams if dense is None else dense
        return dense + weight * grams
