"""Rivals, predictions, pictures and the report."""

import itertools
import json
import math
import re
from contextlib import nullcontext

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from scipy import stats

from causalqwen.data import RowError, encode_rows, parse_row
from causalqwen.evaluation import TablePredictor, evaluate, kept, predict_file, predict_rows, write_metrics
from causalqwen.evaluation.number_table import NumberTable, number_table
from causalqwen.evaluation.page import example_rows, write_page
from causalqwen.evaluation.plots import value_figures
from causalqwen.evaluation.quick import OPENINGS, other_world, people
from causalqwen.evaluation.rivals import RIVALS, score_rivals
from causalqwen.numbers import ValueLaw
from causalqwen.training import FactStore, TrainSettings, ValueStage, train
from conftest import graft_tiny


def table(count: int, seed: int) -> NumberTable:
    """A number that follows from one word, with noise."""
    rng = np.random.default_rng(seed)
    large = rng.integers(2, size=count)
    prompts = [f"The {'large' if each else 'small'} one is" for each in large]
    return NumberTable(prompts, np.zeros((count, 0), np.float32), 90.0 + 20 * large + rng.normal(size=count))


def test_rivals_are_scored_by_their_own_spread():
    law = ValueLaw(value_range=(60.0, 140.0))
    scores = score_rivals(table(400, 0), table(300, 1), table(500, 2), law)
    few = (1, 9, 9, "2 .* training rows hold 1"), (9, 0, 9, "2 .* validation"), (9, 9, 0, "1 .* scored")
    for train_rows, validation_rows, test_rows, told in few:
        with pytest.raises(ValueError, match=f"rivals need {told}"):
            score_rivals(table(train_rows, 0), table(validation_rows, 1), table(test_rows, 2), law)
    assert set(scores) == {*RIVALS} >= {"constant", "ngram_ridge", "constant_cauchy"}
    assert scores["ngram_ridge"]["median_error"] == pytest.approx(stats.norm.ppf(0.75), rel=0.15)
    assert scores["ngram_ridge"]["crps"] == pytest.approx(1 / np.sqrt(np.pi), rel=0.15)  # of a standard normal
    assert scores["constant"]["crps"] > 5 * scores["ngram_ridge"]["crps"]
    for name in scores.keys() - {"constant_cauchy"}:  # whose law does not fit these values
        for level, share in scores[name]["coverage"].items():
            assert share == pytest.approx(float(level), abs=0.08)
        assert name == "ngram_ridge" or np.isfinite(scores[name]["log_score"])  # that one gives quantiles alone


@pytest.fixture(scope="module")
def trained(tiny_tokenizer, tmp_path_factory):
    model = graft_tiny("llama", tiny_tokenizer)
    texts = [f"The {'long' if i % 2 else 'short'} one is {50 + 40 * (i % 2) + i % 5} in all." for i in range(60)]
    examples = encode_rows([parse_row(json.dumps({"text": t}), "x") for t in texts], model.processor)
    settings = TrainSettings(values=ValueStage(epochs=10, batch_size=8), logging_steps=5, evaluations=2)
    train(model, examples[:40], examples[40:], tmp_path_factory.mktemp("trained"), settings)
    return model, examples


@pytest.fixture(scope="module")
def result(trained, tmp_path_factory):
    """What `evaluate` gives, with rivals."""
    model, examples = trained
    known = {"train_examples": examples[:40], "validation_examples": examples[40:]}
    return evaluate(model, examples[40:], tmp_path_factory.mktemp("evaluated"), **known)


def test_evaluate_scores_the_model_beside_its_rivals(trained, result, tmp_path):
    model, examples = trained
    metrics = result["metrics"]
    keys = {
        "crps", "log_score", "mae", "median_error", "coverage", "num_f1", "accuracy", "ovr_sum_median",
        "backbone_agreement", "softmax_nll", "backbone_nll", "ovr_nll", "rivals",
    }  # fmt: skip
    assert keys <= metrics.keys() and set(metrics["coverage"]) == {"0.5", "0.8", "0.9"}
    assert {"constant", "ngram_ridge"} <= metrics["rivals"].keys()
    values = [result["values"][name] for name in ("loc", "scale", "value")]
    assert len(values[2]) == 20 and metrics["crps"] == pytest.approx(result["law"].crps(*values).mean().item())
    error = (result["law"].quantile(*values[:2], 0.5) - values[2]).abs()
    assert metrics["mae"] == pytest.approx(error.mean().item())
    write_metrics(tmp_path / "metrics.json", metrics)
    assert json.loads((tmp_path / "metrics.json").read_text())["crps"] == metrics["crps"]
    assert "rivals" not in evaluate(model, examples[40:], tmp_path)["metrics"]


