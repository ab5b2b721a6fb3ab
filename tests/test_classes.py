"""Classes of numbers: intervals recalibrated for each, and axes of their own."""

import csv
import json
import math

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from causalqwen import CausalQwenConfig, CausalQwenForCausalLM
from causalqwen.data import EncodedRows, RowError, encode_rows, number_classes, parse_row, read_rows
from causalqwen.evaluation import evaluate, predict_file, predict_rows
from causalqwen.evaluation.plots import calibration
from causalqwen.numbers import CRPS_LEVELS, ClassLaws, ValueLaw, ValueTransform
from causalqwen.numbers.law import FEWEST_OF_CLASS, WANTED_LEVELS
from causalqwen.parts.copying import CopyLaw
from causalqwen.training import FactStore, HeadStage, LoraStage, TrainSettings, ValueStage, train
from causalqwen.training.batches import FactRows, class_code, collate_tokens
from causalqwen.training.trainer import TrainedForCausalLM
from conftest import graft_tiny
from test_cli import run, write

WIDTHS = {"calm": 0.3, "wild": 3.0}


def drawn(count: int, seed: int):
    """As many numbers of each class as `count`; the law says the same scale of all, and is wrong about both classes."""
    generator = torch.Generator().manual_seed(seed)
    classes = [name for name in WIDTHS for _ in range(count)]
    widths = torch.tensor([WIDTHS[name] for name in classes], dtype=torch.float64)
    values = widths * torch.randn(len(classes), generator=generator, dtype=torch.float64)
    return torch.zeros_like(values), torch.ones_like(values), values, classes


def of_rows(levels, classes) -> ClassLaws:
    laws = tuple(ValueLaw(interval_levels=tuple(levels[name])) for name in WIDTHS)
    return ClassLaws(laws, torch.tensor([list(WIDTHS).index(name) for name in classes]))


# ---- the law ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [FEWEST_OF_CLASS, 400])
def test_levels_of_a_class_cover_that_class_where_those_of_all_cover_none(count):
    law, fresh = ValueLaw(), 4_000
    fitted = law.fit_class_interval_levels(*drawn(count, count))
    loc, scale, values, classes = drawn(fresh, count + 1)
    marginal = ValueLaw(interval_levels=law.fit_interval_levels(*drawn(count, count)[:3]))
    conditional = of_rows(fitted, classes)
    for level in (0.5, 0.8, 0.9):
        covered = {}
        for name, of in (("marginal", marginal), ("conditional", conditional)):
            low, high = of.interval(loc, scale, level)
            covered[name] = ((low <= values) & (values <= high)).double().reshape(2, fresh).mean(1)
        # Given n rows to fit on, coverage is Beta(k, n + 1 - k), k = ceil((n + 1) level): its spread is at most this.
        spread = (level * (1 - level) / count) ** 0.5
        torch.testing.assert_close(
            covered["conditional"], torch.full((2,), level, dtype=torch.float64), atol=3 * spread + 0.01, rtol=0
        )
        assert covered["marginal"].mean().item() == pytest.approx(level, abs=3 * spread)  # right on average
        assert (covered["marginal"] - level).abs().min() > 0.05  # and for neither
        assert covered["marginal"][0] > level > covered["marginal"][1]


def test_a_class_needs_so_many_rows_that_its_outermost_level_was_observed():
    for count, enough in ((FEWEST_OF_CLASS - 1, False), (FEWEST_OF_CLASS, True)):
        loc, scale, values, _ = (column[:count] for column in drawn(count, 0))
        classes = ["calm"] * count
        outermost = ValueLaw().fit_interval_levels(loc, scale, values)[-2]
        central = ValueLaw().central_level(loc, scale, values)
        assert WANTED_LEVELS[-2] == 0.99 and (outermost <= central.max().item()) == enough
        assert (ValueLaw().fit_class_interval_levels(loc, scale, values, classes)["calm"] is not None) == enough
    unnamed = ValueLaw().fit_class_interval_levels(loc, scale, values, [None] * FEWEST_OF_CLASS)
    assert unnamed == {}


def some_law(rng: np.random.Generator) -> ValueLaw:
    """A law on an axis of its own, with levels or without."""
    kind, about = rng.choice(["affine", "symlog", "quantile"]), torch.from_numpy(rng.normal(5, 3, size=40).round(1))
    levels = tuple(np.sort(rng.uniform(size=101)).tolist()) if rng.uniform() < 0.5 else None
    return ValueLaw(ValueTransform.fit(kind, about), "gaussian", (about.min().item(), about.max().item()), levels)


