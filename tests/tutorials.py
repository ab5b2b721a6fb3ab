"""The tutorials (docs/tutorials): run their cells, and write behind each what it printed, and the picture that it ends with.

    .venv/bin/python tests/tutorials.py           all, on the real backbone (minutes): read the diff before you commit it
    .venv/bin/python tests/tutorials.py NAME ...  some

A tutorial is a MyST notebook. What a cell printed stands in a `text` block right behind it; a cell whose last line is a figure
has a line ![what it shows](pictures/NAME.svg) there. The Chinese tutorial has the same cells, and gets the same outputs.
"""

import ast
import contextlib
import io
import math
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parents[1] / "docs" / "tutorials"
NAMES = "numbers", "worlds", "people", "lora", "serve", "graft", "documents"
CELL = re.compile(
    r"^```\{code-cell\} python\n(?P<code>.*?)^```\n"
    r"(?P<output>\n```text\n(?P<shown>.*?)^```\n)?"
    r"(?P<image>\n!\[[^\]]+\]\((?P<picture>[^)]+)\)\n)?",
    re.M | re.S,
)
CHOSEN = {"numbers": (3, 4, 5, 6), "lora": (4, 5)}
"""Cells whose figures follow from what some eighty rows choose, or from 24 updates at a high rate: a processor that rounds
otherwise may come out elsewhere."""
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?")


class Shown(NamedTuple):
    """What a cell printed, "" for nothing, and its picture as SVG."""

    text: str
    picture: str | None


def cells_of(path: Path) -> list[re.Match]:
    """The cells of a tutorial, in their order."""
    return list(CELL.finditer(path.read_text(encoding="utf-8")))


def run(path: Path) -> Iterator[Shown]:
    """What the cells of a tutorial show, one after the other in one session, as a notebook does. They run in this folder."""
    session: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(cells_of(path), 1):
        place, lines, printed = f"{path.name}, cell {number}", ast.parse(cell["code"]).body, io.StringIO()
        last = lines.pop() if isinstance(lines[-1], ast.Expr) else None
        with contextlib.redirect_stdout(printed):
            exec(compile(ast.Module(lines, []), place, "exec"), session)
            value = None if last is None else eval(compile(ast.Expression(last.value), place, "eval"), session)
            is_figure = hasattr(value, "savefig")
            if value is not None and not is_figure and not cell["code"].rstrip().endswith(";"):
                print(value)
        if is_figure != bool(cell["picture"]):
            raise ValueError(f"{place}: a last line that is a figure and a line ![...](pictures/...) go together")
        yield Shown(printed.getvalue(), _svg(value) if is_figure else None)


def _svg(figure: Any) -> str:
    from causalqwen.modeling.plots import as_svg

    return as_svg(figure)


def agree(shown: str, printed: str, *, chosen: bool = False) -> bool:
    """Equal, but for rounding in numbers: 2%, or two units of the last digit that is shown. chosen: see `CHOSEN`; words and the
    count of numbers are equal then, and no number is ten times another."""
    if _NUMBER.sub("#", shown) != _NUMBER.sub("#", printed):
        return False
    pairs = zip(_NUMBER.findall(shown), _NUMBER.findall(printed), strict=True)
    return all(
        math.isclose(
            *(float(number.replace(",", "")) for number in pair),
            rel_tol=0.9 if chosen else 0.02,
            abs_tol=2.001 * 10.0 ** -len(pair[0].partition(".")[2]),  # 4.0 - 3.8 is a little more than 0.2
        )
        for pair in pairs
    )


def with_outputs(text: str, shown: list[Shown]) -> str:
    """The text of a tutorial with these outputs in the place of those that stand there."""
    each = iter(shown)

    def behind(cell: re.Match) -> str:
        printed = next(each).text
        output = f"\n```text\n{printed.rstrip()}\n```\n" if printed.strip() else ""
        return f"```{{code-cell}} python\n{cell['code']}```\n{output}{cell['image'] or ''}"

    return CELL.sub(behind, text)


def write_outputs(name: str) -> None:
    """Run a tutorial in an empty folder; then write its outputs in both languages, and its pictures."""
    path, before = FOLDER / f"{name}.md", Path.cwd()
    with tempfile.TemporaryDirectory(prefix="causalqwen-") as folder:
        os.chdir(folder)
        try:
            shown = list(run(path))
        finally:
            os.chdir(before)
    for cell, (_, picture) in zip(cells_of(path), shown, strict=True):
        if picture is not None:
            (FOLDER / cell["picture"]).write_text(picture, encoding="utf-8")
    for file in (path, path.with_suffix(".zh.md")):
        if file.exists():
            file.write_text(with_outputs(file.read_text(encoding="utf-8"), shown), encoding="utf-8")


if __name__ == "__main__":
    for asked in sys.argv[1:] or NAMES:
        print(asked, file=sys.stderr)
        write_outputs(asked)
