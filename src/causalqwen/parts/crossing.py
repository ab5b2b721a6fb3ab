"""Individuals who cross: what an individual adds to a value may turn around from context to context (theory 3.14).

    Y = W_reg (loc_V + scale_V (r q(e1) + rest)) + noise,   r in [-1, 1] by coordinate and context

`rest` is exogenous: it fills up what |r| leaves, (1 - |r|^a)^(1/a) of the coordinate's scale, a the law's index, so that the
law of Y in each context alone is the same for every r. Only values of one individual in several contexts can tell it. r = 1 is
the documents' form.
"""

import itertools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from causalqwen.distributions import StableFamily

_COMPONENTS = 8  # of the features, that a start looks at
_LEAST = 0.03  # of the widest component's spread, that a component has
_RIDGE = 1e-2  # of the mean square of what products are explained by
_SAME = 1e-3  # spread of a component whose contexts are one
_MIDDLE = 0.05  # of r, over all rows, that says which of two sides is +1
_LEAST_SIZE, _LEAST_NOISE = 0.05, 0.01  # of who in the context where people differ most; of all that varies
_TOLD = 0.03  # of what people differ in, that has a direction of its own
_CLIPPED = 3.0  # residuals, in standard deviations of a normal law with their quartiles: wild values tell no direction
_ENOUGH = 100  # products of two values of one person for each pair of contexts: then the pair can speak for itself
_MANY, _MOST = 64, 1024  # directions where contexts are many; contexts whose pairs are looked at one by one
_SHRUNK = tuple(10.0 ** (power / 2) for power in range(9))  # products of 0 that are added to those of each far pair
_OF_A_LEVEL = 100  # pairs of contexts at least: then they tell how large correlations are at this level of likeness
_NEAR = 2.0  # mean square of correlations at a level, over that of the half of all pairs that are least alike
_FORMS = ("common", "apart", "one")  # of correlations, beside those of contexts that are alike
_FOLDS = 4  # of people, one of them held out, and of contexts, each of them hidden in turn
_PARTS = 8  # of people, each held out in turn, to say how many components tell more of them
_HELD = 1000  # of people who are held out, at most
_PRIOR = 10.0  # values that the mean of all counts for, in a context's own variance
_TURNS = 200  # of the directions, until r is within bounds
_MOST_WHO = 0.95  # of a context's standard deviation


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
    def lean(
        self, standardized: Tensor, residuals: Tensor, people: Tensor, row: Tensor | None = None
    ) -> tuple[Tensor, float]:
        """Start at the directions in which values of one person go together: from r = 1 for all, where two contexts say the
        opposite, gradients lead to r = 0 and stay there.

        The products of two residuals of one person are phi(x_i)' B phi(x_j) on average, phi the leading components of x and
        a constant, fewer where people held out are told more by fewer; the positive eigenvalues of B share the K directions
        among them. Where contexts are more than the components tell apart, and people enough, each pair of contexts speaks
        for itself instead (`_lean_on_pairs`).

        Args:
            standardized: x [n, H]. residuals [n]: of the values, on their axis. people: int64 [n], whose each is.
            row: W_reg [C]; all alike by default.

        Returns: the standard deviation of what is who at each value, float64 [n], and that of the noise.
        """
        x, e = standardized.double(), residuals.double()
        low, high = torch.quantile(e[:: 1 + len(e) // 1_000_000], e.new_tensor([0.25, 0.75]))
        e, limit = e - e.median(), _CLIPPED * (high - low) / 1.349
        e = e.clamp(-limit, limit) if limit > 0 else e
        contexts, places = x.unique(dim=0, return_inverse=True)
        if bool(e.any()) and self.turn.out_features > 1 and _COMPONENTS + 1 < len(contexts) <= _MOST:
            pairs = _Pairs.of(e, people, places, contexts)
            if pairs.counts.sum() >= _ENOUGH * len(contexts) ** 2:
                size, left = self._lean_on_pairs(contexts, pairs, row)
                return size[places], left
        mean, whole = x.mean(0), e.square().mean()
        _, widths, axes = torch.linalg.svd(x - mean, full_matrices=False)
        least = max(_LEAST * float(widths[0]), _SAME * len(x) ** 0.5)
        kept = (widths > least).nonzero().flatten()[:_COMPONENTS]
        axes = axes[kept] / widths[kept].unsqueeze(-1) * len(x) ** 0.5  # of the components, each of variance 1
        phi = torch.cat([x.new_ones(len(x), 1), (x - mean) @ axes.T], dim=1)
        if bool(e.any()) and len(people.unique()) > 1:
            axes = axes[: _components(_told_by_components(phi, e, people))]
            phi = phi[:, : 1 + len(axes)]
        values, vectors = torch.linalg.eigh(_products(phi, e, people))
        values = values.clamp(min=0)
        places = _shared_out(values, self.turn.out_features)
        if not len(places):
            return x.new_zeros(len(x)), whole.sqrt().item()
        told = phi @ vectors * values.sqrt()  # [n, k]: what each direction adds to the values
        size = told.square().sum(-1).sqrt()
        size = size.clamp(min=_LEAST_SIZE * float(size.max()))
        times = places.bincount(minlength=len(values)).double()
        part = (times / len(places)).sqrt()[places]  # that a direction's coordinates have of the scale
        wanted = (told[:, places] / (size.unsqueeze(-1) * part)).clamp(-1, 1)
        slopes = torch.linalg.lstsq(phi, wanted).solution  # [k, K]
        weight = axes.T @ slopes[1:]
        widest = weight.take_along_dim(weight.abs().argmax(0, keepdim=True), dim=0)[0]
        middle = wanted.mean(0)  # +1 as a rule; else the same side in whatever order rows come
        side = torch.where(torch.where(middle.abs() > _MIDDLE, middle, widest) < 0, -1.0, 1.0)
        slopes, weight = slopes * side, weight * side
        self.turn.weight.copy_(weight.T)
        self.turn.bias.copy_(slopes[0] - mean @ weight)
        return size, (whole - size.square().mean()).clamp(min=_LEAST_NOISE * whole).sqrt().item()

    def _lean_on_pairs(self, x: Tensor, pairs: "_Pairs", row: Tensor | None) -> tuple[Tensor, float]:
        """`lean` by the covariance of each pair of contexts x [P, H], in up to `_MANY` directions.

        The part of the scale that a direction's coordinates have is the same in all contexts, and an eigenvector moves some of
        them much and others not at all. Directions are therefore turned until no |r| above 1 is asked for: from Hadamard's
        matrix, which spreads each eigenvector over all of them, by turns to the nearest r within bounds and to the nearest
        rotation. What a context has of its own is noise there, by |r| < 1.
        """
        count = 2 ** int(math.log2(min(_MANY, self.causal_size)))
        self.turn = nn.Linear(x.shape[1], count).to(self.turn.weight).requires_grad_(False)
        form, shrunk = pairs.likeliest(count)
        told = pairs.directions(form, shrunk, count)
        noise = (pairs.variance - told.square().sum(1)).min() / 4
        size = (pairs.variance - noise).sqrt()
        weights = x.new_ones(self.causal_size) if row is None else row.double().square()
        parts = x.new_zeros(count).index_add(0, torch.arange(self.causal_size, device=x.device) % count, weights)
        part = (parts / parts.mean()).sqrt()
        asked = told / size.unsqueeze(-1) * count**0.5
        turned = x.new_ones(1, 1)
        while len(turned) < count:
            turned = torch.cat([torch.cat([turned, turned], 1), torch.cat([turned, -turned], 1)]) / 2**0.5
        turned = turned[: told.shape[1]]
        for _ in range(_TURNS):
            within = (asked @ turned).clamp(-part, part)
            left, _, right = torch.linalg.svd(asked.T @ within, full_matrices=False)
            turned = left @ right
        wanted = ((asked @ turned) / part).clamp(-1, 1)
        mean, middle = x.mean(0), wanted.mean(0)
        slopes = torch.linalg.pinv(x - mean, rtol=1e-7) @ (wanted - middle)
        self.turn.weight.copy_(slopes.T)
        self.turn.bias.copy_(middle - mean @ slopes)
        return size, noise.sqrt().item()


@dataclass
class _Pairs:
    """What pairs of values of one person say of pairs of contexts.

    totals, known, squares: of each person in each context, the sum of the values, how many there are, and the sum of their
    squares, float64 [people, P]. contexts: x [P, H]. levels: how much alike those of each pair are, int64 [P, P] (`_levels`).
    """

    totals: Tensor
    known: Tensor
    squares: Tensor
    contexts: Tensor
    levels: Tensor

    @classmethod
    def of(cls, e: Tensor, people: Tensor, places: Tensor, contexts: Tensor) -> "_Pairs":
        """Of residuals e [n], whose each is, and in which of the contexts."""
        shape = int(people.max()) + 1, len(contexts)
        cells, size = people * shape[1] + places, shape[0] * shape[1]
        columns = (e, torch.ones_like(e), e.square())
        totals, known, squares = (torch.bincount(cells, column, size).view(shape) for column in columns)
        return cls(totals, known, squares, contexts, _levels(contexts))

    def part(self, people: Tensor) -> "_Pairs":
        """Of some of the people."""
        return _Pairs(self.totals[people], self.known[people], self.squares[people], self.contexts, self.levels)

    @cached_property
    def counts(self) -> Tensor:
        """Products of two values, [P, P]."""
        return self.known.T @ self.known - self.known.sum(0).diag()

    @cached_property
    def variance(self) -> Tensor:
        """Of the values of each context, [P]."""
        squares, known = self.squares.sum(0), self.known.sum(0)
        return (squares + _PRIOR * squares.sum() / known.sum()) / (known + _PRIOR)

    @cached_property
    def sums(self) -> Tensor:
        """Of products of two values in units of their contexts' standard deviations, [P, P]; 0 on the diagonal."""
        scale = self.variance.sqrt()
        return (self.totals.T @ self.totals / scale / scale.unsqueeze(-1)).fill_diagonal_(0.0)

    @cached_property
    def near(self) -> Tensor:
        """Correlations of contexts that are alike, [P, P], and 0 elsewhere: those of a level whose correlations have a mean
        square tau^2 more than `_NEAR` times that of level 0, by more than chance, each as if 1 / tau^2 products of 0 stood
        beside those that were seen."""
        found, least = torch.zeros_like(self.sums), 0.0
        for level in range(int(self.levels.max()) + 1):
            at = (self.levels == level) & (self.counts > 0)
            sums, counts = self.sums[at], self.counts[at]
            if not len(counts):
                continue
            square = float((sums.square() / counts - 1).sum() / counts.sum())
            sure = square - 2 * len(counts) ** 0.5 / float(counts.sum())  # every pair stands twice: two standard errors
            if level == 0:
                least = _NEAR * max(sure, 0.0)
            elif sure > least:
                found[at] = sums / (counts + 1 / square)
        return found

    @cached_property
    def common(self) -> Tensor:
        """What is common to contexts that are alike, [P, P]: 1 + `near` with its eigenvalues cut to [0, 1]."""
        values, vectors = torch.linalg.eigh(self.near + torch.eye(len(self.near)).to(self.near))
        return (vectors * values.clamp(0, 1)) @ vectors.T

    def directions(self, form: str, shrunk: float, count: int) -> Tensor:
        """What each of the leading directions adds to each context's values, [P, up to count].

        All correlations but those that are `near` as if `shrunk` products of 0 stood beside those that were seen. form:
        "common", those as what is common to contexts that are alike has them: where these differ among themselves is chance;
        "apart", as they are; "one", of all contexts, near or not.
        """
        scale, is_near = self.variance.sqrt(), (self.near != 0) & (form != "one")
        far = (self.sums / (self.counts + shrunk)).masked_fill(is_near, 0.0)
        far = self.common @ far @ self.common if form == "common" else far
        correlations = torch.where(is_near, self.near, far).fill_diagonal_(0.0)
        correlations.diagonal().copy_(correlations.abs().amax(1))
        values, vectors = torch.linalg.eigh(correlations)
        told = vectors[:, -count:] * values[-count:].clamp(min=0).sqrt()
        size = told.square().sum(1, keepdim=True).sqrt()
        return told * (_MOST_WHO / size.clamp(min=_MOST_WHO)) * scale.unsqueeze(-1)

    def likeliest(self, count: int) -> tuple[str, float]:
        """The form, and the one of `_SHRUNK`, that tell most of what people who are held out say in contexts unlike those where
        they are heard: the contexts are parted along the leading component of their features."""
        x = self.contexts
        _, _, axes = torch.linalg.svd(x - x.mean(0), full_matrices=False)
        block = (x @ axes[0]).argsort().argsort() * _FOLDS // len(x)
        held = torch.arange(len(self.known), device=x.device) % _FOLDS == 0
        taught, others = self.part(~held), self.part(held.nonzero().flatten()[:_HELD])
        forms = _FORMS if bool(taught.near.any()) else _FORMS[-1:]
        return max(
            itertools.product(forms, _SHRUNK),
            key=lambda one: others.told(taught.directions(one[0], one[1], count), taught.variance, block),
        )

    def told(self, directions: Tensor, variance: Tensor, block: Tensor) -> float:
        """Sum of log p of each person's mean value in each context, given those in contexts of the other blocks."""
        left, total = variance - directions.square().sum(1), 0.0
        outer = (directions.unsqueeze(2) * directions.unsqueeze(1)).flatten(1)
        for hidden in range(_FOLDS):
            seen = (block != hidden) / left
            informed = ((self.known * seen) @ outer).view(-1, directions.shape[1], directions.shape[1])
            informed.diagonal(dim1=1, dim2=2).add_(1.0)
            factor = torch.linalg.cholesky(informed)
            mean = torch.cholesky_solve(((self.totals * seen) @ directions).unsqueeze(-1), factor).squeeze(-1)
            spread = torch.linalg.solve_triangular(factor, directions.T.expand(len(factor), -1, -1), upper=False)
            variances = spread.square().sum(1) + left / self.known.clamp(min=1)
            errors = self.totals / self.known.clamp(min=1) - mean @ directions.T
            asked = (self.known > 0) & (block == hidden)
            total -= 0.5 * (errors.square() / variances + variances.log())[asked].sum().item()
        return total


def _levels(contexts: Tensor) -> Tensor:
    """How much alike the contexts of each pair are, x [P, H] -> int64 [P, P]: 0 for the half of all pairs whose features have
    the least cosines, 1 for the next quarter, and so on while `_OF_A_LEVEL` pairs are left; -1 on the diagonal."""
    x = nn.functional.normalize(contexts - contexts.mean(0), dim=1)
    one, other = torch.triu_indices(len(x), len(x), 1, device=x.device)
    _, place, times = (x @ x.T)[one, other].round(decimals=6).unique(return_inverse=True, return_counts=True)
    ranks = times.flip(0).cumsum(0).flip(0)[place]  # how many pairs are as much alike, or more
    levels = torch.full((len(x), len(x)), -1, device=x.device)
    levels[one, other] = (len(ranks) / ranks).log2().clamp(max=max(math.log2(len(ranks) / _OF_A_LEVEL), 0.0)).long()
    return torch.maximum(levels, levels.T)


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
    """Itself, from -1 to 1, and these ends beyond: there only a gradient whose descent leads back in goes through."""
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


def _components(told: Tensor) -> int:
    """How many components to look at, by what each person is told [1 + k, people] under 0, 1, ..., k of them: all, or those
    fewer ones that tell most, where that is more than what all tell by a standard error of the difference between people."""
    gains = told - told[-1]
    total = gains.sum(1)
    total[total <= gains.std(1) * gains.shape[1] ** 0.5] = 0.0
    return int(total.argmax()) if bool(total.any()) else len(told) - 1


def _told_by_components(phi: Tensor, e: Tensor, people: Tensor) -> Tensor:
    """log p of the values e [n] of each person, who are held out in turn, up to a constant, where the first 0, 1, ... of the
    components phi [n, 1 + k] stand beside its constant, [1 + k, people]: e of one person is Gaussian with covariance
    phi B phi' + noise, B and the noise those of the others."""
    owners, people = people.unique(return_inverse=True)
    known = people < _HELD
    phi, e, people, count, k = phi[known], e[known], people[known], min(len(owners), _HELD), phi.shape[1]
    fold = torch.arange(count, device=e.device) % min(_PARTS, count)

    def sums(rows: Tensor) -> Tensor:
        return rows.new_zeros(count, *rows.shape[1:]).index_add(0, people, rows)

    gram, told = sums(phi.unsqueeze(-1) * phi.unsqueeze(-2)), sums(phi * e.unsqueeze(-1))
    squares, counts, least = sums(e.square()), people.bincount(), _LEAST_NOISE * e.square().mean()
    found = e.new_empty(k, count)
    for size, part in itertools.product(range(1, k + 1), range(int(fold.max()) + 1)):
        held, others = fold == part, (fold != part)[people]
        of, said = phi[others, :size], e[others]
        values, vectors = torch.linalg.eigh(_products(of, said, people[others]))
        root = vectors * values.clamp(min=0).sqrt()
        noise = (said.square().mean() - (of @ root).square().sum(1).mean()).clamp(min=least)
        factor = torch.linalg.cholesky(torch.eye(size).to(e) + root.T @ gram[held, :size, :size] @ root / noise)
        half = torch.linalg.solve_triangular(factor, (told[held, :size] @ root).unsqueeze(-1), upper=False)
        lost = (squares[held] - half.square().sum((1, 2)) / noise) / noise + counts[held] * noise.log()
        found[size - 1, held] = -0.5 * (lost + 2 * factor.diagonal(dim1=1, dim2=2).log().sum(1))
    return found


def _shared_out(values: Tensor, count: int) -> Tensor:
    """Indices int64 [count] of values, each as often as its share of their sum says, and once where that is `_TOLD` or more;
    none where all are 0."""
    if not bool(values.sum() > 0):
        return torch.zeros(0, dtype=torch.int64)
    wanted = values / values.sum() * count
    wanted[values.argsort(descending=True)[count:]] = 0.0  # the largest, where they are more
    times = (wanted >= _TOLD * count).to(wanted.dtype)
    for _ in range(count - int(times.sum())):
        times[(wanted - times).argmax()] += 1
    return torch.repeat_interleave(torch.arange(len(values), device=values.device), times.long())
