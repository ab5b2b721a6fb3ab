"""What every score scale says of itself, and what most of them say alike."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from causalqwen.distributions import upcast

if TYPE_CHECKING:
    from causalqwen.core import Chain
    from causalqwen.modeling.action import ActionNetwork
    from causalqwen.modeling.vocabulary import Vocabulary


class ScoreScale:
    """How scale_S follows from the scale of U'; here, as one scale for all tokens of a position.

    common: whether all tokens of a position have one scale where nothing is drawn, so that it decides nothing. Own noise then
    fills each token's scale up to it. widest: the largest spread of g that is looked for in somebody's words. Those of one text
    resemble each other more than those of one person: beyond it, what fits the text that was observed fits their next one worse
    (experiments 8).
    """

    common = False
    widest = 0.2

    def threshold(self, chain: "Chain") -> Tensor:
        """C [..., 1], float32: the same at every position (overview 2.5)."""
        return upcast(chain.action.threshold).expand(*chain.loc_U.shape[:-1], 1)

    def bound(self, action: "ActionNetwork", scale: Tensor, words: "Vocabulary") -> Tensor:
        """At least |W_k| scale for every row k, [...], from the scale of U' [..., C]."""
        raise NotImplementedError

    def of_number(self, action: "ActionNetwork", scale: Tensor, words: "Vocabulary") -> Tensor:
        """The scale of `<NUM>`'s score [...] from that of U' [..., C]; of any other's too: the bound and the score noise."""
        bound = self.bound(action, scale, words)
        return action.law.add(bound, torch.full_like(bound, action.score_noise)) if action.score_noise else bound

    def of_all(self, action: "ActionNetwork", scale: Tensor, words: "Vocabulary") -> Tensor:
        """scale_S [..., 1] or [..., V'] from that of U' [..., C]."""
        return self.of_number(action, scale, words).unsqueeze(-1)

    def of_products(self, action: "ActionNetwork", scale: Tensor, words: "Vocabulary") -> Tensor:
        """What `linear_ovr_loss` makes the scales of: the common one [...], or that of U' [..., C]."""
        return self.of_number(action, scale, words)

    def keep(self, chain: "Chain", number_scale: Tensor) -> None:
        """A scale [...] of `<NUM>`'s score that was kept is right whatever row `<NUM>` has by now."""
        chain.number_scale = number_scale

    def of_chain(self, chain: "Chain") -> Tensor:
        """scale_S [..., 1] or [..., V'], what is drawn left out."""
        return self.of_all(chain.action, chain.scale, chain.words)

    def number_of_chain(self, chain: "Chain") -> Tensor:
        """The same of `<NUM>` alone, [...]."""
        return self.of_number(chain.action, chain.scale, chain.words)

    def slope(self, chain: "Chain") -> float:
        """Of a token's own noise below its threshold, as far as scale_S is without it."""
        return chain.action.score_slope

    def is_common(self, chain: "Chain") -> bool:
        """Whether scale_S is the same for all tokens of a position."""
        return self.common

    def known(self, chain: "Chain") -> tuple[Tensor, float]:
        """scale_S [..., 1] or [..., V] of the rows of the matrix once U is known, what the noise alone gives, and the slope."""
        noise = chain.action.noise.expand_as(chain.scale_U)
        return self.of_all(chain.action, noise, chain.words)[..., : chain.action.rows], chain.action.score_slope

    def ranked(self, chain: "Chain") -> Tensor:
        """What the decision is the argmax of, [..., V']."""
        return chain.scores.ranked()
