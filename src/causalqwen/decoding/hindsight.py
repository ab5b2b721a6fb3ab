"""The noise of an observed text, kept to be met again in another world (theory 3.13)."""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class SaidNumber:
    """A number of an observed text: its value in the data's units, how it was written, with the space that it absorbed, and in
    which tokens, where digits stand in the context."""

    value: float
    text: str
    tokens: list[int]


@dataclass(frozen=True, eq=False)
class Hindsight:
    """Noise under which n tokens behind a prompt are the ones that are decided.

    draws: e2, float64 [n, C]. tokens: int64 [n]. residuals: float32 [n], what a token's own noise adds to its score where no
    e2 makes it the best; 0 elsewhere. values: float64 [n], those of `<NUM>` on the value axis (0 elsewhere).
    value_residuals: float64 [n], what is added to loc_Y to meet them; value_slack: float64 [n], how far from a value loc_Y may
    then be and still be that value: what float32 makes of the same features in batches of other shapes. numbers: those that
    were said, by the index of their `<NUM>`.
    """

    draws: Tensor
    tokens: Tensor
    residuals: Tensor
    values: Tensor
    value_residuals: Tensor
    value_slack: Tensor
    numbers: dict[int, SaidNumber] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)
