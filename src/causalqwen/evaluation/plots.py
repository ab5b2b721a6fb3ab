"""Pictures of predictions, calibration, training and language: matplotlib Figures, or SVG text; of one prediction:
`modeling.plots`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from causalqwen.modeling.plots import _GREY, _MAIN, _SECOND, Axes, Figure, as_svg, plt
from causalqwen.numbers import ClassLaws, ValueLaw

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
    figure = Figure(figsize=(14, 4.4), layout="tight")
    scatter, histogram, coverage = figure.subplots(1, 3)
    columns = np.array([(prediction.median, *prediction.interval(0.9)) for prediction in predictions])
    draw_predicted(scatter, truth, columns, unit, 0.9)
    pit = [prediction.cdf(value) for prediction, value in zip(predictions, truth.tolist(), strict=True)]
    _draw_uniform(histogram, pit, "P(Y <= y) under the model's law")
    histogram.set_xlim(0, 1)
    wanted = np.arange(1, 20) / 20
    ends = np.array([[prediction.interval(level) for level in wanted.tolist()] for prediction in predictions])
    held = ((ends[..., 0] <= truth[:, None]) & (truth[:, None] <= ends[..., 1])).mean(0)
    _draw_diagonal(coverage, "nominal level of the central interval", "values inside")
    coverage.plot(wanted, held, marker="o", ms=3, color=_MAIN)
    return figure


def draw_predicted(axis: Axes, values: np.ndarray, columns: np.ndarray, unit: str, level: float) -> None:
    """Draw medians against observations, with intervals. values [n]; columns [n, 3]: median, low, high end.

    All medians are drawn; the intervals of 60 numbers, chosen at random, because more would hide each other.
    """
    inside = (columns[:, 1] <= values) & (values <= columns[:, 2])
    for mask, colour, label in ((inside, _MAIN, "inside its interval"), (~inside, _SECOND, "outside")):
        axis.scatter(values[mask], columns[mask, 0], s=9, color=colour, alpha=0.65, linewidths=0, label=label)
    shown = np.random.default_rng(0).permutation(len(values))[:60]
    axis.vlines(values[shown], columns[shown, 1], columns[shown, 2], color=_GREY, lw=0.8, alpha=0.6)
    away = np.abs(values - np.median(values))
    near = values[away <= (6 * np.median(away) or np.inf)]  # an outlier squeezes no other
    margin = 0.1 * np.ptp(near) or abs(near.max()) or 1.0
    frame = low, high = near.min() - margin, near.max() + margin
    axis.plot(frame, frame, color="black", lw=0.8)
    hidden = int(((values < low) | (values > high)).sum())
    outside = f" ({hidden} of {len(values)} numbers lie outside the frame)" if hidden else ""
    axis.set(xlim=frame, ylim=frame, xlabel=f"observed, {unit}{outside}")
    axis.set_ylabel(f"predicted median, {unit}, and {level:.0%} interval")
    axis.legend(frameon=False, loc="upper left")


def _draw_uniform(axis: Axes, levels: ArrayLike, xlabel: str) -> None:
    axis.hist(levels, bins=20, range=(0, 1), density=True, color=_SECOND, alpha=0.75)
    axis.axhline(1.0, color="black", lw=0.8)
    axis.set(xlabel=xlabel, ylabel="density (1 if calibrated)")


def _draw_diagonal(axis: Axes, xlabel: str, ylabel: str) -> None:
    axis.plot([0, 1], [0, 1], color="black", lw=0.8)
    axis.set(xlabel=xlabel, ylabel=ylabel, xlim=(0, 1), ylim=(0, 1))


def value_figures(law: ValueLaw | ClassLaws, values: dict[str, Tensor], unit: str) -> dict[str, str]:
    """Scatter and calibration of held-out numbers, as SVG; calibration is that of new numbers, which stand in no context.

    law, values: those of `evaluate`.
    """
    new = ~values["stands"] if "stands" in values else slice(None)
    central = law.spread_levels(*(values[name][new] for name in ("loc", "scale", "value"))).numpy()
    figure, axis = plt.subplots(figsize=(6.2, 5.2))
    draw_predicted(axis, values["value"].numpy(), values["interval"].numpy(), unit, 0.9)
    drawn = {"scatter": as_svg(figure)}
    levels = law.levels_at(values["scale"])[new]
    return drawn | ({"calibration": calibration(central, levels)} if len(central) else {})


def calibration(central: np.ndarray, raw_levels: ArrayLike | None) -> str:
    """Coverage against nominal level, raw and recalibrated, and the distribution of |2 u - 1|, where an atom counts in parts.

    central: |2 u - 1| [n, parts] of held-out numbers, u the probability integral transform (`ValueLaw.spread_levels`).
    raw_levels: the raw level that stands for each of 0%, 1%, ..., 100%, where intervals were recalibrated: [101] for all
    numbers, or [n, 101].
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.6), layout="tight")
    wanted = np.linspace(0, 1, 101)
    raw = np.searchsorted(np.sort(central.ravel()), wanted, side="right") / central.size
    _draw_diagonal(left, "nominal level of the central interval", "held-out numbers inside")
    left.plot(wanted, raw, color=_SECOND, label="raw")
    if raw_levels is not None:
        fitted = [(central <= level[..., None]).mean() for level in np.moveaxis(np.asarray(raw_levels), -1, 0)]
        left.plot(wanted, fitted, color=_MAIN, label="recalibrated on validation rows")
    left.legend(frameon=False, loc="upper left")
    _draw_uniform(right, central.ravel(), "raw central level of the observation")
    return as_svg(figure)


def language(metrics: dict[str, Any]) -> str:
    """Reliability of the chosen token's probability, and fluency against diversity where texts were made."""
    points = metrics.get("curves", [])
    size = (10.0 if points else 4.6, 4.2)
    figure, axes = plt.subplots(1, 2 if points else 1, figsize=size, squeeze=False, layout="tight")
    left, right = axes[0, 0], axes[0, -1]
    _draw_diagonal(left, "probability of the chosen token", "how often it came")
    for name, colour, label in (("backbone", _GREY, "backbone's softmax"), ("ovr", _MAIN, "one-vs-rest")):
        probability, share, _ = zip(*metrics["reliability"][name], strict=True)
        left.plot(probability, share, marker="o", ms=3, color=colour, label=label)
    left.legend(frameon=False, loc="upper left")
    if points:
        colours = {"top-p": "black", "temperature": _GREY, "sample": _MAIN, "persona": _SECOND}
        for sampler in dict.fromkeys(point["sampler"] for point in points):
            curve = [(p["distinct_2"], p["perplexity"]) for p in points if p["sampler"] == sampler]
            right.plot(*zip(*curve, strict=True), marker="o", ms=4, label=sampler, color=colours.get(sampler))
        right.set(xlabel="distinct-2 (diversity)", ylabel="backbone's perplexity of the texts", yscale="log")
        right.legend(frameon=False)
    return as_svg(figure)
