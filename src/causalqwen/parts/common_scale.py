"""The score scale "common": one scale for all tokens of a position, and what is drawn of it is taken off (theory 3.5).

Every token has exogenous noise of its own that fills its scale up to a common one, which is never below what any row makes of
U': argmax_k P_k is then argmax_k loc_S, the backbone's own decision. Where individual or noise are drawn, they move a token's
loc by S(0, d_k), and its scale is what d_k leaves. The mean of P_k over the draws is P_k as it was.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from causalqwen.decoding.plan import held_at
from causalqwen.distributions import FAR, SCALE_FLOOR, upcast
from causalqwen.kernels import Blocks, least_excess, places
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
        longest = scale.amax(-1) * words.norms.max()
        return torch.minimum(longest, action.common_scale(scale, words)).clamp(min=SCALE_FLOOR)

    def number_row(self, row: Tensor, words: "Vocabulary") -> Tensor:
        """W_NUM [C] within +-m, and no longer than the longest row: the common scale bounds `<NUM>`'s too, and never moves with
        it."""
        limit, longest = words.largest.to(row.dtype), words.norms.max().to(row.dtype)
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
        rows, tokens = task.candidates()
        if task.slope:
            rows, tokens = task.closer(rows, tokens)
        is_many = task.many(task.counts(rows), _RANKED)
        rows, tokens = _chosen(~is_many[rows], rows, tokens)
        scores = torch.full_like(task.columns, -torch.inf, dtype=task.threshold.dtype)
        scores[rows, tokens] = task.ranks(rows, tokens)
        if is_many.any():
            flat = chain._each(lambda step: step.flatten(0, -2))
            scores[is_many] = self._all(flat[is_many])
        return scores.view(*chain.threshold.shape[:-1], -1)


def _chosen(mask: Tensor, rows: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Those candidates where mask, bool [n], is True."""
    at = places(mask)
    return rows.index_select(0, at), tokens.index_select(0, at)