@settings(max_examples=25)
@given(st.integers(1, 6), st.lists(st.floats(0.01, 0.99), min_size=1, max_size=6), st.integers(0, 99))
def test_rows_of_several_classes_are_what_each_is_alone(n, p, seed):
    """Any number of rows and of asked levels, as many of the one as of the other too; copies among them."""
    rng = np.random.default_rng(seed)
    laws = tuple(some_law(rng) for _ in range(3))
    of_row = torch.from_numpy(rng.integers(3, size=n))
    loc, scale = torch.from_numpy(rng.normal(size=n)), torch.from_numpy(rng.uniform(0.5, 2, size=n))
    value, p = torch.from_numpy(rng.normal(5, 3, size=n)), torch.tensor(p, dtype=torch.float64)
    candidates = torch.from_numpy(rng.normal(5, 3, size=(n, 2)))
    log_weights = torch.from_numpy(rng.normal(size=(n, 3))).log_softmax(-1)
    together = ClassLaws(laws, of_row)
    copies = CopyLaw(together, candidates, log_weights)
    grid = together.quantile(loc.unsqueeze(-1), scale.unsqueeze(-1), p)
    assert grid.shape == (n, len(p))

    def found(law, copied, rows) -> dict[str, torch.Tensor]:
        of = loc[rows], scale[rows]
        made = {name: getattr(law, name)(*of, value[rows]) for name in ("cdf", "central_level", "log_prob", "crps")}
        made |= {kind: law.axis_losses(*of, value[rows], kind) for kind in ("nll", "crps")}
        made |= {"quantile_crps": law.quantile_crps(*of, value[rows]), "clip": law.clip(100 * value[rows])}
        made |= {"spread_levels": law.spread_levels(*of, value[rows]), "levels_at": law.levels_at(of[1])}
        made |= {f"copied {name}": getattr(copied, name)(*of, value[rows]) for name in ("cdf", "log_prob", "crps")}
        made |= {"low": law.interval(*of, 0.8)[0], "copied high": copied.interval(*of, 0.8)[1]}
        return made | {"raw": law.quantile(*of, 0.7, raw=True)}

    of_all = found(together, copies, slice(None))
    for row, place in enumerate(of_row.tolist()):
        alone = laws[place]
        assert torch.equal(grid[row], alone.quantile(loc[row], scale[row], p))
        here = slice(row, row + 1)
        of_one = found(alone, CopyLaw(alone, candidates[here], log_weights[here]), here)
        for name, column in of_one.items():
            torch.testing.assert_close(of_all[name][here], column, rtol=1e-12, atol=1e-12, equal_nan=True, msg=name)


# ---- rows ------------------------------------------------------------------------------------------------------------

ROWS = [
    {"prompt": "One is", "value": 1.5, "class": "calm"},
    {"text": "It is 5 or 7.", "class": "wild"},
    {"question": "How many?", "answer": 3, "class": 12, "individual": "Ann"},
    {"messages": [{"role": "user", "content": "Is it 5?"}], "class": "wild"},
    {"text": "5 and 6"},
]


def test_a_row_may_name_its_class(tmp_path, tiny_llama):
    rows = read_rows(write(tmp_path / "rows.jsonl", ROWS))
    assert [row.class_name for row in rows] == ["calm", "wild", "12", "wild", None]
    found = encode_rows(rows, tiny_llama.processor)
    assert [example.class_name for example in found] == [row.class_name for row in rows]
    assert [example.individual for example in found] == [None, None, "Ann", None, None]
    assert list(EncodedRows(rows, tiny_llama.processor)) == found
    numbers = number_classes(found, tiny_llama.config.num_token_id)
    assert numbers == ["calm", "wild", "wild", "12", "wild", None]  # the first token is never predicted
    prompts = [{"prompt": "One is", "value": 1.5, "class": "calm"}, {"prompt": "Two is", "value": 2.5}]
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["prompt", "value", "class"])
        writer.writeheader()
        writer.writerows(prompts)
    parquet.write_table(pa.Table.from_pylist(prompts), tmp_path / "rows.parquet")
    for name in ("rows.csv", "rows.parquet"):
        assert [row.class_name for row in read_rows(tmp_path / name)] == ["calm", None]
    with pytest.raises(RowError, match=r"^a, field class: expected a name, found \[1\]$"):
        parse_row('{"text": "x", "class": [1]}', "a")


# ---- a model ---------------------------------------------------------------------------------------------------------


def statements(count: int, seed: int, name: str | None) -> list[dict]:
    """Numbers about 100 whose noise depends on the class, which no text tells."""
    noise = np.random.default_rng(seed).normal(size=count) * WIDTHS.get(name, 1.0)
    row = {} if name is None else {"class": name}
    return [{"prompt": "The number is", "value": round(100 + one, 4)} | row for one in noise]


