"""Numbers in closed form: ridge in the space of a kernel, everything chosen by exact leave-one-out.

    loc(x)       = sum_i a_i k(x, x_i)         a = (K + λ I)^-1 y,    y_i = t(value_i) on an axis t
    r_i          = a_i / (K + λ I)^-1_ii       the residual of row i under a fit of all other rows
    log scale(x) = sum_i b_i k(x, x_i)         b = (K + μ I)^-1 log(|r| + sd(r) / 20)
    level p      = t^-1(loc + scale q_p)       q_p: the p-quantile of r_i / scale_-i, scale_-i without row i too; on the axis
                                               no further from the training values than they spread

Rows of one group are left out together: r_B = ((K + λ I)^-1_BB)^-1 a_B. One eigendecomposition of K gives r for all λ and all
axes. The kernel has a mean diagonal of 1 over the rows, and a constant of 10 is added, which holds the intercept: features
that all rows together centre make K singular along the constant, and leave-one-out then looks best at next to no ridge.

Of more rows than `LANDMARKS` some are drawn as x_i, and all are fitted (Nyström's method): with K_mm^-1 = T T', the features
Φ = K_nm T have the ridge w = (Φ'Φ + λ I)^-1 Φ'y, a = T w and r = (y - Φw) / (1 - h), h_i the leverage of row i. The two
are one: Φ = U √D V' gives r_B = (I - H_BB)^-1 (y - H y)_B with H = U D (D + λ)^-1 U'.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from causalqwen.numbers import CRPS_LEVELS
from causalqwen.parts.kernel_reader import KernelReader

INTERCEPT = 10.0
RIDGES = np.logspace(-5, 3, 33)
"""λ and μ that are tried; the kernel's mean diagonal is 1."""

LEAST_SPREAD = 1 / 512
"""The least spread of a coordinate of the features, in its own root mean square: rounding makes less of it (experiments 8)."""

Maps = tuple[Callable[[np.ndarray], np.ndarray], Callable[[np.ndarray], np.ndarray]]

AXES: dict[str, Maps] = {
    "identity": (lambda values: values, lambda axis: axis),
    "log": (np.log, np.exp),
    "symlog": (lambda v: np.sign(v) * np.log1p(np.abs(v)), lambda a: np.sign(a) * np.expm1(np.abs(a))),
}
"""t and its inverse, by name."""

LANDMARKS = 4096
"""The most rows that a kernel is kept of: its decomposition costs their cube."""

OF_SCALE = 0.03
"""How much of a kernel is for columns that may tell of the scale alone."""

LEAST_SHARE = 1e-3
"""What a part of a kernel, or an exponent over a median distance, has to have: less tells nothing."""

_STARTS, _STEPS, _RATE, _PENALTY, _LEAST_NOISE = (2.0, 0.5, 0.125, 1 / 32), 40, 0.2, 10.0, 1e-3
_LEAST_ROOT = 1e-9  # rounding leaves a kernel negative ones
_AT_ONCE = 4096  # rows
_LEVELS = CRPS_LEVELS.numpy()
_TRIED_LEVELS = np.arange(1, 40) / 40
_FLOOR = 1 / 20  # of the residuals' standard deviation: no residual is taken for less
_CHOOSING = 1000  # rows


class Solution(NamedTuple):
    """A ridge's coefficients [m], its predictions of each row without that row's group [n], and λ."""

    coefficients: np.ndarray
    left_out: np.ndarray
    ridge: float


