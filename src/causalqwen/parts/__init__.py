"""What a graft is put together from: the variants of each step, by their names in the configuration.

A variant is one class in one file, and one row here. Whoever needs it takes it from the table, once; nobody else asks which
one it is. The same table says which names a configuration may have.
"""

from typing import Any

from causalqwen.parts.appended_row import AppendedRow
from causalqwen.parts.class_axes import value_axes
from causalqwen.parts.common_scale import CommonScale
from causalqwen.parts.contexts import CONTEXTS
from causalqwen.parts.documents_scale import DocumentsScale
from causalqwen.parts.free_row import FreeRow
from causalqwen.parts.no_number import NoNumber

PARTS: dict[str, dict[str, Any]] = {
    "score_scale": {"common": CommonScale(), "documents": DocumentsScale()},
    "number_context": CONTEXTS,
}
"""Variants by setting and name."""


def number_row(num_token_id: int | None, rows: int) -> Any:
    """The part for where `<NUM>` stands: nowhere, behind the rows of the matrix, or on one of them."""
    return NoNumber() if num_token_id is None else AppendedRow() if num_token_id == rows else FreeRow()


__all__ = ["PARTS", "number_row", "value_axes"]
