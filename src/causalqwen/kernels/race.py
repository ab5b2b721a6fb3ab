"""The race of the scores, with normals for the tokens alone that can still win (theory 3.6), on a CPU.

    argmax_k S_k,   S_k = loc_k + own_k z_k,   own_k^2 = T^2 scale^2 + T beta max(C - loc_k + moved_k, 0) - drawn_k^2

moved_k = W_k moved is what was drawn of U', drawn_k its scale. In a block of neighbours no z_k is above the block's largest,
which is drawn first, no loc_k above the highest, and no moved_k above the mean row's plus the reach of the row that lies farthest
from it. What a block can reach at most follows; only blocks that can reach the best score known are drawn.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from causalqwen.distributions.own_noise import BLOCK, block_largest, block_uniforms
from causalqwen.distributions import FAR, SCALE_FLOOR, upcast
from causalqwen.kernels.drawn_decisions import Array, Blocks

if TYPE_CHECKING:
    from causalqwen.core import Chain

_SLACK = 1e-4  # float32 rounding of bounds


class Race:
    """The scores S [N, V'] of N positions, -inf for tokens that are known to lose."""

    def __init__(self, chain: "Chain") -> None:
        action, words, T = chain.action, chain.words, chain.draws.temperature
        self.law, self.words, self.number = action.law, words, action.num_token_id
        self.columns = action.rows + action.number.columns
        loc = chain.loc.detach().flatten(0, -2)
        self.loc = words.at_once(loc).detach()
        if len(words.no_words):
            self.loc.index_fill_(-1, words.no_words, -torch.inf)
        self.seeds, self.positions = (column.numpy() for column in chain.draws.counters)
        with torch.autocast("cpu", enabled=False):
            self.threshold = upcast(chain.threshold).detach().flatten().numpy()
            self.whole = (T * chain.integrated.scale_S.detach().flatten()).square().numpy()
            self.slope = T * action.score_slope
            self.number_loc = None
            if self.number is not None:
                self.number_loc = action.num_loc(loc, words).detach().to(loc.dtype).float().numpy()
            self.drawn = None if chain.drawn is None else chain.drawn.detach().flatten(0, -2)
            self.most_moved: Array | float = 0.0
            if self.drawn is not None:
                self.moved = upcast(loc) - upcast(chain.loc_U.detach()).flatten(0, -2)
                together = (self.moved @ words.center.to(self.moved.dtype)).numpy()[:, None]
                reach = torch.linalg.vector_norm(self.moved, dim=-1).numpy()[:, None]
                self.most_moved = (together + words.of_blocks[1] * reach).clip(0)

    @torch.autocast("cpu", enabled=False)
    def scores(self) -> Tensor:
        blocks = Blocks(self.loc)
        count, rows = blocks.reached.shape[-1], np.arange(len(self.loc))
        largest = block_largest(self.seeds, self.positions, max(count, -(-self.columns // BLOCK)))
        self.largest = largest
        highest = self._quantile(largest[:, :count]).clip(0)
        with np.errstate(invalid="ignore"):
            reach = self._reach(blocks.reached, highest)
        scores = torch.full((len(self.loc), self.columns), -torch.inf)
        written = scores.numpy()
        best = np.full(len(self.loc), -np.inf, dtype=np.float32)
        if self.number is not None:
            written[:, self.number] = best = self._number()
        first = reach.argmax(-1)
        self._run(written, rows, first, np.full_like(best, -np.inf))
        best = np.maximum(best, written[rows[:, None], self._tokens(first)].max(-1))
        reach[rows, first] = -np.inf
        self._run(written, *(reach >= (best - _SLACK * (1 + np.abs(best)))[:, None]).nonzero(), best)
        return scores

    def _quantile(self, uniform: Array) -> Array:
        quantile: Array = self.law.quantile(torch.from_numpy(uniform)).to(torch.float32).numpy()
        return quantile

    def _tokens(self, blocks: Array) -> Array:
        tokens: Array = (blocks[:, None] * BLOCK + np.arange(BLOCK)).clip(max=self.columns - 1)
        return tokens

    def _reach(self, loc: Array, z: Array) -> Array:
        """What the tokens of blocks [N, blocks] reach at most whose loc is at most `loc`, and z at most `z`.

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

    def _number(self) -> Array:
        """`<NUM>`'s score, [N]."""
        block, place = np.full(len(self.loc), self.number // BLOCK), self.number % BLOCK
        rows = np.arange(len(self.loc))
        z = self._quantile(block_uniforms(self.seeds, self.positions, block, self.largest[rows, block])[:, place])
        row = upcast(self.words.number_row()).detach()
        return self.number_loc + z * self._own(rows, self.number_loc, row.expand(len(rows), -1))

    def _own(self, rows: Array, loc: Array, weight: Tensor | None) -> Array:
        """own_k [n] of tokens of rows [n] with `loc` [n] and the matrix's rows `weight` [n, C]."""
        fallen = self.threshold[rows] - loc
        taken: Array | float = 0.0
        if self.drawn is not None and weight is not None:
            at = torch.from_numpy(rows)
            fallen = fallen + torch.linalg.vecdot(weight, self.moved.index_select(0, at)).numpy()
            taken = (weight * self.drawn.index_select(0, at)).square().sum(-1).numpy()
        power = self.whole[rows] + self.slope * fallen.clip(0, FAR) - taken
        own: Array = np.sqrt(np.maximum(power, SCALE_FLOOR**2))
        return own

    def _run(self, written: Array, rows: Array, blocks: Array, best: Array) -> None:
        """Write the scores of the tokens of some blocks, [n] each, that may reach the best of their rows."""
        if len(rows) == 0:
            return
        z = self._quantile(block_uniforms(self.seeds[rows], self.positions[rows], blocks, self.largest[rows, blocks]))
        tokens = self._tokens(blocks)
        there = (blocks[:, None] * BLOCK + np.arange(BLOCK)) < self.loc.shape[-1]
        loc = upcast(self.loc[torch.from_numpy(rows)[:, None], torch.from_numpy(tokens.clip(max=self.loc.shape[-1] - 1))]).numpy()
        loc = np.where(there, loc, -np.inf)
        of_row = np.broadcast_to(rows[:, None], tokens.shape)
        most = self.most_moved if isinstance(self.most_moved, float) else self.most_moved[rows, blocks][:, None]
        with np.errstate(invalid="ignore"):
            widest = np.sqrt(self.whole[rows][:, None] + self.slope * (self.threshold[rows][:, None] + most - loc).clip(0, FAR))
            may = there & (loc > -np.inf) & (loc + z.clip(0) * widest >= best[rows][:, None] - _SLACK * (1 + np.abs(best[rows][:, None])).clip(max=FAR))
        if not isinstance(self.number, type(None)):
            may &= tokens != self.number
        rows, tokens, loc, z = of_row[may], tokens[may], loc[may], z[may]
        weight = None if self.drawn is None else self.words.rows_at(torch.from_numpy(tokens))
        written[rows, tokens] = loc + z * self._own(rows, loc, weight)
