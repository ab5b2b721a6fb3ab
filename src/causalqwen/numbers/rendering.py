"""Writing a value as text."""

import math

import torch
from torch import Tensor

_UNSPACED = (  # scripts and signs after which a number follows without a space
    ("\u3000", "\u30ff"),  # CJK punctuation, kana
    ("\u3400", "\u9fff"),  # Han
    ("\uf900", "\ufaff"),  # Han, compatibility
    ("\uff00", "\uffef"),  # full-width forms
    ("\u0e00", "\u0eff"),  # Thai, Lao
)
_OPENING = set("([{<$€£¥₹#@/\\-+_~^|«‹“‘")


def format_number(value: float) -> str:
    """The shortest text that reads back as the same float64: 42, -5, 351.4, 1e+20.

    Raises ValueError for NaN and infinities: no text stands for them.
    """
    if not math.isfinite(value):
        raise ValueError(f"{value} cannot be written as a number")
    if float(value).is_integer() and abs(value) < 1e16:
        return "-0" if value == 0 and math.copysign(1, value) < 0 else str(int(value))
    return repr(float(value))


def spaced(before: str) -> bool:
    """Whether a number written after the text `before` gets a space: where the script sets words apart, and there only.

    True after a word, a digit or a closing sign; False at the start, after white space, an opening bracket, a currency
    sign, Han, kana or Thai.
    """
    if not before or before[-1].isspace() or before[-1] in _OPENING:
        return False
    return not any(low <= before[-1] <= high for low, high in _UNSPACED)


def round_significant(values: Tensor, digits: int) -> Tensor:
    """Round to `digits` significant decimal digits, elementwise, in float64; zeros stay zero.

    A generated number is rounded before it is written and fed back, so that text and value are the same number.
    """
    values = values.to(torch.float64)
    magnitude = torch.floor(torch.log10(values.abs().clamp(min=1e-300)))
    # Exact powers of ten multiply or divide (10^22 is the largest), so that 351.235 comes out as the float of that text.
    shift = (digits - 1 - magnitude).clamp(-300, 300)
    up, down = 10.0 ** shift.clamp(min=0), 10.0 ** (-shift).clamp(min=0)
    return torch.round(values * up / down) * down / up
