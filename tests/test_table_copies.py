"""A regressor that copies numbers of a row's text: what it predicts, and when copying is tried."""

import numpy as np
import pytest

from causalqwen.modeling.prediction import NumberPrediction
from causalqwen.numbers import CRPS_LEVELS
from causalqwen.sklearn import NumberRegressor
from test_numbers import likeliest
from test_tables import brief, folder  # noqa: F401  fixtures


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
    regressor = brief().fit(texts, values)
    asked, true = saying(30, seed=1)
    true[1], asked[1] = 123456.25, "Thing 3 was sold, and it cost 123456.25 in all"  # further than any row had
    full = regressor.predict(asked, "full", quantiles=[0.3, 0.5, 0.7])
    said = np.arange(30) % 3 > 0
    for name in ("median", "mode"):
        np.testing.assert_array_equal(full[name][said], true[said])
    for row, (one, exact) in enumerate(zip(full["predictions"], true.tolist(), strict=True)):
        new = NumberPrediction(one.loc, one.scale, None, regressor.model_.value_law)
        assert [one.quantile(p) for p in (0.3, 0.5, 0.7)] == pytest.approx(
            [q[row] for q in full["quantiles"]], rel=1e-6
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
        np.testing.assert_allclose(turned[name][::-1], full[name], rtol=1e-9)
    regressor.save(tmp_path / "saved")
    np.testing.assert_array_equal(NumberRegressor.load(tmp_path / "saved").predict(asked), full["mean"])


def test_copying_is_tried_where_texts_say_their_values(brief):  # noqa: F811
    for name, (texts, values) in (("said", saying()), ("not said", (saying()[0], saying(seed=1)[1]))):
        single = (values - 0.4).astype(np.float32)  # 20.1 as float32 is still what a text says
        texts = [text.replace(".5", ".1") for text in texts]
        assert brief().fit(texts, single).model_.copies == (name == "said")
    assert not brief(config={"copy_numbers": False}).fit(*saying()).model_.copies
