"""Predictions for a file of rows, row by row."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from causalqwen.data import Row, collate, encode_rows
from causalqwen.files import writing
from causalqwen.modeling import CausalQwenForCausalLM, NumberPrediction
from causalqwen.training import LEVELS


def describe(prediction: NumberPrediction, value: float | None, *, raw: bool = False) -> dict[str, Any]:
    """One prediction as plain data: median, intervals by level, num_prob; crps and log_prob where the value is known."""
    described: dict[str, Any] = {
        "median": prediction.median,
        "intervals": {str(level): list(prediction.interval(level, raw=raw)) for level in LEVELS},
        "num_prob": prediction.num_prob,
    }
    if value is not None:
        described |= {"crps": prediction.crps(value), "log_prob": prediction.log_prob(value)}
    return described


def predict_rows(
    model: CausalQwenForCausalLM, rows: Sequence[Row], *, batch_size: int = 32, raw: bool = False
) -> Iterator[dict[str, Any]]:
    """Each row with its predictions, in order.

    A prompt row gets `median`, `intervals`, `num_prob` and, where it has a value, `crps` and `log_prob`. A text or
    messages row gets `numbers`: one entry per number in it, each predicted from the text before it; a number that
    stands first has nothing before it and gets null for its median.

    Raises RowError for a row that cannot be read, before anything is predicted.
    """
    encode_rows(rows, model.processor, getattr(model.config.text_config, "max_position_embeddings", None))
    with tqdm(total=len(rows), desc="predicting", unit="row", leave=False) as bar:
        for start in range(0, len(rows), batch_size):
            batch = rows[start : start + batch_size]
            prompts = [row for row in batch if row.kind == "prompt"]
            texts = [row for row in batch if row.kind != "prompt"]
            of_prompts = iter(model.predict_number([row.text(model.processor) for row in prompts], batch_size))
            of_texts = iter(_predict_texts(model, texts, raw)) if texts else iter(())
            for row in batch:
                if row.kind == "prompt":
                    yield row.fields | describe(next(of_prompts), row.value, raw=raw)
                else:
                    yield row.fields | {"numbers": next(of_texts)}
            bar.update(len(batch))


@torch.no_grad()
def _predict_texts(model: CausalQwenForCausalLM, rows: Sequence[Row], raw: bool) -> list[list[dict[str, Any]]]:
    examples = encode_rows(rows, model.processor)
    batch = collate(examples, model.processor.tokenizer.pad_token_id)
    for name in ("labels", "numeric_labels"):
        batch.pop(name)
    features = model.features(**{name: tensor.to(model.device) for name, tensor in batch.items()}).last_hidden_state
    found = []
    for row, example in enumerate(examples):
        places = [i for i, token in enumerate(example.input_ids) if token == model.config.num_token_id]
        before = torch.tensor([place - 1 for place in places if place > 0], dtype=torch.long)
        result = model.heads(features[row : row + 1, before], skip_logits=True)
        columns = (result.loc_Y[0], result.scale_Y[0], result.num_prob[0])
        parameters = iter(zip(*(column.tolist() for column in columns), strict=True))
        entries = []
        for place in places:
            value = example.numeric_values[place]
            described: dict[str, Any] = {"median": None}
            if place > 0:
                loc, scale, prob = next(parameters)
                described = describe(NumberPrediction(loc, scale, prob, model.value_law), value, raw=raw)
            entries.append({"value": value} | described)
        found.append(entries)
    return found


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> int:
    """Write rows as JSON lines; the file appears by rename when the last row is written. Returns their number."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with writing(path) as part, part.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
    return count
