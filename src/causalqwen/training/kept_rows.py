"""Facts of single rows, kept over runs, splits and folds: what the backbone has read once, it does not read again."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from causalqwen.data import Example
from causalqwen.files import check_sums
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
        self._whole: set[Path] = set()
        self._known: tuple[dict[bytes, tuple[int, int]], list[Path]] = {}, []

    def facts(self, examples: Sequence[Example]) -> TokenFacts:
        """The facts before each row's value [n], with the numbers in each row for a model that copies; what is missing is read
        first."""
        model, (stores, of_store, row) = self.model, self._places(examples)
        columns: dict[str, np.ndarray] = {}
        for name in ("features", "reads"):
            kept = [np.load(store / f"{name}.npy", mmap_mode="r") for store in stores]
            columns[name] = np.empty((len(examples), kept[0].shape[1]), dtype=np.float32)
            for number, column in enumerate(kept):
                own = of_store == number
                columns[name][own] = column[row[own]]
        numbers = None
        if model.copies:
            of_stores = [KeptNumbers.load(store, np.diff(np.load(store / "offsets.npy"))) for store in stores]
            numbers = KeptNumbers.gathered(of_stores, of_store.tolist(), row.tolist())
        count = len(examples)
        return TokenFacts(
            features=columns["features"],
            targets=np.full(count, model.config.num_token_id),
            values=np.array([example.numeric_labels[-1] for example in examples]),
            num_scale=np.zeros(count),
            also_right=np.zeros((count, 0)),
            numbers=numbers,
            reads=Reads(columns["reads"], model.reads_backbone, np.arange(count)),
        )

    def _places(self, examples: Sequence[Example]) -> tuple[list[Path], np.ndarray, np.ndarray]:
        """Stores, and of which each row is, and where in it; what is missing is read first."""
        digests = [row_digest(example) for example in examples]
        if not self._known[0] or not self._known[0].keys() >= set(digests):
            self._known = self._index()
        rows = zip(digests, examples, strict=True)
        missing = {digest: example for digest, example in rows if digest not in self._known[0]}
        if missing:
            self.read(self, _blocks(missing))
            self._known = self._index()
        place, stores = self._known
        of_store, row = np.array([place[digest] for digest in digests], dtype=np.int64).reshape(-1, 2).T
        return stores, of_store, row

    def _index(self) -> tuple[dict[bytes, tuple[int, int]], list[Path]]:
        """Where each row is, by its digest: the number of its store, and its place there."""
        stores = [path.parent for path in sorted(self.folder.glob(f"features-*/{_ROWS}"))]
        digests = []
        for store in stores:
            with telling_kept(store):
                if store not in self._whole:
                    check_sums(store)
                digests.append(np.load(store / _ROWS))
            self._whole.add(store)
        index = {
            row.tobytes(): (number, place) for number, rows in enumerate(digests) for place, row in enumerate(rows)
        }
        return index, stores

    def read_block(self, block: Block, title: str = "reading rows") -> None:
        """Read these rows and keep them."""
        if any(example.positions != 1 for example in block.values()):  # the facts behind it would be another row's
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
