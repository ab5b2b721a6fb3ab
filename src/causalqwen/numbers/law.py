"""The distribution of a value in the data's units: a stable law after a monotone transform (theory 3.8)."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from causalqwen.distributions import StableFamily, get_family
from causalqwen.losses import quantile_crps
from causalqwen.numbers.transforms import ValueTransform

CRPS_LEVELS = torch.arange(1, 200, dtype=torch.float64) / 200
"""The 199 levels from which a CRPS is taken where it has no closed form (theory 3.11)."""

LOSS_LEVELS = torch.arange(1, 40, dtype=torch.float64) / 40
"""The 39 levels of `ValueLaw.axis_crps`: few enough for every step, and none so far out that a Cauchy's tails lead."""

WANTED_LEVELS = torch.linspace(0, 1, 101, dtype=torch.float64)
"""The central levels for which a recalibration stores what the raw law needs."""

# Of `ValueLaw.fit_interval_kinds`: scales that are tried as a limit between two kinds, the most limits, the least probability
# under which two kinds' central levels are still taken to be of one law, and the fewest numbers of a kind, the least n whose
# rank ceil((n + 1) 0.95) is at most n.
_SPLITS, _MOST_SPLITS, _ALIKE, _FEWEST_OF_KIND = 20, 3, 1e-4, 19
_LEAST_REACH = 0.05  # of `ValueLaw.widened`: ends of intervals nearer to loc, in scales, are those of atoms
_MODE = 15  # of `ValueLaw.mode`: steps of 1/200 in the shortest intervals, less than the likeliest of twelve values has
_ROUNDED = 2**-7  # two units of bfloat16: how far, as a share, a row's loc and scale may move in another batch or dtype

PARTS = 64
"""How many equal parts an atom counts in where levels are fitted (`ValueLaw.spread_levels`)."""

LEVELS = (0.5, 0.8, 0.9)
"""Central levels at which intervals and their coverage are reported."""

FEWEST_OF_CLASS = 99
"""The fewest values of a class that has levels of its own: so many that the outermost below 100%, 0.99, was observed."""


def level_of_quantile(p: Tensor | float) -> Tensor:
    """p as float64. ValueError unless it lies in (0, 1)."""
    p = torch.as_tensor(p, dtype=torch.float64)
    if not bool(((p > 0) & (p < 1)).all()):
        raise ValueError(f"a quantile's level must lie strictly between 0 and 1, got {p.tolist()}")
    return p


def rows_of_classes(classes: Sequence[str | None]) -> dict[str, Tensor]:
    """The indices of each class's rows, int64, classes in the order of their names."""
    rows: dict[str, list[int]] = {}
    for row, name in enumerate(classes):
        if name is not None:
            rows.setdefault(name, []).append(row)
    return {name: torch.tensor(rows[name]) for name in sorted(rows)}


def ends_of_interval(level: float) -> tuple[float, float]:
    """The levels of the quantiles that end a central interval. ValueError unless its own lies in (0, 1)."""
    if not 0 < level < 1:
        raise ValueError(f"an interval's level must lie strictly between 0 and 1, got {level}")
    tail = (1 - level) / 2
    return tail, 1 - tail


class _Calibrated:
    """Intervals, and the levels fitted for them, of whatever has quantiles and central levels."""

    quantile: Callable[..., Tensor]
    spread_levels: Callable[..., Tensor]

    def interval(self, loc: Tensor, scale: Tensor, level: float, *, raw: bool = False) -> tuple[Tensor, Tensor]:
        """Central interval that covers `level` in (0, 1); recalibrated where levels were fitted, unless `raw`."""
        low, high = ends_of_interval(level)
        return self.quantile(loc, scale, low, raw=raw), self.quantile(loc, scale, high, raw=raw)

    def fit_interval_levels(self, loc: Tensor, scale: Tensor, values: Tensor) -> tuple[float, ...]:
        """Raw central levels that cover each wanted level of these validation rows; ValueError where there are none.

        The k-th smallest of their n central levels |2 F(y) - 1| with k = ceil((n + 1) level): the split-conformal quantile,
        so that an interval covers at least `level` of new exchangeable rows on average. An atom counts in parts, one for each
        of its `spread_levels`.
        """
        if values.numel() == 0:
            raise ValueError("cannot recalibrate intervals: the validation rows hold no number")
        return _levels_that_cover(self.spread_levels(loc, scale, values))

    def fit_class_interval_levels(
        self, loc: Tensor, scale: Tensor, values: Tensor, classes: Sequence[str | None]
    ) -> dict[str, list[float] | None]:
        """`fit_interval_levels` on each class's own validation rows (Mondrian conformal prediction), by name; None for a class
        with fewer than `FEWEST_OF_CLASS` rows. classes: one per row, None for none."""
        central = self.spread_levels(loc, scale, values)
        return {
            name: list(_levels_that_cover(central[rows])) if len(rows) >= FEWEST_OF_CLASS else None
            for name, rows in rows_of_classes(classes).items()
        }


