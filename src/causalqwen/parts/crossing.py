"""Individuals who cross: what an individual adds to a value may turn around from context to context (theory 3.14).

    Y = W_reg (loc_V + scale_V (r q(e1) + rest)) + noise,   r in [-1, 1] by coordinate and context

`rest` is exogenous: it fills up what |r| leaves, (1 - |r|^a)^(1/a) of the coordinate's scale, a the law's index, so that the
law of Y in each context alone is the same for every r. Only values of one individual in several contexts can tell it. r = 1 is
the documents' form.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from causalqwen.distributions import StableFamily

if TYPE_CHECKING:
    from causalqwen.modeling.model import CausalQwenForCausalLM

_DIRECTIONS = 8
_COMPONENTS, _LEAST = (
    8,
    0.03,
)  # of the features, that a start looks at, and their least share of the widest one's spread
_CLIPPED = 3.0  # residuals, in standard deviations of a normal law with their quartiles: wild values tell no direction


class Crossing(nn.Module):
    """r_c(x) = fold(l_k(x)), k = c mod K: linear in the standardized features x, and 1 everywhere at the start.

    Under a Gaussian law K directions make any covariance of rank K between contexts. Under any other there is one, K = 1: an
    individual's coordinates then lie on one line, where the likelihood of values that share them is a one-dimensional integral.
    """

    def __init__(self, size: int, causal_size: int, directions: int) -> None:
        super().__init__()
        self.turn = nn.Linear(size, directions)
        self.causal_size = causal_size
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Nobody crosses."""
        nn.init.zeros_(self.turn.weight)
        nn.init.ones_(self.turn.bias)

    def forward(self, standardized: Tensor) -> Tensor:
        """x [..., H] -> r [..., C], float32."""
        turns = fold(self.turn(standardized))
        return turns[..., torch.arange(self.causal_size, device=turns.device) % turns.shape[-1]]

    def split(self, standardized: Tensor, scale: Tensor, noise: Tensor, law: StableFamily) -> tuple[Tensor, Tensor]:
        """scale_V [..., C] and noise_V [C] -> what an individual reaches, r scale_V, with its sign, and the noise with the
        rest, (noise^a + scale^a (1 - |r|^a))^(1/a), both [..., C]."""
        r, a = self(standardized), law.alpha
        left = noise**a + scale**a * (1 - r.abs() ** a)
        return scale * r, left ** (1 / a)

    @torch.no_grad()
    def lean(self, standardized: Tensor, residuals: Tensor, people: Tensor) -> float:
        """Start at the directions in which values of one person go together: from r = 1 for all, where two contexts say the
        opposite, gradients lead to r = 0 and stay there.

        The products of two residuals of one person are phi(x_i)' B phi(x_j) on average, phi the leading components of x and
        a constant; the positive eigenvalues of B share the K directions among them.

        Args:
            standardized: x [n, H]. residuals [n]: of the values, on their axis. people: int64 [n], whose each is, -1 for none.

        Returns: how much of what varies is who it is, in [0, 1].
        """
        own = people >= 0
        x, e, people = standardized[own].double(), residuals[own].double(), people[own]
        low, high = torch.quantile(e, torch.tensor([0.25, 0.75], dtype=e.dtype, device=e.device))
        limit = _CLIPPED * (high - low) / 1.349
        e = (e - e.median()).clamp(-limit, limit)
        mean, n = x.mean(0), len(x)
        _, widths, axes = torch.linalg.svd(x - mean, full_matrices=False)
        kept = (widths > _LEAST * widths[0]).nonzero().flatten()[:_COMPONENTS]
        axes = axes[kept] / widths[kept].unsqueeze(-1) * n**0.5  # of the components, each of variance 1
        phi = torch.cat([x.new_ones(n, 1), (x - mean) @ axes.T], dim=1)
        told = phi * e.unsqueeze(-1)
        sums = told.new_zeros(int(people.max()) + 1, told.shape[1]).index_add(0, people, told)
        pairs = people.bincount().double().square().sum().item() - n  # of two values, not of one with itself
        values, vectors = torch.linalg.eigh((sums.T @ sums - told.T @ told) / max(pairs, 1.0))
        values = values.clamp(min=0)
        places = _shared_out(values, self.turn.out_features)
        if not len(places):
            return 0.0
        vectors = vectors[:, places]
        turns = phi @ vectors
        size = turns.abs().amax(0) * torch.where(turns.sum(0) < 0, -1.0, 1.0)
        weight = axes.T @ vectors[1:] / size
        self.turn.weight.copy_(weight.T)
        self.turn.bias.copy_(vectors[0] / size - mean @ weight)
        return min(1.0, float(values.sum() / e.square().mean()))


def fold(turn: Tensor) -> Tensor:
    """Itself from -1 to 1, and back again beyond, with the period 4: a slope of 1 or -1 everywhere."""
    turn = torch.remainder(turn + 1, 4) - 1
    return torch.where(turn <= 1, turn, 2 - turn)


def _shared_out(values: Tensor, count: int) -> Tensor:
    """Indices int64 [count] of values, each as often as its share of their sum says; none where all are 0."""
    if not bool(values.sum() > 0):
        return torch.zeros(0, dtype=torch.int64)
    wanted = values / values.sum() * count
    times = wanted.floor()
    for place in (wanted - times).argsort(descending=True)[: count - int(times.sum())]:
        times[place] += 1
    return torch.repeat_interleave(torch.arange(len(values), device=values.device), times.long())


def let_cross(model: "CausalQwenForCausalLM") -> Crossing:
    """The crossing of a model's value branch, which is made where there is none: nobody crosses yet."""
    branch, config = model.value_branch, model.config
    if branch.crossing is None:
        config.value_crossing = _DIRECTIONS if model.action.value_law.alpha == 2 else 1
        made = Crossing(len(branch.feature_mean), config.causal_size, config.value_crossing)
        branch.crossing = made.to(branch.feature_mean.device)
    return branch.crossing
