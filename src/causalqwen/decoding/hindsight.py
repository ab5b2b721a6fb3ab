"""The noise of an observed text, kept to be met again in another world (theory 3.13)."""

from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Hindsight:
    """Noise under which n tokens behind a prompt are the ones that are decided.

    draws: e2, float64 [n, C]. tokens: int64 [n]. residuals: float32 [n], what a token's own noise adds to its score where no
    e2 makes it the best; 0 elsewhere. values: float64 [n], those of `<NUM>` on the value axis (0 elsewhere).
    value_residuals: float64 [n], what is added to loc_Y to meet them.
    """

    draws: Tensor
    tokens: Tensor
    residuals: Tensor
    values: Tensor
    value_residuals: Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    def after(self, count: int) -> "Hindsight":
        """The noise of what follows the first `count` tokens."""
        return replace(
            self,
            draws=self.draws[count:],
            tokens=self.tokens[count:],
            residuals=self.residuals[count:],
            values=self.values[count:],
            value_residuals=self.value_residuals[count:],
        )
