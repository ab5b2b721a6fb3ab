"""Rows, examples and batches, and the real table of the demo. Stands on `modeling` for the processor alone."""

from causalqwen.data.encoding import EncodedRows, Example, collate, encode_rows, number_classes
from causalqwen.data.rows import Row, RowError, check_row, parse_row, read_rows, stream_rows

__all__ = [
    "EncodedRows", "Example", "Row", "RowError", "check_row", "collate", "encode_rows", "number_classes", "parse_row",
    "read_rows", "stream_rows",
]  # fmt: skip
