"""vLLM's lm_head, of which each tensor-parallel rank holds a part, as the heads read one."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import (
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)


class ShardedRows:
    """The matrix [V, C] whose rows lie on several ranks: what the heads ask of a weight. All ranks must ask the same."""

    def __init__(self, head: Any, rows: int) -> None:
        self._mine, self._rows = head.weight, rows
        part = head.shard_indices
        self._start, self._end = part.org_vocab_start_index, part.org_vocab_end_index
        self._known: dict[int, Tensor] = {}
        self.device, self.dtype = head.weight.device, head.weight.dtype

    def __getitem__(self, index: int | slice | Tensor) -> Tensor:
        """Rows [..., C], on every rank."""
        if not isinstance(index, int):
            return self._gather(torch.arange(self._rows, device=self.device)[index])
        if index not in self._known:
            self._known[index] = self._gather(torch.tensor([index], device=self.device))[0]
        return self._known[index]

    def index_select(self, dim: int, index: Tensor) -> Tensor:
        """Rows [n, C] of int64 [n], on every rank; dim: 0."""
        return self._gather(index)

    def _gather(self, rows: Tensor) -> Tensor:
        is_mine = (rows >= self._start) & (rows < self._end)
        gathered = self._mine.new_zeros(*rows.shape, self._mine.shape[1])
        gathered[is_mine] = self._mine[rows[is_mine] - self._start]
        return tensor_model_parallel_all_reduce(gathered)  # every row is zero on all ranks but one

    def split(self, size: int) -> Iterator[Tensor]:
        """Blocks of rows, one after the other."""
        return (self[start : start + size] for start in range(0, self._rows, size))


class VocabularyMatrix:
    """`weight` [V, C] without padding, `bias`, and the product with the whole of it, by vLLM's own kernel and from its own copy
    of the rows: a processor's takes half of the time that `weight` takes."""

    bias = None

    def __init__(self, head: Any, rows: int) -> None:
        self._head, self._rows = head, rows
        self._shares = get_tensor_model_parallel_world_size()
        self._sharded = ShardedRows(head, rows) if self._shares > 1 else None

    @property
    def weight(self) -> Tensor | ShardedRows:
        return self._head.weight[: self._rows] if self._sharded is None else self._sharded

    def __call__(self, loc: Tensor) -> Tensor:
        scores = self._head.quant_method.apply(self._head, loc.reshape(-1, loc.shape[-1]))
        if self._shares > 1:
            scores = tensor_model_parallel_all_gather(scores)
        return scores[:, : self._rows].view(*loc.shape[:-1], self._rows)

    products = __call__
