"""The pictures of docs/research/experiments/, from the tables that stand on the same pages. (seconds)

.venv/bin/python experiments/pictures.py [--output docs/research/experiments]
"""

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

PAGES = Path(__file__).parent.parent / "docs" / "research" / "experiments"
COLOURS = ("#2d6ca2", "#d2692c", "#7a9a3a", "#8a6fb0", "#888888")
Row = dict[str, str]


def rows_of(page: str, entry: str) -> list[Row]:
    """The first table of an entry ("8.7") of a page's Markdown: cells by the head of their column, without bold and code marks.

    ValueError where the page has no such entry, the entry no table, or the table two columns of one name.
    """
    sections = [s for s in re.split(r"^## ", page, flags=re.M) if s.startswith(f"{entry} ")]
    table = re.search(r"^\|.*(?:\n\|.*)+", sections[0], re.M) if sections else None
    if table is None:
        raise ValueError(f"entry {entry}: no table")
    head, _, *rest = (
        [cell.strip() for cell in re.sub("[*`]", "", line).split("|")[1:-1]] for line in table[0].splitlines()
    )
    if len(set(head)) < len(head):
        raise ValueError(f"entry {entry}: two columns of one name in {head}")
    return [dict(zip(head, cells, strict=True)) for cells in rest]


def figure_of(cell: str) -> float:
    """The number that a cell begins with: 4.4 of "4.4 (4.3 to 4.6)", 14780 of "14,780"."""
    return float(cell.split(" ")[0].replace(",", ""))


def bars(
    axes: Axes, groups: Sequence[str], columns: Sequence[str], cells: Callable[[int, str], tuple[float, str]]
) -> None:
    """Groups of bars, one bar for each column, each with the figure as it stands in the table."""
    width = 0.8 / len(columns)
    for place, (column, colour) in enumerate(zip(columns, COLOURS, strict=False)):
        heights, labels = zip(*(cells(at, column) for at in range(len(groups))), strict=True)
        at = [group + (place - (len(columns) - 1) / 2) * width for group in range(len(groups))]
        drawn = axes.bar(at, heights, 0.92 * width, color=colour, label=column)
        axes.bar_label(drawn, labels, fontsize=7, padding=2)
    axes.set_xticks(range(len(groups)), groups)
    axes.margins(y=0.15)
    axes.spines[["top", "right"]].set_visible(False)


def sentences(page: str) -> Figure:
    """CRPS on five tables over that of one distribution for all; the figures are those of the table, in units."""
    rows = [row for row in rows_of(page, "16.2") if not row[""].endswith("log scale")]
    figure = Figure(figsize=(10, 3.6), layout="tight")
    axes = figure.subplots()

    def cell(at: int, column: str) -> tuple[float, str]:
        return figure_of(rows[at][column]) / figure_of(rows[at]["one for all"]), rows[at][column]

    bars(axes, [row[""] for row in rows], ("train, defaults", "ridge", "pinball perceptron", "boosting"), cell)
    axes.axhline(1, color="black", lw=0.8)
    axes.set_ylabel("CRPS over that of one for all")
    axes.legend(frameon=False, fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.16))
    return figure


def tables(page: str) -> Figure:
    """CRPS and RMSE of a table with text, of the library and of those that one would use instead."""
    rows = rows_of(page, "15.7")
    names = [row["babies_r_us, dollars"] for row in rows]
    figure = Figure(figsize=(9, 1 + 0.4 * len(rows)), layout="tight")
    colours = [COLOURS[0], *[COLOURS[-1]] * (len(rows) - 1)]
    for axes, column in zip(figure.subplots(1, 2, sharey=True), ("CRPS", "RMSE"), strict=True):
        drawn = axes.barh(names, [figure_of(row[column]) for row in rows], color=colours)
        axes.bar_label(drawn, [row[column] for row in rows], fontsize=8, padding=3)
        axes.set(xlabel=f"{column}, dollars")
        axes.margins(x=0.15)
        axes.spines[["top", "right"]].set_visible(False)
    axes.invert_yaxis()
    return figure


def people(page: str) -> Figure:
    """Root mean square error of individuals over that of a linear mixed model; the figures are those of the table."""
    rows = rows_of(page, "8.7")
    figure = Figure(figsize=(13, 3.6), layout="tight")
    axes = figure.subplots()

    def cell(at: int, column: str) -> tuple[float, str]:
        return figure_of(rows[at][column]) / figure_of(rows[at]["mixed model"]), rows[at][column]

    bars(axes, [row[""].replace(", ", ",\n") for row in rows], ("RMSE", "mixed model"), cell)
    axes.tick_params("x", labelsize=8)
    axes.set_ylabel("RMSE over the mixed model's")
    axes.legend(
        ["individual", "linear mixed model"], frameon=False, fontsize=8, ncols=2, loc="upper center",
        bbox_to_anchor=(0.5, 1.18),
    )  # fmt: skip
    return figure


PICTURES = {"sentences": sentences, "tables": tables, "people": people}
"""Name of the picture, and of its page -> what draws it."""


def draw(name: str, page: str, output: Path) -> None:
    """Write one picture as SVG whose texts are texts, the same bytes each time."""
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        PICTURES[name](page).savefig(output, format="svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=PAGES)
    given = parser.parse_args()
    for name in PICTURES:
        page = (PAGES / f"{name}.md").read_text(encoding="utf-8")
        draw(name, page, given.output / f"{name}.svg")


if __name__ == "__main__":
    main()
