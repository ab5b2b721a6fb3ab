"""Batches of a stage: kept facts packed end to end, or tokens padded."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from causalqwen.data import Example, collate
from causalqwen.losses import IGNORE_INDEX, NO_TARGET
from causalqwen.training import ranks
from causalqwen.training.candidates import KeptNumbers
from causalqwen.training.features import FactStore, TokenFacts


class FactRows(torch.utils.data.Dataset):
    """Rows of a `FactStore` for a data loader: one at a time, or, with `owners`, all rows of one individual at a time.

    owners: whose each row is; a row of nobody's (None) stands alone, and its values share no individual.
    classes: each row's `TokenFacts.class_code`.
    """

    def __init__(
        self,
        store: FactStore,
        owners: Sequence[str | None] | None = None,
        classes: Sequence[int] | None = None,
    ) -> None:
        self.store, self.classes = store, classes
        self.groups, self.people = rows_of_people([None] * len(store) if owners is None else owners)

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, index: int) -> tuple[bool, list[TokenFacts]]:
        """Whether the rows share an individual, and the rows."""
        rows = [self.store[row] for row in self.groups[index]]
        if self.classes is not None:
            rows = [replace(row, class_code=self.classes[at]) for row, at in zip(rows, self.groups[index], strict=True)]
        return index < self.people, rows

    def collate(self, groups: Sequence[tuple[bool, list[TokenFacts]]]) -> dict[str, Any]:
        """`collate_facts`."""
        return collate_facts(groups)


def rows_of_people(owners: Sequence[str | None]) -> tuple[list[list[int]], int]:
    """The rows of each individual, in the order in which they are met, then each row of nobody's; and how many individuals."""
    groups: dict[str, list[int]] = {}
    alone = []
    for row, owner in enumerate(owners):
        if owner is None:
            alone.append([row])
        else:
            groups.setdefault(owner, []).append(row)
    return [*groups.values(), *alone], len(groups)


class ExampleRows(torch.utils.data.Dataset):
    """Examples for a data loader, padded with pad_token_id. class_names: as of `collate_tokens`."""

    def __init__(self, examples: Sequence[Example], pad_token_id: int, class_names: Sequence[str]) -> None:
        self.examples, self.pad_token_id, self.class_names = examples, pad_token_id, class_names

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Example:
        return self.examples[index]

    def collate(self, examples: Sequence[Example]) -> dict[str, Any]:
        """`collate_tokens`."""
        return collate_tokens(examples, self.pad_token_id, self.class_names)


def collate_facts(groups: Sequence[tuple[bool, list[TokenFacts]]]) -> dict[str, Any]:
    """Rows packed end to end, for `TrainedForCausalLM`: the heads read each position alone, so nothing is padded.

    Labels stand one place later than the positions that predict them. `group`, where somebody shares, says which positions
    share an individual; -1 for none. On many ranks, this rank's part of the batch.
    """
    groups, own = ranks.rows_of_rank(groups)
    rows = [row for _, group in groups for row in group]

    def packed(name: str) -> Tensor:
        return torch.cat([row.tensor(name) for row in rows]).unsqueeze(0)

    batch: dict[str, Any] = {}
    if any(shares for shares, _ in groups):
        owner = torch.tensor([index if shares else -1 for index, (shares, _) in enumerate(groups)])
        sizes = torch.tensor([sum(len(row) for row in group) for _, group in groups])
        batch["group"] = owner.repeat_interleave(sizes).unsqueeze(0)
    if rows[0].class_code is not None:
        codes, sizes = (
            torch.tensor(of_rows) for of_rows in ([row.class_code for row in rows], [len(row) for row in rows])
        )
        batch["classes"] = codes.repeat_interleave(sizes).unsqueeze(0)
    first = torch.full((1, 1), IGNORE_INDEX)
    batch |= {
        "labels": torch.cat([first, packed("targets").long()], dim=1),
        "numeric_labels": torch.cat([first.double(), packed("values")], dim=1),
        "facts": {name: packed(name) for name in ("features", "threshold", "num_scale")},
    }
    if rows[0].numbers is not None:
        candidates = KeptNumbers.joined([row.numbers for row in rows if row.numbers is not None]).candidates()
        batch["candidates"] = candidates | {name: candidates[name].unsqueeze(0) for name in ("rows", "at")}
    if rows[0].also_right.shape[1]:
        also_right = packed("also_right").long()
        batch["also_right"] = torch.cat([torch.full_like(also_right[:, :1], NO_TARGET), also_right], dim=1)
    return batch if own else ranks.without_losses(batch)


def class_code(example: Example, class_names: Sequence[str]) -> int:
    """`TokenFacts.class_code` of a row, where `class_names` have axes of their own."""
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
