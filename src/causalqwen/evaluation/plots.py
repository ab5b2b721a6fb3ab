"""A plot for every prediction, and for many beside what came; each is a matplotlib Figure."""

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from causalqwen.evaluation.figures import _GREY, _MAIN, _SECOND, Figure, as_svg, draw_predicted
from causalqwen.numbers.law import LEVELS

if TYPE_CHECKING:
    from causalqwen.modeling.prediction import NumberPrediction

_SHADES = {0.5: 0.4, 0.8: 0.25, 0.9: 0.14}


def plot_prediction(
    prediction: "NumberPrediction", value: float | None = None, axes: Any = None, unit: str = ""
) -> Figure:
    """One prediction: its density, its intervals at 50, 80 and 90%, its median, and the truth where it is known.

    The density is the model's own law, per unit of the data; intervals are recalibrated where levels were fitted. A number of
    the context that may come again (`candidates`) is a bar of its probability against an axis of its own.

    Args:
        axes: matplotlib's, to draw into; a new figure by default. unit: of the value, for the axis.
    """
    if axes is None:
        axes = Figure(figsize=(6.4, 3.4), layout="tight").subplots()
    curve = prediction.curve(value=value)
    for level in sorted(LEVELS, reverse=True):
        axes.axvspan(
            *prediction.interval(level), color=_MAIN, alpha=_SHADES[level], lw=0, label=f"{level:.0%} interval"
        )
    candidates = getattr(prediction, "candidates", [])
    taken = {at for at, _ in candidates}
    axes.plot(
        *zip(*[(at, density) for at, density, _ in curve if at not in taken], strict=True), color=_MAIN, label="density"
    )
    axes.axvline(prediction.median, color="black", lw=1, label=f"median {prediction.median:.6g}")
    if value is not None:
        axes.axvline(value, color=_SECOND, lw=1.5, ls="--", label=f"true value {value:.6g}")
    axes.set(xlabel=unit or "value", ylabel="density", xlim=(curve[0][0], curve[-1][0]))
    axes.set_ylim(bottom=0)
    if candidates:
        bars = axes.twinx()
        bars.vlines(*zip(*[(at, 0.0, weight) for at, weight in candidates], strict=True), color=_GREY, lw=3)
        bars.set(ylabel="probability of a number of the text", ylim=(0, 1))
    axes.legend(frameon=False, fontsize=8)
    return axes.figure


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


def as_html(prediction: "NumberPrediction") -> str:
    """A prediction for a notebook: what `str` says, and its plot."""
    return f"<p>{html.escape(str(prediction))}</p>{as_svg(plot_prediction(prediction))}"
