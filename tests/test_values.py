"""How values are read where nobody said so: supports, kinds of numbers, rows held out, and when gradients learn them."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from causalqwen import CausalQwenForCausalLM
from causalqwen.data import EncodedRows, Row, encode_rows
from causalqwen.modeling.prediction import NumberPrediction
from causalqwen.numbers import ValueLaw, ValueTransform
from causalqwen.numbers.support import Support
from causalqwen.training import FactStore, TrainSettings, ValueStage, train
from causalqwen.training import run as training_run
from causalqwen.training.axes import LearnedNumbers, certain_contexts
from causalqwen.training.choice_of_people import Tried, clearly_better
from causalqwen.training.copies import values_repeat_context
from causalqwen.training.features import COLUMNS
from causalqwen.training.held_out import hold_out
from causalqwen.training.run import learn
from causalqwen.training.scores import coverage_by_scale, uneven_coverage
from causalqwen.training.stages import _RIDGES, _ridge
from conftest import graft_tiny

# ---- supports --------------------------------------------------------------------------------------------------------

SEEN = {
    "rating": ([-4.0, -2.0, 0.0, 1.0, 4.0] * 20, Support(-4.0, 4.0, 1.0)),
    "half steps": ([0.5, 1.0, 2.5] * 20, Support(0.5, 2.5, 0.5)),
    "counts": ([*range(3, 60), 9_999], Support(1.0, None, 1.0)),
    "counts with zeros": ([*range(60)], Support(0.0, None, 1.0)),
    "share": (np.linspace(0.02, 0.9, 50).tolist(), Support(0.02 / 2, 1.0)),
    "positive": ([0.4, *np.geomspace(0.5, 1e4, 50).tolist()], Support(0.2)),
    "censored": ([0.0] * 10 + np.linspace(0.5, 7, 50).tolist(), Support(0.0)),
    "capped": ([7.25] * 10 + np.linspace(-5, 7, 50).tolist(), Support(None, 7.25)),
    "anything": (np.linspace(-5.5, 7, 50).tolist(), Support()),
    "always one": ([5.3] * 40, Support(5.3, 5.3, 1.0)),
    "few": ([3.0, 4.0] * 14, Support()),
    "none": ([], Support()),
}


@pytest.mark.parametrize("name", SEEN)
def test_the_values_show_where_they_lie(name):
    values, expected = SEEN[name]
    assert Support.seen_in(torch.tensor(values, dtype=torch.float64)) == expected


KINDS = ("affine", "symlog", "log", "quantile")
SUPPORTS = [Support(-4, 4, 1), Support(3, 3, 1), Support(1, None, 1), Support(0, 10, 2.5)]
SUPPORTS += [Support(0.25), Support(0.25, 9.75), Support()]


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    support=st.sampled_from(SUPPORTS),
    family=st.sampled_from(("gaussian", "cauchy")),
    loc=st.floats(-3, 3),
    scale=st.floats(0.05, 4),
)
def test_what_a_law_says_lies_in_the_support_and_its_probabilities_are_those_of_draws(
    kind, support, family, loc, scale
):
    generator = torch.Generator().manual_seed(0)
    values = support.nearest(3 + 2 * torch.randn(200, generator=generator, dtype=torch.float64))
    if kind == "log" and not (support.low or 0) > 0:
        with pytest.raises(ValueError, match="support above 0"):
            ValueTransform.fit(kind, values, support)
        return
    law = ValueLaw(ValueTransform.fit(kind, values, support), family)
    loc, scale = torch.tensor([loc, scale], dtype=torch.float64)
    levels = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    drawn = law.quantile(loc, scale, levels)
    assert bool((drawn.diff() >= 0).all()) and torch.equal(drawn, support.nearest(drawn))
    for point in values[::40].tolist():
        told = law.cdf(loc, scale, torch.tensor(point, dtype=torch.float64)).item()
        assert told == pytest.approx((drawn <= point + 1e-9).double().mean().item(), abs=2e-4)
    if support.values() is not None:
        each = law.log_prob(loc, scale, torch.tensor(support.values(), dtype=torch.float64)).exp()
        assert each.sum().item() == pytest.approx(1, abs=1e-9)
        counted = torch.stack([(drawn == value).double().mean() for value in support.values()])
        torch.testing.assert_close(each, counted, atol=2e-4, rtol=0)
    target = values[:1].requires_grad_(False)
    at = torch.tensor([loc.item(), scale.item()], requires_grad=True)
    for loss in ("nll", "crps"):
        (gradient,) = torch.autograd.grad(law.axis_losses(at[:1], at[1:], target, loss).sum(), at)
        assert bool(gradient.isfinite().all())


def test_a_support_that_is_none_is_refused():
    for fields, message in (
        ({"low": 5, "high": 4}, "low must not be above high"),
        ({"low": 0, "high": 1, "step": 0.4}, "no multiple"),
        ({"step": 0}, "step must be positive"),
        ({"low": math.nan}, "finite number or null"),
    ):
        with pytest.raises(ValueError, match=message):
            Support(**fields)
    for given_support in ("wide", [1], [1, 2, 3, 4]):
        with pytest.raises(ValueError, match="support: expected auto"):
            TrainSettings.from_dict({"support": given_support})
    wide = Support(1, 1e15, 1)  # never listed to be checked
    assert wide.nearest(torch.tensor([0.2, 2.7]).double()).tolist() == [1, 3]
    assert TrainSettings.from_dict({"support": [0, 10]}).support_of(torch.zeros(0)) == Support(0, 10)
    assert TrainSettings.from_dict({"support": None}).support_of(torch.arange(40)) == Support()


def test_a_support_survives_a_configuration_file():
    made = ValueTransform.fit("log", torch.tensor([1.0, 2.0, 9.0]), Support(0.5, 10))
    assert ValueTransform(**json.loads(json.dumps(made.to_dict()))) == made
    assert "support" not in ValueTransform.fit("affine", torch.tensor([1.0, 2.0, 9.0])).to_dict()


# ---- kinds of numbers ------------------------------------------------------------------------------------------------

NORMAL = ValueLaw(ValueTransform("affine", 0.0, 1.0), "gaussian")


def with_levels(law, kinds):
    """The law with the levels of kinds that were fitted."""
    (_, first), *more = kinds
    return replace(law, interval_levels=tuple(first), interval_kinds=tuple((at, tuple(levels)) for at, levels in more))


def test_levels_are_those_of_numbers_of_a_like_kind():
    generator, law = torch.Generator().manual_seed(0), NORMAL

    def numbers(count):
        """Half are certain, their scale far too wide; half are not, their scale far too narrow."""
        scale = torch.where(torch.arange(count) % 2 == 0, 0.01, 1.0).double()
        scale = scale * (1 + 0.2 * torch.rand(count, generator=generator, dtype=torch.float64))
        error = torch.where(torch.arange(count) % 2 == 0, 0.2, 3.0) * torch.randn(count, generator=generator)
        return torch.zeros(count, dtype=torch.float64), scale, scale * error.double()

    loc, scale, values = numbers(6000)
    kinds = law.fit_interval_kinds(loc, scale, values)
    assert len(kinds) == 2 and kinds[0][0] == 0 and 0.1 < kinds[1][0] < 0.13  # in the middle of 0.012 and 1
    fitted = with_levels(law, kinds)
    loc, scale, values = numbers(4000)
    for level in (0.5, 0.8, 0.9):
        low, high = fitted.interval(loc, scale, level)
        inside = ((low <= values) & (values <= high)).double()
        assert inside[::2].mean().item() == pytest.approx(level, abs=0.03)
        assert inside[1::2].mean().item() == pytest.approx(level, abs=0.03)
    one = law.fit_interval_kinds(loc, torch.rand(4000).double() + 0.5, torch.randn(4000, generator=generator).double())
    assert len(one) == 1 or len(law.fit_interval_kinds(loc[:150], scale[:150], values[:150])) == 1


def lumps(generator, *of):
    """The scales of so many numbers each, the same but for rounding, and the limits between kinds: (scale, standard deviation
    in scales, how many) of each."""
    counts = torch.tensor([count for *_, count in of])
    scale, off = (torch.tensor(column).double().repeat_interleave(counts) for column in list(zip(*of, strict=True))[:2])
    scale = scale * (1 + 0.002 * torch.rand(len(scale), generator=generator, dtype=torch.float64))
    values = scale * off * torch.randn(len(scale), generator=generator, dtype=torch.float64)
    return scale, torch.tensor([least for least, _ in NORMAL.fit_interval_kinds(0 * scale, scale, values)]).double()


@pytest.mark.parametrize("seed", range(5))
def test_rounding_does_not_decide_of_which_kind_a_number_is(seed):
    """Constants of a template: each has one scale in all rows, but for rounding."""
    generator = torch.Generator().manual_seed(seed)
    scale, limits = lumps(generator, (0.1, 0.05, 300), (0.105, 0.0, 300), (0.2, 0.6, 300), (1.0, 1.0, 300))
    assert len(limits) > 2
    assert ((scale / limits[1:, None]).log().abs() > 0.02).all()  # no other reading brings a number across
    assert len(lumps(generator, (0.1, 0.05, 600), (0.101, 1.0, 600))[1]) == 1  # too near to be told apart by others


def test_a_constant_of_a_template_is_covered_by_another_reading_of_it():
    """All rows hold the same reading, which the intervals would end at; ordinary numbers are none the wiser."""
    generator, law = torch.Generator().manual_seed(0), NORMAL
    noise = torch.randn(600, generator=generator, dtype=torch.float64)
    loc = torch.cat([torch.full((300,), 7.37), torch.zeros(600)]).double()
    scale = torch.cat([torch.full((300,), 0.05), torch.ones(600)]).double()
    values = torch.cat([loc[:300] + 0.014, noise])
    kinds = law.fit_interval_kinds(loc, scale, values)
    assert len(kinds) == 2
    fitted = with_levels(law, kinds)
    for read in (7.37 * (1 - 2**-8), 7.37, 7.37 * (1 + 2**-8)):
        for level in (0.5, 0.9):
            low, high = (end.item() for end in fitted.interval(torch.tensor(read), torch.tensor(0.05), level))
            assert low < 7.384 < high and high - low < 0.2
    alone = law.fit_interval_kinds(loc[300:], scale[300:], values[300:])
    assert alone[0][1] == kinds[1][1]


@pytest.mark.parametrize("few", [(0.01, 0.05), (1.0, 1.0)])
def test_few_numbers_are_a_kind_too(few):
    others = (1.0, 1.0) if few[0] < 1 else (0.01, 0.05)
    _, limits = lumps(torch.Generator().manual_seed(0), (*few, 80), (*others, 920))
    assert len(limits) == 2 and 0.05 < limits[1] < 0.2


def test_scales_that_hardly_differ_are_parted_where_levels_do():
    generator = torch.Generator().manual_seed(0)
    away = torch.randn(5000, generator=generator).double()
    scale = (0.02 * away).exp()
    values = scale * (0.5 * away).exp() * torch.randn(5000, generator=generator)
    limits = [least for least, _ in NORMAL.fit_interval_kinds(0 * scale, scale, values)]
    assert len(limits) == 4 and all(0.96 < limit < 1.04 for limit in limits[1:])
    assert any(0.99 < limit < 1.01 for limit in limits[1:])


def rows_of(model, texts):
    return encode_rows([Row("text", f"row {i}", {"text": text}) for i, text in enumerate(texts, 1)], model.processor)


def test_a_number_that_its_words_always_bring_is_part_of_a_template(tiny_tokenizer):
    model = graft_tiny("llama", tiny_tokenizer)
    texts = [f"From 1 to 7 the one is {2 + i % 5}" for i in range(30)]
    examples, num_id = rows_of(model, texts), model.config.num_token_id
    certain = certain_contexts(examples, num_id)
    numbers = LearnedNumbers.of(examples, num_id, certain)
    assert numbers.certain.tolist() == [True, True, False] * 30
    said = numbers.axis("affine", TrainSettings())
    assert said["value_range"] == [2.0, 6.0]  # of what the rows teach
    assert said["value_transform"]["support"] == {"low": 1.0, "high": 7.0, "step": 1.0}  # what all can be
    # Of these alone nothing would be left to learn.
    assert certain_contexts(rows_of(model, ["It is 5 long"] * 30), num_id) == set()


def test_an_average_that_hides_two_populations_is_told():
    law, generator = NORMAL, torch.Generator().manual_seed(0)
    scale = torch.cat([torch.full((200,), 0.01), torch.full((800,), 1.0)]).double()
    noise = torch.randn(1000, generator=generator, dtype=torch.float64)
    even = coverage_by_scale(law, torch.zeros(1000).double(), scale, scale * noise)
    assert [tenth["numbers"] for tenth in even] == [100] * 10 and uneven_coverage(even) is None
    assert all(tenth["coverage"]["0.8"] == pytest.approx(0.8, abs=0.12) for tenth in even)
    wide = torch.where(torch.arange(1000) < 200, 5.0, 1.0).double()
    told = uneven_coverage(coverage_by_scale(law, torch.zeros(1000).double(), scale, wide * scale * noise))
    assert told is not None and "of the 100 numbers whose predicted scale is at most 0.01" in told


# ---- the choice ------------------------------------------------------------------------------------------------------


def test_what_is_less_plain_is_taken_only_where_it_is_clearly_better():
    rng = np.random.default_rng(0)
    base, noise = rng.exponential(size=200), rng.normal(size=200)
    plain, level, better = (Tried({}, "affine", s) for s in (base + 0.3 * noise, base - 0.01, base - 0.5))
    assert clearly_better(plain, level) is plain and clearly_better(plain, better) is better
    diverged = Tried({}, "affine", np.full(200, 1e9))
    assert clearly_better(diverged, level) is level and clearly_better(plain, diverged) is plain
    assert clearly_better(diverged, diverged) is diverged
    assert plain.is_finite and not Tried({}, "affine", np.array([0.5, 1e9])).is_finite


def skewed(model, count, seed):
    """Short ones are about 5, long ones about 20,000."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        long = bool(rng.integers(2))
        value = float(np.exp((9.9 if long else 1.6) + 0.3 * rng.normal()))
        rows.append(Row("prompt", "x", {"prompt": f"The {'long' if long else 'short'} one is", "value": value}))
    return encode_rows(rows, model.processor)


