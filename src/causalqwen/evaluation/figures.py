"""Pictures as SVG text."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from causalqwen.modeling.plots import _GREY, _MAIN, _SECOND, _THIRD, Axes, as_svg, plt


def predicted_against_true(values: np.ndarray, columns: np.ndarray, unit: str, level: float, seed: int = 0) -> str:
    """`draw_predicted` as a picture of its own."""
    figure, axis = plt.subplots(figsize=(6.2, 5.2))
    draw_predicted(axis, values, columns, unit, level, seed)
    return as_svg(figure)


def draw_predicted(axis: Axes, values: np.ndarray, columns: np.ndarray, unit: str, level: float, seed: int = 0) -> None:
    """Medians against observations, with intervals. values [n]; columns [n, 3]: median, low, high end.

    All medians are drawn; the intervals of 60 numbers, chosen at random, because more would hide each other.
    """
    inside = (columns[:, 1] <= values) & (values <= columns[:, 2])
    for mask, colour, label in ((inside, _MAIN, "inside its interval"), (~inside, _SECOND, "outside")):
        axis.scatter(values[mask], columns[mask, 0], s=9, color=colour, alpha=0.65, linewidths=0, label=label)
    shown = np.random.default_rng(seed).permutation(len(values))[:60]
    axis.vlines(values[shown], columns[shown, 1], columns[shown, 2], color=_GREY, lw=0.8, alpha=0.6)
    away = np.abs(values - np.median(values))
    near = values[away <= (6 * np.median(away) or np.inf)]  # an outlier squeezes no other
    low, high = near.min(), near.max()
    margin = 0.1 * (high - low) or abs(high) or 1.0
    axis.plot([low - margin, high + margin], [low - margin, high + margin], color="black", lw=0.8)
    axis.set(xlim=(low - margin, high + margin), ylim=(low - margin, high + margin))
    hidden = int(((values < low - margin) | (values > high + margin)).sum())
    axis.set_xlabel(
        f"observed, {unit}" + (f" ({hidden} of {len(values)} numbers lie outside the frame)" if hidden else "")
    )
    axis.set_ylabel(f"predicted median, {unit}, and {level:.0%} interval")
    axis.legend(frameon=False, loc="upper left")


def calibration(central: np.ndarray, raw_levels: ArrayLike | None) -> str:
    """Coverage against nominal level, raw and recalibrated, and the distribution of |2 u - 1|, where an atom counts in parts.

    central: |2 u - 1| [n, parts] of held-out numbers, u the probability integral transform (`ValueLaw.spread_levels`).
    raw_levels: the raw level that stands for each of 0%, 1%, ..., 100%, where intervals were recalibrated: [101] for all
    numbers, or [n, 101].
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.6))
    wanted = np.linspace(0, 1, 101)
    raw = np.searchsorted(np.sort(central.ravel()), wanted, side="right") / central.size
    left.plot([0, 1], [0, 1], color="black", lw=0.8)
    left.plot(wanted, raw, color=_SECOND, label="raw")
    if raw_levels is not None:
        fitted = [(central <= level[..., None]).mean() for level in np.moveaxis(np.asarray(raw_levels), -1, 0)]
        left.plot(wanted, fitted, color=_MAIN, label="recalibrated on validation rows")
    left.set(xlabel="nominal level of the central interval", ylabel="held-out numbers inside", xlim=(0, 1), ylim=(0, 1))
    left.legend(frameon=False, loc="upper left")
    right.hist(central.ravel(), bins=20, range=(0, 1), density=True, color=_SECOND, alpha=0.75)
    right.axhline(1.0, color="black", lw=0.8)
    right.set(xlabel="raw central level of the observation", ylabel="density (1 if calibrated)")
    figure.tight_layout()
    return as_svg(figure)


def training_curves(records: Sequence[dict[str, Any]]) -> str:
    """Loss of the value head, and what was decided right, over the updates; from the records of `metrics.jsonl`."""
    figure, axes = plt.subplots(1, 2, figsize=(8.4, 3.4))
    panels = (
        (axes[0], "L_reg of values", (("train/reg_loss_effective", _GREY, "training"),
                                                    ("eval/reg_loss", _MAIN, "validation"))),
        (axes[1], "share of decisions", (("eval/accuracy", _MAIN, "right token"), ("eval/num_f1", _SECOND, "F1 of <NUM>"),
                                         ("eval/coverage_raw_0.9", _THIRD, "inside the raw 90% interval"))),
    )  # fmt: skip
    for axis, title, curves in panels:
        for key, colour, label in curves:
            points = [(record["step"], record[key]) for record in records if key in record]
            if points:
                axis.plot(*zip(*points, strict=True), color=colour, label=label)
        axis.set(xlabel="updates", title=title)
        axis.legend(frameon=False)
    figure.tight_layout()
    return as_svg(figure)


def language(metrics: dict[str, Any]) -> str:
    """Reliability of the chosen token's probability, and fluency against diversity where texts were made."""
    points = metrics.get("curves", [])
    figure, axes = plt.subplots(1, 2 if points else 1, figsize=(10.0 if points else 4.6, 4.2), squeeze=False)
    left = axes[0, 0]
    left.plot([0, 1], [0, 1], color="black", lw=0.8)
    looks = {
        "backbone": (_GREY, "backbone's softmax"),
        "ovr": (_MAIN, "one-vs-rest"),
    }
    for name, bins in metrics["reliability"].items():
        probability, share, _ = zip(*bins, strict=True)
        left.plot(probability, share, marker="o", ms=3, color=looks[name][0], label=looks[name][1])
    left.set(xlabel="probability of the chosen token", ylabel="how often it came", xlim=(0, 1), ylim=(0, 1))
    left.legend(frameon=False, loc="upper left")
    if points:
        right = axes[0, 1]
        colours = {
            "top-p": "black",
            "temperature": _GREY,
            "sample": _MAIN,
            "persona": _SECOND,
        }
        for sampler in dict.fromkeys(point["sampler"] for point in points):
            curve = [(p["distinct_2"], p["perplexity"]) for p in points if p["sampler"] == sampler]
            right.plot(*zip(*curve, strict=True), marker="o", ms=4, label=sampler, color=colours.get(sampler))
        right.set(xlabel="distinct-2 (diversity)", ylabel="backbone's perplexity of the texts", yscale="log")
        right.legend(frameon=False)
    figure.tight_layout()
    return as_svg(figure)
