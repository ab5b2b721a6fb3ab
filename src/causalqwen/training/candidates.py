"""The numbers in the rows of kept facts, for a model that copies (theory 3.8)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from causalqwen.data import Example
from causalqwen.distributions import upcast
from causalqwen.parts.copying import NOWHERE

FEATURES = "number_features.npy"
_INDICES = ("place", "offsets", "values", "places")


@dataclass
class KeptNumbers:
    """Numbers in the rows of N positions: place int64 [N], where each stands in its row, and row int64 [N].

    Row i has the numbers offsets[i] to offsets[i+1] of values float64 [M], places int64 [M], and features float32 [M, H], z at
    the place before each number, or at its own where it stands first.
    """

    row: np.ndarray
    place: np.ndarray
    offsets: np.ndarray
    features: np.ndarray
    values: np.ndarray
    places: np.ndarray

    def __getitem__(self, index: slice | np.ndarray) -> "KeptNumbers":
        """The numbers of some positions."""
        return replace(self, row=self.row[index], place=self.place[index])

    @classmethod
    def stacked(cls, parts: Sequence["KeptNumbers"]) -> "KeptNumbers":
        """All of several stores, whose rows follow each other."""
        offsets = np.cumsum([0, *np.concatenate([np.diff(part.offsets) for part in parts])])
        starts = np.cumsum([0, *(len(part.offsets) - 1 for part in parts)])
        rows = np.concatenate([part.row + start for part, start in zip(parts, starts, strict=False)])
        names = ("place", "features", "values", "places")
        columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
        return cls(row=rows, offsets=offsets, **columns)

    def of_rows(self, rows: np.ndarray) -> "KeptNumbers":
        """The numbers of some rows, in that order, where rows have one position each."""
        at = np.concatenate([np.arange(*self.offsets[row : row + 2]) for row in rows])
        columns = {name: getattr(self, name)[at] for name in ("features", "values", "places")}
        offsets = np.cumsum([0, *np.diff(self.offsets)[rows]])
        return KeptNumbers(row=np.arange(len(rows)), place=self.place[rows], offsets=offsets, **columns)

    @classmethod
    def of(cls, examples: Sequence[Example], num_token_id: int, features: np.ndarray) -> "KeptNumbers":
        """The numbers of examples; features [M, H] are those of all of them in order."""
        standing = [numbers_of(example, num_token_id) for example in examples]
        asked = [[place for place in range(len(e) - 1) if e.learned is None or e.learned[place + 1]] for e in examples]
        values = [e.numeric_values[place] for e, places in zip(examples, standing, strict=True) for place in places]
        return cls(
            np.repeat(np.arange(len(examples)), [len(places) for places in asked]),
            np.array([place for places in asked for place in places], dtype=np.int64),
            np.cumsum([0, *(len(places) for places in standing)]),
            features,
            np.array(values, dtype=np.float64),
            np.array([place for places in standing for place in places], dtype=np.int64),
        )

    @classmethod
    def load(cls, folder: Path, lengths: np.ndarray) -> "KeptNumbers | None":
        """Those that `save` wrote beside facts on `lengths` positions of each row; None where the model did not copy."""
        if not (folder / FEATURES).exists():
            return None
        indices = {name: np.load(folder / f"number_{name}.npy") for name in _INDICES}
        features = np.load(folder / FEATURES, mmap_mode="c")
        return cls(row=np.repeat(np.arange(len(lengths)), lengths), features=features, **indices)

    def save(self, folder: Path) -> None:
        """All of it; features that lie there already, being mapped from there, are left."""
        if not (folder / FEATURES).exists():
            np.save(folder / FEATURES, self.features)
        for name in _INDICES:
            np.save(folder / f"number_{name}.npy", getattr(self, name))

    def candidates(self) -> dict[str, Tensor]:
        """The fields of `Candidates` for all positions; in it are the rows that have some."""
        rows, of_position = np.unique(self.row, return_inverse=True)
        first, counts = self.offsets[rows], self.offsets[rows + 1] - self.offsets[rows]
        column = np.arange(counts.max(initial=0))
        real = column < counts[:, None]
        index = np.where(real, first[:, None] + column, 0)
        return {
            "features": torch.from_numpy(self.features[index]),
            "values": torch.from_numpy(self.values[index]),
            "places": torch.from_numpy(np.where(real, self.places[index], NOWHERE)),
            "rows": torch.from_numpy(of_position),
            "at": torch.from_numpy(self.place),
        }


def numbers_of(example: Example, num_token_id: int) -> list[int]:
    """Where the numbers of an example stand."""
    return [place for place, token in enumerate(example.input_ids) if token == num_token_id]


def numbers_in(examples: Sequence[Example], num_token_id: int, features: Tensor, hidden: bool) -> KeptNumbers:
    """The numbers of a batch, padded on the right, from its features z [B, S, H]; hidden: the backbone does not see numbers."""
    before = [(row, place - 1) for row, e in enumerate(examples) for place in numbers_of(e, num_token_id)]
    rows, places = torch.tensor(before, dtype=torch.int64, device=features.device).reshape(-1, 2).T
    keys = upcast(features[rows, places.clamp(min=0)])
    if hidden:
        keys = keys.masked_fill((places < 0).unsqueeze(-1), 0.0)
    return KeptNumbers.of(examples, num_token_id, keys.cpu().numpy().astype(np.float32))
