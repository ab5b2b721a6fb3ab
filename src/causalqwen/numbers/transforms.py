"""Monotone maps between values in the data's units and the axis on which the value head is linear (theory 3.8).

    x = t(v) = (s(v) - center) / width,   s(v) = v ("identity", "affine"), sign(v) ln(1 + |v|) ("symlog") or ln v ("log")

"quantile" is a broken line through knots instead: the training values at their own normal scores. A value that many rows
share (a zero for "none") is an atom: it takes a whole piece of the axis, from knot to knot, and has the probability of that
piece; the least or greatest value, where it is one, takes all that lies beyond (Tobin 1958).

Where the values have a `Support`, a value is t^-1(x) brought into it: rounded to its grid, and held between its ends. Whatever
the law says is then a value that there can be, a grid's values have exact probabilities, and so has an end (Tobin 1958).

Quantiles go through t exactly, so medians and intervals are exact; densities carry the Jacobian t'(v).
"""

from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from causalqwen.numbers.support import Support

TRANSFORMS = ("identity", "affine", "symlog", "log", "quantile")
_LARGEST_LOG = 709.0  # exp of more leaves float64
_ATOM, _ATOM_ROWS = 0.05, 8  # an atom is a value of at least this share of the rows, and of so many of them
_ROWS_PER_KNOT, _MOST_KNOTS = 8, 64
_QUARTILES = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
_UPPER_QUARTILE = 0.6744897501960817  # of the standard normal law


def symlog(values: Tensor) -> Tensor:
    """sign(v) ln(1 + |v|): odd, increasing, the identity near 0, logarithmic far away (theory 3.1)."""
    return torch.sign(values) * torch.log1p(values.abs())