def test_defaults_choose_an_axis_on_which_skewed_values_are_well_told_and_say_so(tiny_tokenizer, tmp_path):
    model, said = graft_tiny("llama", tiny_tokenizer), []
    train(model, skewed(model, 96, 0), skewed(model, 48, 1), tmp_path / "run", say=said.append)
    assert said[1].startswith("values are read from the whole backbone in closed form: log axis")
    short, long = model.predict_number(["The short one is", "The long one is"])
    assert 3 < short.median < 9 and 1e4 < long.median < 4e4
    assert short.quantile(0.001) > 0  # nothing that is never there
    kept = json.loads((tmp_path / "run" / "config.json").read_text())["fitted"]["values"]["value_transform"]
    assert kept["kind"] == "log" and kept["support"]["low"] > 0
    floor = kept["support"]["low"]  # half the least value of the rows
    assert (
        said[0].startswith(f"no value below {floor:g} is predicted: a row has {2 * floor:g} after ")
        and 'one is" (' in said[0]
    )


@pytest.mark.parametrize(
    ("config", "asked"),
    [
        ({"value_branch_dropout": 0.2}, {}),
        ({"value_loss": "nll"}, {}),
        ({"start": "documents"}, {}),
        ({}, {"heads": {"epochs": 1}}),
        ({}, {"values": {"epochs": 12}}),
    ],
)
def test_values_are_learned_by_gradients_where_somebody_says_how(tiny_tokenizer, tmp_path, monkeypatch, config, asked):
    monkeypatch.setattr(training_run, "FEWEST_UPDATES", 4)
    model = graft_tiny("llama", tiny_tokenizer, **config)
    learn(model, skewed(model, 48, 0), [], tmp_path, TrainSettings.from_dict(asked))
    assert model.value_kernel is None and (model.value_branch is None) == (config.get("start") == "documents")
    for name, value in config.items():
        assert getattr(model.config, name) == value
    if config.get("start") != "documents" and "values" not in asked:
        own = {"value_branch_dropout": 0.5, "value_loss": "crps"} | config
        assert {name: getattr(model.config, name) for name in own} == own


