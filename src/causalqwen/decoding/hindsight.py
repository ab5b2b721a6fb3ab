"""The noise of an observed text, kept to be met again in another world (theory 3.13)."""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Hindsight:
    """Noise under which n tokens behind a prompt are the ones that are decided.

    draws: e2, float64 [n, C]. tokens: int64 [n]. residuals: float32 [n], what a token's own noise adds to its score where no
    e2 makes it the best; 0 elsewhere. values: float64 [n], those of `<NUM>` on the value axis (0 elsewhere).
    value_residuals: float64 [n], what is added to loc_Y to meet them. digits: by the index of a `<NUM>`, its value and the
    tokens that it was written in, where digits stand in the context.
    """

    draws: Tensor
    tokens: Tensor
    residuals: Tensor
    values: Tensor
    value_residuals: Tensor
    digits: dict[int, tuple[float, list[int]]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)
