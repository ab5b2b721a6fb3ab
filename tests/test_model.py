"""The grafted model on tiny backbones of four families."""

import json
import math
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoProcessor, BertConfig, BertForMaskedLM

from causalqwen import (
    AbductionNetwork,
    CausalDecoding,
    CausalQwenConfig,
    CausalQwenForCausalLM,
    CausalQwenProcessor,
    Intervention,
    Observation,
)
from causalqwen.distributions import get_family
from causalqwen.modeling import scores
from causalqwen.modeling.abduction import softplus_inverse
from causalqwen.modeling.configuration import SECTIONS
from causalqwen.modeling.loading import load_model
from causalqwen.modeling.outputs import CACHE
from causalqwen.numbers.law import WANTED_LEVELS
from conftest import FREE_ROWS, TIED, action_of, graft_tiny, make_backbone

TEXTS = ["A new year has begun.", "We, the people, look back on what was done and forward to what is not.", "Yes"]
NUMBERS = ["It costs 1,272.5 dollars and 7 cents.", "From -3 to 99.9, all 5 of them.", "no number"]


def batch(model, texts, **kwargs):
    return model.processor(texts, padding=True, return_tensors="pt", **kwargs)


# ---- nothing is lost -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_text_without_numbers_has_the_backbones_logits_to_the_last_bit(tiny, side, rows):
    inputs = batch(tiny, TEXTS[:rows], padding_side=side)
    with torch.no_grad():
        theirs = tiny.backbone(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        ours = tiny(**inputs, output_ovr=True)
        kept = tiny(**inputs, logits_to_keep=1).logits
        plain = {k: v for k, v in inputs.items() if k != "numeric_values"}
        kept_theirs = tiny.backbone(**plain, logits_to_keep=1).logits
    assert torch.equal(ours.logits[..., : theirs.shape[-1]], theirs)
    assert torch.equal(kept[..., : theirs.shape[-1]], kept_theirs)
    free = torch.zeros(theirs.shape[-1], dtype=torch.bool)
    free[tiny.config.free_token_ids] = True
    assert torch.equal(ours.decisions, theirs.masked_fill(free, -torch.inf).argmax(-1))
    assert (ours.ovr_probs[..., : theirs.shape[-1]][..., free] == 0).all()


@pytest.mark.parametrize("skip_logits", [False, True])
def test_a_batch_has_one_loss_whichever_side_it_is_padded_on(tiny, skip_logits):
    losses = []
    for side in ("right", "left"):
        inputs = batch(tiny, NUMBERS, padding_side=side)
        with torch.no_grad():
            losses.append(tiny(**inputs, labels=inputs["input_ids"], skip_logits=skip_logits))
    assert losses[0].loss_cls.item() == pytest.approx(losses[1].loss_cls.item(), rel=1e-4)
    assert losses[0].loss_reg.item() == pytest.approx(losses[1].loss_reg.item(), rel=1e-4)


def test_num_stands_on_the_first_free_row_or_behind_the_matrix(tiny, family, tiny_tokenizer):
    config, size = tiny.config, len(tiny_tokenizer)
    assert config.num_token_id == size == tiny.processor.num_token_id
    assert config.num_token_appended == (FREE_ROWS[family] == 0)
    assert config.free_token_ids == list(range(size + 1, size + FREE_ROWS[family]))
    assert config.vocab_size == size + max(FREE_ROWS[family], 1)
    head, embedding = tiny.backbone.get_output_embeddings().weight, tiny.backbone.get_input_embeddings().weight
    assert (head is embedding) == TIED[family]


def test_a_value_changes_what_follows_it_and_nothing_before(family, tiny_tokenizer):
    tiny = graft_tiny(family, tiny_tokenizer, number_context="value")
    one, other = batch(tiny, ["It is 5 now and then"]), batch(tiny, ["It is 500 now and then"])
    assert torch.equal(one["input_ids"], other["input_ids"])
    place = (one["input_ids"][0] == tiny.config.num_token_id).nonzero().item()
    with torch.no_grad():
        a, b = tiny(**one).logits[0], tiny(**other).logits[0]
    assert torch.equal(a[:place], b[:place]) and not torch.equal(a[place:], b[place:])


def test_values_off_num_and_unknown_values_count_as_zero(tiny_llama):
    inputs = batch(tiny_llama, NUMBERS)
    noisy = inputs["numeric_values"].clone()
    noisy[inputs["input_ids"] != tiny_llama.config.num_token_id] = torch.nan
    clean = tiny_llama(**inputs)
    other = tiny_llama(**{**inputs, "numeric_values": noisy})
    assert torch.equal(clean.logits, other.logits)
    other.logits.sum().backward()
    assert torch.isfinite(tiny_llama.numeric_embedding.direction.grad).all()


def test_a_deep_abduction_also_starts_as_the_backbone(tiny_tokenizer, tmp_path):
    model = graft_tiny("qwen3", tiny_tokenizer, deep_abduction=True, value_branch=False)
    inputs = batch(model, TEXTS)
    with torch.no_grad():
        theirs = model.backbone(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        assert torch.equal(model(**inputs).logits, theirs)
        model.abduction.residual.last.weight.normal_()
        moved = model(**inputs)
        assert not torch.equal(moved.logits, theirs) and (moved.scale_U.std() > 0)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(CausalQwenForCausalLM.from_pretrained(tmp_path)(**inputs).loc_U, moved.loc_U)


def test_a_part_that_a_checkpoint_lacks_gets_its_start_values(tiny_llama, tmp_path):
    tiny_llama.save_pretrained(tmp_path)
    inputs = batch(tiny_llama, TEXTS)
    deeper = CausalQwenForCausalLM.from_pretrained(tmp_path, deep_abduction=True)
    hidden, last = deeper.abduction.residual.hidden[0], deeper.abduction.residual.last
    assert hidden.weight.std() > 0 and not hidden.bias.any() and not last.weight.any() and not last.bias.any()
    with torch.no_grad():
        assert torch.equal(deeper(**inputs).logits, tiny_llama(**inputs).logits)
        assert torch.equal(deeper(**inputs).loc_Y, tiny_llama(**inputs).loc_Y)


# ---- the parts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("activation", ["softplus", "exp"])
def test_abduction_starts_as_the_identity_with_a_constant_scale(deep, activation):
    network = AbductionNetwork(6, deep=deep, scale_activation=activation, initial_scale=10.0)
    z = torch.randn(2, 3, 6)
    loc, scale = network(z)
    assert torch.equal(loc, z)
    torch.testing.assert_close(scale, torch.full_like(z, 10.0))


def test_softplus_inverse_is_close_to_its_argument_not_less_log_two():
    """Overview 4, step 2, has gamma - log 2."""
    assert softplus_inverse(10.0) == pytest.approx(10.0, abs=1e-4)
    assert torch.nn.functional.softplus(torch.tensor(softplus_inverse(0.001))).item() == pytest.approx(0.001, rel=1e-4)


@pytest.mark.parametrize("family", ["cauchy", "gaussian"])
def test_action_is_the_linear_law_on_individual_and_noise(family):
    torch.manual_seed(0)
    action, lm_head = action_of(5, 7, score_scale="documents", vocabulary_family=family, initial_noise=0.3)
    loc, scale = torch.randn(4, 5), torch.rand(4, 5)
    law = get_family(family)
    loc_s, scale_s = (column[:, :7] for column in action(loc, scale, lm_head))
    noise = torch.full_like(scale, 0.3)
    augmented = torch.cat([lm_head.weight, lm_head.weight], dim=1)  # on [U, noise]
    torch.testing.assert_close(loc_s, loc @ lm_head.weight.T + lm_head.bias)
    torch.testing.assert_close(scale_s, law.linear_scale(torch.cat([scale, noise], dim=1), augmented))


def test_the_value_scale_is_not_the_l1_norm_times_one_scale():
    """Overview 2.4 writes |W_reg|_1 scale, which is |W_reg| scale only where all coordinates have one scale."""
    action, _ = action_of(5, 7)
    scale = torch.rand(1, 5)
    _, right = action.value(torch.zeros(1, 5), scale)
    weight = action.value_head.weight.abs()
    torch.testing.assert_close(right, (weight * scale).sum(-1))
    assert not torch.allclose(right, weight.sum() * scale.mean())


@pytest.mark.parametrize("vocabulary_family", ["cauchy", "gaussian"])
def test_the_equal_scale_bounds_every_tokens_own(tiny_tokenizer, vocabulary_family):
    model = graft_tiny("qwen2", tiny_tokenizer, vocabulary_family=vocabulary_family)
    with torch.no_grad():
        model.action.num_row.normal_(std=5.0)  # far beyond the other rows: it is kept within them
        model.abduction.scale_net.weight.normal_()
        scale = torch.rand(3, 32)
        head = model.get_output_embeddings()
        common = model.action.score_scale_of(scale, head)
        rows = head.weight[model.action.vocabulary_mask].clone()
        rows[-1] = model.vocabulary().number_row()
        own = model.action.law.linear_scale(scale, rows)
    assert model.action.num_row.abs().max() > rows[-1].abs().max()
    assert (own <= common * (1 + 1e-5)).all()


def test_training_num_moves_neither_the_common_scale_nor_other_scores(tiny):
    inputs = batch(tiny, TEXTS)
    with torch.no_grad():
        before = tiny(**inputs, output_ovr=True)
        tiny.action.num_row += torch.randn_like(tiny.action.num_row) * 10
        tiny.action.num_bias += 3.0
        after = tiny(**inputs, output_ovr=True)
    others = [i for i in range(tiny.config.vocab_size) if i != tiny.config.num_token_id]
    assert torch.equal(before.logits[..., others], after.logits[..., others])
    assert torch.equal(before.scale_S[..., others], after.scale_S[..., others])
    assert torch.equal(before.ovr_probs[..., others], after.ovr_probs[..., others])
    assert not torch.equal(before.num_prob, after.num_prob)


@pytest.mark.parametrize("score_scale", ["common", "documents"])
def test_ovr_outputs_agree_with_the_formula(tiny_tokenizer, score_scale):
    model = graft_tiny("qwen2", tiny_tokenizer, start="minimal", score_scale=score_scale)
    with torch.no_grad():
        out = model(**batch(model, NUMBERS), output_ovr=True)
        threshold = model.action.threshold
        if score_scale == "common":
            rest = out.logits[..., : model.action.rows].masked_fill(~model.action.rest_mask, -torch.inf)
            threshold = threshold + rest.logsumexp(-1, keepdim=True)
        p = 0.5 + torch.atan((out.logits - threshold) / out.scale_S) / torch.pi
    used = model.action.vocabulary_mask
    torch.testing.assert_close(out.ovr_probs[..., used], p[..., used], rtol=1e-3, atol=1e-5)
    assert torch.equal(out.decisions, out.ovr_probs.double().argmax(-1))
    torch.testing.assert_close(out.num_prob, out.ovr_probs[..., model.config.num_token_id])


def test_a_constant_threshold_starts_where_the_log_partition_lies(tiny_tokenizer):
    model = graft_tiny("llama", tiny_tokenizer, score_scale="documents")
    with torch.no_grad():
        log_partition = model(**model.processor("春天来了，河水流进大海。", return_tensors="pt")).logits.logsumexp(-1)
    assert abs(model.action.threshold + 0.6 - log_partition.median()) < 0.5


def test_the_documents_scale_changes_rankings_and_the_common_one_does_not(tiny_tokenizer):
    text = " ".join(TEXTS)
    agree = {}
    for start in ("faithful", "documents", "minimal", "ordinary", "architecture"):
        model = graft_tiny("llama", tiny_tokenizer, start=start)
        inputs = batch(model, [text])
        with torch.no_grad():
            decisions = model(**inputs, output_ovr=True).decisions
            theirs = model.backbone(input_ids=inputs["input_ids"]).logits.argmax(-1)
        agree[start] = (decisions == theirs).double().mean().item()
    assert agree.pop("faithful") == 1.0
    assert agree["documents"] < 0.5 and max(agree.values()) < 1.0


def test_starts_have_their_documented_values(tiny_tokenizer):
    z, made = torch.randn(2, 32), {}
    for start, scale in (("documents", 10.0), ("minimal", 0.6931472), ("architecture", 0.1)):
        made[start] = graft_tiny("llama", tiny_tokenizer, start=start)
        torch.testing.assert_close(made[start].abduction(z)[1], torch.full((2, 32), scale))
    documents, minimal, older = made.values()
    assert documents.action.threshold == 100 and (documents.action.b_noise == 0).all()
    assert documents.numeric_embedding.direction.norm().item() == pytest.approx(1.0, abs=1e-5)
    torch.testing.assert_close(minimal.action.b_noise, torch.full((32,), 0.1))
    assert older.config.scale_activation == "exp" and (older.action.b_noise == 0).all()
    ordinary = graft_tiny("llama", tiny_tokenizer, start="ordinary")
    torch.testing.assert_close(ordinary.abduction(z)[1], ordinary.action.noise.expand(2, 32))
    assert ordinary.action.threshold == 0 and (ordinary.abduction.loc_net.weight == torch.eye(32)).all()
    assert ordinary.numeric_embedding.direction.norm().item() != pytest.approx(1.0, abs=1e-5)
    for family in ("gaussian", "cauchy"):
        faithful = graft_tiny("llama", tiny_tokenizer, vocabulary_family=family)
        scale = faithful.action(z, faithful.abduction(z)[1], faithful.get_output_embeddings())[1]
        torch.testing.assert_close(scale, torch.ones(2, 1))


def test_scales_stay_below_their_limit(tiny_tokenizer):
    z = torch.randn(5, 32)
    for activation in ("softplus", "exp"):
        model = graft_tiny("llama", tiny_tokenizer, scale_activation=activation, max_scale=2.0)
        torch.nn.init.normal_(model.abduction.scale_net.weight)
        free = graft_tiny("llama", tiny_tokenizer, scale_activation=activation)
        free.abduction.load_state_dict(model.abduction.state_dict())
        (loc, limited), (same, scale) = model.abduction(z), free.abduction(z)
        assert scale.max() > 2 and torch.equal(limited, scale.clamp(max=2.0)) and torch.equal(loc, same)
    with pytest.raises(ValueError, match="leaves no room"):
        graft_tiny("llama", tiny_tokenizer, max_scale=1e-9)


# ---- losses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("score_scale", ["common", "documents"])
@pytest.mark.parametrize("family_name", ["qwen2", "llama"])
def test_the_loss_is_the_same_with_and_without_scores(tiny_tokenizer, score_scale, family_name):
    """In values and in the gradient of every parameter; float64, because log_ndtr's own gradient is 0.4% off in float32."""
    gradients = []
    for skip in (False, True):
        model = graft_tiny(family_name, tiny_tokenizer, score_scale=score_scale, gate_alpha=0.3).double()
        inputs = batch(model, NUMBERS)
        labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
        out = model(**inputs, labels=labels, skip_logits=skip)
        assert (out.logits is None) == skip
        out.loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None} | {"loss": out.loss})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(
            gradient, gradients[1][name], rtol=2e-3, atol=2e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_labels_are_unshifted_and_padding_never_counts(tiny_llama):
    inputs = batch(tiny_llama, NUMBERS)
    labels = inputs["input_ids"].clone()  # padding left in
    out = tiny_llama(**inputs, labels=labels)
    masked = tiny_llama(**inputs, labels=labels.masked_fill(inputs["attention_mask"] == 0, -100))
    assert torch.equal(out.loss, masked.loss)
    alone = [tiny_llama(**batch(tiny_llama, [t]), labels=batch(tiny_llama, [t])["input_ids"]) for t in NUMBERS]
    counts = [len(tiny_llama.processor(t)["input_ids"]) - 1 for t in NUMBERS]
    total = sum(o.loss_cls * n for o, n in zip(alone, counts, strict=True)) / sum(counts)
    torch.testing.assert_close(out.loss_cls, total, rtol=1e-4, atol=1e-4)
    assert alone[2].loss_reg == 0


def test_as_a_tuple_the_loss_comes_first_and_the_logits_behind_it(tiny_llama):
    inputs = batch(tiny_llama, ["It is 5 long"])
    named = tiny_llama(**inputs, labels=inputs["input_ids"])
    loss, logits, *_ = tiny_llama(**inputs, labels=inputs["input_ids"], return_dict=False)
    assert torch.equal(loss, named.loss) and torch.equal(logits, named.logits)
    assert list(named)[:3] == ["loss", "logits", CACHE] and torch.equal(tiny_llama(**inputs)[0], named.logits)
    with pytest.raises(ValueError, match="logits_to_keep"):  # a loss needs every position
        tiny_llama(**inputs, labels=inputs["input_ids"], logits_to_keep=1)


# ---- saving, loading, refusing ---------------------------------------------------------------------------------------


def test_saving_and_loading_give_bit_equal_outputs(tiny, family, tmp_path):
    with torch.no_grad():
        for parameter in tiny.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    tiny.config.value_transform = {"kind": "symlog", "center": 3.0, "width": 0.5}
    tiny.save_pretrained(tmp_path)
    loaded, processor = AutoModelForCausalLM.from_pretrained(tmp_path), AutoProcessor.from_pretrained(tmp_path)
    assert isinstance(loaded, CausalQwenForCausalLM) and isinstance(processor, CausalQwenProcessor)
    assert isinstance(loaded.processor, CausalQwenProcessor)
    for name, tensor in tiny.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name
    head, embedding = loaded.backbone.get_output_embeddings().weight, loaded.backbone.get_input_embeddings().weight
    assert (head is embedding) == TIED[family]
    inputs = processor(NUMBERS, padding=True, return_tensors="pt")
    with torch.no_grad():
        before, after = tiny(**inputs, output_ovr=True), loaded(**inputs, output_ovr=True)
    for name in ("logits", "loc_Y", "scale_Y", "scale_S", "ovr_probs", "decisions"):
        assert torch.equal(before[name], after[name]), name
    assert loaded.value_transform == tiny.value_transform
    assert not list(tmp_path.glob("*.bin")) and list(tmp_path.glob("*.safetensors"))


def test_bfloat16_backbones_keep_their_logits_and_their_heads_in_float32(tiny_tokenizer, tmp_path):
    make_backbone("qwen2", tiny_tokenizer).save_pretrained(tmp_path / "backbone")
    tiny_tokenizer.save_pretrained(tmp_path / "backbone")
    model = CausalQwenForCausalLM.from_backbone(str(tmp_path / "backbone"), dtype=torch.bfloat16)
    backbone = model.backbone
    inputs = batch(model, TEXTS)
    with torch.no_grad():
        theirs = backbone(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        ours = model(**inputs, output_ovr=True)
    assert torch.equal(ours.logits, theirs) and theirs.dtype == torch.bfloat16
    theirs[..., model.config.free_token_ids] = -torch.inf
    assert torch.equal(ours.decisions, theirs.float().argmax(-1))
    model.save_pretrained(tmp_path / "model")
    loaded = CausalQwenForCausalLM.from_pretrained(tmp_path / "model")
    for one in (model, loaded):
        for name, tensor in one.named_parameters():
            half = name.startswith(("backbone.", "abduction.loc_net."))
            assert tensor.dtype == (torch.bfloat16 if half else torch.float32), name
    with torch.no_grad():
        assert torch.equal(loaded(**inputs).logits, ours.logits)


def test_what_is_no_decoder_is_refused(tiny_tokenizer, tmp_path):
    config = BertConfig(
        vocab_size=500, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    bidirectional = BertForMaskedLM(config)
    bidirectional.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="bert model .*not a decoder-only"):
        CausalQwenForCausalLM.from_backbone(str(tmp_path))
    with pytest.raises(ValueError, match="cannot be grafted"):
        CausalQwenForCausalLM.from_backbone(bidirectional, tokenizer=tiny_tokenizer)


def test_a_capped_or_scaled_head_is_refused(tiny_tokenizer):
    backbone = make_backbone("llama", tiny_tokenizer)
    forward = type(backbone).forward

    def scaled(self, *args, **kwargs):
        out = forward(self, *args, **kwargs)
        out.logits = out.logits / 2
        return out

    backbone.forward = scaled.__get__(backbone)
    with pytest.raises(ValueError, match="scaled or capped"):
        CausalQwenForCausalLM.from_backbone(backbone, tokenizer=tiny_tokenizer)


OTHER_LAYOUTS = {
    "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2},  # all its logits are far below zero at times
    "falcon": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    "gpt_neox": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32},
    "opt": {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "ffn_dim": 32,
        "word_embed_proj_dim": 16,
    },
    "phi": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32},
}
"""Decoders that name and nest their parts in other ways."""


