"""Intervals that are recalibrated for each class of numbers."""

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
from typer.testing import CliRunner

from causalqwen import CausalQwenConfig, CausalQwenForCausalLM
from causalqwen.data import EncodedRows, RowError, encode_rows, number_classes, parse_row, read_rows
from causalqwen.evaluation import evaluate, predict_file, predict_rows
from causalqwen.evaluation.plots import calibration
from causalqwen.numbers import CRPS_LEVELS, ClassLaws, ValueLaw, ValueTransform
from causalqwen.numbers.law import FEWEST_OF_CLASS, WANTED_LEVELS
from causalqwen.parts.copying import CopyLaw
from causalqwen.training import TrainSettings, ValueStage, train
from causalqwen_cli.app import app
from conftest import graft_tiny

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


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_row_may_name_its_class(tmp_path, tiny_llama):
    rows = read_rows(written(tmp_path / "rows.jsonl", ROWS))
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
    files = {part: written(folder / f"{part}.jsonl", rows[part]) for part in rows}
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
    predict_file(model, written(tmp_path / "rows.jsonl", rows), tmp_path / "out.jsonl", batch_size=3)
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    calm, wild, own = (model.predict_number("The number is", classes=name)[0] for name in ("calm", "wild", None))
    described = [found[0], found[1]["numbers"][0], found[2], found[3]]
    for one, expected in zip(described, (calm, wild, wild, own), strict=True):
        assert one["intervals"]["0.9"] == pytest.approx(list(expected.interval(0.9)), rel=1e-6)
    written(tmp_path / "rows.jsonl", [*rows, {"prompt": "The number is", "class": "clam"}])
    with pytest.raises(
        RowError, match=r"^rows.jsonl, row 5, field class: unknown class 'clam'; the classes .* calm, met"
    ):
        predict_file(model, tmp_path / "rows.jsonl", tmp_path / "other.jsonl")


def test_evaluation_reports_every_class(trained, tmp_path):
    model, _, _, files, folder = trained
    arguments = ["evaluate", "--model", folder, "--data", files["test"], "--output", tmp_path / "scores"]
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.stderr
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
    written(tmp_path / "bad.jsonl", [{"prompt": "The number is", "value": 1, "class": "clam"}])
    arguments[4], arguments[6] = tmp_path / "bad.jsonl", tmp_path / "none"
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 1 and "bad.jsonl, row 1, field class: unknown class 'clam'" in result.stderr


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
