"""The grammar as a table of patterns, in the order in which they are tried."""

import re

from causalqwen.numbers.rules import NumberRules
from causalqwen.numbers.words import SCALES, TEENS, TENS, UNITS

# A letter that makes a neighbouring digit part of an identifier. Han, kana and hangul do not: 价格是99.9元 holds a number.
_LETTER = r"A-Za-z_\u00b5\u00c0-\u024f\u0370-\u052f"

# Units that may follow a number without a space. Anything else that does (3D, 1st, 4x4, 0x1f) is an identifier.
_UNITS = (
    r"(?:[nuµμmkMGT]?(?:m|g|s|A|V|W|Hz|J|N|Pa|eV|mol|L|l|B|b|Wh|cal)|cm|dm|hPa|bar|mbar|ppm|ppb|dB|kB|KB|KiB|MiB|GiB"
    r"|K|C|F|h|d|kt|kn|mi|ft|in|lb|lbs|oz|mph|kmh|km/h|m/s|rpm|px|pt|min|sec|hr|hrs|yr|yrs|USD|EUR|RMB|CNY)"
    rf"(?![{_LETTER}0-9])"
)
_HAN_UNITS = r"公里|千米|厘米|毫米|米|公斤|千克|毫克|克|吨|升|度|岁|秒|分钟|小时|天|年|人|个"
SIGNS = r"[$€£¥₹]"
BEFORE_SIGNED = rf"(?:[A-Z]{{1,3}})?{SIGNS}|(?:USD|EUR|GBP|JPY|CHF|INR|RMB|CNY)[ ]?"
"""Of -$1,200: money between the sign of a number and its digits."""
MONEY = rf"{SIGNS}|\b(?:USD|EUR|GBP|JPY|CHF|INR|RMB|CNY)\b|[美欧日]元|人民币|元"
AFTER = re.compile(rf"[ ]?(%|‰|°[CF]?|℃|℉|{MONEY}|{_HAN_UNITS}|(?!(?<= )(?:in|A|d)\b){_UNITS})", re.ASCII)
"""A unit behind a number; after a space, "in", "A" and "d" are words."""
BEFORE = re.compile(rf"(百分之|{MONEY})[ ]?\Z", re.ASCII)
"""A unit before a number."""

_MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?|Oct(?:ober)?"
    r"|Nov(?:ember)?|Dec(?:ember)?)\.?"
)

# Chinese numerals: 三百二十, 十五, 一亿零五万. A digit alone (一个) and a unit alone (万一, 十分, 千万) are words, and so are a
# unit of measure that begins as a numeral goes on (千克) and a last 一 that begins another word (三百万一旦).
_HAN_DIGITS = "一二三四五六七八九两"
_D, _U = f"[{_HAN_DIGITS}]", r"(?:[十百万亿]|千(?![克米瓦卡赫帕焦伏]))"
_CHINESE = (
    rf"(?:{_D}{_U}|十(?={_D}|[万亿]))(?:{_U}|零?{_D}{_U})*"
    rf"(?:零{_D}|(?<=十){_D}|(?<=[百千万亿])(?:[二三四五六七八九]|一(?![\u3400-\u9fff])))?"
)
_CHINESE_WORDS = "|".join(
    [
        rf"第[零十百千万亿{_HAN_DIGITS}]+",  # 第三十二
        rf"[几数][十百千万亿]+|{_D}{{2,4}}{_U}|{_D}?十{_D}{{2}}",  # 几百万, 三五百, 十二三
        rf"[\d.零十百千{_HAN_DIGITS}]{{1,20}}[多余来几][十百千万亿]+",  # 二十多万
        rf"(?!百分之)[十百千万亿{_HAN_DIGITS}]{{1,12}}分之[零十百千万亿{_HAN_DIGITS}]+",  # 三分之一
        "万一|二百五(?!十)|十万火急|五十步笑百步|三百六十行",
    ]
)

# What may follow 万 in digits: four of them, which count themselves, or one that counts thousands; no date, no other count.
_COUNTS = "年月日号时点分秒次个位天周岁倍条件台名项章节届期星折选级"
_REST = (
    r"(?:(?<=万)(?:(?!(?:1[89]|20)\d\d年)\d{4}(?!\d|[.,]\d|[-/.]\d{1,2}[-/.]\d)"
    rf"|(?!1(?![元块的左右多到至以])[\u3400-\u9fff])[1-9](?![\w%‰°℃/:{_COUNTS}]|[.,]\d)))?"
)

