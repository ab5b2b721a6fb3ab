"""What the library never does: unpickle, run what a file says, or use the network unless it was asked to."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from causalqwen_cli.app import app
from conftest import make_backbone, make_tokenizer

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src").rglob("*.py"))

MODULES = {
    *("pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "code", "runpy"),
    *("socket", "ssl", "http", "urllib", "requests", "httpx", "aiohttp", "ftplib", "smtplib", "subprocess"),
}
"""What no module imports but those of `ALLOWED`."""
CALLS = {
    *("eval", "exec", "compile", "__import__", "torch.load", "torch.hub.load", "yaml.load", "yaml.unsafe_load"),
    *("yaml.full_load", "np.fromfile", "os.system", "os.popen", "os.execv", "os.spawnv", "pandas.read_pickle"),
}
KEYWORDS = {"allow_pickle": False, "weights_only": True, "trust_remote_code": False, "shell": False}
"""What a call may say of these."""

ALLOWED = {
    (
        "causalqwen/modeling/backbones.py",
        "subprocess",
    ),  # pip fetches the default backbone for `doctor --fetch` or `demo`
    ("causalqwen_cli/serving.py", "socket"),  # the server listens
    ("causalqwen/serving/listening.py", "socket"),
    (
        "causalqwen/modeling/loading.py",
        "pickle",
    ),  # an error's name: torch raises it where a state holds more than numbers
    ("causalqwen/modeling/loading.py", "torch.load"),  # `doctor --scan` reads states, `weights_only`, as training would
}


def name_of(node: ast.AST) -> str:
    """torch.load of the call torch.load(...); "" for anything that is no name."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{name_of(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) and name_of(node.value) else ""


def suspects(code: str) -> set[str]:
    """Modules, calls and keywords of the tables above that some code uses."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names} & MODULES
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found |= {(node.module or "").split(".")[0]} & MODULES
        elif isinstance(node, ast.Call):
            found |= {name_of(node.func)} & CALLS
            for keyword in node.keywords:
                if keyword.arg in KEYWORDS and getattr(keyword.value, "value", ...) is not KEYWORDS[keyword.arg]:
                    found.add(keyword.arg)
    return found


def test_no_module_unpickles_runs_text_or_opens_a_connection():
    assert len(SOURCES) > 150
    texts = {str(path.relative_to(ROOT / "src")): path.read_text(encoding="utf-8") for path in SOURCES}
    found = {(name, what) for name, text in texts.items() for what in suspects(text)}
    assert found == ALLOWED


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("import torch\ntorch.load('x')", "torch.load"),
        ("from pickle import loads", "pickle"),
        ("import urllib.request", "urllib"),
        ("np.load(x, allow_pickle=True)", "allow_pickle"),
        ("load(x, trust_remote_code=anything)", "trust_remote_code"),
        ("def f():\n  return eval('1')", "eval"),
    ],
)
def test_each_of_them_would_be_found(code, what):
    assert suspects(code) == {what}


# ---- what is watched while commands run ------------------------------------------------------------------------------

EVENTS = {
    *("pickle.find_class", "socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.bind"),
    *("urllib.Request", "os.system", "subprocess.Popen"),
}
COMMANDS = [
    "graft --backbone backbone --output model",
    "train --model model --train rows.jsonl --eval rows.jsonl --config settings.yaml --output trained",
    "train --model model --train rows.jsonl --eval rows.jsonl --config settings.yaml --output trained --resume",
    "predict --model trained --input rows.jsonl --output out.jsonl",
    "generate --model trained --prompt one --preset persona --seed 1 --max-new-tokens 2",
    "abduct --model trained --text settings.yaml --output who.safetensors",
    "population --model trained --drawn 3 --output people.safetensors",
    "survey --model trained --population people.safetensors --questions questions.jsonl --output answers.csv",
    "fit table.csv --target value --backbone backbone --output fitted",
    "predict --model fitted --input table.csv --output again.jsonl",
    "doctor --scan trained",
]


def watched_commands(folder: Path) -> None:
    """Runs them, and prints each event, and where it came from, as a line of JSON."""
    os.chdir(folder)
    seen: list[tuple[str, str]] = []
    running = ""

    def watch(event: str, arguments: tuple) -> None:
        asks_a_gpu = event == "subprocess.Popen" and arguments[0] == "nvidia-smi"  # accelerate, where there is one
        if running and event in EVENTS and not asks_a_gpu:
            seen.append((running, f"{event} {arguments!r:.200}"))

    sys.addaudithook(watch)
    for words in COMMANDS:
        if words.endswith("--resume"):
            (folder / "trained" / "config.json").unlink()  # as a run that was stopped at its end
        running = words
        result = CliRunner().invoke(app, words.split())
        running = ""
        if result.exit_code:
            raise RuntimeError(f"{words}: {result.output}") from result.exception
    print(json.dumps(seen))


def test_commands_neither_unpickle_nor_use_the_network(tmp_path):
    tokenizer = make_tokenizer()
    make_backbone("llama", tokenizer).save_pretrained(tmp_path / "backbone")
    tokenizer.save_pretrained(tmp_path / "backbone")
    rows = [{"prompt": f"The {'long' if i % 2 else 'short'} one is", "value": 50 + i} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "table.csv").write_text("words,value\n" + "".join(f"{row['prompt']},{row['value']}\n" for row in rows))
    (tmp_path / "questions.jsonl").write_text(json.dumps({"prompt": "Yes?", "options": ["yes", "no"]}) + "\n")
    (tmp_path / "settings.yaml").write_text("values: {epochs: 1, batch_size: 32}\nevaluations: 1\n")
    environment = {name: value for name, value in os.environ.items() if "OFFLINE" not in name}
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path)],
        env=environment | {"PYTHONPATH": os.pathsep.join(part for part in sys.path if part), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == []


if __name__ == "__main__":
    os.environ.pop("HF_HUB_OFFLINE", None)  # conftest sets it for tests
    watched_commands(Path(sys.argv[1]))
