"""Every block of every page, in both languages: each line of it is run by a test, or held against what would run it."""

import ast
import json
import logging
import re
import shlex
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.main import get_command

from causalqwen import CausalQwenForCausalLM, Individual
from causalqwen.serving import read_keys
from causalqwen.serving.journal import JsonLines
from causalqwen_cli.app import app
from causalqwen_evals import TASKS
from conftest import make_backbone
from test_cli import run, write
from test_docs import DOCS, ROOT
from test_serving import PROMPT, serving, talker

PAGES = [*DOCS, ROOT / "experiments" / "README.md", *sorted((ROOT / "src").rglob("*.md"))]
PYTHON = {  # a page whose Python a test runs, in both languages, and where that test is
    "README": "test_docs.py",
    "docs/guide": "test_survey.py",
    "docs/tables": "test_tables.py",
    "docs/serving": "test_docs.py",
    "docs/fitting_in": "test_docs.py",
}
KINDS = {"{code-cell} python", "text", "python", "yaml", "mermaid", "bash", ""}
"""Cells and their texts: test_tutorials.py. yaml: the settings, test_docs.py. mermaid: drawn by test_site.py."""
OTHERS = {"npm", "tar", "mkdir", "for", "lm-eval", "inspect"}
"""Programs of others, of which only what they are told of ours can be checked here."""


COMMAND = re.compile(r"(?:\.venv/bin/)?(?:causalqwen|make|npm|pip|python) ")  # the other indented blocks are formulas


class Block(NamedTuple):
    page: str
    kind: str
    text: str


def blocks_of(path: Path) -> list[Block]:
    """Fenced blocks, and the indented ones of the log that hold commands."""
    name, text = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
    found = [Block(name, kind.strip(), body) for kind, body in re.findall(r"^```(.*)\n((?:.*\n)*?)```$", text, re.M)]
    assert 2 * len(found) == len(re.findall(r"^\s*```", text, re.M)), f"{name}: a block that is not closed, or indented"
    text = re.sub(r"^```(?:.*\n)*?```$", "", text, flags=re.M)
    indented = [re.sub(r"^    ", "", block, flags=re.M) for block in re.findall(r"\n\n((?:    .*\n)+)", text)]
    return found + [Block(name, "", block) for block in indented if COMMAND.match(block)]


BLOCKS = [block for path in PAGES for block in blocks_of(path)]


def commands_of(block: Block) -> list[list[str]]:
    """The words of each command; a backslash and an open quotation go on in the next line."""
    made, held = [], ""
    for line in block.text.splitlines():
        held += line + "\n"
        if not line.endswith("\\"):
            try:
                made.append(shlex.split(held.replace("\\\n", " "), comments=True))
            except ValueError:
                continue
            held = ""
    assert not held, f"{block.page}: a quotation that is not closed: {held}"
    return [words for words in made if words]


def is_output(block: Block) -> bool:
    """What a server writes, a file of keys, or the tree of CONTRIBUTING (test_docs.py): no command."""
    return block.text.startswith(("{", "sk-", "Makefile "))


SHELL = [
    (block.page, words)
    for block in BLOCKS
    if block.kind in ("", "bash") and not is_output(block)
    for words in commands_of(block)
]


def of_program(name: str) -> list[list[str]]:
    """Arguments of every command of a program, wherever it lies; each once."""
    found = [words for _, words in SHELL if Path(words[0]).name == name]
    return [list(words) for words in dict.fromkeys(tuple(words[1:]) for words in found)]


def test_every_block_is_of_a_kind_that_is_checked():
    assert {block.kind for block in BLOCKS} == KINDS
    python = {re.sub(r"(\.zh)?\.md$", "", block.page) for block in BLOCKS if block.kind == "python"}
    assert python == PYTHON.keys()
    for page, file in PYTHON.items():
        told = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert f'"{Path(page).name}.md", "{Path(page).name}.zh.md"' in told, page
    cells = {block.page for block in BLOCKS if block.kind in ("{code-cell} python", "text")}
    assert all(page.startswith("docs/tutorials/") for page in cells)
    assert {block.page for block in BLOCKS if block.kind == "yaml"} == {"docs/training.md", "docs/training.zh.md"}
    assert {block.page for block in BLOCKS if block.kind == "mermaid"} == {"docs/diagrams.md", "docs/diagrams.zh.md"}