def _limit_between_kinds(central: Tensor, scale: Tensor) -> tuple[int, float] | None:
    """A limit between central levels [n] in the order of their scales [n], where they are of two kinds: how many belong to the
    first, and the scale between both.

    Limits are tried in the geometric middle of wide gaps between scales. Taken is the one on whose sides the levels differ most
    (Kolmogorov and Smirnov), if a difference like it has a probability below `_ALIKE` where there is none, for all tried.
    """
    n, least, best = len(central), _FEWEST_OF_KIND, (0.0, 0, 0.0)
    reach = 1 + (n - 2 * least) // (_SPLITS - 1)
    for near in torch.linspace(least, n - least, _SPLITS).long().unique().tolist() if n >= 2 * FEWEST_OF_CLASS else []:
        first, last = max(least, near - reach), min(n - least, near + reach)
        place = first + int((scale[first : last + 1] / scale[first - 1 : last].clamp(min=1e-300)).argmax())
        limit = math.sqrt(scale[place - 1].item()) * math.sqrt(scale[place].item())
        if not scale[place - 1] < limit <= scale[place] or _in_lump(limit, scale):
            continue
        parts = (part.sort().values for part in (central[:place], central[place:]))
        below, of_rest = (torch.searchsorted(part, central, right=True) / len(part) for part in parts)
        gap = (below - of_rest).abs().max().item()
        best = max(best, (gap * (place * (n - place) / n) ** 0.5, place, limit))
    distance, place, limit = best
    alike = _SPLITS * 2 * math.exp(-2 * distance**2)  # the law's limit for many rows, its first term
    return (place, limit) if alike < _ALIKE else None


def _in_lump(limit: float, scale: Tensor) -> bool:
    """Whether a limit lies among rows that have one scale but for rounding, which would decide their side: within `_ROUNDED` of
    it are more than 0.4 of those within four times that. Of scales without a lump a quarter are, or a third at their peak."""
    away = (scale / limit).log().abs()
    nearest, near = int((away < _ROUNDED).sum()), int((away < 4 * _ROUNDED).sum())
    return nearest >= _FEWEST_OF_KIND and nearest > 0.4 * near


def _levels_that_cover(central: Tensor) -> tuple[float, ...]:
    """Levels that cover, of the `spread_levels` [n, PARTS] of n rows; below 1, so that intervals stay finite."""
    rank = torch.ceil(PARTS * (len(central) + 1) * WANTED_LEVELS - 1e-9).long()
    central = central.flatten().sort().values.clamp(max=1 - 1e-9)
    # The raw level that the largest observation asks for, moved half its remaining way, stands in beyond it.
    beyond = 1 - (1 - central[-1]).clamp(min=1e-9) / 2
    levels = torch.cat([central.new_zeros(1), central, beyond.unsqueeze(0)])[rank.clamp(max=len(central) + 1)]
    return tuple(levels.cummax(0).values.tolist())


def _between(fitted: Sequence[float] | None, level: Tensor) -> Tensor:
    """Levels fitted for `WANTED_LEVELS` at others: linear between them."""
    known = torch.tensor(fitted, dtype=torch.float64, device=level.device)
    position = level * (len(known) - 1)
    left = position.floor().clamp(max=len(known) - 2).long()
    return known[left] + (known[left + 1] - known[left]) * (position - left)


