"""How pictures are drawn, and the plot of one prediction; each is a matplotlib Figure."""

import html
import io
import sys
from typing import Any, cast

from causalqwen.extras import extra
from causalqwen.numbers import format_number, last_place
from causalqwen.numbers.law import LEVELS

with extra("plots", "a picture"):
    import matplotlib

    if "matplotlib.pyplot" not in sys.modules:  # a notebook that has chosen a backend keeps it
        matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAIN, _SECOND, _THIRD, _GREY = "#1f5fa8", "#c2571a", "#3c8d5a", "#8a8f98"

plt.rcParams.update(
    {
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#e6e8eb",
        "axes.edgecolor": _GREY,
        "axes.formatter.limits": (-5, 9),
        "axes.formatter.useoffset": False,
        "figure.dpi": 96,
        "svg.fonttype": "none",
        "svg.hashsalt": "causalqwen",
    }
)

_SHADES = {0.5: 0.4, 0.8: 0.25, 0.9: 0.14}


def plot_prediction(prediction: Any, value: float | None = None, axes: Axes | None = None, unit: str = "") -> Figure:
    """One `NumberPrediction`: its density, its intervals at 50, 80 and 90%, its median, and the truth where it is known.

    The density is the model's own law, per unit of the data; intervals are recalibrated where levels were fitted. A number of
    the context that may come again (`candidates`) is a bar of its probability against an axis of its own. Where no number is
    announced, all is grey, and the title says so.

    Args:
        axes: matplotlib's, to draw into; a new figure by default. unit: of the value, for the axis.
    """
    if axes is None:
        axes = Figure(figsize=(6.4, 3.4), layout="tight").subplots()
    curve, colour = prediction.curve(value=value), _MAIN if prediction.announced else _GREY
    if not prediction.announced:
        axes.set_title(f"no number is announced here (P_NUM {prediction.num_prob:.2g})", fontsize=10)
    for level in sorted(LEVELS, reverse=True):
        axes.axvspan(
            *prediction.interval(level), color=colour, alpha=_SHADES[level], lw=0, label=f"{level:.0%} interval"
        )
    candidates = getattr(prediction, "candidates", [])
    taken = {at for at, _ in candidates}
    axes.plot(
        *zip(*[(at, density) for at, density, _ in curve if at not in taken], strict=True),
        color=colour,
        label="density",
    )
    low, high = prediction.interval(0.9)
    median = format_number(prediction.median, place=last_place(prediction.median, high - low))
    axes.axvline(prediction.median, color="black", lw=1, label=f"median {median}")
    if value is not None:
        outside = "" if curve[0][0] <= value <= curve[-1][0] else ", outside the frame"
        axes.axvline(value, color=_SECOND, lw=1.5, ls="--", label=f"true value {format_number(value)}{outside}")
    axes.set(xlabel=unit or "value", ylabel="density", xlim=(curve[0][0], curve[-1][0]))
    axes.set_ylim(bottom=0)
    if candidates:
        bars = axes.twinx()
        bars.vlines(*zip(*[(at, 0.0, weight) for at, weight in candidates], strict=True), color=_GREY, lw=3)
        bars.set(ylabel="probability of a number of the text", ylim=(0, 1))
    axes.legend(frameon=False, fontsize=8)
    return cast(Figure, axes.figure)


def as_html(prediction: Any) -> str:
    """A prediction for a notebook: what `str` says, and its plot."""
    return f"<p>{html.escape(str(prediction))}</p>{as_svg(plot_prediction(prediction))}"


def as_svg(figure: Figure) -> str:
    """The figure as an <svg> element; the figure is closed."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
    text = buffer.getvalue()
    return text[text.index("<svg") :]
