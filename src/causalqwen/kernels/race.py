"""The race of the scores, with normals for the tokens alone that can still win (theory 3.6), on a CPU.

    argmax_k S_k,   S_k = loc_k + own_k z_k,   own_k^2 = T^2 scale^2 + T beta max(C - loc_k + moved_k, 0) - drawn_k^2

moved_k is what was drawn of U', drawn_k its scale. In a block of neighbours no z_k is above the block's largest, which is
drawn first: only blocks that reach the best score known, drawn_k left out, are drawn.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from causalqwen.distributions import BLOCK, SCALE_FLOOR, StableFamily, block_largest, block_uniforms

Array = np.ndarray[Any, Any]
"""Small pieces, of which numpy takes a third of torch's time."""


class Race:
    """The scores S [N, V'] of N positions, -inf for tokens that are known to lose.

    loc: [N, V'], float32, what is drawn of U' included; -inf for tokens that take no part. power: own^2 [N, V'] before drawn^2
    is taken off. drawn: s_D [N, C]; None where nothing of U' is. rows_at: W [n, C] of tokens int64 [n]. counters: seeds and
    positions [N]. given: rows, tokens and normals [n] of noise that is known; None for none.
    """

    def __init__(
        self,
        family: StableFamily,
        loc: Tensor,
        power: Tensor,
        drawn: Tensor | None,
        rows_at: Callable[[Tensor], Tensor],
        counters: tuple[Tensor, Tensor],
        given: tuple[Tensor, Tensor, Tensor] | None,
    ) -> None:
        self.family, self.loc, self.power, self.drawn, self.rows_at = family, loc, power, drawn, rows_at
        self.seeds, self.positions = (column.numpy() for column in counters)
        self.given = given

    def scores(self) -> Tensor:
        rows, width = np.arange(len(self.loc)), self.loc.shape[-1]
        scores = torch.full_like(self.loc, -torch.inf)
        self.written, self.best = scores.numpy(), np.full(len(rows), -np.inf, dtype=np.float32)
        if self.given is not None:
            at, tokens, normals = (column.numpy() for column in self.given)
            self._write(at, tokens, normals.astype(np.float32))
        self.largest = block_largest(self.seeds, self.positions, -(-width // BLOCK))
        reach = self._reach(self._normals(self.largest).clip(0))
        first = reach.argmax(-1)
        self._run(rows, first)
        reach[rows, first] = -np.inf
        self._run(*(reach >= self.best[:, None]).nonzero())
        return scores

    def _reach(self, z: Array) -> Array:
        """What the tokens of each block [N, blocks] reach at most, whose normals are at most `z`."""
        reach, lacking = [], -self.loc.shape[-1] % BLOCK
        for loc, power, highest in zip(self.loc, self.power, torch.from_numpy(z), strict=True):
            if lacking:
                loc = torch.nn.functional.pad(loc, (0, lacking), value=-torch.inf)
                power = torch.nn.functional.pad(power, (0, lacking))
            reach.append(torch.addcmul(loc.view(-1, BLOCK), power.sqrt().view(-1, BLOCK), highest[:, None]).amax(-1))
        return torch.stack(reach).numpy()

    def _normals(self, uniform: Array) -> Array:
        normals: Array = self.family.quantile(torch.from_numpy(uniform)).to(torch.float32).numpy()
        return normals

    def _run(self, rows: Array, blocks: Array) -> None:
        """Write the scores of the tokens of some blocks, [n] each, that may be the best of their rows."""
        if len(rows) == 0:
            return
        uniform = block_uniforms(self.seeds[rows], self.positions[rows], blocks, self.largest[rows, blocks])
        tokens = blocks[:, None] * BLOCK + np.arange(BLOCK)
        there, tokens = tokens < self.loc.shape[-1], tokens.clip(max=self.loc.shape[-1] - 1)
        z, rows = self._normals(uniform), np.broadcast_to(rows[:, None], tokens.shape)
        loc, power = self.loc.numpy()[rows, tokens], self.power.numpy()[rows, tokens]
        may = there & (loc > -np.inf) & (loc + z.clip(0) * np.sqrt(power) >= self.best[rows])
        if self.given is not None:
            for at, token in zip(*(column.tolist() for column in self.given[:2]), strict=True):
                may &= (rows != at) | (tokens != token)
        self._write(rows[may], tokens[may], z[may])

    def _write(self, rows: Array, tokens: Array, z: Array) -> None:
        """Write S_k of tokens [n] with normals [n]."""
        power = self.power.numpy()[rows, tokens]
        if self.drawn is not None:
            weight = self.rows_at(torch.from_numpy(tokens))
            weight = weight * self.drawn.index_select(0, torch.from_numpy(rows))
            power = power - weight.square().sum(-1).numpy()
        made = self.loc.numpy()[rows, tokens] + z * np.sqrt(np.maximum(power, SCALE_FLOOR**2))
        self.written[rows, tokens] = made
        np.maximum.at(self.best, rows, made)
