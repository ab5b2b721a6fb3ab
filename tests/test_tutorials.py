"""The tutorials: both languages have the same cells and outputs, and what they show is what their cells print."""

import re

import pytest

import tutorials
from tutorials import CHOSEN, FOLDER, NAMES, Shown, agree, cells_of, run, with_outputs

HEAD = "**You learn**", "**You need**", "**It takes**"


@pytest.mark.parametrize("name", NAMES)
def test_a_tutorial_has_a_head_cells_that_are_python_a_picture_and_an_exercise(name):
    path = FOLDER / f"{name}.md"
    text, cells = path.read_text(encoding="utf-8"), cells_of(path)
    assert len(cells) == text.count("{code-cell}") >= 5
    for cell in cells:
        compile(cell["code"], path.name, "exec")
    assert all(part in text for part in HEAD)
    drawn = [cell["picture"] for cell in cells if cell["picture"]]
    assert drawn and all((FOLDER / picture).exists() for picture in drawn)
    assert text.index("(pictures/") < text.index("\n## Exercise\n")
    assert f"({name}.md)" in (FOLDER / "index.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.zh.md")), ids=lambda path: path.name)
def test_the_chinese_tutorial_has_the_same_cells_and_outputs(path):
    english = path.with_name(path.name.replace(".zh.md", ".md"))
    assert [(c["code"], c["shown"], c["picture"]) for c in cells_of(path)] == [
        (c["code"], c["shown"], c["picture"]) for c in cells_of(english)
    ]
    links = [re.findall(r"\]\((?!http)([^)]+)\)", p.read_text(encoding="utf-8")) for p in (path, english)]
    assert len(links[0]) == len(links[1])


@pytest.mark.parametrize(
    ("printed", "same"), [("12.31 K", True), ("12.29 K", True), ("13.30 K", False), ("12.30 m", False)]
)
def test_figures_agree_but_for_rounding(printed, same):
    assert agree("12.30 K", printed) is same
    assert agree("3.8 nats", "4.0 nats") and not agree("3.8 nats", "4.1 nats")
    assert agree("3.8 nats", "8 nats", chosen=True) and not agree("3.8 nats", "8 bits", chosen=True)
    assert not agree("3.8 nats", "380 nats", chosen=True)


def test_outputs_are_written_behind_their_cells_and_errors_name_the_cell(tmp_path):
    path = tmp_path / "small.md"
    path.write_text(
        "One.\n\n```{code-cell} python\nx = 2\nprint(x)\n```\n\n```text\nold\n```\n\nTwo.\n\n"
        "```{code-cell} python\nfrom matplotlib.figure import Figure\nx;\nFigure()\n```\n\n![none](pictures/a.svg)\n\nEnd.\n"
    )
    first, second = run(path)
    assert first == Shown("2\n", None) and second.text == "" and second.picture.startswith("<svg")
    written = with_outputs(path.read_text(), [first, second])
    assert written == path.read_text().replace("old", "2")
    path.write_text("```{code-cell} python\n1 / 0\n```\n")
    with pytest.raises(ZeroDivisionError) as error:
        list(run(path))
    assert any(str(entry.path) == "small.md, cell 1" for entry in error.traceback)


@pytest.mark.slow
@pytest.mark.backbone
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", NAMES)
def test_a_tutorial_prints_what_it_shows(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tutorials.FOLDER / f"{name}.md"
    for number, (cell, made) in enumerate(zip(cells_of(path), run(path), strict=True), 1):
        shown, printed = (cell["shown"] or "").rstrip(), made.text.rstrip()
        same = agree(shown, printed, chosen=number in CHOSEN.get(name, ()))
        assert same, f"{name}, cell {number}: shown\n{shown}\nprinted\n{printed}"
