"""Individuals who cross: what an individual adds to a value may turn around from context to context (theory 3.14).

    Y = W_reg (loc_V + scale_V (r q(e1) + rest)) + noise,   r in [-1, 1] by coordinate and context

`rest` is exogenous: it fills up what |r| leaves, (1 - |r|^a)^(1/a) of the coordinate's scale, a the law's index, so that the
law of Y in each context alone is the same for every r. Only values of one individual in several contexts can tell it. r = 1 is
the original design's form.
"""

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from causalqwen.distributions import StableFamily

_COMPONENTS, _LEAST = 8, 0.03  # of the features, that a start looks at; of the widest one's spread, that each has
_RIDGE = 1e-2  # of the mean square of what products are explained by
_SAME = 1e-3  # spread of a component whose contexts are one
_MIDDLE = 0.05  # of r, over all rows, that says which of two sides is +1
_LEAST_SIZE, _LEAST_NOISE = 0.05, 0.01  # of who in the context where people differ most; of all that varies
_SHARE = 0.03  # of what people differ in, that has a direction of its own
_CLIPPED = 3.0  # residuals, in standard deviations of a normal law with their quartiles: wild values tell no direction
_PARTS, _HELD = 8, 1000  # of people, each held out in turn to choose the number of components; people at most


class Crossing(nn.Module):
    """r_c(x) = l_k(x) held in [-1, 1], k = c mod K: linear in the standardized features x, and 1 everywhere at the start.

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
        turns = held(self.turn(standardized))
        return turns[..., torch.arange(self.causal_size, device=turns.device) % turns.shape[-1]]

    def split(self, standardized: Tensor, scale: Tensor, noise: Tensor, law: StableFamily) -> tuple[Tensor, Tensor]:
        """scale_V [..., C] and noise_V [C] -> what an individual reaches, r scale_V, with its sign, and the noise with the
        rest, (noise^a + scale^a (1 - |r|^a))^(1/a), both [..., C]."""
        r, a = self(standardized), law.alpha
        left = noise**a + scale**a * (1 - r.abs() ** a)
        return scale * r, left ** (1 / a)

    @torch.no_grad()
    def lean(self, standardized: Tensor, residuals: Tensor, people: Tensor) -> tuple[Tensor, float]:
        """Start at the directions in which values of one person go together: from r = 1 for all, gradients may lead to r = 0
        and stay there.

        The products of two residuals of one person are phi(x_i)' B phi(x_j) on average, phi the leading components of x and
        a constant, fewer where people held out are likelier under fewer; the positive eigenvalues of B share the K directions
        among them.

        Args:
            standardized: x [n, H]. residuals [n]: of the values, on their axis. people: int64 [n], whose each is.

        Returns: the standard deviation of what is who at each value, float64 [n], and that of the noise.
        """
        x, e = standardized.double(), residuals.double()
        low, high = torch.quantile(e[:: 1 + len(e) // 1_000_000], e.new_tensor([0.25, 0.75]))
        e, limit = e - e.median(), _CLIPPED * (high - low) / 1.349
        e = e.clamp(-limit, limit) if limit > 0 else e
        mean, whole = x.mean(0), e.square().mean()
        _, widths, axes = torch.linalg.svd(x - mean, full_matrices=False)
        least = max(_LEAST * float(widths[0]), _SAME * len(x) ** 0.5)
        kept = (widths > least).nonzero().flatten()[:_COMPONENTS]
        axes = axes[kept] / widths[kept].unsqueeze(-1) * len(x) ** 0.5  # of the components, each of variance 1
        phi = torch.cat([x.new_ones(len(x), 1), (x - mean) @ axes.T], dim=1)
        if bool(e.any()) and len(people.unique()) > 1:
            axes = axes[: _components(_log_p_by_components(phi, e, people))]
            phi = phi[:, : 1 + len(axes)]
        values, vectors = torch.linalg.eigh(_products(phi, e, people))
        values = values.clamp(min=0)
        places = _shared_out(values, self.turn.out_features)
        if not len(places):
            return x.new_zeros(len(x)), whole.sqrt().item()
        added = phi @ vectors * values.sqrt()  # [n, k]: what each direction adds to the values
        size = added.square().sum(-1).sqrt()
        size = size.clamp(min=_LEAST_SIZE * float(size.max()))
        times = places.bincount(minlength=len(values)).double()
        part = (times / len(places)).sqrt()[places]  # that a direction's coordinates have of the scale
        wanted = (added[:, places] / (size.unsqueeze(-1) * part)).clamp(-1, 1)
        slopes = torch.linalg.lstsq(phi, wanted).solution  # [k, K]
        weight = axes.T @ slopes[1:]
        widest = weight.take_along_dim(weight.abs().argmax(0, keepdim=True), dim=0)[0]
        middle = wanted.mean(0)  # +1 as a rule; else the same side in whatever order rows come
        side = torch.where(torch.where(middle.abs() > _MIDDLE, middle, widest) < 0, -1.0, 1.0)
        slopes, weight = slopes * side, weight * side
        self.turn.weight.copy_(weight.T)
        self.turn.bias.copy_(slopes[0] - mean @ weight)
        return size, (whole - size.square().mean()).clamp(min=_LEAST_NOISE * whole).sqrt().item()


class _Held(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, turn: Tensor) -> Tensor:
        ctx.save_for_backward(turn)
        return turn.clamp(-1, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (turn,) = ctx.saved_tensors
        outward = ((turn >= 1) & (gradient < 0)) | ((turn <= -1) & (gradient > 0))
        return gradient.masked_fill(outward, 0.0)


def held(turn: Tensor) -> Tensor:
    """The turn itself, from -1 to 1, and these ends beyond: there only a gradient whose descent leads back in goes through."""
    result: Tensor = _Held.apply(turn)
    return result


def _products(phi: Tensor, e: Tensor, people: Tensor) -> Tensor:
    """B [k, k], symmetric, with e_i e_j = phi_i' B phi_j by least squares over all pairs of two values of one person."""
    count = int(people.max()) + 1

    def over_pairs(rows: Tensor) -> Tensor:
        """sum over pairs i != j of one person of rows_i rows_j', of rows [n, m]."""
        sums = rows.new_zeros(count, rows.shape[1]).index_add(0, people, rows)
        return sums.T @ sums - rows.T @ rows

    k = phi.shape[1]
    each = (phi.unsqueeze(-1) * phi.unsqueeze(-2)).flatten(1)
    design = over_pairs(each).view(k, k, k, k).transpose(1, 2).reshape(k * k, k * k)
    wanted = over_pairs(phi * e.unsqueeze(-1)).flatten()
    design.diagonal().add_(_RIDGE * design.diagonal().mean().clamp(min=1e-12))
    found = torch.linalg.solve(design, wanted).view(k, k)
    return (found + found.T) / 2


