"""Symmetric stable laws: the families that U, the noise, the scores and the values follow.

A symmetric stable law of index a is closed under linear maps of independent coordinates (theory 1.2):

    X_j ~ S(loc_j, scale_j) independent  =>  sum_j w_j X_j + b ~ S(sum_j w_j loc_j + b, (sum_j |w_j|^a scale_j^a)^(1/a))

a = 1 is the Cauchy law (the specification), a = 2 the Gaussian one, whose `scale` is its standard deviation.

Arithmetic runs in float32, or in float64 where an argument is float64; half precision is raised first, because
1/2 + atan(x)/pi is already 0 at x = -1e4 in bfloat16 (theory 3.6).
"""

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

SCALE_FLOOR = 1e-6
"""Scales are floored here before they are divided by or logged; probabilities never are."""
FAR = 1e30
"""A score counts as below its threshold by this much at most, so that one of -inf has a scale."""


def upcast(tensor: Tensor) -> Tensor:
    """The tensor in float32; float64 stays."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def widen(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in float64 if one of them is float64, else in float32."""
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    return tuple(t.to(dtype) for t in tensors)


def log1p_square(gap: Tensor, scale: Tensor) -> Tensor:
    """ln(1 + (gap/scale)^2), elementwise, scale > 0; finite for every finite gap."""
    far = gap.abs() > 1e8 * scale
    z = torch.where(far, 0.0, gap) / scale
    log_ratio = torch.where(far, gap.abs(), 1.0).log() - torch.where(far, scale, 1.0).log()
    return torch.where(far, 2 * log_ratio, torch.log1p(z * z))


