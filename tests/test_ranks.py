"""Two ranks against one: the same losses, weights, facts and files, with copies of the model (DDP) and spread (FSDP2)."""

import copy
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from causalqwen.data.texts import speech_paragraphs
from causalqwen.modeling.configuration import CausalQwenConfig
from causalqwen.modeling.loading import load_model
from causalqwen.training import FactStore
from causalqwen.training.features import COLUMNS
from causalqwen_cli.app import app
from conftest import graft_tiny
from ranks_worker import CASES, examples, run_case, sentences

ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
CLI = ("-m", "causalqwen_cli", "train")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """As each of the two ranks has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def launch(*command, check=True, **environment):
    """Run to the end; the last lines of stderr where it must not fail and does."""
    done = subprocess.run(
        [str(part) for part in command], env=ENVIRONMENT | environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0 or not check, done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def model_folder(tiny_tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks") / "model"
    graft_tiny("qwen2", tiny_tokenizer, value_branch_dropout=0.0, number_context="value").save_pretrained(folder)
    (folder / "anchor.txt").write_text("\n".join(speech_paragraphs(numbers=False)[:6]))
    return folder


@pytest.fixture(scope="module")
def two_ranks(model_folder, tmp_path_factory):
    """What ranks_worker leaves behind when two ranks run it."""
    output = tmp_path_factory.mktemp("two")
    launch(*TORCHRUN, Path(__file__).with_name("ranks_worker.py"), model_folder, output)
    return output


@pytest.fixture(scope="module")
def one_rank(model_folder, tmp_path_factory):
    """The same runs in one process, made when they are first asked for."""
    output = tmp_path_factory.mktemp("one")

    def run(name):
        if not (output / name).exists():
            run_case(name, model_folder, output / name)
        return output / name

    return run


def records(folder, summaries=False):
    """What was recorded on the way, or the summaries of stages, of which a run that was taken up writes one more."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record for record in found if ("train/train_runtime" in record) == summaries]


def compare(one, other, within=1e-4):
    """Every record of both runs has the same keys, every loss and accuracy is the same, and so are the final weights: but for
    one in a thousand, where a gradient is next to nothing and Adam, which divides by its size, steps by what rounding left."""
    pairs = list(zip(records(one), records(other), strict=True))
    for a, b in pairs:
        assert a.keys() == b.keys() and (a["stage"], a["step"]) == (b["stage"], b["step"])
        for key in a:
            if key.endswith(("loss", "loss_mean", "loss_effective", "nll", "accuracy", "num_f1")):
                assert a[key] == pytest.approx(b[key], abs=within, rel=1e-6), (key, a["step"])
    first, second = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        apart = (tensor - second[name]).abs()
        assert (apart > within).float().mean() <= 1e-3 and apart.max() <= 10 * within, name
    return len([a for a, _ in pairs if "train/loss" in a])


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", list(CASES))
def test_two_ranks_train_as_one(two_ranks, one_rank, model_folder, name, way):
    steps = compare(one_rank(name), two_ranks / f"{name}-{way}")
    assert steps >= (50 if name == "values" else 4)
    one, two = (records(f, summaries=True) for f in (one_rank(name), two_ranks / f"{name}-{way}"))
    assert [r["train/train_loss"] for r in one] == pytest.approx([r["train/train_loss"] for r in two], abs=1e-4)
    start, end = (load_file(folder / "model.safetensors") for folder in (model_folder, two_ranks / f"{name}-{way}"))
    assert max((end[key] - tensor).abs().max() for key, tensor in start.items()) > 1e-3  # it has learned


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_ranks_give_each_class_its_own_axis_and_levels(two_ranks, one_rank, way):
    one, two = (
        CausalQwenConfig.from_pretrained(folder).to_dict()
        for folder in (one_rank("classes"), two_ranks / f"classes-{way}")
    )
    assert list(one["class_interval_levels"]) == list(one["class_values"]) == ["one", "some"]
    assert one["class_values"] == two["class_values"]
    for name, levels in one["class_interval_levels"].items():
        assert two["class_interval_levels"][name] == pytest.approx(levels, abs=1e-4)
    apart = np.subtract(*one["class_interval_levels"].values())
    assert np.abs(apart).max() > 0.01  # so that exchanged levels would show


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_ranks_write_the_files_of_one_process(two_ranks, one_rank, way):
    def files(folder):
        found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        # Final features are named after weights, whose last bits may differ; a random state belongs to its rank; several ranks
        # write no checksums of what all of them write.
        found = {path for path in found if "rng_state" not in path and not re.match("work/.*SHA256SUMS", path)}
        return sorted(re.sub("features-[0-9a-f]+", "features", path) for path in found)

    assert files(one_rank("lora")) == files(two_ranks / f"lora-{way}")
    checkpoint = sorted((one_rank("lora") / "work" / "lora").glob("checkpoint-*"))[-1]
    states = [
        torch.load(folder / "work" / "lora" / checkpoint.name / "optimizer.pt", weights_only=True)["state"]
        for folder in (one_rank("lora"), two_ranks / f"lora-{way}")
    ]
    assert states[0].keys() == states[1].keys()
    for index, slots in states[0].items():
        for name, tensor in slots.items():
            torch.testing.assert_close(tensor, states[1][index][name], rtol=0, atol=1e-4)


@pytest.mark.slow
def test_fsdp_spreads_the_parameters_and_gives_them_back(two_ranks):
    for rank in (0, 1):
        found = json.loads((two_ranks / f"found-{rank}.json").read_text())
        assert found["held"] / found["parameters"] == pytest.approx(0.5, abs=0.01)
        assert found["left"] == 0 and found["restored"]


