"""Files that were damaged: one clear error that names the file, or no effect; by name, what tests/campaign draws at random."""

import io
import json
import resource
import shutil
from contextlib import redirect_stderr
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.models.auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from campaign.files import fit_everything
from causalqwen import CausalQwenForCausalLM, CausalQwenProcessor, Individual, Population
from causalqwen.data import encode_rows, read_rows
from causalqwen.data.columns import read_table
from causalqwen.data.people import read_questions
from causalqwen.files import SUMS, alone, check_sums, write_sums, writing_folder
from causalqwen.modeling.loading import _check_types, check_files, load_model
from causalqwen.training import FactStore, TrainSettings
from causalqwen.training.trainer import last_checkpoint
from conftest import graft_tiny
from test_cli import run


@pytest.fixture(scope="module")
def whole(tiny_tokenizer, tmp_path_factory) -> Path:
    """A model that has every kind of setting."""
    model = graft_tiny("qwen2", tiny_tokenizer)
    fit_everything(model)
    folder = tmp_path_factory.mktemp("damage") / "whole"
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("file", "path", "value", "message"),
    [
        (
            "config.json",
            ["fitted", "scores", "score_slope"],
            -1,
            r"config.json is damaged: score_slope: input should be greater than or equal to 0, got -1",
        ),
        (
            "config.json",
            ["settings", "training", "gate_alpha"],
            "x",
            r"config.json is damaged: gate_alpha: input should be a valid number, got 'x'",
        ),
        (
            "config.json",
            ["text_config", "hidden_size"],
            "32",
            r"text_config.hidden_size: expected a whole number, got '32'",
        ),
        ("config.json", ["settings", "values", "value_digit"], 3, r"did you mean settings.values.value_digits\?"),
        ("config.json", ["settings", "value_digits"], 3, r"settings.value_digits: expected settings by name, got 3"),
        ("config.json", ["fitted"], [], r"fitted: expected settings by part, got \[\]"),
        ("config.json", ["text_config", "num_hidden_layers"], 10**9, r"config.json is damaged: .*num_hidden_layers"),
        (
            "config.json",
            ["text_config", "max_position_embeddings"],
            -1,
            r"config.json is damaged: max_position_embeddings",
        ),
        ("config.json", ["text_config", "vocab_size"], 10**12, r"the embedding has \d+ rows"),
        ("generation_config.json", ["eos_token_id"], {"a": 1}, r"generation_config.json is damaged: eos_token_id"),
        (
            "processor_config.json",
            ["num_token_id"],
            3,
            r"processor_config.json is damaged: num_token_id is 3, and that of",
        ),
        ("processor_config.json", ["number_rules", "kinds"], 7, r"processor_config.json is damaged"),
        (
            "tokenizer_config.json",
            ["pad_token"],
            "",
            r"tokenizer_config.json is damaged: it names no token for pad_token",
        ),
    ],
)
def test_the_file_and_the_field_are_named(whole, tmp_path, file, path, value, message):
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    content = node = json.loads((folder / file).read_text())
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    (folder / file).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        load_model(folder)


def test_a_model_that_is_loaded_and_saved_keeps_its_tokenizer(whole, tmp_path):
    """Whether or not anybody has asked for its processor."""
    CausalQwenForCausalLM.from_pretrained(whole).save_pretrained(tmp_path / "copy")
    assert (
        load_model(tmp_path / "copy").processor("It is 5")["input_ids"]
        == load_model(whole).processor("It is 5")["input_ids"]
    )
    assert {file.name for file in whole.iterdir()} == {file.name for file in (tmp_path / "copy").iterdir()}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
        ("qwen2", {"max_window_layers": 0}),
        ("llama", {"pad_token_id": -1}),
    ],
)
def test_what_is_unusual_is_not_damaged(tiny_tokenizer, tmp_path, kind, settings):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": len(tiny_tokenizer) + 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = CONFIG_MAPPING[kind](**sizes, **heads, **settings)
    backbone = AutoModelForCausalLM.from_config(config)
    model = CausalQwenForCausalLM.from_backbone(backbone, tokenizer=tiny_tokenizer)
    try:
        model.save_pretrained(tmp_path)
    except ValueError as error:
        if "GenerationConfig is invalid" not in str(error) or Version(transformers.__version__) >= Version("5.24"):
            raise
        pytest.skip("older versions of transformers do not save it")
    assert load_model(tmp_path).predict_number(["It is"])[0].scale > 0


def test_the_defaults_of_every_decoder_are_healthy():
    checked = 0
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            defaults = CONFIG_MAPPING[kind]()
        except Exception:  # some have none
            continue
        _check_types(defaults.to_dict(), defaults)
        checked += 1
    assert checked > 100


# ---- checksums -------------------------------------------------------------------------------------------------------


def flip(path: Path, place: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)


