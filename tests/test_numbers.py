"""Finding, transforming and writing numbers."""

import math
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from causalqwen.numbers import (
    CRPS_LEVELS,
    ValueLaw,
    ValueTransform,
    find_numbers,
    format_number,
    round_significant,
    spaced,
    symlog,
)

READ = [
    ("It is 42.", [42.0]),
    ("-5", [-5.0]),
    ("(-3) and = -3 and x=-4", [-3.0, -3.0, -4.0]),
    ("−7 degrees", [-7.0]),
    ("+3.5", [3.5]),
    (".5 of it", [0.5]),
    ("1,272.50 dollars", [1272.5]),
    ("3,000,000 people", [3e6]),
    ("12,34", [12.0, 34.0]),
    ("3-4 apples", [3.0, 4.0]),
    ("10 - 20", [10.0, 20.0]),
    ("6.02e23 and 1E-3", [6.02e23, 1e-3]),
    ("１２．５ and ５００", [12.5, 500.0]),
    ("5% and 25.5%", [5.0, 25.5]),
    ("价格是99.9元", [99.9]),
    ("10km, 5kg, 100m/s and 20°C", [10.0, 5.0, 100.0, 20.0]),
    ("$5 or €7.20", [5.0, 7.2]),
    ("0 and 0.5 but -0", [0.0, 0.5, -0.0]),
    ("(1,2) is a point", [1.0, 2.0]),
    ("The boiling point of 1,2-dichloroethane (C2H4Cl2) is 356.6 K.", [356.6]),
]

KEPT_AS_TEXT = [
    "x1 and fp16 and H2O and CO2",
    "COVID-19, GPT-4, F-16",
    "2024-01-05, 05.01.2024, 1/5/2024, 2024-01-05T12:30:00Z",
    "Jan 5, 2024 or 5 January 2024 or May 5",
    "2024年1月5日 和 1月5日",
    "12:30 or 12:30:45 or 3:16",
    "v1.2 and 1.2.3 and 1.2.3-rc1",
    "192.168.0.1",
    "007 and 00501",
    "call 555-1234 or (555) 123-4567 or +86 138-0013-8000 or 13800138000",
    "1-800-555-0199, 64-17-5",
    "1/2",
    "3D, 1st, 4x4, 0x1f, 10x",
    "the 5-year plan",
    "1,2-dichloroethane, 2-(2-methoxyethoxy)ethanol, 7-azabicyclo[4.1.0]heptane, (1r,2s)-cyclohexane",
    "#123 and file.7z and 1_000",
    "me5@mail.org and https://a.b/c?d=5",
]


@pytest.mark.parametrize(("text", "values"), READ)
def test_numbers_are_read(text, values):
    found = find_numbers(text)
    assert [span.value for span in found] == values
    assert [math.copysign(1, span.value) for span in found] == [math.copysign(1, v) for v in values]


@pytest.mark.parametrize("text", KEPT_AS_TEXT)
def test_what_only_looks_like_a_number_stays_text(text):
    assert find_numbers(text) == []


@given(st.text(max_size=60) | st.text("0123456789.,-+eE%:/ xK年()", max_size=40))
def test_spans_never_overlap_and_hold_their_own_text(text):
    end = 0
    try:
        spans = find_numbers(text)
    except ValueError as error:
        assert "too large" in str(error)
        return
    for span in spans:
        assert span.start >= end and span.end > span.start
        assert text[span.start : span.end] == span.text
        end = span.end


@pytest.mark.parametrize(("text", "place"), [("it is 1e400 K", "6-11"), ("9" * 400, "0-400")])
def test_a_number_beyond_float64_is_refused_with_its_place(text, place):
    with pytest.raises(ValueError, match=f"characters {place} is too large"):
        find_numbers(text)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_written_number_reads_back_as_itself(value):
    text = format_number(value)
    (span,) = find_numbers(text)
    assert span.text == text and span.value == value


def test_what_is_not_finite_is_not_written():
    for value in (math.nan, math.inf):
        with pytest.raises(ValueError, match="cannot be written"):
            format_number(value)


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ("is", True),
        ("costs $", False),
        ("(", False),
        ("价格是", False),
        ("", False),
        ("a\n", False),
        ("5,", True),
        ("가격은", True),
    ],
)
def test_a_space_stands_where_the_script_writes_one(before, expected):
    assert spaced(before) is expected


@given(st.floats(1e-200, 1e200), st.integers(1, 8))
def test_rounding_keeps_significant_digits_and_writes_short(value, digits):
    rounded = round_significant(torch.tensor([value, -value, 0.0], dtype=torch.float64), digits)
    assert rounded[0].item() == pytest.approx(value, rel=0.51 * 10 ** (1 - digits))
    assert rounded[1] == -rounded[0] and rounded[2] == 0


def test_a_rounded_number_is_the_float_of_its_text():
    values = torch.tensor([351.23456789, 0.00123456789, 98765432.1, 1e-7 / 3], dtype=torch.float64)
    texts = [format_number(v) for v in round_significant(values, 6).tolist()]
    assert texts == ["351.235", "0.00123457", "98765400", "3.33333e-08"]


TRANSFORMS = [ValueTransform(), ValueTransform("affine", 450.0, 55.0), ValueTransform("symlog", 6.0, 0.2)]


