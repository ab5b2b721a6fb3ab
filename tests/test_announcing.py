"""When a number comes, what is held out by default, and what is said of both in the end."""

import json
import math
import re

import pytest
import torch
from typer.testing import CliRunner

from causalqwen import NumberPrediction
from causalqwen.data import EncodedRows, encode_rows
from causalqwen.data.texts import speech_paragraphs
from causalqwen.evaluation.page import number_row
from causalqwen.evaluation.portrait import _median_and_interval
from causalqwen.evaluation.predict import predict_file, predict_rows
from causalqwen.evaluation.quick import sketch
from causalqwen.losses import shift_targets
from causalqwen.modeling import prediction as predicting
from causalqwen.modeling.prediction import ANNOUNCED, Scored, describe, how_well, prediction_to_dict
from causalqwen.numbers import ValueLaw
from causalqwen.numbers.rendering import brief
from causalqwen.training import TrainSettings, ValueStage
from causalqwen.training.held_out import hold_out, rows_together
from causalqwen.training.run import learn
from causalqwen.training.trainer import TrainedForCausalLM
from causalqwen_cli.app import app
from causalqwen_cli.base import in_words
from conftest import graft_tiny

WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
FEW = TrainSettings(values=ValueStage(epochs=1, batch_size=64), value_transform="affine")


