"""What was measured, as text and as a picture."""

from typing import Any

import numpy as np

from causalqwen.modeling.plots import Axes, as_svg, plt


def table(results: dict[str, Any]) -> str:
    """The results as text."""
    lines = [f"{part}: on {device}" for part, device in results.get("devices", {}).items() if device != "cpu"]
    for row in results.get("loss", []):
        weight = "frozen" if row["frozen"] else "trained"
        lines.append(f"{row['tokens']:,} x {row['vocabulary']:,} x {row['hidden']}, {row['dtype']}, weight {weight}")
        for name, ratio in row["time_ratio"].items():
            memory = f"{row['memory_ratio'][name]:6.2f} x memory" if "memory_ratio" in row else ""
            lines.append(f"  {name:36} {ratio:6.2f} x time {memory}")
    for row in results.get("generate", []) + [results[part] for part in ("ways",) if part in results]:
        lines.append(f"generate, {row['model']}, batch {row['batch']}: tokens/s over the backbone's greedy generate")
        lines.append("  " + "  ".join(f"{name} {ratio:.2f}" for name, ratio in row["speed_ratio"].items()))
    if "epochs" in results:
        lines.append("an epoch, times faster than LoRA on the whole vocabulary")
        lines += [f"  {name:36} {ratio:6.1f}" for name, ratio in results["epochs"]["times_faster"].items()]
    if "tokenizer" in results:
        lines.append(f"text to tensors: {results['tokenizer']['speed_ratio']:.2f} x the bare tokenizer's speed")
    return "\n".join(lines)


def picture(results: dict[str, Any]) -> str:
    """Time and memory of the loss as it grows, and generation against the backbone's, as SVG."""
    growth, generated = results.get("growth", {}), results.get("generate", [])
    rows = 1 + bool(generated)
    figure = plt.figure(figsize=(12.0, 3.8 * rows), layout="tight")
    grid = figure.add_gridspec(rows, 4)
    for place, axis in enumerate(axis for axis in ("tokens", "vocabulary", "hidden") if axis in growth):
        panel = figure.add_subplot(grid[0, place], title="" if place else "loss and gradients, s")
        _curves(panel, growth[axis], axis, "seconds")
        if not place:
            panel.legend(frameon=False, fontsize=7)
    if "tokens" in growth and "bytes" in growth["tokens"][0]:
        panel = figure.add_subplot(grid[0, 3], title="memory beside the inputs, bytes")
        _curves(panel, growth["tokens"], "tokens", "bytes")
    if generated:
        panel = figure.add_subplot(grid[-1, :3], ylabel="tokens/s over the backbone's greedy generate")
        names, width = list(generated[0]["speed_ratio"]), 0.8 / len(generated)
        for place, row in enumerate(generated):
            left, label = np.arange(len(names)) + place * width, f"{row['model']}, batch {row['batch']}"
            panel.bar(left, list(row["speed_ratio"].values()), width, label=label)
        panel.set_xticks(np.arange(len(names)) + 0.4 - width / 2, names, rotation=15)
        panel.axhline(1.0, color="black", lw=0.8)
        panel.legend(frameon=False, fontsize=7, ncol=2, loc="lower right")
        first = generated[0]["model"]
        panel = figure.add_subplot(grid[-1, 3], title=f"generate, {first}, tokens/s")
        _curves(panel, [row for row in generated if row["model"] == first], "batch", "tokens_per_second")
        panel.legend(frameon=False, fontsize=6)
    return as_svg(figure)


def _curves(panel: Axes, rows: list[dict[str, Any]], axis: str, what: str) -> None:
    """A line for each case of what was measured."""
    for name in rows[0][what]:
        panel.plot([row[axis] for row in rows], [row[what][name] for row in rows], marker="o", ms=3, label=name)
    panel.set(xlabel=axis, xscale="log", yscale="log")
