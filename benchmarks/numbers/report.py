"""What the results say together: means over seeds, bootstrap intervals over test rows, the table and its picture."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.numbers.run import Benchmark
from benchmarks.numbers.scores import interval_of, resampled_means, row_scores
from causalqwen.modeling.plots import _MAIN, _SECOND, as_svg, plt
from causalqwen.numbers import ValueLaw
from causalqwen.training import LEVELS

Rows = list[dict[str, np.ndarray]]


def summary(benchmark: Benchmark, methods: Sequence[str], seeds: int) -> dict[str, Any]:
    """Table by table and method by method, of the results that are there.

    Of a method: means over seeds and test rows of `row_scores`, `median_error` (mean over seeds of the median), seconds,
    notes, and 95% bootstrap intervals over test rows: `interval` of crps and crps_log, `over_constant` of their ratio to
    the constant's, `over_best` of their paired difference to the method with the lowest mean.
    """
    report: dict[str, Any] = {"backbone": benchmark.backbone, "bf16": benchmark.bf16, "config": benchmark.config}
    report["tables"] = {}
    for name in benchmark.tables:
        scored: dict[str, Rows] = {}
        told: dict[str, list[dict[str, Any]]] = {}
        for method in methods:
            files = [benchmark.file(name, method, seed) for seed in range(seeds)]
            results = [read_result(file) for file in files if file.exists()]
            if results:
                told[method] = [about for about, _ in results]
                scored[method] = [row_scores(arrays, ValueLaw(value_range=about["range"])) for about, arrays in results]
        if scored:
            first = next(iter(told.values()))[0]
            report["tables"][name] = {key: first[key] for key in ("unit", "sizes")} | {
                "methods": {
                    method: _means(rows) | _seconds(told[method]) | _intervals(rows, scored)
                    for method, rows in scored.items()
                }
            }
    return report


def read_result(file: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What `Benchmark` wrote: about, and the arrays."""
    with np.load(file) as arrays:
        about = json.loads(str(arrays["about"]))
        return about | {"range": tuple(about["range"])}, {key: arrays[key] for key in arrays.files if key != "about"}


def _means(rows: Rows) -> dict[str, Any]:
    means = {name: float(np.mean([seed[name].mean() for seed in rows])) for name in rows[0] if name != "error"}
    return means | {"median_error": float(np.mean([np.median(seed["error"]) for seed in rows])), "seeds": len(rows)}


def _seconds(abouts: list[dict[str, Any]]) -> dict[str, Any]:
    keys = ("train_seconds", "predict_seconds")
    notes = {key: float(np.mean([about["notes"][key] for about in abouts])) for key in abouts[0]["notes"]}
    return {key: float(np.mean([about[key] for about in abouts])) for key in keys} | {"notes": notes}


def _intervals(rows: Rows, scored: dict[str, Rows]) -> dict[str, Any]:
    intervals: dict[str, Any] = {"interval": {}, "over_constant": {}, "over_best": {}}
    for key in ("crps", "crps_log"):
        column = {method: np.mean([seed[key] for seed in those], axis=0) for method, those in scored.items()}
        own = np.mean([seed[key] for seed in rows], axis=0)
        best = min(column.values(), key=lambda those: those.mean())
        means = resampled_means(own)
        intervals["interval"][key] = interval_of(means)
        intervals["over_best"][key] = interval_of(means - resampled_means(best))
        if "constant" in column:
            ratio = {"mean": float(own.mean() / column["constant"].mean())}
            intervals["over_constant"][key] = ratio | interval_of(means / resampled_means(column["constant"]))
    return intervals


def markdown(results: dict[str, Any]) -> str:
    """The summary as a table for each table of numbers. In bold: the lowest mean, and those whose paired difference to it may
    be 0."""
    lines = []
    for name, table in results["tables"].items():
        sizes = " / ".join(f"{size:,}" for size in table["sizes"])
        lines += [
            f"### {name}, {table['unit']} ({sizes} rows to train, validate and test)",
            "",
            "| method | CRPS | difference to the best | CRPS, log scale | median error | covered at 50/80/90% | log score "
            "| seconds to train | to predict 1,000 | seeds |",
            "|---|---|---|---|---|---|---|---|---|---|",
        ]
        for method, row in sorted(table["methods"].items(), key=lambda pair: pair[1]["crps"]):
            crps, logged = (
                f"**{row[key]:.4g}**" if row["over_best"][key]["low"] <= 0 else f"{row[key]:.4g}"
                for key in ("crps", "crps_log")
            )
            over = row["over_best"]["crps"]
            covered = "/".join(f"{100 * row[f'cover_{level}']:.0f}" for level in LEVELS)
            density = f"{row['log_score']:.3f}" if "log_score" in row else "–"
            lines.append(
                f"| {method} | {crps} | {over['low']:+.3g} to {over['high']:+.3g} | {logged} | {row['median_error']:.4g} "
                f"| {covered} | {density} | {row['train_seconds']:.3g} | {row['predict_seconds']:.3g} "
                f"| {row['seeds']} |"
            )
        lines.append("")
    return "\n".join(lines)


def picture(results: dict[str, Any]) -> str:
    """CRPS over the constant's, with bootstrap intervals, and coverage."""
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
                bottom.plot(rows[name][f"cover_{level}"], place, mark, color=colour, ms=4)
        top.axvline(1.0, color="black", lw=0.8)
        for nominal in (0.5, 0.8, 0.9):
            bottom.axvline(nominal, color="black", lw=0.8, ls=":")
        top.set(title=table, xlabel="CRPS over the constant's")
        bottom.set(xlabel="values inside 50/80/90% intervals", xlim=(0.3, 1.02))
    axes[0, 0].set_yticks(range(len(names)), names)
    figure.tight_layout()
    return as_svg(figure)