def prompts(count, start=0, **fields):
    return [
        {"prompt": f"The {WORDS[i % 10]} of {WORDS[i // 10 % 10]} is", "value": 10 * (i % 10) + i // 10} | fields
        for i in range(start, start + count)
    ]


def learned(tokenizer, folder, rows, settings=FEW, **graft):
    model, said = graft_tiny("llama", tokenizer, **graft), []
    metrics = learn(model, encode_rows(rows, model.processor), [], folder, settings, say=said.append)
    return model.eval(), metrics, said


# ---- <NUM>'s row ----------------------------------------------------------------------------------------------------------


def test_a_single_update_is_enough_to_announce_numbers_and_no_others(tiny_tokenizer, tmp_path):
    model, _, _ = learned(tiny_tokenizer, tmp_path / "run", prompts(60))
    before = graft_tiny("llama", tiny_tokenizer).eval()
    text = model.processor("\n".join(speech_paragraphs(1962, numbers=False)[:3]), return_tensors="pt")
    asked = [row["prompt"] for row in prompts(20, 70)]
    sure = {}
    for name, one in (("before", before), ("after", model)):
        with torch.no_grad():
            elsewhere = one(**text).num_prob.mean().item()
        sure[name] = sum(of.num_prob for of in one.predict_number(asked)) / 20, elsewhere
    assert sure["after"][0] > 5 * sure["after"][1]  # a random backbone hardly tells more


def test_the_row_of_a_number_is_the_minimum_and_later_updates_leave_it(tiny_tokenizer, tmp_path):
    rows = prompts(60)
    model, _, _ = learned(tiny_tokenizer, tmp_path / "one", rows)
    longer = TrainSettings(values=ValueStage(epochs=9, batch_size=8), value_transform="affine")
    other, _, _ = learned(tiny_tokenizer, tmp_path / "nine", rows, longer)
    assert torch.equal(model.action.num_row, other.action.num_row) and bool(model.action.num_row.any())
    assert torch.equal(model.action.num_bias, other.action.num_bias)


# ---- what is held out -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "held"), [(35, 0), (36, 9), (60, 15), (99, 19), (100, 20)])
def test_a_part_of_few_rows_is_held_out_too(tiny_tokenizer, count, held):
    model = graft_tiny("llama", tiny_tokenizer)
    rest, kept = hold_out(encode_rows(prompts(count), model.processor), seed=0)
    assert (len(rest), len(kept)) == (count - held, held)


def test_individuals_are_held_out_whole_and_no_class_is(tiny_tokenizer):
    model = graft_tiny("llama", tiny_tokenizer)
    fields = [row | {"individual": f"{i // 2}", "group": f"{i % 7}"} for i, row in enumerate(prompts(80))]
    rest, held = hold_out(encode_rows(fields, model.processor), seed=0)
    assert len(held) == 20 and not {one.individual for one in rest} & {one.individual for one in held}
    assert len(rows_together(held)) == 10
    rare = [row | {"class": "rare" if i == 0 else "often"} for i, row in enumerate(prompts(60))]
    for seed in range(12):
        rest, held = hold_out(EncodedRows(rare, model.processor), seed=seed)
        assert {one.class_name for one in rest} == {"rare", "often"} and len(held) >= 14


def test_intervals_are_calibrated_by_default_by_rows_that_chose_no_state(tiny_tokenizer, tmp_path):
    model, metrics, said = learned(tiny_tokenizer, tmp_path / "run", prompts(60))
    assert model.config.interval_levels and model.trained_on["rows"] == 45 and model.trained_on["held_out"] == 15
    assert metrics["value_count"] == 15 and metrics["held_coverage"] <= metrics["coverage"]["0.9"] + 0.07
    assert "15 of the 60 training rows are held out" in said[0]
    records = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert "eval/" not in records  # nothing was chosen by them
    stays, _, said = learned(
        tiny_tokenizer, tmp_path / "off", prompts(60), TrainSettings(values=FEW.values, recalibrate=False)
    )
    assert stays.config.interval_levels is None and stays.trained_on["rows"] == 60
    assert not any("held out" in line for line in said)
    few, _, said = learned(tiny_tokenizer, tmp_path / "few", prompts(20))
    assert few.config.interval_levels is None and "too few to hold some out" in said[0] and "not known" in said[0]


def test_people_are_held_out_to_calibrate_by(tiny_tokenizer, tmp_path):
    rows = [row | {"individual": f"{i // 2}"} for i, row in enumerate(prompts(80))]
    model, metrics, _ = learned(tiny_tokenizer, tmp_path / "run", rows, value_family="gaussian")
    assert model.config.interval_levels and model.trained_on["held_out"] == 20 and metrics["value_count"] == 20


def test_coverage_is_told_of_levels_that_others_gave(tiny_tokenizer, tmp_path):
    """One row far off, behind a prompt of its own, never lies in intervals of the others'; its own levels hold it."""
    model = graft_tiny("llama", tiny_tokenizer)
    rows, held = prompts(40), prompts(20, 40)
    held[7]["value"] = 1e7
    args = (encode_rows(part, model.processor) for part in (rows, held))
    metrics = learn(
        model, *args, tmp_path / "run", TrainSettings(values=FEW.values, value_transform="affine", support=None)
    )
    assert metrics["held_coverage"] <= 0.95 and len(model.config.interval_levels) == 101


# ---- what is said ---------------------------------------------------------------------------------------------------------


def test_what_is_not_announced_says_so_wherever_it_is_shown(tmp_path):
    law = ValueLaw(family="gaussian")
    for num_prob, announced in ((0.0001, False), (0.49, False), (ANNOUNCED, True), (1.0, True), (None, True)):
        one = NumberPrediction(495.0, 80.0, num_prob, law)
        assert one.announced is announced
        assert ("no number is announced" in str(one)) is not announced
        for entry in (describe(one, None), prediction_to_dict(one)):
            assert entry.get("announced", True) is announced
        assert number_row("x", 1.0, one, "a note").get("announced", True) is announced
        assert ("no number" in one.plot().axes[0].get_title()) is not announced


def test_a_graft_that_learned_nothing_says_so_once(tiny_tokenizer, tmp_path, monkeypatch):
    model, warned = graft_tiny("llama", tiny_tokenizer), []
    monkeypatch.setattr(predicting.logger, "warning_once", warned.append)
    model.predict_number("The one of two is")
    assert len(warned) == 1 and "has learned no numbers" in warned[0] and "causalqwen train" in warned[0]
    trained, _, _ = learned(tiny_tokenizer, tmp_path / "run", prompts(40))
    trained.predict_number("The one of two is")
    assert len(warned) == 1


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (373.15, "373.15"), (383.78, "383.78"), (417.70345211, "417.7"), (15234.5678901, "15230"), (0.1 + 0.2, "0.3000"),
        (-273.15, "-273.15"), (0, "0"), (1e20, "1e+20"), (1234567.0, "1234567"), (math.inf, "inf"), (0.00125, "0.00125"),
    ],
)  # fmt: skip
def test_a_value_that_was_observed_is_shown_as_it_is(value, text):
    assert brief(value) == text


def test_values_are_shown_by_one_rule():
    law = ValueLaw(family="gaussian")
    sharp = NumberPrediction(373.15, 1e-9, None, law)
    assert _median_and_interval(sharp).startswith("373.15 (") and "^ 373.15" in sketch(sharp)


def test_scores_are_one_sentence():
    assert how_well(15, 1506.2, 14 / 15) == "typically off by 1,500; 90% intervals held 93% of 15 values"
    assert how_well(1, 0.0, 1.0) == "typically off by 0; 90% intervals held 100% of 1 value"
    assert how_well(2000, 0.01234, 0.9) == "typically off by 0.012; 90% intervals held 90% of 2,000 values"
    scored = Scored()
    assert not scored.plain and str(scored) == ""
    for entry, value in (({"median": 5.0, "intervals": {"0.9": [None, 9.0]}}, 4.0), ({"median": None}, 3.0)):
        scored.add(entry, value)
    scored.add({"median": 5.0, "intervals": {"0.9": [4.0, 6.0]}}, None)
    scored.add({"median": 5.0, "intervals": {"0.9": [4.0, 6.0]}}, 8.0)
    assert scored.plain == {"values": 2, "median_error": 2.0, "coverage": 0.5}
    metrics = {
        "value_count": 4,
        "median_error": 2.0,
        "coverage": {"0.9": 1.0},
        "held_coverage": 0.75,
        "announced": 0.25,
    }
    text = in_words(metrics)
    assert "held 75% of 4 values; <NUM> is announced at 1 of them, too few" in text
    assert "too few" not in in_words(metrics | {"announced": 1.0})