@pytest.mark.parametrize("kind", OTHER_LAYOUTS)
def test_another_layout_can_be_grafted(kind, tiny_tokenizer):
    torch.manual_seed(0)
    ids = {"vocab_size": len(tiny_tokenizer), "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 2}
    backbone = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **ids, **OTHER_LAYOUTS[kind])).eval()
    model = CausalQwenForCausalLM.from_backbone(backbone, tokenizer=tiny_tokenizer)
    inputs = batch(model, TEXTS[:1])
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits[..., :-1], backbone(input_ids=inputs["input_ids"]).logits)
    written = model.generate(**batch(model, ["It was 3 days"]), max_new_tokens=4, causal_decoding="causal")
    assert written.sequences.shape[1] > 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"start": "hot"}, "unknown start 'hot'; known starts: faithful"),
        ({"gate_alfa": 1.0}, "unknown setting gate_alfa; did you mean gate_alpha"),
        ({"gate": 1.0}, r"unknown setting gate; did you mean gate_alpha or gate_detach\?"),
        ({"Loss": 1.0}, r"unknown setting Loss; did you mean value_loss or value_loss_weight\?"),
        ({"VALUE_FAMILY": "cauchy"}, r"did you mean value_family\?"),
        ({"colour": 1}, "unknown setting colour; known: causal_size, start, deep_abduction, .*, copy_size$"),
        ({"sub_configs": {}}, "unknown setting sub_configs; known: causal_size"),
        ({"gate_alpha": 2.0}, "gate_alpha: input should be less than or equal to 1, got 2.0"),
        ({"number_embedding": "add"}, "number_embedding: input should be 'added' or 'features', got 'add'"),
        ({"score_scale": "comon"}, "score_scale: input should be 'common' or 'documents', got 'comon'"),
        ({"num_token_id": 3}, "num_token_id: the tokens that nothing uses are found"),
        ({"domains": {"x": {"layers": "a"}}}, "a domain's layers is a whole number, got 'a'"),
        ({"domains": {"x": {"layers": -1}}}, "a domain's layers is a whole number, got -1"),
        ({"value_digits": 0}, "value_digits: input should be greater than or equal to 1, got 0"),
        ({"value_range": [1.0, math.nan]}, r"value_range\[1\]: input should be a finite number, got nan"),
        ({"value_branch": "yes"}, "value_branch: input should be a valid boolean, got 'yes'"),
        ({"domain": "medicine"}, "there is no domain 'medicine'; known domains: none"),
        ({"value_transform": {"kind": "logarithm"}}, "value_transform: unknown value transform 'logarithm'"),
        ({"value_transform": {"centre": 1.0}}, "value_transform: .*unexpected keyword argument 'centre'"),
        ({"causal_size": 64}, "causal_size 64 does not lie in 1 to 32"),
    ],
)
def test_wrong_settings_are_refused(tiny_tokenizer, settings, message):
    with pytest.raises(ValueError, match=message):
        graft_tiny("llama", tiny_tokenizer, **settings)


