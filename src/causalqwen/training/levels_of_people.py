"""Levels of the intervals of an individual, fitted on people held out (theory 3.14)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from causalqwen.distributions import StableFamily
from causalqwen.individuals.marginal import line_nodes, loading_sizes
from causalqwen.modeling import CausalQwenForCausalLM
from causalqwen.modeling.chain import Chain
from causalqwen.numbers.law import PARTS, WANTED_LEVELS
from causalqwen.training.features import FactStore
from causalqwen.training.scores import numbers_of

KNOWN = (1, 2, 4, 8, 16)
"""Observations after which a further number of a person is predicted, as far as their numbers allow."""

FEWEST, FEW = 6, 20
"""Fewer people calibrate nothing; fewer than `FEW` say little of the distribution's form: their levels are wide."""

PRIOR = 10
"""People as whom what the model believes counts: factors of 1, and levels of its own distribution."""

_DRAWS = 480  # people and orders of their numbers, after so many observations
_NUMBERS = 64  # of one person, at most
_FARTHEST = 10.0  # residuals of a Gaussian, in predicted widths, that factors are fitted to
_LEAST = 1e-12


@dataclass(frozen=True)
class HeldPerson:
    """n numbers of somebody whom a model did not learn from, float64, on the value axis.

    residuals [n]: less loc of the population average. ends [n, 2]: of each value's cell there, less loc; they differ for an
    atom. loadings [n, C], noise [n]: as in `value_marginal`. places [n]: which of the rows' numbers each is.
    """

    name: str
    residuals: Tensor
    ends: Tensor
    loadings: Tensor
    noise: Tensor
    places: Tensor


@torch.no_grad()
def people_of(
    model: CausalQwenForCausalLM, store: FactStore, owners: Sequence[str | None], keep: Tensor | None = None
) -> list[HeldPerson]:
    """The people of rows, `_DRAWS` at most, and what the model predicts of each number. owners, keep: as in `joint_losses`."""
    at, whose = numbers_of(store, owners, keep)
    names = list(dict.fromkeys(owner for owner in owners if owner is not None))
    random, axis, people = np.random.default_rng(0), model.value_transform, []
    features, values = store.facts.tensor("features"), torch.from_numpy(store.facts.values)
    for person in sorted(random.permutation(np.unique(whose[whose >= 0]))[:_DRAWS].tolist()):
        places = np.flatnonzero(whose == person)
        places = places if len(places) <= _NUMBERS else random.choice(places, _NUMBERS, replace=False)
        chain = Chain(model, features[at[places]].to(model.device))
        loc, (loadings, noise) = chain.value()[0].double().cpu(), chain.value_loadings()
        said = values[at[places]]
        ends = torch.stack(axis.cell(said), -1) - loc.unsqueeze(-1)
        own = loadings.double().cpu(), noise.double().cpu().clamp(min=_LEAST), torch.from_numpy(places)
        people.append(HeldPerson(names[person], axis.forward(said) - loc, ends, *own))
    return people


@dataclass(frozen=True)
class Asked:
    """Numbers [n] of people of whom others were observed, less the median that is predicted after these.

    residuals [n], ends [n, 2], noise [n], places [n]: as in `HeldPerson`. who [n]: standard deviation of what is not known
    about the individual, under a Gaussian. moved, log_weights [n, m]: where it lies on a line, under another law. owner [n]:
    whose each is.
    """

    law: StableFamily
    residuals: Tensor
    ends: Tensor
    noise: Tensor
    who: Tensor
    moved: Tensor
    log_weights: Tensor
    owner: Tensor
    places: Tensor

    def scale(self, who: Tensor | float, noise: Tensor | float) -> Tensor:
        return ((who * self.who).square() + (noise * self.noise).square()).sqrt()

    def log_prob(self, who: Tensor, noise: Tensor) -> Tensor:
        """Log density of each number [n], with factors for what is not known about the individual, and for noise."""
        scale, x = self.scale(who, noise).unsqueeze(-1), self.residuals.unsqueeze(-1)
        return (self.log_weights + self.law.log_prob(x, who * self.moved, scale.expand_as(self.moved))).logsumexp(-1)

    def central(self, who: float, noise: float) -> Tensor:
        """`ValueLaw.spread_levels` [n, PARTS] with these factors."""
        scale = self.scale(who, noise).unsqueeze(-1).expand_as(self.moved)
        weights = self.log_weights.exp()
        low, high = (
            (weights * self.law.cdf(end.unsqueeze(-1), who * self.moved, scale)).sum(-1, keepdim=True)
            for end in self.ends.unbind(-1)
        )
        return (2 * (low + (high - low) * (torch.arange(PARTS).double() + 0.5) / PARTS) - 1).abs()


