"""Checkpoints, folders that hold nothing else, and what a release says of itself."""

import importlib.metadata
import io
import json
import pickle
import re
import shutil
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from safetensors.torch import save_file

import causalqwen
from causalqwen.modeling.configuration import FORMAT, CausalQwenConfig
from causalqwen.modeling.loading import check_files, load_model
from causalqwen.modeling.remote_code import FILE
from conftest import graft_tiny
from pins import PINS, load
from test_cli import run

ROOT = Path(__file__).parent.parent


def array_of_objects() -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    return file.getvalue()


def test_the_pinned_checkpoints_are_of_this_format_and_load(tmp_path):
    for name in ("digits", "features", "second"):
        load(name, tmp_path / name)
        assert json.loads((tmp_path / name / "config.json").read_text(encoding="utf-8"))["format_version"] == FORMAT
        model = load_model(tmp_path / name)
        before = model.predict_number("We have come")[0].median
        model.save_pretrained(tmp_path / f"{name}-again")
        assert load_model(tmp_path / f"{name}-again").predict_number("We have come")[0].median == before


@pytest.mark.parametrize("version", [FORMAT + 1, FORMAT - 1, str(FORMAT), -1, None, True])
def test_a_checkpoint_of_another_format_says_so(tiny_llama, tmp_path, version):
    tiny_llama.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format_version": version}))
    with pytest.raises(
        ValueError, match=rf"config.json.*format_version: this version .* reads .* the format {FORMAT}, got"
    ):
        load_model(tmp_path)
    assert not hasattr(CausalQwenConfig(format_version=FORMAT), "format_version")


def test_a_saved_model_holds_known_files_alone(tiny_tokenizer, tmp_path):
    graft_tiny("llama", tiny_tokenizer).save_pretrained(tmp_path / "whole", max_shard_size="200KB")
    work = tmp_path / "whole" / "work" / "values" / "checkpoint-3"
    work.mkdir(parents=True)
    np.save(work.parent / "features.npy", np.zeros((0, 3)))
    torch.save({"state": {0: torch.ones(3)}, "random": np.zeros(3, np.uint32)}, work / "rng_state.pth")
    (work / "trainer_state.json").write_text("{}")
    (work / "events.out.tfevents.1").write_bytes(b"of TensorBoard")
    (tmp_path / "whole" / "README.md").write_text("A card.")
    assert len(list((tmp_path / "whole").glob("*.safetensors"))) > 1
    assert "and nothing else" in run("doctor", "--scan", tmp_path / "whole").stdout
    model = graft_tiny("llama", tiny_tokenizer)
    model.trained_on = {"rows": 1, "numbers": 1, "held_out": 1, "stages": {}, "metrics": {}}
    model.save_pretrained(tmp_path / "more", remote_code=True)
    assert (tmp_path / "more" / "training.json").is_file()
    check_files(tmp_path / "more")
    with (tmp_path / "more" / FILE).open("a") as file:
        file.write("import os")
    with pytest.raises(ValueError, match=f"{FILE} is no file of a saved model"):
        check_files(tmp_path / "more")
    (tmp_path / "regressor").mkdir()  # as `causalqwen fit` leaves one
    (tmp_path / "regressor" / "estimator.json").write_text("{}")
    save_file({"weight": torch.ones(2)}, tmp_path / "regressor" / "estimator.safetensors")
    check_files(tmp_path / "regressor")
    for name in [path.name for path in PINS.iterdir() if path.is_dir()]:
        load(name, tmp_path / name)
        check_files(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("pytorch_model.bin", b"\x80\x04", "pytorch_model.bin is no file of a saved model"),
        ("more/modeling_other.py", b"print()", "modeling_other.py is no file of a saved model"),
        ("model.pkl.safetensors", b"", "model.pkl.safetensors is no file of a saved model"),
        ("model-00001-of-00002.safetensors", b"\x80\x04pickle", "is not a safetensors file"),
        ("work/features.bin", b"", "features.bin is no file of a saved model"),
        ("work/features.npy", array_of_objects(), "features.npy is damaged, or holds something other than numbers"),
        (
            "work/optimizer.pt",
            pickle.dumps(Path("x")),
            "optimizer.pt is damaged, or holds something other than numbers",
        ),
        ("optimizer.pt", b"", "optimizer.pt is no file of a saved model"),
        ("tokenizer_config.json", b'{"auto_map": {"AutoTokenizer": "x.Y"}}', "names code to run .* 'x.Y'"),
        ("generation_config.json", b"[1", "generation_config.json is damaged: it is not a JSON object"),
    ],
)
def test_whatever_else_lies_in_the_folder_is_named(tiny_llama, tmp_path, name, content, message):
    tiny_llama.save_pretrained(tmp_path)
    check_files(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(content)
    assert re.search(message, run("doctor", "--scan", tmp_path, code=1).stderr)
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    assert "holds no model" in run("doctor", "--scan", tmp_path, code=1).stderr


# ---- the lock, and what stands beside the code -----------------------------------------------------------------------


def locked() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def test_the_lock_names_every_package_that_the_tests_run_with():
    """The closure of what pyproject.toml asks for, with the extras of `make setup`, over what is installed here."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    extras = re.search(r"-e '\.\[([\w,]+,test)\]'", makefile)[1].split(",")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [*project["dependencies"], *(line for name in extras for line in project["optional-dependencies"][name])]
    pins, seen = locked(), set()
    waiting = [Requirement(line) for line in asked]
    while waiting:
        one = waiting.pop()
        name = canonicalize_name(one.name)
        key = (name, frozenset(one.extras))
        if key in seen or (one.marker and not one.marker.evaluate({"extra": ""})):
            continue
        seen.add(key)
        if name == "causalqwen":
            waiting += [Requirement(line) for extra in one.extras for line in project["optional-dependencies"][extra]]
            continue
        assert one.specifier.contains(pins[name]), f"constraints.txt: {name}=={pins[name]} is not {one}"
        for line in importlib.metadata.requires(name) or ():
            needed = Requirement(line)
            wanted = [{"extra": extra} for extra in ("", *one.extras)]
            if needed.marker is None or any(needed.marker.evaluate(extra) for extra in wanted):
                needed.marker = None
                waiting.append(needed)
    assert len(seen) > 60


def test_what_a_release_says_of_itself_is_one_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    changes, chinese = ((ROOT / name).read_text(encoding="utf-8") for name in ("CHANGELOG.md", "CHANGELOG.zh.md"))
    versions = re.findall(r"^## (\d+\.\d+\.\d+) \((unreleased|\d{4}-\d\d-\d\d)\)$", changes, re.M)
    assert versions and versions == re.findall(r"^## (\S+) \((.*)\)$", changes, re.M)
    assert len({tuple(re.findall(r"^## [\d.]+|^- ", text, re.M)) for text in (changes, chinese)}) == 1  # entry by entry
    assert project["version"] == causalqwen.__version__ == citation["version"] == versions[0][0]
    assert citation["license"] == project["license"] and citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors", "abstract"} <= citation.keys()


def test_every_issue_template_can_be_filled_in():
    for path in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")):
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        if path.name == "config.yml":
            assert form["blank_issues_enabled"] is True
            continue
        assert form["name"] and form["description"]
        fields = [field for field in form["body"] if field["type"] != "markdown"]
        assert len({field["id"] for field in fields}) == len(fields) > 1
        assert all(field["attributes"]["label"] for field in fields)
