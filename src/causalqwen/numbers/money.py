"""How money is marked: signs, codes and abbreviations before or behind an amount."""

from causalqwen.numbers.words import SHORT

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
_HAN = r"[美欧日港韩加澳台]元|人民币|英镑|卢布|[元円원]"

MONEY = rf"{SIGNS}|\b(?:{CODES}|{OTHER_CODES})\b|{_HAN}"
MONEY_BEHIND = rf"{MONEY}|{_BEHIND}"
_WORDS = "(?:dollar|euro|pound|franc|rupee|peso|buck|yuan|yen|won|rand)s?"
IN_MONEY = rf"[KkMmBbTt](?=[ ]?(?:{MONEY_BEHIND})|[ ](?:[A-Z]\w+[ ])?{_WORDS}\b)"
"""A magnitude that money behind it tells: 85K USD, 85K dollars."""
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
"""Where an amount begins behind what marks it as money."""
