"""Scores of a model on a file of rows, beside its rivals'."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from causalqwen.data import Example, number_classes
from causalqwen.evaluation.number_table import number_table
from causalqwen.evaluation.people import coverage_of_people
from causalqwen.files import finite, write_text
from causalqwen.modeling import CausalQwenForCausalLM
from causalqwen.modeling.backbones import reading
from causalqwen.training import FactStore, score_tokens
from causalqwen.training.levels_of_people import people_of


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
        `metrics`: what `metrics.json` holds: those of `score_tokens`, `rivals` where there are training rows, and `people`
        where rows name individuals (`coverage_of_people`).
        `values`: loc, scale and value of every number, for plots. `law`: theirs, see `score_tokens`. `prompts`: the text
        before each number.
    """
    fitted = (train_examples, validation_examples) if train_examples and validation_examples else ()
    if fitted:
        from causalqwen.evaluation.rivals import score_rivals  # what they are made of comes with an extra
    owners = [example.individual for example in examples]
    with reading(model, False if any(owners) else None):  # as in training
        store = FactStore.build(model, examples, work, title="rows to score")
        scores = score_tokens(model, store.blocks(), classes=number_classes(examples, model.config.num_token_id))
    table = number_table(model, examples)
    metrics = dict(scores["metrics"])
    if model.config.value_crossing and any(owners):  # individuals were learned
        metrics["people"] = coverage_of_people(model, people_of(model, store, owners), table.prompts)
    if fitted:
        train, validation = (number_table(model, part) for part in fitted)
        metrics["rivals"] = score_rivals(train, validation, table, scores["law"])
    return {"metrics": metrics, "values": scores["values"], "law": scores["law"], "prompts": table.prompts}


def write_metrics(path: Path, metrics: dict[str, Any]) -> None:
    """metrics.json, by rename."""
    write_text(path, json.dumps(finite(metrics), indent=2, sort_keys=True) + "\n")
