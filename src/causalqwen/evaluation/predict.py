"""Predictions for rows of any number: file to file, taken up again where it was stopped, or table by table in workers."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from causalqwen.data import Example, Row, RowError, check_row, collate, encode_rows, stream_rows
from causalqwen.data.rows import arrow_for, checked_rows, kept_beside
from causalqwen.evaluation.kept import Answers, write_kept
from causalqwen.files import check_kind, json_line, suffix_of
from causalqwen.modeling import CausalQwenForCausalLM
from causalqwen.modeling.backbones import bf16_pays, casting_once
from causalqwen.modeling.loading import fingerprint, load_model
from causalqwen.modeling.prediction import DESCRIBED, Scored, describe_all
from causalqwen.modeling.survey import batches


def predict_rows(
    model: CausalQwenForCausalLM, rows: Iterable[Row | dict[str, Any]], *, batch_size: int = 32, raw: bool = False
) -> Iterator[dict[str, Any]]:
    """Each row, or dictionary of a row's fields (`checked_rows`), with its predictions, in order; `batch_size` rows are held at
    a time.

    A prompt row, and a question for a number, gets `median`, `intervals`, `num_prob` and, where it has a value, `crps` and
    `log_prob`. Any other row gets `numbers`: one entry per number in it, each predicted from the text before it; a number
    that stands first has nothing before it and gets null for its median. Intervals are those of the row's `class`, see
    `classes_of_rows`.

    Raises RowError for a row that cannot be read, before anything of its batch is predicted.
    """
    for batch in batches(checked_rows(rows), batch_size):
        yield from _predict_batch(model, batch, raw)


def classes_of_rows(model: CausalQwenForCausalLM, rows: Sequence[Row]) -> list[str | None]:
    """The class by whose law each row's numbers are predicted; none, whatever rows say, where the model knows no classes.

    Raises RowError for a class that is not among those that the model knows, and for none where it needs one.
    """
    if not model.value_axes.known:
        return [None] * len(rows)
    for row in rows:
        try:
            model.value_axes.check(row.class_name)
        except ValueError as error:
            raise RowError(f"{row.place}, field class: {error}") from None
    return [row.class_name for row in rows]


def _predict_batch(model: CausalQwenForCausalLM, rows: Sequence[Row], raw: bool) -> list[dict[str, Any]]:
    limit = model.config.context_length
    examples = encode_rows(rows, model.processor, limit)  # all are checked before anything is predicted
    classes = classes_of_rows(model, rows)
    prompts = [place for place, row in enumerate(rows) if row.asks_number]
    texts = [place for place, row in enumerate(rows) if not row.asks_number]
    asked = [rows[place].text(model.processor) for place in prompts]
    with model.frozen_vocabulary():
        predicted = model.predict_number(asked, len(rows), classes=[classes[place] for place in prompts])
        read, of_kind = [examples[place] for place in texts], [classes[place] for place in texts]
        of_texts = iter(_predict_texts(model, read, of_kind, raw) if texts else [])
    of_prompts = iter(describe_all(predicted, [rows[place].value for place in prompts], raw=raw))
    return [_own(row) | (next(of_prompts) if row.asks_number else {"numbers": next(of_texts)}) for row in rows]


def _own(row: Row) -> dict[str, Any]:
    """What a row holds, under the names that it has beside its prediction."""
    return kept_beside(row.fields, (*DESCRIBED, "numbers"))


@torch.no_grad()
def _predict_texts(
    model: CausalQwenForCausalLM, examples: Sequence[Example], classes: Sequence[str | None], raw: bool
) -> list[list[dict[str, Any]]]:
    batch = collate(examples, model.processor.tokenizer.pad_token_id)
    for name in ("labels", "numeric_labels", "also_right"):
        batch.pop(name, None)
    batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
    features = model.features(**batch).last_hidden_state
    candidates = model.candidates(features, **batch)
    places, predictions, values = [], [], []
    for row, example in enumerate(examples):  # each offers its own numbers again, and they are many
        places.append([i for i, token in enumerate(example.input_ids) if token == model.config.num_token_id])
        behind_words = [place for place in places[-1] if place > 0]
        before = torch.tensor(behind_words, dtype=torch.long) - 1
        offered = None if candidates is None else candidates[row, before]
        predictions += model.predict_values(features[row, before], None, offered, [classes[row]] * len(before))
        values += [example.numeric_values[place] for place in behind_words]
    described = iter(describe_all(predictions, values, raw=raw))

    def number(example: Example, place: int) -> dict[str, Any]:
        return {"value": example.numeric_values[place]} | (next(described) if place > 0 else {"median": None})

    return [[number(one, place) for place in of_row] for one, of_row in zip(examples, places, strict=True)]


def predict_file(
    model: CausalQwenForCausalLM,
    source: Path,
    output: Path,
    *,
    batch_size: int = 32,
    raw: bool = False,
    resume: bool = False,
    total: int | None = None,
    scored: Scored | None = None,
) -> int:
    """`predict_rows` from file to file (`.parquet`, else JSON lines), a batch in memory at a time. Returns the rows.

    A run that was stopped, however it was, is taken up with `resume=True` (`write_kept`): the rest comes out as it would have,
    each row once.

    Args:
        total: how many rows the source has, for the progress bar. scored: counts the rows whose values are known.

    Raises:
        RowError: a row that cannot be used; those before it stay kept.
        ValueError: a file of another kind (.csv); an unfinished run beside `output` (without `resume`), or one of another
            model, of other options or rows.
        ImportError: a Parquet file where pyarrow is not installed.
    """
    output = Path(output)
    check_output(output)
    counted = Scored() if scored is None else scored

    def count(entry: dict[str, Any], row: Row) -> None:
        for prediction in [entry] if row.asks_number else entry["numbers"]:
            counted.add(prediction, row.value if row.asks_number else prediction["value"])

    def answer(rows: Sequence[Row]) -> list[dict[str, Any]]:
        entries = _predict_batch(model, rows, raw)
        for entry, row in zip(entries, rows, strict=True):
            count(entry, row)
        return entries

    def belongs(kept: dict[str, Any], row: Row) -> bool:
        own = _own(row)
        is_its = json.dumps({name: kept.get(name) for name in own}) == json.dumps(json.loads(json_line(own)))
        if is_its:
            count(kept, row)
        return is_its

    options = {"model": fingerprint(model), "raw": raw, "batch_size": batch_size}
    answers = Answers(options, stream_rows(source), answer, belongs, batch_size, total, "predicting")
    with casting_once(model), model.frozen_vocabulary():
        return write_kept(output, answers, resume=resume)


def check_output(output: Path) -> None:
    """ValueError for a file of a kind that is not written, ImportError for a Parquet file where pyarrow is not installed."""
    check_kind(output, (".jsonl", ".parquet"))
    if suffix_of(output) == ".parquet":
        arrow_for(output)


class TablePredictor:
    """A worker that predicts tables: Arrow table in, the same with predictions out. For `ray.data.Dataset.map_batches`.

    model: folder of a grafted model, read once per worker. Rows and results are those of `predict_rows`.
    """

    def __init__(self, model: str, *, batch_size: int = 32, raw: bool = False, device: str = "auto") -> None:
        self.model = load_model(model, device)
        self.model.bf16 = bf16_pays(self.model)
        self.batch_size, self.raw = batch_size, raw

    def __call__(self, table: Any) -> Any:
        import pyarrow as pa

        rows = (check_row(fields, f"row {number}") for number, fields in enumerate(table.to_pylist(), start=1))
        with casting_once(self.model), self.model.frozen_vocabulary():
            predicted = list(predict_rows(self.model, rows, batch_size=self.batch_size, raw=self.raw))
        return pa.Table.from_struct_array(pa.array(predicted))
