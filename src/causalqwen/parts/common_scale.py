"""The score scale "common": one scale for all tokens of a position, and what is drawn of it is taken off (theory 3.5).

Every token has exogenous noise of its own that fills its scale up to a common one, which is never below what any row makes of
U': argmax_k P_k is then argmax_k loc_S, the backbone's own decision. Where individual or noise are drawn, they move a token's
loc by S(0, d_k), and its scale is what d_k leaves. The mean of P_k over the draws is P_k as it was.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from causalqwen.distributions.own_noise import own_uniforms
from causalqwen.decoding.plan import held_at
from causalqwen.distributions import FAR, SCALE_FLOOR, upcast
from causalqwen.kernels import Decisions, Race
from causalqwen.parts.score_scale import ScoreScale

if TYPE_CHECKING:
    from causalqwen.core import Chain
    from causalqwen.modeling.action import ActionNetwork
    from causalqwen.modeling.configuration import CausalQwenConfig
    from causalqwen.modeling.vocabulary import Vocabulary


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
        if chain.draws.races:
            return self._race(chain)
        if chain.drawn is None:
            return chain.loc_S
        is_bounded = chain.action.law.alpha == 2 or not chain.action.score_slope
        is_on_cpu = chain.threshold.device.type == "cpu"  # a GPU would be waited for
        all_asked = chain.draws.every_score or torch.is_grad_enabled()  # a gradient goes through all of them
        return self._winners(chain) if is_bounded and is_on_cpu and not all_asked else self._all(chain)

    def _all(self, chain: "Chain") -> Tensor:
        """(loc_S - C) / scale_S [..., V'], with the products of both locs taken at once."""
        self._both(chain)
        return chain.scores.ranked()

    def _both(self, chain: "Chain") -> None:
        """Take loc_S with what is drawn and without it in one product."""
        action, words, both = chain.action, chain.words, torch.stack([chain.loc_U, chain.loc])
        chain.integrated.loc_S, chain.loc_S = action.number.put(
            action, words.at_once(both), lambda: action.num_loc(both, words)
        )

    @torch.compiler.disable  # looks at scores
    def _winners(self, chain: "Chain") -> Tensor:
        """The same, -inf for tokens that are known to lose (theory 3.6)."""
        task = Decisions(chain)
        scores, unasked = task.ranked()
        if unasked.any():
            flat = chain._each(lambda step: step.flatten(0, -2))
            scores[unasked] = self._all(flat[unasked])
        return scores.view(*chain.threshold.shape[:-1], -1)

    def _race(self, chain: "Chain") -> Tensor:
        """S_k = loc_k + own_k Q(e3_k) [..., V'], the argmax of which decides; -inf for tokens that are known to lose."""
        asked = chain.draws.every_score or torch.is_grad_enabled() or chain.action.law.alpha != 2
        if not asked and chain.threshold.device.type == "cpu":
            return Race(chain).scores().view(*chain.threshold.shape[:-1], -1)
        if chain.drawn is not None:
            self._both(chain)
        return self.raced(chain)

    def raced(self, chain: "Chain") -> Tensor:
        """S_k [..., V'] of all tokens, the slow way."""
        loc, (seeds, positions) = upcast(chain.loc_S), chain.draws.counters
        uniform = own_uniforms(seeds, positions, loc.shape[-1]).view(loc.shape)
        return chain.scores.masked(loc + self.own(chain) * chain.action.law.quantile(uniform).to(loc.dtype), -torch.inf)

    def own(self, chain: "Chain") -> Tensor:
        """The scale of each token's own noise at temperature T [..., V'] (theory 3.5, 3.9):

            own_k^a = T^a scale^a + T^(a-1) beta max(C - loc_k, 0) - d_k^a,   loc_k with nothing drawn, d_k = |W_k| s_D
        """
        a, T, whole = chain.action.law.alpha, chain.draws.temperature, chain.integrated.scores
        power = T**a * whole.scale**a
        if whole.slope:
            power = power + T ** (a - 1) * whole.slope * (whole.threshold - upcast(whole.loc)).clamp(0, FAR)
        if chain.drawn is not None:
            power = power - chain.words.scales(chain.drawn) ** a
        return power.clamp(min=SCALE_FLOOR**a) ** (1 / a)
