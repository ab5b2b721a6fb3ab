"""A little of each part of the campaign (tests/campaign), and that each part finds what is wrong."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from campaign import Bounds, files, is_clear, resources, tables, tensors, texts
from causalqwen import CausalQwenProcessor
from causalqwen.data.columns import Column
from causalqwen.distributions.stable import Cauchy
from causalqwen.numbers import ValueLaw
from conftest import graft_tiny, make_backbone


def nothing_found(tally, least: int) -> None:
    assert not tally.found, tally.table()
    assert sum(tally.tried.values()) >= least, tally.table()


def test_texts(tiny_tokenizer):
    tally = texts.run(Bounds(18, 300), texts.processors({"tiny": tiny_tokenizer}))
    nothing_found(tally, 18 * texts.BATCH)
    assert len(tally.tried) == 10


def test_a_text_that_comes_back_otherwise_is_found(tiny_tokenizer, monkeypatch):
    by_name, decode = {"tiny": CausalQwenProcessor(tiny_tokenizer)}, CausalQwenProcessor.batch_decode
    wrong = lambda self, *given: [text.replace("5", "6") for text in decode(self, *given)]  # noqa: E731
    monkeypatch.setattr(CausalQwenProcessor, "batch_decode", wrong)
    assert "came back as" in texts.run(Bounds(1, 20), by_name).found["tiny"][0]


def test_tensors():
    tally = tensors.run(Bounds(200, 300))
    nothing_found(tally, 200 * tensors.AT_ONCE)


def test_a_law_that_overflows_is_found(monkeypatch):
    monkeypatch.setattr(
        Cauchy, "log_prob", lambda self, x, loc, scale: -torch.log1p(((x - loc) / scale) ** 2) - scale.log()
    )
    tally = tensors.run(Bounds(200, 300))
    assert any("log_prob" in what for what in tally.found)


@pytest.fixture(scope="module")
def backbone(tiny_tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("backbone")
    for part in (make_backbone("llama", tiny_tokenizer), tiny_tokenizer):
        part.save_pretrained(folder)
    return str(folder)


def test_tables(backbone):
    tally = tables.run(Bounds(12, 300), backbone)
    nothing_found(tally, 12 * 4)
    assert tally.tried["tables"] == 12 and len(tally.tried) > 12


@pytest.mark.parametrize(
    ("whose", "name", "broken", "found"),
    [
        (Column, "nearest", lambda self, cell: (cell, 0.0), "beyond"),
        (ValueLaw, "widened", lambda self, scale, by: scale / (1 + by), "missing"),
        (ValueLaw, "interval", lambda self, loc, scale, level, raw=False: (loc, loc - 1), "tables"),
    ],
)
def test_a_table_that_is_read_too_surely_is_found(backbone, monkeypatch, whose, name, broken, found):
    monkeypatch.setattr(whose, name, broken)
    tally = tables.run(Bounds(3, 300, 1), backbone)
    assert any(found in what for what in tally.found), tally.table()


@pytest.mark.filterwarnings("ignore")  # libraries complain of what they read
def test_files(tiny_tokenizer):
    model = graft_tiny("qwen2", tiny_tokenizer)
    files.fit_everything(model)
    tally = files.run(Bounds(120, 300), model)
    nothing_found(tally, 120)
    assert sum(tally.refused.values()) > 40


def test_what_users_are_meant_to_see():
    assert is_clear(ValueError("a.json is damaged"), "a.json")
    assert is_clear(OSError("b/a.json: no such file"), "b")
    assert not is_clear(ValueError("it is damaged"), "a.json")
    assert not is_clear(ValueError("a.json\nis damaged"), "a.json")
    assert not is_clear(KeyError("a.json"), "a.json")


def own_process(code: str) -> str:
    """What a process that has computed nothing before prints: it makes children safely, and nobody else uses its memory."""
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command, env = [sys.executable, "-W", "ignore", "-c", code], {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [("graft", "predict"), ("train, two ranks",)], ids=["one process", "one of two ranks"]
)
def test_processes(names):
    count = 3 * len(names)
    code = f"from campaign import Bounds, processes; print(processes.run(Bounds({count}, 300), {names}).table())"
    told = own_process(code)
    rows = [line.strip("| ").split(" | ") for line in told.splitlines()[2:]]
    assert {row[0] for row in rows} >= {f"{name}: two at once" for name in names}, told
    assert all(row[3:] == ["0"] for row in rows), told  # what was found would stand below, in lines of its own
    assert sum(int(row[1]) for row in rows) == count, told


def test_resources(tiny_tokenizer):
    tally = resources.run(Bounds(150, 300), graft_tiny("llama", tiny_tokenizer))
    nothing_found(tally, 150)
    assert tally.tried["held: memory"] > 1 << 26


def test_memory_that_is_kept_is_found():
    told = own_process(
        "import torch; from campaign import Bounds, resources\n"
        "kept = []\n"
        "resources.asks = lambda model: {'leak': lambda number: kept.append(torch.ones(1 << 20))}\n"
        "print(resources.run(Bounds(12, 60), None).found)"
    )
    assert "held: memory" in told
