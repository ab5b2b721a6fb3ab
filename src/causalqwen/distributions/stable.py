"""Symmetric stable laws: the families that U, the noise, the scores and the values follow.

A symmetric stable law of index a is closed under linear maps of independent coordinates (theory 1.2):

    X_j ~ S(loc_j, scale_j) independent  =>  sum_j w_j X_j + b ~ S(sum_j w_j loc_j + b, (sum_j |w_j|^a scale_j^a)^(1/a))

a = 1 is the Cauchy law (the specification), a = 2 the Gaussian one, whose `scale` is its standard deviation.

Everything is a pure function of tensors. Arithmetic runs in float32, or in float64 where an argument is float64; half
precision is raised first, because 1/2 + atan(x)/pi is already 0 at x = -1e4 in bfloat16 (theory 3.6).
"""

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.nn import functional as F

SCALE_FLOOR = 1e-6
"""Scales are floored here before they are divided by or logged; probabilities never are."""


def upcast(tensor: Tensor) -> Tensor:
    """The tensor in float32; float64 stays."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def widen(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in float64 if one of them is float64, else in float32."""
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    return tuple(t.to(dtype) for t in tensors)


class StableFamily(ABC):
    """One symmetric stable law. Shapes broadcast; `loc`, `scale` > 0 and the result share one shape."""

    name: str
    alpha: float

    def add(self, *scales: Tensor) -> Tensor:
        """Scale of a sum of independent variables: (sum_i scale_i^a)^(1/a) (theory 1.2)."""
        if self.alpha == 1.0:
            return sum(scales[1:], scales[0])
        return self._root(sum((s**self.alpha for s in scales[1:]), scales[0] ** self.alpha))

    def linear_scale(self, scale: Tensor, weight: Tensor) -> Tensor:
        """Scale of W X: (|W|^a scale^a)^(1/a). scale [..., C], weight [K, C] -> [..., K] (theory 1.2)."""
        if self.alpha == 1.0:
            return F.linear(scale, weight.abs())
        return self._root(F.linear(scale**self.alpha, weight.abs() ** self.alpha))

    def _root(self, power: Tensor) -> Tensor:
        """power^(1/a); kept off 0, where its gradient is infinite (a row of the vocabulary matrix may be 0)."""
        return power.clamp(min=1e-30) ** (1 / self.alpha)

    def linear(self, loc: Tensor, scale: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The law of W X + b: (W loc + b, (|W|^a scale^a)^(1/a)); loc, scale [..., C], weight [K, C], bias [K]."""
        return F.linear(loc, weight, bias), self.linear_scale(scale, weight)

    @abstractmethod
    def log_cdf(self, x: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
        """log P(X <= x), exact in both tails."""

    def log_sf(self, x: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
        """log P(X > x), exact in both tails: by symmetry log_cdf of the mirrored variable."""
        return self.log_cdf(-x, -loc, scale)

    @abstractmethod
    def log_prob(self, x: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
        """Log density at x."""

    @abstractmethod
    def quantile(self, p: Tensor) -> Tensor:
        """Quantile function of the standard law (loc 0, scale 1) at p in (0, 1)."""

    @abstractmethod
    def kl(self, loc: Tensor, scale: Tensor, loc_base: Tensor, scale_base: Tensor) -> Tensor:
        """KL(S(loc, scale) || S(loc_base, scale_base)), one value per coordinate."""

    @abstractmethod
    def crps(self, x: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
        """Continuous ranked probability score of the observation x, in the units of x (lower is better)."""

    def cdf(self, x: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
        """P(X <= x)."""
        return self.log_cdf(x, loc, scale).exp()

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class Cauchy(StableFamily):
    """Cauchy(loc, scale): density 1 / (pi scale (1 + ((x - loc)/scale)^2)); no mean, no variance (theory 1.1)."""

    name = "cauchy"
    alpha = 1.0

    def log_cdf(self, x: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
        """log(atan2(scale, loc - x) / pi): the angle is exact in both tails and nothing is divided (theory 3.6)."""
        x, loc, scale = widen(x, loc, scale)
        return torch.log(torch.atan2(scale, loc - x) / math.pi)

    def log_prob(self, x: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
        x, loc, scale = widen(x, loc, scale)
        return -torch.log(math.pi * scale) - torch.log1p(((x - loc) / scale) ** 2)

    def quantile(self, p: Tensor) -> Tensor:
        """tan(pi (p - 1/2)), written as a cotangent of the nearer tail so that no digit of a small tail is lost."""
        (p,) = widen(p)
        tail = torch.minimum(p, 1 - p)
        return torch.where(p < 0.5, -1.0, 1.0) / torch.tan(math.pi * tail)

    def kl(self, loc: Tensor, scale: Tensor, loc_base: Tensor, scale_base: Tensor) -> Tensor:
        """log(((g1 + g2)^2 + (x1 - x2)^2) / (4 g1 g2)); symmetric (Chyzak and Nielsen 2019, theory 3.10)."""
        loc, scale, loc_base, scale_base = widen(loc, scale, loc_base, scale_base)
        gap = ((scale - scale_base) ** 2 + (loc - loc_base) ** 2) / (4 * scale * scale_base)
        return torch.log1p(gap)

    def crps(self, x: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
        """scale/pi (2 z atan z - ln(1 + z^2) + 2 ln 2), z = (x - loc)/scale (theory 3.11)."""
        x, loc, scale = widen(x, loc, scale)
        z = (x - loc) / scale
        return scale / math.pi * (2 * z * torch.atan(z) - torch.log1p(z**2) + 2 * math.log(2))


class Gaussian(StableFamily):
    """Normal(loc, scale^2): the light-tailed end of the stable laws; `scale` is the standard deviation."""

    name = "gaussian"
    alpha = 2.0

    def log_cdf(self, x: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
        """log Phi((x - loc)/scale), exact in the lower tail."""
        x, loc, scale = widen(x, loc, scale)
        return torch.special.log_ndtr((x - loc) / scale)

    def cdf(self, x: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
        """erfc((loc - x)/(scale sqrt 2))/2: exact in the lower tail, where torch's own ndtr is 0 too early."""
        x, loc, scale = widen(x, loc, scale)
        return torch.special.erfc((loc - x) / (scale * math.sqrt(2))) / 2

    def log_prob(self, x: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
        x, loc, scale = widen(x, loc, scale)
        return -torch.log(scale) - 0.5 * math.log(2 * math.pi) - 0.5 * ((x - loc) / scale) ** 2

    def quantile(self, p: Tensor) -> Tensor:
        (p,) = widen(p)
        return torch.special.ndtri(p)

    def kl(self, loc: Tensor, scale: Tensor, loc_base: Tensor, scale_base: Tensor) -> Tensor:
        """log(g2/g1) + (g1^2 + (x1 - x2)^2) / (2 g2^2) - 1/2."""
        loc, scale, loc_base, scale_base = widen(loc, scale, loc_base, scale_base)
        ratio = (scale / scale_base) ** 2
        return 0.5 * (ratio - 1 - torch.log(ratio) + ((loc - loc_base) / scale_base) ** 2)

    def crps(self, x: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
        """scale (z (2 Phi(z) - 1) + 2 phi(z) - 1/sqrt(pi)), z = (x - loc)/scale (Gneiting and Raftery 2007)."""
        x, loc, scale = widen(x, loc, scale)
        z = (x - loc) / scale
        density = torch.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
        return scale * (z * torch.erf(z / math.sqrt(2)) + 2 * density - 1 / math.sqrt(math.pi))


FAMILIES: dict[str, StableFamily] = {family.name: family for family in (Cauchy(), Gaussian())}


def get_family(name: str) -> StableFamily:
    """The family of that name; raises ValueError with the known names otherwise."""
    if name not in FAMILIES:
        raise ValueError(f"unknown family {name!r}; known families: {', '.join(FAMILIES)}")
    return FAMILIES[name]
