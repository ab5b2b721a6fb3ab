"""Counter-based uniform draws: a pure function of (seed, stream, position, coordinate).

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) in integer arithmetic. A draw
does not depend on the batch it is made in, on what was drawn before, or on the device, so that an individual or a
noise can be made again from its seed (theory 3.9).

The noise of each token's own score, e3_k, is uniform on (0, 1), a function of (seed, position, token k) alone. Tokens
are numbered in blocks of `BLOCK` neighbours: the largest e3 of a block is drawn first, u^(1/BLOCK), then which of its
tokens has it, and the others are uniform below it. Together they are independent uniforms; and a block whose largest
cannot win a race is never drawn further.
"""

import operator
from typing import Any

import numpy as np
import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORD = 0xFFFFFFFF

INDIVIDUAL_STREAM = 1
NOISE_STREAM = 2
OWN_STREAM = 3
OBSERVED_STREAM = 4
WHOLE_TEXT = 0xFFFFFFFF
"""The position of a draw that is held for a whole text instead of being made anew per token."""


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10: four 32-bit words from a 128-bit counter and a 64-bit key.

    Words are int64 tensors that hold values in [0, 2^32); shapes broadcast. Products wrap modulo 2^64, which leaves
    both of their 32-bit halves right.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product_0, product_1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        high_0, low_0 = (product_0 >> 32) & _WORD, product_0 & _WORD
        high_1, low_1 = (product_1 >> 32) & _WORD, product_1 & _WORD
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def check_seed(seed: int) -> int:
    """The seed; ValueError unless it is a whole number that 64 bits hold."""
    if isinstance(seed, bool) or not hasattr(seed, "__index__") or not -(2**63) <= operator.index(seed) < 2**63:
        raise ValueError(f"a seed is a whole number from -2^63 to 2^63 - 1, not {seed!r}")
    return operator.index(seed)


def uniform_draws(seed: Tensor, stream: int, position: Tensor | int, size: int) -> Tensor:
    """Uniform draws in the open unit interval, one row of `size` coordinates per seed.

    Args:
        seed: int64 [N]; every 64-bit pattern is a seed of its own.
        stream: which source of randomness draws, one of the `..._STREAM` above.
        position: int64 [N] (or one int) in [0, 2^32): the index of the token, or `WHOLE_TEXT`.
        size: number of coordinates C.

    Returns:
        float64 [N, C] on the device of `seed`, each (w + 1/2) / 2^32 for a 32-bit word w; the j-th coordinate is the
        same whatever C is.
    """
    seed = seed.to(torch.int64).unsqueeze(-1)
    position = torch.as_tensor(position, dtype=torch.int64, device=seed.device).expand(seed.shape[:1]).unsqueeze(-1)
    block = torch.arange((size + 3) // 4, device=seed.device).unsqueeze(0)
    zero = torch.zeros_like(block)
    words = philox((block, position & _WORD, zero + stream, zero), (seed & _WORD, (seed >> 32) & _WORD))
    return (torch.stack(torch.broadcast_tensors(*words), dim=-1).flatten(1)[:, :size].to(torch.float64) + 0.5) / 2**32


BLOCK = 64  # a power of 2
_LANES = (
    BLOCK // 4 + 1
)  # counters of a block, four words each: those of all its tokens, and one for which is the largest


def _words(block: Any, lane: Any, seeds: Any, positions: Any) -> tuple[Any, ...]:
    """Philox's four words of some counters; integers of torch or of numpy, shapes broadcast."""
    zero = 0 * (block + lane + seeds)
    return philox(
        (block + zero, (positions & _WORD) + zero, OWN_STREAM + zero, lane + zero),
        (seeds & _WORD, (seeds >> 32) & _WORD),
    )


def _joined(parts: Any) -> Any:
    stack: Any = torch.stack(tuple(parts), -1) if isinstance(parts[0], Tensor) else np.stack(parts, -1)
    return stack.reshape(*stack.shape[:-2], stack.shape[-2] * stack.shape[-1])


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
