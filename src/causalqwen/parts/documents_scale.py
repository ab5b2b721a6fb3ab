"""The score scale "documents": |W_k| scale, one for each token (overview 2.4)."""

from typing import TYPE_CHECKING

from torch import Tensor

from causalqwen.distributions import upcast
from causalqwen.parts.score_scale import ScoreScale

if TYPE_CHECKING:
    from causalqwen.core import Chain
    from causalqwen.modeling.action import ActionNetwork
    from causalqwen.modeling.vocabulary import Vocabulary


class DocumentsScale(ScoreScale):
    """What W makes of the scale of U', row by row."""

    def of_number(self, action: "ActionNetwork", scale: Tensor, words: "Vocabulary") -> Tensor:
        """The scale of `<NUM>`'s score [...] from that of U' [..., C]."""
        return action.scale_of_row(scale, words.number_row())

    def of_all(self, action: "ActionNetwork", scale: Tensor, words: "Vocabulary") -> Tensor:
        """scale_S [..., V']."""
        return words.scales(upcast(scale))

    def of_products(self, action: "ActionNetwork", scale: Tensor, words: "Vocabulary") -> Tensor:
        """What `linear_ovr_loss` makes the scales of: that of U' [..., C]."""
        return scale

    def number_row(self, row: Tensor, words: "Vocabulary") -> Tensor:
        """W_NUM [C] as it is."""
        return row

    def keep(self, chain: "Chain", number_scale: Tensor) -> None:
        """`<NUM>`'s scale follows its row: it is computed anew."""

    def ranked(self, chain: "Chain") -> Tensor:
        """(loc_S - C) / scale_S [..., V']; where one position of each row is asked for, and the best token alone, scales are
        computed only for tokens that can still win (`ScaleBounds`)."""
        if chain.draws.every_score or chain.features.shape[1] > 1:
            return chain.scores.ranked()
        action, words, of_rows = chain.action, chain.words, chain.loc_S[:, -1, : chain.action.rows]
        scores = words.bounds.decision_scores(of_rows, chain.scale[:, -1], chain.threshold[:, -1], action.rest_mask)
        excess = upcast(chain.loc_S[..., action.num_token_id]) - chain.threshold.squeeze(-1)
        return action.number.put(action, scores.unsqueeze(1), lambda: excess / chain.number_scale)
