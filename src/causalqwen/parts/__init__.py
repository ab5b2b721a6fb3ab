"""What a graft is put together from beside its scores: one variant of a step in each file."""
