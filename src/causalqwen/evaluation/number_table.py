"""The numbers of rows, ready to be predicted: by a model, and by its rivals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from causalqwen.data import Example
from causalqwen.data.columns import Columns
from causalqwen.modeling import CausalQwenForCausalLM
from causalqwen.parts.copying import Candidates
from causalqwen.training import FactStore


@dataclass(frozen=True)
class NumberTable:
    """Numbers to predict: the text before each, the features there [n, H], and its value [n].

    candidates: the numbers in each text, where the model that read them copies. class_name: of what kind all of them are, to a
    model of several kinds. cells: the columns that the texts were made of, where there were some.
    """

    prompts: list[str]
    features: np.ndarray
    values: np.ndarray
    candidates: Candidates | None = None
    class_name: str | None = None
    cells: Columns | None = None

    def __len__(self) -> int:
        return len(self.prompts)


def number_table(model: CausalQwenForCausalLM, examples: Sequence[Example], store: FactStore) -> NumberTable:
    """Every number that the facts predict, in their order: the text before it, the features there, its value."""
    prompts, places = [], []
    num_id = model.config.num_token_id
    for index, example in enumerate(examples):
        values, place = example.numeric_labels, store.offsets[index]
        for end, token in enumerate(example.input_ids):
            if end == 0 or (example.learned is not None and not example.learned[end]):
                continue
            if token == num_id and math.isfinite(values[end]):
                prompts.append(model.processor.decode(example.input_ids[:end], example.numeric_values[:end]))
                places.append(place)
            place += 1
    return NumberTable(prompts, np.array(store.facts.features[places]), np.array(store.facts.values[places]))
