"""A regressor that copies numbers of a row's text: what it predicts, and when copying is tried."""

import numpy as np
import pytest

from causalqwen.modeling.prediction import NumberPrediction
from causalqwen.numbers import CRPS_LEVELS
from causalqwen.sklearn import NumberRegressor, _folds
from causalqwen.training import features
from causalqwen.training.choice_of_people import ChoiceOfPeople as Trials
from causalqwen.training.copies import say_again
from causalqwen.training.kept_rows import KeptRows
from causalqwen.training.mean import FittedMean
from conftest import graft_tiny
from test_numbers import likeliest
from test_tables import BRIEF, SMALL, brief, few_trees, folder, prompts  # noqa: F401  fixtures


def saying(rows: int = 120, seed: int = 0) -> tuple[list[str], np.ndarray]:
    """Texts of which two thirds say their value, behind a number that it is not."""
    random = np.random.default_rng(seed)
    values = random.integers(20, 900, rows) + 0.5
    ends = [f", and it cost {value} in all" if row % 3 else "" for row, value in enumerate(values)]
    return [
        f"Thing {number} was sold{end}" for number, end in zip(random.integers(1, 9, rows), ends, strict=True)
    ], values


def test_a_number_that_a_text_says_is_copied_exactly(brief, tmp_path):  # noqa: F811
    texts, values = saying()
    values_stage = {"epochs": 40, "batch_size": 16, "learning_rate": 0.01, "center": True}
    settings = {"values": values_stage, "evaluations": 1}
    regressor = brief(config=SMALL | {"copy_numbers": True}, settings=settings).fit(texts, values)
    asked, true = saying(30, seed=1)
    true[1], asked[1] = 123456.25, "Thing 3 was sold, and it cost 123456.25 in all"  # further than any row had
    full = regressor.predict(asked, "full", quantiles=[0.3, 0.5, 0.7])
    said = np.arange(30) % 3 > 0
    for name in ("median", "mode"):
        np.testing.assert_array_equal(full[name][said], true[said])
    for row, (one, exact) in enumerate(zip(full["predictions"], true.tolist(), strict=True)):
        new = NumberPrediction(one.loc, one.scale, None, regressor.model_.value_law)
        assert [one.quantile(p) for p in (0.3, 0.5, 0.7)] == pytest.approx(
            [q[row] for q in full["quantiles"]], rel=1e-9
        )
        assert len(one.candidates) == 1 + said[row]
        weights = dict(one.candidates)
        assert (one.copied == exact) == said[row] and (not said[row] or weights[exact] > 0.8)
        low = new.law.transform.support.low  # as which numbers below it count that are hardly said
        counted = [(value if value == one.copied else max(value, low)) * weight for value, weight in one.candidates]
        of_new = full["mean"][row] - sum(counted)
        share = 1 - sum(weights.values())
        low, high = 20.5 - 880, 899.5 + 880  # the range of the rows, widened by its width
        assert share * low * 1.01 <= of_new <= share * high * 1.01
        if not said[row]:
            quantiles = [new.quantile(p) for p in CRPS_LEVELS.tolist()]
            assert full["mode"][row] == pytest.approx(
                likeliest(quantiles, [*map(new.log_prob, quantiles)], new.law), rel=1e-9
            )
    middle = regressor.predict_interval(asked, 0.5)
    assert (middle[said] == true[said, None]).all() and (middle[~said, 0] < middle[~said, 1]).all()
    assert (regressor.sample(asked, 200)[said] == true[said, None]).mean() > 0.8
    turned = regressor.predict(asked[::-1], "full")
    for name in ("mean", "median", "mode"):
        np.testing.assert_array_equal(turned[name][::-1], full[name])
    regressor.save(tmp_path / "saved")
    np.testing.assert_array_equal(NumberRegressor.load(tmp_path / "saved").predict(asked), full["mean"])