class KernelRidge:
    """The distribution of a number given k(x, x_i), after values [n] with kernel k(x_j, x_i) [n, m], without its intercept.

    axes: t and its inverse by name, to choose from; by default `AXES`, "log" for positive values alone. groups: int [n]; rows
    of one are left out together. counted: bool [n], the rows by which is chosen, all where none is. units: [n], what an error
    of each row is measured in; by default the median of |value|. among: [m, m], the kernel of the landmarks x_i; None where
    they are the rows.
    axis: the name of t. location, log_scale: both `Solution`s.
    quantiles: q_p at `CRPS_LEVELS` [199].
    ValueError for fewer than three rows, and for values or a kernel that are not finite.
    """

    def __init__(
        self,
        kernel: np.ndarray,
        values: np.ndarray,
        axes: dict[str, Maps] | None = None,
        groups: np.ndarray | None = None,
        counted: np.ndarray | None = None,
        units: np.ndarray | None = None,
        among: np.ndarray | None = None,
    ) -> None:
        own = kernel if among is None else among
        if len(values) < 3 or not (np.isfinite(values).all() and np.isfinite(own).all()):
            raise ValueError(f"a ridge needs three rows at least, finite values and kernel; got {len(values)} rows")
        axes = axes or {name: maps for name, maps in AXES.items() if name != "log" or values.min() > 0}
        self.unit = float(np.trace(own)) / len(own) or 1.0  # of a kernel of nothing
        self._decompose(kernel, among)
        self._groups = _of_several(groups)
        if counted is None or not counted.any():
            counted = np.ones(len(values), dtype=bool)
        if units is None:
            units = np.full(len(values), np.median(np.abs(values)) or 1.0)
        self.axis, self.location = self._choose(values, axes, counted, units)
        y, self._inverse = axes[self.axis][0](values), axes[self.axis][1]
        self.reach = 2 * y.min() - y.max(), 2 * y.max() - y.min()
        self.residuals = y - self.location.left_out
        floor = _FLOOR * self.residuals.std() + np.finfo(float).tiny
        spread = np.log(np.abs(self.residuals) + floor)
        tried = self._solutions(spread)
        self.log_scale = min(tried, key=lambda of: np.square(spread - of.left_out)[counted].sum())
        ratios = self.residuals / np.exp(self.log_scale.left_out)
        self.quantiles = np.quantile(ratios, _LEVELS, method="weibull")
        del self._roots, self._vectors, self._back, self._free

    def predict(self, kernel: np.ndarray) -> np.ndarray:
        """Quantiles [m, 199] at `CRPS_LEVELS`, in the units of the values, of rows with kernel k(x, x_i) [m, n]."""
        scaled = kernel / self.unit + INTERCEPT
        loc, log_scale = (scaled @ of.coefficients[:, None] for of in (self.location, self.log_scale))
        return self._inverse((loc + np.exp(log_scale) * self.quantiles).clip(*self.reach))

    def _decompose(self, kernel: np.ndarray, among: np.ndarray | None) -> None:
        """Make D [m], U [n, m], what leads from (D + λ)^-1 U'y to the coefficients [m, m], and 1 - h at each of `RIDGES`
        [n, 33]."""
        if among is None:
            roots, self._vectors = _eigh(kernel.astype(np.float64) / self.unit + INTERCEPT)
            self._roots, self._back = roots.clip(0), self._vectors
        else:
            roots, turned = _eigh(among.astype(np.float64) / self.unit + INTERCEPT)
            turned = turned / np.sqrt(roots.clip(_LEAST_ROOT))
            phi = np.empty(kernel.shape)
            for part in _parts(len(phi)):
                phi[part] = (kernel[part].astype(np.float64) / self.unit + INTERCEPT) @ turned
            roots, turns = _eigh(phi.T @ phi)
            self._roots = roots.clip(_LEAST_ROOT)
            for part in _parts(len(phi)):
                phi[part] = phi[part] @ (turns / np.sqrt(self._roots))
            self._vectors, self._back = phi, turned @ (turns * np.sqrt(self._roots))
        shrunk = RIDGES / (self._roots[:, None] + RIDGES)
        self._free = np.concatenate([self._vectors[part] ** 2 @ shrunk for part in _parts(len(self._vectors))])
        if among is not None:  # the vectors do not span all rows
            self._free += (1 - np.einsum("ij,ij->i", self._vectors, self._vectors)).clip(0)[:, None]
        self._spans = among is None

    def _solutions(self, y: np.ndarray) -> list[Solution]:
        """The ridge of y [n] at each of `RIDGES`."""
        along = self._vectors.T @ y
        beyond = np.zeros_like(y) if self._spans else y - self._vectors @ along
        solutions = []
        for place, ridge in enumerate(RIDGES):
            shrunk = 1 / (self._roots + ridge)
            errors = beyond + self._vectors @ (ridge * shrunk * along)
            residuals = errors / self._free[:, place]
            for rows in self._groups:
                vectors = self._vectors[rows]
                free = (vectors * (ridge * shrunk)) @ vectors.T
                if not self._spans:
                    free += np.eye(len(rows)) - vectors @ vectors.T
                residuals[rows] = np.linalg.solve(free, errors[rows])
            solutions.append(Solution(self._back @ (shrunk * along), y - residuals, float(ridge)))
        return solutions

    def _choose(
        self, values: np.ndarray, axes: dict[str, Maps], counted: np.ndarray, units: np.ndarray
    ) -> tuple[str, Solution]:
        """The axis and λ of the least CRPS left out, in units times on a symmetric logarithm, so that neither size nor unit
        decides, and the logarithm of that product. The residuals' own quantiles are the distribution here, with one scale.
        """
        true, common, found = (values / units)[counted], AXES["symlog"][0], {}
        for name, (forward, inverse) in axes.items():
            y = forward(values)
            for solution in self._solutions(y):
                spread = np.quantile((y - solution.left_out)[counted], _TRIED_LEVELS)
                predicted = (inverse(solution.left_out[:, None] + spread) / units[:, None])[counted]
                errors = _crps(true, predicted), _crps(common(true), common(predicted))
                found[sum(np.log(max(error, 1e-300)) for error in errors)] = name, solution
        return found[min(found)]


