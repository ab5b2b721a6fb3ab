"""Abduction: from the features of a context to a distribution over who is speaking (theory 2.3)."""

import math
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from causalqwen.checking import nearest
from causalqwen.distributions import StableFamily, get_family, upcast
from causalqwen.modeling.configuration import CausalQwenConfig
from causalqwen.parts.perceptron import ResidualPerceptron

_HALVINGS = 24


def softplus_inverse(value: float) -> float:
    """x with softplus(x) = value > 0: log(e^value - 1), which is close to `value` itself once that is large."""
    return value + math.log(-math.expm1(-value))


class LawOfU:
    """S(loc_U, scale_U) [..., C] of the base at features z [..., H], each made when it is first asked for."""

    def __init__(self, network: "AbductionNetwork", features: Tensor) -> None:
        self.network, self.features = network, features

    @cached_property
    def loc(self) -> Tensor:
        net = self.network
        loc = net.loc_net(self.features.to(net.loc_net.weight.dtype))  # W_loc = I changes no bit
        return loc if net.residual is None else loc + net.residual(self.features).chunk(2, dim=-1)[0].to(loc.dtype)

    @cached_property
    def scale(self) -> Tensor:
        net = self.network
        raw = upcast(net.scale_net(self.features.to(net.scale_net.weight.dtype)))
        raw = raw if net.residual is None else raw + net.residual(self.features).chunk(2, dim=-1)[1]
        scale = raw.exp() if net.scale_activation == "exp" else F.softplus(raw)
        return scale if net.max_scale is None else scale.clamp(max=net.max_scale)


