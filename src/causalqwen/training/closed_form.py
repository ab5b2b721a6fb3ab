"""Numbers in closed form: ridge in the space of a kernel, everything chosen by exact leave-one-out.

    loc(x)       = sum_i a_i k(x, x_i)         a = (K + λ I)^-1 y,    y_i = t(value_i) on an axis t
    r_i          = a_i / (K + λ I)^-1_ii       the residual of row i under a fit of all other rows
    log scale(x) = sum_i b_i k(x, x_i)         b = (K + μ I)^-1 log(|r| + sd(r) / 20)
    level p      = t^-1(loc + scale q_p)       q_p: the p-quantile of r_i / scale_-i, scale_-i without row i too; on the axis
                                               no further from the training values than they spread

Rows of one group are left out together: r_B = ((K + λ I)^-1_BB)^-1 a_B. One eigendecomposition of K gives r for all λ and all
axes. The kernel has a mean diagonal of 1 over the rows, and a constant of 10 is added, which holds the intercept: features
that all rows together centre make K singular along the constant, and leave-one-out then looks best at next to no ridge.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from causalqwen.numbers import CRPS_LEVELS

INTERCEPT = 10.0
RIDGES = np.logspace(-5, 3, 33)
"""λ and μ that are tried; the kernel's mean diagonal is 1."""

KINDS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Kernels that are tried: widths of a Gaussian one in units of a block's median distance; 0 for the linear one."""

LEAST_SPREAD = 1 / 512
"""The least spread of a coordinate of the features, in its own root mean square: rounding makes less of it (experiments 8)."""

Maps = tuple[Callable[[np.ndarray], np.ndarray], Callable[[np.ndarray], np.ndarray]]

AXES: dict[str, Maps] = {
    "identity": (lambda values: values, lambda axis: axis),
    "log": (np.log, np.exp),
    "symlog": (lambda v: np.sign(v) * np.log1p(np.abs(v)), lambda a: np.sign(a) * np.expm1(np.abs(a))),
}
"""t and its inverse, by name."""

_LEVELS = CRPS_LEVELS.numpy()
_TRIED_LEVELS = np.arange(1, 40) / 40
_FLOOR = 1 / 20  # of the residuals' standard deviation: no residual is taken for less
_CHOOSING = 1000


class Solution(NamedTuple):
    """A ridge's coefficients [n], its predictions of each row without that row's group [n], and λ."""

    coefficients: np.ndarray
    left_out: np.ndarray
    ridge: float


class KernelRidge:
    """The distribution of a number given k(x, x_i), after values [n] with kernel [n, n], without its intercept.

    axes: t and its inverse by name, to choose from; by default `AXES`, "log" for positive values alone. groups: int [n]; rows
    of one are left out together. counted: bool [n], the rows by which is chosen, all where none is.
    axis: the name of t. location, log_scale: both `Solution`s. error: what was least when they were chosen.
    quantiles: q_p at `CRPS_LEVELS` [199].
    ValueError for fewer than three rows, for values or a kernel that are not finite, or a kernel without a diagonal.
    """

    def __init__(
        self,
        kernel: np.ndarray,
        values: np.ndarray,
        axes: dict[str, Maps] | None = None,
        groups: np.ndarray | None = None,
        counted: np.ndarray | None = None,
    ) -> None:
        if len(values) < 3 or not (np.isfinite(values).all() and np.isfinite(kernel).all() and np.trace(kernel) > 0):
            raise ValueError(f"a ridge needs three rows at least, finite values and a kernel; got {len(values)} rows")
        axes = axes or {name: maps for name, maps in AXES.items() if name != "log" or values.min() > 0}
        self.unit = float(np.trace(kernel)) / len(values)
        scaled = torch.from_numpy(kernel.astype(np.float64) / self.unit + INTERCEPT)
        self._roots, self._vectors = (part.numpy() for part in torch.linalg.eigh(scaled))
        self._roots = self._roots.clip(0)
        self._squares, self._groups = self._vectors**2, _of_several(groups)
        if counted is None or not counted.any():
            counted = np.ones(len(values), dtype=bool)
        self.error, self.axis, self.location = self._choose(values, axes, counted)
        y, self._inverse = axes[self.axis][0](values), axes[self.axis][1]
        self.reach = 2 * y.min() - y.max(), 2 * y.max() - y.min()
        self.residuals = y - self.location.left_out
        floor = _FLOOR * self.residuals.std() + np.finfo(float).tiny
        spread = np.log(np.abs(self.residuals) + floor)
        tried = [self._solve(spread, ridge) for ridge in RIDGES]
        self.log_scale = min(tried, key=lambda of: np.square(spread - of.left_out)[counted].sum())
        ratios = self.residuals / np.exp(self.log_scale.left_out)
        self.quantiles = np.quantile(ratios, _LEVELS, method="weibull")
        del self._roots, self._vectors, self._squares

    def predict(self, kernel: np.ndarray) -> np.ndarray:
        """Quantiles [m, 199] at `CRPS_LEVELS`, in the units of the values, of rows with kernel k(x, x_i) [m, n]."""
        scaled = kernel / self.unit + INTERCEPT
        return self._levels(scaled @ self.location.coefficients, scaled @ self.log_scale.coefficients)

    def _levels(self, loc: np.ndarray, log_scale: np.ndarray) -> np.ndarray:
        levels = loc[:, None] + np.exp(log_scale)[:, None] * self.quantiles
        return self._inverse(levels.clip(*self.reach))

    def _solve(self, y: np.ndarray, ridge: float) -> Solution:
        shrunk = 1 / (self._roots + ridge)
        coefficients = self._vectors @ (shrunk * (self._vectors.T @ y))
        residuals = coefficients / (self._squares @ shrunk)
        for rows in self._groups:
            vectors = self._vectors[rows]
            residuals[rows] = np.linalg.solve((vectors * shrunk) @ vectors.T, coefficients[rows])
        return Solution(coefficients, y - residuals, float(ridge))

    def _choose(self, values: np.ndarray, axes: dict[str, Maps], counted: np.ndarray) -> tuple[float, str, Solution]:
        """The axis and λ of the least CRPS left out, in units times on a symmetric logarithm, so that neither size nor unit
        decides, and the logarithm of that product. The residuals' own quantiles are the distribution here, with one scale.
        """
        unit, common, found = np.median(np.abs(values)) or 1.0, AXES["symlog"][0], {}
        for name, (forward, inverse) in axes.items():
            y = forward(values)
            for solution in (self._solve(y, ridge) for ridge in RIDGES):
                spread = np.quantile((y - solution.left_out)[counted], _TRIED_LEVELS)
                told, true = inverse(solution.left_out[counted, None] + spread), values[counted]
                errors = _crps(true, told), _crps(common(true / unit), common(told / unit))
                found[sum(np.log(max(error, 1e-300)) for error in errors)] = name, solution
        return min(found), *found[min(found)]


