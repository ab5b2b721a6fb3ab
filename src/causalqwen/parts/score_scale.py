"""What every score scale says of itself, and what most of them say alike."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from causalqwen.decoding.draws import QuantileReader

if TYPE_CHECKING:
    from causalqwen.core import Chain
    from causalqwen.modeling.action import ActionNetwork
    from causalqwen.modeling.configuration import CausalQwenConfig
    from causalqwen.modeling.vocabulary import Vocabulary


class ScoreScale:
    """How scale_S follows from the scale of U', and how tokens read what is drawn of it; here, as one scale for all of them.

    common: whether all tokens of a position have one scale where nothing is drawn, so that it decides nothing. one_law: whether
    what is drawn at a temperature up to 1, and what it leaves, are together the law, of tokens and of values. older: what
    somebody is told who loads a checkpoint that has it, if it is not made any more.
    """

    common = False
    one_law = False
    older = ""

    def bound(self, action: "ActionNetwork", scale: Tensor, words: "Vocabulary") -> Tensor:
        """At least |W_k| scale for every row k, [...], from the scale of U' [..., C]."""
        raise NotImplementedError

    def buffers(self, causal_size: int) -> dict[str, tuple[int, float]]:
        """What a checkpoint keeps of it beside the parameters of the action law: sizes and start values, by name."""
        return {}

    def reader(self, chain: "Chain") -> QuantileReader:
        """How tokens read e1 and e2: by their law's quantile function."""
        return QuantileReader(chain.action.law, chain.model.config.central_mass)

    def widest(self, config: "CausalQwenConfig") -> float:
        """The largest spread of g that is looked for in somebody's words. Those of one text resemble each other more than those
        of one person: beyond it, what fits the text that was heard fits their next one worse (experiments 8)."""
        return 0.2

    def gain(self, chain: "Chain") -> Tensor | float:
        """[..., 1], by which tokens read more of what is drawn at some positions."""
        return 1.0

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
