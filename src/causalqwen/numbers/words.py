"""Values of numbers that are written in words or with them: Chinese, English, fractions."""

import re
import unicodedata
from decimal import Decimal

_HAN_DIGITS = {char: value for value, char in enumerate("零一二三四五六七八九")} | {"〇": 0, "两": 2}
_HAN_UNITS = {"十": 10, "百": 100, "千": 1000}

UNITS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
TEENS = ["ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
SCALES = ["thousand", "million", "billion", "trillion"]
_ENGLISH = (
    {word: 1 + place for place, word in enumerate(UNITS + TEENS)}
    | {word: 20 + 10 * place for place, word in enumerate(TENS)}
    | {"a": 1, "and": 0}
)
_SCALE_OF = {word: 1000 ** (1 + place) for place, word in enumerate(SCALES)}


def chinese_value(text: str) -> float:
    """三百二十 -> 320, 一亿零五万 -> 100050000, 3万5千 -> 35000, 1万5000 -> 15000, 1.2万亿 -> 1.2e12, 三万五 -> 35000,
    三点一四 -> 3.14.

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
    value += Decimal("0." + ("".join(str(_HAN_DIGITS[char]) for char in decimals) or "0"))
    return float(-value if text[0] == "-" else value)


def english_value(text: str) -> float:
    """twenty-one -> 21, two hundred and five -> 205, three thousand four hundred -> 3400, 3.5 million -> 3500000."""
    total = section = Decimal(0)
    for word in re.findall(r"\d[\d.]*|\.\d+|[a-z]+", text.lower()):
        if word == "hundred":
            section *= 100
        elif word in _SCALE_OF:
            total, section = total + section * _SCALE_OF[word], Decimal(0)
        else:
            section += Decimal(_ENGLISH.get(word, word))
    return float(-(total + section) if text[0] == "-" else total + section)


def fraction_value(text: str) -> float:
    """1/2 -> 0.5, -3 1/2 -> -3.5, 2½ -> 2.5."""
    sign = -1 if text[0] == "-" else 1
    whole = re.match(r"[+-]?(\d+)(?![\d/])", text)
    value = float(whole[1]) if whole else 0.0
    if "/" in text:
        above, below = re.findall(r"(\d+)/(\d+)", text)[0]
        return sign * (value + float(above) / float(below))
    return sign * (value + unicodedata.numeric(text[-1]))
