"""Facts of single rows, kept over runs, splits and folds: what the backbone has read once, it does not read again."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from causalqwen.data import Example
from causalqwen.files import check_sums, write_sums, writing_folder
from causalqwen.modeling import CausalQwenForCausalLM
from causalqwen.training.candidates import KeptNumbers
from causalqwen.training.features import COLUMNS, FORMAT, FactStore, facts_keys, row_digest, telling_kept

_ROWS = "rows.npy"
_OF_BLOCK = 1024

Block = dict[bytes, Example]
"""Rows that are read at once, by their digests."""


class KeptRows:
    """Facts in a folder, found by model and row. The rows have one position each: of `prompt` rows, the value that follows.

    What is missing is read in blocks of rows of like length, and each is kept in a store of its own, which appears by rename: a
    run that was killed has lost a block. Columns of a table are no part of it.

    read: who reads the blocks; this process, one after the other, by default.
    """

    def __init__(
        self, folder: Path, model: CausalQwenForCausalLM, read: "Callable[[KeptRows, list[Block]], None] | None" = None
    ) -> None:
        self.model, self.root, self.read = model, Path(folder), read or _one_by_one
        self._folders = [self.root / key[:24] for key in facts_keys(model, [])]
        self.folder = self._folders[0]
        self._whole: set[Path] = set()
        self._known: tuple[dict[bytes, tuple[int, int]], list[Path]] = {}, []

    def features(self, examples: Sequence[Example]) -> np.ndarray:
        """z [n, H] before each row's value, float32."""
        return self._columns(examples, ("features",))["features"]

    def numbers(self, examples: Sequence[Example]) -> KeptNumbers | None:
        """The numbers in each row, for a model that copies."""
        if not self.model.copies:
            return None
        stores, of_store, row = self._places(examples)
        kept = [KeptNumbers.load(store, np.diff(np.load(store / "offsets.npy"))) for store in stores]
        return KeptNumbers.gathered(kept, of_store.tolist(), row.tolist())

    def put(self, examples: Sequence[Example], root: Path) -> None:
        """The store that `FactStore.build` would make of these rows, into `root`, where it will look for it."""
        folder = Path(root) / f"features-{facts_keys(self.model, examples)[0][:24]}"
        if folder.is_dir():
            return
        with writing_folder(folder) as part:
            for name, column in self._columns(examples, COLUMNS).items():
                np.save(part / f"{name}.npy", column)
            if (numbers := self.numbers(examples)) is not None:
                numbers.save(part)
            np.save(part / "values.npy", np.array([example.numeric_labels[-1] for example in examples]))
            np.save(part / "offsets.npy", np.arange(len(examples) + 1))
            (part / "about.json").write_text(json.dumps({"format": FORMAT, "examples": len(examples)}) + "\n")
            write_sums(part)

    def _columns(self, examples: Sequence[Example], names: Sequence[str]) -> dict[str, np.ndarray]:
        """Columns of the facts of all rows, in their order; what is missing is read first."""
        stores, of_store, row = self._places(examples)
        columns = {}
        for name in names:
            kept = [np.load(store / f"{name}.npy", mmap_mode="r") for store in stores]
            columns[name] = np.empty((len(examples), *kept[0].shape[1:]), dtype=kept[0].dtype)
            for number, column in enumerate(kept):
                own = of_store == number
                columns[name][own] = column[row[own]]
        return columns

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
        """Where each row is, by its digest: the number of its store, and its place there; its own, before any that serves."""
        stores = [
            path.parent for folder in reversed(self._folders) for path in sorted(folder.glob(f"features-*/{_ROWS}"))
        ]
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
        store = FactStore.build(self.model, list(block.values()), self.folder, title=title)
        part = store.folder / f"{_ROWS}.part-{os.getpid()}.npy"
        np.save(part, np.frombuffer(b"".join(block), dtype=np.uint8).reshape(-1, 32))
        part.replace(store.folder / _ROWS)


def _blocks(rows: Block) -> list[Block]:
    by_length = sorted(rows.items(), key=lambda row: (len(row[1]), row[0]))
    return [dict(by_length[start : start + _OF_BLOCK]) for start in range(0, len(by_length), _OF_BLOCK)]


def _one_by_one(kept: KeptRows, blocks: list[Block]) -> None:
    for place, block in enumerate(blocks, start=1):
        kept.read_block(block, f"reading rows, {place} of {len(blocks)}" if len(blocks) > 1 else "reading rows")