@dataclass(frozen=True)
class ValueTransform:
    """t of the module's docstring. `identity` is the specification; `fit` sets the rest from training values.

    knots: of "quantile", (axis, value), both ascending; an atom stands twice, at both ends of its piece.
    support: where the values lie; a dictionary of its fields, as a configuration holds it, is taken too. "log" needs a positive
        least value, "identity" has none.
    """

    kind: str = "identity"
    center: float = 0.0
    width: float = 1.0
    knots: tuple[tuple[float, float], ...] = ()
    support: Support = field(default_factory=Support)

    def __post_init__(self) -> None:
        if self.kind not in TRANSFORMS:
            raise ValueError(f"unknown value transform {self.kind!r}; use one of {', '.join(TRANSFORMS)}")
        if isinstance(self.support, dict):
            object.__setattr__(self, "support", Support(**self.support))
        if self.kind == "log" and not (self.support.low is not None and self.support.low > 0):
            raise ValueError(f"the transform 'log' needs a support above 0, got {self.support}")
        object.__setattr__(self, "knots", tuple((float(axis), float(value)) for axis, value in self.knots))
        if (self.kind == "quantile") != (len(self.knots) >= 2):
            raise ValueError("a quantile transform has two knots or more, and no other has any")
        if not self.width > 0:
            raise ValueError(f"the width of a value transform must be positive, got {self.width}")
        if self.kind == "identity" and (self.center != 0.0 or self.width != 1.0 or self.support != Support()):
            raise ValueError(
                "the identity transform has center 0, width 1 and no support; use kind='affine' for others"
            )

    @classmethod
    def fit(cls, kind: str, values: Tensor, support: Support | None = None) -> "ValueTransform":
        """Robust fit: center = median of s(v), width = half the interquartile range (a Cauchy's scale), of values that hardly
        vary their largest deviation, or 1; of "quantile", the knots, or "affine" where all values are equal.

        ValueError on an empty tensor, one that holds NaN or infinities, or, of "log", a support that does not lie above 0.
        """
        if kind == "identity":
            return cls()
        support = support or Support()
        if values.numel() == 0:
            raise ValueError("cannot fit a value transform: the training rows hold no number")
        if not bool(torch.isfinite(values).all()):
            raise ValueError("cannot fit a value transform to values that are not finite")
        if kind == "quantile":
            knots = _quantile_knots(values.double().flatten())
            return cls(kind, knots=knots, support=support) if knots else cls.fit("affine", values, support)
        axis = cls(kind, support=support)._shape(support.held(values.to(torch.float64))).flatten()
        low, center, high = torch.quantile(axis[:: 1 + len(axis) // 1_000_000], _QUARTILES).tolist()
        width = (high - low) / 2
        if width <= 0:
            width = float((axis - center).abs().max()) or 1.0
        return cls(kind, center, width, support=support)

    @property
    def is_affine(self) -> bool:
        """Whether t is a straight line: then a stable law stays one in the data's units."""
        return self.kind in ("identity", "affine") and self.support == Support()

    @property
    def has_atoms(self) -> bool:
        """Whether some values have a probability of their own."""
        return self.kind == "quantile" or self.support != Support()

    def _columns(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Axis and values of the knots, float64 [k], where another tensor is."""
        axis, value = torch.tensor(self.knots, dtype=torch.float64).T.contiguous().to(like.device)
        return axis, value

    def _shape(self, values: Tensor) -> Tensor:
        if self.kind == "log":
            return values.clamp(min=torch.finfo(torch.float64).tiny).log()
        return symlog(values) if self.kind == "symlog" else values

    def cell(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The piece of the axis that is each value, float64: its ends, which differ where the value is an atom. What lies
        beyond an atom that is the least or the greatest value, or beyond the support, counts as that atom."""
        below, above, least, greatest = self.support.cell(values.to(torch.float64))
        low, high = self._cell(below)[0], self._cell(above)[1]
        return low.masked_fill(least, -torch.inf), high.masked_fill(greatest, torch.inf)

    def _cell(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """`cell` without a support."""
        if self.kind != "quantile":
            axis = (self._shape(values) - self.center) / self.width
            return axis, axis
        axis, at = self._columns(values)
        values = torch.where((at[0] == at[1]) & (values < at[0]), at[0], values)
        values = torch.where((at[-1] == at[-2]) & (values > at[-1]), at[-1], values)
        low = _on_line(values, at, axis, right=False)
        high = _on_line(values, at, axis, right=True)
        low = torch.where((values == at[0]) & (high > low), -torch.inf, low)
        return low, torch.where((values == at[-1]) & (high > low), torch.inf, high)

    def reached(self, values: Tensor) -> Tensor:
        """The x with P(Y <= v) = P(t(Y) <= x), float64: the upper end of `cell` of the greatest value there can be up to v;
        -inf below a least value that is an atom, where nothing lies."""
        values = values.to(torch.float64)
        ends = self.cell(self.support.floor(values))[1]
        if self.support.low is not None:
            ends = ends.masked_fill(values < self.support.low, -torch.inf)
        if self.kind != "quantile" or self.knots[0][1] != self.knots[1][1]:
            return ends
        return ends.masked_fill(values < self.knots[0][1], -torch.inf)

    def _end(self, value: float) -> tuple[float, float]:
        low, high = self._cell(torch.tensor(value, dtype=torch.float64))
        return low.item(), high.item()

    def forward(self, values: Tensor) -> Tensor:
        """t(v), float64, elementwise; of an atom of "quantile", the middle of its piece, which is what values that share an
        individual, or that are evidence about one, are read as."""
        low, high = self._cell(self.support.held(values.to(torch.float64)))
        if self.kind != "quantile":
            return low
        first, last = self.knots[0][0], self.knots[-1][0]
        return torch.where(high > low, (low.clamp(min=first) + high.clamp(max=last)) / 2, low)

    def collapse(self, axis: Tensor) -> Tensor:
        """The axis with the piece of every atom of "quantile", and all beyond the support, shrunk to one point, elementwise and
        nondecreasing: distances along it are between values, not between ranks of one value."""
        if self.support.low is not None:
            axis = axis.clamp(min=self._end(self.support.low)[0])
        if self.support.high is not None:
            axis = axis.clamp(max=self._end(self.support.high)[1])
        if self.kind != "quantile":
            return axis
        at, values = self._columns(axis)
        shrunk = axis
        for piece in (values[1:] == values[:-1]).nonzero().flatten().tolist():
            low = at[piece].item() if piece else -torch.inf
            high = at[piece + 1].item() if piece + 2 < len(at) else torch.inf
            end = low if piece else high
            shrunk = shrunk - (axis.clamp(low, high) - end)
        return shrunk

    def inverse(self, axis: Tensor) -> Tensor:
        """t^-1(x), float64, elementwise, in the support and clamped to what float64 can hold."""
        most = torch.finfo(torch.float64).max
        return self.support.nearest(self._inverse(axis.to(torch.float64)).clamp(-most, most))

    def _inverse(self, axis: Tensor) -> Tensor:
        if self.kind == "quantile":
            at, values = self._columns(axis)
            return _on_line(axis.clamp(-1e150, 1e150), at, values, right=True)
        axis = axis * self.width + self.center
        if self.kind == "log":
            return axis.clamp(max=_LARGEST_LOG).exp()
        return torch.sign(axis) * torch.expm1(axis.abs().clamp(max=_LARGEST_LOG)) if self.kind == "symlog" else axis

    def log_jacobian(self, values: Tensor) -> Tensor:
        """log t'(v), float64: what a log density on the axis gains when it is stated in the data's units; of an atom 0."""
        values = values.to(torch.float64)
        if not self.has_atoms:
            return self.log_slope(values)
        low, high = self.cell(values)
        return torch.where(high > low, 0.0, self.log_slope(values))  # the slope of an atom at an end is infinite

    def log_slope(self, values: Tensor) -> Tensor:
        """log t'(v), float64, whether or not v is an atom."""
        if self.kind == "quantile":
            axis, at = self._columns(values)
            piece = _piece(values, at, right=True)
            return ((axis[piece + 1] - axis[piece]) / (at[piece + 1] - at[piece])).log()
        slope = -torch.log1p(values.abs()) if self.kind == "symlog" else torch.zeros_like(values)
        if self.kind == "log":
            slope = -self._shape(values)
        return slope - torch.log(torch.tensor(self.width, dtype=torch.float64))

    def to_dict(self) -> dict:
        """Plain data for a configuration file."""
        fields = asdict(self)
        if self.support == Support():
            del fields["support"]
        return fields


def _quantile_knots(values: Tensor) -> tuple[tuple[float, float], ...]:
    """Knots of "quantile": values at the normal scores of their ranks, over that of the upper quartile."""
    distinct, counts = values.unique(return_counts=True)
    if len(distinct) < 2:
        return ()
    n, below = len(values), counts.cumsum(0) - counts
    atom = counts >= max(_ATOM * n, _ATOM_ROWS)
    wanted = max(2, min(_MOST_KNOTS, n // _ROWS_PER_KNOT))
    middle = (below + counts / 2) / n
    # The values nearest to evenly spaced ranks, the least, the greatest, and every atom.
    chosen = torch.searchsorted(middle, torch.linspace(0, 1, wanted, dtype=torch.float64)).clamp(max=len(distinct) - 1)
    kept = torch.cat([chosen, atom.nonzero().flatten(), torch.tensor([0, len(distinct) - 1])]).unique()
    rank, value = [], []
    for place in kept.tolist():
        first, count = below[place].item(), counts[place].item()
        # A quarter of a row at each end of an atom is left to what lies between it and the next one.
        ends = [first + 0.25, first + count - 0.25] if atom[place] else [first + count / 2]
        rank += [end / n for end in ends]
        value += [distinct[place].item()] * len(ends)
    edge = 0.5 / n
    axis = torch.special.ndtri(torch.tensor(rank, dtype=torch.float64).clamp(edge, 1 - edge)) / _UPPER_QUARTILE
    return tuple(zip(axis.tolist(), value, strict=True))


def _piece(x: Tensor, knots: Tensor, *, right: bool) -> Tensor:
    """Which piece between ascending knots [k] holds each x: the one above it where x is a knot (`right`), or below."""
    return (torch.searchsorted(knots, x.contiguous(), right=right) - 1).clamp(0, len(knots) - 2)


def _on_line(x: Tensor, knots: Tensor, heights: Tensor, *, right: bool) -> Tensor:
    """The broken line through (knots, heights) at x; its first and last piece go on beyond."""
    piece = _piece(x, knots, right=right)
    run = knots[piece + 1] - knots[piece]
    slope = torch.where(run > 0, (heights[piece + 1] - heights[piece]) / run.clamp(min=1e-300), 0.0)
    # From the nearer end, so that a knot is met exactly; in the middle from the same one, whichever side is asked for.
    before, after = x - knots[piece], knots[piece + 1] - x
    second = (before > after) | ((run == 0) & right)
    start = torch.where(second, piece + 1, piece)
    return heights[start] + (x - knots[start]) * slope
