"""Texts of every kind: tokens and values give the text back, a number that is written in a known way is read as its value, and
nothing raises but for a number that float64 cannot hold."""

import random
import sys
import time
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from causalqwen import CausalQwenProcessor
from causalqwen.modeling.processor import SLOT
from causalqwen.numbers import KINDS, NumberRules, find_numbers

from . import Bounds, Tally

BATCH = 200
_EVERY = 1001  # draws; no divisor in common with the number of processors, so that each in its turn meets a long text
_SLOW = 120  # seconds for a batch with a text of a megabyte: ten or twenty, unless time grows faster than texts do
_SCRIPTS = ["0٠۰०০੦૦୦௦౦೦൦๐໐༠၀０𝟎𝟘"[place] for place in range(19)]  # zeros, of which the other nine follow
_HAN = "零一二三四五六七八九十百千万亿两〇壹贰叁拾佰仟萬億点分之第几多"
_WORDS = [
    "is", "the", "of", "and", "price", "K", "kg", "%", "‰", "km/h", "$", "€", "¥", "元", "美元", "人", "年", "月", "日", "万",
    "亿", "one", "twenty", "hundred", "million", "half", "May", "v",
]  # fmt: skip
_CONTROLS = [
    chr(code) for code in (*range(32), *range(127, 160), 0xAD, 0x200B, 0x200D, 0x2028, 0xFEFF, 0xFFFE, 0x1FFFE)
]
_BIDI = [chr(code) for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x61C)]
_LITERALS = [
    "<NUM>", "<NUM", "NUM>", "<num>", "<|im_end|>", "<|endoftext|>", "<|im_start|>user\n", "\ufdd0", "\ufdd0NUM",
    "NaN", "inf",
]  # fmt: skip
_JOINS = [*("", " ", "  ", "\n", ", ", "-", " - ", "–", "/", ":", ".", "'", "(", ")", "`"), *"\u00a0\u3000e", "×10^"]


def _digits(chance: random.Random, most: int = 8) -> str:
    return str(chance.randrange(10 ** chance.randint(1, most)))


def _in_script(digits: str, zero: str) -> str:
    return "".join(chr(ord(zero) + int(digit)) for digit in digits)


def _number(chance: random.Random) -> str:
    """A number, or what looks like one."""
    whole, of = _digits(chance), chance.choice
    forms: list[Callable[[], str]] = [
        lambda: f"{of('+-−－')}{whole}.{_digits(chance, 5)}",
        lambda: f"{int(whole):,}".replace(",", of([",", ".", "'", "’", " ", "\u00a0", "\u202f"])),
        lambda: f"{whole}{of('eE')}{of(['', '+', '-'])}{chance.randrange(400)}",
        lambda: _in_script(whole, of(_SCRIPTS)),
        lambda: "".join(of(_HAN) for _ in range(chance.randint(1, 8))),
        lambda: f"{whole}{of(['/', ':', '-', '.', '–'])}{_digits(chance, 4)}{of(['', '/3', '.1', ':05'])}",
        lambda: f"{of('$€£¥₹￥')}{whole}{of(['', '.50', ' million', '万', '%'])}",
        lambda: of("¼½¾⅐⅞²³⁻⁹₅ⅣⅫ①㊿㈠𝟗") + of(["", whole]),
        lambda: of(["10", f"{whole}×10", f"{whole} * 10"]) + of(["^", "⁻", "", "^{"]) + of(["5", "²³", "-3", "99"]),
        lambda: f"{chance.randint(1, 99)},{chance.randint(10, 99)},{chance.randint(100, 999)}",
        lambda: f"{whole}.{_digits(chance, 25)}",
        lambda: whole,
    ]
    return of(forms)()


