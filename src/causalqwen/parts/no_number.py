"""No number channel: an action network of words alone."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from causalqwen.modeling.action import ActionNetwork
    from causalqwen.modeling.vocabulary import Vocabulary


class NoNumber:
    """The columns of the matrix, [..., V]."""

    columns = 0

    def put(self, action: "ActionNetwork", columns: Tensor, of_number: Callable[[], Tensor]) -> Tensor:
        """As they are."""
        return columns

    def scores(self, action: "ActionNetwork", loc: Tensor, words: "Vocabulary") -> Tensor:
        """loc_S [..., V]."""
        return words(loc)
