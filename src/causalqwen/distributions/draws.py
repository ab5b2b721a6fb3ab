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

INDIVIDUAL_STREAM, NOISE_STREAM, OWN_STREAM, OBSERVED_STREAM = 1, 2, 3, 4
WHOLE_TEXT = 0xFFFFFFFF
"""The position of a draw that is held for a whole text instead of being made anew per token."""

BLOCK = 64  # a power of 2
_LANES = BLOCK // 4 + 1
"""Counters of a block, four words each: those of all its tokens, and one for which is the largest."""


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any]) -> tuple[Any, ...]:
    """Philox4x32-10: four 32-bit words from a 128-bit counter and a 64-bit key.

    Words are int64 tensors or arrays that hold values in [0, 2^32); shapes broadcast. Products wrap modulo 2^64, which leaves
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


def _words(counter: Any, positions: Any, stream: int, lane: Any, seeds: Any) -> Any:
    """Philox's words [N, 4 n] of counters [N, n]: integers of torch or of numpy, whose shapes broadcast to that."""
    zero = 0 * (counter + positions + lane + seeds)
    made = philox(
        (counter + zero, (positions & _WORD) + zero, stream + zero, lane + zero), (seeds & _WORD, (seeds >> 32) & _WORD)
    )
    stack: Any = torch.stack(made, -1) if isinstance(zero, Tensor) else np.stack(made, -1)
    return stack.reshape(len(stack), 4 * zero.shape[1])


def _uniform(words: Any) -> Any:
    return ((words.double() if isinstance(words, Tensor) else words) + 0.5) / 2**32


def _places(count: int, like: Any) -> Any:
    return torch.arange(count, device=like.device) if isinstance(like, Tensor) else np.arange(count)


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
    seed = seed.to(torch.int64)
    position = torch.as_tensor(position, dtype=torch.int64, device=seed.device).expand(seed.shape)
    counter = _places((size + 3) // 4, seed)[None]
    draws: Tensor = _uniform(_words(counter, position[:, None], stream, 0, seed[:, None])[:, :size])
    return draws


def _root(uniform: Any) -> Any:
    """uniform^(1/BLOCK) by square roots, which are rounded alike everywhere but in torch on a CPU."""
    if isinstance(uniform, Tensor) and uniform.device.type == "cpu":
        return torch.from_numpy(_root(uniform.numpy()))
    for _ in range(BLOCK.bit_length() - 1):
        uniform = uniform.sqrt() if isinstance(uniform, Tensor) else np.sqrt(uniform)
    return uniform


def block_largest(seeds: Any, positions: Any, blocks: int) -> Any:
    """The largest e3 of each block, float64 [N, blocks], of seeds and positions int64 [N], tensors or arrays."""
    counter = _places((blocks + 3) // 4, seeds)[None]
    return _root(_uniform(_words(counter, positions[:, None], OWN_STREAM, 0, seeds[:, None])[:, :blocks]))


def block_uniforms(seeds: Any, positions: Any, block: Any, largest: Any) -> Any:
    """e3 of the tokens of some blocks, float64 [n, BLOCK].

    seeds, positions, block: int64 [n], and largest float64 [n] of each (`block_largest`), tensors or arrays.
    """
    lanes = 1 + _places(_LANES, seeds)[None]
    words = _words(block[:, None], positions[:, None], OWN_STREAM, lanes, seeds[:, None])
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