@pytest.fixture(scope="module")
def trained(tiny_tokenizer, tmp_path_factory):
    """A model that learned from two classes, and knows two more by name, with too few evaluation rows or none."""
    folder = tmp_path_factory.mktemp("classes")
    kinds = [*WIDTHS, "rare", None]
    rows = {
        "train": [row for name in [*kinds, "met"] for row in statements(20, 1, name)],
        "eval": [
            row for name, count in zip(kinds, (120, 120, 5, 10), strict=True) for row in statements(count, 2, name)
        ],
        "test": [row for name in WIDTHS for row in statements(200, 3, name)],
    }
    model = graft_tiny("llama", tiny_tokenizer)
    files = {part: write(folder / f"{part}.jsonl", rows[part]) for part in rows}
    examples = {part: encode_rows(read_rows(file), model.processor) for part, file in files.items()}
    stage = ValueStage(epochs=2, batch_size=20, learning_rate=3e-3)
    settings = TrainSettings(values=stage, evaluations=1)
    metrics = train(model, examples["train"], examples["eval"], folder / "model", settings)
    return model.eval(), metrics, examples, files, folder / "model"


def test_training_fits_levels_for_every_class_with_rows_enough(trained):
    model, metrics, _, _, folder = trained
    known = model.config.class_interval_levels
    assert set(known) == {"calm", "wild", "rare", "met"}
    assert [name for name, levels in known.items() if levels is None] == ["met", "rare"]
    calm, wild = model.predict_number(["The number is"] * 2, classes=["calm", "wild"])
    assert wild.interval(0.8)[1] - wild.interval(0.8)[0] > 4 * (calm.interval(0.8)[1] - calm.interval(0.8)[0])
    assert calm.median == pytest.approx(wild.median)
    assert calm.interval(0.8, raw=True) == pytest.approx(wild.interval(0.8, raw=True), rel=1e-5)
    scores = metrics["classes"]
    assert {name: one["numbers"] for name, one in scores.items()} == {"calm": 120, "wild": 120, "rare": 5}
    assert {name for name, one in scores.items() if one["own_levels"]} == {"calm", "wild"}
    for name in WIDTHS:  # on the very rows that they were fitted on: k of n
        for level in (0.5, 0.8, 0.9):
            assert scores[name]["coverage"][str(level)] == pytest.approx(math.ceil(121 * level) / 120, abs=1.5 / 120)
    loaded = CausalQwenForCausalLM.from_pretrained(folder)
    assert loaded.config.class_interval_levels == known
    assert loaded.predict_number("The number is", classes="wild")[0].interval(0.9) == pytest.approx(wild.interval(0.9))


def test_a_checkpoint_from_before_classes_loads(trained, tmp_path):
    model, *_ = trained
    settings = model.config.to_dict()
    del settings["class_interval_levels"], settings["class_values"]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    old = CausalQwenConfig.from_pretrained(tmp_path)
    assert old.class_interval_levels == {} and old.interval_levels == model.config.interval_levels


def test_who_names_no_class_or_one_with_too_few_rows_gets_the_models_own_levels(trained):
    model, *_ = trained
    prompts = ["The number is", "It is", "The number of it is", "The number is"]
    found = model.predict_number(prompts, 2, classes=["wild", None, "rare", "met"])
    plain = model.predict_number(prompts, 2)
    assert [one.median for one in found] == [one.median for one in plain]
    assert [one == other for one, other in zip(found, plain, strict=True)] == [False, True, True, True]
    assert found[0].format(0.9) != plain[0].format(0.9)
    for classes, message in (
        (
            ["wild", "Wild", None, None],
            "unknown class 'Wild'; the classes of this model's numbers: calm, met, rare, wild",
        ),
        (["wild"], "one class per prompt, got 1 for 4"),
    ):
        with pytest.raises(ValueError, match=message):
            model.predict_number(prompts, classes=classes)


def test_a_model_without_classes_knows_none(tiny_llama):
    with pytest.raises(ValueError, match="unknown class 'wild'; the classes of this model's numbers: none"):
        tiny_llama.predict_number("It is", classes="wild")
    rows = [parse_row('{"prompt": "It is", "class": "wild"}', "a")]
    (described,) = predict_rows(tiny_llama, rows)  # a field like any other
    assert described["class"] == "wild" and described["median"] == tiny_llama.predict_number("It is")[0].median


