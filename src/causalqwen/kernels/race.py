"""The race of the scores, with normals for the tokens alone that can still win (theory 3.6), on a CPU.

    argmax_k S_k,   S_k = loc_k + own_k z_k,   own_k^2 = T^2 scale^2 + T beta max(C - loc_k + moved_k, 0) - drawn_k^2

moved_k = W_k moved is what was drawn of U', drawn_k its scale. In a block of neighbours no z_k is above the block's largest,
which is drawn first, no loc_k above the highest, and no moved_k above the mean row's plus the reach of the row that lies
farthest from it. What a block can reach at most follows; only blocks that can reach the best score known are drawn.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from causalqwen.distributions import BLOCK, FAR, SCALE_FLOOR, block_largest, block_uniforms, upcast

if TYPE_CHECKING:
    from causalqwen.core import Chain

Array = np.ndarray[Any, Any]
"""Small pieces, of which numpy takes a third of torch's time."""

_POSITIONS = 8  # whose scores a core's cache holds in float32, of which maxima are found faster
_SLACK = 1e-4  # float32 rounding of bounds


def block_reach(scores: Tensor) -> Array:
    """The highest of each block of `BLOCK` neighbours among scores [N, K], [N, blocks], float32 at least."""
    if lacking := -scores.shape[-1] % BLOCK:  # else no copy: of Qwen's scores 19 MB a step of 64 rows
        scores = torch.nn.functional.pad(scores, (0, lacking), value=-torch.inf)
    blocks = scores.contiguous().view(len(scores), -1, BLOCK)
    return torch.cat([upcast(part).amax(-1) for part in blocks.split(_POSITIONS)]).numpy()


