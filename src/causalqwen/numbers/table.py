"""The grammar as a table of patterns, in the order in which they are tried."""

import re

from causalqwen.numbers.rules import NumberRules
from causalqwen.numbers.words import MAGNITUDES, ORDINALS, PARTS, SCALES, SHORT, TEENS, TENS, UNITS, UNREAD

# ---- money -----------------------------------------------------------------------------------------------------------

SIGNS = r"[$\u00a2-\u00a5\u058f\u060b\u09f2\u09f3\u0e3f\u17db\u20a0-\u20cf\ufdfc]"
"""Currency signs of Unicode."""

_COMMON = (
    "USD EUR GBP JPY INR CNY RMB CAD AUD NZD HKD SGD TWD KRW SEK NOK DKK ISK PLN CZK HUF RUB UAH BRL MXN ARS CLP ZAR NGN "
    "KES AED ILS EGP PKR BDT LKR IDR MYR THB VND"
)
_OTHER = (  # of ISO 4217; what looks so before one or two digits is a name as a rule: TOP10, AMD64, COP26, NAD83, PHP8
    "AFN ALL AMD ANG AOA AWG AZN BAM BBD BGN BHD BIF BMD BND BOB BSD BTN BWP BYN BZD CDF CHF COP CRC CUP CVE DJF DOP DZD ERN "
    "ETB FJD FKP GEL GHS GIP GMD GNF GTQ GYD HNL HTG IQD IRR JMD JOD KGS KHR KMF KPW KWD KYD KZT LAK LBP LRD LSL LYD MAD MDL "
    "MGA MKD MMK MNT MOP MRU MUR MVR MWK MZN NAD NIO NPR OMR PAB PEN PGK PHP PYG QAR RON RSD RWF SAR SBD SCR SDG SHP SLE SOS "
    "SRD SSP STN SVC SYP SZL TJS TMT TND TOP TRY TTD TZS UGX UYU UZS VES VUV WST XAF XCD XOF XPF YER ZMW ZWG"
)
CODES, OTHER_CODES = (f"(?=[A-Z]{{3}})(?:{codes.replace(' ', '|')})" for codes in (_COMMON, _OTHER))

_BEFORE = [
    f"{word}{dot}" for word in ("Rs", "Rp", "RM", "SFr", "Fr", "kr", "Kr", "Tk", "KSh", "Ksh") for dot in (".", "")
]
ABBREVIATIONS = "|".join(_BEFORE).replace(".", r"\.")
"""What stands before an amount. R, the rand, alone is a letter more often than not."""
_BEHIND = r"(?:kr\.?|Kč|zł|Ft|лв|руб\.?|грн|lei|Rs\.?)(?![A-Za-z])"
OF_MONEY = rf"(?:[KkMmBbTtL]|[ ]?(?:MM|mm|tn|[Cc]r|{SHORT}))(?!\w|-[A-Za-z])"
"""Magnitudes of an amount: $85K, £2.5m; a letter after a space may be a size or a metre."""
_HAN_MONEY = r"[美欧日港韩加澳台]元|人民币|英镑|卢布|[元円원]"

MONEY = rf"{SIGNS}|\b(?:{CODES}|{OTHER_CODES})\b|{_HAN_MONEY}"
MONEY_BEHIND = rf"{MONEY}|{_BEHIND}"
_WORDS = "(?:dollar|euro|pound|franc|rupee|peso|buck|yuan|yen|won|rand)s?"
IN_MONEY = rf"[KkMmBbTt](?=[ ]?(?:{MONEY_BEHIND})|[ ](?:[A-Z]\w+[ ])?{_WORDS}\b)"
"""A magnitude that money after it tells: 85K USD, 85K dollars."""
MONEY_BEFORE = rf"{MONEY}|\b(?:{ABBREVIATIONS}|R)"