def test_each_of_few_values_has_its_probability(tiny_tokenizer, tmp_path, monkeypatch):
    model, rng, said = graft_tiny("llama", tiny_tokenizer), np.random.default_rng(0), []
    values = [float(np.clip(rng.normal(2 + 2 * (i % 2)), 1, 5).round()) for i in range(120)]
    prompts = ["The short one is", "The long one is"] * 60
    rows = [Row("prompt", "x", {"prompt": p, "value": v}) for p, v in zip(prompts, values, strict=True)]
    examples = encode_rows(rows, model.processor)
    monkeypatch.setattr(training_run, "uneven_coverage", lambda tenths: f"{len(tenths)} tenths are uneven")
    metrics = learn(model, examples, examples, tmp_path, say=said.append)
    short, long = model.predict_number(["The short one is", "The long one is"])
    for found in (short, long):
        each = found.probabilities()
        assert list(each) == [1, 2, 3, 4, 5] and sum(each.values()) == pytest.approx(1)
        assert {found.median, *found.interval(0.9), found.quantile(0.99)} <= set(each)
    assert short.probabilities()[2] > 0.25 > long.probabilities()[2]
    assert len(metrics["scale_deciles"]) == 10 and "10 tenths are uneven" in said
    plain = graft_tiny("llama", tiny_tokenizer)
    with pytest.raises(ValueError, match="not finitely many"):
        plain.predict_number("It is")[0].probabilities()