@dataclass(frozen=True)
class ValueLaw(_Calibrated):
    """t(Y) ~ S(loc, scale) for many rows at once: loc, scale, values and results are float64 tensors [...].

    Args:
        transform: t.
        family: the stable law on its axis.
        value_range: smallest and largest training value, where known.
        interval_levels: raw central level for each of `WANTED_LEVELS`, fitted on validation rows, or None.
        interval_kinds: (least scale, levels) of numbers that the law is surer or less sure of, ascending, which have levels of
            their own; below the first least scale, `interval_levels` hold.
    """

    transform: ValueTransform = field(default_factory=ValueTransform)
    family: str = "cauchy"
    value_range: tuple[float, float] | None = None
    interval_levels: tuple[float, ...] | None = field(default=None, repr=False)
    interval_kinds: tuple[tuple[float, tuple[float, ...]], ...] = field(default=(), repr=False)

    @property
    def stable(self) -> StableFamily:
        return get_family(self.family)

    def _raw_quantile(self, loc: Tensor, scale: Tensor, p: Tensor) -> Tensor:
        return self.transform.inverse(loc.double() + scale.double() * self.stable.quantile(p.double()))

    def quantile(self, loc: Tensor, scale: Tensor, p: Tensor | float, *, raw: bool = False) -> Tensor:
        """Quantile at p in (0, 1), in the data's units; recalibrated where levels were fitted, unless `raw`. The median is
        never moved: it is t^-1(loc). ValueError for p outside (0, 1)."""
        p = level_of_quantile(p)
        return self._raw_quantile(loc, scale, p if raw else self.raw_p(p, scale))

    def raw_p(self, p: Tensor, scale: Tensor) -> Tensor:
        """The level of the raw law's quantile that is the recalibrated one at p; p itself where no levels were fitted."""
        if self.interval_levels is None:
            return p
        central = 2 * p - 1
        return 0.5 + 0.5 * torch.sign(central) * self._raw_level(central.abs(), scale)

    def _raw_level(self, level: Tensor, scale: Tensor) -> Tensor:
        """The central level of the raw law that covers `level` of the validation rows of a scale's kind."""
        raw = _between(self.interval_levels, level)
        for least, levels in self.interval_kinds:
            raw = torch.where(scale >= least, _between(levels, level), raw)
        return raw

    def widened(self, scale: Tensor, by: Tensor) -> Tensor:
        """scale + by, and more where numbers of that scale are of a kind with lower levels: no interval of 50% or more is
        narrower than under `scale`."""
        wide = scale + by
        if not self.interval_kinds:
            return wide
        levels = torch.tensor([self.interval_levels, *(levels for _, levels in self.interval_kinds)])[:, 50:].double()
        reach = self.stable.quantile(0.5 + levels / 2).clamp(min=_LEAST_REACH)
        most = (reach.unsqueeze(1) / reach).amax(-1).amax(-1)  # over the kinds, of the levels of each
        limits = torch.tensor([least for least, _ in self.interval_kinds], dtype=torch.float64)
        was, now = (torch.bucketize(one.double(), limits, right=True) for one in (scale, wide))
        return torch.where(now > was, wide * most[was].to(wide), wide)

    def levels_at(self, scale: Tensor) -> Tensor:
        """The raw central levels that are used for `WANTED_LEVELS` at each scale [n], float64 [n, 101]."""
        if self.interval_levels is None:
            return WANTED_LEVELS.expand(len(scale), -1)
        return self._raw_level(WANTED_LEVELS, scale.unsqueeze(-1)).expand(len(scale), -1)

    def fit_interval_kinds(self, loc: Tensor, scale: Tensor, values: Tensor) -> list[tuple[float, list[float]]]:
        """(least scale, raw central levels) of each kind of these validation rows [n], by ascending scale; the first one's
        least scale is 0.

        Numbers of one template may be of two kinds: one that is certain from the words before it, and one that is not. Levels
        that are fitted to both cover neither. The rows are parted where the central levels (`central_level`) of those with a
        smaller scale and of those with a larger one differ, and each part again; each kind has the levels that cover its rows.
        """
        order = scale.argsort()
        ascending, least = scale[order], self.central_level(loc, scale, values)[order]
        limits: list[tuple[int, float]] = []
        open_parts = [(0, len(order))]
        while open_parts and len(limits) < _MOST_SPLITS:
            first, last = open_parts.pop(0)
            found = _limit_between_kinds(least[first:last], ascending[first:last])
            if found is not None:
                middle = first + found[0]
                limits.append((middle, found[1]))
                open_parts += [(first, middle), (middle, last)]
        kinds = []
        for (start, limit), (end, _) in itertools.pairwise([(0, 0.0), *sorted(limits), (len(order), math.inf)]):
            rows = order[start:end]
            kinds.append((limit, list(_levels_that_cover(self._levels_of_kind(loc[rows], scale[rows], values[rows])))))
        return kinds

    def _levels_of_kind(self, loc: Tensor, scale: Tensor, values: Tensor) -> Tensor:
        """`spread_levels` of a kind. Where all have one value, a constant of a template, they say no more than how far off one
        reading is: twice as far is to be covered, and as far as rounding moves loc."""
        levels = self.spread_levels(loc, scale, values)
        if len(values) < _FEWEST_OF_KIND or bool((values != values[0]).any()):
            return levels
        low, high = self.transform.cell(values)
        far = 2 * (low - loc).abs() + _ROUNDED * loc.abs()
        moved = 2 * self.stable.cdf(far.double(), torch.zeros_like(far), scale.double()) - 1
        return torch.where((low == high).unsqueeze(-1), moved.unsqueeze(-1), levels)

    def cdf(self, loc: Tensor, scale: Tensor, value: Tensor) -> Tensor:
        """P(Y <= value) under the raw law: the probability integral transform of an observation."""
        return self.stable.cdf(self.transform.reached(value), loc.double(), scale.double())

    def spread_levels(self, loc: Tensor, scale: Tensor, value: Tensor) -> Tensor:
        """Central levels |2 u - 1| [n, PARTS] of values [n] under the raw law, u at the middles of equal parts of
        [P(Y < value), P(Y <= value)] (Czado, Gneiting and Held 2009): under a law that is right uniform, whatever its atoms."""
        low, high = (self.stable.cdf(end, loc.double(), scale.double()) for end in self.transform.cell(value))
        middles = (torch.arange(PARTS, dtype=torch.float64, device=low.device) + 0.5) / PARTS
        return (2 * (low.unsqueeze(-1) + (high - low).unsqueeze(-1) * middles) - 1).abs()

    def central_level(self, loc: Tensor, scale: Tensor, value: Tensor) -> Tensor:
        """The smallest central level whose raw interval holds `value`: |2 P(Y <= value) - 1|, and less for an atom."""
        low, high = (2 * self.stable.cdf(end, loc.double(), scale.double()) - 1 for end in self.transform.cell(value))
        return torch.where(
            low * high > 0, torch.minimum(low.abs(), high.abs()), torch.where(low == high, low.abs(), 0.0)
        )

    def axis_log_prob(self, loc: Tensor, scale: Tensor, value: Tensor) -> Tensor:
        """Log density of the raw law at t(value), per unit of the axis; of an atom, the log of its probability."""
        low, high = self.transform.cell(value)
        if not self.transform.has_atoms:
            return self.stable.log_prob(low, loc, scale)
        atom = high > low
        density = self.stable.log_prob(torch.where(atom, 0.0, low), loc, scale)
        low, high = torch.where(atom, low, -1.0), torch.where(atom, high, 1.0)
        return torch.where(atom, self.stable.log_interval(low, high, loc, scale), density)

    def axis_crps(self, loc: Tensor, scale: Tensor, value: Tensor) -> Tensor:
        """CRPS of the raw law at t(value) from 39 quantiles on the axis, where an atom is one point, in the dtype of loc."""
        quantiles = loc.unsqueeze(-1) + scale.unsqueeze(-1) * self.stable.quantile(LOSS_LEVELS).to(loc)
        target = self.transform.collapse(self.transform.forward(value))
        return quantile_crps(target.to(loc), self.transform.collapse(quantiles), LOSS_LEVELS.to(loc))

    def axis_losses(self, loc: Tensor, scale: Tensor, value: Tensor, kind: str) -> Tensor:
        """What the value head is trained on, elementwise: "nll", -`axis_log_prob`, or "crps", `axis_crps`."""
        return self.axis_crps(loc, scale, value) if kind == "crps" else -self.axis_log_prob(loc, scale, value)

    def log_prob(self, loc: Tensor, scale: Tensor, value: Tensor) -> Tensor:
        """Log density of the raw law at `value`, per unit of the data; of an atom, log P(Y = value)."""
        return self.axis_log_prob(loc.double(), scale.double(), value) + self.transform.log_jacobian(value)

    def mode(self, loc: Tensor, scale: Tensor) -> Tensor:
        """The likeliest of the 199 quantiles [n, 1] that lie in the shortest interval from one of them to the fifteenth
        beyond it, or in one of those that are equally short (Venter 1967); loc and scale [n, 1].

        An end of the support that no training value reached counts only where nothing else is left: all beyond it lies there,
        and its probability cannot be compared with a density.
        """
        quantiles = self.quantile(loc, scale, CRPS_LEVELS)
        support, (least, greatest) = self.transform.support, self.value_range or (-math.inf, math.inf)
        ends = [end for end in (support.low, support.high) if end is not None and not least <= end <= greatest]
        unseen = torch.isin(quantiles, quantiles.new_tensor(ends))
        lengths = quantiles[:, _MODE:] - quantiles[:, :-_MODE]
        lengths = lengths.masked_fill(unseen[:, _MODE:] | unseen[:, :-_MODE], torch.inf)
        shortest = (lengths <= lengths.amin(-1, keepdim=True)).double()
        within = torch.nn.functional.pad(shortest, (_MODE, _MODE)).unfold(-1, _MODE + 1, 1).any(-1)
        log_prob = self.log_prob(loc.expand_as(quantiles), scale.expand_as(quantiles), quantiles)
        return quantiles.gather(-1, log_prob.masked_fill(~within, -torch.inf).argmax(-1, keepdim=True))

    def crps(self, loc: Tensor, scale: Tensor, value: Tensor) -> Tensor:
        """CRPS of the raw law at `value`, in the data's units: in closed form where t is affine, else `quantile_crps`, because
        through a symlog a Cauchy's is infinite (theory 3.11)."""
        if self.transform.is_affine:
            axis = self.transform.forward(value)
            return self.stable.crps(axis, loc.double(), scale.double()) * self.transform.width
        return self.quantile_crps(loc, scale, value)

    def quantile_crps(self, loc: Tensor, scale: Tensor, value: Tensor) -> Tensor:
        """CRPS from 199 raw quantiles, clipped (`clip`): the rule that also scores every rival."""
        quantiles = self._raw_quantile(loc.unsqueeze(-1), scale.unsqueeze(-1), CRPS_LEVELS)
        return quantile_crps(value.double(), self.clip(quantiles), CRPS_LEVELS)

    # What `CopyLaw` says of the numbers in the context, of a law that does not look at them.

    def mean_beside(self, of_new: Tensor) -> Tensor:
        return of_new

    def or_said(self, of_new: Tensor) -> Tensor:
        return of_new

    def of_row(self, row: int, of_new: "ValueLaw") -> "ValueLaw":
        return of_new

    def beside_levels(self) -> "ValueLaw":
        return self

    def clip(self, quantiles: Tensor) -> Tensor:
        """Quantiles clipped to the training range widened by its own width on both sides, where it is known."""
        if self.value_range is None:
            return quantiles
        low, high = self.value_range
        return quantiles.clamp(low - (high - low), high + (high - low))