def standardized(x: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
    """(x - loc)/scale, held where its square is still a number, without a gradient beyond: there every law is 0 or 1 to the
    last bit, and infinity times 0 would be no gradient."""
    gap, most = x - loc, torch.finfo(x.dtype).max ** 0.5 / 2
    over = gap.abs() > most * scale
    return torch.where(over, most * torch.sign(gap), torch.where(over, 0.0, gap) / torch.where(over, 1.0, scale))


class StableFamily(ABC):
    """One symmetric stable law. Shapes broadcast; `loc`, `scale` > 0 and the result share one shape."""

    name: str
    alpha: float
    information: float
    """Fisher's, of a location at scale 1."""

    def add(self, *scales: Tensor) -> Tensor:
        """Scale of a sum of independent variables: (sum_i scale_i^a)^(1/a) (theory 1.2)."""
        if self.alpha == 1.0:
            return sum(scales[1:], scales[0])
        return self.root(sum((s**self.alpha for s in scales[1:]), scales[0] ** self.alpha))

    def linear_scale(self, scale: Tensor, weight: Tensor) -> Tensor:
        """Scale of W X: (|W|^a scale^a)^(1/a). scale [..., C], weight [K, C] -> [..., K] (theory 1.2)."""
        if self.alpha == 1.0:
            return F.linear(scale, weight.abs())
        return self.root(F.linear(scale**self.alpha, weight.abs() ** self.alpha))

    def root(self, power: Tensor) -> Tensor:
        """power^(1/a); kept off 0, where its gradient is infinite (a row of the vocabulary matrix may be 0)."""
        return power.clamp(min=1e-30) ** (1 / self.alpha)

    def linear(self, loc: Tensor, scale: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The law of W X + b: (W loc + b, (|W|^a scale^a)^(1/a)); loc, scale [..., C], weight [K, C], bias [K]."""
        return F.linear(loc, weight, bias), self.linear_scale(scale, weight)

    @abstractmethod
    def log_cdf(self, x: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
        """log P(X <= x), exact in both tails."""

    def log_sf(self, x: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
        """log P(X > x), exact in both tails: by symmetry."""
        return self.log_cdf(-x, -loc, scale)

    @abstractmethod
    def log_prob(self, x: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
        """Log density at x."""

    def log_interval(self, low: Tensor, high: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
        """log P(low < X <= high), low < high, exact far out in both tails; either end may be infinite."""
        low, high, loc, scale = torch.broadcast_tensors(*widen(low, high, loc, scale))
        below, above = torch.isneginf(low), torch.isposinf(high)
        # Stand-ins for infinite ends, so that no gradient is one.
        between = self._log_between(
            torch.where(below, torch.where(above, -1.0, high - 1), low),
            torch.where(above, torch.where(below, 1.0, low + 1), high),
            loc,
            scale,
        )
        lower = self.log_cdf(torch.where(above, 0.0, high), loc, scale)
        upper = self.log_sf(torch.where(below, 0.0, low), loc, scale)
        one_sided = torch.where(below, torch.where(above, 0.0, lower), upper)
        return torch.where(below | above, one_sided, between)

    @abstractmethod
    def _log_between(self, low: Tensor, high: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
        """`log_interval` of finite ends."""

    @abstractmethod
    def quantile(self, p: Tensor) -> Tensor:
        """Quantile function of the standard law (loc 0, scale 1) at p in (0, 1)."""

    def quantile_of_normal(self, g: Tensor) -> Tensor:
        """Q(Phi(g)), g = Phi^-1(e); beyond 7.9 float64 cannot tell e from the ends of the unit interval."""
        return g if self.alpha == 2 else self.quantile(torch.special.ndtr(g).clamp(1e-15, 1 - 1e-15))

    @abstractmethod
    def kl(self, loc: Tensor, scale: Tensor, loc_base: Tensor, scale_base: Tensor) -> Tensor:
        """KL(S(loc, scale) || S(loc_base, scale_base)), one value per coordinate."""

    @abstractmethod
    def crps(self, x: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
        """Continuous ranked probability score of the observation x, in the units of x (lower is better)."""

    def cdf(self, x: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
        """P(X <= x)."""
        return self.log_cdf(x, loc, scale).exp()

    def log_cdf_and_hazard(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """log F(x) and its derivative f(x)/F(x) under the standard law, each [N, V]; for losses written out by hand. x >= 0,
        where a vocabulary's tokens are, takes a fast form of float32 that is as exact."""
        if x.dtype != torch.float32 or x.device.type != "cpu":
            return self._log_cdf_and_hazard(x)
        log_cdf, hazard = self._upper_log_cdf_and_hazard(x)
        rows = (x.amin(-1) < 0).nonzero().squeeze(-1)
        if len(rows):
            row, column = (x[rows] < 0).nonzero(as_tuple=True)
            if 2 * len(row) > x.numel():
                return self._log_cdf_and_hazard(x)
            below = rows[row], column
            log_cdf[below], hazard[below] = self._log_cdf_and_hazard(x[below])
        return log_cdf, hazard

    def _log_cdf_and_hazard(self, x: Tensor) -> tuple[Tensor, Tensor]:
        zero, unit = x.new_zeros(()), x.new_ones(())
        log_cdf = self.log_cdf(x, zero, unit)
        return log_cdf, torch.exp(self.log_prob(x, zero, unit) - log_cdf)

    @abstractmethod
    def _upper_log_cdf_and_hazard(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The fast form; right where x >= 0."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class _Hazard(torch.autograd.Function):
    """h(x) = phi(x)/Phi(x) = sqrt(2/pi) / erfcx(-x/sqrt 2), and h'(x) = -h (x + h), which is -1 + 1/x^2 - 6/x^4 far below 0."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return math.sqrt(2 / math.pi) / torch.special.erfcx(x * -math.sqrt(0.5))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        hazard, far = _Hazard.apply(x), x < (-50.0 if x.dtype == torch.float32 else -1e3)
        square = torch.where(far, x, 1.0).square()
        return grad * torch.where(far, -1 + 1 / square - 6 / square.square(), -hazard * (x + hazard))


class _LogNdtr(torch.autograd.Function):
    """log Phi(x); torch's own derivative loses its digits below -1000."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.special.log_ndtr(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * _Hazard.apply(*ctx.saved_tensors)


def log_ndtr(x: Tensor) -> Tensor:
    """log Phi(x), exact in the lower tail, its derivative too."""
    log_p: Tensor = _LogNdtr.apply(x)
    return log_p


class Cauchy(StableFamily):
    """Cauchy(loc, scale): density 1 / (pi scale (1 + ((x - loc)/scale)^2)); no mean, no variance (theory 1.1)."""

    name = "cauchy"
    alpha = 1.0
    information = 0.5

    def log_cdf(self, x: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
        """log(atan2(scale, loc - x) / pi): the angle is exact in both tails (theory 3.6); where it is too small for a number,
        log(scale/(loc - x)/pi)."""
        x, loc, scale = torch.broadcast_tensors(*widen(x, loc, scale))
        gap = loc - x
        angle = torch.atan2(scale, gap)
        far = angle < 1e10 * torch.finfo(x.dtype).tiny
        beyond = torch.where(far, scale, 1.0).log() - torch.where(far, gap, 1.0).log() - math.log(math.pi)
        return torch.where(far, beyond, torch.log(torch.where(far, 1.0, angle) / math.pi))

    def _upper_log_cdf_and_hazard(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """log1p(-p), p = atan2(1, x)/pi; 1/(pi (1 + x^2) (1 - p))."""
        p = torch.atan2(torch.ones_like(x), x).mul_(-1 / math.pi)
        hazard = torch.addcmul(x.new_ones(()), x, x).mul_(torch.add(p, 1.0)).mul_(math.pi).reciprocal_()
        return p.log1p_(), hazard

    def log_prob(self, x: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
        x, loc, scale = torch.broadcast_tensors(*widen(x, loc, scale))
        return -torch.log(math.pi * scale) - log1p_square(x - loc, scale)

    def _log_between(self, low: Tensor, high: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
        """The angle between the two ends, seen from the pole: nothing is subtracted that nearly agrees. In float64."""
        dtype, (low, high, loc, scale) = low.dtype, (t.double() for t in (low, high, loc, scale))
        a, b, apart = (low - loc) / scale, (high - loc) / scale, (high - low) / scale
        far = a * b > 1e16  # there both sides of the angle are divided by a b, which a float may not hold
        near_a, near_b = torch.where(far, 1.0, a), torch.where(far, 1.0, b)
        far_a, far_b = torch.where(far, a, 1.0), torch.where(far, b, 1.0)
        opposite = torch.where(far, apart / far_a / far_b, apart)
        adjacent = torch.where(far, 1 + 1 / far_a / far_b, 1 + near_a * near_b)
        return torch.log(torch.atan2(opposite, adjacent) / math.pi).to(dtype)

    def quantile(self, p: Tensor) -> Tensor:
        """tan(pi (p - 1/2)); outside the quartiles a cotangent of the nearer tail, which loses no digit of it."""
        (p,) = widen(p)
        centre = p - 0.5
        of_tail = torch.where(centre < 0, -1.0, 1.0) / torch.tan(math.pi * torch.where(centre < 0, p, 1 - p))
        return torch.where(centre.abs() < 0.25, torch.tan(math.pi * centre), of_tail)

    def kl(self, loc: Tensor, scale: Tensor, loc_base: Tensor, scale_base: Tensor) -> Tensor:
        """log(((g1 + g2)^2 + (x1 - x2)^2) / (4 g1 g2)); symmetric (Chyzak and Nielsen 2019, theory 3.10)."""
        loc, scale, loc_base, scale_base = widen(loc, scale, loc_base, scale_base)
        dtype, (loc, scale, loc_base, scale_base) = loc.dtype, (t.double() for t in (loc, scale, loc_base, scale_base))
        gap = ((scale - scale_base) ** 2 + (loc - loc_base) ** 2) / (4 * scale * scale_base)
        return torch.log1p(gap).to(dtype)

    def crps(self, x: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
        """scale/pi (2 z atan z - ln(1 + z^2) + 2 ln 2), z = (x - loc)/scale (theory 3.11)."""
        x, loc, scale = torch.broadcast_tensors(*widen(x, loc, scale))
        gap = x - loc
        far = gap.abs() > 1e8 * scale  # atan z is pi/2 - 1/z there, to the last bit
        z = torch.where(far, 0.0, gap) / scale
        of_angle = torch.where(far, math.pi * gap.abs() - 2 * scale, 2 * gap * torch.atan(z))
        return (of_angle + scale * (2 * math.log(2) - log1p_square(gap, scale))) / math.pi


class Gaussian(StableFamily):
    """Normal(loc, scale^2): the light-tailed end of the stable laws; `scale` is the standard deviation."""

    name = "gaussian"
    alpha = 2.0
    information = 1.0

    def log_cdf(self, x: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
        """log Phi((x - loc)/scale), exact in the lower tail."""
        return log_ndtr(standardized(*widen(x, loc, scale)))

    def _upper_log_cdf_and_hazard(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """log1p(-p), which is -p of a small p, where torch's log1p is slow, and phi/(1 - p); p = erfc(x/sqrt 2)/2."""
        p = torch.special.erfc(torch.mul(x, math.sqrt(0.5))).mul_(0.5)
        large = p.clamp(min=1e-9)
        log_cdf = torch.neg(large).log1p_().add_(large).sub_(p)
        density = torch.mul(x, x).mul_(-0.5).exp_().mul_(1 / math.sqrt(2 * math.pi))
        return log_cdf, density.div_(p.neg_().add_(1.0))

    def _log_cdf_and_hazard(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return log_ndtr(x), _Hazard.apply(x)

    def cdf(self, x: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
        """erfc((loc - x)/(scale sqrt 2))/2: exact in the lower tail, where torch's own ndtr is 0 too early."""
        x, loc, scale = widen(x, loc, scale)
        far = (x - loc).abs() > 40 * scale  # 0 and 1 there
        gap, width = torch.where(far, 0.0, loc - x), torch.where(far, 1.0, scale)
        return torch.where(far, (x > loc).to(gap), torch.special.erfc(gap / (width * math.sqrt(2))) / 2)

    def log_prob(self, x: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
        x, loc, scale = widen(x, loc, scale)
        return -torch.log(scale) - 0.5 * math.log(2 * math.pi) - 0.5 * standardized(x, loc, scale) ** 2

    def _log_between(self, low: Tensor, high: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
        """log(Phi(b) - Phi(a)), mirrored where that lies in the upper tail; in float64. Below 0, log Phi is a parabola, whose
        difference is a product of b - a, and the logarithm of Mills' ratio; where b - a is tiny, it times the density."""
        dtype, (low, high, loc, scale) = low.dtype, (t.double() for t in (low, high, loc, scale))
        a, b, apart = standardized(low, loc, scale), standardized(high, loc, scale), (high - low) / scale
        mirrored = a + b > 0
        a, b = torch.where(mirrored, -b, a), torch.where(mirrored, -a, b)
        log_a, log_b, below = log_ndtr(a), log_ndtr(b), b < 0
        by_mills = torch.special.erfcx(torch.where(below, a, -1.0) * -math.sqrt(0.5)).log()
        by_mills = by_mills - torch.special.erfcx(torch.where(below, b, -1.0) * -math.sqrt(0.5)).log()
        difference = torch.where(below, apart * (a + b) / 2 + by_mills, log_a - log_b)
        narrow = apart * (1 + a.abs()) < 1e-5
        by_density = -((a + b) ** 2) / 8 - 0.5 * math.log(2 * math.pi) + torch.where(narrow, apart, 1.0).log()
        wide = log_b + torch.log(-torch.expm1(torch.where(narrow, -1.0, difference)))
        return torch.where(narrow, by_density, wide).to(dtype)

    def quantile(self, p: Tensor) -> Tensor:
        (p,) = widen(p)
        return torch.special.ndtri(p)

    def kl(self, loc: Tensor, scale: Tensor, loc_base: Tensor, scale_base: Tensor) -> Tensor:
        """log(g2/g1) + (g1^2 + (x1 - x2)^2) / (2 g2^2) - 1/2."""
        loc, scale, loc_base, scale_base = widen(loc, scale, loc_base, scale_base)
        dtype, (loc, scale, loc_base, scale_base) = loc.dtype, (t.double() for t in (loc, scale, loc_base, scale_base))
        ratio = (scale / scale_base) ** 2
        return (0.5 * (ratio - 1 - torch.log(ratio) + ((loc - loc_base) / scale_base) ** 2)).to(dtype)

    def crps(self, x: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
        """scale (z (2 Phi(z) - 1) + 2 phi(z) - 1/sqrt(pi)), z = (x - loc)/scale (Gneiting and Raftery 2007)."""
        x, loc, scale = torch.broadcast_tensors(*widen(x, loc, scale))
        gap = x - loc
        far = gap.abs() > 50 * scale  # phi(z) is 0 there
        z = torch.where(far, 0.0, gap) / scale
        density = torch.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
        near = gap * torch.erf(z / math.sqrt(2)) + 2 * scale * density
        return torch.where(far, gap.abs(), near) - scale / math.sqrt(math.pi)


FAMILIES: dict[str, StableFamily] = {family.name: family for family in (Cauchy(), Gaussian())}


def get_family(name: str) -> StableFamily:
    """The family of that name; raises ValueError with the known names otherwise."""
    if name not in FAMILIES:
        raise ValueError(f"unknown family {name!r}; known families: {', '.join(FAMILIES)}")
    return FAMILIES[name]
