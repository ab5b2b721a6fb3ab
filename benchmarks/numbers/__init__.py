"""The distribution of a number from free text: what people would use instead, on the same tables, splits and features."""
