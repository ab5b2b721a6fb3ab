"""Documentation: citations resolve, named tests exist, commands are real, and nothing speaks of one machine."""

import ast
import functools
import importlib
import importlib.util
import inspect
import re
import runpy
import subprocess
import sys
from pathlib import Path
from unittest.mock import create_autospec

import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner

import causalqwen_vllm
import mutations
from causalqwen import Individual
from causalqwen.parts.compatibility import NEEDS
from causalqwen.training.settings import STAGES, TrainSettings
from causalqwen_cli.app import app
from causalqwen_vllm import client
from causalqwen_vllm.request_options import RequestOptions
from conftest import graft_tiny, make_backbone
from test_serving import serving

ROOT = Path(__file__).parent.parent
FOLDERS = ("src", "benchmarks", "tests", "experiments", "examples")
SOURCES = {p: p.read_text(encoding="utf-8") for folder in FOLDERS for p in sorted((ROOT / folder).rglob("*.py"))}
DOCS = {p: p.read_text(encoding="utf-8") for p in [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]}
RESEARCH = ROOT / "docs" / "research"
THEORY, THEORY_ZH = (DOCS[ROOT / "docs" / name] for name in ("theory.md", "theory.zh.md"))
CLAIMS, CLAIMS_ZH, INDEX, INDEX_ZH = (
    DOCS[RESEARCH / name] for name in ("claims.md", "claims.zh.md", "index.md", "index.zh.md")
)
LOG = {path.name: text for path, text in DOCS.items() if path.parent.name == "experiments"}
PAGES = {name: page for name, page in LOG.items() if not name.endswith(".zh.md")}
PAGES_ZH = {name: page for name, page in LOG.items() if name.endswith(".zh.md")}
CITATION = re.compile(r"\b(theory|overview|foundations|inference|architecture|experiments) (\d+(?:\.\d+)*)")

VERDICTS = {"true": "成立", "false": "不成立", "true only if": "仅当"}


def table_rows(text: str, columns: int) -> list[list[str]]:
    """Cells of every table row of `text`, headers left out; a bar inside a cell is written \\|."""
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line.startswith("|")]
    assert all(len(row) == columns for row in rows), [row for row in rows if len(row) != columns]
    rules = [place for place, row in enumerate(rows) if set(row[0]) == {"-"}]
    heads = {place - back for place in rules for back in (0, 1)}
    return [[cell.strip() for cell in row] for place, row in enumerate(rows) if place not in heads]


def claims_section(text: str, number: int, columns: int) -> list[list[str]]:
    """Rows of the tables of a numbered section of research/claims.md."""
    return table_rows(text.split(f"\n## {number}. ")[1].split("\n## ")[0], columns)


@functools.cache
def functions_of(path: str) -> frozenset[str]:
    """Names of the test functions of a file; none where there is no such file."""
    body = ast.parse(SOURCES.get(ROOT / path, "")).body
    return frozenset(n.name for n in body if isinstance(n, ast.FunctionDef) and n.name.startswith("test_"))


def named_tests(cell: str) -> list[str]:
    """Tests named in a cell, each of which has to exist."""
    names = re.findall(r"`([^`]+)`", cell)
    for name in names:
        path, _, test = name.partition("::")
        assert test in functions_of(path), name
    return names


def resolve(name: str) -> object:
    """The object below `causalqwen` that a dotted name leads to; AttributeError or ImportError where there is none."""
    parts = ["causalqwen", *name.split(".")]
    for size in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:size]))
        except ModuleNotFoundError:
            continue
        for part in parts[size:]:
            found = getattr(found, part)
        return found
    raise ImportError(name)


@pytest.mark.parametrize(("theory", "claims"), [(THEORY, CLAIMS), (THEORY_ZH, CLAIMS_ZH)], ids=["en", "zh"])
def test_every_citation_resolves(theory, claims):
    headings = set(re.findall(r"^#+ (\d+(?:\.\d+)*)", theory, re.M))
    entries = {number for page in PAGES.values() for number in re.findall(r"^## (\d+\.\d+) ", page, re.M)}
    entries |= {number.split(".")[0] for number in entries}
    rows = set(re.findall(r"^\| (\w+ \d+(?:\.\d+)*) \|", claims, re.M))
    cited = {match for text in (SOURCES | DOCS).values() for match in CITATION.findall(text)}
    assert len(cited) > 25
    for name, place in sorted(cited):
        known = {"theory": headings, "experiments": entries}.get(name)
        assert (place in known) if known is not None else (f"{name} {place}" in rows), f"{name} {place}"


