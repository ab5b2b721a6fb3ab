"""Writing a value as text."""

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal

import torch
from torch import Tensor

from causalqwen.numbers.grammar import beside, find_numbers, readable
from causalqwen.numbers.rules import NumberRules

_UNSPACED = (  # scripts and signs after which a number follows without a space
    ("\u3000", "\u30ff"),  # CJK punctuation, kana
    ("\u3400", "\u9fff"),  # Han
    ("\uf900", "\ufaff"),  # Han, compatibility
    ("\uff00", "\uffef"),  # full-width forms
    ("\u0e00", "\u0eff"),  # Thai, Lao
)
_OPENING = set("([{<#@/\\-+_~^|«‹“‘")
_SHARE = 0.1  # of an interval: what one unit of the last written digit may be


@dataclass(frozen=True)
class NumberStyle:
    """How the numbers of one quantity are written: $1,272.50 has `before` "$" and `group` ",", 351 K has `after` " K".

    integer: no decimals, ever. group: the mark between thousands.
    """

    before: str = ""
    after: str = ""
    integer: bool = False
    group: str = ""
    decimal: str = "."

    @classmethod
    def of(cls, texts: str | Iterable[str], rules: NumberRules | None = None) -> "NumberStyle":
        """The style of the numbers in some texts: the commonest unit and separator, integers if all of them are.

        ValueError where the texts hold no number of digits.
        """
        rules, beside_it, marks, integer = rules or NumberRules(), Counter[tuple[str, str]](), Counter[str](), True
        for text in [texts] if isinstance(texts, str) else texts:
            for span in find_numbers(text, rules):
                if span.kind in ("chinese", "english", "fraction", "scaled"):
                    continue
                beside_it[beside(readable(text), span.start, span.end)] += 1
                mark = re.search(r"\d([ ,.'’\u00a0\u202f\u2009])\d", span.text)
                if mark and mark[1] != rules.decimal:
                    marks[mark[1]] += 1
                integer = integer and span.value.is_integer() and not re.search(rf"[eE{rules.decimal}]", span.text)
        if not beside_it:
            raise ValueError("a style is read from numbers, but these texts hold none")
        before, after = beside_it.most_common(1)[0][0]
        return cls(before, after, integer, marks.most_common(1)[0][0] if marks else "", rules.decimal)


PLAIN = NumberStyle()
"""Digits and a decimal point alone."""


def format_number(value: float, style: NumberStyle = PLAIN, place: int | None = None) -> str:
    """A value as text, without its unit.

    Without a place the shortest text that reads back as the same float64: 42, -5, 351.4, 1e+20; for a style of integers the
    nearest one. Otherwise rounded to a multiple of 10^place, whose zeros are kept: 351.40 at -2, 12,300 at 2.

    Raises ValueError for NaN and infinities: no text stands for them.
    """
    if not math.isfinite(value):
        raise ValueError(f"{value} cannot be written as a number")
    shortest = "-0" if value == 0 and math.copysign(1, value) < 0 else repr(float(value)).removesuffix(".0")
    number = Decimal(shortest)
    if style.integer:
        place = max(place or 0, 0)
    if place is not None and place >= number.adjusted() - 17:
        number = number.quantize(Decimal(1).scaleb(place)) or Decimal(0)
    scientific = shortest if place is None else f"{number.normalize():e}"
    written = f"{number:,f}" if -5 < number.adjusted() < 16 else scientific
    return written.translate({ord(","): style.group, ord("."): style.decimal})


def brief(value: float) -> str:
    """A value as short text for people: as it is where seven significant digits say it (373.15); else four: 417.7."""
    if not math.isfinite(value):
        return f"{value:g}"
    number = Decimal(repr(float(value))).normalize()
    return format_number(value, place=None if len(number.as_tuple().digits) <= 7 else number.adjusted() - 3)


def last_place(value: float, width: float) -> int | None:
    """The power of ten to which a value is written whose interval is `width` wide; None where that says nothing: the largest
    that is at most a tenth of the interval, never beyond the value's own first digit."""
    if not 0 < width < math.inf:
        return None
    place = math.floor(math.log10(width * _SHARE))
    return place if value == 0 else min(place, math.floor(math.log10(abs(value))))


def spaced(before: str, written: str, rules: NumberRules | None = None) -> int:
    """How many spaces stand between the text `before` and a number: one where the script sets words apart, and there only.

    One after a word, a digit or a closing sign; none at the start, after white space, an opening bracket, a currency sign, Han,
    kana or Thai. One more where it would be read as a part of another number, or as none: of - 5, #5, -$ 5, 10 500 kr.
    """
    if not before:
        return 0
    last = before[-1]
    is_joined = last.isspace() or last in _OPENING or unicodedata.category(last) == "Sc"
    wanted = 0 if is_joined or any(low <= last <= high for low, high in _UNSPACED) else 1
    for spaces in range(wanted, 3):
        start = len(before) + spaces
        numbers = find_numbers(before + " " * spaces + written, rules)
        if numbers and numbers[-1][:2] == (start, start + len(written)):
            return spaces
    return wanted


def finest_place(values: Tensor) -> int:
    """The exponent, 0 at most, of the power of ten in which values [n] are given: 99 in a hundred are multiples of it."""
    decimals = sorted(max(0, -int(Decimal(repr(value)).normalize().as_tuple().exponent)) for value in values.tolist())
    return -decimals[math.ceil(0.99 * len(decimals)) - 1]


def round_significant(values: Tensor, digits: int, place: int | None = None) -> Tensor:
    """Round to `digits` significant decimal digits, and to a multiple of 10^place, elementwise, in float64; zeros stay zero."""
    values = values.to(torch.float64)
    magnitude = torch.floor(torch.log10(values.abs().clamp(min=1e-300)))
    shift = digits - 1 - magnitude
    shift = shift if place is None else shift.clamp(max=-place)
    # Powers of ten up to 10^22 are exact, so that 351.235 comes out as the float of that text.
    up, down = 10.0 ** shift.clamp(0, 300), 10.0 ** (-shift).clamp(0, 300)
    rounded = torch.round(values * up / down) * down / up
    for index in ((shift.abs() > 22) & (values != 0)).nonzero():
        number = Decimal(repr(values[tuple(index)].item()))
        rounded[tuple(index)] = float(round(number, int(shift[tuple(index)])))
    return rounded + 0.0  # not -0
