"""Counter-based uniform draws: a pure function of (seed, stream, position, coordinate).

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) in integer arithmetic. A draw
does not depend on the batch it is made in, on what was drawn before, or on the device, so that an individual or a
noise can be made again from its seed (theory 3.9).
"""

import operator

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
        stream: which source of randomness draws (`INDIVIDUAL_STREAM`, `NOISE_STREAM`).
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