def _eigh(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    roots, vectors = torch.linalg.eigh(torch.from_numpy(matrix))
    return roots.numpy(), vectors.numpy()


def _parts(rows: int) -> list[slice]:
    return [slice(first, first + _AT_ONCE) for first in range(0, rows, _AT_ONCE)]


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


class Shape(NamedTuple):
    """The parts [B] of a kernel over B blocks, whose size is 1; d_b is the squared distance in block b of rows x and x':

    k(x, x') = sum_b alone_b exp(-narrow_b d_b) + sum_b linear_b <x_b, x'_b> + together exp(-sum_b along_b d_b)
    """

    alone: np.ndarray
    narrow: np.ndarray
    linear: np.ndarray
    along: np.ndarray
    together: float


class BlockKernel:
    """A kernel over blocks of features, float32 [n, R], standardised by these rows, and the ridge in its space.

    groups, counted, units: as `KernelRidge` has them. axes: what makes its axes for some of the rows. tied: how many of the
    first blocks have one width (`likeliest`). shape: the kernel, where it is known.
    mean, inverse [R]: x = (r - mean) inverse; a coordinate that does not vary has an inverse of 0. support
    float16 [m, R]: x of the rows that are kept, `LANDMARKS` at most. ridge: the fit to all rows.
    ValueError for features that are not finite.
    """

    def __init__(
        self,
        features: np.ndarray,
        blocks: Sequence[int],
        values: np.ndarray,
        groups: np.ndarray,
        axes: Callable[[np.ndarray], dict[str, Maps] | None] = lambda rows: None,
        counted: np.ndarray | None = None,
        units: np.ndarray | None = None,
        tied: int = 0,
        shape: Shape | None = None,
    ) -> None:
        self.blocks, (self.mean, spread) = blocks, _moments(features)
        if not np.isfinite(spread).all():
            raise ValueError("features to read a number from have to be finite")
        size = np.sqrt(self.mean**2 + spread**2)
        used, spread = spread > 1e-5 * size, spread.clip(LEAST_SPREAD * size)
        count = np.repeat([np.sqrt(max(part.sum(), 1)) for part in self._split(used)], blocks)
        self.inverse = np.where(used, 1 / np.where(used, spread * count, 1.0), 0.0).astype(np.float32)
        some = _whole_groups(groups, _CHOOSING)
        forward = next(iter((axes(some) or AXES).values()))[0]
        self.shape = shape or likeliest(
            self._split(self._x(features[some])), normal_scores(forward(values[some])), tied
        )
        rows = np.arange(len(values))
        kept = np.sort(np.random.default_rng(0).permutation(rows)[:LANDMARKS])
        self.support = self._x(features[kept]).astype(np.float16)
        x = self.support.astype(np.float32)
        own = kernel = self._kernel(x, x)
        if among := len(kept) < len(rows):
            kernel = np.concatenate([self._kernel(self._x(features[part]), x) for part in _parts(len(rows))])
        self.ridge = KernelRidge(kernel, values, axes(rows), groups, counted, units, own if among else None)

    def _x(self, features: np.ndarray) -> np.ndarray:
        return ((features - self.mean) * self.inverse).astype(np.float32)

    def _kernel(self, x: np.ndarray, kept: np.ndarray) -> np.ndarray:
        """k [n, m] of rows x [n, R] and those that are kept [m, R]."""
        reader = KernelReader(0, 0, [*self.blocks], 0, self.shape._asdict())
        used = np.repeat(reader.used, self.blocks)
        made: np.ndarray = reader.kernels(torch.from_numpy(x), torch.from_numpy(kept[:, used])).numpy()
        return made + np.float32(self.constant)

    @property
    def constant(self) -> float:
        """What the reader takes off the kernel."""
        return float(self.shape.alone.sum() + self.shape.together)

    def _split(self, x: np.ndarray) -> list[np.ndarray]:
        return np.split(x, np.cumsum(self.blocks)[:-1], axis=-1)


def normal_scores(values: np.ndarray) -> np.ndarray:
    """The quantiles of a normal distribution at the ranks of values [n], the mean rank of equal ones."""
    order = np.sort(values)
    ranks = sum(np.searchsorted(order, values, side) for side in ("left", "right")) / (2 * len(values))
    scores: np.ndarray = torch.special.ndtri(torch.from_numpy(ranks)).numpy()
    return scores


def likeliest(parts: Sequence[np.ndarray], y: np.ndarray, tied: int) -> Shape:
    """The shape that makes y [n] ~ N(0, K + s I + intercept) likeliest, from the blocks of rows x, [n, width] each.

        -log p(y) + 10 sum sqrt(alone, narrow, along)     narrow and along over median distances

    is brought down by steps of Adam from the best of `_STARTS`: the second part takes out what tells nothing. The first `tied`
    blocks, the layers of a backbone, share narrow and linear. The others have `OF_SCALE` of the whole at least, shared among
    them: what tells nothing of y may tell how far it spreads.
    """
    places = np.array([place for place, part in enumerate(parts) if part.any()], dtype=int)
    made, count, n = np.zeros((4, len(parts))), len(places), len(y)
    if not count:
        return Shape._make([*made, 0.0])
    tied = int((places < tied).sum())
    inner = [torch.from_numpy(parts[place] @ parts[place].T) for place in places]
    far = [(of.diagonal()[:, None] + of.diagonal() - 2 * of).clamp(min=0) for of in inner]
    medians = [float(each.median()) or 1.0 for each in far]
    far, scores = [each / median for each, median in zip(far, medians, strict=True)], torch.from_numpy(y)[:, None]
    group = torch.arange(count).sub(max(tied - 1, 0)).clamp(min=0)
    summed = torch.zeros(int(group[-1]) + 1, n, n).index_add_(0, group, torch.stack(inner))
    sizes = [count, len(summed), len(summed), count, 1, 1]

    def loss(logs: torch.Tensor) -> torch.Tensor:
        alone, narrow, linear, along, together, noise = logs.exp().split(sizes)
        kernel, exponent = torch.tensordot(linear, summed, 1), torch.zeros(())
        for share, width, slope, each in zip(alone, narrow[group], along, far, strict=True):
            kernel, exponent = kernel + share * torch.exp(-width * each), exponent + slope * each
        kernel = kernel + together * torch.exp(-exponent)
        covariance = kernel.double() + INTERCEPT + (noise + _LEAST_NOISE) * torch.eye(n, dtype=torch.float64)
        root = torch.linalg.cholesky_ex(covariance)[0]  # whose logarithm is NaN where rounding leaves none
        nats = torch.linalg.solve_triangular(root, scores, upper=False).square().sum() / 2 + root.diagonal().log().sum()
        return nats + _PENALTY * torch.cat([alone, narrow[group], along]).sqrt().sum()

    def start(width: float) -> torch.Tensor:
        first = (0.3 / count, width, 0.1 / count, 4 * width / count, 0.3, 0.1)
        return torch.cat([torch.full((size,), value) for value, size in zip(first, sizes, strict=True)]).log()

    with torch.no_grad():
        logs = min((start(width) for width in _STARTS), key=lambda logs: loss(logs).nan_to_num(torch.inf))
    steps, kept = torch.optim.Adam([logs.requires_grad_()], lr=_RATE, betas=(0.9, 0.95)), logs.detach().clone()
    with torch.enable_grad():
        for _ in range(_STEPS + 1):
            steps.zero_grad()
            if not (value := loss(logs)).isfinite():
                break
            kept = logs.detach().clone()
            value.backward()
            steps.step()
    alone, narrow, linear, along, together, _ = (part.double().numpy() for part in kept.exp().split(sizes))
    narrow, linear = narrow[group.numpy()], linear[group.numpy()]
    along = np.where(along < LEAST_SHARE * min(1.0, along.sum()), 0.0, along)
    together *= along.any()
    whole = alone.sum() + linear.sum() + together.sum()
    alone, linear, together = (np.where(part < LEAST_SHARE * whole, 0.0, part) for part in (alone, linear, together))
    short = (np.arange(count) >= tied) & (alone < OF_SCALE * whole / max(count - tied, 1))
    alone[short], narrow[short] = OF_SCALE * whole / max(count - tied, 1), _STARTS[2]
    whole = alone.sum() + linear.sum() + together.sum()
    made[:, places] = alone / whole, narrow / medians, linear / whole, along * together.any() / medians
    return Shape._make([*made, float(together.sum() / whole)])


def _moments(features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation [R] of each coordinate, float64, some rows at a time."""
    mean = sum(features[part].sum(0, dtype=np.float64) for part in _parts(len(features))) / len(features)
    squares = sum(np.square(features[part] - mean).sum(0) for part in _parts(len(features)))
    return mean, np.sqrt(squares / len(features))


def _whole_groups(groups: np.ndarray, most: int) -> np.ndarray:
    """Indices of rows of groups drawn, ascending, about `most`; of at least one group."""
    order = np.random.default_rng(0).permutation(np.unique(groups))
    place = np.empty(int(groups.max()) + 1, dtype=np.int64)
    place[order] = np.arange(len(order))
    rows = np.argsort(place[groups], kind="stable")
    cut = max(most, int((place[groups] == 0).sum()))
    return np.sort(rows[:cut])
