"""Exact decisions without all scales, under the documents' and, where something is drawn, under the common one (theory 3.6).

argmax_k (loc_k - C_k)/scale_k under the documents' scale, without the second product:

scale_k^a = |W_k|^a . s^a follows the scale s of U'. With a reference s_0, whose scales are known,

    scale_k^a = c base_k + |W_k|^a . d,    base_k = |W_k|^a . s_0^a,    d = s^a - c s_0^a

is within c base_k +- |  |W_k|^a |_2 |d|_2 (Cauchy and Schwarz), and within base_k times the extremes of s^a/s_0^a. Only tokens
that these bounds cannot rule out have their scale computed. Where too many are left, all are computed, and s becomes the
reference: a scale that hardly moves from step to step, or never (`causal`, whose scale is the noise's), costs nothing.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from causalqwen.distributions import SCALE_FLOOR, StableFamily, upcast

_SLACK = 1e-5  # float32 rounding of the bounds themselves
_SHARE = 1 / 16  # of the vocabulary: more candidates than that cost as much as all
_BLOCK = 1024  # rows of a matrix, which several passes find in a core's cache
_NEIGHBOURS = 64
_POSITIONS = 8  # whose scores a core's cache holds in float32, of which maxima are found faster


class ScaleBounds:
    """Bounds on the scales of a weight's rows. Made for one weight, law and mask; s_0 follows what it meets.

    full: how many positions needed all scales so far. seen: how many positions there were.
    """

    def __init__(self, weight: Tensor, law: StableFamily) -> None:
        self.weight, self.law = weight, law
        self.norms = torch.cat([self._magnitudes(rows).norm(dim=1) for rows in weight.split(_BLOCK)])
        self.reference: Tensor | None = None
        self.base: Tensor | None = None
        self.seen = self.full = 0

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
        self.seen += 1
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
        self.full += 1
        self.reference = powers
        self.base = torch.cat([self._magnitudes(rows) @ powers for rows in self.weight.split(_BLOCK)])
        return excess / self._scales(self.base)


Array = np.ndarray[Any, Any]
"""Where something is drawn, who may win is found in small pieces, of which numpy takes a third of torch's time."""


class Blocks:
    """Scores [N, K] that are asked for their largest ones: what blocks of neighbours reach is looked at first, once.

    reached: the highest score of each block, [N, blocks], float32 at least. best: of all, [N].
    """

    def __init__(self, scores: Tensor) -> None:
        if lacking := -scores.shape[-1] % _NEIGHBOURS:  # else no copy: of Qwen's scores 19 MB a step of 64 rows
            scores = torch.nn.functional.pad(scores, (0, lacking), value=-torch.inf)
        self._blocks = scores.contiguous().view(len(scores), -1, _NEIGHBOURS)
        self.reached: Array = torch.cat([upcast(part).amax(-1) for part in self._blocks.split(_POSITIONS)]).numpy()
        self.best: Array = self.reached.max(-1)

    def at_least(self, least: Array) -> tuple[Array, Array, Array]:
        """Rows and columns, int64 [n] each, and scores of those that are not below `least`: their row's [N, 1], or their
        block's [N, blocks]."""
        blocks = np.flatnonzero(self.reached >= least)
        least = np.broadcast_to(least, self.reached.shape).reshape(-1)[blocks]
        some = upcast(self._blocks.flatten(0, 1).index_select(0, torch.from_numpy(blocks))).numpy()
        found, width = np.flatnonzero(some >= least[:, None]), self.reached.shape[-1]
        blocks = blocks[found // _NEIGHBOURS]
        return blocks // width, blocks % width * _NEIGHBOURS + found % _NEIGHBOURS, some.reshape(-1)[found]


def least_excess(best: Array, whole: Array, slope: float, law: StableFamily, moved: Array, drawn: Array) -> Array:
    """What loc_k - C_k must reach so that token k may still be the best, where something is drawn under the common scale.

    The scale of token k is left_k^a = whole + slope max(C - loc_k + moved_k, 0) - drawn_k^a, as far as that is positive.

    Args:
        best: the highest (loc_k - C_k)/left_k that is known, [N, 1].
        whole: scale_S^a [N, 1]. slope: 0, or that of a Gaussian (`Scores.slope`).
        moved: at least every moved_k of some tokens and 0, [N, blocks]. drawn: at least every drawn_k^a of these, [N, blocks].
    """
    far, a = (
        -best,
        law.alpha,
    )  # where that lies below C, a better one lies x below C: x < far (whole + slope (x + moved))^(1/a)
    if slope:
        linear, constant = far**2 * slope, far**2 * (whole + slope * moved)
        below = -(linear + np.sqrt(linear**2 + 4 * constant)) / 2
    else:
        below = -far * whole ** (1 / a)
    above = best * np.maximum(whole * (1 - _SLACK) - drawn, SCALE_FLOOR**a) ** (1 / a)
    least = np.where(best < 0, below, above)
    return least - _SLACK * (np.abs(least) + whole ** (1 / a))
