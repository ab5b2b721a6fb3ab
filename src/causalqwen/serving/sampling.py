"""Softmax sampling whose draws belong to rows: what a request gets does not depend on its company."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor

from causalqwen.distributions import NOISE_STREAM, uniform_draws

_GREEDY = 1e-4  # a lower temperature takes the best token


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
        ordered = probs.sort(dim=-1, descending=True).values
        size = (ordered.cumsum(-1) - ordered < self.top_ps).sum(-1, keepdim=True).clamp(min=1)
        upto = probs.masked_fill(probs < ordered.gather(-1, size - 1), 0.0).cumsum(-1)
        draws = uniform_draws(self.seeds, NOISE_STREAM, positions, 1)
        drawn = torch.searchsorted(upto, draws * upto[:, -1:])
        chosen = torch.where(self.temperatures < _GREEDY, scores.argmax(-1, keepdim=True), drawn)
        return torch.full_like(scores, -torch.inf).scatter_(-1, chosen, 0.0)