def test_a_misspelt_field_of_a_configuration_is_refused():
    with pytest.raises(ValueError, match="unknown setting value_digit; did you mean value_digits"):
        CausalQwenConfig(value_digit=3)
    assert CausalQwenConfig(torch_dtype="float32", something_of_a_later_version=1).value_digits == 6


def test_a_saved_configuration_keeps_what_was_fitted_apart(tmp_path):
    fields = [name for parts in SECTIONS.values() for names in parts.values() for name in names]
    own = set(CausalQwenConfig.__annotations__) - {"model_type", "sub_configs", "text_config"}
    assert sorted(fields) == sorted(own)
    levels = WANTED_LEVELS.tolist()
    kinds = {"interval_kinds": [(0.3, levels), (0.9, levels)], "class_interval_levels": {"K": levels}}
    config = CausalQwenConfig(score_noise=0.5, value_range=[1.0, 2.0], gate_alpha=0.25, interval_levels=levels, **kinds)
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert not own & set(written)
    assert written["fitted"]["scores"]["score_noise"] == 0.5 and written["settings"]["training"]["gate_alpha"] == 0.25
    assert CausalQwenConfig.from_pretrained(tmp_path).to_dict() == config.to_dict()
    for name in (
        "dtype",
        "_commit_hash",
        "_output_attentions",
    ):  # which transformers changes where they are keys of its own
        named = CausalQwenConfig(class_interval_levels={name: levels})
        named.save_pretrained(tmp_path / "named")
        loaded = CausalQwenConfig.from_pretrained(tmp_path / "named")
        assert loaded.class_interval_levels == {name: levels}
    flat = {name: value for name, value in config.to_dict().items() if name in own}  # as earlier versions wrote it
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "causalqwen", **flat}))
    loaded = CausalQwenConfig.from_pretrained(tmp_path)
    assert {name: getattr(loaded, name) for name in own} == {name: getattr(config, name) for name in own}