def _of_several(groups: np.ndarray | None) -> list[np.ndarray]:
    """The rows of each group that has more than one."""
    if groups is None:
        return []
    order = np.argsort(groups, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(groups[order])) + 1)
    return [rows for rows in parts if len(rows) > 1]


def _crps(values: np.ndarray, quantiles: np.ndarray) -> float:
    """The mean CRPS of quantiles [n, 39] at `_TRIED_LEVELS`."""
    above = values[:, None] - quantiles
    return float(2 * np.maximum(_TRIED_LEVELS * above, (_TRIED_LEVELS - 1) * above).mean())


class BlockKernel:
    """A kernel over blocks of features, float32 [n, R], standardised by these rows, whose form leave-one-out has chosen.

    kind: of `KINDS`. mean, inverse [R]: x = (r - mean) inverse; a coordinate that does not vary has an inverse of 0. support
    float16 [n, R]: x of the rows. ridge: the fit to all rows. tried: the error of each kind.
    ValueError for features that are not finite, and where nothing varies.
    """

    def __init__(
        self,
        features: np.ndarray,
        blocks: Sequence[int],
        values: np.ndarray,
        groups: np.ndarray,
        axes: dict[str, Maps] | None = None,
        counted: np.ndarray | None = None,
    ) -> None:
        self.blocks, self.mean, spread = blocks, features.mean(0), features.std(0)
        if not np.isfinite(spread).all():
            raise ValueError("features to read a number from have to be finite")
        size = np.sqrt(self.mean**2 + spread**2)
        used, spread = spread > 1e-5 * size, spread.clip(LEAST_SPREAD * size)
        if not used.any():
            raise ValueError("features to read a number from have to vary")
        count = np.repeat([np.sqrt(max(part.sum(), 1)) for part in self._split(used)], blocks)
        self.inverse = np.where(used, 1 / np.where(used, spread * count, 1.0), 0.0).astype(np.float32)
        some = _whole_groups(groups, _CHOOSING)
        x = (features[some] - self.mean) * self.inverse
        distances = [_distances(part) for part in self._split(x)]
        medians = np.array([float(np.median(part)) or 1.0 for part in distances])
        self.tried = {}
        for kind in KINDS:
            kernel = _gaussian(distances, 2 * kind**2 * medians) if kind else x @ x.T
            by = None if counted is None else counted[some]
            self.tried[kind] = KernelRidge(kernel, values[some], axes, groups[some], by).error
        self.kind = min(self.tried, key=lambda kind: self.tried[kind])
        if self.kind:
            self.inverse /= np.repeat(np.sqrt(2 * medians) * self.kind, blocks).astype(np.float32)
        self.support = ((features - self.mean) * self.inverse).astype(np.float16)
        x = self.support.astype(np.float32)
        kernel = _gaussian(map(_distances, self._split(x)), np.ones(len(blocks))) if self.kind else x @ x.T
        self.ridge = KernelRidge(kernel, values, axes, groups, counted)

    def _split(self, x: np.ndarray) -> list[np.ndarray]:
        return np.split(x, np.cumsum(self.blocks)[:-1], axis=-1)


def _gaussian(distances: Iterable[np.ndarray], widths: np.ndarray) -> Any:
    return sum(np.exp(-part / width) for part, width in zip(distances, widths, strict=True))


def _distances(x: np.ndarray) -> np.ndarray:
    squares = (x * x).sum(1)
    return (squares[:, None] + squares - 2 * (x @ x.T)).clip(0)


def _whole_groups(groups: np.ndarray, most: int) -> np.ndarray:
    """Indices of rows of groups drawn, ascending, about `most`; of at least one group."""
    order = np.random.default_rng(0).permutation(np.unique(groups))
    place = np.empty(int(groups.max()) + 1, dtype=np.int64)
    place[order] = np.arange(len(order))
    rows = np.argsort(place[groups], kind="stable")
    cut = max(most, int((place[groups] == 0).sum()))
    return np.sort(rows[:cut])