SIGNED_MONEY = rf"(?:[A-Z]{{1,3}})?{SIGNS}[ ]?|(?:{CODES}|{ABBREVIATIONS})[ ]?|(?:{OTHER_CODES}|R)[ ]?"
"""Money between the sign of a number and its digits, -$1,200, in what was found."""
_LONG = r"\d{1,3}[,.']\d\d"
BEFORE_SIGNED = SIGNED_MONEY.replace(
    rf"(?:{OTHER_CODES}|R)[ ]?", rf"(?:{OTHER_CODES})(?:[ ]|(?=\d{{3}}|{_LONG}))|R(?:[ ]|(?={_LONG}))"
)
"""The same where it is looked for: some codes and R mark no short number."""

AFTER_MONEY = "|".join(
    f"(?<={before}{gap})"
    for gap in ("", " ", "[+–-]", " [+–-]")
    for before in (SIGNS, rf"(?:{CODES}|{OTHER_CODES})", r"\bR", *(one.replace(".", r"\.") for one in _BEFORE))
)
"""Where an amount begins after what marks it as money."""

# ---- units, dates, numerals ------------------------------------------------------------------------------------------

# A letter that makes a neighbouring digit part of an identifier. Han, kana and hangul do not: 价格是99.9元 holds a number.
_LETTER = r"A-Za-z_\u00b5\u00c0-\u024f\u0370-\u052f"

# Units that may follow a number without a space. Anything else that does (3D, 1st, 4x4, 0x1f, 3B) is an identifier, and so are
# decades: 1990s, '90s.
_UNITS = (
    r"(?:(?:[nuµμmkMGT]?(?:m|g|(?<![12]\d\d0)(?<!['’]\d0)(?<!the \d0)s|A|V|W|Hz|J|N|Pa|eV|mol|L|l|Wh|cal)|[kKMGT]i?B|[kKMGT]?b"
    r"|cm|dm|hPa|bar|mbar|ppm|ppb|dB|K|C|F|h|d|kt|kn|mi|ft|in|lb|lbs|oz|mph|kmh|km/h|m/s|rpm|px|pt|min|sec|hr|hrs|yr|yrs"
    rf"|{CODES}|{OTHER_CODES})(?![{_LETTER}0-9])|{MONEY_BEHIND})"
)
_HAN_UNITS = r"公里|千米|厘米|毫米|米|公斤|千克|毫克|克|吨|升|度|岁|秒|分钟|小时|天|年|人|个"
LEAD = re.compile(rf"(负|零下|(?i:minus|negative)[ ]|[+–-])?\(?({SIGNED_MONEY})?[+–-]?\(?")
"""What may stand in a number before its first digit: a sign, and money."""
AFTER = re.compile(rf"[ ]?(?![\s\d,.;:|)\]-])(%|‰|°[CF]?|℃|℉|{_HAN_UNITS}|(?!(?<= )(?:in|A|d)\b){_UNITS})", re.ASCII)
"""A unit after a number; after a space, "in", "A" and "d" are words."""
BEFORE = re.compile(rf"(百分之|{MONEY_BEFORE})[ ]?\Z", re.ASCII)
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
_HAN_DECIMALS = r"点[零〇一二三四五六七八九]+(?![十百千])[万亿]{0,2}"
_SMALL_DECIMAL = (  # 三点一四; not 一点三刻, 一点一滴, 差一点五百
    rf"(?<![差有零〇十百千万亿{_HAN_DIGITS}])[零〇{_HAN_DIGITS}](?>{_HAN_DECIMALS})(?![分刻钟半线滴到过就])"
)
_MANY = "[多余来几][十百千万亿]+"
_CHINESE_WORDS = "|".join(
    [
        rf"第[零十百千万亿{_HAN_DIGITS}]+",  # 第三十二
        rf"[几数][十百千万亿]+|{_D}{{2,4}}{_U}|{_D}?十{_D}{{2}}",  # 几百万, 三五百, 十二三
        rf"[零十百千{_HAN_DIGITS}]{{1,20}}{_MANY}",  # 二十多万
        rf"(?!百分之)[十百千万亿又{_HAN_DIGITS}]{{1,20}}分之[零十百千万亿{_HAN_DIGITS}]+",  # 三分之一
        rf"负百分之[\d.点零十百{_HAN_DIGITS}]+",
        "万一|二百五(?!十)|十万火急|五十步笑百步|三百六十行",
    ]
)