def asked_after(law: StableFamily, people: Sequence[HeldPerson], known: int) -> Asked | None:
    """One more number of each person after `known` others, in orders that are drawn, contexts as they come; None where nobody
    has as many."""
    random, drawn, orders = np.random.default_rng(known), [], max(1, _DRAWS // max(len(people), 1))
    for owner, person in enumerate(people):
        if len(person.noise) > known:
            drawn += [(owner, random.permutation(len(person.noise))[: known + 1]) for _ in range(orders)]
    if not drawn:
        return None

    def column(name: str) -> Tensor:
        return torch.stack([getattr(people[owner], name)[order] for owner, order in drawn])

    residuals, noise, loadings = column("residuals"), column("noise"), column("loadings")
    if law.alpha == 2:
        together = loadings @ loadings.mT
        seen = together[:, :-1, :-1] + torch.diag_embed(noise[:, :-1].square())
        gain = torch.linalg.solve(seen, together[:, :-1, -1:]).squeeze(-1)
        median = (gain * residuals[:, :-1]).sum(-1)
        who = (together[:, -1, -1] - (gain * together[:, :-1, -1]).sum(-1)).clamp(min=0).sqrt()
        moved = log_weights = torch.zeros(len(who), 1).double()
    else:
        sizes = loading_sizes(law, loadings)
        largest = loadings.take_along_dim(sizes.argmax(-1, keepdim=True).unsqueeze(-1), dim=-2)
        sizes = sizes * (loadings * largest).sum(-1).sign()
        places, log_weights = line_nodes(law, residuals[:, :-1], sizes[:, :-1], noise[:, :-1])
        places, order = places.sort(-1)
        log_weights = log_weights.gather(-1, order).log_softmax(-1)
        half = (log_weights.exp().cumsum(-1) < 0.5).sum(-1, keepdim=True).clamp(max=places.shape[-1] - 1)
        middle = places.gather(-1, half)
        moved, median = sizes[:, -1:] * (places - middle), sizes[:, -1] * middle.squeeze(-1)
        who = torch.zeros_like(median)
    ends = column("ends")[:, -1] - median.unsqueeze(-1)
    owners, asked = torch.tensor([owner for owner, _ in drawn]), column("places")[:, -1]
    return Asked(law, residuals[:, -1] - median, ends, noise[:, -1], who, moved, log_weights, owners, asked)


def fit_individual_levels(law: StableFamily, people: Sequence[HeldPerson]) -> dict[str, Any] | None:
    """Factors of an individual's widths, and raw central levels for `WANTED_LEVELS` on top: {"who", "noise", "levels"}; None
    where fewer than `FEWEST` people said two numbers or more.

    who and noise maximize sum over people and k of log p(v | k others of theirs) - `PRIOR` (log^2 who + log^2 noise), the log
    density's mean over orders: to scale all by s costs n people about n log^2 s. For levels, all draws of a person have the
    weight 1 together. Of fewer than `FEW` people, the level is the least up to which lies (n + 1) times the wanted one (split
    conformal by groups: Lee, Barber and Willett 2023). More stand beside `PRIOR` others whose levels are the law's own, in
    place of the one more: their draws are many, and with it levels would cover too much.
    """
    people = [person for person in people if len(person.noise) > 1]
    if len(people) < FEWEST:
        return None
    blocks = [block for known in KNOWN if (block := asked_after(law, people, known)) is not None]
    factors = _factors(blocks, len(people))
    levels = _levels(blocks, factors, len(people), PRIOR if len(people) >= FEW else 0)
    return {"who": factors[0], "noise": factors[1], "levels": levels}


def population_levels(law: StableFamily, people: Sequence[HeldPerson]) -> list[float] | None:
    """Levels for the population average, after none of a person's own numbers, split-conformal by person; None for fewer than
    `FEWEST` people."""
    block = asked_after(law, people, 0)
    return None if block is None or len(people) < FEWEST else _levels([block], (1.0, 1.0), len(people), 0)


def _factors(blocks: Sequence[Asked], count: int) -> tuple[float, float]:
    clipped = []
    for block in blocks:
        reach = _FARTHEST * block.scale(1.0, 1.0) if block.law.alpha == 2 else torch.tensor(torch.inf)
        weight = 1 / block.owner.bincount(minlength=count).double()[block.owner]
        clipped.append((weight, replace(block, residuals=block.residuals.clamp(-reach, reach))))
    logs = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([logs], max_iter=60, tolerance_change=1e-6, line_search_fn="strong_wolfe")

    def lost() -> Tensor:
        optimizer.zero_grad()
        loss = PRIOR * logs.square().sum()
        for weight, block in clipped:
            loss = loss - (weight * block.log_prob(*logs.exp())).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    with torch.enable_grad():
        optimizer.step(lost)  # type: ignore[arg-type]
    who, noise = logs.detach().exp().tolist()
    return who, noise


def _levels(blocks: Sequence[Asked], factors: tuple[float, float], count: int, prior: int) -> list[float]:
    """Levels that cover, each of `count` people weighing 1, `prior` more believing the law's own; below 1, so that intervals
    stay finite."""
    central = torch.cat([block.central(*factors) for block in blocks])
    owner = torch.cat([block.owner for block in blocks])
    weights = (1 / owner.bincount().double()[owner] / PARTS).unsqueeze(-1).expand_as(central)
    if prior:
        own = (torch.arange(1000).double() + 0.5) / 1000
        central, weights = (torch.cat([a.flatten(), b]) for a, b in ((central, own), (weights, 0 * own + prior / 1000)))
    central, order = central.flatten().clamp(max=1 - 1e-9).sort()
    place = torch.searchsorted(weights.flatten()[order].cumsum(0), (count + (prior or 1)) * WANTED_LEVELS - 1e-9)
    # Beyond the largest, as in `ValueLaw.fit_interval_levels`.
    beyond = 1 - (1 - central[-1:]) / 2
    levels: list[float] = torch.cat([central, beyond])[place.clamp(max=len(central))].tolist()
    return [0.0, *levels[1:]]