def test_the_report_is_one_self_contained_page(trained, result, tmp_path):
    model, _ = trained
    persons, world = people(model, max_new_tokens=6), other_world(model)
    assert len({tuple(person["texts"]) for person in persons}) == 3
    assert {len(person["texts"]) for person in persons} == {2}
    assert people(model, max_new_tokens=6) == persons
    assert world["unchanged"] == world["said"] and world["edited"]
    path = tmp_path / "report.html"
    metrics = result["metrics"] | {"seconds": 90.0}
    write_page(
        path, "demo.html", backbone="A <name>", sizes={"train": 40, "test": 20}, metrics=metrics, people=persons,
        openings=OPENINGS, world=world, observed="Go <on>.",
        examples=example_rows(model, result["prompts"], result["values"]),
        **value_figures(result["law"], result["values"], "K"),
    )  # fmt: skip
    page = path.read_text()
    assert page.split("<noscript>")[0].count("<svg") == 2
    for told in ("A &lt;name&gt;", "Go &lt;on&gt;.", "ridge on character n-grams", "`causalqwen demo` in 1.5 minutes"):
        assert told in page
    assert not re.search(r'src=|href="http|url\((?!#)', page)
    told = re.search(r'data-draw="Values">(.*?)</script>', page)[1]
    medians = result["values"]["interval"][:, 0].tolist()
    for row in json.loads(told)["rows"]:
        place = result["prompts"].index(row["name"].removesuffix(" …"))
        assert row["median"] == pytest.approx(medians[place], rel=1e-3) and row["curve"]
    assert not list(tmp_path.glob("*.part"))


def test_predictions_are_written_row_by_row(trained, tmp_path):
    model, _ = trained
    rows = [
        parse_row('{"prompt": "The long one is", "value": 91, "id": "a"}', "r1"),
        parse_row('{"prompt": "The short one is "}', "r2"),
        parse_row('{"text": "7 or so. The long one is 90 and the short one is 50."}', "r3"),
        parse_row('{"text": "no number"}', "r4"),
        parse_row('{"messages": [{"role": "user", "content": "Is it 5?"}]}', "r5"),
    ]
    one, two, three, four, five = predict_rows(model, iter(rows), batch_size=2)
    (expected,) = model.predict_number("The long one is")
    assert one["id"] == "a" and one["median"] == pytest.approx(expected.median, rel=1e-5)
    assert set(one["intervals"]) == {"0.5", "0.8", "0.9"} and one["crps"] == pytest.approx(expected.crps(91), rel=1e-4)
    assert one["log_prob"] == pytest.approx(expected.log_prob(91), rel=1e-4) and 0 < one["num_prob"] < 1
    assert "crps" not in two and two["median"] == pytest.approx(model.predict_number("The short one is")[0].median)
    assert [n["value"] for n in three["numbers"]] == [7, 90, 50] and three["numbers"][0]["median"] is None
    of_text = three["numbers"][1]
    whole = model.predict_number("7 or so. The long one is")[0]
    assert of_text["median"] == pytest.approx(whole.median, rel=1e-4) and of_text["crps"] > 0
    assert four["numbers"] == [] and five["numbers"][0]["value"] == 5
    raw = next(predict_rows(model, rows[:1], raw=True))
    assert raw["intervals"]["0.9"] == pytest.approx(list(expected.interval(0.9, raw=True)), rel=1e-4)


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_no_line_holds_what_json_does_not_have(trained, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "The long one is", "value": 1e308}])
    predict_file(trained[0], rows, tmp_path / "out.jsonl")
    assert json.loads((tmp_path / "out.jsonl").read_text(), parse_constant=pytest.fail)["crps"] is None


