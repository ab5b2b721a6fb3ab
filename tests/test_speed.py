"""The speed benchmark runs at toy sizes and says what it measured; its figures belong to full sizes on a quiet machine."""

import json
import sys

import pytest

from benchmarks.speed.__main__ import app
from benchmarks.speed.losses import SOFTMAX, LossSize, score_losses
from benchmarks.speed.report import table
from benchmarks.speed.run import PARTS, measure
from test_cli import run
from test_commands import bare  # noqa: F401  a fixture


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_losses_are_timed_in_turns_and_their_memory_in_processes_of_their_own():
    size = LossSize(tokens=512, vocabulary=32768, hidden=16, dtype="float32", frozen=True)
    row = score_losses(size, [SOFTMAX, "equal, Cauchy"], repeats=1, memory=True)
    assert row["time_ratio"][SOFTMAX] == row["memory_ratio"][SOFTMAX] == 1.0
    # softmax keeps at least the scores, 64 MiB; the chunked loss never does
    assert row["bytes"][SOFTMAX] > 2**26 > row["bytes"]["equal, Cauchy"]


def test_results_of_other_parts_are_kept(tmp_path):
    (tmp_path / "speed.json").write_text(json.dumps({"tokenizer": {"speed_ratio": 0.5}}))
    found = measure(tmp_path, parts=())
    assert found["tokenizer"]["speed_ratio"] == 0.5 and "0.50 x the bare" in table(found)


@pytest.mark.parametrize("part", PARTS)
def test_every_part_runs(bare, tmp_path, monkeypatch, part):  # noqa: F811
    def once(cases, repeats):
        for case in cases.values():
            case()
        return dict.fromkeys(cases, 1.0)

    for room in ("generation", "losses", "training"):
        monkeypatch.setattr(f"benchmarks.speed.{room}.alternate", once)
    asked = ("--output", tmp_path, "--parts", part, "--repeats", 1, "--backbone", bare, "--device", "cpu", "--quick")
    run(*asked, app=app)
    found = json.loads((tmp_path / "speed.json").read_text())
    assert found.keys() == {"threads", "devices", part} and found["devices"] == {part: "cpu"}
    assert (tmp_path / "speed.svg").read_text().startswith("<svg")
    wrong = run("--output", tmp_path, "--parts", "epoch", code=1, app=app)
    assert "unknown parts epoch; known: loss" in wrong.stderr
