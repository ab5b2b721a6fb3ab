"""A number's distribution as an object: what is told of many at once, or at many places, is what each tells alone."""

import math
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from causalqwen import NumberPrediction
from causalqwen.modeling.prediction import CopiedNumberPrediction, MixedNumberPrediction, describe, describe_all
from causalqwen.numbers import ValueLaw, ValueTransform
from causalqwen.numbers.support import Support
from causalqwen.parts.copying import CopyLaw

LEVELS = tuple((torch.arange(101) / 100).square().tolist())
NARROWER = tuple((torch.arange(101) / 100).pow(3).tolist())
SYMLOG = ValueTransform("symlog", 10.0, 2.0)
GRID = ValueTransform("affine", 100.0, 5.0, support=Support(95.0, 110.0, 5.0))
LAWS = [
    ValueLaw(),
    ValueLaw(SYMLOG, "gaussian", (-50.0, 900.0), LEVELS, ((0.7, NARROWER),)),
    ValueLaw(SYMLOG, "cauchy", (-50.0, 900.0), LEVELS),
    ValueLaw(GRID, "gaussian"),
]


def copied(loc, scale, num_prob):
    weights = torch.tensor([0.5, 0.3, 0.2]).double().log()
    law = CopyLaw(LAWS[1], torch.tensor([104.0, 110.0]).double(), weights)
    return CopiedNumberPrediction(loc, scale, num_prob, law)


def mixed(loc, scale, num_prob):
    locs = loc + torch.linspace(-2, 2, 5, dtype=torch.float64)
    return MixedNumberPrediction(loc, scale, num_prob, ValueLaw(SYMLOG, "gaussian"), locs)


MAKERS = [*(lambda *one, law=law: NumberPrediction(*one, law) for law in LAWS), copied, mixed]
PREDICTIONS = st.builds(
    lambda kind, *one: MAKERS[kind](*one),
    st.integers(0, len(MAKERS) - 1),
    st.floats(-3, 3),
    st.floats(0.01, 5),
    st.sampled_from([None, 0.0, 0.25, 1.0]),
)
VALUES = st.one_of(st.none(), st.floats(-1e4, 1e4), st.sampled_from([95.0, 100.0, 104.0]))


def flat(entry):
    ends = {f"{level}/{side}": end for level, both in entry["intervals"].items() for side, end in enumerate(both)}
    return {key: one for key, one in entry.items() if key != "intervals"} | ends


@given(st.lists(st.tuples(PREDICTIONS, VALUES), max_size=5), st.booleans(), st.sampled_from([2, 1024]))
def test_many_are_described_as_each_alone(asked, raw, at_once):
    predictions, values = [one for one, _ in asked], [value for _, value in asked]
    levels = (0.3, 0.9)
    with patch("causalqwen.modeling.prediction._AT_ONCE", at_once):
        found = describe_all(predictions, values, raw=raw, levels=levels)
    for entry, prediction, value in zip(found, predictions, values, strict=True):
        alone = describe(prediction, value, raw=raw, levels=levels)
        assert list(entry) == list(alone)
        for key, known in flat(alone).items():
            assert flat(entry)[key] == pytest.approx(known, rel=1e-10, abs=1e-10), key
    assert [entry.get("crps") for entry in describe_all(predictions)] == [None] * len(asked)


def test_a_true_value_must_be_a_number():
    for value in (math.nan, math.inf):
        with pytest.raises(ValueError, match="a value must be a finite number"):
            describe_all([NumberPrediction(0.0, 1.0, 0.5, LAWS[0])] * 2, [1.0, value])


@given(PREDICTIONS, st.floats(-50, 200))
def test_a_curve_is_of_its_places(prediction, value):
    curve = prediction.curve(30, value)
    assert [one.__class__ for one in curve[0]] == [float] * 3
    for at, density, below in curve:
        assert below == pytest.approx(prediction.cdf(at), rel=1e-10, abs=1e-12)
        if density and not isinstance(prediction, CopiedNumberPrediction):
            assert density == pytest.approx(math.exp(prediction.log_prob(at)), rel=1e-9)
    if isinstance(prediction, CopiedNumberPrediction):
        of_new = NumberPrediction(prediction.loc, prediction.scale, None, prediction.law.of_new)
        new = [math.exp(of_new.log_prob(at)) / 2 for at, _, _ in curve]
        assert [density for _, density, _ in curve] == pytest.approx(new, rel=1e-9)
