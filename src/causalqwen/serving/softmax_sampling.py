"""Softmax sampling whose draws belong to rows: what a request gets does not depend on its company."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor

from causalqwen.distributions import NOISE_STREAM, uniform_draws

_GREEDY = 1e-4  # a lower temperature takes the best token
_CELL = 64  # tokens of neighbouring ids that are added up, or passed over, as one
_LIKELY = 64, 1024  # tokens among which most nuclei end, and nearly all


class RowSoftmaxSampler(LogitsProcessor):
    """Chooses the token itself: the one whose share of the unit interval e falls into, e from (seed, position).

    With p = softmax(scores / T), tokens in the order of their ids take intervals of length p_k, those outside the nucleus
    none; the nucleus is the smallest set of likeliest tokens that weighs top_p, and those as likely as its last one. T, top_p
    and seed are per row. Shares are float32's, to 1e-7 |x| of themselves, x = (score - highest)/T; cells add up in float64.

    Args:
        seeds, temperatures, top_ps: one per row. lengths: tokens of each prompt. width: that of the padded batch.
    """

    chooses = True

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
        size = scores.shape[-1]
        shares = scores.new_empty((len(scores), -(-size // _CELL) * _CELL), dtype=torch.float32)
        shares[:, :size], shares[:, size:] = scores, -torch.inf
        shares.sub_(shares.amax(-1, keepdim=True)).div_(self.temperatures.clamp(min=_GREEDY).float()).exp_()
        cells = shares.unflatten(-1, (-1, _CELL))
        drawn = self._draw(cells, uniform_draws(self.seeds, NOISE_STREAM, positions, 1))
        greedy = (self.temperatures < _GREEDY).squeeze(-1)
        drawn[greedy] = scores[greedy].argmax(-1, keepdim=True)
        return shares.fill_(-torch.inf).scatter_(-1, drawn, 0.0)[:, :size]  # no second piece of memory of this size

    def _draw(self, cells: Tensor, draws: Tensor) -> Tensor:
        """Tokens [B, 1] by shares [B, n, _CELL] and draws [B, 1]; a nucleus is looked for among ever more tokens."""
        of_cells = cells.sum(-1)
        drawn, rows = _fall(cells, of_cells, draws), (self.top_ps < 1).squeeze(-1).nonzero()
        if not len(rows):
            return drawn
        masses, tops = self.top_ps * of_cells.sum(-1, keepdim=True, dtype=torch.float64), cells.amax(-1)
        for count in (*_LIKELY, tops.shape[1] * _CELL):
            chosen = rows.squeeze(-1)
            highest = tops[chosen].topk(min(count, tops.shape[1])).indices  # these hold the likeliest tokens
            places = highest.sort(-1).values
            fallen, ended = _fall_in_nucleus(cells[rows, places], masses[chosen], count, draws[chosen])
            drawn[chosen] = places.gather(-1, fallen // _CELL) * _CELL + fallen % _CELL
            rows = rows[~ended]
        return drawn


def _fall(cells: Tensor, of_cells: Tensor, draws: Tensor) -> Tensor:
    """The index [B, 1] of the share that a draw [B, 1] falls into, of shares [B, n, _CELL] side by side with sums [B, n]."""
    upto = of_cells.cumsum(-1, dtype=torch.float64)
    ends = draws * upto[:, -1:]
    cell = torch.searchsorted(upto, ends)
    shares = cells[torch.arange(len(cells), device=cells.device), cell.squeeze(-1)].cumsum(-1, dtype=torch.float64)
    whole = shares[:, -1:]
    within = ends - (upto.gather(-1, cell) - whole)
    within = within.clamp(min=torch.finfo(torch.float64).tiny).minimum(whole)  # never a token without a share
    return cell * _CELL + torch.searchsorted(shares, within)


def _fall_in_nucleus(cells: Tensor, masses: Tensor, count: int, draws: Tensor) -> tuple[Tensor, Tensor]:
    """`_fall` among the likeliest tokens that weigh `masses` [B, 1] together, and whether [B] they are fewer than `count`."""
    ordered = cells.flatten(1).topk(min(count, cells.shape[1] * _CELL)).values
    before = ordered.cumsum(-1, dtype=torch.float64) - ordered
    least = ordered.gather(-1, (before < masses).sum(-1, keepdim=True).clamp(min=1) - 1)
    ended = (ordered[:, -1:] < least).squeeze(-1)  # whatever is as likely as the last one inside is among them
    inside = cells.masked_fill(cells < least.unsqueeze(-1), 0.0)
    return _fall(inside, inside.sum(-1), draws), ended
