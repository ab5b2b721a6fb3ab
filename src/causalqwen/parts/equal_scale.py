"""The score scale "equal": one scale for all tokens of a position (theory 3.5).

Every token has exogenous noise of its own that tops its scale up to the common one, m . scale, m_j = max_k |W_kj|: argmax_k P_k
is then argmax_k loc_S, the backbone's own decision. What its own noise adds beyond that (`score_noise`) is the same for all.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from causalqwen.core import Chain
    from causalqwen.modeling.action import ActionNetwork
    from causalqwen.modeling.vocabulary import Vocabulary


class EqualScale:
    """One number per position."""

    common = True

    def of_number(self, action: "ActionNetwork", scale: Tensor, words: "Vocabulary") -> Tensor:
        """The scale of `<NUM>`'s score [...], and of any other's, from that of U' [..., C]."""
        common = action.common_scale(scale, words)
        return action.law.add(common, torch.full_like(common, action.score_noise)) if action.score_noise else common

    def of_all(self, action: "ActionNetwork", scale: Tensor, words: "Vocabulary") -> Tensor:
        """scale_S [..., 1]."""
        return self.of_number(action, scale, words).unsqueeze(-1)

    def of_products(self, action: "ActionNetwork", scale: Tensor, words: "Vocabulary") -> Tensor:
        """What `linear_ovr_loss` makes the scales of: the common one [...]."""
        return self.of_number(action, scale, words)

    def number_row(self, row: Tensor, words: "Vocabulary") -> Tensor:
        """W_NUM [C] within +-m, so that the common scale bounds `<NUM>`'s too, and never moves with it."""
        limit = words.largest.to(row.dtype)
        return torch.maximum(torch.minimum(row, limit), -limit)

    def keep(self, chain: "Chain", number_scale: Tensor) -> None:
        """A scale [...] of `<NUM>`'s score that was kept is right whatever row `<NUM>` has by now."""
        chain.number_scale = number_scale

    def ranked(self, chain: "Chain") -> Tensor:
        """loc_S [..., V']: a scale that all share decides nothing."""
        return chain.loc_S