def anchor(heading: str) -> str:
    """What GitHub and MyST call a heading in a link."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize(
    ("index", "pages", "title"), [(INDEX, PAGES, "By number"), (INDEX_ZH, PAGES_ZH, "按编号")], ids=["en", "zh"]
)
def test_the_log_leads_to_every_entry(index, pages, title):
    """By its question, in the words of its heading, and by its number; in the order of numbers on each page."""
    headings = {}
    for name, page in pages.items():
        found = re.findall(r"^## ((\d+\.\d+) (.*))$", page, re.M)
        numbers = [tuple(map(int, number.split("."))) for _, number, _ in found]
        assert numbers == sorted(numbers), name
        assert not headings.keys() & {number for _, number, _ in found}, name
        headings |= {number: (f"experiments/{name}#{anchor(whole)}", asked) for whole, number, asked in found}
    by_question, by_number = index.split(f"\n## {title}")
    links = re.findall(r"^\| \[([\d.]+)\]\(([^)]*)\)(, older|，旧)? \| (.*?) \| .+ \|$", by_question, re.M)
    assert {number: (target, asked) for number, target, _, asked in links} == headings
    assert len(links) == len(headings)
    assert all(bool(older) == ("/archive." in target) for _, target, older, _ in links)
    for number, _, entries in table_rows(by_number, 3):
        found = re.findall(r"\[([\d.]+)\]\(([^)]*)\)", entries)
        of_number = {n: place for n, (place, _) in headings.items() if f"experiments {n.split('.')[0]}" == number}
        assert dict(found) == of_number, number
    assert len(table_rows(by_number, 3)) == len({number.split(".")[0] for number in headings})


def test_the_chinese_index_leads_to_the_same_entries():
    """Its lines are of the same entries, in the same order; each says something of its own."""
    lines = [re.findall(r"^\| (\[.*?\](?=\()|experiments \d+)", text, re.M) for text in (INDEX, INDEX_ZH)]
    assert lines[0] == lines[1]
    rows = [table_rows(text.split("\n## By number")[0].split("\n## 按编号")[0], 3) for text in (INDEX, INDEX_ZH)]
    assert all(re.search(r"[\u4e00-\u9fff]", "".join(row[1:])) for row in rows[1])
    for english, other in zip(*rows, strict=True):  # one that moves to archive.md does so in both
        assert english[0].endswith("older") == other[0].endswith("旧"), english[0]


@pytest.mark.parametrize("name", PAGES_ZH)
def test_a_chinese_page_of_the_log_has_the_same_entries_commands_and_pictures(name):
    for pattern in (r"^## (\d+\.\d+) ", r"^    .*$", r"^!\[[^\]]*\]\((.*)\)$"):
        found = [re.findall(pattern, page, re.M) for page in (PAGES[name.replace(".zh.md", ".md")], LOG[name])]
        assert found[0] == found[1], pattern


@pytest.mark.parametrize(("name", "word"), [("archive.md", "**Older**"), ("archive.zh.md", "**旧**")], ids=["en", "zh"])
def test_every_older_entry_says_what_it_is_of(name, word):
    entries = re.split(r"^## ", LOG[name], flags=re.M)[1:]
    assert len(entries) > 10
    for entry in entries:
        assert entry.splitlines()[1].startswith(word), entry[:60]


PICTURES = runpy.run_path(str(ROOT / "experiments" / "pictures.py"), run_name="imported")


def svg_texts(path: Path) -> list[str]:
    """Texts of an SVG, and the ids that hold figures."""
    return re.findall(r'<text[^>]*>([^<]*)</text>|<g id="([^"]*\[[^"]*)"', path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", PICTURES["PICTURES"])
def test_a_picture_of_the_log_is_of_the_table_beside_it(tmp_path, name):
    """The file says what the table says, and another table makes another picture."""
    page = PAGES[f"{name}.md"]
    assert f"]({name}.svg)" in page
    PICTURES["draw"](name, page, tmp_path / "drawn.svg")
    texts = svg_texts(tmp_path / "drawn.svg")
    assert texts == svg_texts(RESEARCH / "experiments" / f"{name}.svg")
    cell = {"sentences": "60.76", "tables": "5.66", "people": "42.18"}[name]
    PICTURES["draw"](name, page.replace(cell, "9" + cell), tmp_path / "other.svg")
    assert svg_texts(tmp_path / "other.svg") != texts


def test_tests_and_code_that_the_theory_names_exist():
    code = "\n".join(SOURCES.values())
    named = set(re.findall(r"`(test_\w+)`", THEORY + THEORY_ZH + "".join(LOG.values())))
    assert len(named) >= 5
    for name in named:
        assert f"def {name}(" in code, name
    for path in re.findall(r"`((?:\w+/)+\w*\.?\w*)`", THEORY):
        assert (ROOT / "src" / "causalqwen" / path).exists(), path


def test_every_claim_has_a_verdict_and_evidence_that_exists():
    rows = claims_section(CLAIMS, 1, 5)
    assert len(rows) >= 30
    counts = dict.fromkeys(VERDICTS, 0)
    for claim, where, verdict, fact, shown in rows:
        bare = verdict.strip("*")
        assert bare in VERDICTS, f"{claim}: no verdict"
        counts[bare] += 1
        assert where, claim
        tests = named_tests(shown)
        assert tests or re.search(r"experiments \d", fact), f"{claim}: nothing shows it"
    opening = CLAIMS[: CLAIMS.index("\n## ")]
    assert list(map(int, re.findall(r"\d+", opening))) == [len(rows), *counts.values()], counts


def test_the_ledger_says_the_same_in_both_languages():
    for english, chinese in zip(claims_section(CLAIMS, 1, 5), claims_section(CLAIMS_ZH, 1, 5), strict=True):
        assert english[1].replace(", ", "、") == chinese[1]
        assert VERDICTS[english[2].strip("*")] == chinese[2].strip("*"), english[0]
        assert english[4] == chinese[4], english[0]
    numbers = [re.findall(r"\d+", text[: text.index("\n## ")]) for text in (CLAIMS, CLAIMS_ZH)]
    assert numbers[0] == numbers[1]


def test_every_system_has_a_test_that_exists():
    for text in (CLAIMS, CLAIMS_ZH):
        rows = claims_section(text, 2, 4)
        assert len(rows) > 25
        for system, how, shown, _ in rows:
            assert how, system
            names = re.findall(r"`(tests/[^`]+)`", shown)
            assert names or "experiments/" in how, system
            for path, _, test in (name.partition("::") for name in names):
                assert test in functions_of(path) if test else (ROOT / path).is_file(), (path, test)


@pytest.mark.parametrize("claims", [CLAIMS, CLAIMS_ZH], ids=["en", "zh"])
def test_every_equation_leads_to_a_function_and_a_test(claims):
    rows = claims_section(claims, 5, 5)
    assert len(rows) >= 20
    places = [[int(part) for part in re.findall(r"\d+", where)] for where, *_ in rows]
    assert places == sorted(places), "not in the order of the overview"
    for _, equation, _, functions, tests in rows:
        names = re.findall(r"`([^`]+)`", functions)
        assert names and named_tests(tests), equation
        for name in names:
            assert callable(resolve(name)), name


def test_both_languages_say_the_same_things():
    """As many sections, table rows, code blocks and figures with a decimal point; that there are two, `make site` checks."""
    for path, english in DOCS.items():
        if (chinese := DOCS.get(path.with_suffix(".zh.md"))) is not None:
            for pattern in (r"^#+ ", r"^\|", r"^```", r"\b\d+\.\d+\b"):
                counts = [len(re.findall(pattern, text, re.M)) for text in (english, chinese)]
                assert counts[0] == counts[1], (path.name, pattern, counts)


def test_commands_in_the_documents_are_real():
    """Every `causalqwen ...` in a document names a command, and every option that it shows is one of that command's; so for
    benchmarks."""
    names = [*get_command(app).commands, "benchmarks.numbers", "benchmarks.speed"]
    pattern = re.compile(rf"\b(?:causalqwen|python -m) ({'|'.join(map(re.escape, names))})\b([^\n`]*)")
    help_texts: dict[str, str] = {}
    found = set()
    for path, text in DOCS.items():
        for name, rest in pattern.findall(text.replace("\\\n", " ")):
            if name not in help_texts:
                told = (importlib.import_module(f"{name}.__main__").app, []) if "." in name else (app, [name])
                help_texts[name] = CliRunner(env={"COLUMNS": "200"}).invoke(told[0], [*told[1], "--help"]).output
            for option in re.findall(r"(--[a-z-]+)", rest):
                assert option in help_texts[name], f"{path.name}: causalqwen {name} {option}"
            found.add(name)
    assert found >= set(names) - {"demo"}, set(names) - found  # the demo is `make demo` there


def test_make_targets_in_the_documents_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for path, text in DOCS.items():
        for target in re.findall(r"`make ([a-z-]+)", text):
            assert re.search(rf"^{target}:", makefile, re.M), f"{path.name}: make {target}"


def test_links_between_documents_lead_somewhere():
    for path, text in DOCS.items():
        for target in re.findall(r"\]\((?!http)([^)#]+)", text):
            assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_the_tree_lists_every_room():
    rooms = [p.name for p in (ROOT / "src" / "causalqwen").iterdir() if p.is_dir() and not p.name.startswith("_")]
    for name in ("CONTRIBUTING.md", "CONTRIBUTING.zh.md"):
        for room in [*rooms, "causalqwen_cli", "benchmarks", "experiments", "docs", "tests", "Makefile"]:
            assert re.search(rf"^\W*(?:src/)?{room}\b", DOCS[ROOT / name], re.M), f"{name}: {room}"


def test_nothing_names_one_machine():
    home = re.compile(r"(?<![\w.$~])/(?:home|root|work|Users)/\w")
    others = {ROOT / name: (ROOT / name).read_text() for name in ("Makefile", "pyproject.toml", "constraints.txt")}
    for path, text in (SOURCES | DOCS | others).items():
        assert path.name == "test_docs.py" or not home.search(text), path


def test_every_public_name_has_a_row_and_every_row_a_name():
    names = "causalqwen", *(f"causalqwen.{room}" for room in ("numbers", "data", "training", "evaluation"))
    rooms = [importlib.import_module(name) for name in names]
    known = {name for room in rooms for name in room.__all__}
    listed, chinese = (
        re.findall(r"^\| `([\w.]+)` \|", DOCS[ROOT / "docs" / name], re.M) for name in ("api.md", "api.zh.md")
    )
    assert known <= set(listed), known - set(listed)
    assert listed == chinese
    names = (f"causalqwen.{room}" for room in ("distributions", "decoding", "modeling.chain", "sklearn"))
    rooms += [importlib.import_module(name) for name in names]
    for name in listed:
        first, *rest = name.split(".")
        found = next(getattr(room, first) for room in rooms if hasattr(room, first))
        assert not rest or hasattr(found, rest[0]), name


def python_blocks(path: Path) -> list[str]:
    """The Python of a document, as people copy it."""
    return re.findall(r"^```python\n(.*?)^```", DOCS[path], re.M | re.S)


@pytest.mark.parametrize("name", ["README.md", "README.zh.md"])
def test_the_python_of_the_readme_runs(tiny_tokenizer, tmp_path, monkeypatch, name):
    """From the first block to the last, in one session, on a tiny model in the quick demo's place."""
    model = graft_tiny("llama", tiny_tokenizer)
    model.config.value_range = [0.0, 500.0]
    model.save_pretrained(tmp_path / "runs" / "quick" / "model")
    make_backbone("llama", tiny_tokenizer).save_pretrained(tmp_path / "smollm2-135m")
    tiny_tokenizer.save_pretrained(tmp_path / "smollm2-135m")
    monkeypatch.setenv("CAUSALQWEN_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    session: dict = {}
    blocks = python_blocks(ROOT / name)
    assert len(blocks) > 1
    for block in blocks:
        exec(compile(block, name, "exec"), session)
    assert session["as_it_was"].text == session["said"].text


def test_lines_that_are_changed_by_hand_stand_where_they_are_said_to():
    """Each line stands in its file and can be changed, and its test exists; the same code in both languages."""
    english, chinese = (
        table_rows(DOCS[RESEARCH / page].replace("| 删去 |", "| `left out` |"), 6)
        for page in ("mutations.md", "mutations.zh.md")
    )
    rows = mutations.rows()
    assert len(rows) == len(english) > 100 and [row[1:5] for row in chinese] == [row[1:5] for row in english]
    for test, file, before, after in rows:
        path = ROOT / ("" if file.startswith("examples/") else "src/causalqwen") / file
        broken = mutations.changed(SOURCES[path], before, after)
        assert broken != SOURCES[path] and ast.parse(broken if path.suffix == ".py" else ""), (file, before)
        test_file, function = test.split("::")
        assert function in functions_of(f"tests/{test_file}"), test


@pytest.mark.parametrize("name", ["training.md", "training.zh.md"])
def test_the_settings_that_are_told_are_the_defaults(name):
    (block,) = re.findall(r"^```yaml\n(.*?)^```", DOCS[ROOT / "docs" / name], re.M | re.S)
    told: dict[str, dict] = {}
    whole = {}
    for of_stage, field, value in re.findall(r"^(#  )?(\w+): ([^#\n]*)", block, re.M):
        if of_stage:
            told.setdefault(list(whole)[-1], {})[field] = yaml.safe_load(value)
        else:
            whole[field] = yaml.safe_load(value)
    assert whole.keys() == vars(TrainSettings()).keys() and TrainSettings.from_dict(whole) == TrainSettings()
    assert told.keys() == STAGES.keys()
    for stage, fields in told.items():
        assert STAGES[stage](**fields) == STAGES[stage](), stage


@pytest.mark.parametrize("name", ["serving.md", "serving.zh.md"])
def test_the_python_of_serving_runs(tiny_tokenizer, name):
    (block,) = (block for block in python_blocks(ROOT / "docs" / name) if "OpenAI(" in block)
    people = {"ann": Individual.from_seed(1, 32, "ann")}
    with serving(graft_tiny("llama", tiny_tokenizer), name="trained", individuals=people, max_tokens=60) as server:
        exec(compile(block.replace("http://127.0.0.1:8000/v1", f"http://127.0.0.1:{server.port}/v1"), name, "exec"), {})


@pytest.mark.parametrize("name", ["serving.md", "serving.zh.md"])
def test_the_python_of_vllm_names_what_is_there(monkeypatch, capsys, name):
    """Without vLLM: what is asked fits the functions and the plug-in's options, and an answer has what is read of it."""
    (block,) = (block for block in python_blocks(ROOT / "docs" / name) if "causalqwen_vllm" in block)

    def answers(llm: object, prompts: list[str], **settings: object) -> list[causalqwen_vllm.Answer]:
        bound = inspect.signature(client.generate).bind(llm, prompts, **settings).arguments
        of_request = inspect.signature(client.request).bind(None, prompts[0], **bound["settings"]).arguments
        options = {key: value for key, value in of_request.items() if key in ("preset", "seed")}
        assert RequestOptions.read(options | of_request.get("settings", {})).plan.individual == "token"
        number = causalqwen_vllm.Number(5.0, 0, (0, 2), 4.5, 1.5, 0.9, 5.0, {})
        return [causalqwen_vllm.Answer(" 5", [1], [5.0], [number], "stop", bound["seed"])]

    monkeypatch.setattr(causalqwen_vllm, "load", create_autospec(client.load))
    monkeypatch.setattr(causalqwen_vllm, "generate", answers)
    exec(compile(block, name, "exec"), {})
    assert capsys.readouterr().out == " 5 [(5.0, 4.5, 1.5)]\n"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of lm-eval and datasets
@pytest.mark.parametrize("name", ["fitting_in.md", "fitting_in.zh.md"])
def test_the_python_of_fitting_in_runs(tiny_tokenizer, tmp_path, monkeypatch, name):
    """From the first block to the last, on a tiny model; what needs a library of an extra, where that is installed."""
    model = graft_tiny("llama", tiny_tokenizer)
    model.config.value_range = [0.0, 500.0]
    model.save_pretrained(tmp_path / "trained")
    monkeypatch.chdir(tmp_path)
    session: dict = {}
    blocks = python_blocks(ROOT / "docs" / name)
    assert len(blocks) == 4
    for block in blocks:
        needed = re.findall(r"^(?:import|from) (datasets|lm_eval)\b", block, re.M)
        if all(importlib.util.find_spec(library) for library in needed):
            exec(compile(block, name, "exec"), session)
    assert (tmp_path / "open/with_causalqwen.py").is_file() and session["said"]["numeric_values"]
    (line,) = re.findall(r'^python -c "(.*)"$', DOCS[ROOT / "docs" / name], re.M)
    done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True)
    assert "generated_text" in done.stdout, done.stderr


def test_what_goes_with_some_settings_only_is_the_table_that_errors_are_made_from():
    def told(needs: dict[str, object]) -> str:
        values = (" or ".join(map(str, v)) if isinstance(v, tuple) else str(v) for v in needs.values())
        told = ", ".join(f"`{name}: {value}`" for name, value in zip(needs, values, strict=True))
        return told.replace("True", "true").replace("False", "false")

    wanted = [[what.rstrip(","), told(needs)] for what, needs in NEEDS.items()]
    for name, heading in (("training.md", "## What goes with"), ("training.zh.md", "## 只配某些设置的")):
        rows = table_rows(DOCS[ROOT / "docs" / name].partition(heading)[2].split("\n## ")[0], 2)
        assert [row[1] for row in rows] == [row[1] for row in wanted]
        assert rows == wanted or name.endswith(".zh.md")
