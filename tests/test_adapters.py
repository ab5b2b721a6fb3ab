"""PEFT's adapters on the heads, and weights that are changed in place: whatever a weight is, every way to a result reads it."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

from causalqwen import CausalDecoding, CausalQwenForCausalLM
from conftest import graft_tiny

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)  # PEFT asks it

TEXTS = ["It costs 1,272.5 dollars and 7 cents.", "From -3 to 99.9, all 5 of them."]
PARTS = ["abduction.loc_net", "abduction.scale_net", "action.value_head", "backbone.lm_head"]


def outputs(model, *, grad: bool, skip_logits: bool = False):
    inputs = model.processor(TEXTS, padding=True, return_tensors="pt")
    with torch.set_grad_enabled(grad):
        found = model(**inputs, labels=inputs["input_ids"], output_ovr=True, skip_logits=skip_logits)
    names = ["loss", "loss_cls", "loss_reg", "loc_U", "scale_U", "loc_Y", "scale_Y", "num_prob", "ovr_probs", "scale_S"]
    return {name: getattr(found, name).detach() for name in names}


def same(one, other, **tolerance):
    return all(torch.allclose(one[name], other[name], **({"rtol": 1e-4, "atol": 1e-5} | tolerance)) for name in one)


def adapted(model, part: str, **settings):
    """The model with an adapter of some size on a part, and what its weight then is."""
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=rf"{part.replace('.', r'[.]')}", init_lora_weights=False, **settings)
    peft = get_peft_model(model, config).eval()
    layer = model.get_submodule(part)
    base = layer.get_base_layer().weight.detach()
    delta = layer.lora_B["default"].weight @ layer.lora_A["default"].weight * layer.scaling["default"]
    return peft, base + delta.detach()


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("start", ["faithful", "minimal"])
def test_an_adapter_acts_like_the_weight_that_it_makes(tiny_tokenizer, part, start):
    plain = graft_tiny("mistral", tiny_tokenizer, start=start).eval()  # its lm_head is not tied
    before = outputs(plain, grad=False)
    written = copy.deepcopy(plain)
    peft, weight = adapted(plain, part)
    with torch.no_grad():
        written.get_submodule(part).weight.copy_(weight)
    expected = outputs(written, grad=False)
    assert not same(before, expected, rtol=1e-3, atol=1e-3)
    for grad in (False, True):
        for skip_logits in (False, True):
            assert same(outputs(plain, grad=grad, skip_logits=skip_logits), expected), (grad, skip_logits)
    inputs = plain.processor("They say that it is", prompt=True, return_tensors="pt")
    for preset in ("standard", "persona"):
        plan = CausalDecoding.preset(preset, seed=3)
        texts = [m.generate(**inputs, causal_decoding=plan, max_new_tokens=8).sequences for m in (plain, written)]
        assert torch.equal(*texts)
    with peft.disable_adapter():
        assert same(outputs(plain, grad=False), before)
    with pytest.raises(ValueError, match=r"a PeftModel.* is no backbone: .* by merge_and_unload\(\)"):
        CausalQwenForCausalLM.from_backbone(peft, tokenizer=tiny_tokenizer)
    merged = peft.merge_and_unload()
    assert merged is plain and same(outputs(plain, grad=False), expected)


@pytest.mark.parametrize("part", PARTS)
def test_an_adapter_learns(tiny_tokenizer, part):
    model = graft_tiny("mistral", tiny_tokenizer)
    adapted(model, part, lora_dropout=0.5)
    model.train()
    inputs = model.processor(TEXTS, padding=True, return_tensors="pt")
    model(**inputs, labels=inputs["input_ids"], skip_logits=True).loss.backward()
    layer = model.get_submodule(part)
    assert layer.lora_A["default"].weight.grad.abs().sum() > 0 and layer.lora_B["default"].weight.grad.abs().sum() > 0
    assert layer.training


@pytest.mark.parametrize("part", PARTS)
def test_a_weight_that_is_changed_in_place_is_read_anew(tiny_tokenizer, part):
    """Through `.data` no version is counted."""
    model = graft_tiny("mistral", tiny_tokenizer, start="minimal").eval()
    model.predict_number("It is")
    before = outputs(model, grad=False)
    torch.manual_seed(1)
    change = torch.randn_like(model.get_submodule(part).weight)
    model.get_submodule(part).weight.data += change
    after = outputs(model, grad=False)
    assert not same(before, after, rtol=1e-3, atol=1e-3)
    fresh = graft_tiny("mistral", tiny_tokenizer, start="minimal").eval()
    with torch.no_grad():
        fresh.get_submodule(part).weight.add_(change)
    assert same(outputs(fresh, grad=False), after)


@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed")  # a layer without bias cannot be merged then
def test_the_bias_of_an_adapter_counts_wherever_a_bias_is_read(tiny_tokenizer):
    model = graft_tiny("mistral", tiny_tokenizer).eval()
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["lm_head", "value_head"], init_lora_weights=False, lora_bias=True)
    get_peft_model(model, config).eval()
    for layer in (model.action.value_head, model.backbone.lm_head):
        torch.nn.init.normal_(layer.lora_B["default"].bias)
    size = model.config.causal_size
    value, _ = model.action.value(torch.zeros(size), torch.ones(size))
    assert value.item() == pytest.approx(model.action.value_head(torch.zeros(size)).item(), abs=1e-6) != 0
    assert same(outputs(model, grad=False), outputs(model, grad=False, skip_logits=True))


def test_a_large_bias_costs_an_adapted_weight_no_digits(tiny_tokenizer):
    model = graft_tiny("mistral", tiny_tokenizer)
    before = model.action.value_head.weight.detach().clone()
    model.action.value_head.bias.data.fill_(1e5)
    get_peft_model(model, LoraConfig(r=2, target_modules=["value_head"]))  # B is 0
    assert torch.equal(model.action.value_linear[0], before) and model.action.value_linear[1].item() == 1e5
