"""The threshold shift "solved": at every position the threshold at which its P_k sum to 1 (theory 3.5)."""

import torch
from torch import Tensor

from causalqwen.core import Chain


class SolvedThreshold:
    """Found from all scores of a position, that of nobody in particular: what is drawn there does not move it."""

    solves = True  # there is no better one to compare with

    @torch.no_grad()
    def threshold(self, chain: Chain) -> Tensor:
        """[..., 1]."""
        everybody = Chain(chain.model, chain.features, words=chain.words)
        everybody.loc_U, everybody.scale_U = chain.loc_U, chain.scale_U
        everybody.threshold = torch.zeros_like(chain.scale_U[..., :1])  # not known yet, and not looked at
        thresholds = [part.scores.solved().threshold for part in everybody.parts()]
        return torch.cat(thresholds).view(*chain.loc_U.shape[:-1], 1)
