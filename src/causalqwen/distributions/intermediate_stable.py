"""Symmetric stable laws between Cauchy's and Gauss's, 1 < a < 2: characteristic function exp(-|t|^a), tails like |x|^-(a+1).

No closed form is known. Everything follows from three integrals of the characteristic function at x >= 0,

    f(x) = 1/pi int cos(xt) e^(-t^a) dt                          density
    S(x) = 1/2 - 1/pi int sin(xt)/t e^(-t^a) dt                  P(X > x)
    G(x) = Gamma(1 - 1/a)/pi - x/2 + 2/pi int sin(xt/2)^2/t^2 e^(-t^a) dt         E max(X - x, 0)

whose logarithms are kept on a grid with their exact slopes and read off by cubic Hermite interpolation; beyond its end their
asymptotic series in x^-a takes over (Nolan, Univariate Stable Distributions, 2020, 3.3 and 3.6). float64 inside.

At a = 2 this scale would be the standard deviation over the square root of 2; sums are the same formula for every a.
"""

import math
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from causalqwen.distributions.stable import FAMILIES, StableFamily, standardized, widen

_END, _NODES, _TERMS = 40.0, 2000, 8
"""Where the series takes over; nodes of the grid, even in asinh x; terms of the series."""


class Curve:
    """log of a positive function of x >= 0: a grid of its values and slopes, then power^-1 times a series in x^-a."""

    def __init__(self, alpha: float, values: np.ndarray, slopes: np.ndarray, series: list[float], power: float) -> None:
        self.alpha, self.power = alpha, power
        self.values, self.slopes = torch.from_numpy(values), torch.from_numpy(slopes)
        self.first, self.ratios = math.log(series[0]), [term / series[0] for term in series[1:]]

    def __call__(self, x: Tensor) -> Tensor:
        """[...], float64, from float64 x >= 0."""
        step = math.asinh(_END) / (_NODES - 1)
        far = x >= _END
        y = torch.asinh(torch.where(far, 0.0, x)) / step
        left = y.detach().floor().clamp(max=_NODES - 2)
        u, at = y - left, left.long().cpu()
        v0, v1, d0, d1 = (
            column.to(x.device)
            for column in (self.values[at], self.values[at + 1], step * self.slopes[at], step * self.slopes[at + 1])
        )
        near = v0 + u * (d0 + u * (3 * (v1 - v0) - 2 * d0 - d1 + u * (2 * (v0 - v1) + d0 + d1)))
        logs = torch.where(far, x, _END).log()
        small, tail = torch.exp(-self.alpha * logs), torch.zeros_like(logs)
        for ratio in reversed(self.ratios):
            tail = (tail + ratio) * small
        return torch.where(far, self.first - self.power * logs + torch.log1p(tail), near)


