"""Abduction: from the features of a context to a distribution over who is speaking (theory 2.3)."""

import math
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from causalqwen.distributions import upcast
from causalqwen.parts.domain import DomainNetwork
from causalqwen.parts.perceptron import ResidualPerceptron


def softplus_inverse(value: float) -> float:
    """x with softplus(x) = value > 0: log(e^value - 1), which is close to `value` itself once that is large."""
    return value + math.log(-math.expm1(-value))


class LawOfU:
    """S(loc_U, scale_U) at features z [..., H], each made when it is first asked for."""

    def __init__(self, network: "AbductionNetwork", features: Tensor) -> None:
        self.network, self.features = network, features

    @cached_property
    def loc(self) -> Tensor:
        """[..., C]."""
        return self.network.locate(self.features)

    @cached_property
    def scale(self) -> Tensor:
        """[..., C]."""
        return self.network.spread(self.features)


class AbductionNetwork(nn.Module):
    """z -> U ~ S(loc_U, scale_U), coordinate by coordinate and position by position.

        loc_U   = W_loc z + b_loc                     W_loc = I, b_loc = 0 at the start
        scale_U = softplus(W_scale z + b_scale)       W_scale = 0, scale_U = `initial_scale` at the start

    `deep` adds a residual perceptron to both (architecture 2.3.3, with the identity kept); `scale_activation="exp"` is
    the older form (foundations 2.4.1). `max_scale` is an upper limit of scale_U; beyond it the gradient is zero. `domains`
    holds networks beside it (`DomainNetwork`), and `domain` says which of them is asked.

    Args:
        hidden_size: H of the features z.
        causal_size: C; H by default. W_loc starts as the H x C matrix with ones on its diagonal.
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
        self.scale_activation = scale_activation
        self.initial_scale = initial_scale
        self.max_scale = max_scale
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

    def spread(self, features: Tensor) -> Tensor:
        """scale_U [..., C] of the base."""
        raw_scale = upcast(self.scale_net(features.to(self.scale_net.weight.dtype)))
        if self.residual is not None:
            raw_scale = raw_scale + self.residual(features).chunk(2, dim=-1)[1]
        scale = raw_scale.exp() if self.scale_activation == "exp" else F.softplus(raw_scale)
        return scale if self.max_scale is None else scale.clamp(max=self.max_scale)

    def locate(self, features: Tensor) -> Tensor:
        """loc_U [..., C] of the base."""
        loc = self.loc_net(features.to(self.loc_net.weight.dtype))  # W_loc = I changes no bit
        if self.residual is not None:
            loc = loc + self.residual(features).chunk(2, dim=-1)[0].to(loc.dtype)
        return loc
