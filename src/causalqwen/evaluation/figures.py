"""Pictures as SVG text."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from causalqwen.modeling.plots import _GREY, _MAIN, _SECOND, _THIRD, Axes, as_svg, matplotlib, plt


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


def speed(results: dict[str, Any]) -> str:
    """What `benchmark_speed` measured: time and memory of the loss as it grows, and generation against the backbone's."""
    growth = results.get("growth", {})
    axes_of = [axis for axis in ("tokens", "vocabulary", "hidden") if axis in growth]
    rows = 1 + bool(results.get("generate"))
    figure = plt.figure(figsize=(12.0, 3.8 * rows))
    colours = dict(
        zip(
            next(iter(growth.values()), [{"seconds": {}}])[0]["seconds"],
            matplotlib.color_sequences["tab10"],
            strict=False,
        )
    )
    for place, axis_name in enumerate(axes_of):
        panel = figure.add_subplot(rows, 4, place + 1)
        for name in growth[axis_name][0]["seconds"]:
            points = [(row[axis_name], row["seconds"][name]) for row in growth[axis_name]]
            panel.plot(*zip(*points, strict=True), marker="o", ms=3, color=colours[name], label=name)
        panel.set(xlabel=axis_name, xscale="log", yscale="log", title="loss and gradients, s" if not place else "")
    if "tokens" in growth and "bytes" in growth["tokens"][0]:
        panel = figure.add_subplot(rows, 4, 4)
        for name in growth["tokens"][0]["bytes"]:
            points = [(row["tokens"], row["bytes"][name] / 2**20) for row in growth["tokens"]]
            panel.plot(*zip(*points, strict=True), marker="o", ms=3, color=colours[name], label=name)
        panel.set(xlabel="tokens", xscale="log", yscale="log", title="memory beside the inputs, MiB")
    if axes_of:
        figure.axes[0].legend(frameon=False, fontsize=7)
    if results.get("generate"):
        grid = figure.add_gridspec(rows, 4)
        panel = figure.add_subplot(grid[-1, :3])
        names = list(results["generate"][0]["speed_ratio"])
        width = 0.8 / len(results["generate"])
        for place, row in enumerate(results["generate"]):
            left = np.arange(len(names)) + place * width
            panel.bar(
                left, [row["speed_ratio"][name] for name in names], width, label=f"{row['model']}, batch {row['batch']}"
            )
        panel.set_xticks(np.arange(len(names)) + 0.4 - width / 2, names, rotation=15)
        panel.axhline(1.0, color="black", lw=0.8)
        panel.set(ylabel="tokens/s over the backbone's greedy generate")
        panel.legend(frameon=False, fontsize=7, ncol=2, loc="lower right")
        panel = figure.add_subplot(grid[-1, 3])
        first = [row for row in results["generate"] if row["model"] == results["generate"][0]["model"]]
        for name in names:
            points = [(row["batch"], row["tokens_per_second"][name]) for row in first]
            panel.plot(*zip(*points, strict=True), marker="o", ms=3, label=name)
        panel.set(xlabel="batch", xscale="log", yscale="log", title=f"generate, {first[0]['model']}, tokens/s")
        panel.legend(frameon=False, fontsize=6)
    figure.tight_layout()
    return as_svg(figure)


def numbers(results: dict[str, Any]) -> str:
    """What `benchmark numbers` gave: CRPS over the constant's, with bootstrap intervals, and coverage."""
    tables = {name: table["methods"] for name, table in results["tables"].items()}
    names = list(dict.fromkeys(name for rows in tables.values() for name in reversed(rows) if name != "constant"))
    figure, axes = plt.subplots(
        2, len(tables), figsize=(3.0 * len(tables) + 1.2, 0.6 * len(names) + 2.4), squeeze=False, sharey=True
    )
    for column, (table, rows) in enumerate(tables.items()):
        top, bottom = axes[:, column]
        for place, name in enumerate(names):
            if name not in rows:
                continue
            colour = _SECOND if name.startswith("causalqwen") else _MAIN
            if "crps" in rows[name]["over_constant"]:
                over = rows[name]["over_constant"]["crps"]
                top.plot([over["low"], over["high"]], [place, place], color=colour, lw=1.6)
                top.plot(over["mean"], place, "o", color=colour, ms=5)
            for level, mark in (("0.5", "o"), ("0.8", "s"), ("0.9", "D")):
                bottom.plot(rows[name][f"cover_{level}"], place + 0.12, mark, color=colour, ms=4)
                bottom.plot(rows[name][f"conformal_{level}"], place - 0.18, mark, color=_GREY, ms=3, fillstyle="none")
        top.axvline(1.0, color="black", lw=0.8)
        for nominal in (0.5, 0.8, 0.9):
            bottom.axvline(nominal, color="black", lw=0.8, ls=":")
        top.set(title=table, xlabel="CRPS over the constant's")
        bottom.set(xlabel="values inside 50/80/90% intervals\n(hollow: conformal)", xlim=(0.3, 1.02))
    axes[0, 0].set_yticks(range(len(names)), names)
    figure.tight_layout()
    return as_svg(figure)