@given(
    st.sampled_from([0.1, 0.2, 0.25, 0.3, 0.5, 1 / 3, 0.05, 1.0, 2.5]),
    st.integers(1, 40),
    st.sampled_from([0.0, 0.1, -0.7, 1.0, 100.3]),
    st.sampled_from(["gaussian", "cauchy"]),
    st.floats(-5, 60),
)
@example(1 / 3, 8, 100.3, "cauchy", 0.0)  # written to 12 digits, 100.633333333 is less than 100.3 + 1 / 3
def test_probabilities_of_any_grid_sum_to_one_and_its_ends_take_the_tails(step, count, low, family, loc):
    """Seen in data, and said; the values are those of the data, as they are written."""
    values = [round(low + place * step, 12) for place in range(count + 1)]
    said = Support(values[0], values[-1], step)
    seen = Support.seen_in(torch.tensor(values * 40, dtype=torch.float64)) if count < 12 else said
    for support in (said, seen):
        law = ValueLaw(ValueTransform("affine", 0.0, 0.3, support=support), family)
        found = NumberPrediction(loc, 1.0, 0.5, law)
        each = found.probabilities()
        assert sum(each.values()) == pytest.approx(1, abs=1e-9)
        assert [*each] == pytest.approx(values, rel=1e-11, abs=1e-11)
        assert step == 1 / 3 or all(len(f"{value!r}") < 8 for value in each), [*each]
        assert found.law.cdf(*found._parameters(), torch.tensor(values[-1], dtype=torch.float64)).item() == 1
        if (last := each[[*each][-1]]) > 1e-6:
            assert found.log_prob(values[-1]) == pytest.approx(math.log(last), abs=1e-6)