def _of_each(method: str) -> Callable[..., Tensor]:
    """That method of `ValueLaw`, each row's by its own class's law."""

    def by_row(self: "ClassLaws", *columns: Tensor) -> Tensor:
        return self._by_row(lambda law, of: getattr(law, method)(*(column[of] for column in columns)))

    return by_row


@dataclass(frozen=True)
class ClassLaws(_Calibrated):
    """The laws of n values of several classes at once. It stands in for a `ValueLaw` wherever rows come first: loc, scale and
    values are [n, ...], and each row has its own class's law.

    Args:
        laws: one for each class. of_row: int64 [n], which of them is each row's.
    """

    laws: tuple[ValueLaw, ...]
    of_row: Tensor

    def _by_row(self, of_law: Callable[[ValueLaw, Tensor], Tensor], dim: int = 0) -> Tensor:
        """What each law gives for the indices of its own rows, in the order of all rows again."""
        rows = [(self.of_row == place).nonzero().flatten() for place in range(len(self.laws))]
        parts = [of_law(law, of) for law, of in zip(self.laws, rows, strict=True)]
        return torch.cat(parts, dim).index_select(dim, torch.cat(rows).argsort())

    levels_at, clip, cdf = _of_each("levels_at"), _of_each("clip"), _of_each("cdf")
    central_level, spread_levels = _of_each("central_level"), _of_each("spread_levels")
    log_prob, crps, quantile_crps = _of_each("log_prob"), _of_each("crps"), _of_each("quantile_crps")

    def fit_interval_kinds(self, loc: Tensor, scale: Tensor, values: Tensor) -> list[tuple[float, list[float]]]:
        """One kind: scales of different axes do not compare."""
        return [(0.0, list(self.fit_interval_levels(loc, scale, values)))]

    def quantile(self, loc: Tensor, scale: Tensor, p: Tensor | float, *, raw: bool = False) -> Tensor:
        """`ValueLaw.quantile`. p has as many axes as loc, and rows first too, or fewer, and is then the same for all rows."""
        p = level_of_quantile(p)
        of_rows = p.dim() == loc.dim()
        return self._by_row(lambda law, of: law.quantile(loc[of], scale[of], p[of] if of_rows else p, raw=raw))

    def axis_losses(self, loc: Tensor, scale: Tensor, value: Tensor, kind: str) -> Tensor:
        """`ValueLaw.axis_losses` of values [n] under several laws of each at once, loc and scale [..., n]."""
        return self._by_row(lambda law, of: law.axis_losses(loc[..., of], scale[..., of], value[of], kind), dim=-1)