class Decisions:
    """Who may be the best of N positions where something is drawn, and by how much; positions flat, [N, ...].

    columns: loc_S [N, V'], -inf for rows of no token. whole: scale_S^a [N] with nothing drawn. moved: what is drawn, [N, C];
    drawn: its scale. norms, distances: how long each token's row is, and how far from the mean row, [V']. together: how far the
    mean row is moved, [N]; each token's is within its distance times reach [N] of it.
    """

    def __init__(self, chain: "Chain") -> None:
        action, in_use = chain.action, chain.action.columns_in_use
        self.action, self.law, self.slope, self.words = action, action.law, action.score_slope, chain.words
        loc, self.threshold = chain.loc.flatten(0, -2), upcast(chain.threshold).flatten()
        columns = action.number.put(action, self.words.at_once(loc), lambda: action.num_loc(loc, self.words))
        self.columns = columns.contiguous()
        if in_use is not None:
            self.columns.index_fill_(-1, (~in_use).nonzero().flatten(), -torch.inf)
        a = self.law.alpha
        self.whole = (chain.integrated.scale_S.flatten() ** a).clamp(min=SCALE_FLOOR**a)
        self.drawn = chain.drawn.flatten(0, -2)
        self.moved = (upcast(chain.loc) - upcast(chain.loc_U)).flatten(0, -2)
        self.reach = torch.linalg.vector_norm(self.moved, torch.inf if a == 1 else a / (a - 1), dim=-1)
        self.together = self.moved @ self.words.center.to(self.moved.dtype)
        self.norms, self.distances = self.words.all_norms, self.words.distances

    def counts(self, rows: Tensor) -> Tensor:
        """How many candidates each position has, int64 [N]."""
        return rows.bincount(minlength=len(self.columns))

    def many(self, counts: Tensor, share: float = 1.0) -> Tensor:
        """bool [N]: the positions with so many candidates that a product with all tokens costs less than theirs; `share` for
        what takes 1/share of a product's time."""
        width = share * self.columns.shape[-1]
        is_many = counts > _SHARE * width
        return is_many & (counts[is_many].sum() > _PRODUCT * width)

    def ranks(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """(loc_S - C) / scale_S [n] of some tokens, exactly."""
        a, weight = self.law.alpha, self.words.rows_at(tokens)
        excess = self._loc(rows, tokens) - self.threshold.index_select(0, rows)
        fallen = torch.linalg.vecdot(weight, self.moved[rows]) - excess  # of nobody in particular, below C
        taken = torch.linalg.vector_norm(weight * self.drawn[rows], a, dim=-1) ** a
        left = self.whole[rows] + self.slope * fallen.clamp(0, FAR) - taken
        return excess / self.law.root(left.clamp(min=SCALE_FLOOR**a))

    def candidates(self) -> tuple[Tensor, Tensor]:
        """Rows and tokens that may be the best, by the longest row of a block of tokens, then by each one's own."""
        blocks = Blocks(self.columns)
        lengths, distances = Blocks(torch.stack([self.norms, self.distances])).reached.unsqueeze(1)
        self.highest = blocks.best
        rows, tokens = blocks.at_least(blocks.best.unsqueeze(-1))
        nobody = torch.full_like(self.threshold, -torch.inf)
        self.best = nobody.scatter_reduce(0, rows, self.ranks(rows, tokens), "amax")
        most_moved = (self.together.unsqueeze(-1) + distances * self.reach.unsqueeze(-1)).clamp(min=0)
        most_drawn = (lengths * self.drawn.amax(-1, keepdim=True)) ** self.law.alpha
        best, whole, threshold = (column.unsqueeze(-1) for column in (self.best, self.whole, self.threshold))
        least = threshold + least_excess(best, whole, self.slope, self.law, most_moved, most_drawn)
        # Whatever rounding does, and where a score is infinite, the best that is known is kept.
        rows, tokens = blocks.at_least(torch.fmin(least, self.highest.unsqueeze(-1)))
        reach = self.distances.index_select(0, tokens) * self.reach.index_select(0, rows)
        return _chosen(self._may_win(rows, tokens, self.together.index_select(0, rows), reach), rows, tokens)

    def closer(self, rows: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The same candidates; where a position has more than a few, those that win by how far each of them was moved, too."""
        counts = self.counts(rows)
        asked = counts > _FEW
        if not asked.any():
            return rows, tokens
        is_asked = asked.index_select(0, rows)
        others, of_others = _chosen(is_asked, rows, tokens)
        known = self._moves(counts * asked, others, of_others)
        lengths = self.norms.index_select(0, of_others) * self.reach.index_select(0, others)
        slack = _ROUNDING[self.words.weight.dtype] * lengths
        left = _chosen(self._may_win(others, of_others, known, slack), others, of_others)
        rows, tokens = _chosen(~is_asked, rows, tokens)
        return torch.cat([rows, left[0]]), torch.cat([tokens, left[1]])

    def _moves(self, counts: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
        """How far each candidate was moved, [n]: W_k moved. rows: in order, so many of each position as counts [N] says."""
        moved, number, by_all = self.moved.to(self.words.weight.dtype), self.action.num_token_id, self.many(counts)
        products = iter(self.words.products(moved[by_all]) if by_all.any() else ())
        found = [
            next(products)[of_one.clamp(max=self.action.rows - 1)]
            if is_by_all
            else self.words.products_at(of_one, moved[at])
            for at, (of_one, is_by_all) in enumerate(zip(tokens.split(counts.tolist()), by_all.tolist(), strict=True))
            if len(of_one)
        ]
        known = upcast(torch.cat(found))
        if number is None:
            return known
        return torch.where(tokens == number, (self.moved @ upcast(self.words.number_row()))[rows], known)

    def _may_win(self, rows: Tensor, tokens: Tensor, moved: Tensor, slack: Tensor) -> Tensor:
        """bool [n]: whether the scale of a token that was moved by moved +- slack can let it be better than the best known."""
        a, best = self.law.alpha, self.best
        # A wide scale helps below the threshold, a narrow one elsewhere.
        sign = torch.where(best < 0, 1.0, -1.0).to(best.dtype)
        drawn = torch.where(best < 0, self.drawn.amin(-1), self.drawn.amax(-1))
        of_row = (sign, drawn, self.whole * (1 + sign * _SLACK), best - 1e-4 * best.abs(), self.threshold, self.highest)
        sign, drawn, left, best, threshold, highest = (column.index_select(0, rows) for column in of_row)
        loc = self._loc(rows, tokens)
        excess = loc - threshold
        left = left - (self.norms.index_select(0, tokens) * drawn) ** a
        left += self.slope * (moved + sign * slack - excess).clamp(0, FAR)
        least = best * self.law.root(left.clamp(min=SCALE_FLOOR**a))
        return (excess >= least) | (loc >= highest)

    def _loc(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """loc_S [n] of some tokens."""
        return upcast(self.columns.view(-1).index_select(0, rows * self.columns.shape[-1] + tokens))
