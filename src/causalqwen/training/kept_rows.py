"""Facts of single rows, kept over runs, splits and folds: what the backbone has read once, it does not read again."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from causalqwen.data import Example
from causalqwen.modeling import CausalQwenForCausalLM
from causalqwen.training.candidates import KeptNumbers
from causalqwen.training.features import FactStore, Reads, TokenFacts, facts_key, row_digest, telling_kept

_ROWS = "rows.npy"
_OF_BLOCK = 1024

Block = dict[bytes, Example]
"""Rows that are read at once, by their digests."""


class KeptRows:
    """What the whole backbone tells of rows, in a folder, found by model and row. The rows have one position each: of `prompt`
    rows, the value that follows.

    What is missing is read in blocks of rows of like length, and each is kept in a store of its own, which appears by rename: a
    run that was killed has lost a block. Columns of a table are no part of it.

    read: who reads the blocks; this process, one after the other, by default.
    """

    def __init__(
        self, folder: Path, model: CausalQwenForCausalLM, read: "Callable[[KeptRows, list[Block]], None] | None" = None
    ) -> None:
        self.model, self.root, self.read = model, Path(folder), read or _one_by_one
        self.folder = self.root / facts_key(model, [], rest=False)[:24]

    def facts(self, examples: Sequence[Example]) -> TokenFacts:
        """The facts before each row's value [n], with the numbers in each row for a model that copies; what is missing is read
        first."""
        model, count, digests = self.model, len(examples), [row_digest(example) for example in examples]
        known, given = self._index(), dict(zip(digests, examples, strict=True))
        if missing := {digest: example for digest, example in given.items() if digest not in known}:
            self.read(self, _blocks(missing))
            known = self._index()
        paths = [known[digest][0] for digest in digests]
        rows = np.array([known[digest][1] for digest in digests], dtype=np.int64)
        columns, numbers, at, start = dict[str, np.ndarray](), [], np.empty(count, dtype=np.int64), 0
        for path in dict.fromkeys(paths):
            facts, own = FactStore(path).facts, np.array([one == path for one in paths])
            for name, column in (("features", facts.features), ("reads", facts.reads.array)):
                if name not in columns:
                    columns[name] = np.empty((count, column.shape[1]), dtype=np.float32)
                columns[name][own] = column[rows[own]]
            numbers.append(facts.numbers)
            at[own], start = start + rows[own], start + len(facts)
        return TokenFacts(
            features=columns["features"],
            targets=np.full(count, model.config.num_token_id),
            values=np.array([example.numeric_labels[-1] for example in examples]),
            num_scale=np.zeros(count),
            also_right=np.zeros((count, 0)),
            numbers=KeptNumbers.stacked(numbers).of_rows(at) if model.copies else None,
            reads=Reads(columns["reads"], model.reads_backbone, np.arange(count)),
        )

    def _index(self) -> dict[bytes, tuple[Path, int]]:
        """Where each row that is kept is, by its digest: its store, and its place there."""
        index: dict[bytes, tuple[Path, int]] = {}
        for rows in sorted(self.folder.glob(f"features-*/{_ROWS}")):
            with telling_kept(rows.parent):
                digests = np.load(rows)
            index |= {row.tobytes(): (rows.parent, place) for place, row in enumerate(digests)}
        return index

    def read_block(self, block: Block, title: str = "reading rows") -> None:
        """Read these rows and keep them."""
        if any(example.positions != 1 for example in block.values()):  # the facts after it would be another row's
            raise ValueError("a row's text holds nothing to predict a number from")
        store = FactStore.build(self.model, list(block.values()), self.folder, title=title, rest=False)
        part = store.folder / f"{_ROWS}.part-{os.getpid()}.npy"
        np.save(part, np.frombuffer(b"".join(block), dtype=np.uint8).reshape(-1, 32))
        part.replace(store.folder / _ROWS)


def _blocks(rows: Block) -> list[Block]:
    by_length = sorted(rows.items(), key=lambda row: (len(row[1]), row[0]))
    return [dict(by_length[start : start + _OF_BLOCK]) for start in range(0, len(by_length), _OF_BLOCK)]


def _one_by_one(kept: KeptRows, blocks: list[Block]) -> None:
    for place, block in enumerate(blocks, start=1):
        kept.read_block(block, f"reading rows, {place} of {len(blocks)}" if len(blocks) > 1 else "reading rows")


@dataclass(frozen=True)
class RayReaders:
    """Reads blocks of rows for `KeptRows` on many machines, which all see its folder (pip install 'causalqwen[ray]').

    make: the model that reads, made anew in each worker. workers: how many at once. gpus: of each, a share where several
    read on one.
    """

    make: Callable[[], CausalQwenForCausalLM]
    workers: int
    gpus: float = 0.0

    def __post_init__(self) -> None:
        import ray.data  # noqa: F401  # a missing library stops the run here

        if self.workers < 1:
            raise ValueError(f"workers must be at least 1, got {self.workers}")

    def __call__(self, kept: KeptRows, blocks: list[Block]) -> None:
        import ray

        if not ray.is_initialized():
            ray.init(log_to_driver=False)
        given = [self.make, kept.root.absolute(), ray.put(blocks)]
        places = ray.data.from_items(
            [{"block": place} for place in range(len(blocks))], override_num_blocks=len(blocks)
        )
        ray.data.DataContext.get_current().enable_progress_bars = True
        read = places.map_batches(
            _Worker, fn_constructor_args=given, batch_size=1, concurrency=self.workers, num_cpus=1, num_gpus=self.gpus
        )
        read.materialize()


class _Worker:
    def __init__(self, make: Callable[[], CausalQwenForCausalLM], root: Path, blocks: Any) -> None:
        import ray

        self.kept, self.blocks = KeptRows(root, make()), ray.get(blocks)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        for place in batch["block"].tolist():
            self.kept.read_block(self.blocks[place])
        return batch
