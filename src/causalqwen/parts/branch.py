"""The value head reads U through a branch of its own, so that numbers are learned without moving text (theory 3.8)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from causalqwen.parts.perceptron import ResidualPerceptron


class ValueBranch(nn.Module):
    """A residual on loc_U and scale_U that only the value head reads, so that numbers can be learned without text.

        loc_V = loc_U + r_loc(x),   scale_V = scale_U exp(r_scale(x)),   noise_V = |b_noise| exp(d),   x = (z - mean) / std

    r is a perceptron whose last layer starts at zero, as d does; mean and std are fitted on training features (0 and 1 before),
    because a few coordinates of a language model's features are tens of times larger than the others. With `members`, r is the
    mean of so many perceptrons, which differ in their hidden layers' start.

    With `columns`, z is followed by the numbers of a table's row, [..., H + columns], and r reads them too. With them, or with
    `direct`, x moves the value straight as well: r_loc(x) + a (d x), r_scale(x) + e x with a [C], d and e [H + columns], zero
    at the start, from where the training begins at a regression. Where columns are not given, they stand at their means.
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
        columns: int = 0,
        direct: bool = False,
    ) -> None:
        super().__init__()
        self.columns, size = columns, hidden_size + columns

        def perceptron() -> ResidualPerceptron:
            return ResidualPerceptron(size, perceptron_size, 2 * causal_size, layers=layers, dropout=dropout)

        with torch.random.fork_rng(devices=(), enabled=columns > 0):
            self.residual = perceptron()
        with torch.random.fork_rng(
            devices=()
        ):  # whatever is drawn behind the branch does not depend on members or columns
            self.others = nn.ModuleList(perceptron() for _ in range(members - 1))
        self.log_noise = nn.Parameter(torch.zeros(()))
        self.direct = nn.Parameter(torch.zeros(2, size)) if columns or direct else None
        self.along = nn.Parameter(torch.zeros(causal_size)) if columns or direct else None
        self.register_buffer("feature_mean", torch.zeros(size))
        self.register_buffer("feature_std", torch.ones(size))

    def standardize(self, features: Tensor) -> Tensor:
        """x, float32, of z [..., H], or of z and its columns."""
        width = features.shape[-1]
        return (features.to(self.feature_mean.dtype) - self.feature_mean[:width]) / self.feature_std[:width]

    def start_anew(self) -> None:
        """Every member as at a start, by torch's own generator."""
        for member in (self.residual, *self.others):
            member.reset_parameters()
        if self.direct is not None:
            nn.init.zeros_(self.direct)
            nn.init.zeros_(self.along)

    def noise(self, noise: Tensor) -> Tensor:
        """noise_V [C] of |b_noise| [C]."""
        return noise * self.log_noise.exp()

    def forward(self, features: Tensor, loc: Tensor, scale: Tensor, *, each: bool = False) -> tuple[Tensor, Tensor]:
        """z [..., H], loc_U and scale_U [..., C] -> the loc and scale of U that the value head reads, float32; with `each`,
        those that each member alone would give, [members, ..., C]."""
        standardized = self.standardize(features)
        if missing := len(self.feature_mean) - standardized.shape[-1]:
            standardized = F.pad(standardized, (0, missing))
        members = torch.stack([member(standardized) for member in (self.residual, *self.others)])
        residual = members if each else members.mean(0)
        loc_residual, scale_residual = residual.to(scale.dtype).chunk(2, dim=-1)
        if self.direct is not None:
            of_loc, of_scale = F.linear(standardized, self.direct).unsqueeze(-2).unbind(-1)
            loc_residual, scale_residual = loc_residual + of_loc * self.along, scale_residual + of_scale
        return loc.to(scale.dtype) + loc_residual, scale * torch.exp(scale_residual.clamp(-20.0, 20.0))