_POWER = r"(?:\^(?:[+-]?\d{1,3}|\{[+-]?\d{1,3}\})(?!\d|\.\d)|[⁺⁻]?[⁰¹²³⁴-⁹]{1,3}(?![⁰¹²³⁴-⁹]))"

_SMALL = rf"(?:(?:{'|'.join(TENS)})(?:[- ](?:{'|'.join(UNITS)}))?|{'|'.join(TEENS + UNITS)})\b"
_HUNDREDS = rf"(?:(?:a|{'|'.join(UNITS + TEENS)})[ ]hundred\b(?:[ ](?:and[ ])?{_SMALL})?|{_SMALL})"
_SCALE = rf"[ -](?:{'|'.join(SCALES)})\b"
_ONE = rf"one\b(?![ -](?:hundred|{'|'.join(SCALES)}))"  # a pronoun, more often than not


def table(rules: NumberRules) -> list[tuple[str, str]]:
    """Rows (name, pattern): the name is of `PROTECTED`, of `KINDS`, "words" (guards of Chinese numerals), or "" for always.

    Only the rows of `KINDS` are numbers. Every row takes linear time on any text: repetition is bounded, or unambiguous.
    """
    point, marks = re.escape(rules.decimal), [re.escape(mark) for mark in rules.groups or ""]
    signed = r"(?<![\w)\]}.%°'\"’”])[+-]"  # stands where no number or word ends just before it
    money = rf"(?-i:{BEFORE_SIGNED})?" if "currency" in rules.kinds else ""  # in capitals, among English words too
    sign = rf"(?:{signed}{money})?"
    groups = "|".join(rf"(?:{mark}\d{{3}})+" for mark in marks)
    grouped = rf"[1-9]\d{{0,2}}(?:{groups})(?!\d)" if marks else r"(?!)"
    ungrouped = rf"{sign}(?<![\d.,])(?:0\d*|\d{{4,}})(?:{groups})(?!\d)" if marks else r"(?!)"  # 0,001 and 1000,000
    digits = rf"(?:{grouped}(?:{point}\d+)?|\d+(?:{point}\d+)?)"
    no_version = rf"(?!{grouped}(?![\d.]))" if r"\." in marks else ""  # 1.272.000
    english = (
        rf"(?:(?:{_HUNDREDS}|a){_SCALE}(?:[ ](?:and[ ])?{_HUNDREDS}(?:{_SCALE})?){{0,4}}"
        rf"|{sign}{digits}{_SCALE}|{_HUNDREDS})"
    )
    name = (
        r"\b\d+['′]?(?:,\d+['′]?){0,63}[a-zA-Z]?-(?=[(\[{]{0,63}[A-Za-z]|[(\[{]\S{0,63}[A-Za-z])"
        r"[(\[{]*\w+(?:[-,.'′()\[\]{}]+\w+)*"
    )
    return [
        ("code", r"```[\s\S]*?```|`[^`\n]+`"),
        ("address", r"(?:https?://|ftp://|www\.)\S+"),  # of pages
        ("address", r"[\w.+-]{1,64}@[\w-]+\.[\w.-]+"),  # and of people
        ("date", rf"\b{_MONTH}[ ]\d{{1,2}}(?:st|nd|rd|th)?(?:,?[ ]\d{{4}})?(?![\d.])"),  # January 5, 2024
        ("date", rf"(?<![\d.])\d{{1,2}}(?:st|nd|rd|th)?[ ]{_MONTH}(?:,?[ ]\d{{4}}\b)?"),  # 5 January 2024
        ("date", r"\d{4}-\d{1,2}-\d{1,2}(?:[T ]\d{1,2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?:Z|[+-]\d{2}:?\d{2})?)?"),  # ISO
        ("date", r"\d{2,4}年(?:\d{1,2}月(?:\d{1,2}[日号])?)?|\d{1,2}月(?:\d{1,2}[日号])"),  # 2024年1月5日
        (
            "date",
            r"[〇零一二三四五六七八九]{2,4}年|[一二三四五六七八九十]{1,3}(?:月(?:[一二三四五六七八九十]{1,3}[日号])?|号)",
        ),
        ("time", rf"{sign}\d+(?:[:：]\d+)+(?:\.\d+)?(?:[ ]?[AaPp]\.?[Mm]\b)?"),  # 12:30, 3:16, 12:30:45.5
        ("fraction", rf"{sign}(?:(?<![\d/.,])(?:\d+[ ])?\d+/[1-9]\d*(?![\d/]|\.\d)|(?:\d+[ ]?)?[¼½¾⅐-⅞])"),
        ("", rf"{sign}\d+(?:/\d+)+"),  # 1/5/2024, 1/2
        (
            "version",
            rf"[vV]\d+(?:\.\d+)*[\w-]*|{sign}{no_version}\d+(?:\.\d+){{2,}}[\w-]*",
        ),  # v1.2, 1.2.3-rc1, 192.168.0.1
        # +86 138-0013-8000, but no amount: +10000000, +3.14159265, +1.5 -2.0
        (
            "phone",
            r"\+(?!(?:\d{1,9}|\d+0{5}|\d+\.\d+)(?!\d|[ ().-]{1,2}\d))\d(?:[\d().]|(?<![ ])-|[ ](?=[\d(])){6,}\d",
        ),
        ("phone", r"\(\d{3}\)[ ]?\d{3}[ .-]?\d{4}|\b\d{3}[-. ]\d{3}[-. ]\d{4}\b"),
        # 555-1234, but no range: 500-1000 words, $500-1500, 200-1234元
        ("phone", rf"(?<![$€£¥₹])\b(?!\d[05]0-[1-9]\d[05]0)\d{{3}}-\d{{4}}\b(?!{AFTER.pattern})"),
        # 13800138000, but no amount: 15000000000, $18926408486, 18926408486.48, 18926408486 kg
        ("phone", rf"(?<![\w.,+$€£¥₹-])1[3-9]\d{{9}}(?<!00000)(?!\w|[.,]\d|{AFTER.pattern})"),
        ("phone", r"\b\d{3}[ ]\d{4}[ ]\d{4}\b"),  # 138 0013 8000
        ("scientific", rf"{sign}(?:{digits}[ ]?[×xX*·⋅][ ]?|(?<![\w.,]))10{_POWER}"),  # 6.02×10^23, 10⁻⁹
        ("", rf"{sign}\d+(?:-\d+){{2,}}"),  # 64-17-5, 1-800-555-0199
        ("", r"\(\d*[rsezRSEZ](?:,\d*[rsezRSEZ])*\)|\(\d[+-]\)"),  # (1r,2s) and (2+) in names of compounds
        ("", name),  # 1,2-dichloroethane, 2-(2-methoxy)ethanol, 5-year: digits, a hyphen, and a name behind it
        ("english", rf"(?i:(?<![\w-])(?!{_ONE}){english}(?!-?\w))"),
        ("", rf"(?<!\d)[{_LETTER}][\w]*(?:[-.]\d[\w]*)+"),  # COVID-19, GPT-4, fig.3
        ("", rf"[{_LETTER}]\w*"),  # words, and identifiers that hold digits: x1, fp16, H2O
        ("", r"[#@]\w+"),  # #123
        ("", rf"0x[0-9A-Fa-f]+|{sign}\d[\d.]*(?!{_UNITS})(?![eE][+-]?\d)[{_LETTER}][\w]*"),  # 3D, 1st, 4x4
        ("", ungrouped),
        ("", rf"{sign}(?<![\d.,])0\d+(?![.\d])"),  # 007, 00501
        ("words", _CHINESE_WORDS),
        (
            "chinese",
            rf"(?<=百分之)[零十百{_HAN_DIGITS}]+(?:点[零{_HAN_DIGITS}]+)?|{_CHINESE}"
            rf"|{sign}{digits}[ ]?(?!十){_U}+(?:\d+{_U}+)*{_REST}",  # 3.5万, 2亿, 3万5千, 1万5000
        ),
        ("lakh", rf"{sign}[1-9]\d?(?:,\d\d){{1,9}},\d{{3}}(?!\d)(?:{point}\d+)?" if "," in marks else r"(?!)"),
        ("number", rf"{sign}(?:{digits}|(?<![\w)\]}}.,]){point}\d+)(?:[eE][+-]?\d+)?"),
    ]