def test_every_command_is_of_a_program_that_is_checked():
    known = {"causalqwen", "make", "pip", "python", "torchrun", "accelerate", "curl", *OTHERS}
    for page, words in SHELL:
        assert Path(words[0]).name in known, f"{page}: {' '.join(words)}"
    assert len(SHELL) > 150


def parse(arguments: list[str]) -> None:
    """As the command line reads them, up to what the command would do; typer's error for what it would refuse."""
    command, rest = get_command(app), list(arguments)
    while hasattr(command, "commands"):
        name, *rest = rest
        command = command.commands[name]
    command.make_context(name, rest)


@pytest.mark.parametrize("words", of_program("causalqwen"), ids=" ".join)
def test_a_command_is_taken_as_it_is_written(words):
    parse(words)


@pytest.mark.parametrize("program", ["torchrun", "accelerate"])
def test_a_command_on_many_ranks_is_taken_as_it_is_written(program):
    (words,) = of_program(program)
    at = words.index("causalqwen_cli")
    assert words[at - 1] == "-m"
    parse(words[at + 1 :])


def test_make_has_every_target():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    asked = {word for words in of_program("make") for word in words if "=" not in word}
    assert {"demo", "test"} <= asked <= targets


def test_every_extra_that_is_installed_is_there():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    found = of_program("pip")
    for install, package in found:
        named = re.fullmatch(r"\.|causalqwen(?:\[(\w+)\])?(?: @ git\+ADDRESS)?", package)
        assert install == "install" and named and (named[1] is None or named[1] in extras), package
    assert len(found) > 3


def test_the_guide_tells_every_extra_that_a_user_may_want():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for name in ("guide.md", "guide.zh.md"):
        rows = re.findall(r"^\| ((?:`\w+`(?:, |、)?)+) \|", (ROOT / "docs" / name).read_text(encoding="utf-8"), re.M)
        told = {word for row in rows for word in re.findall(r"`(\w+)`", row)}
        assert extras.keys() - {"docs", "test", "web"} <= told, name


@pytest.mark.parametrize("words", [w for w in of_program("python") if not w[0].startswith("-")], ids=" ".join)
def test_a_script_is_there_and_knows_the_options(words):
    script, *rest = words
    code = (ROOT / script).read_text(encoding="utf-8")
    known = {node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant)}
    options = [word.strip("[]").partition("=")[0] for word in rest if re.match(r"\[?--[a-z]", word)]
    assert set(options) <= known, script


@pytest.mark.filterwarnings("ignore")  # of a file that a script of one line leaves open
def test_what_other_programs_are_told_of_ours_is_there(tmp_path, monkeypatch):
    """Tasks, scripts in one line, and modules; test_evals.py runs the harnesses themselves, where they are installed."""
    tasks = {m for file in TASKS.rglob("*.yaml") for m in re.findall(r"^(?:task|tag): (\w+)$", file.read_text(), re.M)}
    asked = [
        task
        for words in of_program("python")
        if words[:2] == ["-m", "causalqwen_evals"]
        for task in words[words.index("--tasks") + 1].split(",")
    ]
    assert {task for task in asked if task.startswith("causalqwen")} <= tasks and "causalqwen_boiling_points" in asked
    inspected = [words[1] for words in of_program("inspect")]
    code = (ROOT / "src/causalqwen_evals/inspection.py").read_text(encoding="utf-8")
    assert inspected and all(re.search(rf"^def {task.split('/')[1]}\(", code, re.M) for task in inspected)
    monkeypatch.chdir(tmp_path)
    modules = {words[1] for words in of_program("python") if words[0] == "-m" and "benchmarks." not in words[1]}
    assert modules == {"causalqwen_evals", "causalqwen_vllm"}  # tests/vllm/test_endpoints.py starts the latter
    assert all((ROOT / "src" / module / "__main__.py").exists() for module in modules)
    for words in of_program("python"):
        if words[0] == "-c" and "pipeline(" not in words[1]:  # that one: test_docs.py, behind the Python before it
            exec(compile(words[1], words[1], "exec"), {})
    assert (tmp_path / "held-out.txt").stat().st_size > 10_000


