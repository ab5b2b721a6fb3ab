"""Finding the numbers of a text.

One regular expression reads the text from left to right: what must stay text (dates, times, versions, addresses,
identifiers, phone numbers, codes) is an alternative that comes before the number itself, so that it is consumed whole.
A percent sign, a unit or a currency sign is text beside the number.
"""

import math
import re
from dataclasses import dataclass

_FULL_WIDTH = str.maketrans("０１２３４５６７８９．，＋－％：／（）", "0123456789.,+-%:/()")
_MINUS = str.maketrans("−", "-")

# A letter that makes a neighbouring digit part of an identifier. Han, kana and hangul do not: 价格是99.9元 holds a number.
_LETTER = r"A-Za-z_\u00b5\u00c0-\u024f\u0370-\u052f"

# Units that may follow a number without a space. Anything else that does (3D, 1st, 4x4, 0x1f) is an identifier.
_UNITS = (
    r"(?:[nuµμmkMGT]?(?:m|g|s|A|V|W|Hz|J|N|Pa|eV|mol|L|l|B|b|Wh|cal)|cm|dm|hPa|bar|mbar|ppm|ppb|dB|kB|KB|KiB|MiB|GiB"
    r"|K|C|F|h|d|kt|kn|mi|ft|in|lb|lbs|oz|mph|kmh|km/h|m/s|rpm|px|pt|min|sec|hr|hrs|yr|yrs|USD|EUR|RMB|CNY)"
    rf"(?![{_LETTER}0-9])"
)

_MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?|Oct(?:ober)?"
    r"|Nov(?:ember)?|Dec(?:ember)?)\.?"
)

_PROTECTED = "|".join(
    [
        r"(?:https?://|ftp://|www\.)\S+",  # addresses of pages
        r"[\w.+-]{1,64}@[\w-]+\.[\w.-]+",  # and of people
        rf"\b{_MONTH}[ ]\d{{1,2}}(?:st|nd|rd|th)?(?:,?[ ]\d{{4}})?(?![\d.])",  # January 5, 2024
        rf"(?<![\d.])\d{{1,2}}(?:st|nd|rd|th)?[ ]{_MONTH}(?:,?[ ]\d{{4}}\b)?",  # 5 January 2024
        r"\d{4}-\d{1,2}-\d{1,2}(?:[T ]\d{1,2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?:Z|[+-]\d{2}:?\d{2})?)?",  # ISO dates
        r"\d{2,4}年(?:\d{1,2}月(?:\d{1,2}[日号])?)?|\d{1,2}月(?:\d{1,2}[日号])",  # 2024年1月5日
        r"\d+(?:[:：]\d+)+(?:\.\d+)?(?:[ ]?[AaPp]\.?[Mm]\b)?",  # 12:30, 3:16, 12:30:45.5
        r"\d+(?:/\d+)+",  # 1/5/2024, 1/2
        r"[vV]\d+(?:\.\d+)*[\w-]*|\d+(?:\.\d+){2,}[\w-]*",  # v1.2, 1.2.3-rc1, 192.168.0.1, 05.01.2024
        r"\+\d[\d\s().-]{6,}\d",  # +86 138-0013-8000
        r"\(\d{3}\)[ ]?\d{3}[ .-]?\d{4}|\b\d{3}[-. ]\d{3}[-. ]\d{4}\b|\b\d{3}-\d{4}\b|\b1[3-9]\d{9}\b",  # phone numbers
        r"\b\d{3}[ ]\d{4}[ ]\d{4}\b",  # 138 0013 8000
        r"\d+(?:-\d+){2,}",  # 64-17-5, 1-800-555-0199
        r"\(\d*[rsezRSEZ](?:,\d*[rsezRSEZ])*\)|\(\d[+-]\)",  # (1r,2s) and (2+) in names of compounds
        # 1,2-dichloroethane, 2-(2-methoxy)ethanol, 5-year: digits, a hyphen, and a name behind it
        r"\b\d+['′]?(?:,\d+['′]?){0,63}[a-zA-Z]?-(?=[(\[{]{0,63}[A-Za-z]|[(\[{]\S{0,63}[A-Za-z])[(\[{]*\w+(?:[-,.'′()\[\]{}]+\w+)*",
        rf"[{_LETTER}][\w]*(?:[-.]\d[\w]*)+",  # COVID-19, GPT-4, fig.3
        rf"[{_LETTER}]\w*",  # words, and identifiers that hold digits: x1, fp16, H2O
        r"[#@]\w+",  # #123
        rf"0x[0-9A-Fa-f]+|\d[\d.]*(?!{_UNITS})(?![eE][+-]?\d)[{_LETTER}][\w]*",  # 3D, 1st, 4x4
        r"(?<![\d.,])0\d+(?![.\d])",  # 007, 00501
    ]
)

_NUMBER = (
    r"(?:(?<![\w)\]}.%°'\"’”])[+-])?"  # a sign stands where no number or word ends just before it
    r"(?:\d{1,3}(?:,\d{3})+(?![\d])(?:\.\d+)?|\d+(?:\.\d+)?|(?<![\w)\]}])\.\d+)"
    r"(?:[eE][+-]?\d+)?"
)

_SCANNER = re.compile(rf"(?P<protected>{_PROTECTED})|(?P<number>{_NUMBER})", re.ASCII)
_HAS_DIGIT = re.compile(r"[0-9０-９]")


@dataclass(frozen=True)
class NumberSpan:
    """A number in a text: `text[start:end] == self.text`, worth `value` (float64)."""

    start: int
    end: int
    text: str
    value: float


def find_numbers(text: str) -> list[NumberSpan]:
    """The numbers of `text`, left to right, never overlapping; everything outside them is to stay as it is.

    Read as numbers: 42, -5, +3.5, .5, 1,272.50, 6.02e23, １２．５, 99.9 in 99.9元, 5 in 5%, 10 in 10km.
    Left as text: dates, times, versions, IP addresses, identifiers (x1, fp16, COVID-19, 1,2-dichloroethane), phone
    numbers, fractions with a slash, hexadecimal numbers, codes with a leading zero (007).

    Raises:
        ValueError: a number that float64 cannot hold, with its place in the text.
    """
    if not _HAS_DIGIT.search(text):
        return []
    spans = []
    for match in _SCANNER.finditer(text.translate(_FULL_WIDTH).translate(_MINUS)):
        if match.lastgroup != "number":
            continue
        value = float(match.group().replace(",", ""))
        if math.isinf(value):
            shown = match.group() if len(match.group()) <= 24 else match.group()[:21] + "..."
            raise ValueError(f"the number {shown} at characters {match.start()}-{match.end()} is too large for float64")
        spans.append(NumberSpan(match.start(), match.end(), text[match.start() : match.end()], value))
    return spans
