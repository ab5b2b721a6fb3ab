"""Batches of a stage: kept facts packed end to end, or tokens padded."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from causalqwen.data import Example, collate
from causalqwen.losses import IGNORE_INDEX, NO_TARGET
from causalqwen.training import ranks
from causalqwen.training.features import FactStore, grouped


class FactRows(torch.utils.data.Dataset):
    """Rows of a `FactStore` for a data loader. An item is its own index: `collate` takes the facts of a whole batch at once.

    owners: whose each row is: all rows of one individual are an item; a row of nobody's (None) stands alone.
    classes: each row's `class_code`, where classes have axes of their own.
    """

    def __init__(
        self, store: FactStore, owners: Sequence[str | None] | None = None, classes: Sequence[int] | None = None
    ) -> None:
        self.store, self.classes = store, None if classes is None else np.asarray(classes)
        self.groups, self.people = rows_of_people([None] * len(store) if owners is None else owners)

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, index: int) -> int:
        return index

    def collate(self, indices: Sequence[int]) -> dict[str, Any]:
        """Rows packed end to end, for `TrainedForCausalLM`: the heads read each position alone, so nothing is padded.

        Labels stand one place later than the positions that predict them. `group`, where somebody shares, says which positions
        share an individual; -1 for none. On many ranks, this rank's part of the batch.
        """
        indices, own = ranks.rows_of_rank(indices)
        members = [self.groups[index] for index in indices]
        rows = np.concatenate(members)
        starts = self.store.offsets[rows]
        sizes = self.store.offsets[rows + 1] - starts
        ends = np.cumsum(sizes)
        at = np.repeat(starts - (ends - sizes), sizes) + np.arange(ends[-1])
        facts = self.store.facts[at]

        def packed(name: str) -> Tensor:
            return facts.tensor(name).unsqueeze(0)

        def of_rows(codes: Any) -> Tensor:
            return torch.from_numpy(np.repeat(codes, sizes)).unsqueeze(0)

        batch: dict[str, Any] = {}
        if any(index < self.people for index in indices):
            owner = [place if index < self.people else -1 for place, index in enumerate(indices)]
            batch["group"] = of_rows(np.repeat(owner, [len(of) for of in members]))
        if self.classes is not None:
            batch["classes"] = of_rows(self.classes[rows])
        first = torch.full((1, 1), IGNORE_INDEX)
        batch |= {
            "labels": torch.cat([first, packed("targets").long()], dim=1),
            "numeric_labels": torch.cat([first.double(), packed("values")], dim=1),
            "facts": {name: packed(name) for name in facts.columns if name in ("features", "threshold", "num_scale")},
        }
        if facts.numbers is not None:
            candidates = facts.numbers.candidates()
            batch["candidates"] = candidates | {name: candidates[name].unsqueeze(0) for name in ("rows", "at")}
        if facts.also_right.shape[1]:
            also_right = packed("also_right").long()
            batch["also_right"] = torch.cat([torch.full_like(also_right[:, :1], NO_TARGET), also_right], dim=1)
        return batch if own else ranks.without_losses(batch)


def rows_of_people(owners: Sequence[str | None]) -> tuple[list[list[int]], int]:
    """The rows of each individual, in the order in which they are met, then each row of nobody's; and how many individuals."""
    named = [row for row, owner in enumerate(owners) if owner is not None]
    people = [[named[place] for place in places] for places in grouped(owners[row] for row in named)]
    return people + [[row] for row, owner in enumerate(owners) if owner is None], len(people)


class ExampleRows(torch.utils.data.Dataset):
    """Examples for a data loader, padded with pad_token_id. class_names: as of `collate_tokens`."""

    def __init__(self, examples: Sequence[Example], pad_token_id: int, class_names: Sequence[str]) -> None:
        self.examples = examples
        self.collate = partial(collate_tokens, pad_token_id=pad_token_id, class_names=class_names)

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Example:
        return self.examples[index]


def class_code(example: Example, class_names: Sequence[str]) -> int:
    """The place of a row's class among those that have axes of their own (`class_names`), -1 for none."""
    return class_names.index(example.class_name) if example.class_name in class_names else -1


def collate_tokens(examples: Sequence[Example], pad_token_id: int, class_names: Sequence[str] = ()) -> dict[str, Any]:
    """`collate`, which chunk of an anchor goes with the batch, and, where classes have axes of their own (`class_names`), which
    class every position is of. On many ranks, this rank's part of the batch."""
    batch = collate(examples, pad_token_id)
    if class_names:
        codes = torch.tensor([class_code(example, class_names) for example in examples])
        batch["classes"] = codes.unsqueeze(1).expand(-1, batch["labels"].shape[1] - 1)
    # The chunk follows from the whole batch, so that a resumed run, on any number of ranks, meets the same one.
    chunk = int(batch["input_ids"].sum())
    places, own = ranks.rows_of_rank(range(len(examples)))
    part: dict[str, Any] = {name: tensor[list(places)] for name, tensor in batch.items()}
    return (part if own else ranks.without_losses(part)) | {"anchor_chunk": chunk}
