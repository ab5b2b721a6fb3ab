"""The score scale "common": one scale for all tokens of a position, and what is drawn of it is taken off (theory 3.5).

Every token has exogenous noise of its own that fills its scale up to a common one, which is never below what any row makes of
U': argmax_k P_k is then argmax_k loc_S, the backbone's own decision. Where individual or noise are drawn, they move a token's
loc by S(0, d_k), and its scale is what d_k leaves. The mean of P_k over the draws is P_k as it was.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from causalqwen.decoding.plan import held_at
from causalqwen.distributions import SCALE_FLOOR, upcast
from causalqwen.kernels import Decisions
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
        if chain.drawn is None:
            return chain.loc_S
        is_bounded = chain.action.law.alpha == 2 or not chain.action.score_slope
        is_on_cpu = chain.threshold.device.type == "cpu"  # a GPU would be waited for
        all_asked = chain.draws.every_score or torch.is_grad_enabled()  # a gradient goes through all of them
        return self._winners(chain) if is_bounded and is_on_cpu and not all_asked else self._all(chain)

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
        scores, unasked = task.ranked()
        if unasked.any():
            flat = chain._each(lambda step: step.flatten(0, -2))
            scores[unasked] = self._all(flat[unasked])
        return scores.view(*chain.threshold.shape[:-1], -1)