def test_a_grid_of_too_many_values_is_not_listed():
    values = torch.tensor([1e9, 2e9, 3e9] * 40, dtype=torch.float64)
    law = ValueLaw(ValueTransform.fit("affine", values, Support.seen_in(values)))
    with pytest.raises(ValueError, match="more than 10,000"):
        NumberPrediction(0.0, 1.0, 0.5, law).probabilities()
    with pytest.raises(ValueError, match="high 10.5 is no multiple of step 1.0 from low 0"):
        Support(high=10.5, step=1.0)


def test_the_start_at_a_regression_is_scikit_learns():
    from sklearn.linear_model import RidgeCV

    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 60))
    x -= x.mean(0)
    y = x[:, 0] + 0.5 * rng.normal(size=40)
    y -= y.mean()
    slopes, errors = _ridge(torch.from_numpy(x), torch.from_numpy(y), _RIDGES)
    known = RidgeCV(alphas=[40 * one for one in _RIDGES]).fit(x, y)
    np.testing.assert_allclose(slopes, known.coef_, atol=1e-9)
    assert errors.square().mean().item() == pytest.approx(-known.best_score_, rel=0.05)


def test_a_value_that_is_straight_in_the_features_starts_at_its_regression(tiny_tokenizer, tmp_path):
    model = graft_tiny("llama", tiny_tokenizer, value_branch_direct=True)
    stage = ValueStage(epochs=1, learning_rate=0.0, center=True)
    learn(model, skewed(model, 96, 0), [], tmp_path, TrainSettings(values=stage, value_transform="log"))
    short, long = model.predict_number(["The short one is", "The long one is"])  # nothing has been learned behind it
    assert 3 < short.median < 9 and 1e4 < long.median < 4e4
    model.save_pretrained(tmp_path / "saved")
    again = CausalQwenForCausalLM.from_pretrained(tmp_path / "saved")
    again.processor = model.processor
    assert again.predict_number("The long one is")[0].median == pytest.approx(long.median, rel=1e-5)


