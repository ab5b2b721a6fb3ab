"""Exact decisions without all scales, under the documents' scale (theory 3.6).

argmax_k (loc_k - C_k)/scale_k under the documents' scale, without the second product:

scale_k^a = |W_k|^a . s^a follows the scale s of U'. With a reference s_0, whose scales are known,

    scale_k^a = c base_k + |W_k|^a . d,    base_k = |W_k|^a . s_0^a,    d = s^a - c s_0^a

is within c base_k +- |  |W_k|^a |_2 |d|_2 (Cauchy and Schwarz), and within base_k times the extremes of s^a/s_0^a. Only tokens
that these bounds cannot rule out have their scale computed. Where too many are left, all are computed, and s becomes the
reference: a scale that hardly moves from step to step, or never (`causal`, whose scale is the noise's), costs nothing.
"""

import torch
from torch import Tensor

from causalqwen.distributions import SCALE_FLOOR, StableFamily, upcast

_SLACK = 1e-5  # float32 rounding of the bounds themselves
_SHARE = 1 / 16  # of the vocabulary: more candidates than that cost as much as all
_BLOCK = 1024  # rows of a matrix, which several passes find in a core's cache


class ScaleBounds:
    """Bounds on the scales of a weight's rows. Made for one weight, law and mask; s_0 follows what it meets."""

    def __init__(self, weight: Tensor, law: StableFamily) -> None:
        self.weight, self.law = weight, law
        self.norms = torch.cat([self._magnitudes(rows).norm(dim=1) for rows in weight.split(_BLOCK)])
        self.reference: Tensor | None = None
        self.base: Tensor | None = None

    def _magnitudes(self, rows: Tensor) -> Tensor:
        return upcast(rows.abs()) ** self.law.alpha

    def _scales(self, powers: Tensor) -> Tensor:
        return (powers.clamp(min=0) ** (1 / self.law.alpha)).clamp(min=SCALE_FLOOR)

    def decision_scores(self, loc: Tensor, scale: Tensor, thresholds: Tensor, mask: Tensor | None = None) -> Tensor:
        """loc [B, V], s [B, C], thresholds [B, 1] or [V] -> scores [B, V], float32, whose argmax is the decision.

        Scores of tokens that cannot win are -inf, or what they are; those that can have their exact score. mask: bool [V].
        """
        excess = loc.to(torch.float32) - thresholds
        if mask is not None:
            excess.masked_fill_(~mask, -torch.inf)
        scores = [self._row(row, s**self.law.alpha) for row, s in zip(excess, upcast(scale), strict=True)]
        return torch.stack(scores)

    def _row(self, excess: Tensor, powers: Tensor) -> Tensor:
        if not bool(powers.any()):  # nothing is left to integrate out: every scale is the floor, and no reference
            return excess / SCALE_FLOOR
        if self.reference is not None and self.base is not None:
            if torch.equal(powers, self.reference):
                return excess / self._scales(self.base)
            known = self.reference > 0
            ratio = powers[known] / self.reference[known]
            most = torch.inf if bool(powers[~known].any()) else ratio.max()  # where s_0 has nothing, s may have all
            factor = (powers @ self.reference) / (self.reference @ self.reference)
            slack = self.norms * (powers - factor * self.reference).norm()
            low = torch.maximum(self.base * ratio.min(), factor * self.base - slack) * (1 - _SLACK)
            high = torch.minimum((self.base * most).nan_to_num(torch.inf), factor * self.base + slack) * (1 + _SLACK)
            low, high = self._scales(low), self._scales(high)
            positive = excess > 0
            worst = excess / torch.where(positive, high, low)
            best = excess / torch.where(positive, low, high)
            left = (best >= worst.max()).nonzero().squeeze(-1)
            if len(left) <= _SHARE * len(excess):
                exact = self._scales(self._magnitudes(self.weight[left]) @ powers)
                return torch.full_like(excess, -torch.inf).index_copy_(0, left, excess[left] / exact)
        self.reference = powers
        self.base = torch.cat([self._magnitudes(rows) @ powers for rows in self.weight.split(_BLOCK)])
        return excess / self._scales(self.base)