# A part of a number may be read in none of these. ν: an amount; κ: up to three digits; δ: one.
_FORMS = (
    "R$ν|Rν|USDν|USD -ν|-$ ν|$-ν|−ν €|(ν)|($ν)|$(ν)|ν-|ν kr|νzł|Rs.ν|NT$ν|CHFν|€κ δδδ|κ δδδ kr|κ 0δδ|$νK|£νm|€νbn|νB"
    "|ν lakh|ν crore κ lakh|ν million|ν-thousand-dollar|minus ν|ν minus ν|负ν%|正负ν|零下κ度|三百五十六点七|零点五"
    "|百分之三点五|负百分之ν|κ个半|κ万零δδδ|十点三十分|δ点一刻|一点五百|κ½|κ δ/δ|κ⁄δ|κ¹⁄₂|κ-δ/δ|κ and a half"
    "|δδδδ:dbδ::δ|κ.κ.κ.κ:κ|δδ:Aδ:δB:δδ:EE:δδ|[::1]:κ|0δδδδ δδδδδδ|+δδ δδ δδδδ δδδδ|(δδδ) δδδ-δδδδ|tel: δδδδδδδ"
    "|ISBN δδδ δ δδ δδδδδδ δ|δδδδ δδδδ δδδδ δδδδ|DEδδ δδδδ δδδδ δδδδ|κ°δδ′δδ″|κ'δ\"|νE–δ|ν × 10 ^ δ|ν \\times 10^{δ}"
    "|ν×10-δδ|$x^δ$|$ν$|$$ν$$|1δδδs|‑ν|–ν|κ –κ|κ–κ|κ.δδδ,δδ|κ,δδδ.δδ|No.κ,δδδ|κ δδδ δδδ|2024-0δ|minus five"
    "|two point seven|forty five hundred thirty|half a million|two and a half million|twenty fifth|three quarters"
    "|nineteen eighty-four|ten minus five|€κ–κK|κ-κ million|($νm)|κ Mrd|ν mil|κ-½|κ½ million|€κ δδδ,δδ|Rδδδδ|κ pm|κ.e-0δ"
    "|–$ν|κ,–κ|98δδδ δδδδδ|point five|one point twenty|κ grand|(κ.δδ)|νK dollars"
)


def _form(chance: random.Random) -> str:
    """One of the forms."""
    drawn_of = {"ν": lambda: _number(chance), "κ": lambda: _digits(chance, 3), "δ": lambda: str(chance.randrange(10))}
    return "".join(drawn_of.get(char, lambda char=char: char)() for char in chance.choice(_FORMS.split("|")))


def _broken(chance: random.Random) -> str:
    """A number whose end or beginning is missing."""
    written = _number(chance)
    place = chance.randrange(len(written))
    return written[place:] if chance.random() < 0.5 else written[:place] + chance.choice(".,eE+-^")


def _nested(chance: random.Random) -> str:
    opening = "".join(chance.choice("([{<`'\"“「*_") for _ in range(chance.randint(1, 6)))
    return opening + _number(chance) + opening[::-1].translate(str.maketrans("([{<“「", ")]}>”」"))


def _characters(chance: random.Random) -> str:
    """Anything that Unicode has, but for surrogates."""
    return "".join(
        chr(code if not 0xD800 <= code < 0xE000 else code - 0x800)
        for code in (chance.randrange(sys.maxunicode + 1) for _ in range(4))
    )


FRAGMENTS: dict[str, Callable[[random.Random], str]] = {
    "numbers": _number,
    "forms": _form,
    "broken": _broken,
    "nested": _nested,
    "words": lambda chance: chance.choice(_WORDS),
    "controls": lambda chance: chance.choice(_CONTROLS),
    "bidirectional": lambda chance: chance.choice(_BIDI),
    "literals": lambda chance: chance.choice(_LITERALS),
    "characters": _characters,
}


_WIDE = str.maketrans("0123456789.", "０１２３４５６７８９．")


def _times(factor: str) -> Callable[[float], float]:
    return lambda value: float(Decimal(repr(value)) * Decimal(factor))


# How a value is written, and what that is worth by the default rules.
KNOWN: dict[str, tuple[Callable[[float], str], Callable[[float], float]]] = {
    "plain": (lambda value: repr(value).removesuffix(".0"), float),
    "grouped": (lambda value: f"{value:,}".removesuffix(".0"), float),
    "full width": (lambda value: repr(value).removesuffix(".0").translate(_WIDE), float),
    "signed": (lambda value: f"+{value!r}", float),
    "scientific": (lambda value: f"{value!r}e0", float),
    "money": (lambda value: f"${value!r}", float),
    "code": (lambda value: f"USD{value:,}", float),
    "rand": (lambda value: f"R{value + 1000:,.3f}", lambda value: round(value + 1000, 3)),
    "signed money": (lambda value: f"-$ {value!r}", _times("-1")),
    "dash": (lambda value: f"–{value!r}", _times("-1")),
    "millions": (lambda value: f"£{value!r}m", _times("1e6")),
    "lakh": (lambda value: f"{value!r} lakh", _times("1e5")),
    "负": (lambda value: f"负{value!r}", _times("-1")),
    "power": (lambda value: f"{value!r} \\times 10^3", _times("1e3")),
    "small": (lambda value: f"{value!r}E–3", _times("1e-3")),
}


def _one(chance: random.Random) -> str:
    kind = chance.choice(list(FRAGMENTS))
    parts = []
    for _ in range(chance.randint(1, 6)):
        parts.append(FRAGMENTS[kind if chance.random() < 0.5 else chance.choice(list(FRAGMENTS))](chance))
        parts.append(chance.choice(_JOINS))
    return "".join(parts)