class IntermediateStable(StableFamily):
    """S(a, loc, scale) with 1 < a < 2, by the name "stable-a"."""

    def __init__(self, alpha: float) -> None:
        if not 1 < alpha < 2:
            raise ValueError(f"alpha {alpha} does not lie between 1 and 2; those are cauchy and gaussian")
        self.alpha, self.name = alpha, f"stable-{alpha:g}"

    @cached_property
    def _integrals(self) -> dict[str, np.ndarray]:
        """f, f', S and G on the grid, by Gauss and Legendre's rule on pieces no longer than the cosine at the end of the grid
        needs, ever shorter towards 0, where t^a is not smooth."""
        a, x = self.alpha, np.sinh(np.linspace(0, math.asinh(_END), _NODES))
        last = 45 ** (1 / a)
        cuts = np.concatenate([[0.0], 0.1 * 0.5 ** np.arange(40, 0, -1), np.arange(0.1, last + 0.1, 0.1)])
        places, weights = np.polynomial.legendre.leggauss(16)
        middle, half = (cuts[1:] + cuts[:-1]) / 2, (cuts[1:] - cuts[:-1]) / 2
        t = (middle[:, None] + half[:, None] * places).ravel()
        w = (half[:, None] * weights).ravel() * np.exp(-(t**a)) / math.pi
        integrals: dict[str, list[np.ndarray]] = {name: [] for name in ("f", "f'", "S", "G")}
        for part in np.array_split(x, 20):
            sine, cosine = np.sin(np.outer(part, t)), np.cos(np.outer(part, t))
            squares = np.sin(np.outer(part / 2, t)) ** 2
            integrals["f"].append(cosine @ w)
            integrals["f'"].append(-sine @ (w * t))
            integrals["S"].append(0.5 - sine @ (w / t))
            integrals["G"].append(math.gamma(1 - 1 / a) / math.pi - part / 2 + 2 * squares @ (w / t**2))
        return {"x": x} | {name: np.concatenate(parts) for name, parts in integrals.items()}

    def _curve(self, value: str, slope: np.ndarray, terms: list[float], power: float) -> Curve:
        """slope: d/dx; the grid is even in asinh x, dx = sqrt(1 + x^2) of it."""
        y = self._integrals[value]
        return Curve(self.alpha, np.log(y), slope / y * np.sqrt(1 + self._integrals["x"] ** 2), terms, power)

    def _terms(self, factor: float) -> list[float]:
        """(-1)^(n+1) sin(n pi a/2) Gamma(n a + factor)/(n! pi) for n = 1, 2, ..."""
        a = self.alpha
        return [
            -((-1) ** n)
            * math.sin(n * math.pi * a / 2)
            * math.exp(math.lgamma(n * a + factor) - math.lgamma(n + 1))
            / math.pi
            for n in range(1, _TERMS + 1)
        ]

    @cached_property
    def _log_f(self) -> Curve:
        return self._curve("f", self._integrals["f'"], self._terms(1), self.alpha + 1)

    @cached_property
    def _log_s(self) -> Curve:
        return self._curve("S", -self._integrals["f"], self._terms(0), self.alpha)

    @cached_property
    def _log_g(self) -> Curve:
        terms = [term / (n * self.alpha - 1) for n, term in enumerate(self._terms(0), start=1)]
        return self._curve("G", -self._integrals["S"], terms, self.alpha - 1)

    @cached_property
    def information(self) -> float:  # type: ignore[override]
        """int f'^2/f, along the grid: what lies beyond is below 1e-4."""
        grid = self._integrals
        return float(2 * np.trapezoid(grid["f'"] ** 2 / grid["f"], grid["x"]))

    def __repr__(self) -> str:
        return f"IntermediateStable({self.alpha:g})"

    def log_cdf(self, x: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
        x, loc, scale = widen(x, loc, scale)
        z = standardized(x.double(), loc.double(), scale.double())
        tail = self._log_s(torch.where(z < 0, -z, z))  # |z|, with a slope at 0
        return torch.where(z < 0, tail, torch.log1p(-tail.exp())).to(x.dtype)

    def log_prob(self, x: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
        x, loc, scale = widen(x, loc, scale)
        wide = scale.double()
        return (self._log_f(((x.double() - loc.double()) / wide).abs()) - wide.log()).to(x.dtype)

    def _log_between(self, low: Tensor, high: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
        """log(F(b) - F(a)), mirrored where that lies in the upper tail."""
        a, b = ((end.double() - loc.double()) / scale.double() for end in (low, high))
        mirrored = a + b > 0
        a, b = torch.where(mirrored, -b, a), torch.where(mirrored, -a, b)
        zero, unit = torch.zeros_like(a), torch.ones_like(a)
        log_a, log_b = self.log_cdf(a, zero, unit), self.log_cdf(b, zero, unit)
        narrow = b - a <= 1e-9 * (1 + a.abs())  # where differences of F are lost
        apart = torch.where(narrow, -1.0, log_a - log_b)
        by_density = (
            self.log_prob((a + b) / 2, zero, unit) + (high.double() - low.double()).log() - scale.double().log()
        )
        return torch.where(narrow, by_density, log_b + torch.log(-torch.expm1(apart))).to(low.dtype)

    def quantile(self, p: Tensor) -> Tensor:
        """The root of S(|x|) = min(p, 1 - p); its slope is 1/f(x)."""
        (p,) = widen(p)
        wide = p.double()
        x = self._root_of(wide.detach())
        slope = torch.exp(-self._log_f(x.abs())).clamp(max=1e300)
        return (x + (wide - wide.detach()) * slope).to(p.dtype)

    @torch.no_grad()
    def _root_of(self, wide: Tensor) -> Tensor:
        """From the nearest node, or the tail's first term, by Newton's steps: in log S against log x, against x near 0."""
        wanted = torch.minimum(wide, 1 - wide).clamp(min=1e-300).log()
        grid = self._log_s.values.to(wide.device)
        place = torch.searchsorted(-grid, -wanted.contiguous()).clamp(max=_NODES - 1)
        x = torch.sinh(place.double() * (math.asinh(_END) / (_NODES - 1)))
        x = torch.where(wanted < grid[-1], torch.exp((self._log_s.first - wanted) / self.alpha), x)
        for _ in range(4):
            tail = self._log_s(x)
            slope = -torch.exp(self._log_f(x) - tail)
            by_log = x > 1
            step = (tail - wanted) / (slope * torch.where(by_log, x, 1.0))
            x = torch.where(by_log, x * torch.exp(-step.clamp(-1, 1)), (x - step).clamp(min=0.0))
        return torch.where(wide < 0.5, -x, x)

    def kl(self, loc: Tensor, scale: Tensor, loc_base: Tensor, scale_base: Tensor) -> Tensor:
        raise ValueError(f"the divergence between two laws {self.name} has no closed form")

    def crps(self, x: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
        """scale (|z| + 2 G(|z|) - 2^(1/a) Gamma(1 - 1/a)/pi): E|X - x| - E|X - X'|/2, and X - X' has the scale 2^(1/a)."""
        x, loc, scale = widen(x, loc, scale)
        gap, wide = (x.double() - loc.double()).abs(), scale.double()
        between = 2 ** (1 / self.alpha) * math.gamma(1 - 1 / self.alpha) / math.pi
        return (gap + wide * (2 * self._log_g(gap / wide).exp() - between)).to(x.dtype)

    def _upper_log_cdf_and_hazard(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._log_cdf_and_hazard(x)


VALUE_FAMILIES: dict[str, StableFamily] = FAMILIES | {
    family.name: family for family in (IntermediateStable(1.25), IntermediateStable(1.5), IntermediateStable(1.75))
}
"""Laws of values by name; their tables are made when they are first asked for, in some seconds."""


def get_value_family(name: str) -> StableFamily:
    """The law of values of that name; raises ValueError with the known names otherwise."""
    if name not in VALUE_FAMILIES:
        raise ValueError(f"unknown family {name!r}; known families: {', '.join(VALUE_FAMILIES)}")
    return VALUE_FAMILIES[name]