def test_the_doctor_tells_of_weights_and_settings_that_are_not_what_was_saved(whole, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    check_files(folder)
    flip(folder / "model.safetensors", -3)
    load_model(folder)  # whoever loads does not read every byte first
    assert (
        "model.safetensors is not what was saved: damaged, or changed since"
        in run("doctor", "--scan", folder, code=1).stderr
    )
    flip(folder / "model.safetensors", -3)
    check_files(folder)
    (folder / "processor_config.json").unlink()
    with pytest.raises(ValueError, match=r"processor_config.json is not what was saved: .*SHA-256 no file"):
        check_files(folder)
    shutil.copy(whole / "processor_config.json", folder)
    (folder / "README.md").write_text("a card of one's own")
    (folder / "metrics.jsonl").write_text("{}")
    check_files(folder)
    (folder / SUMS).write_text("what")
    with pytest.raises(ValueError, match=r"SHA256SUMS is damaged: 'what' is no checksum of a file"):
        check_files(folder)
    (folder / SUMS).write_text("0" * 64 + "  ../model\n")  # nothing outside the folder is read
    with pytest.raises(ValueError, match="is no checksum of a file"):
        check_files(folder)
    (folder / SUMS).unlink()  # a checkpoint of before there were any
    check_files(folder)
    load_model(folder).save_pretrained(folder)
    assert (folder / SUMS).exists()
    check_files(folder)


def people(folder: Path) -> dict:
    """Files of somebody and of several, and how each is read."""
    Individual(torch.tensor([0.25, 0.5]), "Ann").save(folder / "who.safetensors")
    Population(["Ann", "Bob"], torch.randn(2, 1, 2), {"age": [1, 2]}).save(folder / "people.safetensors")
    one, several = folder / "who.safetensors", folder / "people.safetensors"
    return {
        one: lambda: (Individual.load(one).factor.tolist(), Individual.load(one).name),
        several: lambda: (Population.load(several).draws.tolist(), Population.load(several).facts),
    }


def test_no_bit_of_an_individual_or_a_population_can_turn_unnoticed(tmp_path):
    for path, read in people(tmp_path).items():
        told, refused = read(), 0
        for place in range(0, path.stat().st_size, 3):
            flip(path, place, place % 8)
            try:
                assert read() == told, place
            except ValueError as error:
                assert path.name in str(error) and "\n" not in str(error), (place, error)
                refused += 1
            flip(path, place, place % 8)
        assert refused > 0.8 * path.stat().st_size / 3


def test_people_saved_without_a_checksum_or_by_a_later_version(tmp_path):
    about = {"kind": "individual", "name": "Ann", "evidence": []}
    tensors = {"factor": torch.tensor([0.25, 0.5], dtype=torch.float64)}
    save_file(tensors, tmp_path / "old", metadata={"causalqwen": json.dumps(about)})
    assert Individual.load(tmp_path / "old").name == "Ann"
    for later in ({"evidence": [{"heard": 1}]}, {"evidence": 3}):
        save_file(tensors, tmp_path / "later", metadata={"causalqwen": json.dumps(about | later)})
        with pytest.raises(ValueError, match="later holds no individual that can be read here"):
            Individual.load(tmp_path / "later")
    save_file(tensors, tmp_path / "other", metadata={"causalqwen": "[1]"})
    with pytest.raises(ValueError, match="other holds no individual"):
        Individual.load(tmp_path / "other")
    with pytest.raises(FileNotFoundError):
        Individual.load(tmp_path / "nobody")


def test_kept_facts_that_changed_are_not_learned_from(tiny_qwen, tmp_path):
    rows = [{"prompt": f"The {i}th one is", "value": i} for i in range(4)]
    examples = encode_rows(rows, tiny_qwen.processor)
    folder = FactStore.build(tiny_qwen, examples, tmp_path).folder
    check_sums(folder)
    sums = (folder / SUMS).read_text()
    (folder / SUMS).write_text("")
    with pytest.raises(ValueError, match="SHA256SUMS is damaged: it is empty"):
        check_sums(folder)
    (folder / SUMS).write_text(sums)
    flip(folder / "features.npy", -1)
    with pytest.raises(
        ValueError, match=r"is damaged: .*features.npy is not what was saved.*; remove it, and its rows"
    ):
        FactStore.build(tiny_qwen, examples, tmp_path)
    (folder / SUMS).unlink()
    (folder / "values.npy").write_bytes(b"")
    with pytest.raises(ValueError, match="is damaged: .*; remove it"):
        FactStore.build(tiny_qwen, examples, tmp_path)
    shutil.rmtree(folder)
    assert np.isfinite(FactStore.build(tiny_qwen, examples, tmp_path).facts.values).any()


# ---- who writes, and what is left ------------------------------------------------------------------------------------


def test_of_two_who_write_to_one_place_the_second_is_told(whole, tmp_path):
    output = tmp_path / "deep" / "out"
    with alone(output):
        with pytest.raises(ValueError, match=r"another process is writing .*out: wait for it"), alone(output):
            pass
        told = run("graft", "--backbone", whole, "--output", output, code=1).stderr
        assert "another process is writing" in told
        with alone(tmp_path / "other"):
            pass
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(KeyError), alone(output):
        raise KeyError
    with alone(output):
        output.write_text("made")
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]


