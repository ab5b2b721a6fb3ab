"""Individuals inferred from what they said: evidence, posterior. Plain functions on tensors; stands on `decoding`."""
