"""`<NUM>` on a free row of the vocabulary matrix: its own row and bias are added to that one's, and start at zero."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn import functional as F

from causalqwen.distributions import upcast

if TYPE_CHECKING:
    from causalqwen.modeling.action import ActionNetwork
    from causalqwen.modeling.vocabulary import Vocabulary


class FreeRow:
    """Column `num_token_id` of the scores [..., V]."""

    columns = 0

    def row(self, action: "ActionNetwork", words: "Vocabulary") -> Tensor:
        """W_NUM [C]."""
        row: Tensor = action.num_row
        return row + words.weight[action.num_token_id].to(row.dtype)

    def bias(self, action: "ActionNetwork", words: "Vocabulary") -> Tensor:
        """b_NUM []."""
        bias: Tensor = action.num_bias
        return bias if words.bias is None else bias + words.bias[action.num_token_id]

    def put(self, action: "ActionNetwork", columns: Tensor, of_number: Callable[[], Tensor]) -> Tensor:
        """What is `<NUM>`'s [...] into the columns of all tokens [..., V], in place."""
        columns[..., action.num_token_id] = of_number()
        return columns

    def put_row(self, action: "ActionNetwork", rows: Tensor, row: Tensor) -> Tensor:
        """The rows of the matrix [V, C] with `<NUM>`'s [C] in its place."""
        rows = rows.clone()
        rows[action.num_token_id] = row
        return rows

    def scores(self, action: "ActionNetwork", loc: Tensor, words: "Vocabulary") -> Tensor:
        """loc_S [..., V]: the backbone's product, and `<NUM>`'s own beside it; untrained, it moves no bit."""
        scores = words(loc)
        own = words.number_row() - words.weight[action.num_token_id]
        of_number = F.linear(upcast(loc), upcast(own).unsqueeze(0)).squeeze(-1) + action.num_bias
        scores[..., action.num_token_id] += of_number.to(scores.dtype)
        return scores