def test_what_a_killed_process_left_of_a_folder_is_removed_and_what_another_writes_is_not(tmp_path):
    (tmp_path / "made.part-1").mkdir()
    (tmp_path / "made.part-1" / "half").write_text("left")
    (tmp_path / "other.part-1").mkdir()
    with writing_folder(tmp_path / "made") as part:
        assert not (tmp_path / "made.part-1").exists() and (tmp_path / "other.part-1").exists()
        living = part.rename(tmp_path / "made.part-2")
        with writing_folder(tmp_path / "made"):
            assert living.exists()
        living.rename(part)
        shutil.rmtree(tmp_path / "made")
    assert (tmp_path / "made").is_dir()


def test_half_a_surrogate_pair_is_no_text(tiny_tokenizer):
    with pytest.raises(ValueError, match="text 1: character 2 is half of a surrogate pair, which is no text"):
        CausalQwenProcessor(tiny_tokenizer)(["fine", "a \ud800"])


DEEP = b"[" * 100_000
READERS = {
    "rows.jsonl": read_rows,
    "rows.csv": read_rows,
    "rows.parquet": read_rows,
    "table.csv": read_table,
    "table.jsonl": read_table,
    "table.parquet": read_table,
    "questions.jsonl": read_questions,
    "settings.yaml": TrainSettings.from_yaml,
}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", DEEP, r"rows.jsonl, row 1: it is nested too deeply"),
        ("rows.parquet", b"PAR1" + bytes(40) + b"PAR1", r"rows.parquet, after row 0: "),
        ("table.csv", b"a,b\n1,\xff\n", r"table.csv, line 2: not UTF-8 text"),
        ("table.csv", b'a,b\n1,"x"y\n', r"table.csv, after row 0: "),
        ("table.jsonl", b'{"a": 1}\n\xff', r"table.jsonl, line 2: not UTF-8 text"),
        ("table.jsonl", DEEP, r"table.jsonl, row 1: not JSON"),
        ("table.parquet", b"PAR1" + bytes(40) + b"PAR1", r"table.parquet: "),
        ("questions.jsonl", b'{"prompt": "a"}\n\xff', r"questions.jsonl, line 2: not UTF-8 text"),
        ("questions.jsonl", DEEP, r"questions.jsonl, row 1: not JSON"),
        ("settings.yaml", b"seed: \x00", r"settings.yaml is not YAML: "),
        ("settings.yaml", b"seed: \xff", r"settings.yaml is not YAML: "),
        ("settings.yaml", DEEP, r"settings.yaml is not YAML: "),
    ],
)
def test_what_people_write_and_breaks_inside_gives_one_line_with_its_name(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as raised:
        READERS[name](tmp_path / name)
    assert "\n" not in str(raised.value)


def test_a_line_separator_inside_a_text_is_no_end_of_a_line(tmp_path):
    (tmp_path / "questions.jsonl").write_text('{"prompt": "one\u2028two"}\n')
    assert [one.prompt for one in read_questions(tmp_path / "questions.jsonl")] == ["one\u2028two"]


def test_a_training_checkpoint_that_is_damaged_is_passed_over(tmp_path):
    for step in (1, 2):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "trainer_state.json").write_text("{}")
        (folder / "optimizer.pt").write_bytes(b"state")
        write_sums(folder)
    assert last_checkpoint(tmp_path).name == "checkpoint-2"
    flip(tmp_path / "checkpoint-2" / "optimizer.pt", 0)
    assert last_checkpoint(tmp_path).name == "checkpoint-1"


def test_disks_that_are_full_are_told_before_anything_is_written_through_a_map(tiny_qwen, tmp_path):
    """Also where the weights of somebody are written."""
    rows = [{"text": f"The {i}th one is {i}, and so on and on and on"} for i in range(20)]
    examples, limit = encode_rows(rows, tiny_qwen.processor), resource.getrlimit(resource.RLIMIT_FSIZE)
    who = Individual.from_seed(1, 32)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, limit[1]))
    try:
        with pytest.raises(OSError, match=r"features.npy|File too large"), redirect_stderr(io.StringIO()):
            FactStore.build(tiny_qwen, examples, tmp_path)
        with pytest.raises(OSError, match=r"who.safetensors cannot be written: "):
            who.save(tmp_path / "who.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert list(tmp_path.iterdir()) == []