@pytest.mark.parametrize("value", [np.float32(3), torch.tensor(3.0)])
def test_what_is_no_configuration_is_refused_when_it_is_set(value):
    with pytest.raises(ValueError, match=r"value_transform: no file can hold it \(Object of type (float32|Tensor)"):
        CausalQwenConfig(value_transform={"kind": "affine", "center": value, "width": 1.0})
    for text in ("x", [1], {"model_type": "nope"}):
        with pytest.raises(ValueError, match="text_config"):
            CausalQwenConfig(text_config=text)


def test_the_matrix_is_never_resized(tiny_llama):
    with pytest.raises(ValueError, match="never resizes"):
        tiny_llama.resize_token_embeddings(500)


def test_damaged_checkpoints_are_named(tiny_llama, tmp_path):
    with pytest.raises(ValueError, match="holds no model"):
        load_model(tmp_path / "nowhere")
    folder = tmp_path / "model"
    tiny_llama.save_pretrained(folder)
    assert load_model(folder).config.num_token_id == tiny_llama.config.num_token_id
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for spoil in (lambda: weights.write_bytes(whole[: len(whole) // 2]), weights.unlink):
        spoil()
        with pytest.raises(ValueError, match="missing or damaged"):
            load_model(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        load_model(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ValueError, match="holds a llama model"):
        load_model(folder)


# ---- predictions -----------------------------------------------------------------------------------------------------


def test_predict_number_is_the_heads_at_the_last_token(tiny):
    tiny.config.value_transform = {"kind": "affine", "center": 400.0, "width": 50.0}
    prompts = ["The value is", "Somebody counted them all and found", "It was 5 and is "]
    predictions = tiny.predict_number(prompts, batch_size=2)
    for prompt, prediction in zip(prompts, predictions, strict=True):
        inputs = tiny.processor(prompt, prompt=True, return_tensors="pt")
        with torch.no_grad():
            out = tiny(**inputs)
        assert prediction.loc == pytest.approx(out.loc_Y[0, -1].item(), abs=1e-4)
        assert prediction.scale == pytest.approx(out.scale_Y[0, -1].item(), rel=1e-4)
        assert prediction.num_prob == pytest.approx(out.num_prob[0, -1].item(), abs=1e-5)
        assert prediction.median == pytest.approx(400 + 50 * prediction.loc)
        low, high = prediction.interval(0.8)
        assert low < prediction.median < high and prediction.quantile(0.9) == pytest.approx(high)
        assert prediction.crps(prediction.median) < prediction.crps(high)
        assert prediction.log_prob(prediction.median) > prediction.log_prob(high)
        assert "90%" in str(prediction)
    with pytest.raises(ValueError, match="a value must be a finite number, got nan"):
        prediction.crps(math.nan)
    with pytest.raises(ValueError, match="level"):
        prediction.format(0)
    for name, value, described in (
        ("value_family", "gaussian", "value_law"),
        ("score_scale", "documents", "scales"),
        ("own_scores", True, "score_head"),
        ("causal_size", 8, "abduction"),
        ("num_token_id", 7, "num_token_id"),
    ):
        before = getattr(tiny.config, name)
        setattr(tiny.config, name, value)
        with pytest.raises(ValueError, match=f"was changed after the model was made, .* another {described}|'common'"):
            tiny.save_pretrained("nowhere")
        setattr(tiny.config, name, before)
    tiny.config.value_digits = 0
    with pytest.raises(ValueError, match="value_digits: input should be greater than or equal to 1, got 0"):
        tiny.save_pretrained("nowhere")


def test_predict_number_refuses_empty_and_endless_prompts(tiny_llama):
    assert tiny_llama.predict_number([]) == []
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        tiny_llama.predict_number(["fine", ""])
    with pytest.raises(ValueError, match=r"prompt 0 has \d+ tokens, but the context of this model holds 256"):
        tiny_llama.predict_number(["word " * 300])


def test_a_plan_given_to_forward_situates_scores_and_values(tiny_llama):
    inputs = batch(tiny_llama, NUMBERS)
    with torch.no_grad():
        plain = tiny_llama(**inputs)
        drawn = [tiny_llama(**inputs, causal_decoding=CausalDecoding.preset("causal", seed=s)) for s in (7, 7, 8)]
    assert torch.equal(drawn[0].logits, drawn[1].logits) and torch.equal(drawn[0].loc_Y, drawn[1].loc_Y)
    assert not torch.equal(drawn[0].logits, drawn[2].logits) and not torch.equal(drawn[0].logits, plain.logits)
    assert torch.equal(drawn[0].loc_U, plain.loc_U)


@pytest.mark.parametrize("block", [1, 7, 8192])
def test_what_follows_from_the_vocabulary_is_that_of_its_rows(block, tiny_tokenizer, monkeypatch):
    """In blocks of rows, of which the last may be shorter; rows that no token uses are 0, whatever stands there."""
    monkeypatch.setattr(scores, "_ROWS_AT_ONCE", {"cpu": block})
    model = graft_tiny("llama", tiny_tokenizer)
    weight, used = model.get_output_embeddings().weight, model.action.vocabulary_mask[: model.action.rows]
    used[[3, -1]] = False
    with torch.no_grad():
        weight[~used] = 1e6
    words = model.vocabulary()
    torch.testing.assert_close(words.largest, weight[used].abs().amax(0))
    torch.testing.assert_close(words.norms[used], torch.linalg.vector_norm(weight[used], 2, dim=1))
    assert not words.norms[~used].any()


def test_weights_stand_still_only_as_long_as_somebody_says_so(tiny_tokenizer):
    """Blocks that end in another order than they began, and threads."""
    model = graft_tiny("llama", tiny_tokenizer)
    first, second = model.frozen_vocabulary(), model.frozen_vocabulary()
    first.__enter__()
    second.__enter__()
    words = model.vocabulary()
    first.__exit__(None, None, None)
    assert model.vocabulary() is words
    second.__exit__(None, None, None)
    assert model.vocabulary() is not words
    with model.frozen_vocabulary(), ThreadPoolExecutor(1) as others:
        mine = model.vocabulary()
        assert mine is model.vocabulary() and others.submit(model.vocabulary).result() is not mine

    def generator():
        with model.frozen_vocabulary():
            yield model.vocabulary()

    begun = generator()  # begun in one context, ended in another, as servers do; a copy of a context outlives the block
    inside = copy_context()
    words = inside.run(next, begun)
    assert inside.run(model.vocabulary) is words
    assert copy_context().run(next, begun, None) is None
    assert inside.run(model.vocabulary) is not words
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(model.predict_number, ["It is", "There are", "We count", "They have"]))
    assert model.vocabulary() is not model.vocabulary()


def test_in_float64_worlds_work_too(tiny_tokenizer):
    model = graft_tiny("qwen2", tiny_tokenizer).double()
    worlds = model.counterfactual_samples(Observation(" to be here.", prompt="We are"), Intervention())
    assert worlds[0][0].text == " to be here."
