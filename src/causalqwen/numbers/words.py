"""Values of numbers that are written in words or with them: Chinese, English, fractions."""

import re
import unicodedata
from decimal import Decimal
from fractions import Fraction

_HAN_DIGITS = {char: value for value, char in enumerate("零一二三四五六七八九")} | {"〇": 0, "两": 2}
_HAN_UNITS = {"十": 10, "百": 100, "千": 1000}

UNITS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
TEENS = ["ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
SCALES = ["thousand", "million", "billion", "trillion", "lakh", "crore", "dozen"]
PARTS = ["half", "third", "quarter", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"]
ORDINALS = ["first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth"]
MAGNITUDES = ["trillion", "billion", "crore", "million", "lakh", "lac", "thousand", "hundred", "dozen"]
"""From the greatest on: 5 crore 20 lakh."""
SHORT = "bn|bln|mn|mln|trn|[Mm]io|[Mm]rd|mld"
"""Magnitudes that need no money beside them."""
UNREAD = (
    r"(?:(?i:grand|mil(?:l|le|a|hões|ioni|iardi|lones)?|[a-z]*illi(?:on|ard)(?:en|s)?|(?:ten|hundred|thousand|[mbt]r?illion)ths?"
    r"|tausend|tsd|mia|tys)|тыс|млн|млрд|[만억천조])"
)
"""Magnitudes of other languages, and those that are something else as well: a mil, a grand piano."""
_ENGLISH = (
    {word: 1 + place for place, word in enumerate(UNITS + TEENS)}
    | {word: 20 + 10 * place for place, word in enumerate(TENS)}
    | {"a": 1, "an": 1, "zero": 0, "oh": 0}
)
_SCALE_OF = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "lakh": 10**5}
_SCALE_OF |= {"crore": 10**7, "cr": 10**7, "dozen": 12, "k": 10**3, "l": 10**5, "lac": 10**5}
_SCALE_OF |= dict.fromkeys(("m", "mm", "mn", "mln", "mio"), 10**6) | dict.fromkeys(("t", "tn", "trn"), 10**12)
_SCALE_OF |= dict.fromkeys(("b", "bn", "bln", "mrd", "mld"), 10**9)
_PART_OF = dict(zip(PARTS, (2, 3, 4, 4, 5, 6, 7, 8, 9, 10), strict=True))
_PART_OF_SCALE = re.compile(rf"\b({'|'.join(PARTS)})s?(?: of)?(?: an?)?(?= (?:{'|'.join(SCALES)}))")


def chinese_value(text: str) -> float:
    """三百二十 -> 320, 一亿零五万 -> 100050000, 3万5千 -> 35000, 1万5000 -> 15000, 1.2万亿 -> 1.2e12, 三万五 -> 35000,
    三点一四 -> 3.14, 三点五万 -> 35000.

    Of sections before 万 and 亿, in decimal arithmetic.
    """
    whole, _, decimals = text.partition("点")
    total = section = Decimal(0)
    digit, unit = None, 10  # unit: what the character before a last digit counts, 10 where the digit counts itself
    for token in re.findall(r"[\d.]+|[^\s+-]", whole):
        if token in _HAN_UNITS:
            unit = _HAN_UNITS[token]
            section += unit * (1 if digit is None else digit)
            digit = None
        elif token in "万亿":
            unit = 10**4 if token == "万" else 10**8
            section += digit or 0
            total = total + section * unit if token == "万" else (total + section) * unit
            section, digit = Decimal(0), None
        else:
            digit = Decimal(_HAN_DIGITS.get(token, token))
            unit = 10 if digit == 0 or len(token) > 1 else unit
    value = total + section + Decimal(digit or 0) * unit / 10
    value += Decimal("0." + ("".join(str(_HAN_DIGITS[char]) for char in decimals.rstrip("万亿")) or "0"))
    return float(value * 10 ** (4 * decimals.count("万") + 8 * decimals.count("亿")))


def english_value(text: str) -> float:
    """twenty-one -> 21, forty five hundred thirty -> 4530, two point seven -> 2.7, half a million -> 500000, two and a half
    million -> 2500000, three quarters -> 0.75."""
    total, section, last, scale = Fraction(0), Fraction(0), Fraction(0), 1
    whole, _, decimals = _PART_OF_SCALE.sub(r"\1", text.lower().replace("-", " ")).partition(" point ")
    if decimals:
        digits = "".join(str(_ENGLISH[word]) for word in decimals.split() if word in _ENGLISH)
        whole += f" plus 0.{digits} {decimals.split()[-1] if decimals.split()[-1] in _SCALE_OF else ''}"
    for word in re.findall(r"\d[\d.]*|\.\d+|[a-z]+", whole):
        if word == "hundred":
            section *= 100
        elif word in _SCALE_OF:
            total, section, scale = total + section * _SCALE_OF[word], Fraction(0), _SCALE_OF[word]
        elif (
            part := _PART_OF.get(word.removesuffix("s"))
        ) is not None:  # of one, of the number before it, or of its scale
            section += (last or 1) * (Fraction(scale if section == last else 1, part) - bool(last))
        elif word not in ("and", "plus", "of"):
            last = Fraction(_ENGLISH.get(word, word))
            section += last
    return float(total + section)


def scaled_value(text: str) -> float:
    """3.5 million -> 3500000, 5 crore 20 lakh -> 52000000, 85K -> 85000."""
    parts = re.findall(r"([\d.]+)[ -]?([a-z]+)", text.lower())
    scales = (_SCALE_OF[word if word in _SCALE_OF else word[:-1]] for _, word in parts)
    return float(sum(Decimal(digits) * scale for (digits, _), scale in zip(parts, scales, strict=True)))


def fraction_value(text: str) -> float:
    """1/2 -> 0.5, 3 1/2 -> 3.5, 2½ -> 2.5."""
    apart = (
        unicodedata.normalize("NFKC", re.sub(r"([^\d/⁄]+)", r" \1", text, count=1)).replace("⁄", "/").replace("-", " ")
    )
    *whole, fraction = apart.split()
    above, below = fraction.split("/")
    return float(sum(map(float, whole)) + float(above) / float(below))
