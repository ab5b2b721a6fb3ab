"""The score scale "equal", an older form of "common" that checkpoints may have: wider than any row needs, so that individuals
were left next to nothing, and drawn times a unit that was fitted (theory 3.5)."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from causalqwen.decoding.draws import QuantileReader
from causalqwen.parts.score_scale import ScoreScale

if TYPE_CHECKING:
    from causalqwen.core import Chain
    from causalqwen.modeling.action import ActionNetwork
    from causalqwen.modeling.vocabulary import Vocabulary


class EqualScale(ScoreScale):
    """One number per position, whatever is drawn."""

    common = True
    older = (
        "this checkpoint was made before individuals were drawn by their own law: its tokens read what is drawn times a unit "
        "that was fitted (score_scale='equal'). It does what it did; graft anew for one law"
    )

    def buffers(self, causal_size: int) -> dict[str, tuple[int, float]]:
        """draw_unit [C], by which tokens multiply a drawn coordinate; draw_slope [2], slope and origin of its growth."""
        return {"draw_unit": (causal_size, 1.0), "draw_slope": (2, 0.0)}

    def reader(self, chain: "Chain") -> QuantileReader:
        """e1 and e2 on a central mass, times the unit."""
        return QuantileReader(chain.action.law, chain.model.config.central_mass, chain.action.get_buffer("draw_unit"))

    def gain(self, chain: "Chain") -> Tensor | float:
        """exp(slope (entropy - origin)) [..., 1]: the unit grows where the anchors leave more open."""
        if chain.action.partition is None:
            return 1.0
        slope, origin = chain.action.get_buffer("draw_slope")
        return (slope * (chain.action.partition.entropy(chain.features, chain.loc_U, chain.words) - origin)).exp()

    def bound(self, action: "ActionNetwork", scale: Tensor, words: "Vocabulary") -> Tensor:
        """m . scale [...], m_j = max_k |W_kj|."""
        return action.common_scale(scale, words)

    def number_row(self, row: Tensor, words: "Vocabulary") -> Tensor:
        """W_NUM [C] within +-m, so that the common scale bounds `<NUM>`'s too, and never moves with it."""
        limit = words.largest.to(row.dtype)
        return torch.maximum(torch.minimum(row, limit), -limit)

    def ranked(self, chain: "Chain") -> Tensor:
        """loc_S [..., V']: a scale that all share decides nothing."""
        return chain.loc_S