def _mutated(chance: random.Random, text: str) -> str:
    """A slice taken out, doubled, turned round, or moved in from elsewhere."""
    start, length = chance.randrange(len(text) + 1), chance.randint(1, 8)
    piece, rest = text[start : start + length], text[start + length :]
    return text[:start] + chance.choice(["", 2 * piece, piece[::-1], _number(chance), chance.choice(_CONTROLS)]) + rest


def drawn(chance: random.Random, count: int, long: bool) -> list[str]:
    """Some texts, and a very long one among them."""
    texts = [_one(chance) for _ in range(count // 2)]
    texts += [_mutated(chance, text) for text in texts]
    if long:
        piece = _one(chance) or "1"
        texts[0] = (piece * (1 + (1 << 20) // len(piece)))[: 1 << 20]
    return texts


def processors(tokenizers: dict[str, object]) -> dict[str, CausalQwenProcessor]:
    """By name: every context and some rules, over each tokenizer."""
    rules = {
        "few": NumberRules(kinds=("number",), groups=","),
        "default": NumberRules(),
        "all": NumberRules(kinds=KINDS, decimal=",", groups=" ."),
    }
    return {
        f"{name}, {context}, {named} rules": CausalQwenProcessor(tokenizer, number_context=context, number_rules=rule)
        for name, tokenizer in tokenizers.items()
        for context in ("value", "digits", "both")
        for named, rule in rules.items()
    }


def run(bounds: Bounds, by_name: dict[str, CausalQwenProcessor]) -> Tally:
    """`BATCH` texts at a draw, each draw through one of the processors; of `_EVERY` one has a text of a megabyte in it."""
    tally, names = Tally(), list(by_name)
    for number, chance in bounds.draws():
        name = names[number % len(names)]
        for text in _known_values(chance, tally, number):
            tally.find("known values", text)
        batch = drawn(chance, BATCH, long=number % _EVERY == 49)
        started = time.process_time()
        for text in _not_come_back(by_name[name], batch, tally, name):
            _comes_back(by_name[name], text, tally, name, number)
        if (seconds := time.process_time() - started) > _SLOW:
            tally.find(name, f"draw {number}: {sum(map(len, batch)):,} characters took {seconds:.0f} s")
    return tally


def _not_come_back(processor: CausalQwenProcessor, texts: list[str], tally: Tally, name: str) -> list[str]:
    """The texts that have to be asked about one by one; all of them where something was raised."""
    try:
        encoded = processor(texts)
        back = processor.batch_decode(encoded)
        wrong = [
            text for row, text in enumerate(texts) if back[row] != text or not _told_alike(processor, encoded, row)
        ]
    except Exception:  # which text it was is asked next
        return texts
    tally.tried[name] += len(texts) - len(wrong)
    return wrong


def _told_alike(processor: CausalQwenProcessor, encoded, row: int) -> bool:
    """Each `<NUM>` has the value that was read where it stands, and nothing else has one."""
    ids, values, texts = encoded["input_ids"][row], encoded["numeric_values"][row], encoded.number_texts[row]
    at = [value for token, value in zip(ids, values, strict=True) if token == processor.num_token_id]
    off = [value for token, value in zip(ids, values, strict=True) if token != processor.num_token_id]
    return at == [text.value for text in texts] and not any(off)


def _comes_back(processor: CausalQwenProcessor, text: str, tally: Tally, name: str, number: int) -> None:
    tally.tried[name] += 1
    shown = f"draw {number}: {text[:80]!r}"
    try:
        encoded = processor([text])
        back = processor.batch_decode(encoded)[0]
    except ValueError as error:
        if "too large for float64" in str(error) or SLOT in text:
            tally.refused[name] += 1
        else:
            tally.find(name, f"{shown}: {error}")
    except Exception as error:
        tally.find(name, f"{shown}: {type(error).__name__}: {error}")
    else:
        if back != text and not _holds(processor.tokenizer, text):
            tally.refused[name] += 1
        elif back != text:
            tally.find(name, f"{shown} came back as {back[:80]!r}")
        elif not _told_alike(processor, encoded, 0):
            tally.find(name, f"{shown}: the values are not those of the numbers in it")


def _holds(tokenizer: Any, text: str) -> bool:
    """Whether the bare tokenizer gives this text back: some have no token for every byte."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def _known_values(chance: random.Random, tally: Tally, number: int) -> list[str]:
    wrong = []
    for form, (write, worth) in KNOWN.items():
        value = float(f"{chance.randrange(10 ** chance.randint(1, 9))}.{chance.randrange(1000)}")
        text = f"it is {write(value)} now"
        tally.tried["known values"] += 1
        read = [span.value for span in find_numbers(text)]
        if read != [worth(value)]:
            wrong.append(f"draw {number}: {form} {text!r} is read as {read}")
    return wrong