@pytest.mark.slow
def test_facts_by_two_ranks_are_those_of_one_bit_for_bit(two_ranks, model_folder, tmp_path):
    model = load_model(model_folder, "cpu")
    one = FactStore.build(model, examples(model, 43, 0), tmp_path)
    two = FactStore(two_ranks / "facts" / one.folder.name)
    assert [path.name for path in (two_ranks / "facts").iterdir()] == [one.folder.name]
    for name in (*COLUMNS, "offsets"):
        a, b = (np.load(store.folder / f"{name}.npy") for store in (one, two))
        assert a.dtype == b.dtype and np.array_equal(a, b, equal_nan=True), name


@pytest.mark.slow
def test_what_ranks_cannot_do_is_refused(two_ranks):
    found = json.loads((two_ranks / "found-1.json").read_text())
    assert "batch of 1 rows cannot be split over 2 ranks" in found["batch"]
    assert "the ranks start from different models" in found["start"]
    assert "to train are bfloat16 and float32" in found["dtypes"]
    assert not (two_ranks / "refused").exists()


def test_only_training_runs_on_ranks(monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    result = CliRunner().invoke(app, ["evaluate", "--model", str(tmp_path), "--output", str(tmp_path / "out")])
    assert result.exit_code == 1
    assert "causalqwen (rank 1): evaluate is work for one process, and 2 were started" in result.stderr


# ---- slow ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def command_line(model_folder, tmp_path_factory):
    """The arguments of `train` on files: a run of 36 steps per stage, to be killed, with dropout left out."""
    folder = tmp_path_factory.mktemp("files")
    for name, count, seed in (("train", 43, 0), ("eval", 13, 1)):
        rows = "".join(json.dumps({"text": text}) + "\n" for text in sentences(count, seed))
        (folder / f"{name}.jsonl").write_text(rows)
    (folder / "settings.yaml").write_text(
        "logging_steps: 1\nevaluations: 6\nvalues: {epochs: 4, batch_size: 5}\n"
        "lora: {epochs: 4, batch_size: 5, dropout: 0.0, whole_vocabulary: true}\n"
    )
    (folder / "spread.yaml").write_text("fsdp: true\n" + (folder / "settings.yaml").read_text())
    files = ["--train", folder / "train.jsonl", "--eval", folder / "eval.jsonl"]

    def arguments(output, *more, spread=False):
        config = folder / ("spread.yaml" if spread else "settings.yaml")
        return [*CLI, "--model", model_folder, *files, "--config", config, "--output", output, *more]

    return arguments


def kill_a_rank(command, seen: Path):
    """Start `command`, SIGKILL one of its ranks once the path `seen` is there, and wait for the end."""
    run = subprocess.Popen([str(part) for part in command], env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    while not seen.exists():
        assert run.poll() is None, run.stderr.read()[-3000:]
        time.sleep(0.01)
    ranks = [child for child in psutil.Process(run.pid).children() if child.environ().get("RANK") == "1"]
    assert len(ranks) == 1
    ranks[0].send_signal(signal.SIGKILL)
    run.communicate(timeout=120)
    return run.returncode


@pytest.mark.slow
def test_a_run_that_lost_a_rank_is_taken_up_by_one_and_by_two(command_line, tmp_path):
    """Killed in its second stage; every resumed run gives the curve of one that nobody disturbed."""
    launch(sys.executable, *command_line(tmp_path / "through"))
    killed = tmp_path / "killed"
    code = kill_a_rank([*TORCHRUN, *command_line(killed)], killed / "work/lora/checkpoint-12/trainer_state.json")
    assert code != 0 and not (killed / "config.json").exists()
    assert list((killed / "work" / "lora").glob("checkpoint-*/trainer_state.json"))
    for name, start, spread in (
        ("one", [sys.executable], False),
        ("two", TORCHRUN, False),
        ("spread", TORCHRUN, True),
    ):
        shutil.copytree(killed, tmp_path / name)
        launch(*start, *command_line(tmp_path / name, "--resume", spread=spread))
        compare(tmp_path / "through", tmp_path / name)


@pytest.mark.slow
def test_the_command_under_accelerate(command_line, tmp_path):
    launch(sys.executable, *command_line(tmp_path / "one"))
    start = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    done = launch(*start, *command_line(tmp_path / "two", "--json"))
    assert json.loads(done.stdout)["model"] == str(tmp_path / "two")  # one object, by rank 0 alone
    compare(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
def test_two_ranks_on_the_real_backbone(smollm2, tmp_path):
    """LoRA on SmolLM2-135M: a few steps, with copies and spread. In float64: in float32 the first steps of adapters that start
    at zero follow roundings of gradients (experiments 10), and L_cls before calibration is above 100."""
    copy.deepcopy(smollm2).double().save_pretrained(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["settings"]["value_branch"]["value_branch_dropout"] = 0.0
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    rows = "".join(json.dumps({"text": text}) + "\n" for text in sentences(16, 0))
    (tmp_path / "rows.jsonl").write_text(rows)
    stage = "logging_steps: 1\nevaluations: 1\nvalues: false\nlora: {epochs: 1, batch_size: 4, dropout: 0.0}\n"
    for name, start in (("one", [sys.executable]), ("ddp", TORCHRUN), ("fsdp", TORCHRUN)):
        config = tmp_path / f"{name}.yaml"
        config.write_text(stage + f"fsdp: {str(name == 'fsdp').lower()}\n")
        files = ["--train", tmp_path / "rows.jsonl", "--eval", tmp_path / "rows.jsonl"]
        launch(*start, *CLI, "--model", tmp_path / "model", *files, "--config", config, "--output", tmp_path / name)
    for name in ("ddp", "fsdp"):
        assert compare(tmp_path / "one", tmp_path / name) == 4
