"""The numbers of rows, ready to be predicted: by a model, and by its rivals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from causalqwen.data import Example
from causalqwen.modeling import CausalQwenForCausalLM


@dataclass(frozen=True)
class NumberTable:
    """Numbers to predict: the text before each, the features there [n, H] ([n, 0] where none were read), and its value [n].

    cells: the columns that the texts were made of, where there were some.
    """

    prompts: list[str]
    features: np.ndarray
    values: np.ndarray
    cells: dict[str, list[Any]] | None = None

    def __len__(self) -> int:
        return len(self.prompts)


def number_table(model: CausalQwenForCausalLM, examples: Sequence[Example]) -> NumberTable:
    """Every number that the examples predict, in their order: the text before it and its value; no features."""
    prompts, values = [], []
    for example in examples:
        for end, token in enumerate(example.input_ids):
            if end == 0 or (example.learned is not None and not example.learned[end]):
                continue
            if token == model.config.num_token_id and math.isfinite(example.numeric_labels[end]):
                prompts.append(model.processor.decode(example.input_ids[:end], example.numeric_values[:end]))
                values.append(example.numeric_labels[end])
    return NumberTable(prompts, np.zeros((len(prompts), 0), np.float32), np.array(values, dtype=np.float64))