@pytest.mark.parametrize("transform", TRANSFORMS)
@given(value=st.floats(-1e6, 1e6), other=st.floats(-1e6, 1e6))
def test_transforms_are_monotone_and_invert(transform, value, other):
    v = torch.tensor([value, other], dtype=torch.float64)
    axis = transform.forward(v)
    torch.testing.assert_close(transform.inverse(axis), v, rtol=1e-9, atol=1e-9)
    if value < other:
        assert axis[0] <= axis[1]


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_the_jacobian_is_the_slope(transform):
    v = torch.tensor([-3.0, 0.5, 400.0], dtype=torch.float64)
    step = 1e-6
    slope = (transform.forward(v + step) - transform.forward(v - step)) / (2 * step)
    torch.testing.assert_close(transform.log_jacobian(v), slope.log(), rtol=1e-6, atol=1e-6)


def test_symlog_is_the_documents_phi_without_its_direction():
    v = torch.tensor([-99.9, 0.0, 99.9], dtype=torch.float64)
    assert symlog(v).tolist() == pytest.approx([-math.log(100.9), 0.0, math.log(100.9)])


def test_a_fit_is_robust_and_refuses_what_it_cannot_fit():
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 1e9], dtype=torch.float64)
    fitted = ValueTransform.fit("affine", values)
    assert (fitted.center, fitted.width) == (3.0, 1.0)
    assert ValueTransform.fit("affine", torch.full((9,), 5.0)).width == 1.0
    assert ValueTransform.fit("identity", values) == ValueTransform()
    for bad, message in ((values[:0], "no number"), (torch.tensor([1.0, math.nan]), "not finite")):
        with pytest.raises(ValueError, match=message):
            ValueTransform.fit("affine", bad)
    with pytest.raises(ValueError, match="unknown value transform"):
        ValueTransform("log")


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("family", ["cauchy", "gaussian"])
def test_the_density_in_units_is_the_slope_of_the_cdf(transform, family):
    law = ValueLaw(transform, family)
    loc, scale = (torch.tensor([x], dtype=torch.float64) for x in (0.3, 1.2))
    value, step = torch.tensor([transform.inverse(torch.tensor(0.9)).item()], dtype=torch.float64), 1e-4
    slope = (law.cdf(loc, scale, value + step) - law.cdf(loc, scale, value - step)) / (2 * step)
    torch.testing.assert_close(law.log_prob(loc, scale, value).exp(), slope, rtol=1e-5, atol=0)


def test_quantiles_go_through_the_transform_exactly():
    law = ValueLaw(ValueTransform("symlog", 6.0, 0.2))
    loc, scale = torch.tensor([1.0, -2.0]), torch.tensor([0.5, 2.0])
    torch.testing.assert_close(law.quantile(loc, scale, 0.5), law.transform.inverse(loc))
    low, high = law.interval(loc, scale, 0.8)
    torch.testing.assert_close(law.cdf(loc, scale, low), torch.full((2,), 0.1, dtype=torch.float64))
    torch.testing.assert_close(law.cdf(loc, scale, high), torch.full((2,), 0.9, dtype=torch.float64))
    for bad in (0.0, 1.0):
        with pytest.raises(ValueError, match="strictly between"):
            law.quantile(loc, scale, bad)
        with pytest.raises(ValueError, match="strictly between"):
            law.interval(loc, scale, bad)


def test_crps_through_a_symlog_is_finite_and_clipped():
    law = ValueLaw(ValueTransform("symlog", 6.0, 1.0), value_range=(3.0, 5869.0))
    loc, scale, value = (torch.tensor([x], dtype=torch.float64) for x in (0.0, 5.0, 400.0))
    quantiles = law.clip(law.transform.inverse(loc.unsqueeze(-1) + scale.unsqueeze(-1) * law.law.quantile(CRPS_LEVELS)))
    assert quantiles.min() >= 3.0 - 5866.0 and quantiles.max() <= 5869.0 + 5866.0
    assert torch.isfinite(law.crps(loc, scale, value)).all()
    affine = ValueLaw(ValueTransform("affine", 400.0, 50.0), value_range=(-1e9, 1e9))
    closed, by_quantiles = affine.crps(loc, scale, value), affine.quantile_crps(loc, scale, value)
    torch.testing.assert_close(closed, by_quantiles, rtol=0.1, atol=0)


@pytest.mark.parametrize("count", [50, 400])
def test_recalibrated_intervals_cover_what_they_promise(count):
    """The law is twice too wide; levels fitted on some rows mend its intervals on others."""
    generator = torch.Generator().manual_seed(count)
    truth = ValueLaw(family="cauchy").law
    draws = truth.quantile(torch.rand(count + 20_000, generator=generator, dtype=torch.float64))
    loc, scale = torch.zeros_like(draws), torch.full_like(draws, 2.0)
    levels = ValueLaw().fit_interval_levels(loc[:count], scale[:count], draws[:count])
    assert list(levels) == sorted(levels) and levels[0] == 0.0 and levels[-1] < 1.0
    law = ValueLaw(interval_levels=levels)
    for level in (0.5, 0.8, 0.9):
        low, high = law.interval(loc[count:], scale[count:], level)
        covered = ((low <= draws[count:]) & (draws[count:] <= high)).double().mean().item()
        assert covered == pytest.approx(level, abs=2.5 * (level * (1 - level) / count) ** 0.5)
        raw_low, raw_high = law.interval(loc[count:], scale[count:], level, raw=True)
        assert ((raw_low <= draws[count:]) & (draws[count:] <= raw_high)).double().mean().item() > level + 0.03
    torch.testing.assert_close(law.quantile(loc[:1], scale[:1], 0.5), loc[:1])


@pytest.mark.parametrize("unit", ["1,", "1-(", "(1-", "v-"])
def test_no_text_takes_the_scanner_quadratic_time(unit):
    """A server reads whatever it is sent; looking ahead without a bound took a minute for the first of these."""
    start = time.process_time()
    find_numbers("1 " + unit * (100_000 // len(unit)))
    assert time.process_time() - start < 5
