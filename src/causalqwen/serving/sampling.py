"""Softmax sampling whose draws belong to rows: what a request gets does not depend on its company."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor

from causalqwen.distributions import NOISE_STREAM, uniform_draws

_GREEDY = 1e-4  # a lower temperature takes the best token
_LIKELY = 1024  # tokens among which a nucleus mostly ends


class RowSampler(LogitsProcessor):
    """Chooses the token itself: the one whose share of the unit interval e falls into, e from (seed, position).

    With p = softmax(scores / T), tokens in the order of their ids take intervals of length p_k, those outside the nucleus
    none; the nucleus is the smallest set of likeliest tokens that weighs top_p. T, top_p and seed are per row.

    Args:
        seeds, temperatures, top_ps: one per row. lengths: tokens of each prompt. width: that of the padded batch.
    """

    def __init__(
        self,
        seeds: Sequence[int],
        temperatures: Sequence[float],
        top_ps: Sequence[float],
        lengths: Sequence[int],
        width: int,
        device: torch.device,
    ) -> None:
        self.seeds, self.lengths = (torch.tensor(row, device=device) for row in (seeds, lengths))
        columns = [torch.tensor(row, dtype=torch.float64, device=device) for row in (temperatures, top_ps)]
        self.temperatures, self.top_ps = (column.unsqueeze(-1) for column in columns)
        self.width = width

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        positions = self.lengths + (input_ids.shape[1] - self.width - 1)
        probs = torch.softmax(scores.double() / self.temperatures.clamp(min=_GREEDY), dim=-1)
        shares, ids = self._nucleus(probs)
        upto = shares.cumsum(-1)
        draws = uniform_draws(self.seeds, NOISE_STREAM, positions, 1)
        drawn = torch.searchsorted(upto, draws * upto[:, -1:])
        if ids is not None:
            drawn = ids.gather(-1, drawn)
        if (self.temperatures < _GREEDY).any():
            drawn = torch.where(self.temperatures < _GREEDY, scores.argmax(-1, keepdim=True), drawn)
        return torch.full_like(scores, -torch.inf).scatter_(-1, drawn, 0.0)

    def _nucleus(self, probs: Tensor) -> tuple[Tensor, Tensor | None]:
        """The shares [B, n] of tokens with 0 for those outside the nucleus, and these tokens' ids, ascending; None for all.

        A nucleus that ends among the likeliest few is found without an order of the whole vocabulary.
        """
        if (self.top_ps >= 1).all():
            return probs, None
        for count in (min(_LIKELY, probs.shape[-1]), probs.shape[-1]):
            ordered, ids = probs.topk(count)
            size = (ordered.cumsum(-1) - ordered < self.top_ps).sum(-1, keepdim=True).clamp(min=1)
            least = ordered.gather(-1, size - 1)
            if (ordered[:, -1:] < least).all():  # whatever is as likely as the last one inside is among them
                ids, order = ids.sort(-1)
                shares = ordered.gather(-1, order)
                return shares.masked_fill(shares < least, 0.0), ids
        return probs.masked_fill(probs < least, 0.0), None
