"""Exact decisions where something is drawn under the common scale, without all scales (theory 3.6), on a CPU.

argmax_k (loc_k - C)/scale_k, scale_k^a = whole + slope max(C - loc_k + moved_k, 0) - drawn_k^a, where moved_k = W_k moved would
take a second product with the vocabulary, and drawn_k = |W_k| drawn a third. Both are bounded: by the longest row of a block of
tokens and by the one that lies farthest from the mean row, then by each token's own, then, where many are left, moved_k is
taken exactly. Who is left has its scale computed.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from causalqwen.distributions import FAR, SCALE_FLOOR, StableFamily, upcast

if TYPE_CHECKING:
    from causalqwen.core import Chain

Array = np.ndarray[Any, Any]
"""Small pieces, of which numpy takes a third of torch's time."""

_FEW = 32  # candidates of a position, which cost what it costs to ask how far each was moved
_SHARE = 1 / 64  # of the vocabulary: the products of so many rows cost what a position adds to a product with all
_PRODUCT = 1 / 4  # of the vocabulary: so many, of all positions, cost what the first costs
_RANKED = 1 / 8  # as much as `_SHARE`: a row's score costs so much more than its product
_NEIGHBOURS = 64
_POSITIONS = 8  # whose scores a core's cache holds in float32, of which maxima are found faster
_SLACK = 1e-5  # float32 rounding of a scale, and of bounds
_ROUNDING = {torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 1e-5, torch.float64: 1e-9}
"""Of a product with the matrix, relative to the length of a row."""


