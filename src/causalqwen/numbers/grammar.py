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
from causalqwen.numbers.table import AFTER, BEFORE, BEGIN, LEAD, MONEY_BEFORE, MONEY_BEHIND, SIGNS, table
from causalqwen.numbers.words import chinese_value, english_value, fraction_value, scaled_value

# Full-width signs, minus signs and hyphens, fraction slashes, and the traditional forms of Chinese numerals: a character for a
# character.
_ALIKE = str.maketrans(
    "０１２３４５６７８９．，＋－−‐‑﹣％：／⁄∕（）～￥＄￡￠￦萬億兩點負", "0123456789.,+-----%:///()~¥$£¢₩万亿两点负"
)
# Dollars around mathematics are no money: around what has no space in it, or what only mathematics has.
_TEX = re.compile(r"\$\$[^$]{1,2000}\$\$|(?<![\w$\\])\$(?=\S)(?:[^$\s]+|(?=[^$\n]*[\\^_{}=])[^$\n]+)(?<=\S)\$(?![\d$])")
_HINTS = {"chinese": "点點十百千万亿萬億", "fraction": "¼½¾⅐-⅞₀-₉"}  # what a text without digits may hold
_IS_MONEY = re.compile(rf"{MONEY_BEFORE}|{MONEY_BEHIND}")
_BETWEEN = {"-", "–", " – ", "—", "~", "..", " to ", "至", "到"}
_UNIT = re.compile(r"[ ]?(?:[^\W\d_]+(?:/[^\W\d_]+)?|[$¢-¥₠-⃏‰℃℉])")
_NO_UNIT = " 0123456789,;:|()[]{}\n\t-\"'"
_MINUS = re.compile("[-–(负下]|(?i:minus|neg)")
_OF_DIGITS = re.compile(r"\d[^A-Za-z]*(?<! )")
_RAISED = str.maketrans("⁺⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "+-0123456789")
_POWER_OF_TEN = re.compile(r"(.*?)[ ]?(?:[×xX*·⋅]|\\times|\\cdot)?[ ]?10[ ]?(?:\^|\*\*)?[ ]?([+-]?\d+)")


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
        self.plain = str.maketrans(dict.fromkeys(f"{rules.groups or ''} ") | {rules.decimal: "."})
        kept, read = {"", *KINDS, *rules.protected, "words"}, {"number", *rules.kinds}
        if "chinese" not in self.kinds:
            kept.remove("words")
        self.forms: dict[str, str] = {}
        groups = []
        for begin, rows in table(rules):
            patterns = []
            for name, pattern in rows:
                if name in read:
                    self.forms[f"form{len(self.forms)}"] = name
                    pattern = f"(?P<form{len(self.forms) - 1}>{pattern})"
                if name in kept:
                    patterns.append(pattern)
            groups.append(f"{begin}(?:{'|'.join(patterns)})")
        self.scan = re.compile(rf"(?=[{BEGIN}])(?:{'|'.join(groups)})", re.ASCII).finditer
        hints = "".join(signs for kind, signs in _HINTS.items() if kind in self.kinds)
        self.may_hold = re.compile("" if "english" in self.kinds else f"[0-9０-９{hints}]").search

    def value_of(self, form: str, written: str) -> float:
        """Marks between thousands leave the digits, but not the words after them, and the decimal mark becomes a point."""
        lead = _lead(written)[0]
        is_negative = written[-1] == "-" or bool(lead and _MINUS.search(lead))
        try:
            value = self._size_of(form, written[len(lead) :].rstrip("-)"))
        except OverflowError:
            value = math.inf
        return -value if is_negative else value

    def _size_of(self, form: str, written: str) -> float:
        """The value of what stands after the sign."""
        if form == "fraction":
            return fraction_value(written)
        if form in ("english", "scaled"):
            words = _OF_DIGITS.sub(lambda digits: digits[0].translate(self.plain), written)
            return english_value(words) if form == "english" else scaled_value(words)
        if form == "scientific":
            written = re.sub("[{}]", "", written.translate(_RAISED)).replace("–", "-")
            times, power = _POWER_OF_TEN.fullmatch(written).groups()
            return float(f"{(times or '1').translate(self.plain)}e{power}")
        digits = written if written.isdigit() else written.translate(self.plain).replace("–", "-")
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
    99.9 in 99.9元, 5 in 5%, 10 in 10km, -$1,200, 1,500 in R1,500, $85K, 3.5 million, 6.02×10^23, 10⁻⁹, 3.5万, 2亿, 1万5000,
    三百二十, 负三点五.
    Left as text: dates, times, versions, IP addresses, identifiers (x1, fp16, COVID-19, 1,2-dichloroethane), phone
    numbers, malformed groups (0,001; 1000,000; 1.272,50), fractions (2 1/2, 2½), hexadecimal numbers, codes with a leading
    zero (007), powers of ten that float64 cannot hold (1e400, 72e71990), code in backticks, words (万一, 十分, 第三十二), and
    what is of a kind that is off: a number is read with its right value, or the whole of it is text.

    Raises:
        ValueError: digits of a number that float64 cannot hold, with their place in the text.
    """
    scanner = _scanner(rules or _DEFAULT)
    if not scanner.may_hold(text):
        return []
    spans: list[NumberSpan] = []
    alike = readable(text)
    for match in scanner.scan(alike):
        if match.lastgroup is None:
            continue
        form = scanner.forms[match.lastgroup]
        start, end = match.span()
        written = match.group()
        value = scanner.value_of(form, written)
        if not math.isfinite(value) and (form == "scientific" or "e" in written.lower()):
            continue  # 10^400 is no more than its characters, nor is 72e71990, a name in hexadecimal
        if not math.isfinite(value):
            shown = written if len(written) <= 24 else written[:21] + "..."
            raise ValueError(f"the number {shown} at characters {start}-{end} is too large for float64")
        sign = _lead(written)[1]
        if spans and sign and sign[0] in "-–mMnN" and _second_of_two(alike, spans[-1].end, start, end, sign):
            start, value = start + len(sign), -value
        unit = unit_of(*beside(alike, start, end))
        span = NumberSpan(start, end, text[start:end], value, scanner.kind_of(form, written, unit), unit)
        if spans and "range" in scanner.kinds and alike[spans[-1].end : start] in _BETWEEN:
            spans[-1] = _end_of_range(spans[-1], "" if form == "chinese" and spans[-1].kind != form else unit)
            span = _end_of_range(span, unit)
        spans.append(span)
    return spans if "number" in scanner.kinds else [span for span in spans if span.kind != "number"]


_DEFAULT = NumberRules()


def readable(text: str) -> str:
    """The text as the table reads it, a character for a character."""
    alike = text.translate(_ALIKE)
    return _TEX.sub(lambda tex: tex[0].replace("$", "\0"), alike) if alike.count("$") > 1 else alike


def _second_of_two(text: str, before: int, start: int, end: int, sign: str) -> bool:
    """Whether the sign at `start` stands between two numbers of one unit, 100元-200元, 5 minus 3, and is none."""
    unit = text[before:start] if sign == "-" else text[before:start].rstrip(" ")
    return not unit or (bool(_UNIT.fullmatch(unit)) and text.startswith(unit, end))


def beside(text: str, start: int, end: int) -> tuple[str, str]:
    """What stands before and after the number at `text[start:end]` and is its unit, with the space between: "", " K"."""
    after = AFTER.match(text, end)
    if after and after.group()[0] != " ":
        return "", after.group()
    before = money_inside(text[start:end])
    may_be_unit = not before and text[max(0, start - 2) : start].strip(_NO_UNIT)
    if may_be_unit and (found := BEFORE.search(text, max(0, start - 5), start)):
        before = found.group()
    return (before, "") if before or not after else ("", after.group())  # $5 C is no temperature


def money_inside(number: str) -> str:
    """The $ of -$1,200; "" for none."""
    return _lead(readable(number.strip(" ")))[2]


def _lead(written: str) -> tuple[str, str, str]:
    """What stands before a number's first digit: all of it, the sign, and money."""
    if written[:1].isdigit():
        return "", "", ""
    if written[1:2].isdigit() and written[0] in "+-–":
        return written[0], written[0], ""
    found = LEAD.match(written)
    return found.group(), found[1] or "", found[2] or ""


def unit_of(before: str, after: str) -> str:
    """The unit that `beside` found; "" for none."""
    unit = (after or before).strip(" ")
    unit = unit[-1] if unit and re.match(SIGNS, unit[-1]) else unit
    return "%" if unit == "百分之" else unit


def _end_of_range(span: NumberSpan, unit: str) -> NumberSpan:
    """3 of 3-4 km: both ends count what stands after the second."""
    return span._replace(kind="range" if span.kind == "number" else span.kind, unit=span.unit or unit)
