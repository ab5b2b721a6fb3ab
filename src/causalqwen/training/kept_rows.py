"""Facts of single rows, kept over runs, splits and folds: what the backbone has read once, it does not read again."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from causalqwen.data import Example
from causalqwen.files import writing_folder
from causalqwen.modeling import CausalQwenForCausalLM
from causalqwen.training.features import COLUMNS, FORMAT, FactStore, facts_keys, row_digest

_ROWS = "rows.npy"


class KeptRows:
    """Facts in a folder, found by model and row. The rows have one position each: of `prompt` rows, the value that follows.

    What is missing is read, and kept in a store of its own, which appears by rename. Columns of a
    table are no part of it.
    """

    def __init__(self, folder: Path, model: CausalQwenForCausalLM, *, say: str = "reading rows") -> None:
        if model.copies:
            raise ValueError("rows are kept without the numbers in them: give a model that does not copy")
        self.model, self.title = model, say
        self.folder = Path(folder) / facts_keys(model, [])[0][:24]

    def features(self, examples: Sequence[Example]) -> np.ndarray:
        """z [n, H] before each row's value, float32."""
        return self._columns(examples, ("features",))["features"]

    def put(self, examples: Sequence[Example], root: Path) -> None:
        """The store that `FactStore.build` would make of these rows, into `root`, where it will look for it."""
        folder = Path(root) / f"features-{facts_keys(self.model, examples)[0][:24]}"
        if folder.is_dir():
            return
        with writing_folder(folder) as part:
            for name, column in self._columns(examples, COLUMNS).items():
                np.save(part / f"{name}.npy", column)
            np.save(part / "values.npy", np.array([example.numeric_labels[-1] for example in examples]))
            np.save(part / "offsets.npy", np.arange(len(examples) + 1))
            (part / "about.json").write_text(json.dumps({"format": FORMAT, "examples": len(examples)}) + "\n")

    def _columns(self, examples: Sequence[Example], names: Sequence[str]) -> dict[str, np.ndarray]:
        """Columns of the facts of all rows, in their order; what is missing is read first."""
        digests = [row_digest(example) for example in examples]
        place, stores = self._index()
        missing = {digest: example for digest, example in zip(digests, examples, strict=True) if digest not in place}
        if missing:
            self._read(missing)
            place, stores = self._index()
        of_store, row = np.array([place[digest] for digest in digests], dtype=np.int64).reshape(-1, 2).T
        columns = {}
        for name in names:
            kept = [np.load(store / f"{name}.npy", mmap_mode="r") for store in stores]
            columns[name] = np.empty((len(digests), *kept[0].shape[1:]), dtype=kept[0].dtype)
            for number, column in enumerate(kept):
                own = of_store == number
                columns[name][own] = column[row[own]]
        return columns

    def _index(self) -> tuple[dict[bytes, tuple[int, int]], list[Path]]:
        """Where each row is, by its digest: the number of its store, and its place there."""
        stores = sorted(path.parent for path in self.folder.glob(f"features-*/{_ROWS}"))
        digests = [np.load(store / _ROWS) for store in stores]
        found = {
            row.tobytes(): (number, place) for number, rows in enumerate(digests) for place, row in enumerate(rows)
        }
        return found, stores

    def _read(self, missing: dict[bytes, Example]) -> None:
        store = FactStore.build(self.model, list(missing.values()), self.folder, title=self.title)
        part = store.folder / f"{_ROWS}.part.npy"
        np.save(part, np.frombuffer(b"".join(missing), dtype=np.uint8).reshape(-1, 32))
        part.replace(store.folder / _ROWS)
