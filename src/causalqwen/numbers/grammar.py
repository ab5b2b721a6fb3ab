"""Finding the numbers of a text.

One regular expression, made from a table, reads the text from left to right: what must stay text (dates, times, versions,
addresses, identifiers, phone numbers, codes) is an alternative that comes before the number itself, so that it is consumed
whole. A percent sign, a unit or a currency sign is text beside the number.
"""

import functools
import math
import re
from typing import NamedTuple

from causalqwen.numbers.rules import KINDS, NumberRules
from causalqwen.numbers.table import AFTER, BEFORE, BEFORE_SIGNED, MONEY, table
from causalqwen.numbers.words import chinese_value, english_value, fraction_value

# Full-width signs, the minus sign, and the traditional forms of Chinese numerals: a character for a character.
_ALIKE = str.maketrans("０１２３４５６７８９．，＋－％：／（）−～￥＄萬億兩", "0123456789.,+-%:/()-~¥$万亿两")
_HINTS = {"chinese": "十百千万亿萬億", "fraction": "¼½¾⅐-⅞"}  # what a text without digits may hold
_BEFORE_WORDS = re.compile(r"[^A-Za-z]*")
_IS_MONEY = re.compile(MONEY)
_BETWEEN = {"-", "–", " – ", "—", "~", "..", " to ", "至", "到"}
_MONEY_INSIDE = re.compile(rf"(?<=^[+-])(?:{BEFORE_SIGNED})")
_UNIT = re.compile(r"[ ]?(?:[^\W\d_]+(?:/[^\W\d_]+)?|[$€£¥₹‰℃℉])")
_RAISED = str.maketrans("⁺⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "+-0123456789")
_POWER_OF_TEN = re.compile(r"(.*?)[ ]?[×xX*·⋅]?[ ]?10\^?([+-]?\d+)")


class NumberSpan(NamedTuple):
    """A number in a text: `text[start:end] == self.text`, worth `value` (float64).

    kind: one of `KINDS`. unit: what it counts, as it is written beside it: K, %, $, 元; "" where none is known.
    """

    start: int
    end: int
    text: str
    value: float
    kind: str = "number"
    unit: str = ""


class _Scanner:
    """The compiled table of some rules."""

    def __init__(self, rules: NumberRules) -> None:
        self.kinds = frozenset(rules.kinds)
        self.plain = str.maketrans(dict.fromkeys(rules.groups or "") | {rules.decimal: "."})
        on = {"", "number", *rules.protected, *rules.kinds} | ({"words"} if "chinese" in self.kinds else set())
        rows = [(name, pattern) for name, pattern in table(rules) if name in on]
        named = [f"(?P<{name}>{pattern})" if name in KINDS else pattern for name, pattern in rows]
        self.scan = re.compile("|".join(named), re.ASCII).finditer
        hints = "".join(signs for kind, signs in _HINTS.items() if kind in self.kinds)
        self.may_hold = re.compile("" if "english" in self.kinds else f"[0-9０-９{hints}]").search

    def value_of(self, form: str, written: str) -> float:
        """Marks between thousands leave the digits, but not the words behind them, and the decimal mark becomes a point."""
        written = _MONEY_INSIDE.sub("", written)
        if form == "fraction":
            return fraction_value(written)
        if form == "english":
            return english_value(_BEFORE_WORDS.sub(lambda digits: digits[0].translate(self.plain), written, count=1))
        if form == "scientific":
            times, power = _POWER_OF_TEN.fullmatch(re.sub("[{}]", "", written.translate(_RAISED))).groups()
            return float(f"{(times if times.strip('+-') else times + '1').translate(self.plain)}e{power}")
        digits = written if written.isdigit() else written.translate(self.plain)
        return chinese_value(digits) if form == "chinese" else float(digits)

    def kind_of(self, form: str, written: str, unit: str) -> str:
        """The kind of a number of digits is that of what stands beside it."""
        if form != "number":
            return form
        if unit in ("%", "‰"):
            kind = "percent"
        elif unit and _IS_MONEY.fullmatch(unit):
            kind = "currency"
        else:
            kind = "scientific" if "e" in written or "E" in written else form
        return kind if kind in self.kinds else form


_scanner = functools.lru_cache(_Scanner)


def find_numbers(text: str, rules: NumberRules | None = None) -> list[NumberSpan]:
    """The numbers of `text`, left to right, never overlapping; everything outside them is to stay as it is.

    Read as numbers by the default rules: 42, -5, +3.5, .5, 1,272.50, 1 272 (no-break spaces), 12,34,567, 6.02e23, １２．５,
    99.9 in 99.9元, 5 in 5%, 10 in 10km, -$1,200, 6.02×10^23, 10⁻⁹, 3.5万, 2亿, 1万5000, 三百二十.
    Left as text: dates, times, versions, IP addresses, identifiers (x1, fp16, COVID-19, 1,2-dichloroethane), phone
    numbers, malformed groups (0,001; 1000,000), fractions with a slash, hexadecimal numbers, codes with a leading zero
    (007), powers of ten that float64 cannot hold (1e400, 72e71990), code in backticks, words (万一, 十分, 第三十二).

    Raises:
        ValueError: digits of a number that float64 cannot hold, with their place in the text.
    """
    scanner = _scanner(rules or _DEFAULT)
    if not scanner.may_hold(text):
        return []
    spans: list[NumberSpan] = []
    alike = text.translate(_ALIKE)
    for match in scanner.scan(alike):
        form = match.lastgroup
        if form is None:
            continue
        start, end = match.span()
        written = match.group()
        value = scanner.value_of(form, written)
        if not math.isfinite(value) and (form == "scientific" or "e" in written.lower()):
            continue  # 10^400 is no more than its characters, nor is 72e71990, a name in hexadecimal
        if not math.isfinite(value):
            shown = written if len(written) <= 24 else written[:21] + "..."
            raise ValueError(f"the number {shown} at characters {start}-{end} is too large for float64")
        if spans and written[0] == "-" and _second_of_two(alike, spans[-1].end, start, end):
            start, value = start + 1, -value
        unit = unit_of(*beside(alike, start, end))
        span = NumberSpan(start, end, text[start:end], value, scanner.kind_of(form, written, unit), unit)
        if spans and "range" in scanner.kinds and alike[spans[-1].end : start] in _BETWEEN:
            spans[-1] = _end_of_range(spans[-1], "" if form == "chinese" and spans[-1].kind != form else unit)
            span = _end_of_range(span, unit)
        spans.append(span)
    return spans if "number" in scanner.kinds else [span for span in spans if span.kind != "number"]


_DEFAULT = NumberRules()


def _second_of_two(text: str, behind: int, start: int, end: int) -> bool:
    """Whether the hyphen at `start` stands between two numbers of one unit, 100元-200元, and is no sign."""
    unit = text[behind:start]
    return not unit or (bool(_UNIT.fullmatch(unit)) and text.startswith(unit, end))


def beside(text: str, start: int, end: int) -> tuple[str, str]:
    """What stands before and behind the number at `text[start:end]` and is its unit, with the space between: "", " K"."""
    if after := AFTER.match(text, end):
        return "", after.group()
    if inside := money_inside(text[start:end]):
        return inside, ""
    before = BEFORE.search(text, max(0, start - 5), start)
    return before.group() if before else "", ""


def money_inside(number: str) -> str:
    """The $ of -$1,200; "" for none."""
    inside = _MONEY_INSIDE.search(number.strip(" ").translate(_ALIKE))
    return inside.group() if inside else ""


def unit_of(before: str, after: str) -> str:
    """The unit that `beside` found; "" for none."""
    unit = (after or before).strip(" ")
    unit = unit[-1] if unit and unit[-1] in "$€£¥₹" else unit
    return "%" if unit == "百分之" else unit


def _end_of_range(span: NumberSpan, unit: str) -> NumberSpan:
    """3 of 3-4 km: both ends count what stands behind the second."""
    return span._replace(kind="range" if span.kind == "number" else span.kind, unit=span.unit or unit)
