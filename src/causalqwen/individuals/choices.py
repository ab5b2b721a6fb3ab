"""What choices say about an individual: options as branches of a tree of tokens (theory 3.15)."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from causalqwen.distributions import StableFamily
from causalqwen.individuals.evidence import read_factor


@dataclass(frozen=True)
class Branches:
    """The tokens that options go on with, fork by fork, T branches in all.

    score: of each branch where nobody in particular speaks, float64 [T]. reach: what a unit of q(g) adds to it, [T, C]. sizes:
    branches of each fork. paths: bool [O, T], the branches that each option takes.
    """

    score: Tensor
    reach: Tensor
    sizes: list[int]
    paths: Tensor

    def cpu(self) -> "Branches":
        """The same in the processor's memory, where people are."""
        return replace(self, **{name: getattr(self, name).cpu() for name in ("score", "reach", "paths")})

    def log_probs(self, q: Tensor) -> Tensor:
        """log P(option | q) [..., O] of individuals q [..., C]: a softmax over the branches of each fork on its way."""
        scores = self.score + (q.to(self.reach).unsqueeze(-2) * self.reach).sum(
            -1
        )  # of each alone: no row moves another
        steps = torch.cat([fork.log_softmax(-1) for fork in scores.split(self.sizes, dim=-1)], dim=-1)
        return (steps.unsqueeze(-2) * self.paths).sum(-1)


@dataclass
class ChoiceEvidence:
    """n choices that somebody made: the branches of each question, and which option was taken. See `Evidence`."""

    questions: list[Branches]
    taken: list[int]
    law: StableFamily

    def __len__(self) -> int:
        return len(self.taken)

    def evaluate(self, g: Tensor, curvature: bool = False) -> tuple[float, Tensor, Tensor | None]:
        """See `Evidence`; each fork on the way is a softmax, with the Fisher information diag(p) - p p' of one."""
        q, slope = read_factor(self.law, g)
        total, gradient = 0.0, torch.zeros_like(g, dtype=torch.float64)
        information = g.new_zeros(len(g), len(g), dtype=torch.float64)
        for question, taken in zip(self.questions, self.taken, strict=True):
            scores, path = question.score + question.reach @ q, question.paths[taken]
            loadings, start = question.reach * slope, 0
            for size in question.sizes:
                fork, start = slice(start, start + size), start + size
                if not bool(path[fork].any()):
                    continue
                log_p, of_fork = scores[fork].log_softmax(-1), loadings[fork]
                total += float(log_p[path[fork]].sum())
                p = log_p.exp()
                gradient += (path[fork].to(p) - p) @ of_fork
                if curvature:
                    mean = p @ of_fork
                    information += (of_fork.T * p) @ of_fork - mean.unsqueeze(-1) * mean
        return total, gradient, information if curvature else None
