"""The value head reads U through a branch of its own, so that numbers are learned without moving text (theory 3.8)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from causalqwen.distributions import StableFamily
from causalqwen.parts.crossing import Crossing
from causalqwen.parts.perceptron import ResidualPerceptron


class ValueBranch(nn.Module):
    """A residual on loc_U and scale_U that only the value head reads, so that numbers can be learned without text.

        loc_V = loc_U + r_loc(x),   scale_V = scale_U exp(r_scale(x)),   noise_V = |b_noise| exp(d),   x = (z - mean) / std

    r is a perceptron whose last layer starts at zero, as d does; mean and std are fitted on training features (0 and 1 before),
    because a few coordinates of a language model's features are tens of times larger than the others.

    After `let_lean`, x moves the value straight as well: r_loc(x) + a (d x), r_scale(x) + e x with a [C], d and e [H], zero at
    the start, from where the training begins at a regression.
    """

    feature_mean: Tensor
    feature_std: Tensor

    def __init__(self, hidden_size: int, causal_size: int, perceptron_size: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.residual = ResidualPerceptron(hidden_size, perceptron_size, 2 * causal_size, layers=2, dropout=dropout)
        self.log_noise = nn.Parameter(torch.zeros(()))
        self.direct: nn.Parameter | None = None
        self.along: nn.Parameter | None = None
        self.causal_size = causal_size
        self.crossing: Crossing | None = None
        self.register_buffer("feature_mean", torch.zeros(hidden_size))
        self.register_buffer("feature_std", torch.ones(hidden_size))

    def let_lean(self) -> None:
        """Let x move the value straight too, from now on."""
        if self.direct is None:
            mean = self.feature_mean
            self.direct = nn.Parameter(mean.new_zeros(2, len(mean)))
            self.along = nn.Parameter(mean.new_zeros(self.causal_size))

    def standardize(self, features: Tensor) -> Tensor:
        """x, float32, of z [..., H]."""
        return (features.to(self.feature_mean.dtype) - self.feature_mean) / self.feature_std

    def split(self, features: Tensor, scale: Tensor, noise: Tensor, law: StableFamily) -> tuple[Tensor, Tensor]:
        """What an individual reaches and what noise does, of scale_V [..., C] and |b_noise| [C] at features z [..., H]: scale_V
        and noise_V [C], where no individual crosses (`Crossing.split`)."""
        noise = noise * self.log_noise.exp()
        if self.crossing is None:
            return scale, noise
        return self.crossing.split(self.standardize(features), scale, noise, law)

    def forward(self, features: Tensor, loc: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """z [..., H], loc_U and scale_U [..., C] -> the loc and scale of U that the value head reads, float32."""
        standardized = self.standardize(features)
        loc_residual, scale_residual = self.residual(standardized).to(scale.dtype).chunk(2, dim=-1)
        if self.direct is not None:
            of_loc, of_scale = F.linear(standardized, self.direct).unsqueeze(-2).unbind(-1)
            loc_residual, scale_residual = loc_residual + of_loc * self.along, scale_residual + of_scale
        return loc.to(scale.dtype) + loc_residual, scale * torch.exp(scale_residual.clamp(-20.0, 20.0))


class PlainReader:
    """`ValueBranch` where there is none: the value head reads U as the tokens do (overview 2.4), and all stays as it is."""

    def standardize(self, features: Tensor) -> Tensor:
        return features

    def split(self, features: Tensor, scale: Tensor, noise: Tensor, law: StableFamily) -> tuple[Tensor, Tensor]:
        return scale, noise

    def __call__(self, features: Tensor, loc: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return loc, scale