class Blocks:
    """Scores [N, K] that are asked for their largest ones: what blocks of neighbours reach is looked at first, once.

    reached: the highest score of each block, [N, blocks], float32 at least. best: of all, [N].
    """

    def __init__(self, scores: Tensor) -> None:
        self._width = scores.shape[-1]
        if lacking := -self._width % _NEIGHBOURS:  # else no copy: of Qwen's scores 19 MB a step of 64 rows
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
        blocks, values = blocks[found // _NEIGHBOURS], some.reshape(-1)[found]
        rows, columns = blocks // width, blocks % width * _NEIGHBOURS + found % _NEIGHBOURS
        if width * _NEIGHBOURS == self._width:
            return rows, columns, values
        there = columns < self._width  # what fills the last block up is not below -inf
        return rows[there], columns[there], values[there]


def least_excess(best: Array, whole: Array, slope: float, law: StableFamily, moved: Array, drawn: Array) -> Array:
    """What loc_k - C_k must reach so that token k may still be the best, where something is drawn under the common scale.

    The scale of token k is left_k^a = whole + slope max(C - loc_k + moved_k, 0) - drawn_k^a, as far as that is positive.

    Args:
        best: the highest (loc_k - C_k)/left_k that is known, [N, 1].
        whole: scale_S^a [N, 1]. slope: 0, or that of a Gaussian (`Scores.slope`).
        moved: at least every moved_k of some tokens and 0, [N, blocks]. drawn: at least every drawn_k^a of these, [N, blocks].
    """
    a = law.alpha
    far = -best  # where that lies below C, a better one lies x below C: x < far (whole + slope (x + moved))^(1/a)
    if slope:
        linear, constant = far**2 * slope, far**2 * (whole + slope * moved)
        below = -(linear + np.sqrt(linear**2 + 4 * constant)) / 2
    else:
        below = -far * whole ** (1 / a)
    above = best * np.maximum(whole * (1 - _SLACK) - drawn, SCALE_FLOOR**a) ** (1 / a)
    least = np.where(best < 0, below, above)
    return least - _SLACK * (np.abs(least) + whole ** (1 / a))


class Found(NamedTuple):
    """Tokens of some positions, in their order: int64 [n] each, and loc_S [n] of each."""

    rows: Array
    tokens: Array
    loc: Array

    def where(self, mask: Array) -> "Found":
        """Those where mask, bool [n], is True."""
        return Found(*(column[mask] for column in self))


class Decisions:
    """Which token of the matrix may be the best of N positions where something is drawn, and by how much; on a CPU.

    scores: loc_S [N, V] of the matrix's rows, -inf for those that are no such token. whole: scale_S^a [N] with nothing drawn.
    moved: what is drawn, [N, C]; drawn: its scale. together: how far the matrix's mean row is moved, [N]; a token's is within
    its row's distance from that, times reach [N], of it. `<NUM>` has its rank, [N], in `of_number`.
    """

    def __init__(self, chain: "Chain") -> None:
        action, words, a = chain.action, chain.words, chain.action.law.alpha
        self.columns, self.number = action.rows + action.number.columns, action.num_token_id
        self.law, self.slope, self.words = action.law, action.score_slope, words
        loc = chain.loc.detach().flatten(0, -2)
        self.scores = words.at_once(loc).detach()
        if len(words.no_words):
            self.scores.index_fill_(-1, words.no_words, -torch.inf)
        with torch.autocast("cpu", enabled=False):  # bounds are no better than what they follow from
            self.threshold = upcast(chain.threshold).detach().flatten().numpy()
            self.whole = (chain.integrated.scale_S.detach().flatten() ** a).clamp(min=SCALE_FLOOR**a).numpy()
            self.drawn = chain.drawn.detach().flatten(0, -2)
            self.widest, self.narrowest = self.drawn.amax(-1).numpy(), self.drawn.amin(-1).numpy()
            self.moved = upcast(loc) - upcast(chain.loc_U.detach()).flatten(0, -2)
            self.reach = torch.linalg.vector_norm(self.moved, torch.inf if a == 1 else a / (a - 1), dim=-1).numpy()
            self.together = (self.moved @ words.center.to(self.moved.dtype)).numpy()
            self.of_number = np.full_like(self.threshold, -np.inf)
            if self.number is not None:
                row, of_number = upcast(words.number_row()).detach(), action.num_loc(loc, words).detach().to(loc.dtype)
                taken = self.law.linear_scale(self.drawn, row.unsqueeze(0).to(self.drawn.dtype))[:, 0] ** a
                along = self.moved @ row.to(self.moved.dtype)
                self.of_number = self._ranks(upcast(of_number).numpy(), slice(None), along.numpy(), taken.numpy())

    @torch.autocast("cpu", enabled=False)
    def ranked(self) -> tuple[Tensor, Tensor]:
        """(loc_S - C) / scale_S [N, V'], -inf for tokens that are known to lose, and bool [N]: the positions with so many
        candidates that nobody was asked there, because all scores together cost less."""
        found = self.candidates()
        if self.slope:
            found = self.closer(found)
        unasked = self.many(self.counts(found), _RANKED)
        if unasked.any():
            found = found.where(~unasked[found.rows])
        scores = self.moved.new_full((len(unasked), self.columns), -torch.inf)
        written = scores.numpy()
        written[found.rows, found.tokens] = self.ranks(found)
        if self.number is not None:
            written[:, self.number] = self.of_number
        return scores, torch.from_numpy(unasked)

    def counts(self, found: Found) -> Array:
        """How many candidates each position has, int64 [N]."""
        return np.bincount(found.rows, minlength=len(self.threshold))

    def many(self, counts: Array, share: float = 1.0) -> Array:
        """bool [N]: the positions with so many candidates that a product with all tokens costs less than theirs; `share` for
        what takes 1/share of a product's time."""
        width = share * self.scores.shape[-1]
        is_many = counts > _SHARE * width
        return is_many & (counts[is_many].sum() > _PRODUCT * width)

    def ranks(self, found: Found) -> Array:
        """(loc_S - C) / scale_S [n] of some tokens, exactly."""
        weight, rows = self.words.rows_at(torch.from_numpy(found.tokens)), torch.from_numpy(found.rows)
        along = torch.linalg.vecdot(weight, self.moved.index_select(0, rows))
        taken = torch.linalg.vector_norm(weight * self.drawn.index_select(0, rows), self.law.alpha, dim=-1)
        return self._ranks(found.loc, found.rows, along.numpy(), taken.numpy() ** self.law.alpha)

    def _ranks(self, loc: Array, rows: Array | slice, along: Array, taken: Array) -> Array:
        """The same of tokens that were moved `along`, and of whose scale^a so much is drawn."""
        with np.errstate(invalid="ignore", over="ignore"):
            excess = loc - self.threshold[rows]
            fallen = along - excess  # of nobody in particular, below C
            left = self.whole[rows] + self.slope * fallen.clip(0, FAR) - taken
            ranks: Array = excess / np.maximum(left, SCALE_FLOOR**self.law.alpha) ** (1 / self.law.alpha)
        return ranks

    def candidates(self) -> Found:
        """Tokens that may be the best, by the longest row of a block of tokens, then by each one's own."""
        blocks = Blocks(self.scores)
        self.highest, self.best = blocks.best, self.of_number.copy()
        highest = Found(*blocks.at_least(self.highest[:, None]))
        np.maximum.at(self.best, highest.rows, self.ranks(highest))
        lengths, distances = self.words.of_blocks
        with np.errstate(invalid="ignore", over="ignore"):
            most_moved = (self.together[:, None] + distances * self.reach[:, None]).clip(0)
            most_drawn = (lengths * self.widest[:, None]) ** self.law.alpha
            best, whole, threshold = (column[:, None] for column in (self.best, self.whole, self.threshold))
            least = threshold + least_excess(best, whole, self.slope, self.law, most_moved, most_drawn)
            # Whatever rounding does, and where a score is infinite, the best that is known is kept.
            found = Found(*blocks.at_least(np.fmin(least, self.highest[:, None])))
            reach = self.words.distances.numpy()[found.tokens] * self.reach[found.rows]
            return found.where(self._may_win(found, self.together[found.rows], reach))

    def closer(self, found: Found) -> Found:
        """The same candidates; where a position has more than a few, those that win by how far each of them was moved, too."""
        counts = self.counts(found)
        asked = counts > _FEW
        if not asked.any():
            return found
        is_asked = asked[found.rows]
        others, few = found.where(is_asked), found.where(~is_asked)
        slack = _ROUNDING[self.words.weight.dtype] * self.words.norms.numpy()[others.tokens] * self.reach[others.rows]
        left = others.where(self._may_win(others, self._moves(counts * asked, others), slack))
        return Found(*map(np.concatenate, zip(few, left, strict=True)))

    def _moves(self, counts: Array, found: Found) -> Array:
        """How far each candidate was moved, [n]: W_k moved. counts [N]: how many of each position there are."""
        moved, by_all, tokens = (
            self.moved.to(self.words.weight.dtype),
            self.many(counts),
            torch.from_numpy(found.tokens),
        )
        products = iter(self.words.products(moved[torch.from_numpy(by_all)]) if by_all.any() else ())
        moves = [
            next(products)[of_one] if is_by_all else self.words.products_at(of_one, moved[at])
            for at, (of_one, is_by_all) in enumerate(zip(tokens.split(counts.tolist()), by_all.tolist(), strict=True))
            if len(of_one)
        ]
        return upcast(torch.cat(moves)).numpy()

    def _may_win(self, found: Found, moved: Array, slack: Array) -> Array:
        """bool [n]: whether the scale of a token that was moved by moved +- slack can let it be better than the best known."""
        a = self.law.alpha
        with np.errstate(invalid="ignore", over="ignore"):
            # A wide scale helps below the threshold, a narrow one elsewhere.
            sign = np.where(self.best < 0, 1.0, -1.0).astype(self.best.dtype)
            drawn = np.where(self.best < 0, self.narrowest, self.widest)
            best, whole = self.best - 1e-4 * np.abs(self.best), self.whole * (1 + sign * _SLACK)
            sign, drawn, whole, best, threshold, highest = (
                column[found.rows] for column in (sign, drawn, whole, best, self.threshold, self.highest)
            )
            excess = found.loc - threshold
            left = whole - (self.words.norms.numpy()[found.tokens] * drawn) ** a
            left += self.slope * (moved + sign * slack - excess).clip(0, FAR)
            may: Array = (excess >= best * np.maximum(left, SCALE_FLOOR**a) ** (1 / a)) | (found.loc >= highest)
        return may
