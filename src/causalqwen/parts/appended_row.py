"""`<NUM>` behind a vocabulary matrix that has no free row: a row, a bias and a column of its own."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from causalqwen.modeling.action import ActionNetwork
    from causalqwen.modeling.vocabulary import Vocabulary


class AppendedRow:
    """Column V of the scores [..., V + 1]."""

    columns = 1

    def row(self, action: "ActionNetwork", words: "Vocabulary") -> Tensor:
        """W_NUM [C]."""
        return action.num_row

    def bias(self, action: "ActionNetwork", words: "Vocabulary") -> Tensor:
        """b_NUM []."""
        return action.num_bias

    def put(self, action: "ActionNetwork", columns: Tensor, of_number: Callable[[], Tensor]) -> Tensor:
        """What is `<NUM>`'s [...] behind the columns of the matrix [..., V]."""
        return torch.cat([columns, of_number().unsqueeze(-1).to(columns.dtype)], dim=-1)

    def put_row(self, action: "ActionNetwork", rows: Tensor, row: Tensor) -> Tensor:
        """`<NUM>`'s row [C] behind those of the matrix [V, C]."""
        return torch.cat([rows, row.unsqueeze(0)])

    def scores(self, action: "ActionNetwork", loc: Tensor, words: "Vocabulary") -> Tensor:
        """loc_S [..., V + 1]."""
        return self.put(action, words(loc), lambda: action.num_loc(loc, words))
