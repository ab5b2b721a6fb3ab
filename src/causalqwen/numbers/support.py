"""Where values can lie: between ends, and on a grid (theory 3.8)."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from causalqwen.numbers.rendering import round_significant

_FEW, _TIMES = 12, 5  # up to so many distinct values, each met so many times on average, are all that there are
_FEWEST = 30
_MOST = 10_000  # so many values are listed
_NEAR = 1e-9  # of a step: what rounding may lose
_AT_END, _ROWS_AT_END = 0.05, 8  # an end that so large a share of the rows reaches, and so many of them, is one


@dataclass(frozen=True)
class Support:
    """Values from low to high, both included, at multiples of step from low (from 0 where there is no low); None: no limit.

    A value outside it is taken as its nearest value.
    """

    low: float | None = None
    high: float | None = None
    step: float | None = None

    def __post_init__(self) -> None:
        for name in ("low", "high", "step"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and math.isfinite(value)):
                raise ValueError(f"support: {name} is a finite number or null, got {value!r}")
        if self.step is not None and not self.step > 0:
            raise ValueError(f"support: step must be positive, got {self.step}")
        if self.low is not None and self.high is not None and not self.low <= self.high:
            raise ValueError(f"support: low must not be above high, got {self.low} and {self.high}")
        if self.step is not None and self.high is not None:
            steps = (self.high - (self.low or 0.0)) / self.step
            if abs(steps - round(steps)) > _NEAR * max(abs(steps), 1):
                raise ValueError(
                    f"support: high {self.high} is no multiple of step {self.step} from low {self.low or 0}"
                )

    @classmethod
    def seen_in(cls, values: Tensor) -> "Support":
        """What training values [n] show of it; fewer than 30 show nothing.

        Few distinct values, each met often, are all there are, on the grid that holds them; so is a single one. Whole numbers
        stay whole. An end that many rows reach is one. Values that are never negative stay so, none of them below half the
        least; those between 0 and 1 stay there.
        """
        values = values.double().flatten()
        if values.numel() < _FEWEST:
            return cls()
        low, high = values.min().item(), values.max().item()
        distinct, counts = values.unique(return_counts=True)
        if len(distinct) < 2:
            return cls(low, low, 1.0)
        whole = bool((values == values.round()).all()) and values.abs().max().item() < 2**53
        gap = distinct.diff().min().item()
        places = (distinct - low) / gap
        few = len(distinct) <= _FEW and values.numel() >= _TIMES * len(distinct)
        if few and (whole or bool(((places - places.round()).abs() < 1e-9).all())):
            return cls(low, high, 1.0 if whole else gap)
        often = max(_AT_END * values.numel(), _ROWS_AT_END)
        bottom = low if counts[0] >= often else None if low < 0 else low / 2
        top = high if counts[-1] >= often else 1.0 if low >= 0 and high <= 1 else None
        if whole and bottom is not None:
            bottom = float(math.floor(bottom))
        if whole and bottom == 0.0 and low > 0:
            bottom = 1.0
        return cls(bottom, top, 1.0 if whole else None)

    def held(self, values: Tensor) -> Tensor:
        """Values between the ends."""
        return values if self.low is None and self.high is None else values.clamp(self.low, self.high)

    def _on_grid(self, values: Tensor, rounded: Callable[[Tensor], Tensor]) -> Tensor:
        """Multiples of the step as they are written (0.3, not 0.1 + 0.1 + 0.1), and the ends as they are."""
        if self.step is None:
            return values
        first = self.low or 0.0
        on_grid = first + rounded((values - first) / self.step) * self.step
        if not (float(self.step).is_integer() and float(first).is_integer()):
            on_grid = round_significant(on_grid, 12)
        for exact in (0.0, self.low, self.high):
            if exact is not None:
                on_grid = torch.where((on_grid - exact).abs() <= 1e-6 * self.step, exact, on_grid)
        return on_grid

    def nearest(self, values: Tensor) -> Tensor:
        """The value of the support that is nearest to each, float64."""
        return self.held(self._on_grid(self.held(values), torch.round))

    def take_in(self, values: Tensor) -> Tensor:
        """Values of the support as they are, others as the nearest one that it holds, float64."""
        nearest = self.nearest(values)
        inside = (nearest - values).abs() <= 1e-9 * values.abs().clamp(min=1e-300)
        return torch.where(inside & (self.held(values) == values), values, nearest)

    def floor(self, values: Tensor) -> Tensor:
        """The greatest value of the grid up to each, but for rounding errors, and as a value of it is written."""
        near = 1e-9 + 1e-11 * values.abs() / (self.step or 1.0)
        return self._on_grid(values, lambda places: torch.floor(places + near))

    def cell(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What becomes each value, float64 -> from where, up to where, and whether it is the least or the greatest there is: to
        that belongs all beyond."""
        held, half = self.nearest(values), (self.step or 0.0) / 2
        none = torch.zeros_like(held, dtype=torch.bool)
        least, greatest = (none if end is None else held == end for end in (self.low, self.high))
        return held - half, held + half, least, greatest

    def values(self) -> list[float] | None:
        """All of them; None where they are not finitely many, or more than 10,000."""
        if self.low is None or self.high is None or self.step is None:
            return None
        steps = (self.high - self.low) / self.step
        if steps >= _MOST:
            return None
        places = torch.arange(round(steps) + 1, dtype=torch.float64)
        each: list[float] = self.nearest(self.low + places * self.step).tolist()
        return each
