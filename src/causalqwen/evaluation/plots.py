"""A plot of many predictions beside what came, a matplotlib Figure; of one: `modeling.plots`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from causalqwen.evaluation.figures import draw_predicted
from causalqwen.modeling.plots import _MAIN, _SECOND, Figure

if TYPE_CHECKING:
    from causalqwen.modeling.prediction import NumberPrediction


def plot_predictions(
    predictions: Sequence["NumberPrediction"], values: Sequence[float], unit: str = "units of the data"
) -> Figure:
    """Many predictions beside what came: medians with 90% intervals, the histogram of P(Y <= y), and how many intervals hold.

    P(Y <= y) is under the model's own law; it is uniform where that is calibrated. Intervals are recalibrated where levels were
    fitted. ValueError where there are not as many values as predictions, or none.
    """
    if len(predictions) != len(values) or not len(values):
        raise ValueError(f"expected a value for each prediction, got {len(values)} for {len(predictions)}")
    truth = np.asarray(values, dtype=float)
    columns = np.array([(one.median, *one.interval(0.9)) for one in predictions])
    figure = Figure(figsize=(14, 4.4), layout="tight")
    scatter, histogram, coverage = figure.subplots(1, 3)
    draw_predicted(scatter, truth, columns, unit, 0.9)
    pit = [one.cdf(value) for one, value in zip(predictions, truth.tolist(), strict=True)]
    histogram.hist(pit, bins=20, range=(0, 1), density=True, color=_SECOND, alpha=0.75)
    histogram.axhline(1.0, color="black", lw=0.8)
    histogram.set(xlabel="P(Y <= y) under the model's law", ylabel="density (1 if calibrated)", xlim=(0, 1))
    wanted = np.arange(1, 20) / 20
    ends = np.array([[one.interval(level) for level in wanted.tolist()] for one in predictions])
    held = ((ends[..., 0] <= truth[:, None]) & (truth[:, None] <= ends[..., 1])).mean(0)
    coverage.plot([0, 1], [0, 1], color="black", lw=0.8)
    coverage.plot(wanted, held, marker="o", ms=3, color=_MAIN)
    coverage.set(xlabel="nominal level of the central interval", ylabel="values inside", xlim=(0, 1), ylim=(0, 1))
    return figure