def test_a_bad_row_stops_a_file_and_those_before_it_stay(trained, tmp_path):
    model, _ = trained
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": "fine"}, {"text": "is " + "9" * 400}])
    with pytest.raises(RowError, match=r"^in.jsonl, row 2, field text: .*float64$"):
        predict_file(model, source, tmp_path / "out.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
    with pytest.raises(RowError, match=r"row 2, .*; the 1 rows before it are kept in .*out.jsonl.part.jsonl"):
        predict_file(model, source, tmp_path / "out.jsonl", batch_size=1)
    write_rows(source, [{"prompt": "fine"}, {"text": "is 1e9"}])
    assert predict_file(model, source, tmp_path / "out.jsonl", batch_size=1, resume=True) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_a_stopped_prediction_is_taken_up_with_each_row_once(trained, tmp_path, monkeypatch):
    model, _ = trained
    rows = [{"prompt": f"The long one, number {index}, is", "id": index} for index in range(23)]
    source = write_rows(tmp_path / "in.jsonl", rows)
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    assert predict_file(model, source, whole, batch_size=4) == 23
    predict, calls = type(model).predict_number, itertools.count(1)

    def stops(*args, **settings):
        if next(calls) in (3, 5):
            raise RuntimeError("stopped")
        return predict(*args, **settings)

    monkeypatch.setattr(type(model), "predict_number", stops)
    part = tmp_path / "out.jsonl.part.jsonl"
    for attempt in range(2):
        with pytest.raises(RuntimeError, match="stopped"):
            predict_file(model, source, out, batch_size=4, resume=attempt > 0)
        assert not out.exists()
        with part.open("a") as file:
            file.write('{"prompt": "The lo')  # as a kill in the middle of a row leaves it
    assert part.read_text().count("\n") == 12
    with pytest.raises(ValueError, match="holds an unfinished run; resume it"):
        predict_file(model, source, out, batch_size=4)
    with pytest.raises(ValueError, match="another model or other options"):
        predict_file(model, source, out, batch_size=4, raw=True, resume=True)
    other = write_rows(tmp_path / "other.jsonl", rows[1:])
    with pytest.raises(ValueError, match=r"row 1 of .* is not that of the rows to write"):
        predict_file(model, other, out, batch_size=4, resume=True)
    assert predict_file(model, source, out, batch_size=4, resume=True) == 23
    assert out.read_text() == whole.read_text() and not part.exists()


def test_tables_go_in_and_out(trained, tmp_path, monkeypatch):
    model, _ = trained
    one = {"prompt": "The long one is", "text": None, "value": 91.0}
    rows = [one, {"prompt": None, "text": "It is 5.", "value": None}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    (tmp_path / "in.csv").write_text("\ufeffprompt,text,value\nThe long one is,,91\n,It is 5.,\n", encoding="utf-8")
    expected = list(predict_rows(model, (parse_row(json.dumps(row), "x") for row in rows)))
    for name in ("in.parquet", "in.csv"):
        assert predict_file(model, tmp_path / name, tmp_path / "out.parquet") == 2
        one, two = parquet.read_table(tmp_path / "out.parquet").to_pylist()
        assert one["median"] == expected[0]["median"] and one["intervals"] == expected[0]["intervals"]
        assert two["numbers"][0]["value"] == 5 and two["median"] is None and one["numbers"] is None
    model.save_pretrained(tmp_path / "model")
    worker, read = TablePredictor(str(tmp_path / "model"), device="cpu"), []
    monkeypatch.setattr("causalqwen.evaluation.predict.casting_once", lambda of: read.append(of) or nullcontext())
    table = worker(pa.Table.from_pylist(rows))
    predict_file(model, tmp_path / "in.csv", tmp_path / "out.parquet")
    assert read == [worker.model, model]  # weights are cast once for all batches
    assert table.to_pylist()[0]["median"] == expected[0]["median"]


def test_fields_called_as_a_prediction_are_kept_and_held_against_rows(trained, tmp_path):
    """A prompt's of these names, a text's `numbers`; and nothing that a row holds may change where a run is taken up."""
    model, _ = trained
    fields = {"prompt": "The long one is", "input_median": "x", "numbers": 3, "crps": 9}
    rows, out = [fields | {"median": row} for row in range(4)], tmp_path / "out.jsonl"
    source = write_rows(tmp_path / "rows.jsonl", [*rows, {"text": "It is 5.", "numbers": "mine"}])
    predict_file(model, source, out, batch_size=2)
    *made, text = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["input_input_median"] for row in made] == [0, 1, 2, 3] and made[0]["input_median"] == "x"
    assert made[0]["median"] > 5 and made[0]["input_numbers"] == 3 and made[0]["input_crps"] == 9
    assert "crps" not in made[0]
    assert text["input_numbers"] == "mine" and text["numbers"][0]["value"] == 5
    write_rows(source, [*rows[:3], {"prompt": ""}])
    with pytest.raises(RowError, match="row 4, field prompt: the text is empty; the 2 rows before it are kept"):
        predict_file(model, source, tmp_path / "again.jsonl", batch_size=2)
    write_rows(source, [rows[0], rows[1] | {"note": "new"}, *rows[2:]])
    with pytest.raises(ValueError, match=r"row 2 of .* is not that of the rows to write"):
        predict_file(model, source, tmp_path / "again.jsonl", batch_size=2, resume=True)
    write_rows(source, rows)
    assert predict_file(model, source, tmp_path / "again.jsonl", batch_size=2, resume=True) == 4


def test_rows_with_a_field_that_is_no_number_are_taken_up(trained, tmp_path):
    rows = [{"prompt": "The long one is", "weight": math.nan if row == 1 else 2.5} for row in range(3)]
    source, out = tmp_path / "rows.parquet", tmp_path / "out.jsonl"
    parquet.write_table(pa.Table.from_pylist([*rows, {"prompt": ""}]), source)
    with pytest.raises(RowError, match="row 4, field prompt"):
        predict_file(trained[0], source, out, batch_size=1)
    parquet.write_table(pa.Table.from_pylist(rows), source)
    assert predict_file(trained[0], source, out, batch_size=1, resume=True) == 3
    assert [json.loads(line)["weight"] for line in out.read_text().splitlines()] == [2.5, None, 2.5]


@pytest.mark.parametrize("rows_at_once", [1, 2, 4096])
def test_what_no_column_of_parquet_holds_is_text(trained, tmp_path, monkeypatch, rows_at_once):
    """However many rows are written at once."""
    model, _ = trained
    rows = [
        {"question": "How?", "answer": 3, "id": 2**70, "tag": {}, "on": True, "n": 1, "meta": {}, "big": 2**60 + 1},
        {"question": "Which?", "answer": "red", "id": 1, "tag": {}, "on": 1, "n": 2.5, "meta": {"k": 1}, "big": 0.5},
        {"question": "Which?", "answer": "red", "on": None},
    ]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    monkeypatch.setattr(kept, "_ROWS_AT_ONCE", rows_at_once)
    assert predict_file(model, source, tmp_path / "out.PQ") == 3
    table = parquet.read_table(tmp_path / "out.PQ").to_pydict()
    told = {name: [cell and json.loads(cell) for cell in table[name]] for name in ("answer", "id", "on", "big")}
    assert told["answer"] == [3, "red", "red"] and told["id"] == [2**70, 1, None] and told["on"] == [True, 1, None]
    assert told["big"] == [2**60 + 1, 0.5, None] and [meta and meta["k"] for meta in table["meta"]] == [None, 1, None]
    assert table["tag"] == ["{}", "{}", None] and table["n"] == [1.0, 2.5, None]
    assert table["question"] == [row["question"] for row in rows] and table["median"][0] > 0


def test_facts_of_a_store_and_prompts_of_a_table_belong_together(trained, tmp_path):
    model, examples = trained
    store = FactStore.build(model, examples[:5], tmp_path)
    made, at = number_table(model, examples[:5]), np.isfinite(store.facts.values)
    assert made.prompts[1] == "The long one is" and made.values.tolist() == [50, 91, 52, 93, 54]
    inputs = model.processor(made.prompts[1], return_tensors="pt")
    with torch.no_grad():
        z = model.features(**inputs).last_hidden_state[0, -1]
    torch.testing.assert_close(torch.from_numpy(store.facts.features[at][1]), z, rtol=1e-3, atol=1e-4)
