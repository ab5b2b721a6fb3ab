"""Pages that are one file each, and open from a disk: the explorer's components draw what stands on them."""

import math
from pathlib import Path
from typing import Any

import jinja2
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from causalqwen.files import write_text
from causalqwen.modeling import NumberPrediction
from causalqwen.modeling.prediction import prediction_to_dict
from causalqwen.numbers import NumberStyle, format_number

_FOLDER = Path(__file__).parent
_POINTS = 100  # of a law that is drawn


def number_row(name: str, value: float | None, law: NumberPrediction | None, note: str = "") -> dict[str, Any]:
    """Return a number as pages draw it: what it is called, its value, and its distribution where it has one."""
    drawn = {} if law is None else prediction_to_dict(law, points=_POINTS, beside=value)
    return {"name": name, "note": note, "value": value} | drawn


def write_page(path: Path, template: str, **content: Any) -> None:
    """Render a template of this folder, every text escaped; the page appears by rename.

    Templates call `draw(component, ...)`, with its properties as plain data: the explorer's own components (`web/src/still.ts`)
    draw them when the page is opened.
    """
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(_FOLDER), autoescape=True)
    environment.filters["figure"] = figure
    drawn: list[str] = []

    def draw(component: str, **properties: Any) -> Markup:
        drawn.append(component)
        plain = htmlsafe_json_dumps(properties, allow_nan=False)
        return Markup('<div><script type="application/json" data-draw="{}">{}</script></div>').format(component, plain)

    def drawing() -> Markup:
        if not drawn:
            return Markup("")
        code = (_FOLDER / "drawing" / "drawing.js").read_text(encoding="utf-8")
        return Markup(f"<noscript>What is drawn on this page needs JavaScript.</noscript><script>{code}</script>")

    look = Markup((_FOLDER / "drawing" / "drawing.css").read_text(encoding="utf-8"))
    page = environment.get_template(template).render(**content, look=look, draw=draw, drawing=drawing)
    write_text(path, page)


def figure(value: float, digits: int = 4) -> str:
    """Return a value as pages show it: `digits` significant digits, never coarser than 1, thousands apart from 10,000 on."""
    if not math.isfinite(value):
        return str(value)
    rounded = round(value, max(digits - 1 - math.floor(math.log10(abs(value) or 1)), 0)) + 0.0  # not -0
    return format_number(rounded, NumberStyle(group="," if abs(rounded) >= 1e4 else ""))