def test_a_mean_follows_no_number_that_is_hardly_said(brief):  # noqa: F811
    random = np.random.default_rng(0)
    shares = random.integers(1, 99, 120) / 100
    texts = [
        f"in {2000 + row} it was {v}" if row % 3 else f"in {2000 + row} it was not said" for row, v in enumerate(shares)
    ]
    settings = {"values": {"epochs": 10, "batch_size": 16, "center": True}, "evaluations": 1}
    regressor = brief(config=SMALL | {"copy_numbers": True}, settings=settings).fit(texts, shares)
    full = regressor.predict([*texts, "in 2001 it was 0.5, order 123456789012345"], "full")
    assert regressor.model_.value_law.transform.support.high == 1.0
    weights = [max(weight for value, weight in one.candidates if value > 1) for one in full["predictions"]]
    assert min(weights) > 0 and max(weights) < 0.5  # never 0
    assert (full["mean"] > 0).all() and (full["mean"] <= 1).all()


def test_rows_are_read_with_their_numbers_only_where_copying_may_be_chosen(brief, monkeypatch, tmp_path):  # noqa: F811
    texts, values = saying()
    told = []
    monkeypatch.setattr(NumberRegressor, "_kept", lambda self, numbers=False: told.append(numbers) or 1 / 0)
    for config, settings in ((SMALL, {}), (SMALL | {"copy_numbers": False}, {}), (SMALL, BRIEF)):
        with pytest.raises(ZeroDivisionError):
            brief(config=config, settings=settings, experts=False).fit(texts, values)
    assert told == [True, False, False]


def test_a_row_that_another_model_reads_too_is_told_as_before(tiny_tokenizer, tmp_path):
    copier, plain = (graft_tiny("llama", tiny_tokenizer, copy_numbers=copies) for copies in (True, False))
    examples = prompts(plain, 6)
    first = KeptRows(tmp_path, plain).features(examples[:1])
    KeptRows(tmp_path, copier).features(examples)
    kept = KeptRows(tmp_path, plain)
    np.testing.assert_array_equal(kept.features(examples[:1]), first)
    (store,) = kept.folder.glob("features-*")
    assert kept._index()[1][kept._index()[0][features.row_digest(examples[0])][0]] == store
    assert len(kept._index()[0]) == 6  # and the others are not read again


def test_copying_is_tried_where_texts_say_their_values(brief, monkeypatch):  # noqa: F811
    monkeypatch.setattr(Trials, "_fit", lambda self, axis, config, *_: np.full(24, 2.0 - config["copy_numbers"]))
    made = {}
    for name, (texts, values) in (("said", saying()), ("not said", (saying()[0], saying(seed=1)[1]))):
        single = (values - 0.4).astype(np.float32)  # 20.1 as float32 is still what a text says
        texts = [text.replace(".5", ".1") for text in texts]
        made[name] = brief(settings={"values": "auto", "evaluations": 1}, experts=False).fit(texts, single)
        copying = [one["copy_numbers"] for one in made[name].choice_["tried"]]
        assert any(copying) == made[name].model_.copies == (name == "said") and not all(copying)
    assert not say_again([], 0)


@pytest.mark.parametrize("few", [1, 24])
def test_a_mean_beside_copies_is_learned_from_new_numbers_alone(brief, monkeypatch, few):  # noqa: F811
    monkeypatch.setattr("causalqwen.sklearn.FEWEST", few)
    seen, fit = [], FittedMean.fit
    monkeypatch.setattr(FittedMean, "fit", lambda *columns: seen.append(columns[2]) or fit(*columns))
    texts, values = saying()
    fold = _folds(120, None, np.random.RandomState(0))
    monkeypatch.setattr("causalqwen.sklearn._folds", lambda *given: fold)
    brief(config=SMALL | {"copy_numbers": True}).fit(texts, values)
    new = [value for row, value in enumerate(values) if fold[row] == 0 and row % 3 == 0]
    assert [list(one) for one in seen] == ([new] if len(new) >= few else [])
