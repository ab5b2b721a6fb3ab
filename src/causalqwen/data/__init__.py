"""Rows, examples and batches, and the real table of the demo. Stands on `modeling` for the processor alone."""

from causalqwen.data.encoding import Example, collate, encode_rows
from causalqwen.data.rows import Row, RowError, parse_row, read_rows

__all__ = ["Example", "Row", "RowError", "collate", "encode_rows", "parse_row", "read_rows"]