def test_a_file_is_predicted_class_by_class(trained, tmp_path):
    model, *_ = trained
    rows = [
        {"prompt": "The number is", "class": "calm"},
        {"text": "The number is 99.5 in all.", "class": "wild"},
        {"prompt": "The number is", "class": "wild"},
        {"prompt": "The number is"},
    ]
    predict_file(model, write(tmp_path / "rows.jsonl", rows), tmp_path / "out.jsonl", batch_size=3)
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    calm, wild, own = (model.predict_number("The number is", classes=name)[0] for name in ("calm", "wild", None))
    described = [found[0], found[1]["numbers"][0], found[2], found[3]]
    for one, expected in zip(described, (calm, wild, wild, own), strict=True):
        assert one["intervals"]["0.9"] == pytest.approx(list(expected.interval(0.9)), rel=1e-6)
    write(tmp_path / "rows.jsonl", [*rows, {"prompt": "The number is", "class": "clam"}])
    with pytest.raises(
        RowError, match=r"^rows.jsonl, row 5, field class: unknown class 'clam'; the classes .* calm, met"
    ):
        predict_file(model, tmp_path / "rows.jsonl", tmp_path / "other.jsonl")


def test_evaluation_reports_every_class(trained, tmp_path):
    model, _, _, files, folder = trained
    arguments = ["evaluate", "--model", folder, "--data", files["test"], "--output", tmp_path / "scores"]
    run(*arguments)
    metrics = json.loads((tmp_path / "scores" / "metrics.json").read_text())
    for name, scores in metrics["classes"].items():
        assert scores["own_levels"] and scores["numbers"] == 200
        for level, share in scores["coverage"].items():
            spread = (float(level) * (1 - float(level)) * (1 / 120 + 1 / 200)) ** 0.5
            assert share == pytest.approx(float(level), abs=3 * spread), (name, level)
    assert metrics["coverage"]["0.8"] == pytest.approx(
        np.mean([scores["coverage"]["0.8"] for scores in metrics["classes"].values()])
    )
    page = (tmp_path / "scores" / "report.html").read_text()
    assert "Class by class" in page and page.count('<td class="n">its own</td>') == 2
    plain = encode_rows([parse_row('{"prompt": "The number is", "value": 100}', "a")], model.processor)
    assert "classes" not in evaluate(model, plain, tmp_path)["metrics"]
    write(tmp_path / "bad.jsonl", [{"prompt": "The number is", "value": 1, "class": "clam"}])
    arguments[4], arguments[6] = tmp_path / "bad.jsonl", tmp_path / "none"
    assert "bad.jsonl, row 1, field class: unknown class 'clam'" in run(*arguments, code=1).stderr


def test_the_picture_of_calibration_reads_each_numbers_levels():
    central, levels = np.array([[0.2], [0.5], [0.9]]), np.linspace(0, 1, 101) ** 2
    assert calibration(central, levels.tolist()) == calibration(central, np.tile(levels, (3, 1)))
    assert calibration(central, levels.tolist()) != calibration(central, np.tile(levels**2, (3, 1)))
    in_parts = calibration(np.tile(central, 4), np.tile(levels, (3, 1)))
    assert in_parts == calibration(central, levels) != calibration(np.array([[0.2, 0.5, 0.9]]), levels**2)


def test_a_grid_of_quantiles_may_be_as_long_as_there_are_rows():
    n = len(CRPS_LEVELS)
    loc = torch.zeros(n, 1, dtype=torch.float64)
    squared = ValueLaw(interval_levels=tuple((WANTED_LEVELS**2).tolist()))
    found = ClassLaws((squared, ValueLaw()), torch.arange(n) % 2).quantile(loc, torch.ones_like(loc), CRPS_LEVELS)
    one = torch.ones(1, dtype=torch.float64)
    assert torch.equal(found[0], squared.quantile(loc[0], one, CRPS_LEVELS))
    assert torch.equal(found[1], ValueLaw().quantile(loc[1], one, CRPS_LEVELS))


# ---- axes of their own: one model of several quantities --------------------------------------------------------------

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
        part: write(folder / f"{part}.jsonl", weighed(count, count)) for part, count in (("train", 80), ("eval", 99))
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
    source = write(tmp_path / "rows.jsonl", [{"prompt": "It is", "class": "grams"}, {"prompt": "It is"}])
    with pytest.raises(
        RowError, match="row 2, field class: the classes of this model's numbers have axes of their own"
    ):
        predict_file(model, source, tmp_path / "out.jsonl")
    arguments = ["evaluate", "--model", folder, "--data", files["eval"], "--output", tmp_path / "scores"]
    arguments += ["--train", files["train"], "--validation", files["eval"]]
    run(*arguments)
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
