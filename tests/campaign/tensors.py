"""Laws and losses on tensors of every size: no NaN, signs as they must be, and values and gradients finite wherever the true
ones (taken in float64, on the same arguments) are numbers that the result's dtype holds.

Values are float64 in this library, and what reads them is tried at every size with its gradients. Scores are float32, and their
scales have a floor: gradients in float32 are tried at the sizes that scores can have.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from causalqwen.distributions import get_family
from causalqwen.kernels import linear_ovr_loss
from causalqwen.losses import ovr_log_probs, ovr_loss, quantile_crps
from causalqwen.numbers import CRPS_LEVELS, ValueLaw, ValueTransform
from causalqwen.numbers.support import Support

from . import Bounds, Tally

AT_ONCE = 500
"""Elements of one draw."""
_LARGEST = 1e30
FAMILIES = ("cauchy", "gaussian")
DTYPES = (torch.float32, torch.bfloat16, torch.float64)

ANY, NEGATIVE, POSITIVE, SHARE = (-torch.inf, torch.inf), (-torch.inf, 0.0), (0.0, torch.inf), (0.0, 1.0)
"""Between which two ends a result lies."""
EVERY, SCORES, LOGS = (-30, 30), (-6, 12), (-30, 2)
"""Powers of ten between which sizes lie: all; those of scores; and those on an axis of logarithms."""
Ask = Callable[..., Tensor]
Span = tuple[float, float]

# Of a law, on x, loc and scale: what is asked, and where the answer lies.
OF_LAWS: dict[str, tuple[Ask, Span]] = {
    "log_cdf": (lambda law, *of: law.log_cdf(*of), NEGATIVE),
    "log_sf": (lambda law, *of: law.log_sf(*of), NEGATIVE),
    "cdf": (lambda law, *of: law.cdf(*of), SHARE),
    "log_prob": (lambda law, *of: law.log_prob(*of), ANY),
    "crps": (lambda law, *of: law.crps(*of), POSITIVE),
    "log_interval": (lambda law, *of: _between(law, *of), NEGATIVE),
}
# Of the laws of scores alone, at their sizes.
OF_SCORES: dict[str, tuple[Ask, Span]] = {
    "linear_scale": (lambda law, x, loc, scale: law.linear_scale(scale[:, None], scale.new_full((1, 1), 3.0))[:, 0], POSITIVE),
    "kl": (lambda law, x, loc, scale: law.kl(x, scale.flip(0), loc, scale), POSITIVE),
    "ovr_log_probs": (lambda law, x, loc, scale: ovr_log_probs(loc, scale, x, family=law.name)[0], NEGATIVE),
    "ovr_log_probs, graded": (lambda law, x, loc, scale: ovr_log_probs(loc, scale, x, family=law.name, slope=0.5)[1], NEGATIVE),
    "ovr_loss": (lambda law, x, loc, scale: _ovr(law, x, loc, scale, None), POSITIVE),
    "linear_ovr_loss": (lambda law, x, loc, scale: _ovr(law, x, loc, scale, "chunked"), POSITIVE),
}  # fmt: skip
# Of the law of a value, on the axis of each transform.
TRANSFORMS = {
    "identity": ValueTransform(),
    "affine": ValueTransform("affine", center=3.0, width=1e4),
    "symlog": ValueTransform("symlog", center=1.0, width=2.0),
    "log": ValueTransform("log", support=Support(1e-30, 1e30)),
    "quantile": ValueTransform("quantile", knots=((-1.0, 0.0), (0.0, 0.0), (1.0, 5.0), (2.0, 1e9))),
    "integers": ValueTransform("affine", support=Support(0.0, None, 1.0)),
}
OF_VALUES: dict[str, tuple[Ask, Span]] = {
    "axis_losses, nll": (lambda law, x, loc, scale: law.axis_losses(loc, scale, x, "nll"), ANY),
    "axis_losses, crps": (lambda law, x, loc, scale: law.axis_losses(loc, scale, x, "crps"), POSITIVE),
    "log_prob": (lambda law, x, loc, scale: law.log_prob(loc, scale, x), ANY),
    "crps": (lambda law, x, loc, scale: law.crps(loc, scale, x), POSITIVE),
    "cdf": (lambda law, x, loc, scale: law.cdf(loc, scale, x).detach(), SHARE),
    "central_level": (lambda law, x, loc, scale: law.central_level(loc, scale, x).detach(), SHARE),
    "quantile": (lambda law, x, loc, scale: law.quantile(loc, scale, 0.9), ANY),
}


def _between(law, x: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
    """P of what lies between x and loc, under a law around 0."""
    apart = torch.where(x == loc, x + x.abs() + 1, x)
    return law.log_interval(torch.minimum(apart, loc), torch.maximum(apart, loc), torch.zeros_like(loc), scale)


def _ovr(law, x: Tensor, loc: Tensor, scale: Tensor, impl: str | None) -> Tensor:
    """Rows of ten scores, the first of which is right; linear: as products with a matrix of one column."""
    rows = loc.reshape(-1, 10)
    right, of_row = torch.zeros(len(rows), dtype=torch.int64), scale.reshape(-1, 10)[:, :1]
    if impl is None:
        return ovr_loss(rows, of_row, right, x.reshape(-1, 10)[:, :1], family=law.name, reduction="none")
    weight = torch.linspace(-1, 1, 10, dtype=loc.dtype).unsqueeze(-1)
    return linear_ovr_loss(
        rows[:, :1], of_row.squeeze(-1), weight, None, 0.0, right, family=law.name, impl=impl, reduction="none"
    )


def drawn(
    generator: torch.Generator, dtype: torch.dtype, sizes: tuple[int, int], sizes_x: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """x, loc and scale [AT_ONCE], of every size, some of them 0, some x at loc or beside it."""
    size, signs, kinds = (torch.rand(3, AT_ONCE, generator=generator, dtype=torch.float64) for _ in range(3))
    low, high = torch.tensor([sizes_x, sizes, sizes], dtype=torch.float64).T.unsqueeze(-1)
    tensors = 10 ** (low + (high - low) * size)
    tensors[:2] *= torch.where(signs[:2] < 0.5, -1.0, 1.0)
    tensors[:2] = tensors[:2].masked_fill(kinds[:2] < 0.05, 0.0)
    x, loc, scale = tensors.to(dtype)
    at = kinds[2]
    x = torch.where(at < 0.05, loc, x)
    x = torch.where((at > 0.05) & (at < 0.15), loc * torch.tensor(1.01, dtype=dtype), x)
    scale = torch.where((at > 0.15) & (at < 0.25), loc.abs().clamp(min=10.0 ** sizes[0]), scale)
    return x, loc, scale


def _rows() -> list[tuple[str, Ask, Span, tuple[int, int]]]:
    """All that is tried: its name, what is asked of x, loc and scale, where the answer lies, and their sizes."""
    rows = [
        (f"{family}: {name}", partial(ask, get_family(family)), span, sizes)
        for asks, sizes in ((OF_LAWS, EVERY), (OF_SCORES, SCORES))
        for family in FAMILIES
        for name, (ask, span) in asks.items()
    ]
    for family in FAMILIES:
        for axis in TRANSFORMS:
            sizes = LOGS if axis in ("log", "symlog") else EVERY
            named = [(f"{family} by {axis}: {name}", *of) for name, of in OF_VALUES.items()]
            rows += [(name, partial(_of_value, family, axis, ask), span, sizes) for name, ask, span in named]
    return [*rows, ("quantile_crps", _quantile_crps, POSITIVE, EVERY)]


def run(bounds: Bounds) -> Tally:
    """`AT_ONCE` elements at a draw, of which each row gets its turn in each dtype."""
    tally, rows = Tally(), _rows()
    for number, chance in bounds.draws():
        what, ask, span, sizes = rows[number % len(rows)]
        by_value = " by " in what
        dtype = DTYPES[number // len(rows) % len(DTYPES)]
        generator = torch.Generator().manual_seed(chance.getrandbits(60))
        arguments = drawn(generator, dtype, sizes, SCORES if sizes == SCORES else EVERY)
        tally.tried[what] += AT_ONCE
        try:
            told = check(ask, arguments, span, gradients=sizes != EVERY or by_value or dtype == torch.float64)
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
        if told:
            tally.find(what, f"draw {number}, {dtype}: {told}")
    return tally


def _quantile_crps(x: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
    levels = CRPS_LEVELS.to(scale)
    return quantile_crps(x, loc.unsqueeze(-1) + scale.unsqueeze(-1) * levels, levels)


def _of_value(family: str, axis: str, ask: Callable[..., Tensor], x: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
    values = x.abs() if axis in ("log", "integers") else x
    return ask(ValueLaw(TRANSFORMS[axis], family), values.detach(), loc, scale)


def check(ask: Ask, arguments: tuple[Tensor, ...], span: Span, *, gradients: bool) -> str:
    """What is wrong with the answer, and with its gradients; "" for nothing."""
    answer, *slopes = _with_gradients(ask, arguments)
    true, *true_slopes = _with_gradients(ask, tuple(argument.double() for argument in arguments))
    low, high = span
    names = ("the answer", *(f"the gradient of {name}" for name in ("x", "loc", "scale")))
    for name, found, truth in zip(names, (answer, *slopes), (true, *true_slopes), strict=True):
        if found is None or not (gradients or found is answer):
            continue
        wrong = found.isnan() | truth.isnan() | truth.isinf() | (found.isinf() & (truth.abs() < _LARGEST))
        if bool(wrong.any()):
            return f"{name} is {found[wrong][0]}, in float64 {truth[wrong][0]}, at {_at(arguments, wrong)}"
    for found in (answer, true):
        slack = 1e-6 * found.abs().nan_to_num()
        outside = (found < low - slack) | (found > high + slack)
        if bool(outside.any()):
            return f"the answer {found[outside][0]} lies outside {span}, at {_at(arguments, outside)}"
    return ""


def _with_gradients(ask: Callable[..., Tensor], arguments: tuple[Tensor, ...]) -> list[Tensor | None]:
    leaves = [argument.clone().requires_grad_(True) for argument in arguments]
    answer = ask(*leaves)
    if not answer.requires_grad:
        return [answer, None, None, None]
    return [answer.detach(), *torch.autograd.grad(answer.sum(), leaves, allow_unused=True)]


def _at(arguments: tuple[Tensor, ...], where: Tensor) -> str:
    if len(where) != len(arguments[0]):
        return f"row {where.nonzero()[0].item()}"
    x, loc, scale = (argument[where][0].item() for argument in arguments)
    return f"{x=}, {loc=}, {scale=}"
