"""Quantized and adapted weights of the backbone: the texts of `generate` on weights that are written out."""

import json
import shutil

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from reference import PROMPTS, Engines, compare, load_reference, reference, write_tiny
from safetensors.torch import load_file, save_file
from vllm.lora.request import LoRARequest

import causalqwen_vllm
from causalqwen import CausalDecoding

pytestmark = pytest.mark.filterwarnings("default")  # vLLM warns of what it uses itself
GROUP = 32  # weights that share a scale
CONTEXTS = ["value", "digits"]


@pytest.fixture(scope="module")
def engines():
    made = Engines()
    yield made
    made.close()


@pytest.fixture(scope="module")
def folders(tiny_tokenizer, tmp_path_factory):
    return {
        context: write_tiny(
            tmp_path_factory.mktemp(context), "llama", tiny_tokenizer, number_context=context, value_digits=2
        )
        for context in CONTEXTS
    }


def layers_of(weights):
    """The names of a decoder's matrices."""
    return [name for name in weights if ".layers." in name and name.endswith("_proj.weight")]


# ---- quantized -------------------------------------------------------------------------------------------------------


def quantize(folder, target, ignored=("re:.*lm_head",)):
    """A copy in compressed-tensors' format, the decoder in 4 bits; and another at `target` / "plain" with the same weights
    written out in float32."""
    for place in (target / "packed", target / "plain"):
        shutil.copytree(folder, place)
    weights = load_file(folder / "model.safetensors")
    plain, packed = dict(weights), dict(weights)
    for name in layers_of(weights):
        groups = packed.pop(name).unflatten(1, (-1, GROUP))
        scale = groups.abs().amax(-1, keepdim=True) / 7
        steps = (groups / scale).round()
        plain[name] = (steps * scale).flatten(1)
        packed[f"{name}_packed"] = pack_to_int32(steps.flatten(1).to(torch.int8), 4)
        packed[f"{name}_scale"] = scale.squeeze(-1)
        packed[f"{name}_shape"] = torch.tensor(plain[name].shape)
    save_file(plain, target / "plain" / "model.safetensors", {"format": "pt"})
    save_file(packed, target / "packed" / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    scheme = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear", "re:.*lm_head"], "weights": scheme}},
        "ignore": list(ignored),
    }
    (target / "packed" / "config.json").write_text(json.dumps(config))
    return target / "packed", target / "plain"


@pytest.mark.parametrize("context", CONTEXTS)
def test_four_bits_write_what_their_weights_write(context, folders, engines, tmp_path):
    """vLLM's product of 4 bits is one of bfloat16, so that first tokens are compared; those of other weights differ."""
    packed, plain = quantize(folders[context], tmp_path)
    llm = engines(packed, dtype="bfloat16")
    assert llm.llm_engine.vllm_config.quant_config is not None
    answers = causalqwen_vllm.generate(llm, PROMPTS, seed=1, max_tokens=1, params={"ignore_eos": True})
    found = [answer.token_ids[0] for answer in answers]
    same = {}
    for name, folder in (("plain", plain), ("not rounded", folders[context])):
        wanted = reference(load_reference(folder), PROMPTS, CausalDecoding.preset("standard"), [1], 1).tokens
        same[name] = sum(token == row[0] for token, row in zip(found, wanted, strict=True))
    print(f"four bits, {context}: first tokens the same of 64: {same}")
    assert same["plain"] >= 52 and same["not rounded"] <= 40


def test_a_quantized_vocabulary_is_refused(folders, engines, tmp_path):
    packed, _ = quantize(folders["value"], tmp_path, ignored=())
    engines.close()
    with pytest.raises(ValueError, match="leave lm_head out of what is quantized"):
        engines(packed)


# ---- adapted ---------------------------------------------------------------------------------------------------------


def write_adapter(folder, target, prefix="backbone.model.", only=("q_proj", "v_proj", "down_proj"), seed=0):
    """An adapter of random matrices as PEFT writes one; and a copy of the model with it merged at `target` / "merged"."""
    shutil.copytree(folder, target / "merged")
    weights = load_file(folder / "model.safetensors")
    matrices, rank, alpha = {}, 4, 8
    generator = torch.Generator().manual_seed(seed)
    for name in layers_of(weights):
        if name.split(".")[-2] in only:
            rows, columns = weights[name].shape
            down = torch.randn(rank, columns, generator=generator) * 0.1
            up = torch.randn(rows, rank, generator=generator) * 0.1
            weights[name] += alpha / rank * up @ down
            place = name.removeprefix("backbone.model.").removesuffix(".weight")
            matrices[f"base_model.model.{prefix}{place}.lora_A.weight"] = down
            matrices[f"base_model.model.{prefix}{place}.lora_B.weight"] = up
    save_file(weights, target / "merged" / "model.safetensors", {"format": "pt"})
    save_file(matrices, target / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(only), "bias": "none"}
    (target / "adapter_config.json").write_text(json.dumps(settings))
    return LoRARequest(target.name, seed + 1, str(target)), target / "merged"


def adapting(engines, folder):
    return engines(folder, enable_lora=True, max_lora_rank=8, max_loras=2)


@pytest.mark.parametrize("context", CONTEXTS)
def test_each_request_has_an_adapter_of_its_own(context, folders, engines, tmp_path):
    """One that names the layers as the graft does, and one that names them as its backbone does, in one batch."""
    folder, llm = folders[context], adapting(engines, folders[context])
    asked = [
        write_adapter(folder, tmp_path / f"{context}{seed}", prefix, seed=seed)
        for seed, prefix in enumerate(("backbone.model.", "model."))
    ]
    adapters, settings = [adapter for adapter, _ in asked], {"params": {"ignore_eos": True}, "max_tokens": 32}
    together = causalqwen_vllm.generate(llm, PROMPTS[:16], seed=1, adapter=adapters * 8, **settings)
    for index, (adapter, merged) in enumerate(asked):
        same, _ = compare(llm, load_reference(merged), "standard", PROMPTS[:16], 32, asked={"adapter": adapter})
        assert same >= 14
        alone = causalqwen_vllm.generate(llm, PROMPTS[:16], seed=1, adapter=adapter, **settings)
        assert [answer.token_ids for answer in together[index::2]] == [answer.token_ids for answer in alone[index::2]]
    plain = causalqwen_vllm.generate(llm, PROMPTS[:16], seed=1, **settings)
    assert not {answer.text for answer in plain} & {answer.text for answer in together}
    assert compare(llm, load_reference(folder), "standard", PROMPTS[:16], 32)[0] >= 15
    with pytest.raises(ValueError, match="ask for such requests apart"):
        causalqwen_vllm.generate(llm, PROMPTS[:2], seed=1, adapter=[adapters[0], None])


def test_an_adapter_of_the_heads_is_refused(folders, engines, tmp_path):
    llm = adapting(engines, folders["value"])
    adapter, _ = write_adapter(folders["value"], tmp_path / "heads", seed=7)
    matrices = load_file(tmp_path / "heads" / "adapter_model.safetensors")
    for part in "AB":
        matrices[f"base_model.model.abduction.loc_net.lora_{part}.weight"] = torch.zeros(4, 4)
    save_file(matrices, tmp_path / "heads" / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="loc_net"):
        causalqwen_vllm.generate(llm, PROMPTS[:2], seed=1, adapter=adapter)
    assert len(causalqwen_vllm.generate(llm, PROMPTS[:2], seed=1, max_tokens=4)) == 2  # and the engine goes on
