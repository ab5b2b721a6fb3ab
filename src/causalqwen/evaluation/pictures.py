"""Pictures of individuals and of their worlds, as SVG text for a page that is light or dark."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from causalqwen.evaluation.figures import Axes, Figure, as_svg, matplotlib, plt
from causalqwen.evaluation.worlds import LEVEL, WorldNumber

_COLOURS = ("#3a7cc9", "#d2692c", "#3c9a64", "#a860b8", "#b08a1e", "#2a9aa5", "#c9507b", "#7d7f86")
_MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")  # beside the colours, so that neither is needed alone
_SHOWN_NUMBERS = 3
_ON_ANY_PAGE: Any = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "grid.color": (0.54, 0.56, 0.6, 0.25),
    "text.parse_math": False,  # names may hold dollar signs
}


def _look(place: int) -> tuple[str, str]:
    return _COLOURS[place % len(_COLOURS)], _MARKS[place % len(_MARKS)]


def _svg(figure: Figure) -> str:
    """The figure in the page's own text colour."""
    return as_svg(figure).replace("#000000", "currentColor")


def values_in_worlds(
    people: Sequence[str], worlds: Sequence[str], numbers: Sequence[Sequence[Sequence[Sequence[WorldNumber]]]]
) -> str | None:
    """The first values of each world with their intervals, a panel each; None where no world predicts any.

    numbers: of each individual, in each world, of each of its texts, in their order.
    """
    texts = [text for of_person in numbers for cell in of_person for text in cell]
    most = min(max((len(text) for text in texts), default=0), _SHOWN_NUMBERS)
    if not any(number.low is not None for text in texts for number in text[:most]):
        return None
    lines = sum(len(cell) for of_person in numbers for cell in of_person)
    with matplotlib.rc_context(_ON_ANY_PAGE):
        figure, axes = plt.subplots(1, most, figsize=(3.6 * most + 1.6, 1.1 + 0.24 * lines), sharey=True, squeeze=False)
        for index, axis in enumerate(axes[0]):
            _values_panel(axis, worlds, numbers, index)
            axis.set(xlabel=f"value {index + 1} of the text", yticks=_person_heights(numbers), yticklabels=people)
        axes[0, 0].invert_yaxis()
        handles, names = [], []
        for axis in axes[0]:
            for handle, name in zip(*axis.get_legend_handles_labels(), strict=True):
                if name not in names:
                    handles.append(handle)
                    names.append(name)
        figure.legend(
            handles, names, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=min(len(names), 4)
        )
        figure.tight_layout()
        return _svg(figure)


def _heights(numbers: Sequence[Sequence[Sequence]]) -> list[list[list[float]]]:
    """A line per text, a gap between individuals."""
    heights: list[list[list[float]]] = []
    at = 0.0
    for of_person in numbers:
        heights.append([])
        for cell in of_person:
            heights[-1].append([at + place for place in range(len(cell))])
            at += len(cell)
        at += 0.8
    return heights


def _person_heights(numbers: Sequence[Sequence[Sequence]]) -> list[float]:
    return [float(np.mean([y for cell in of_person for y in cell])) for of_person in _heights(numbers)]


def _values_panel(axis: Axes, worlds: Sequence[str], numbers: Sequence[Sequence[Sequence]], index: int) -> None:
    heights = _heights(numbers)
    for person, of_person in enumerate(numbers):
        for place, cell in enumerate(of_person):
            colour, mark = _look(place)
            for line, text in enumerate(cell):
                if len(text) <= index:
                    continue
                number, y = text[index], heights[person][place][line]
                if number.low is not None:
                    axis.plot([number.low, number.high], [y, y], color=colour, lw=2.5, alpha=0.5, solid_capstyle="butt")
                label = worlds[place] if number.low is not None else f"{worlds[place]} (set)"
                face = colour if number.low is not None else "none"
                axis.plot(number.value, y, mark, color=colour, markerfacecolor=face, ms=5, label=label, ls="none")
    axis.grid(axis="y", visible=False)


def map_of_individuals(
    names: Sequence[str], points: np.ndarray, covariances: np.ndarray, share: float, known: bool
) -> str:
    """Where individuals lie: points [n, 2] with the ellipses that hold `LEVEL` of their posteriors, covariances [n, 2, 2].

    share: of the squared distances between them that the plane shows. known: whether any has a width, which is then the unit.
    Nobody in particular is at the origin.
    """
    radius = math.sqrt(-2 * math.log(1 - LEVEL))
    with matplotlib.rc_context(_ON_ANY_PAGE):
        figure, axis = plt.subplots(figsize=(6.4, 5.0))
        axis.plot(0, 0, "+", color=_COLOURS[-1], ms=12, mew=2, ls="none", label="nobody in particular")
        for place, (name, point, covariance) in enumerate(zip(names, points, covariances, strict=True)):
            colour, mark = _look(place)
            sizes, along = np.linalg.eigh(covariance)
            wide, high = 2 * radius * np.sqrt(sizes.clip(0))
            angle = math.degrees(math.atan2(along[1, 0], along[0, 0]))
            axis.add_patch(
                matplotlib.patches.Ellipse(tuple(point), wide, high, angle=angle, facecolor=colour, alpha=0.15, lw=0)
            )
            axis.add_patch(
                matplotlib.patches.Ellipse(
                    tuple(point), wide, high, angle=angle, facecolor="none", edgecolor=colour, lw=1.2
                )
            )
            axis.plot(*point, mark, color=colour, ms=7, ls="none", label=name)
        axis.autoscale_view()
        axis.set_aspect("equal", adjustable="datalim")
        unit = "posterior standard deviations" if known else "units of Φ⁻¹(e1)"
        axis.set(xlabel=f"the direction that tells most, {unit}", ylabel=f"the next one, {unit}")
        axis.set_title(f"{share:.0%} of the squared distances between them", fontsize=10)
        axis.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        return _svg(figure)


def coordinates(places: Sequence[int], means: np.ndarray, widths: np.ndarray) -> str:
    """Coordinates of Φ⁻¹(e1) as bars with their posterior standard deviations, from the top."""
    with matplotlib.rc_context(_ON_ANY_PAGE):
        figure, axis = plt.subplots(figsize=(6.4, 0.8 + 0.22 * len(places)))
        y = np.arange(len(places))
        axis.barh(y, means, color=_COLOURS[0], alpha=0.75)
        axis.errorbar(means, y, xerr=widths, fmt="none", ecolor="#000000", elinewidth=1, capsize=2)
        axis.axvline(0, color="#000000", lw=0.8)
        axis.set(
            yticks=y, yticklabels=[str(place) for place in places], ylabel="coordinate", ylim=(len(places) - 0.4, -0.6)
        )
        axis.set_xlabel("Φ⁻¹(e1), and one posterior standard deviation")
        axis.grid(axis="y", visible=False)
        return _svg(figure)