def test_a_class_with_too_few_values_to_be_called_positive_has_another_axis():
    values = torch.cat([torch.arange(1, 41), torch.arange(1, 6)]).double()
    numbers = LearnedNumbers(values, torch.zeros(45, dtype=torch.bool), ["many"] * 40 + ["few"] * 5)
    axes = numbers.class_axes("log", TrainSettings())
    assert {name: axis["value_transform"]["kind"] for name, axis in axes.items()} == {"many": "log", "few": "symlog"}


def test_copying_is_tried_where_values_are_said_again_more_often_than_by_chance(tiny_tokenizer):
    model = graft_tiny("llama", tiny_tokenizer)
    number = model.config.num_token_id

    def tried(texts):
        return values_repeat_context(rows_of(model, texts), number)

    assert tried([f"Of {i} and 0 there are {i}" for i in range(1, 11)])
    assert not tried([f"Of {i} and 0 there are {i}" for i in range(1, 10)])
    assert not tried([f"Of {i} and 0 there are {i + 0.5}" for i in range(40)])
    assert not tried([f"From 1 to 5 it is {1 + 4 * (i % 2)}" for i in range(40)])  # which all contexts hold
    drawn = np.random.default_rng(0)
    of_any_length = [" and ".join(map(str, drawn.integers(1, 9, 1 + 8 * (i % 2)))) for i in range(200)]
    assert not tried(of_any_length)
    assert tried([f"From 1 to 5, of {i % 4}, it is {i % 4}" for i in range(200)])


def test_rows_are_held_out_by_text_where_none_are_given(tiny_tokenizer):
    model = graft_tiny("llama", tiny_tokenizer)
    texts = [f"The {i % 50} one is {i % 7}" for i in range(200)]
    rest, held = hold_out(rows_of(model, texts), seed=0)
    assert len(rest) + len(held) == 200 and 40 <= len(held) <= 60
    first = ({tuple(e.numeric_values[:-1]) for e in part} for part in (rest, held))
    assert not set.intersection(*first)
    assert len(hold_out(rows_of(model, texts[:30]), seed=0)[1]) == 0  # too few to choose by


def test_rows_of_one_group_are_held_out_together(tiny_tokenizer):
    model = graft_tiny("llama", tiny_tokenizer)
    fields = [{"text": f"The {i % 9}th of them is {i}", "group": i // 2} for i in range(400)]
    rows = EncodedRows(fields, model.processor)  # as `train` reads them
    rest, held = (list(part) for part in hold_out(rows, seed=0))
    assert len(rest) + len(held) == 400 and len(held) == 80
    assert not {one.group for one in rest} & {one.group for one in held} and {one.group for one in held} <= {
        str(i) for i in range(200)
    }
    few = [row | {"group": i % 35} for i, row in enumerate(fields)]
    assert len(hold_out(encode_rows(few, model.processor), seed=0)[1]) == 0
    uneven = encode_rows([row | {"group": "most" if i < 290 else i} for i, row in enumerate(fields)], model.processor)
    for seed in range(20):
        rest, held = hold_out(uneven, seed=seed)
        assert (len(rest), len(held)) == (320, 80) and "most" not in {one.group for one in held}


def test_rows_too_few_to_hold_some_out_say_so(tiny_tokenizer, tmp_path):
    model, said = graft_tiny("llama", tiny_tokenizer), []
    learn(model, skewed(model, 24, 0), [], tmp_path, TrainSettings(), say=said.append)
    assert any("24 training rows (of few texts or groups) are too few to hold some out" in line for line in said)


@pytest.mark.parametrize("copies", [False, True])
def test_some_rows_of_a_store_are_what_is_read_of_them(tiny_tokenizer, tmp_path, copies):
    model = graft_tiny("llama", tiny_tokenizer, copy_numbers=copies)
    examples = rows_of(model, [f"From {i} to {i + 3} the one is {2 + i % 5}" for i in range(12)])
    found = FactStore.build(model, examples, tmp_path / "a").of_some([1, 5, 10])
    expected = FactStore.build(model, [examples[row] for row in (1, 5, 10)], tmp_path / "b")
    assert len(found) == 3 and np.array_equal(found.offsets, expected.offsets)
    for name in COLUMNS:
        np.testing.assert_allclose(getattr(found.facts, name), getattr(expected.facts, name), atol=1e-4, err_msg=name)
    if copies:
        both = (store.facts.numbers.candidates() for store in (found, expected))
        for (name, column), other in zip(next(both).items(), next(both).values(), strict=True):
            np.testing.assert_allclose(column, other, atol=1e-4, err_msg=name)
