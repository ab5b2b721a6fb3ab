"""The score scale "common": one scale for all tokens of a position, and what is drawn of it is taken off (theory 3.5).

Every token has exogenous noise of its own that fills its scale up to a common one, which is never below what any row makes of
U': argmax_k P_k is then argmax_k loc_S, the backbone's own decision. Where individual or noise are drawn, they move a token's
loc by S(0, d_k), and its scale is what d_k leaves. The mean of P_k over the draws is P_k as it was.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from causalqwen.decoding.plan import held_at
from causalqwen.distributions import FAR, SCALE_FLOOR, upcast
from causalqwen.kernels import Array, Blocks, least_excess
from causalqwen.parts.score_scale import ScoreScale

if TYPE_CHECKING:
    from causalqwen.core import Chain
    from causalqwen.modeling.action import ActionNetwork
    from causalqwen.modeling.configuration import CausalQwenConfig
    from causalqwen.modeling.vocabulary import Vocabulary

_FEW = 32  # candidates of a position, which cost what it costs to ask how far each was moved
_SHARE = 1 / 64  # of the vocabulary: the products of so many rows cost what a position adds to a product with all
_PRODUCT = 1 / 4  # of the vocabulary: so many, of all positions, cost what the first costs
_RANKED = 1 / 8  # as much as `_SHARE`: a row's score costs so much more than its product
_SLACK = 1e-5  # float32 rounding of a scale
_ROUNDING = {torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 1e-5, torch.float64: 1e-9}
"""Of a product with the matrix, relative to the length of a row."""


class CommonScale(ScoreScale):
    """One number per position where nothing is drawn, one per token where something is."""

    common = one_law = True

    def widest(self, config: "CausalQwenConfig") -> float:
        """That of the people whom presets by name hold for a text."""
        return held_at(config.text_temperature)

    def bound(self, action: "ActionNetwork", scale: Tensor, words: "Vocabulary") -> Tensor:
        """min(max_j scale_j max_k |W_k|_a, m . scale) [...], |W_k|_a the row's a-norm, m_j = max_k |W_kj|.

        Both are at least |W_k| scale for every k; the longest row reaches the first where scale is the same for all
        coordinates, as at the start.
        """
        scale = upcast(scale)
        longest = scale.amax(-1) * words.longest
        return torch.minimum(longest, action.common_scale(scale, words)).clamp(min=SCALE_FLOOR)

    def number_row(self, row: Tensor, words: "Vocabulary") -> Tensor:
        """W_NUM [C] within +-m, and no longer than the longest row: the common scale bounds `<NUM>`'s too, and never moves with
        it."""
        limit, longest = words.largest.to(row.dtype), words.longest.to(row.dtype)
        row = torch.maximum(torch.minimum(row, limit), -limit)
        length = torch.linalg.vector_norm(row, words.action.law.alpha).clamp(min=SCALE_FLOOR)
        return row * (longest / length).clamp(max=1.0)

    def of_chain(self, chain: "Chain") -> Tensor:
        """scale_S [..., 1]; where something is drawn, [..., V'], a token's own noise below its threshold included."""
        return super().of_chain(chain) if chain.drawn is None else self.left(chain.integrated, chain.drawn)

    def number_of_chain(self, chain: "Chain") -> Tensor:
        """The same of `<NUM>` alone."""
        return super().number_of_chain(chain) if chain.drawn is None else chain.scale_S[..., chain.action.num_token_id]

    def slope(self, chain: "Chain") -> float:
        """None is left where something is drawn."""
        return super().slope(chain) if chain.drawn is None else 0.0

    def is_common(self, chain: "Chain") -> bool:
        """Where nothing is drawn."""
        return chain.drawn is None

    def known(self, chain: "Chain") -> tuple[Tensor, float]:
        """scale_S [..., V] of the rows of the matrix once U is known, and no slope: it is in there."""
        return self.left(chain, upcast(chain.scale_U))[..., : chain.action.rows], 0.0

    def left(self, chain: "Chain", drawn: Tensor) -> Tensor:
        """(scale_k^a - d_k^a)^(1/a) [..., V'], d_k = |W_k| drawn, of a chain with nothing drawn; drawn [..., C]."""
        a, words = chain.action.law.alpha, chain.words
        is_even = bool((drawn == drawn[..., :1]).all())
        taken = (drawn[..., :1] * words.all_norms if is_even else words.scales(drawn)) ** a
        return (chain.scores.graded() ** a - taken).clamp(min=SCALE_FLOOR**a) ** (1 / a)

    def ranked(self, chain: "Chain") -> Tensor:
        """loc_S [..., V'] where nothing is drawn: a scale that all share decides nothing. Else (loc_S - C) / scale_S, where the
        best token alone is asked for only of tokens that can still win (`_winners`)."""
        if chain.drawn is None:
            return chain.loc_S
        is_bounded = chain.action.law.alpha == 2 or not chain.action.score_slope
        is_worth_it = is_bounded and chain.threshold.device.type == "cpu" and not chain.draws.every_score
        return self._winners(chain) if is_worth_it else self._all(chain)  # a GPU would be waited for

    def _all(self, chain: "Chain") -> Tensor:
        """(loc_S - C) / scale_S [..., V'], with the products of both locs taken at once."""
        action, words, both = chain.action, chain.words, torch.stack([chain.loc_U, chain.loc])
        of_both = action.number.put(action, words.at_once(both), lambda: action.num_loc(both, words))
        chain.integrated.loc_S, chain.loc_S = of_both
        return chain.scores.ranked()

    @torch.compiler.disable  # looks at scores
    def _winners(self, chain: "Chain") -> Tensor:
        """The same, -inf for tokens that are known to lose (theory 3.6)."""
        task = Decisions(chain)
        found = task.candidates()
        if task.slope:
            found = task.closer(found)
        is_many = task.many(task.counts(found), _RANKED)
        if is_many.any():
            found = found.where(~is_many[found.rows])
        scores = torch.full((len(is_many), chain.action.rows + chain.action.number.columns), -torch.inf)
        scores = scores.to(task.moved.dtype)
        scores.numpy()[found.rows, found.tokens] = task.ranks(found)
        if chain.action.num_token_id is not None:
            scores.numpy()[:, chain.action.num_token_id] = task.of_number
        if is_many.any():
            flat = chain._each(lambda step: step.flatten(0, -2))
            scores[is_many] = self._all(flat[torch.from_numpy(is_many)])
        return scores.view(*chain.threshold.shape[:-1], -1)


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
        action, words = chain.action, chain.words
        self.law, self.slope, self.words, a = action.law, action.score_slope, words, action.law.alpha
        loc, self.threshold = chain.loc.flatten(0, -2), upcast(chain.threshold).flatten().numpy()
        self.scores = words.at_once(loc)
        if len(words.no_words):
            self.scores.index_fill_(-1, words.no_words, -torch.inf)
        self.whole = (chain.integrated.scale_S.flatten() ** a).clamp(min=SCALE_FLOOR**a).numpy()
        self.drawn = chain.drawn.flatten(0, -2)
        self.widest, self.narrowest = self.drawn.amax(-1).numpy(), self.drawn.amin(-1).numpy()
        self.moved = (upcast(chain.loc) - upcast(chain.loc_U)).flatten(0, -2)
        self.reach = torch.linalg.vector_norm(self.moved, torch.inf if a == 1 else a / (a - 1), dim=-1).numpy()
        self.together = (self.moved @ words.center.to(self.moved.dtype)).numpy()
        self.of_number = np.full_like(self.threshold, -np.inf)
        if action.num_token_id is not None:
            row, of_number = upcast(words.number_row()), upcast(action.num_loc(loc, words).to(loc.dtype)).numpy()
            taken = self.law.linear_scale(self.drawn, row.unsqueeze(0).to(self.drawn.dtype))[:, 0] ** a
            along = self.moved @ row.to(self.moved.dtype)
            self.of_number = self._ranks(of_number, slice(None), along.numpy(), taken.numpy())

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
        slack = _ROUNDING[self.scores.dtype] * self.words.norms.numpy()[others.tokens] * self.reach[others.rows]
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
