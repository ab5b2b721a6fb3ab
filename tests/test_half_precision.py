"""Every command on backbones of half precision, as most are stored: made, saved, loaded again, asked."""

import json

import pytest
import torch

from causalqwen import PRESETS, CausalQwenForCausalLM
from causalqwen.modeling.loading import load_model
from conftest import FAMILIES, graft_tiny, make_backbone
from test_cli import ROWS, run, write
from test_serving import serving

STAGES = {
    "values": "values: {epochs: 4, batch_size: 8}",
    "heads": "values: {epochs: 1, batch_size: 8}\nheads: {epochs: 1}",
    "domain": "values: {epochs: 1, batch_size: 8}\nheads: {domain: ours}",
    "lora": "values: {epochs: 1, batch_size: 8}\nlora: {epochs: 1}",
    "backbone": "values: {epochs: 1, batch_size: 8}\nbackbone: {epochs: 1, layers: 1}",
}
TEXT = "We, the people, look back on what was done and forward to what is not, and we say so. " * 8
CASES = [
    ("llama", "float16"),
    ("qwen2", "bfloat16"),
    *(pytest.param(family, "bfloat16", marks=pytest.mark.slow) for family in FAMILIES if family != "qwen2"),
]


def heads_of(model):
    """Floats of the heads that are not the backbone's own: they are kept in float32."""
    for name, tensor in model.state_dict().items():
        if not name.startswith(("backbone.", "abduction.loc_net", "score_head")):
            yield name, tensor


@pytest.fixture(scope="module")
def place(tiny_tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("half")
    write(folder / "rows.jsonl", ROWS[:24])
    (folder / "text.txt").write_text(TEXT)
    (folder / "more.txt").write_text("The long one is 31, and that is all. " * 4)
    for name, settings in STAGES.items():
        (folder / f"{name}.yaml").write_text(f"{settings}\nevaluations: 1\nlogging_steps: 2\n")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_every_command_works_and_what_is_saved_is_what_is_loaded(place, tiny_tokenizer, tmp_path, family, dtype):
    bare, model, rows = tmp_path / "bare", tmp_path / "model", place / "rows.jsonl"
    make_backbone(family, tiny_tokenizer).to(getattr(torch, dtype)).save_pretrained(bare)
    tiny_tokenizer.save_pretrained(bare)
    made = json.loads(run("graft", "--backbone", bare, "--output", model, "--json").stdout)
    assert made["identical_logits"] == made["tokens"]
    assert made["agreement"] > 0.9  # a random backbone may choose a row that no token uses
    trained = model
    for name in STAGES:
        before, trained = trained, tmp_path / name
        arguments = ("--train", rows, "--eval", rows, "--output", trained, "--config", place / f"{name}.yaml")
        scores = json.loads(run("train", "--model", before, *arguments, "--json").stdout)
        assert all(scores["metrics"][key] == scores["metrics"][key] for key in ("crps", "cls_loss", "median_error"))
    loaded = load_model(trained)
    assert loaded.dtype == getattr(torch, dtype)
    for name, tensor in heads_of(loaded):
        assert tensor.dtype == torch.float32, name

    run("predict", "--model", trained, "--input", rows, "--output", tmp_path / "predicted.jsonl")
    for preset in PRESETS:
        told = run("generate", "--model", trained, "--prompt", "The long one is", "--preset", preset, "--seed", 3,
                   "--max-new-tokens", 6, "--json")  # fmt: skip
        assert json.loads(told.stdout)["text"].startswith("The long one is")
    who, text = tmp_path / "who.safetensors", place / "text.txt"
    run("abduct", "--model", trained, "--text", text, "--output", who)
    better = ("--prior", who, "--output", tmp_path / "better.safetensors", "--likelihood", "ovr")
    run("abduct", "--model", trained, "--text", place / "more.txt", *better)
    asked = ("--prompt", "The long one", "--text", " is 31, and", "--edit", "The short one")
    assert run("counterfactual", "--model", trained, *asked, "--individual", who).stdout
    run(
        "evaluate",
        "--model",
        trained,
        "--data",
        rows,
        "--language",
        text,
        "--texts",
        2,
        "--output",
        tmp_path / "scores",
    )
    with serving(loaded) as server:
        assert server.complete(causal={"preset": "persona"}).choices[0].text


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "settings", [{}, {"deep_abduction": True}, {"causal_size": 16}, {"token_thresholds": 0.1}], ids=str
)
def test_what_is_saved_in_half_precision_comes_back_bit_for_bit(tiny_tokenizer, tmp_path, dtype, settings):
    make_backbone("qwen2", tiny_tokenizer).save_pretrained(tmp_path / "bare")
    tiny_tokenizer.save_pretrained(tmp_path / "bare")
    torch.manual_seed(1)
    kind = getattr(torch, dtype)
    model = CausalQwenForCausalLM.from_backbone(tmp_path / "bare", dtype=kind, copy_numbers=True, **settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.startswith("backbone."):
                parameter += 0.1 * torch.randn(parameter.shape)  # no float32 of the heads is one of half precision
    model.save_pretrained(tmp_path / "model")
    loaded = CausalQwenForCausalLM.from_pretrained(tmp_path / "model")
    for (name, ours), (_, theirs) in zip(model.state_dict().items(), loaded.state_dict().items(), strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), name
    inputs = model.processor(["It is 5 and then", "A new year"], padding=True, return_tensors="pt")
    with torch.no_grad():
        one, other = model(**inputs, output_ovr=True), loaded(**inputs, output_ovr=True)
    for name in ("logits", "scale_U", "loc_Y", "scale_Y", "ovr_probs"):
        assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_float32_checkpoint_is_loaded_in_half_precision_and_still_learns(place, tiny_tokenizer, tmp_path, dtype):
    graft_tiny("qwen2", tiny_tokenizer).save_pretrained(tmp_path / "model")
    model = load_model(tmp_path / "model", dtype=dtype)
    assert model.dtype == dtype
    for name, tensor in heads_of(model):
        assert tensor.dtype == torch.float32, name
    assert model.predict_number("The long one is")[0].median == model.predict_number("The long one is")[0].median
    assert model.abduct(TEXT).evidence[0].gained >= 0
