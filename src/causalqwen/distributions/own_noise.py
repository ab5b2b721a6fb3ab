"""The noise of each token's own score, drawn by counters (theory 3.9).

e3_k is uniform on (0, 1), a function of (seed, position, token k) alone. Tokens are numbered in blocks of `BLOCK` neighbours:
the largest e3 of a block is drawn first, u^(1/BLOCK), then which of its tokens has it, and the others are uniform below it.
Together they are independent uniforms; and a block whose largest cannot win a race is never drawn further.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from causalqwen.distributions.draws import OWN_STREAM, philox

BLOCK = 64  # a power of 2
_LANES = (
    BLOCK // 4 + 1
)  # counters of a block, four words each: those of all its tokens, and one for which is the largest
_WORD = 0xFFFFFFFF


def _words(block: Any, lane: Any, seeds: Any, positions: Any) -> tuple[Any, ...]:
    """Philox's four words of some counters; integers of torch or of numpy, shapes broadcast."""
    zero = 0 * (block + lane + seeds)
    return philox(
        (block + zero, (positions & _WORD) + zero, OWN_STREAM + zero, lane + zero),
        (seeds & _WORD, (seeds >> 32) & _WORD),
    )


def _joined(parts: Any) -> Any:
    stack: Any = torch.stack(tuple(parts), -1) if isinstance(parts[0], Tensor) else np.stack(parts, -1)
    return stack.reshape(*stack.shape[:-2], -1)


def _uniform(words: Any) -> Any:
    return ((words.double() if isinstance(words, Tensor) else words) + 0.5) / 2**32


def _root(uniform: Any) -> Any:
    """uniform^(1/BLOCK) by square roots, which are rounded alike everywhere but in torch on a CPU."""
    if isinstance(uniform, Tensor) and uniform.device.type == "cpu":
        return torch.from_numpy(_root(uniform.numpy()))
    for _ in range(BLOCK.bit_length() - 1):
        uniform = uniform.sqrt() if isinstance(uniform, Tensor) else np.sqrt(uniform)
    return uniform


def block_largest(seeds: Any, positions: Any, blocks: int) -> Any:
    """The largest e3 of each block, float64 [N, blocks], of seeds and positions int64 [N], tensors or arrays."""
    count = (blocks + 3) // 4
    block = torch.arange(count, device=seeds.device) if isinstance(seeds, Tensor) else np.arange(count)
    words = _joined(_words(block[None], 0, seeds[:, None], positions[:, None]))[:, :blocks]
    return _root(_uniform(words))


def block_uniforms(seeds: Any, positions: Any, block: Any, largest: Any) -> Any:
    """e3 of the tokens of some blocks, float64 [n, BLOCK].

    seeds, positions, block: int64 [n], and largest float64 [n] of each (`block_largest`), tensors or arrays.
    """
    lanes = torch.arange(1, _LANES + 1, device=seeds.device) if isinstance(seeds, Tensor) else np.arange(1, _LANES + 1)
    words = _joined(_words(block[:, None], lanes[None], seeds[:, None], positions[:, None]))
    uniform = largest[:, None] * _uniform(words[:, :BLOCK])
    which = words[:, BLOCK] * BLOCK >> 32
    uniform[range(len(which)), which] = largest
    return uniform


def own_uniforms(seeds: Tensor, positions: Tensor, size: int) -> Tensor:
    """e3 of the first `size` tokens at some positions, float64 [N, size]: all of them, the slow way."""
    blocks = (size + BLOCK - 1) // BLOCK
    largest = block_largest(seeds, positions, blocks)
    each = torch.arange(blocks, device=seeds.device).repeat(len(seeds))
    seeds_of, positions_of = (column.repeat_interleave(blocks) for column in (seeds, positions))
    uniforms: Tensor = block_uniforms(seeds_of, positions_of, each, largest.flatten())
    return uniforms.view(len(seeds), -1)[:, :size]
