"""Documentation: citations resolve, named tests exist, commands are real, and nothing speaks of one machine."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from causalqwen_cli.app import app

ROOT = Path(__file__).parent.parent
THEORY = (ROOT / "docs" / "theory.md").read_text(encoding="utf-8")
THEORY_ZH = (ROOT / "docs" / "theory.zh.md").read_text(encoding="utf-8")
EXPERIMENTS = (ROOT / "docs" / "experiments.md").read_text(encoding="utf-8")
SOURCES = [p for folder in ("src", "tests", "experiments") for p in sorted((ROOT / folder).rglob("*.py"))]
DOCS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
CITATION = re.compile(r"\b(theory|overview|foundations|inference|architecture|experiments) (\d+(?:\.\d+)*)")


@pytest.mark.parametrize("theory", [THEORY, THEORY_ZH], ids=["en", "zh"])
def test_every_citation_resolves(theory):
    headings = set(re.findall(r"^#+ (\d+(?:\.\d+)*)", theory, re.M))
    entries = set(re.findall(r"^## (\d+)", EXPERIMENTS, re.M))
    rows = set(re.findall(r"^\| (\w+ \d+(?:\.\d+)*) \|", theory, re.M))
    cited = {match for path in [*SOURCES, *DOCS] for match in CITATION.findall(path.read_text(encoding="utf-8"))}
    assert len(cited) > 25
    for name, place in sorted(cited):
        known = {"theory": headings, "experiments": entries}.get(name)
        assert (place in known) if known is not None else (f"{name} {place}" in rows), f"{name} {place}"


def test_tests_and_code_that_the_theory_names_exist():
    code = "\n".join(path.read_text(encoding="utf-8") for path in SOURCES)
    named = set(re.findall(r"`(test_\w+)`", THEORY + THEORY_ZH + EXPERIMENTS))
    assert len(named) >= 5
    for name in named:
        assert f"def {name}(" in code, name
    for path in re.findall(r"`((?:\w+/)+\w*\.?\w*)`", THEORY):
        assert (ROOT / "src" / "causalqwen" / path).exists(), path


def test_both_languages_say_the_same_things():
    for english in DOCS:
        chinese = english.with_name(english.stem + ".zh.md")
        if not chinese.exists():
            continue
        texts = [path.read_text(encoding="utf-8") for path in (english, chinese)]
        # As many sections, table rows, code blocks and figures with a decimal point.
        for pattern in (r"^#+ ", r"^\|", r"^```", r"\b\d+\.\d+\b"):
            counts = [len(re.findall(pattern, text, re.M)) for text in texts]
            assert counts[0] == counts[1], (english.name, pattern, counts)
    assert (ROOT / "README.zh.md").exists()


def test_commands_in_the_documents_are_real():
    """Every `causalqwen ...` in a document names a command, and every option that it shows is one of that command's."""
    help_texts: dict[str, str] = {}
    found = 0
    for path in DOCS:
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        for name, rest in re.findall(
            r"\bcausalqwen (graft|train|predict|generate|evaluate|serve|demo|doctor)\b([^\n`]*)", text
        ):
            if name not in help_texts:
                help_texts[name] = CliRunner(env={"COLUMNS": "200"}).invoke(app, [name, "--help"]).output
            for option in re.findall(r"(--[a-z-]+)", rest):
                assert option in help_texts[name], f"{path.name}: causalqwen {name} {option}"
            found += 1
    assert found > 10


def test_make_targets_in_the_documents_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for path in DOCS:
        for target in re.findall(r"`make ([a-z-]+)", path.read_text(encoding="utf-8")):
            assert re.search(rf"^{target}:", makefile, re.M), f"{path.name}: make {target}"


def test_links_between_documents_lead_somewhere():
    for path in DOCS:
        for target in re.findall(r"\]\((?!http)([^)#]+)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_the_readmes_tree_lists_every_room():
    for name in ("README.md", "README.zh.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        rooms = [p.name for p in (ROOT / "src" / "causalqwen").iterdir() if p.is_dir() and not p.name.startswith("_")]
        for room in [*rooms, "causalqwen_cli", "experiments", "docs", "tests", "Makefile"]:
            assert re.search(rf"^\W*(?:src/)?{room}\b", text, re.M), f"{name}: {room}"


def test_nothing_names_one_machine():
    home = re.compile(r"(?<![\w.$~])/(?:home|root|work|Users)/\w")
    for path in [*SOURCES, *DOCS, ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / "constraints.txt"]:
        if path.name != "test_docs.py":
            assert not home.search(path.read_text(encoding="utf-8")), path