# What may follow 万 in digits: four of them, which count themselves, or one that counts thousands; no date, no other count.
_COUNTS = "年月日号时点分秒次个位天周岁倍条件台名项章节届期星折选级"
_REST = (
    r"(?:(?<=万)(?:(?!(?:1[89]|20)\d\d年)\d{4}(?!\d|[.,]\d|[-/.]\d{1,2}[-/.]\d)"
    r"|零\d{1,3}(?![\d万]|\.\d)"
    rf"|(?!1(?![元块的左右多到至以])[\u3400-\u9fff])[1-9](?![\w%‰°℃/:{_COUNTS}]|[.,]\d)))?"
)

_TIMES = r"(?:[×xX*·⋅]|\\times|\\cdot)"
_POWER = r"(?:[ ]?(?:\^|\*\*)[ ]?(?:[+–-]?\d{1,3}|\{[+–-]?\d{1,3}\})(?!\d|\.\d)|[⁺⁻]?[⁰¹²³⁴-⁹]{1,3}(?![⁰¹²³⁴-⁹]))"

_UNIT, _TEN = f"(?:{'|'.join(UNITS)})", f"(?:{'|'.join(TENS)})"
_SMALL = rf"(?:{_TEN}(?:[- ]{_UNIT})?|{'|'.join(TEENS + UNITS)})\b"
_HUNDREDS = rf"(?:(?:a|{_SMALL})[ ]hundred\b(?:[ ](?:and[ ])?{_SMALL})?|{_SMALL})"
_SCALE = rf"[ -](?:{'|'.join(SCALES)})\b"
_PART = rf"(?:{'|'.join(PARTS)})s?\b"
_AND_A_HALF = rf"[ ]and[ ](?:an?|{_UNIT})[ -]{_PART}"
_SMALL_PART = r"(?:hundred|thousand|[mbt]r?illion|\w{3,5}teen|eleven|twelf|\w{3,5}tie)ths?\b"
_ONE = rf"one\b(?![ -](?:hundred|point|{_PART}|{'|'.join(SCALES)})|{_AND_A_HALF})"  # a pronoun, more often than not

_AND_HALF = (
    r"(?:个|年|天|小时|分钟|岁|倍|公里|公斤|斤|米|度)半(?![导数径圆球天夜价票成边场岛路])"  # 3个半小时, but 5个半导体
)
_PLAIN = "A-Za-zÀ-ɏͰ-ԯ"
_HAN = f"第几数零〇负十百千万亿电手传热{_HAN_DIGITS}"
BEGIN = rf"{_LETTER}{_HAN}\d+.,:(–¼½¾⅐-⅞⁰¹²³⁴-⁹`#@-"
"""Characters with which a row may begin."""
_HEX = "[0-9A-Fa-f]"
_IPV6 = (  # with a zone, a port, or a length
    rf"(?<![\w:.])(?=[0-9A-Fa-f:]{{0,39}}(?:::|[A-Fa-f]))(?:{_HEX}{{0,4}}:){{2,7}}(?:\d{{1,3}}(?:\.\d{{1,3}}){{3}}|{_HEX}{{1,4}})?"
    r"(?:%\w+)?(?:\]:\d+|/\d+)?(?![\w:])"
)