def test_rows_with_values_are_scored_while_they_are_predicted(tiny_tokenizer, tmp_path):
    model, _, _ = learned(tiny_tokenizer, tmp_path / "run", prompts(60))
    rows = [*prompts(5, 70), {"prompt": "The one of two is"}, {"text": "The two of one is 12 in all."}]
    source, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    whole, again = Scored(), Scored()
    assert predict_file(model, source, out, batch_size=2, scored=whole) == 7
    lines = list(map(json.loads, out.read_text().splitlines()))
    known = [(row["median"], row["value"]) for row in lines if "median" in row and "value" in row]
    known += [(one["median"], one["value"]) for row in lines for one in row.get("numbers", ())]
    assert whole.errors == pytest.approx([abs(median - value) for median, value in known]) and len(known) == 6
    assert all(row["announced"] is (row["num_prob"] >= ANNOUNCED) for row in lines if "median" in row)
    part = tmp_path / "again.jsonl.part.jsonl"
    (tmp_path / "broken.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in [*rows[:4], {"prompt": "x " * 9000}])
    )
    with pytest.raises(ValueError, match="are kept in"):
        predict_file(model, tmp_path / "broken.jsonl", tmp_path / "again.jsonl", batch_size=2)
    assert part.exists()
    predict_file(model, source, tmp_path / "again.jsonl", batch_size=2, resume=True, scored=again)
    assert again.plain == pytest.approx(whole.plain)
    assert next(predict_rows(model, rows[:1]))["announced"] in (True, False)


def test_commands_end_in_words(tiny_tokenizer, tmp_path):
    graft_tiny("llama", tiny_tokenizer).save_pretrained(tmp_path / "model")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in prompts(60)))
    (tmp_path / "few.yaml").write_text("values: {epochs: 1}\n")

    def run(*arguments):
        result = CliRunner().invoke(app, [str(one) for one in arguments])
        assert result.exit_code == 0, result.output
        return result.stdout.strip()

    out = tmp_path / "trained"
    args = ("--model", tmp_path / "model", "--train", rows, "--output", out, "--config", tmp_path / "few.yaml")
    text = run("train", *args)
    assert "trained on 45 rows; on those held out typically off by " in text and "f1" not in text
    assert re.search(r"of 15 values; <NUM> is announced at \d+ of them", text)
    text = run("predict", "--model", out, "--input", rows, "--output", tmp_path / "out.jsonl")
    assert "60 rows; typically off by " in text and "of 60 values" in text


# ---- what the configuration says of the loss ------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [True, False])
def test_the_gate_carries_a_gradient_only_if_the_configuration_says_so(tiny_tokenizer, whole):
    """d/d b_NUM of the value's part alone: none through a gate that is detached."""
    slopes = {}
    for detach in (True, False):
        model = graft_tiny("llama", tiny_tokenizer, gate_alpha=0.25, gate_detach=detach, value_loss_weight=2.5)
        batch, labels = numbers(model)
        out = result(model, batch, labels, whole)
        slopes[detach] = torch.autograd.grad(out["loss_reg"], model.action.num_bias, allow_unused=True)[0]
        assert out["loss"].item() == pytest.approx((out["loss_cls"] + 2.5 * out["loss_reg"]).item())
    assert slopes[True] is None or slopes[True] == 0
    assert slopes[False] is not None and slopes[False] != 0


def test_scores_weigh_the_value_as_the_configuration_says(tiny_tokenizer, tmp_path):
    for weight in (0.0, 1.0, 2.5):
        settings = TrainSettings(values=FEW.values, value_transform="affine")
        _, metrics, _ = learned(tiny_tokenizer, tmp_path / str(weight), prompts(40), settings, value_loss_weight=weight)
        assert metrics["loss"] == pytest.approx(metrics["cls_loss"] + weight * metrics["reg_loss"])


def numbers(model):
    batch = model.processor(["The one of two is 12.5 in all."], return_tensors="pt")
    return batch, batch["input_ids"].clone()


def result(model, batch, labels, whole):
    if whole:
        return vars(model(**batch, labels=labels))
    values = torch.where(labels == model.config.num_token_id, batch["numeric_values"], torch.nan)
    assert shift_targets(labels, values, None, model.config.num_token_id).num_mask.any()
    return TrainedForCausalLM(model)(labels=labels, numeric_labels=values, **batch)
