"""Classes of numbers that have axes of their own: one model of several quantities."""

import json
import math

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from causalqwen import CausalQwenForCausalLM
from causalqwen.data import RowError, encode_rows, parse_row, read_rows
from causalqwen.evaluation import predict_file
from causalqwen.numbers import ValueTransform
from causalqwen.training import FactStore, HeadStage, LoraStage, TrainSettings, ValueStage, train
from causalqwen.training.batches import FactRows, class_code, collate_tokens
from causalqwen.training.trainer import TrainedForCausalLM
from causalqwen_cli.app import app
from conftest import graft_tiny


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


UNITS = {"grams": 0.002, "heads": 3e6}


def weighed(count: int, seed: int) -> list[dict]:
    """Values of two classes, whose sizes are a billion apart, and whose text says which of two halves they lie in."""
    rng = np.random.default_rng(seed)
    return [
        {
            "prompt": f"The {'big' if big else 'small'} one is",
            "value": round(unit * (1 + 0.4 * big + 0.02 * rng.normal()), 8),
            "class": name,
        }
        for name, unit in UNITS.items()
        for big in rng.integers(2, size=count)
    ]


@pytest.fixture(scope="module")
def with_axes(tiny_tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("axes")
    model = graft_tiny("llama", tiny_tokenizer)
    files = {
        part: written(folder / f"{part}.jsonl", weighed(count, count)) for part, count in (("train", 80), ("eval", 99))
    }
    learned, held = (encode_rows(read_rows(file), model.processor) for file in files.values())
    stage = ValueStage(epochs=60, batch_size=20, learning_rate=3e-3)
    settings = TrainSettings(values=stage, evaluations=1, class_transforms=True)
    metrics = train(model, learned, held, folder / "model", settings)
    return model.eval(), metrics, learned, held, files, folder / "model"


def test_one_model_learns_quantities_of_any_size_each_on_its_own_axis(with_axes):
    model, metrics, _, _, _, folder = with_axes
    assert set(model.config.class_values) == set(UNITS)
    loaded = CausalQwenForCausalLM.from_pretrained(folder)
    for name, unit in UNITS.items():
        small, big = model.predict_number(["The small one is", "The big one is"], classes=name)
        assert small.median == pytest.approx(unit, rel=0.1) and big.median == pytest.approx(1.4 * unit, rel=0.1)
        assert loaded.predict_number("The big one is", classes=name)[0].median == pytest.approx(big.median, rel=1e-5)
        assert metrics["classes"][name]["median_error"] < 0.1 * unit and metrics["classes"][name]["own_levels"]
        assert model.config.class_values[name]["value_range"] == pytest.approx([unit, 1.4 * unit], rel=0.1)
    mixed = model.predict_number(["The big one is"] * 2, classes=["heads", "grams"])
    assert mixed[0].median / mixed[1].median == pytest.approx(UNITS["heads"] / UNITS["grams"], rel=0.2)


def test_who_asks_such_a_model_names_a_class(with_axes, tmp_path):
    model, _, _, _, files, folder = with_axes
    for ask in (
        lambda: model.predict_number("The big one is"),
        lambda: model.predict_number(["It is"] * 2, classes=["heads", None]),
        lambda: model.generate(
            **model.processor("The big one is", return_tensors="pt"),
            max_new_tokens=2,
            prefix_allowed_tokens_fn=lambda *_: [model.config.num_token_id],
        ),
        lambda: model.value_transform,
    ):
        with pytest.raises(ValueError, match="axes of their own: name one of grams, heads, for each number"):
            ask()
    model.number_class = "heads"
    try:
        assert model.predict_number("The big one is") == model.predict_number("The big one is", classes="heads")
        assert model.value_transform == model.value_law_of("heads").transform
        assert model.generated_values(torch.zeros(1)).item() == pytest.approx(
            model.value_transform.center, rel=5e-4
        )  # four digits
        model.generate(**model.processor("The big one is", return_tensors="pt"), max_new_tokens=2)
    finally:
        model.number_class = None
    source = written(tmp_path / "rows.jsonl", [{"prompt": "It is", "class": "grams"}, {"prompt": "It is"}])
    with pytest.raises(
        RowError, match="row 2, field class: the classes of this model's numbers have axes of their own"
    ):
        predict_file(model, source, tmp_path / "out.jsonl")
    arguments = ["evaluate", "--model", folder, "--data", files["eval"], "--output", tmp_path / "scores"]
    arguments += ["--train", files["train"], "--validation", files["eval"]]
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.stderr
    found = json.loads((tmp_path / "scores" / "metrics.json").read_text())
    assert found["quantile_crps"] < 0.2 * found["rivals"]["ngram_ridge"]["quantile_crps"]


def test_losses_of_classes_are_those_of_each_alone_in_value_and_gradient(tiny_tokenizer):
    model = graft_tiny("llama", tiny_tokenizer).eval()
    with_symlogs(model)
    torch.nn.init.normal_(model.value_branch.residual.last.weight, std=0.1)
    z = torch.randn(7, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    codes = torch.tensor([1, 0, 1, 1, 0, 1, 0])
    names = list(model.config.class_values)
    values = torch.tensor([UNITS[names[code]] * (1 + 0.1 * i) for i, code in enumerate(codes)], dtype=torch.float64)
    weight = model.action.value_head.weight
    together = model.value_losses(z, values, classes=codes)
    (gradient,) = torch.autograd.grad(together.sum(), weight)
    alone, summed = torch.zeros_like(together), torch.zeros_like(weight)
    for row, code in enumerate(codes.tolist()):
        model.number_class = names[code]
        loss = model.value_losses(z[row : row + 1], values[row : row + 1])
        alone[row], summed = loss.detach(), summed + torch.autograd.grad(loss.sum(), weight)[0]
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, summed, rtol=1e-4, atol=1e-5)


def with_symlogs(model) -> None:
    """Give the classes axes."""
    axes = {
        name: ValueTransform.fit("symlog", torch.tensor([unit, 2 * unit, 3 * unit])) for name, unit in UNITS.items()
    }
    model.config.class_values = {
        name: {"value_transform": axis.to_dict(), "value_range": None, "value_place": None}
        for name, axis in axes.items()
    }


@pytest.mark.parametrize("copying", [False, True])
def test_tokens_of_classes_lose_what_their_kept_facts_lose(tiny_tokenizer, tmp_path, copying):
    model = graft_tiny("llama", tiny_tokenizer, copy_numbers=copying).eval()
    rows = [parse_row(json.dumps(row | {"prompt": "7 and " + row["prompt"]}), "a") for row in weighed(3, 0)]
    rows += [parse_row('{"text": "no number here"}', "a"), parse_row('{"text": "nor here", "class": "news"}', "a")]
    examples = encode_rows(rows, model.processor)
    with_symlogs(model)
    store, trained = FactStore.build(model, examples, tmp_path), TrainedForCausalLM(model)
    codes = [class_code(example, list(UNITS)) for example in examples]
    assert codes == [0, 0, 0, 1, 1, 1, -1, -1]
    facts = FactRows(store, classes=codes)
    for chosen in ([0, 4, 1], [5], [6], [7, 6], list(range(8))):
        of_facts = trained(**facts.collate(chosen))
        of_tokens = trained(**collate_tokens([examples[i] for i in chosen], 2, list(UNITS)))
        torch.testing.assert_close(of_facts["loss_reg"], of_tokens["loss_reg"], rtol=1e-5, atol=1e-6)
    assert "classes" not in FactRows(store).collate([0])


def test_rows_without_numbers_need_no_class(tiny_tokenizer, tmp_path):
    """In batches of their own too, and in every stage; a model whose `number_class` is set is trained like any other."""
    model = graft_tiny("llama", tiny_tokenizer, copy_numbers=True)
    rows = [parse_row(json.dumps(row | {"prompt": "7 and " + row["prompt"]}), "a") for row in weighed(4, 0)]
    rows += [parse_row('{"text": "no number here"}', "a"), parse_row('{"text": "nor here", "class": "news"}', "a")]
    examples = encode_rows(rows, model.processor)
    stages = {"values": ValueStage(epochs=1, batch_size=1), "heads": HeadStage(batch_size=1), "lora": LoraStage(rank=2)}
    model.number_class = "grams"
    settings = TrainSettings(**stages, evaluations=1, class_transforms=True, value_transform="quantile")
    metrics = train(model, examples, examples, tmp_path / "model", settings)
    assert model.number_class == "grams" and set(metrics["classes"]) == set(UNITS)
    for name in UNITS:  # of a model that copies, beside a number and without one
        found = model.predict_number(["7 and The big one is", "The big one is"], classes=name)
        assert found[0].cdf(math.inf) == pytest.approx(1)
    with pytest.raises(ValueError, match="unknown class 'news'; the classes of this model's numbers: grams, heads"):
        model.predict_number("It is", classes="news")
    model.number_class = None
    assert model.abduct("no number here") is not None
    axes = model.config.class_values
    words = [example for example in examples if example.class_name is None]
    train(model, words, [], tmp_path / "words", TrainSettings(values=None, heads=HeadStage(epochs=1), evaluations=1))
    assert model.config.class_values == axes  # text alone tells nothing of axes


def test_axes_of_classes_are_learned_through_tokens_and_kept(with_axes, tmp_path):
    model, _, learned, held, _, folder = with_axes
    again = CausalQwenForCausalLM.from_pretrained(folder)
    settings = TrainSettings(
        values=None, lora=LoraStage(rank=2, batch_size=20), value_transform="keep", evaluations=1, logging_steps=1
    )
    metrics = train(again, learned, held, tmp_path / "more", settings)
    assert [again.value_law_of(name).transform for name in UNITS] == [
        model.value_law_of(name).transform for name in UNITS
    ]
    assert metrics["classes"]["grams"]["median_error"] < 0.1 * UNITS["grams"]


def test_rows_without_a_known_class_are_told_before_anything_is_learned(with_axes, tiny_tokenizer, tmp_path):
    *_, folder = with_axes
    model = graft_tiny("llama", tiny_tokenizer)
    named, unnamed, other = (
        encode_rows([parse_row(json.dumps({"prompt": "It is", "value": 3} | row), "a")] * 4, model.processor)
        for row in ({"class": "grams"}, {}, {"class": "miles"})
    )
    settings = TrainSettings(values=ValueStage(epochs=1), class_transforms=True)
    for learned, held, message in (
        (unnamed, [], "class_transforms: no row with a number names a class"),
        (named + unnamed, [], "a row with a number names no class; an axis was fitted for grams"),
        (named, other, "no training row is of the class 'miles'"),
    ):
        with pytest.raises(ValueError, match=message):
            train(model, learned, held, tmp_path / "out", settings)
    known = CausalQwenForCausalLM.from_pretrained(folder)
    with pytest.raises(
        ValueError, match="no training row is of the class 'miles'; an axis was fitted for grams, heads"
    ):
        train(known, other, [], tmp_path / "other", TrainSettings(value_transform="keep"))