def table(rules: NumberRules) -> list[tuple[str, list[tuple[str, str]]]]:
    """Groups (how its rows begin, with their sign; rows), and rows (name, pattern): the name is of `PROTECTED`, of `KINDS`,
    "words" (guards of Chinese numerals), or "" for always. The first row that matches counts; how they begin only spares
    trying them all.

    Only the rows of `KINDS` that are on are numbers; what the others match stays text, whole. Every row takes linear time on
    any text: repetition is bounded, or unambiguous.
    """
    point, marks = re.escape(rules.decimal), [re.escape(mark) for mark in rules.groups or ""]
    signed = (  # stands where no number or word ends just before it; a dash, where no bullet and no range can stand
        rf"(?=[+–负零-])(?:(?:(?<![\w)\]}}.%°'\"’”¼½¾⅐-⅞])|{AFTER_MONEY})[+-]|(?<![\d胜平正背担肩])负|零下"
        rf"|(?:(?<=\S )(?<![\d%)] )|(?<=[(\[=:<>≈~|$€£¥,;\t])"
        rf"|(?m:^)(?=–(?:[^\s\d]{{1,4}}[ ])?\S+(?:{AFTER.pattern}|[ ](?i:{'|'.join(MAGNITUDES)})s?)?(?m:$)))–)"
    )
    money = rf"(?-i:{BEFORE_SIGNED})?" if "currency" in rules.kinds else ""  # in capitals, among English words too
    sign = rf"(?:{signed}{money}|)"
    groups = "|".join(rf"(?:{mark}\d{{3}})+" for mark in marks)
    grouped = rf"[1-9]\d{{0,2}}(?=[{rules.groups}])(?:{groups})(?!\d)" if marks else r"(?!)"
    ungrouped = rf"(?<![\d.,])(?:0\d*|\d{{4,}})(?:{groups})(?!\d)" if marks else r"(?!)"  # 0,001 and 1000,000
    digits = rf"(?>(?:{grouped}|\d+)(?:{point}(?:\d+|(?=[eE][+–-]\d)))?)"  # 1.e-05, as NumPy writes it
    in_spaces = rf"[1-9]\d{{0,2}}(?:[ ]\d{{3}}){{1,5}}(?!\d)(?:{point}\d+)?"
    apart = rf"{in_spaces}|{grouped}(?:{point}\d+)?"
    priced = rf"(?:{apart}|\d+{point}\d\d)"
    other, spaces = "," if rules.decimal == "." else "[.]", "[ '’\u00a0\u202f\u2009]"
    odd_price = rf"(?:[1-9]\d{{0,2}}(?:{spaces}\d{{3}})+{other}\d{{1,2}}|\d+{other}\d\d)(?!\d|[.,]\d)"  # 1 500,00
    no_version = rf"(?!{grouped}(?![\d.]))" if r"\." in marks else ""  # 1.272.000
    foreign = rf"[1-9]\d{{0,2}}(?:{point}\d{{3}})+{other}\d+(?!\d|[.,]\d)"  # 1.272,50
    foreign += rf"|(?:{no_version}\d+|(?<![\w)]))(?:\.\d+)+(?:[eE][+–-]?\d+)?" if rules.decimal == "," else ""
    magnitude = "|".join(  # 3.5 million, 5 crore 20 lakh
        rf"{word}s?(?:[ ]{digits}[ ](?:{'|'.join(MAGNITUDES[place + 1 :])})s?)?"
        for place, word in enumerate(MAGNITUDES)
    )
    mixed = (
        r"(?:(?<![\d/.,])(?:\d+(?:[ \u00a0\u202f]|-(?=[1-9]/)))?\d+/[1-9]\d*(?![\d/]|\.\d)"
        "|(?:\\d+[ \u00a0\u202f-]?)?(?:[¼½¾⅐-⅞]|[⁰¹²³⁴-⁹]+/[₀-₉]+))"
    )
    ends = rf"(?:{OF_MONEY}|\W|\Z)"
    amount = f"(?:{AFTER_MONEY})"
    to = r"(?:[–—~至到-]|[ ][–—-][ ]|\.\.)"
    letters = r"[ ]?(?:[KkMmBbTtL]|MM|mm|tn|[Cc]r)(?!\w|-[A-Za-z])"  # that need money beside them
    to_word = rf"(?:{to}|(?<!\b19\d\d)(?<!\b20\d\d)[ ](?:to|and|or)[ ])"
    myriads = rf"[ ]?(?!十){_U}+(?:零?{digits}{_U}+)*{_REST}"
    sized = rf"{digits}(?:[ -](?i:{magnitude})|{OF_MONEY})"
    cell, end_of_cell = r"(?:(?<![^\n\t|;$€£¥])|(?<=[|;] ))", r"(?=[ ]?(?:[\n\t|;]|\Z))"
    english = (
        rf"(?:(?:{_HUNDREDS}|a|{digits}){_SCALE}{_AND_A_HALF}"
        rf"|(?:{_HUNDREDS}|{digits}){_AND_A_HALF}(?:{_SCALE})?"
        rf"|(?:{_HUNDREDS}|zero)[ ]point\b(?:[ ](?:zero|oh|{_UNIT})\b){{1,20}}(?:{_SCALE})?"
        rf"|(?:an?[ ]|{_UNIT}[ -])?{_PART}(?:[ ]of)?(?:[ ]an?)?{_SCALE}|{_UNIT}[ -]{_PART}"
        rf"|(?<!\bof )(?:{_HUNDREDS}|a){_SCALE}(?:[ ](?:and[ ])?{_HUNDREDS}(?:{_SCALE})?){{0,4}}|{_HUNDREDS})"
    )
    minus = r"(?:(?=[mn])(?<!\d )(?<!or )(?<!\b[a-z] )(?:minus|negative)[ ])"
    in_words = [
        ("", rf"(?i:(?<![\w-])(?:{_TEN}[- ](?:{'|'.join(ORDINALS)})\b|(?>{_SMALL})(?:[ ](?>{_SMALL}))+))"),  # 6:30
        (  # point five, one point twenty five
            "",
            rf"(?i:(?<![\w-])(?:(?>{_HUNDREDS}|zero)[ ]point(?:[ ](?:zero|oh|{_UNIT})\b){{0,20}}"
            rf"(?=[ ](?:{'|'.join(TEENS + TENS)})\b)|point)(?:[ -](?:zero\b|oh\b|(?>{_SMALL})))+)",
        ),
        (
            "english",
            rf"(?i:(?<![\w-])(?!{_ONE})(?:{minus}{digits}(?:{_SCALE})?|{minus}?(?>{english}))(?!-?\w|[ -]{_SMALL_PART}))",
        ),
    ]
    name = (
        r"\b\d+['′]?(?:,\d+['′]?){0,63}[a-zA-Z]?-(?=[(\[{]{0,63}[A-Za-z]|[(\[{]\S{0,63}[A-Za-z])"
        r"[(\[{]*\w+(?:[-,.'′()\[\]{}]+\w+)*"
    )
    has_english = "english" in rules.kinds
    everywhere = [
        ("address", r"(?:https?://|ftp://|www\.)\S+|[\w.+-]{1,64}@[\w-]+\.[\w.-]+"),  # of pages, of people
        # of machines
        ("address", rf"{_IPV6}|\b(?:{_HEX}{{2}}-){{5}}{_HEX}{{2}}\b|\b{_HEX}{{4}}(?:\.{_HEX}{{4}}){{2}}\b"),
        ("", rf"\b{_HEX}{{8}}-(?:{_HEX}{{4}}-){{3}}{_HEX}{{12}}\b"),  # UUIDs
    ]
    of_letters = [
        ("", "(?!)" if has_english else rf"(?:[{_PLAIN}]+[ ]+(?=[{_PLAIN}]))+"),  # words before words: most of a text
        *everywhere,
        ("", r"\b(?:ISBN|ISSN|EAN|PMID|arXiv|doi|DOI)(?:-1[03])?[:.]?[ ]?\d[\w./-]*(?:[ -]\d+)*(?:[ -][Xx]\b)?"),
        ("", r"\b[A-Z]{2}\d{2}(?:[ ][A-Z\d]{4}){3,7}(?:[ ][A-Z\d]{1,4})?\b"),  # IBAN
        ("date", rf"\b{_MONTH}[ ]\d{{1,2}}(?:st|nd|rd|th)?(?:,?[ ]\d{{4}})?(?!\d|\.\d)"),  # January 5, 2024
        ("version", r"[vV]\d+(?:\.\d+)*[\w-]*"),
        ("phone", r"(?i:\b(?:tel|fax|phone|mobile))(?:[.:]{1,2}|[ ]no\.?)?[ ]?[+(]?\d[\d ()./-]{5,}\d\b"),
        *(in_words if has_english else [("", rf"(?i:{minus}{digits})")]),
        # USD1,234.50, R1,500, Rs.500: what stands before the amount is text
        (
            "",
            rf"\b(?=[A-Za-z]{{1,3}}\.?[+–-]?[\d{point}])(?:(?:{CODES}|{ABBREVIATIONS})(?=[+–-]?(?:{digits}|{point}\d+){ends})"
            rf"|(?:{OTHER_CODES}|R)(?=[+–-]?(?:{priced}|{odd_price}){ends})|CHF(?=[+–-]?\d{{3,}}{ends}))",
        ),
        ("", rf"(?<!\d)[{_LETTER}]\w*(?:[-.]\d\w*)+(?:,\d{{3}}\b)*"),  # COVID-19, GPT-4, fig.3
        ("", rf"[{_LETTER}]\w*(?:(?<=\d)(?:,\d{{3}})+(?:\.\d+)?\b)?"),  # words, and identifiers: x1, fp16, H2O
    ]
    of_han = [
        (
            "date",
            r"[〇零一二三四五六七八九]{2,4}年|[一二三四五六七八九十]{1,3}(?:月(?:[一二三四五六七八九十]{1,3}[日号])?|号)",
        ),
        (
            "time",
            rf"(?<![百千])[十{_HAN_DIGITS}]{{1,3}}点(?:钟|整|半|[一三]刻|(?:[二三四五]?十{_D}?|零{_D})分?|{_D}分)",
        ),  # 十点三十分
        ("phone", r"(?:电话|手机|传真|热线)号?码?[:是为]?[ ]?\d[\d -]{4,}\d"),
        ("words", _CHINESE_WORDS),
        ("", rf"{_CHINESE}{_AND_HALF}"),
        (
            "chinese",
            rf"(?<=百分之)负?[零十百{_HAN_DIGITS}]+(?:点[零{_HAN_DIGITS}]+)?"
            rf"|(?:{signed})?(?:{_CHINESE}(?:{_HAN_DECIMALS})?|{_SMALL_DECIMAL})",
        ),
    ]
    of_digits = [
        *everywhere,
        ("address", rf"{no_version}(?<![\w.])\d{{1,3}}(?:\.\d{{1,3}}){{3}}(?::\d+|/\d+)?(?![\w.]\w)"),
        # bank cards, DOI, ISBN, and 40°26′, 5'10"
        ("", r"\b\d{4}(?:[ -]\d{4}){3}\b|10\.\d{4,9}/\S+|\b97[89](?:[ -]\d{1,7}){3}[ -][\dX]\b"),
        ("", r"\d+(?:\.\d+)?°[ ]?\d+(?:\.\d+)?['′’](?:[ ]?\d+(?:\.\d+)?[\"″”])?|\b\d+['′’][ ]?\d+(?:\.\d+)?[\"″”]"),
        ("date", rf"(?<![\d.])\d{{1,2}}(?:st|nd|rd|th)?[ ]{_MONTH}(?:,?[ ]\d{{4}}\b)?"),  # 5 January 2024
        ("date", r"\d{4}-\d{1,2}-\d{1,2}(?:[T ]\d{1,2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?:Z|[+-]\d{2}:?\d{2})?)?"),  # ISO
        ("date", r"\b(?:19|20)\d\d-0[1-9](?![\w-])"),
        ("words", rf"[\d.]{{1,20}}{_MANY}"),  # 30多万
        ("date", r"\d{2,4}年(?:\d{1,2}月(?:\d{1,2}[日号])?)?|\d{1,2}月(?:\d{1,2}[日号])"),  # 2024年1月5日
    ]
    fractions = [
        ("", rf"{mixed}(?:(?:[ -](?:of[ ])?(?:an?[ ])?(?i:{magnitude})|[ ]?(?:{SHORT}|{IN_MONEY}))(?!\w)|{myriads})"),
        ("", rf"{amount}{mixed}{OF_MONEY}"),  # £2½m
        ("fraction", mixed),
    ]
    joined = [
        ("time", r"\d+(?:[:：]\d+)+(?:\.\d+)?(?:[ ]?[AaPp]\.?[Mm]\b)?"),  # 12:30, 3:16, 12:30:45.5
        ("", r"\d+(?:/\d+)+(?:\.\d+)?"),  # 1/5/2024, 1/2, 1/2.5
        ("", rf"(?<![\d.,])(?:{foreign})"),
        ("version", rf"{no_version}\d+(?:\.\d+){{2,}}(?!,\d)[\w-]*"),  # 1.2.3-rc1
        ("", r"\d+(?:-\d+){2,}"),  # 64-17-5, 1-800-555-0199
    ]
    phones = [
        # +86 138-0013-8000, but no amount: +10000000, +3.14159265, +1.5 -2.0
        (
            "phone",
            r"\+(?!(?:\d{1,9}|\d+0{5}|\d+\.\d+)(?!\d|[ ().-]{1,2}\d))\d(?:[\d()./]|(?<![ ])-|[ ](?=[\d(])){6,}\d",
        ),
        ("phone", r"(?:\b1[ .-])?(?:\(\d{3}\)[ ]?|\b\d{3}[-. ])\d{3}[-. ]\d{4}\b(?:[ ](?:ext\.?|x)[ ]?\d+)?"),
        ("phone", r"(?<![\w.,$-])\(?0\d{1,4}\)?(?:[ ./-]\d{2,8}){1,5}(?!\w|[.,]\d)"),  # 07700 900123, (020) 7946 0958
        # 555-1234, but no range: 500-1000 words, $500-1500, 200-1234元
        ("phone", rf"(?<![$€£¥₹])\b(?!\d[05]0-[1-9]\d[05]0)\d{{3}}-\d{{4}}\b(?!{AFTER.pattern})"),
        # 13800138000, but no amount: 15000000000, $18926408486, 18926408486.48, 18926408486 kg
        ("phone", rf"(?<![\w.,+$€£¥₹-])1[3-9]\d{{9}}(?<!00000)(?!\w|[.,]\d|{AFTER.pattern})"),
        ("phone", r"\b\d{3}[ ]\d{4}[ ]\d{4}\b"),  # 138 0013 8000
        # 98765 43210, 1300 655 506, but no row of numbers
        (
            "phone",
            r"(?<![\w.,+$€£¥₹-])(?<!\d )(?:[6-9]\d{4}(?<!00)[ -]\d{5}(?<!00)|1[389]00[ ]\d{3}[ ]\d{3})(?![ ]?\d|[.,]\d|\w)",
        ),
        ("", r"\(\d*[rsezRSEZ](?:,\d*[rsezRSEZ])*\)|\(\d[+-]\)"),  # (1r,2s) and (2+) in names of compounds
    ]
    followed = [
        ("time", rf"(?:\d{{1,2}}(?:\.\d\d)?{to_word})?\d{{1,2}}(?:\.\d\d)?[ ]?[AaPp]\.?[Mm]\b"),  # 12.30 pm, 3-5 pm
        (  # 2-3 million, 10~20万, €10–20K, €10K–20K, 10K-20K USD: what one end says counts for both
            "",
            rf"{digits}{to_word}{money}{digits}(?:[ -](?i:{magnitude})|[ ]?(?:{SHORT}))(?!\w)"
            rf"|{digits}{to}{digits}{myriads}|{amount}{digits}{to_word}{money}{digits}(?:{letters}|{OF_MONEY})"
            rf"|{amount}{digits}{letters}(?:(?:{to_word}|[,/][ ]?(?:(?:and|or)[ ])?){digits}{letters})+"
            rf"|{digits}(?:[ ]?[KkMmBbTt])?{to_word}{digits}[ ]?{IN_MONEY}",
        ),
        ("scientific", rf"(?:{digits}[ ]?{_TIMES}[ ]?|(?<![\w.,]))10{_POWER}"),  # 6.02×10^23, 10⁻⁹
        ("", rf"{digits}[ ]?(?:[×x⋅·]|\\times)[ ]?10[–-]\d+"),  # 6.02×10-23, whose power lost its height
        ("english", rf"{digits}(?:{_SCALE})?{_AND_A_HALF}(?:{_SCALE})?"),
        ("", rf"{digits}(?:[ -](?i:{'|'.join(MAGNITUDES)})s?){{2,8}}(?!\w)"),  # 2 hundred thousand, 1.5 lakh crore
        ("scaled", rf"{digits}(?:[ -](?i:{magnitude})|[ ]?(?:{SHORT}|{IN_MONEY}))(?!\w)|{amount}{digits}{OF_MONEY}"),
        ("", rf"{digits}[ -]?{UNREAD}(?!\w)|{amount}{digits}{letters}"),  # $5 m long
        ("", rf"{digits}{_AND_HALF}"),
        ("chinese", rf"{digits}{myriads}"),  # 3.5万, 2亿, 3万5千, 1万5000
    ]
    numbers = [
        ("", name),  # 1,2-dichloroethane, 2-(2-methoxy)ethanol, 5-year: digits, a hyphen, and a name after it
        # 3D, 1st, 4x4
        ("", rf"0x[0-9A-Fa-f]+|\d[\d.]{{0,63}}(?=[{_LETTER}])(?!{_UNITS})(?![eE][+–-]?\d)[{_LETTER}]\w*"),
        ("", ungrouped),
        ("", rf"(?={odd_price})(?:{amount}|(?={odd_price}[ ]?(?:{MONEY_BEHIND}))){odd_price}"),
        (
            "number",  # 10 000, and 1 500 beside money
            rf"(?<![\d.,])(?=[1-9]\d{{0,2}}[ ]\d{{3}})(?:(?=\d+(?:[ ]\d{{3}}){{0,4}}[ ]0\d\d(?!\d))|{AFTER_MONEY}"
            rf"|(?<=\d[ ]\d{{3}}[–-])|(?={in_spaces}(?:[–-]{in_spaces}|[ ]?(?:{MONEY_BEHIND})))){in_spaces}",
        ),
        (
            "number",  # (1,234), ($45.10) and 45.10- alone in a line or cell are negative, and $(45.10); (0.12) is not
            rf"{cell}(?:\((?:(?:{BEFORE_SIGNED}){digits}|{apart})\)|{priced}-){end_of_cell}"
            rf"|(?=\(){amount}\({digits}\)",
        ),
        (
            "scaled",  # ($1.2m)
            rf"(?=\()(?:{cell}\((?:{BEFORE_SIGNED}){sized}\){end_of_cell}|{amount}\({sized}\))",
        ),
        ("", r"(?<![\d.,])0\d+(?![.\d])"),  # 007, 00501
        ("lakh", rf"[1-9]\d?(?:,\d\d){{1,9}},\d{{3}}(?!\d)(?:{point}\d+)?" if "," in marks else r"(?!)"),
        ("number", rf"(?:{digits}|(?={point}\d)(?:(?<![\w)\]}}.,])|{AFTER_MONEY}){point}\d+)(?:[eE][+–-]?\d+)?"),
    ]
    others = [
        ("code", r"```[\s\S]*?```|`[^`\n]+`"),
        ("", r"[#@]\w+"),  # #123
    ]
    digit = rf"[\d+:(–负零¼½¾⅐-⅞⁰¹²³⁴-⁹{point}-]"
    # Most of a file of numbers: decimals between spaces or commas that nothing else can be.
    plain = (
        rf"(?<![^\s,;|\[])-?(?:0|[1-9]\d{{0,8}}){point}\d+"
        rf"(?=[ ]-?\d+{point}\d|,[ ]?(?:-?\d+{point}\d|[\"\[{{])|[\n\r\t;|\]}}]|\Z)"
    )
    return [
        (f"(?=[{_LETTER}])", of_letters),
        (r"(?=[\d-])", [("number", plain)]),
        ("(?=[`#@])", others),
        (f"(?=[{_HAN}])", of_han),
        (f"(?={digit})", of_digits),
        (rf"{sign}(?=(?>\d*)(?>[ \u00a0\u202f-]?\d*)[/¼½¾⅐-⅞⁰¹²³⁴-⁹])", fractions),
        (rf"{sign}(?=\d*[.,:：/-]\d)", joined),
        (r"(?=[\d+(])", phones),
        (
            rf"{sign}(?={digits}(?:[ -]?[a-zA-Z×·⋅*^\\十百千万亿个年天小分岁倍公斤米度⁺⁻⁰¹²³⁴-⁹만억천조тм]|{to}))",
            followed,
        ),
        (rf"(?={digit}){sign}", numbers),
    ]
