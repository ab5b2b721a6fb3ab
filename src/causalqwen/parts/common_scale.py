"""The score scale "common": one scale for all tokens of a position, and what is drawn of it is taken off (theory 3.5).

Every token has exogenous noise of its own that fills its scale up to a common one, which is never below what any row makes of
U': argmax_k P_k is then argmax_k loc_S, the backbone's own decision. Where individual or noise are drawn, they move a token's
loc by S(0, d_k), and its scale is what d_k leaves. The mean of P_k over the draws is P_k as it was. Where a token's own noise
is drawn as well, the highest score decides, with nearly the softmax's probabilities.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from causalqwen.distributions import FAR, SCALE_FLOOR, own_uniforms, upcast
from causalqwen.kernels import Race
from causalqwen.parts.score_scale import ScoreScale

if TYPE_CHECKING:
    from causalqwen.core import Chain
    from causalqwen.modeling.action import ActionNetwork
    from causalqwen.modeling.vocabulary import Vocabulary


_LEFT_OUT = 1e4  # by so much do tokens that top-k, top-p and min-p leave out come after those that they keep


class CommonScale(ScoreScale):
    """One number per position where nothing is drawn, one per token where something is."""

    common = True
    widest = 3.0

    def threshold(self, chain: "Chain") -> Tensor:
        """T (C + log sum_k exp(loc_k / T)) [..., 1], float32, of loc with nothing drawn: the P_k then sum to about 1."""
        T = max(chain.draws.temperature, 1e-6)
        if T == 1 and chain.integrated is not chain:
            return chain.integrated.threshold
        return T * (upcast(chain.action.threshold) + chain.log_partition(T))

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
        """scale_S [..., 1]; under a plan that draws something, or at a temperature, `own`."""
        return super().of_chain(chain) if self._is_whole(chain) else self.own(chain)

    def number_of_chain(self, chain: "Chain") -> Tensor:
        """The same of `<NUM>` alone."""
        is_whole = self._is_whole(chain)
        return super().number_of_chain(chain) if is_whole else chain.scale_S[..., chain.action.num_token_id]

    def slope(self, chain: "Chain") -> float:
        """None is left where it is in the scale already."""
        return super().slope(chain) if self._is_whole(chain) else 0.0

    def is_common(self, chain: "Chain") -> bool:
        """Where nothing is drawn."""
        return chain.drawn is None

    def _is_whole(self, chain: "Chain") -> bool:
        return chain.drawn is None and chain.draws.temperature == 1

    def known(self, chain: "Chain") -> tuple[Tensor, float]:
        """scale_S [..., V] of the rows of the matrix once U is known, and no slope: it is in there."""
        return self._left(chain, upcast(chain.scale_U), 1.0)[..., : chain.action.rows], 0.0

    def own(self, chain: "Chain") -> Tensor:
        """own_k [..., V'], the scale of what is not drawn of each token's score at temperature T (theory 3.5, 3.9):

        own_k^a = T^a scale^a + T^(a-1) beta max(C - loc_k, 0) - d_k^a,   loc_k with nothing drawn, d_k = |W_k| s_D
        """
        return self._left(chain, chain.drawn, chain.draws.temperature)

    def _left(self, chain: "Chain", drawn: Tensor | None, temperature: float) -> Tensor:
        a, words, whole = chain.action.law.alpha, chain.words, chain.integrated.scores
        power = temperature**a * whole.scale**a
        if whole.slope:
            fallen = (chain.threshold - upcast(whole.loc)).clamp(0, FAR)
            power = power + temperature ** (a - 1) * whole.slope * fallen
        if drawn is not None:
            is_even = bool((drawn == drawn[..., :1]).all())
            power = power - (drawn[..., :1] * words.all_norms if is_even else words.scales(drawn)) ** a
        return (power.clamp(min=SCALE_FLOOR**a) ** (1 / a)).expand(whole.loc.shape)

    def ranked(self, chain: "Chain") -> Tensor:
        """loc_S [..., V'] where nothing is drawn: a scale that all share decides nothing. S_k where own noise is drawn, -inf
        for tokens that are known to lose. Else (loc_S - C) / own."""
        if not chain.draws.races:
            if chain.drawn is None:
                return chain.loc_S
            self._both(chain)
            return chain.scores.ranked()
        a_gpu_would_wait = chain.features.device.type != "cpu"
        if a_gpu_would_wait or chain.draws.every_score or torch.is_grad_enabled() or chain.action.law.alpha != 2:
            return self.raced(chain)
        return self._race(chain)

    @torch.compiler.disable  # looks at scores
    def _race(self, chain: "Chain") -> Tensor:
        with torch.autocast("cpu", enabled=False):  # bounds are no better than what they follow from
            return Race(chain).scores().view(chain.loc_S.shape)

    def raced(self, chain: "Chain") -> Tensor:
        """S_k = loc_k + own_k Q(e3_k) [..., V'] of all tokens, the slow way.

        Where every score is wanted, tokens that are left out come after all others, the likeliest first.
        """
        draws: Any = chain.draws  # a plan's: nothing else runs a race
        loc, law = self.in_race(chain), chain.action.law
        seeds, positions = draws.counters()
        normals = law.quantile(own_uniforms(seeds, positions, loc.shape[-1])).to(loc.dtype)
        if (given := draws.exceptions()) is not None:
            rows, tokens, values = (column.to(loc.device) for column in given)
            normals[rows, tokens] = values.to(loc.dtype)
        scores = loc + self.own(chain) * normals.view(loc.shape)
        if draws.restricts and draws.every_score:
            scores = torch.where(loc == -torch.inf, self._masked(chain, chain.integrated.loc_S) - _LEFT_OUT, scores)
        return scores

    def in_race(self, chain: "Chain") -> Tensor:
        """loc_S [..., V'], float32 at least, -inf for tokens that take no part: those that the plan leaves out, too. What the
        population average would say decides which: loc_S with nothing drawn, the logits of a softmax's samplers."""
        self._both(chain)
        draws: Any = chain.draws
        loc = self._masked(chain, chain.loc_S)
        if not draws.restricts:
            return loc
        return loc.masked_fill(draws.left_out(self._masked(chain, chain.integrated.loc_S)), -torch.inf)

    def _masked(self, chain: "Chain", loc: Tensor) -> Tensor:
        used = chain.action.columns_in_use
        return upcast(loc) if used is None else upcast(loc).masked_fill(~used, -torch.inf)

    def _both(self, chain: "Chain") -> None:
        """Take loc_S with what is drawn and without it in one product."""
        if not chain.draws.moves:
            chain.integrated.loc_S = chain.loc_S
            return
        action, words, both = chain.action, chain.words, torch.stack([chain.loc_U, chain.loc])
        chain.integrated.loc_S, chain.loc_S = action.number.put(
            action, words.at_once(both), lambda: action.num_loc(both, words)
        )

    def of_held(self, chain: "Chain") -> tuple[Tensor, Tensor]:
        """(loc_S, own) [B, S, V'] where somebody is held for the text; loc_S is -inf for rows that no token uses.

        Where scale_U is the same at all positions, they move a score by the same everywhere: one row more in one product.
        """
        scale, action, words = chain.scale_U[:, :1], chain.action, chain.words
        if bool((chain.scale_U == scale).all()):
            moved = chain.draws.move(torch.zeros_like(scale), scale, action.noise, action.law)
            rows = torch.cat([chain.loc_U, moved.to(chain.loc_U.dtype)], dim=1)
            products = words.products(rows.flatten(0, -2)).view(*rows.shape[:-1], -1)
            scores = products[:, :-1] if words.bias is None else products[:, :-1] + words.bias
            chain.integrated.loc_S = action.number.put(action, scores, lambda: action.num_loc(chain.loc_U, words))
            of_number = action.num_loc(chain.loc, words)
            chain.loc_S = action.number.put(action, scores + products[:, -1:], lambda: of_number)
        else:
            self._both(chain)
        used, own = action.columns_in_use, self.own(chain)
        return chain.loc_S if used is None else chain.loc_S.masked_fill(~used, -torch.inf), own
