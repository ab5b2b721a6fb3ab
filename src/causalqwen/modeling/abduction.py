"""Abduction: from the features of a context to a distribution over who is speaking (theory 2.3)."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from causalqwen.distributions import upcast


def softplus_inverse(value: float) -> float:
    """x with softplus(x) = value > 0: log(e^value - 1), which is close to `value` itself once that is large."""
    return value + math.log(-math.expm1(-value))


class ResidualPerceptron(nn.Module):
    """Hidden layers with GELU and dropout, then a linear one that starts at zero: the residual starts as nothing."""

    def __init__(
        self, input_size: int, hidden_size: int, output_size: int, *, layers: int = 1, dropout: float = 0.0
    ) -> None:
        super().__init__()
        sizes = [input_size] + [hidden_size] * layers
        self.hidden = nn.ModuleList(nn.Linear(size, hidden_size) for size in sizes[:-1])
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(sizes[-1], output_size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Ordinary hidden layers, a last one of zeros."""
        for layer in self.hidden:
            nn.init.kaiming_uniform_(layer.get_parameter("weight"), a=5**0.5)
            nn.init.zeros_(layer.get_parameter("bias"))
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, features: Tensor) -> Tensor:
        features = features.to(self.last.weight.dtype)
        for layer in self.hidden:
            features = self.dropout(F.gelu(layer(features)))
        return self.last(features)


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

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """features z [..., H] -> loc_U [..., C] in the dtype of W_loc, scale_U [..., C] in float32 at least, positive."""
        base = self._locate(features), self._spread(features)
        return base if self.domain is None else self.domains[self.domain](features, *base)

    def spread(self, features: Tensor) -> Tensor:
        """scale_U [..., C] alone."""
        return self._spread(features) if self.domain is None else self(features)[1]

    def locate(self, features: Tensor) -> Tensor:
        """loc_U [..., C] alone."""
        return self._locate(features) if self.domain is None else self(features)[0]

    def _spread(self, features: Tensor) -> Tensor:
        raw_scale = upcast(self.scale_net(features.to(self.scale_net.weight.dtype)))
        if self.residual is not None:
            raw_scale = raw_scale + self.residual(features).chunk(2, dim=-1)[1]
        scale = raw_scale.exp() if self.scale_activation == "exp" else F.softplus(raw_scale)
        return scale if self.max_scale is None else scale.clamp(max=self.max_scale)

    def _locate(self, features: Tensor) -> Tensor:
        loc = self.loc_net(features.to(self.loc_net.weight.dtype))  # W_loc = I changes no bit
        if self.residual is not None:
            loc = loc + self.residual(features).chunk(2, dim=-1)[0].to(loc.dtype)
        return loc


class ValueBranch(nn.Module):
    """A residual on loc_U and scale_U that only the value head reads, so that numbers can be learned without text.

        loc_V = loc_U + r_loc(x),   scale_V = scale_U exp(r_scale(x)),   noise_V = |b_noise| exp(d),   x = (z - mean) / std

    r is a perceptron whose last layer starts at zero, as d does; mean and std are fitted on training features (0 and 1 before),
    because a few coordinates of a language model's features are tens of times larger than the others. With `members`, r is the
    mean of so many perceptrons, which differ in their hidden layers' start.
    """

    feature_mean: Tensor
    feature_std: Tensor

    def __init__(
        self,
        hidden_size: int,
        causal_size: int,
        perceptron_size: int,
        *,
        members: int = 1,
        layers: int = 1,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()

        def perceptron() -> ResidualPerceptron:
            return ResidualPerceptron(hidden_size, perceptron_size, 2 * causal_size, layers=layers, dropout=dropout)

        self.residual = perceptron()
        with torch.random.fork_rng(devices=()):  # whatever is drawn behind the branch does not depend on its members
            self.others = nn.ModuleList(perceptron() for _ in range(members - 1))
        self.log_noise = nn.Parameter(torch.zeros(()))
        self.register_buffer("feature_mean", torch.zeros(hidden_size))
        self.register_buffer("feature_std", torch.ones(hidden_size))

    def standardize(self, features: Tensor) -> Tensor:
        """x [..., H], float32, of z."""
        return (features.to(self.feature_mean.dtype) - self.feature_mean) / self.feature_std

    def forward(self, features: Tensor, loc: Tensor, scale: Tensor, *, each: bool = False) -> tuple[Tensor, Tensor]:
        """z [..., H], loc_U and scale_U [..., C] -> the loc and scale of U that the value head reads, float32; with `each`,
        those that each member alone would give, [members, ..., C]."""
        standardized = self.standardize(features)
        members = torch.stack([member(standardized) for member in (self.residual, *self.others)])
        residual = members if each else members.mean(0)
        loc_residual, scale_residual = residual.to(scale.dtype).chunk(2, dim=-1)
        return loc.to(scale.dtype) + loc_residual, scale * torch.exp(scale_residual.clamp(-20.0, 20.0))