class Race:
    """The scores S [N, V'] of N positions, -inf for tokens that are known to lose."""

    def __init__(self, chain: "Chain") -> None:
        draws: Any = chain.draws  # a plan's: nothing else runs a race
        action, words, T = chain.action, chain.words, draws.temperature
        self.family, self.words, self.number = action.law, words, action.num_token_id
        self.columns = action.rows + action.number.columns
        loc = chain.loc.detach().flatten(0, -2)
        in_race = action.scales.in_race(chain).detach().flatten(0, -2) if draws.restricts else None
        self.loc = words.at_once(loc).detach() if in_race is None else in_race[:, : action.rows].clone()
        if len(words.no_words):
            self.loc.index_fill_(-1, words.no_words, -torch.inf)
        with torch.autocast("cpu", enabled=False):  # bounds are no better than what they follow from
            of_number = None if self.number is None else action.num_loc(loc, words).detach().to(loc.dtype)
            if in_race is not None and self.number is not None:
                of_number = in_race[:, self.number]
            self.number_loc = None if of_number is None else upcast(of_number).numpy()
            self.seeds, self.positions = (column.numpy() for column in draws.counters())
            self.given = draws.exceptions()
            self.threshold = upcast(chain.threshold).detach().flatten().numpy()
            self.whole = (T * chain.integrated.scale_S.detach().flatten()).square().numpy()
            self.slope = T * action.score_slope
            self.drawn, self.most_moved = None, np.zeros((1, 1), dtype=np.float32)
            if chain.drawn is not None:
                self.drawn = chain.drawn.detach().flatten(0, -2)
                self.moved = upcast(loc) - upcast(chain.loc_U.detach()).flatten(0, -2)
                together = (self.moved @ words.center.to(self.moved.dtype)).numpy()[:, None]
                reach = torch.linalg.vector_norm(self.moved, dim=-1).numpy()[:, None]
                self.most_moved = (together + words.of_blocks * reach).clip(0)

    @torch.autocast("cpu", enabled=False)
    def scores(self) -> Tensor:
        reached, rows = block_reach(self.loc), np.arange(len(self.loc))
        count = reached.shape[-1]
        self.largest = block_largest(self.seeds, self.positions, -(-self.columns // BLOCK))
        scores = torch.full((len(self.loc), self.columns), -torch.inf)
        self.written, self.best = scores.numpy(), np.full(len(rows), -np.inf, dtype=np.float32)
        if self.number is not None:
            uniform = self._uniforms(rows, np.full(len(rows), self.number // BLOCK))[:, self.number % BLOCK]
            self._write(rows, np.full(len(rows), self.number), self.number_loc, self._normals(uniform))
        if self.given is not None:
            at, tokens, _ = self.given
            words = tokens != self.number if self.number is not None else torch.ones_like(tokens, dtype=torch.bool)
            at, tokens = at[words], tokens[words]
            self._write(at.numpy(), tokens.numpy(), upcast(self.loc[at, tokens]).numpy(), np.zeros(len(at), np.float32))
        with np.errstate(invalid="ignore"):
            reach = self._reach(reached, self._normals(self.largest[:, :count]).clip(0))
        first = reach.argmax(-1)
        self._run(rows, first)
        reach[rows, first] = -np.inf
        self._run(*(reach >= self._least()[:, None]).nonzero())
        return scores

    def _least(self) -> Array:
        """What a score [N] must reach to be the best, as far as is known."""
        least: Array = self.best - _SLACK * (1 + np.abs(np.where(np.isfinite(self.best), self.best, 0)))
        return least

    def _uniforms(self, rows: Array, blocks: Array) -> Array:
        uniforms: Array = block_uniforms(self.seeds[rows], self.positions[rows], blocks, self.largest[rows, blocks])
        return uniforms

    def _normals(self, uniform: Array) -> Array:
        normals: Array = self.family.quantile(torch.from_numpy(uniform)).to(torch.float32).numpy()
        return normals

    def _reach(self, loc: Array, z: Array) -> Array:
        """What tokens of blocks [N, blocks] reach at most, whose loc is at most `loc`, and z at most `z`.

        loc + z (whole + slope (C + moved - loc))^(1/2) is concave in loc below C + moved, with its peak where the root is
        z slope / 2; above it rises.
        """
        whole, edge = self.whole[:, None], self.threshold[:, None] + self.most_moved

        def reached(at: Array) -> Array:
            value: Array = at + z * np.sqrt(whole + self.slope * (edge - at).clip(0, FAR))
            return value

        if not self.slope:
            return reached(loc)
        return np.maximum(reached(loc), reached(np.minimum(loc, edge + whole / self.slope - z * z * self.slope / 4)))

    def _run(self, rows: Array, blocks: Array) -> None:
        """Write the scores of the tokens of some blocks, [n] each, that may be the best of their rows."""
        if len(rows) == 0:
            return
        z, tokens = self._normals(self._uniforms(rows, blocks)), blocks[:, None] * BLOCK + np.arange(BLOCK)
        there = tokens < self.loc.shape[-1]
        loc = upcast(
            self.loc[torch.from_numpy(rows)[:, None], torch.from_numpy(tokens.clip(max=self.loc.shape[-1] - 1))]
        )
        known = np.where(there, loc.numpy(), -np.inf)
        edge = self.threshold[rows] + self.most_moved[rows % len(self.most_moved), blocks % self.most_moved.shape[-1]]
        with np.errstate(invalid="ignore"):
            widest = np.sqrt(self.whole[rows][:, None] + self.slope * (edge[:, None] - known).clip(0, FAR))
            may = (known > -np.inf) & (known + z.clip(0) * widest >= self._least()[rows][:, None])
        self._write(np.broadcast_to(rows[:, None], tokens.shape)[may], tokens[may], known[may], z[may])

    def _write(self, rows: Array, tokens: Array, loc: Array, z: Array) -> None:
        """Write S_k [n] of tokens with loc and normals [n], those of an observed noise in their place."""
        if self.given is not None:
            z = z.copy()
            for at, token, normal in zip(*(column.tolist() for column in self.given), strict=True):
                z[(rows == at) & (tokens == token)] = normal
        fallen, taken = self.threshold[rows] - loc, np.zeros(len(loc), dtype=np.float32)
        if self.drawn is not None:
            at = torch.from_numpy(rows)
            is_number = tokens == (-1 if self.number is None else self.number)
            weight = self.words.rows_at(torch.from_numpy(np.where(is_number, 0, tokens)))
            if is_number.any():
                weight[torch.from_numpy(is_number)] = upcast(self.words.number_row()).detach()
            fallen = fallen + torch.linalg.vecdot(weight, self.moved.index_select(0, at)).numpy()
            taken = (weight * self.drawn.index_select(0, at)).square().sum(-1).numpy()
        power = self.whole[rows] + self.slope * fallen.clip(0, FAR) - taken
        made = loc + z * np.sqrt(np.maximum(power, SCALE_FLOOR**2))
        self.written[rows, tokens] = made
        np.maximum.at(self.best, rows, made)
