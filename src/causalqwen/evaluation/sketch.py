"""A prediction as two lines of text, for a terminal."""

from itertools import pairwise

import numpy as np

from causalqwen.modeling import NumberPrediction
from causalqwen.numbers.rendering import brief

_HEIGHTS = " ▁▂▃▄▅▆▇█"


def sketch(prediction: NumberPrediction, width: int = 60) -> str:
    """How probable each of `width` equal pieces of the 90% interval is; below them its ends, and the median at its place.

    Probabilities are the model's own law's (`NumberPrediction.cdf`); the interval is recalibrated where levels were fitted.
    """
    low, high = prediction.interval(0.9)
    masses = [after - before for before, after in pairwise(map(prediction.cdf, np.linspace(low, high, width + 1)))]
    most = max(masses) or 1.0
    bars = "".join(_HEIGHTS[round(mass / most * (len(_HEIGHTS) - 1))] for mass in masses)
    ends, middle = (brief(low), brief(high)), f"^ {brief(prediction.median)}"
    place = round((prediction.median - low) / ((high - low) or 1.0) * (width - 1))
    place = min(max(place, len(ends[0]) + 1), width - len(ends[1]) - len(middle) - 1)
    scale = ends[0].ljust(place) + middle
    return f"{bars}\n{scale.ljust(width - len(ends[1]))}{ends[1]}"
