"""Scores of a model on a file of rows, beside its rivals'."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from causalqwen.data import Example, number_classes
from causalqwen.files import write_text
from causalqwen.modeling import CausalQwenForCausalLM
from causalqwen.modeling.precision import reading
from causalqwen.parts.copying import Candidates
from causalqwen.training import FactStore, score_tokens


@dataclass(frozen=True)
class NumberTable:
    """Numbers to predict: the text before each, the features there [n, H], and its value [n].

    candidates: the numbers in each text, where the model that read them copies. class_name: of what kind all of them are, to a
    model of several kinds.
    """

    prompts: list[str]
    features: np.ndarray
    values: np.ndarray
    candidates: Candidates | None = None
    class_name: str | None = None

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


def evaluate(
    model: CausalQwenForCausalLM,
    examples: Sequence[Example],
    work: Path,
    *,
    train_examples: Sequence[Example] = (),
    validation_examples: Sequence[Example] = (),
) -> dict[str, Any]:
    """Scores on `examples`, and those of the rivals fitted on `train_examples` (their spread on the validation ones).

    Returns:
        `metrics`: what `metrics.json` holds: those of `score_tokens`, and `rivals` where there are training rows.
        `values`: loc, scale and value of every number, for plots. `law`: theirs, see `score_tokens`. `prompts`: the text
        before each number.
    """
    fitted = (train_examples, validation_examples) if train_examples and validation_examples else ()
    if fitted:
        from causalqwen.evaluation.rivals import score_rivals  # what they are made of comes with an extra
    with reading(model):
        store = FactStore.build(model, examples, work, title="rows to score")
        others = [FactStore.build(model, part, work, title="rows of the rivals", rest=False) for part in fitted]
        scores = score_tokens(model, store.blocks(), classes=number_classes(examples, model.config.num_token_id))
    table = number_table(model, examples, store)
    metrics = dict(scores["metrics"])
    if fitted:
        train, validation = (number_table(model, *part) for part in zip(fitted, others, strict=True))
        metrics["rivals"] = score_rivals(train, validation, table, scores["law"])
    return {"metrics": metrics, "values": scores["values"], "law": scores["law"], "prompts": table.prompts}


def write_metrics(path: Path, metrics: dict[str, Any]) -> None:
    """metrics.json, by rename."""
    write_text(path, json.dumps(metrics, indent=2, sort_keys=True) + "\n")