class DomainNetwork(nn.Module):
    """What a domain changes about who is speaking, held close to the base's law (overview 2.3; theory 3.10).

        loc_D = loc_U + scale_U t a(z),   scale_D = scale_U exp(t d(z))      a, d: the domain's network, 0 at the start

    D(U_D, U), the mean over coordinates of KL(law_D || law_U), depends on a, d and t alone. With a limit, t is the largest
    number up to 1 at which D <= limit, found at every position anew.

    Args:
        hidden_size: H of the features; causal_size: C.
        layers: hidden layers of `width`, with GELU; 0 for a linear map.
        limit: upper limit of D at every position, in nats per coordinate; None for none.
        family: the law of U, for the divergence.
    """

    def __init__(
        self,
        hidden_size: int,
        causal_size: int,
        *,
        layers: int = 0,
        width: int = 256,
        limit: float | None = None,
        family: str = "cauchy",
    ) -> None:
        super().__init__()
        for name, value in (("layers", layers), ("width", width)):
            if not isinstance(value, int) or isinstance(value, bool) or value < (name == "width"):
                raise ValueError(f"a domain's {name} is a whole number, got {value!r}")
        if limit is not None and not (isinstance(limit, int | float) and limit > 0):
            raise ValueError(f"a domain's limit must be positive, got {limit!r}")
        self.limit, self.law = limit, get_family(family)
        self.residual = ResidualPerceptron(hidden_size, width, 2 * causal_size, layers=layers)

    def moves(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """a and d [..., C] from features z [..., H], before any limit; d within +-20."""
        a, d = upcast(self.residual(features)).chunk(2, dim=-1)
        return a, d.clamp(-20.0, 20.0)

    def moved(self, base: LawOfU) -> LawOfU:
        """The domain's law [..., C] of who speaks, loc in the dtype of the base's."""
        loc, scale = base.loc, base.scale
        a, d = self._held(*self.moves(base.features))
        law = type(base)(base.network, base.features)
        law.loc, law.scale = (upcast(loc) + scale * a).to(loc.dtype), scale * d.exp()
        return law

    def distance(self, features: Tensor) -> Tensor:
        """D(U_D, U) [...] at features z [..., H], as the limit leaves it."""
        return divergence(self.law, *self._held(*self.moves(features)))

    def _held(self, a: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        if self.limit is None:
            return a, d
        t = held(self.law, a.detach(), d.detach(), self.limit)
        return t * a, t * d


def divergence(law: StableFamily, a: Tensor, d: Tensor) -> Tensor:
    """D [...] of moves a, d [..., C]: the mean over coordinates of KL(S(a, e^d) || S(0, 1))."""
    return law.kl(a, d.exp(), torch.zeros_like(a), torch.ones_like(d)).mean(-1)


@torch.no_grad()
def held(law: StableFamily, a: Tensor, d: Tensor, limit: float) -> Tensor:
    """t [..., 1] in [0, 1] with D(t a, t d) <= limit, as large as halving finds it; 1 wherever that is close enough."""
    low = torch.zeros_like(a[..., :1])
    high = torch.ones_like(low)
    free = divergence(law, a, d).unsqueeze(-1) <= limit
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        within = divergence(law, middle * a, middle * d).unsqueeze(-1) <= limit
        low, high = torch.where(within, middle, low), torch.where(within, high, middle)
    return torch.where(free, torch.ones_like(low), low)


class AbductionNetwork(nn.Module):
    """z -> U ~ S(loc_U, scale_U), coordinate by coordinate and position by position.

        loc_U   = W_loc z + b_loc                     W_loc = I, b_loc = 0 at the start
        scale_U = softplus(W_scale z + b_scale)       W_scale = 0, scale_U = `initial_scale` at the start

    `deep` adds a residual perceptron to both (architecture 2.3.3, with the identity kept); `scale_activation="exp"` is
    the older form (foundations 2.4.1). `max_scale` is an upper limit of scale_U; beyond it the gradient is zero. `domains`
    holds networks beside it (`DomainNetwork`), and `domain` says which of them is asked. hidden_size: H. causal_size: C; H by
    default.
    """

    def __init__(
        self,
        hidden_size: int,
        causal_size: int | None = None,
        *,
        deep: bool = False,
        deep_hidden_size: int = 512,
        scale_activation: str = "softplus",
        initial_scale: float = 1.0,
        max_scale: float | None = None,
    ) -> None:
        super().__init__()
        causal_size = causal_size or hidden_size
        if scale_activation not in ("softplus", "exp"):
            raise ValueError(f"unknown scale activation {scale_activation!r}; use 'softplus' or 'exp'")
        if not initial_scale > 0:
            raise ValueError(f"the initial scale must be positive, got {initial_scale}")
        self.scale_activation, self.initial_scale, self.max_scale = scale_activation, initial_scale, max_scale
        self.loc_net = nn.Linear(hidden_size, causal_size)
        self.scale_net = nn.Linear(hidden_size, causal_size)
        self.residual = ResidualPerceptron(hidden_size, deep_hidden_size, 2 * causal_size) if deep else None
        self.domains = nn.ModuleDict()
        self.domain: str | None = None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The start: the identity and a constant scale."""
        nn.init.eye_(self.loc_net.weight)
        nn.init.zeros_(self.loc_net.bias)
        nn.init.zeros_(self.scale_net.weight)
        exponential = self.scale_activation == "exp"
        start = math.log(self.initial_scale) if exponential else softplus_inverse(self.initial_scale)
        nn.init.constant_(self.scale_net.bias, start)

    def law(self, features: Tensor) -> "LawOfU":
        """Who speaks at features z [..., H]: the base's law, or that of the domain which is asked."""
        base = LawOfU(self, features)
        return base if self.asked is None else self.asked.moved(base)

    @property
    def asked(self) -> DomainNetwork | None:
        """The network of the domain that is asked; None for the base."""
        network: Any = None if self.domain is None else self.domains[self.domain]
        return network

    @property
    def keeps_features(self) -> bool:
        """Whether loc_U is z, to the last bit, and stays so: W_loc = I and b_loc = 0 stand still, with nothing beside them."""
        weight, bias = self.loc_net.weight, self.loc_net.bias
        moves = weight.requires_grad or bias.requires_grad or self.residual is not None or self.asked is not None
        if moves or len(weight) != weight.shape[1] or bool(bias.any()):
            return False
        return bool((weight.diagonal() == 1).all()) and int(weight.count_nonzero()) == len(weight)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """features z [..., H] -> loc_U [..., C] in the dtype of W_loc, scale_U [..., C] in float32 at least, positive."""
        law = self.law(features)
        return law.loc, law.scale


def make_domain(config: CausalQwenConfig, settings: dict[str, Any]) -> DomainNetwork:
    """The network of these settings for a model of this configuration. ValueError for a setting that there is not."""
    known = "layers", "width", "limit"
    if unknown := [name for name in settings if name not in known]:
        raise ValueError(f"unknown setting {unknown[0]} of a domain; {nearest(unknown[0], known)}")
    return DomainNetwork(config.hidden_size, config.causal_size, family=config.vocabulary_family, **settings)


def check_domain_name(name: str) -> None:
    """ValueError for what no domain may be called."""
    if not name.isidentifier() or hasattr(nn.ModuleDict, name):
        raise ValueError(
            f"a domain needs a name of its own, of letters, digits and _, and none of torch's own; got {name!r}"
        )