@pytest.mark.slow
def test_the_commands_of_the_guide_run_one_after_the_other(tiny_tokenizer, tmp_path, monkeypatch):
    """On a tiny backbone. What takes minutes or never ends is run by test_cli.py and test_commands.py alone."""
    monkeypatch.chdir(tmp_path)
    make_backbone("llama", tiny_tokenizer, hidden_size=64).save_pretrained("backbone")
    tiny_tokenizer.save_pretrained("backbone")
    rows = [
        {"prompt": f"{name} slept, in hours:", "value": 5 + index % 3, "individual": name, "age": age}
        for index in range(12)
        for name, age in (("Ann", 64), ("Bob", 31))
    ]
    for file in ("train", "eval", "test", "rows"):
        write(
            tmp_path / f"{file}.jsonl",
            rows if file == "rows" else [{"text": f"{r['prompt']} {r['value']}."} for r in rows],
        )
    writers = [
        {"text": "the long road goes past the old mill\n" * (9 + i), "individual": f"p{i // 2}"} for i in range(12)
    ]
    write(tmp_path / "writers.jsonl", writers)
    write(tmp_path / "questions.jsonl", [{"prompt": "Hours of sleep:", "name": "sleep"}])
    (tmp_path / "table.csv").write_text("name,description,price\n" + "".join(f"a,b {i},{i}\n" for i in range(40)))
    for file in ("said", "one", "other", "speech"):
        (tmp_path / f"{file}.txt").write_text("the long road goes past the small house and the old mill\n" * 12)
    told, chinese = ([words for on, words in SHELL if on == page] for page in ("docs/guide.md", "docs/guide.zh.md"))
    assert told == chinese
    ran = []
    for words in told:
        if words[1] not in ("serve", "explore", "doctor"):
            ran.append(run(*("backbone" if word == "smollm2-135m" else word for word in words[1:])))
    assert len(ran) == 15 and CausalQwenForCausalLM.from_pretrained("trained").config.value_range


@pytest.fixture(scope="module")
def server(tiny_tokenizer):
    model = talker(tiny_tokenizer, number_context="value")
    model.config.value_range = [0.0, 500.0]
    with serving(model, name="trained", individuals={"ann": Individual.from_seed(1, 32, "ann")}) as made:
        yield made


CURLS = of_program("curl")


@pytest.mark.parametrize("words", CURLS, ids=[words[0].rpartition("/")[2] for words in CURLS])
def test_a_request_is_answered(server, words):
    url, *rest = words
    assert rest[:2] == ["-H", "Content-Type: application/json"] and rest[2] == "-d" and len(rest) == 4
    path = url.removeprefix("http://127.0.0.1:8000")
    status, answer = server.send(json.loads(rest[3]), path)
    assert status == 200, answer


def test_what_a_server_is_said_to_write_is_what_it_writes(server):
    """The fields, in their order, of the outputs that docs/serving shows; and its file of keys is one."""
    shown = {
        block.text for block in BLOCKS if block.kind == "" and is_output(block) and "CONTRIBUTING" not in block.page
    }
    assert len(shown) == 3  # the same in both languages
    (keys,) = (text for text in shown if text.startswith("sk-"))
    assert read_keys(keys) == {"sk-ann": None, "sk-bob": 60}
    log, numbers = sorted(map(json.loads, shown - {keys}), key=lambda found: "numbers" in found)
    record = logging.LogRecord("causalqwen.serving.journal", logging.INFO, "", 0, "answered", None, None)
    assert list(json.loads(JsonLines().format(record))) == list(log)[:4]
    asked = {"model": "trained", "prompt": PROMPT, "max_tokens": 24, "causal": {}}
    answers = (server.send(asked | {"seed": seed}) for seed in range(20))
    made = (json.loads(answer)["choices"][0]["causal"] for _, answer in answers)
    causal = next(found for found in made if found["numbers"])
    assert causal.keys() == numbers.keys() and causal["numbers"][0].keys() == numbers["numbers"][0].keys()
