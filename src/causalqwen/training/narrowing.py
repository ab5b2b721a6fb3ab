"""How much narrower a table's new rows are told than the rows that were held out (docs/tables.md, "Width").

Intervals are recalibrated on a fifth of the rows, which was answered by experts of the other four. New rows are answered by
experts of all five, and lie nearer to what these say.
"""

import math

import numpy as np
import torch

from causalqwen.modeling import CausalQwenForCausalLM
from causalqwen.training.experts import FOLDS

_POWER = math.log(FOLDS / (FOLDS - 1)) / math.log((FOLDS - 1) / (FOLDS - 2))
_INNER = 0.9
"""The share of the rows that is looked at: how far off the others are says little of most."""


def narrowing(far: np.ndarray, far_by_fewer: np.ndarray, weight: np.ndarray) -> float:
    """What the width of new rows' intervals is multiplied by, at most 1:

        rho = (r + 2 s)^(ln(5/4) / ln(4/3)),    r = sum w x / sum w y,    s its standard error

    x [n] is how many scales a held-out value lies off by experts of four fifths of the rows (`far`), y by experts of three
    (`far_by_fewer`), w how often a row counts, over all rows but the tenth with the largest x + y. Errors that fall as a power
    of the number of rows say of three and four fifths what they do of four and five. 1 where nothing is clear: where r + 2 s is
    1 or more, or no number.
    """
    both = far + far_by_fewer
    inner = both <= np.quantile(both, _INNER)
    near, wide, often = far[inner], far_by_fewer[inner], weight[inner].astype(float)
    with np.errstate(all="ignore"):
        whole = often @ wide
        ratio = often @ near / whole
        most = ratio + 2 * np.sqrt(np.square(often * (near - ratio * wide)).sum()) / whole
    return float(most**_POWER) if ratio > 0 and most < 1 else 1.0


def narrow(model: CausalQwenForCausalLM, share: float) -> None:
    """Make central intervals so much narrower on the value axis: a level L becomes 2 F(share F^-1((1 + L)/2)) - 1, F the
    standard law."""
    config, stable = model.config, model.value_law.stable

    def narrower(levels: list[float]) -> list[float]:
        ends = stable.quantile((1 + torch.tensor(levels, dtype=torch.float64)) / 2)
        one = torch.ones((), dtype=torch.float64)
        found: list[float] = (2 * stable.cdf(share * ends, 0 * one, one) - 1).tolist()
        return found

    if config.interval_levels is not None and share < 1:
        config.interval_levels = narrower(config.interval_levels)
        config.interval_kinds = [(least, narrower(levels)) for least, levels in config.interval_kinds or []]
