"""A saved model whose files were damaged: one clear error that names the file, or no effect."""

import json
import random
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM
from transformers.models.auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from causalqwen import CausalDecoding, CausalQwenForCausalLM
from causalqwen.modeling.loading import _check_types, load_model
from causalqwen.training import CalibrationSettings, calibrate
from conftest import graft_tiny

WRONG = [None, "x", "", -1, 0, 10**12, 1.5, float("nan"), True, [], [1], {}, {"a": 1}]
KINDS = ["cut", "flip", "empty", "delete", "garbage", "swap", *["retype"] * 4]
TEXT = "the long road goes past the small house and the old mill\n" * 12


@pytest.fixture(scope="module")
def whole(tiny_tokenizer, tmp_path_factory) -> Path:
    """A model that has every kind of setting."""
    model = graft_tiny("qwen2", tiny_tokenizer)
    calibrate(model, TEXT, CalibrationSettings(steps=5, temperature_positions=0, anchors=20))
    model.config.value_transform = {"kind": "quantile", "knots": [[-1.0, 0.0], [0.0, 1.0], [1.0, 5.0]]}
    model.config.value_range, model.config.interval_levels = [0.0, 5.0], [step / 100 for step in range(101)]
    folder = tmp_path_factory.mktemp("damage") / "whole"
    model.save_pretrained(folder)
    return folder


def places(node, at=()):
    """The path to every value of a JSON file; of a list, to the first ones."""
    pairs = node.items() if isinstance(node, dict) else enumerate(node[:3]) if isinstance(node, list) else ()
    for key, value in pairs:
        yield (*at, key)
        yield from places(value, (*at, key))


def damage(folder: Path, seed: int) -> str:
    chance = random.Random(seed)
    files = sorted(folder.iterdir())
    file, kind = chance.choice(files), chance.choice(KINDS)
    data, told = file.read_bytes(), ""
    if kind == "cut":
        file.write_bytes(data[: chance.randrange(len(data))])
    elif kind == "flip":
        place = chance.randrange(len(data))
        file.write_bytes(data[:place] + bytes([data[place] ^ (1 << chance.randrange(8))]) + data[place + 1 :])
    elif kind in ("empty", "garbage"):
        file.write_bytes(bytes(chance.randrange(256) for _ in range(200 * (kind == "garbage"))))
    elif kind == "delete":
        file.unlink()
    elif kind == "swap":
        other = chance.choice(files)
        told = other.name
        file.write_bytes(other.read_bytes())
        other.write_bytes(data)
    else:
        file = chance.choice([file for file in files if file.suffix == ".json" and file.name != "tokenizer.json"])
        whole = node = json.loads(file.read_text())
        *path, last = chance.choice(list(places(node)))
        for key in path:
            node = node[key]
        if chance.random() < 0.15:
            del node[last]
        else:
            node[last] = chance.choice(WRONG)
        told = f"{[*path, last]} {node.get(last) if isinstance(node, dict) else node}"
        file.write_text(json.dumps(whole))
    return f"seed {seed}: {kind} {file.name} {told}"


def use(model: CausalQwenForCausalLM, folder: Path) -> None:
    inputs = model.processor(["It is 5 and then", "A new year"], padding=True, padding_side="left", return_tensors="pt")
    out = model.generate(**inputs, causal_decoding=CausalDecoding.preset("persona", seed=1), max_new_tokens=4)
    model.processor.batch_decode(out.sequences, out.numeric_values)
    model.predict_number(["The long one is"])[0].interval(0.9)
    model.save_pretrained(folder)


@pytest.mark.filterwarnings("ignore")  # libraries complain of what they read
@pytest.mark.parametrize(
    "first", [0, *(pytest.param(start, marks=pytest.mark.slow) for start in range(150, 3000, 150))]
)
def test_a_damaged_model_gives_one_clear_error_or_is_as_it_was(whole, tmp_path, first):
    clear = 0
    for seed in range(first, first + 150):
        folder = tmp_path / "model"
        shutil.copytree(whole, folder)
        what = damage(folder, seed)
        try:
            model = load_model(folder)
        except ValueError as error:
            assert str(folder) in str(error) and "\n" not in str(error), what
            clear += 1
        else:
            try:
                use(model, tmp_path / "saved")
            except Exception as error:  # which damage it was is what one wants to know
                raise AssertionError(what) from error
        shutil.rmtree(folder)
        shutil.rmtree(tmp_path / "saved", ignore_errors=True)
    assert clear > 75


@pytest.mark.parametrize(
    ("file", "path", "value", "message"),
    [
        (
            "config.json",
            ["fitted", "scores", "anchor_tokens"],
            10**12,
            r"config.json is damaged: anchor_tokens 1000000000000 are more than",
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
        (
            "config.json",
            ["settings", "value_branch", "value_branch_layers"],
            10**12,
            r"value_branch_layers: input should be less than or equal to 100, got 1000000000000",
        ),
        ("config.json", ["settings", "values", "value_digit"], 3, r"did you mean settings.values.value_digits\?"),
        ("config.json", ["settings", "value_digits"], 3, r"settings.value_digits: expected settings by name, got 3"),
        ("config.json", ["fitted"], [], r"fitted: expected settings by part, got \[\]"),
        ("config.json", ["text_config", "num_hidden_layers"], 10**9, r"config.json is damaged: .*num_hidden_layers"),
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
    CausalQwenForCausalLM.from_backbone(backbone, tokenizer=tiny_tokenizer).save_pretrained(tmp_path)
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