def _components(log_p: Tensor) -> int:
    """How many components to look at, by log p of each person's values [1 + k, people] under 0, 1, ..., k of them: as many as
    give most, where that is more than what all give by a standard error of the difference between people; else all."""
    gains = log_p - log_p[-1]
    total = gains.sum(1)
    total[total <= gains.std(1) * gains.shape[1] ** 0.5] = 0.0
    return int(total.argmax()) if bool(total.any()) else len(log_p) - 1


def _log_p_by_components(phi: Tensor, e: Tensor, people: Tensor) -> Tensor:
    """log p of the values e [n] of each person, held out in turn, up to a constant, [1 + k, people], under the first 0, 1, ...
    of the components phi [n, 1 + k]: Gaussian with covariance phi B phi' + noise, B and the noise those of the others."""
    owners, people = people.unique(return_inverse=True)
    known = people < _HELD
    phi, e, people, count, k = phi[known], e[known], people[known], min(len(owners), _HELD), phi.shape[1]
    fold = torch.arange(count, device=e.device) % min(_PARTS, count)

    def sums(rows: Tensor) -> Tensor:
        return rows.new_zeros(count, *rows.shape[1:]).index_add(0, people, rows)

    gram, moments = sums(phi.unsqueeze(-1) * phi.unsqueeze(-2)), sums(phi * e.unsqueeze(-1))
    squares, counts, least = sums(e.square()), people.bincount(), _LEAST_NOISE * e.square().mean()
    found = e.new_empty(k, count)
    for size, part in itertools.product(range(1, k + 1), range(int(fold.max()) + 1)):
        held, others = fold == part, (fold != part)[people]
        of, residuals = phi[others, :size], e[others]
        values, vectors = torch.linalg.eigh(_products(of, residuals, people[others]))
        root = vectors * values.clamp(min=0).sqrt()
        noise = (residuals.square().mean() - (of @ root).square().sum(1).mean()).clamp(min=least)
        factor = torch.linalg.cholesky(torch.eye(size).to(e) + root.T @ gram[held, :size, :size] @ root / noise)
        half = torch.linalg.solve_triangular(factor, (moments[held, :size] @ root).unsqueeze(-1), upper=False)
        lost = (squares[held] - half.square().sum((1, 2)) / noise) / noise + counts[held] * noise.log()
        found[size - 1, held] = -0.5 * (lost + 2 * factor.diagonal(dim1=1, dim2=2).log().sum(1))
    return found


def _shared_out(values: Tensor, count: int) -> Tensor:
    """Indices int64 [count] of values, each as often as its share of their sum says, and once where that is `_SHARE` or more;
    none where all are 0."""
    if not bool(values.sum() > 0):
        return torch.zeros(0, dtype=torch.int64)
    wanted = values / values.sum() * count
    wanted[values.argsort(descending=True)[count:]] = 0.0  # the largest, where they are more
    times = (wanted >= _SHARE * count).to(wanted.dtype)
    for _ in range(count - int(times.sum())):
        times[(wanted - times).argmax()] += 1
    return torch.repeat_interleave(torch.arange(len(values), device=values.device), times.long())
