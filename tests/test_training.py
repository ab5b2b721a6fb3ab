"""Training by the Trainer: losses, stages, curves, resumption."""

import dataclasses
import json
import math
import re
import shutil
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from causalqwen import CausalDecoding, CausalQwenForCausalLM
from causalqwen.data import Row, collate, encode_rows, parse_row
from causalqwen.data.texts import speech_paragraphs, speeches
from causalqwen.evaluation.evaluate import evaluate
from causalqwen.modeling.backbones import bf16_pays, reading
from causalqwen.modeling.chain import Chain
from causalqwen.modeling.loading import load_model
from causalqwen.training import (
    BackboneStage,
    FactStore,
    HeadStage,
    LoraStage,
    TrainSettings,
    ValueStage,
    features,
    score_tokens,
    stream_facts,
    train,
)
from causalqwen.training import settings as settings_module
from causalqwen.training.anchor import TextAnchor
from causalqwen.training.batches import FactRows
from causalqwen.training.features import COLUMNS, REST, facts_key, known_of_number
from causalqwen.training.scores import individual_prob_sums
from causalqwen.training.settings import STAGES
from causalqwen.training.trainer import MetricsFile, TrainedForCausalLM, last_checkpoint
from conftest import graft_tiny

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def examples(model, count: int, seed: int = 0):
    """Sentences whose number follows from a word in them."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        a, b = torch.randint(10, (2,), generator=generator).tolist()
        rows.append(
            parse_row(json.dumps({"text": f"The {WORDS[a]} of {WORDS[b]} is {100 * a + b + 0.5} in all."}), "x")
        )
    return encode_rows(rows, model.processor)


SMALL = TrainSettings(
    values=ValueStage(epochs=3, batch_size=8, learning_rate=3e-3), logging_steps=2, evaluations=3, recalibrate=True
)


@pytest.fixture
def model(tiny_tokenizer):
    return graft_tiny("qwen2", tiny_tokenizer)


@pytest.fixture
def values_alone(tiny_tokenizer):
    """A model to which a number is one token, with a value."""
    return graft_tiny("qwen2", tiny_tokenizer, number_context="value")


# ---- kept facts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("score_scale", ["common", "documents"])
@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_losses_from_kept_facts_are_those_of_the_model(tiny_tokenizer, tmp_path, family, score_scale):
    """Total, both parts, decisions, and the gradient of everything that stage 1 trains."""
    model = graft_tiny(family, tiny_tokenizer, score_scale=score_scale)
    with torch.no_grad():
        model.action.num_row.normal_(std=0.2)
    rows = examples(model, 6)
    store = FactStore.build(model, rows, tmp_path)
    kept = TrainedForCausalLM(model)(**FactRows(store).collate(range(6)))
    rest = store.facts.rest_loss.mean(dtype=np.float64)  # no part of stage 1 moves it
    kept |= {name: kept[name] + rest for name in ("loss", "loss_cls")}
    batch = collate(rows, 2)
    live = TrainedForCausalLM(model)(**batch)
    whole = model(**batch, output_ovr=True)
    real = batch["labels"][:, 1:] != -100
    for other in (live, whole):
        for name in ("loss", "loss_cls", "loss_reg"):
            torch.testing.assert_close(kept[name], other[name], rtol=2e-4, atol=2e-4)
        decisions = other["decisions"][:, : real.shape[1]][real]  # facts stand row after row, without padding
        word = (decisions != model.config.num_token_id).numpy()
        assert word.any() and (store.facts.rival_id == decisions.numpy())[word].all()
    gradients = []
    for loss in (kept["loss"], whole["loss"]):
        model.zero_grad()
        loss.backward()
        trained = (model.action.num_row, model.action.num_bias, *model.value_branch.parameters())
        gradients.append([p.grad.clone() for p in trained] + [model.action.value_head.weight.grad.clone()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-5)


def test_loc_U_is_z_only_where_it_must_be(tiny_tokenizer):
    """W_loc z is left out where W_loc stands still at I, and nowhere else."""
    model = graft_tiny("qwen2", tiny_tokenizer)
    features = torch.randn(40, model.config.hidden_size)

    def is_known(model):
        chain = Chain(model, features)
        known_of_number(chain, torch.ones(40), torch.zeros(40))
        assert ("loc_U" in chain.__dict__) == model.abduction.keeps_features
        assert torch.equal(chain.loc_U, Chain(model, features).loc_U)
        return model.abduction.keeps_features

    assert not is_known(model)  # it may be trained
    weight, bias = model.requires_grad_(False).abduction.loc_net.weight, model.abduction.loc_net.bias
    assert is_known(model)
    for moved in (weight[0, 1:2], weight[2, 2:3], bias[:1]):
        before = moved.clone()
        moved += 1e-3
        assert not is_known(model)
        moved.copy_(before)
    deep, other, narrow = (
        graft_tiny("qwen2", tiny_tokenizer, **given).requires_grad_(False)
        for given in ({"deep_abduction": True}, {}, {"causal_size": 16})
    )
    torch.nn.init.ones_(deep.abduction.residual.last.bias)
    torch.nn.init.ones_(other.add_domain("law").requires_grad_(False).residual.last.bias)  # which is then asked
    torch.nn.init.eye_(narrow.abduction.loc_net.weight)
    assert not is_known(deep) and not is_known(other) and not is_known(narrow)


def test_a_trainer_sets_the_mode_of_what_somebody_else_changed(model):
    trained = TrainedForCausalLM(model)
    assert trained.train().training and model.training
    model.eval()  # as whoever scores it does
    assert trained.train().training and all(module.training for module in model.modules())
    assert not trained.eval().training and not any(module.training for module in model.modules())


@pytest.mark.parametrize("copying", [False, True])
def test_rows_that_numbers_are_learned_from_are_read_without_the_rest(tiny_tokenizer, tmp_path, monkeypatch, copying):
    """What is kept of them is what is kept with the rest; nothing is scored by them."""
    model = graft_tiny("qwen2", tiny_tokenizer, copy_numbers=copying)
    rows = examples(model, 6)
    whole = FactStore.build(model, rows, tmp_path / "whole")
    with monkeypatch.context() as patched:
        patched.setattr(features, "_rest_facts", lambda *args: pytest.fail("scores of all words were made"))
        patched.setattr(Chain, "log_partition", lambda *args: pytest.fail("scores of all words were made"))
        lean = FactStore.build(model, rows, tmp_path / "lean", rest=False)
    assert set(COLUMNS) - set(lean.facts.columns) == {"threshold", *REST}
    for name in lean.facts.columns:
        found = getattr(whole.facts, name)
        assert np.array_equal(getattr(lean.facts, name), found, equal_nan=True)
    with pytest.raises(ValueError, match="read without threshold"):
        score_tokens(model, lean.blocks())
    assert FactStore.build(model, rows, tmp_path / "lean").facts.columns == COLUMNS  # read again, with it


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_heads_on_kept_features_have_the_gradients_of_the_whole_model(tiny_tokenizer, tmp_path, family):
    model = graft_tiny(family, tiny_tokenizer)
    rows = examples(model, 6)
    store = FactStore.build(model, rows, tmp_path)
    made = []
    for batch in (FactRows(store).collate(range(6)), collate(rows, 2)):
        model.zero_grad()
        out = TrainedForCausalLM(model, heads="facts" in batch)(**batch)
        out["loss"].backward()
        parts = [
            *model.abduction.parameters(),
            model.action.b_noise,
            model.action.threshold,
            *model.value_branch.parameters(),
        ]
        made.append([out["loss"].detach()] + [p.grad.clone() for p in parts])
    for a, b in zip(*made, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_facts_are_renewed_from_their_features(model, tmp_path):
    rows = examples(model, 6)
    store = FactStore.build(model, rows, tmp_path)
    with torch.no_grad():
        model.abduction.loc_net.bias.normal_(std=0.1)
        model.action.threshold += 0.3
    renewed = list(store.renewed(model, positions=7))
    anew = FactStore.build(model, rows, tmp_path)
    assert anew.folder != store.folder
    for name in ("rest_loss", "rival_score", "values", "features"):
        joined = np.concatenate([getattr(block, name) for block in renewed])
        np.testing.assert_allclose(joined, getattr(anew.facts, name), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("negatives", [0, 120])
def test_the_heads_learn_from_kept_features(tiny_tokenizer, tmp_path, negatives):
    """Held-out L_cls falls, with all wrong tokens and with a sample of them; the backbone stands still."""
    model = graft_tiny("llama", tiny_tokenizer)
    before = {name: tensor.clone() for name, tensor in model.backbone.state_dict().items()}
    start = score_tokens(model, (facts for _, facts in stream_facts(model, examples(model, 20, seed=1))))["metrics"]
    stage = HeadStage(epochs=10, batch_size=4, learning_rate=3e-3, negatives=negatives)
    settings = TrainSettings(values=None, heads=stage, logging_steps=5, evaluations=2)
    scores = train(model, examples(model, 40), examples(model, 20, seed=1), tmp_path / "run", settings)
    assert scores["cls_loss"] < 0.8 * start["cls_loss"]
    # The state that was best on the way is the one that is kept, and was scored as it is.
    assert min(value for _, value in curve(tmp_path / "run", "eval/cls_loss")) == pytest.approx(scores["cls_loss"])
    for name, tensor in model.backbone.state_dict().items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("stage", ["heads", "lora", "backbone"])
@pytest.mark.parametrize("start", ["minimal", "faithful"])
def test_what_teaches_words_moves_abduction_noise_and_thresholds(tiny_tokenizer, tmp_path, stage, start):
    """Every tensor of theirs, noise and thresholds by about a share of their size an update."""
    model = graft_tiny("llama", tiny_tokenizer, start=start, token_thresholds=0.01)
    parts = {name: tensor for name, tensor in model.named_parameters() if name.startswith(("abduction.", "action."))}
    before = {name: tensor.clone() for name, tensor in parts.items()}
    settings = {"epochs": 2, "batch_size": 8, "warmup": 0.0, "noise_learning_rate": 0.05}
    settings |= {"heads": {}, "lora": {"whole_vocabulary": True}, "backbone": {"whole_vocabulary": True}}[stage]
    train(
        model,
        examples(model, 40),
        [],
        tmp_path / "run",
        TrainSettings(values=None, **{stage: STAGES[stage](**settings)}),
    )
    still = {name for name, tensor in parts.items() if torch.equal(tensor, before[name])}
    assert still <= {"action.value_head.bias", "action.value_head.weight", "abduction.loc_net.bias"}
    unit = model.config.initial_noise or model.config.initial_scale
    moved = (parts["action.b_noise"] - before["action.b_noise"]).abs().max() / unit
    assert 0.1 < moved < 0.5  # ten updates of a cosine schedule


def test_the_documents_own_training_is_one_word(tiny_tokenizer, tmp_path):
    """Everything is trained, values stay as they are, and a loss is weighed by P_NUM with its gradient."""
    model = graft_tiny("llama", tiny_tokenizer, start="documents")
    config = model.config
    assert (config.value_branch, config.gate_alpha, config.gate_detach) == (False, 0.0, False)
    assert (model.value_branch, config.value_transform) == (None, None)
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    train(model, examples(model, 24), [], tmp_path / "run", TrainSettings.from_yaml("documents"))
    named = dict(model.named_parameters())
    still = {name for name in before if torch.equal(named[name], before[name])}
    assert still == {"action.b_noise"}  # |b| has no slope at 0, where overview 4 starts it
    assert model.value_transform.kind == "identity" and model.config.interval_levels is None


def test_the_heads_learn_from_text_without_numbers(tiny_tokenizer, tmp_path):
    """The documents' smallest form: no number channel, its values untouched."""
    model = graft_tiny("llama", tiny_tokenizer)
    rows = [parse_row('{"text": "the old man has seen the people of the land"}', "x")] * 4
    before = model.action.value_head.weight.clone()
    stage = HeadStage(epochs=4, batch_size=2, learning_rate=3e-3)
    words = encode_rows(rows, model.processor)
    scores = train(model, words, words, tmp_path / "run", TrainSettings(values=None, heads=stage))
    assert scores["num_recall"] == 0 and "crps" not in scores and math.isfinite(scores["cls_loss"])
    assert torch.equal(model.action.value_head.weight, before) and not model.reads_numbers


def test_facts_are_kept_under_a_key_of_all_that_they_depend_on(model, tmp_path):
    rows = examples(model, 5)
    store = FactStore.build(model, rows, tmp_path)
    kept = store.facts.features.copy()
    store.facts.features[:] = 0.0  # memory-mapped; what is written to it never reaches the file
    np.testing.assert_array_equal(FactStore.build(model, rows, tmp_path).facts.features, kept)
    assert isinstance(store.facts.features.base, np.memmap)
    key = facts_key(model, rows)
    with torch.no_grad():  # what stage 1 trains does not matter
        model.action.num_row += 1
        model.value_branch.residual.last.weight += 1
    assert facts_key(model, rows) == key
    assert FactStore.build(model, rows, tmp_path).folder == store.folder
    assert facts_key(model, rows[:4]) != key
    asked = questions(model)
    fewer = [dataclasses.replace(asked[0], also_right=asked[0].also_right[:1]), *asked[1:]]
    assert facts_key(model, fewer) != facts_key(model, asked)
    store = FactStore.build(model, asked, tmp_path)  # the first and the last row differ in what is right alone
    assert store[0].rest_loss[0] != store[4].rest_loss[0] and (store[4].also_right == -1).all()
    with torch.no_grad():
        model.backbone.model.norm.weight += 1e-3
    assert facts_key(model, rows) != key
    assert not list(tmp_path.glob("*.part*"))


def test_scores_of_facts_are_those_of_the_models_own_outputs(model, tmp_path):
    rows = examples(model, 12)
    model.config.value_transform = {"kind": "affine", "center": 500.0, "width": 300.0}
    with torch.no_grad():
        model.action.num_row.normal_(std=0.3)
        model.action.num_bias += 5.0
    scores = score_tokens(model, FactStore.build(model, rows, tmp_path).blocks(17))["metrics"]
    batch = collate(rows, 2)
    out = model(**batch, output_ovr=True)
    targets, real = batch["labels"][:, 1:], batch["labels"][:, 1:] != -100
    decisions = out.decisions[:, :-1]
    assert scores["cls_loss"] == pytest.approx(out.loss_cls.item(), rel=1e-4)
    assert scores["reg_loss"] == pytest.approx(out.loss_reg.item(), rel=1e-4)
    assert scores["accuracy"] == pytest.approx((decisions == targets)[real].double().mean().item())
    sums = out.ovr_probs.sum(-1)[:, :-1][real]
    assert scores["ovr_sum_median"] == pytest.approx(sums.median().item(), rel=1e-4)
    words = real & (targets != model.config.num_token_id)
    used = model.action.vocabulary_mask
    nll = -out.logits.masked_fill(~used, -torch.inf)[:, :-1].log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])
    assert scores["softmax_nll"] == pytest.approx(nll[..., 0][words].mean().item(), rel=1e-4)
    p = out.ovr_probs[:, :-1].gather(-1, targets.clamp(min=0)[..., None])[..., 0] / out.ovr_probs.sum(-1)[:, :-1]
    assert scores["ovr_nll"] == pytest.approx(-p[words].log().mean().item(), rel=1e-4)
    is_num = targets == model.config.num_token_id
    decided = (decisions == model.config.num_token_id) & real
    assert scores["num_recall"] == pytest.approx((decided & is_num).sum().item() / is_num.sum().item())
    assert scores["num_precision"] == pytest.approx((decided & is_num).sum().item() / max(decided.sum().item(), 1))
    values = batch["numeric_labels"][:, 1:][is_num]
    loc, scale = (t[:, :-1][is_num].double() for t in (out.loc_Y, out.scale_Y))
    median, ends = 500 + 300 * loc, 300 * scale * math.tan(0.45 * math.pi)
    announced = decided[is_num] & ((values - median).abs() <= ends)
    assert 0 < scores["consistency"] < 1 and scores["consistency"] == pytest.approx(announced.double().mean().item())
    assert scores["mse"] == pytest.approx((values - median).square().mean().item(), rel=1e-4)
    skill = 1 - (values - median).abs().mean() / (values - values.median()).abs().mean()
    assert scores["combined"] == pytest.approx((scores["accuracy"] + skill.item()) / 2, rel=1e-4)
    assert scores["perplexity"] == pytest.approx(math.exp(scores["softmax_nll"]))


def test_the_sum_of_one_individual_is_that_of_its_own_probabilities(tiny_tokenizer, tmp_path):
    """Overview 5.4: the monitored sum is the one that `forward` has for the drawn individual; |b_noise| stands beside it."""
    model = graft_tiny("llama", tiny_tokenizer, start="minimal", vocabulary_family="cauchy")
    rows = examples(model, 1)
    scores = score_tokens(model, FactStore.build(model, rows, tmp_path).blocks())
    plan = CausalDecoding.preset("causal", seed=0)
    with torch.no_grad():
        batch = collate(rows, 2)
        drawn = model(**batch, output_ovr=True, causal_decoding=plan).ovr_probs.sum(-1)[0, :-1]
        marginal = model(**batch, output_ovr=True).ovr_probs.sum(-1)[0, :-1]
        z = model.features(batch["input_ids"], numeric_values=batch["numeric_values"]).last_hidden_state[0, :2]
        means = [individual_prob_sums(model, z, seed) for seed in range(400)]
    assert scores["dist"]["ovr_prob_sum_individual_median"] == pytest.approx(drawn.median().item(), rel=1e-4)
    assert scores["dist"]["ovr_prob_sum_median"] == pytest.approx(marginal.median().item(), rel=1e-4)
    assert torch.stack(means).mean(0) == pytest.approx(marginal[:2].numpy(), rel=0.1)  # the mean over individuals
    assert scores["dist"]["noise_median"] == pytest.approx(0.1) and scores["dist"]["noise_iqr"] == pytest.approx(
        0, abs=1e-6
    )


@pytest.mark.parametrize("start", ["architecture", "ordinary"])
def test_words_move_the_scale_further_than_the_noise(tiny_tokenizer, tmp_path, start):
    """On a random backbone a small scale grows, a wide one shrinks; the noise follows more slowly, or not at all from 0."""
    model = graft_tiny("llama", tiny_tokenizer, start=start)
    stage = HeadStage(epochs=4, batch_size=8, learning_rate=3e-3, noise_learning_rate=3e-3)
    settings = TrainSettings(values=None, heads=stage, evaluations=1)
    train(model, examples(model, 16), examples(model, 4, seed=1), tmp_path / "run", settings)
    (_, scale), (_, noise) = (curve(tmp_path / "run", f"dist/{name}_median")[-1] for name in ("U_scale", "noise"))
    if start == "architecture":
        assert scale > 1.05 * model.config.initial_scale and noise == 0  # |b| has no slope there
    else:
        assert model.config.initial_noise > noise > scale + 0.02


def test_what_is_only_read_leaves_no_facts(values_alone, tmp_path):
    rows = examples(values_alone, 4)
    learned = [[index >= 5 for index in range(len(row))] for row in rows]
    part = [dataclasses.replace(row, learned=mask) for row, mask in zip(rows, learned, strict=True)]
    whole, masked = (FactStore.build(values_alone, of, tmp_path) for of in (rows, part))
    assert len(masked) == 4 and whole.folder != masked.folder
    for index in range(4):
        assert masked[index].targets.tolist() == rows[index].input_ids[5:]
        np.testing.assert_allclose(masked[index].features, whole[index].features[4:], atol=1e-5)
        np.testing.assert_array_equal(masked[index].values, whole[index].values[4:])


# ---- several right answers -------------------------------------------------------------------------------------------


def questions(model):
    """Questions of one, two and three right answers, and a sentence with a number."""
    rows = [
        {"question": "Who came?", "answer": ["the old man", "the people", "nobody", "all of us"]},
        {"question": "How much is it?", "answer": ["a lot"]},
        {"question": "Where is it?", "answer": ["here", "in the land"]},
        {"text": "The one of two is 5."},
        {"question": "Who came?", "answer": "the old man"},
    ]
    return encode_rows([parse_row(json.dumps(row), "x") for row in rows], model.processor)


@pytest.mark.parametrize("score_scale", ["common", "documents"])
def test_losses_of_several_right_answers_are_those_of_the_model(tiny_tokenizer, tmp_path, score_scale):
    """From tokens, from kept facts and by the heads on them, whatever the batches; evaluation counts any right token."""
    start = {"start": "minimal"} if score_scale == "documents" else {}
    model = graft_tiny("qwen2", tiny_tokenizer, **start)
    rows = questions(model)
    batch = collate(rows, 2)
    whole = model(**batch, output_ovr=True)
    without = model(**{name: tensor for name, tensor in batch.items() if name != "also_right"})
    assert abs(whole.loss_cls - without.loss_cls) > 0.01
    store = FactStore.build(model, rows, tmp_path)
    kept = FactRows(store).collate(range(len(rows)))
    singles = [facts for row in rows for _, facts in stream_facts(model, [row])]
    assert [facts.also_right.shape[1] for facts in singles] == [2, 0, 1, 0, 0]  # as wide as each batch needs
    np.testing.assert_allclose(store.facts.rest_loss, np.concatenate([f.rest_loss for f in singles]), rtol=1e-4)
    made = []
    for heads, given in ((False, batch), (True, kept)):
        out = TrainedForCausalLM(model, heads=heads)(**given)
        torch.testing.assert_close(out["loss_cls"], whole.loss_cls, rtol=1e-4, atol=1e-4)
        model.zero_grad()
        out["loss"].backward()
        made.append([p.grad.clone() for p in model.abduction.parameters()])
    for a, b in zip(*made, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    decisions, real = whole.decisions[:, :-1], batch["labels"][:, 1:] != -100
    right = (torch.cat([batch["labels"].unsqueeze(-1), batch["also_right"]], -1)[:, 1:] == decisions[..., None]).any(-1)
    for blocks in (store.blocks(7), store.renewed(model, 7), singles):
        scores = score_tokens(model, blocks)["metrics"]
        assert scores["cls_loss"] == pytest.approx(whole.loss_cls.item(), rel=1e-4)
        assert scores["accuracy"] == pytest.approx(right[real].double().mean().item())


@pytest.mark.parametrize("stage", ["heads", "sampled", "lora"])
def test_training_on_two_answers_raises_both(tiny_tokenizer, tmp_path, stage):
    """Both first tokens end above what the second gets where the first alone is taught."""

    def probs(answer):
        model = graft_tiny("llama", tiny_tokenizer)
        rows = encode_rows([parse_row(json.dumps({"question": "Who?", "answer": answer}), "x")] * 4, model.processor)
        if stage == "lora":
            settings = {"lora": LoraStage(epochs=8, batch_size=4, learning_rate=1e-2, whole_vocabulary=True)}
        else:
            negatives = 120 if stage == "sampled" else 0
            settings = {"heads": HeadStage(epochs=20, batch_size=4, learning_rate=3e-2, negatives=negatives)}
        train(model, rows, [], tmp_path / str(len(answer)), TrainSettings(values=None, **settings))
        prompt = model.processor("Question: Who?\nAnswer:", return_tensors="pt")
        with torch.no_grad():
            found = model(**prompt, output_ovr=True).ovr_probs[0, -1]
        return [found[model.processor(text)["input_ids"][0]].item() for text in (" nobody", " all")]

    both, one = probs(["nobody", "all"]), probs(["nobody"])
    assert min(both) > 3 * one[1], (both, one)


# ---- accumulation and resumption -------------------------------------------------------------------------------------


def curve(folder, key="train/loss"):
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(r["step"], r[key]) for r in records if key in r]


def test_a_stage_stops_when_held_out_numbers_get_less_likely_and_keeps_its_best(tiny_tokenizer, tmp_path):
    model = graft_tiny("qwen2", tiny_tokenizer)
    rows, held_out = examples(model, 24), examples(model, 24, seed=1)
    stage = ValueStage(epochs=40, batch_size=4, learning_rate=0.03, patience=2)
    found = train(
        model, rows, held_out, tmp_path / "run", TrainSettings(values=stage, evaluations=40, recalibrate=False)
    )
    scores = [score for _, score in curve(tmp_path / "run", "eval/reg_loss")]
    best = scores.index(min(scores))
    assert len(scores) == best + 3 < 40  # two evaluations in vain
    assert found["reg_loss"] == pytest.approx(scores[best], rel=1e-4)


def run_values(tokenizer, rows_of, output, stage, **settings):
    model = graft_tiny("llama", tokenizer, value_branch_dropout=0.0)
    settings = dataclasses.replace(SMALL, values=stage, **settings)
    train(model, rows_of(model), [], output, settings)
    return model


def stock_trainer(tokenizer, folder, size, texts, **batch):
    """transformers' own Trainer after one step of 8 rows, `size` at a time: its log, and the parameters that it moved."""
    from transformers import Trainer, TrainingArguments

    model = graft_tiny("llama", tokenizer, number_context="value")
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=8 // size,
        max_steps=1,
        logging_steps=1,
        optim="sgd",
        learning_rate=1e-3,
        max_grad_norm=1e9,
        report_to=[],
        save_strategy="no",
        remove_unused_columns=False,
        disable_tqdm=True,
        use_cpu=True,
    )

    def collated(rows):
        inputs = model.processor(list(rows), return_tensors="pt", padding=True)
        labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
        return dict(inputs) | {"labels": labels} | batch

    trainer = Trainer(model, arguments, data_collator=collated, train_dataset=texts)
    trainer.train()
    moved = torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])
    return trainer.state.log_history[0], moved


@pytest.mark.parametrize("uneven", [False, True])
def test_transformers_own_trainer_gives_one_loss_however_it_accumulates(tiny_tokenizer, tmp_path, uneven):
    several = ["A 1 B 2.5 C 30 D", "no number at all in here", "it is 7", "it is 8 and then it is 9000"]
    texts = [several[0]] * 3 + [several[1]] * 5 if uneven else several * 2
    (whole, moved), *others = (stock_trainer(tiny_tokenizer, tmp_path, size, texts) for size in (8, 4, 1))
    model = graft_tiny("llama", tiny_tokenizer, number_context="value")
    inputs = model.processor(texts, return_tensors="pt", padding=True)
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    made = model(**inputs, labels=labels)
    numbers, tokens = (labels[:, 1:] == model.config.num_token_id).sum(), (labels[:, 1:] != -100).sum()
    expected = made.loss_cls + made.loss_reg * numbers / tokens  # the sums of both over tokens
    assert numbers > 0 and whole["loss"] == pytest.approx(expected.item(), rel=1e-4)
    for log, after in others:
        assert log["loss"] == pytest.approx(whole["loss"], rel=1e-4)
        assert log["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-4)
        torch.testing.assert_close(after, moved)


@pytest.mark.parametrize("count", [24, 21])
def test_one_by_eight_equals_eight_by_one(tiny_tokenizer, tmp_path, count):
    """Rows of very different lengths and numbers of numbers, also when the last batch is not full."""

    def rows(model):
        texts = [
            f"It is {i}." if i % 3 else f"From {i} to {i + 1}, and on to {i + 2} or {i + 3}, we count."
            for i in range(count)
        ]
        return encode_rows([parse_row(json.dumps({"text": t}), "x") for t in texts], model.processor)

    curves = []
    for name, stage in (("8", ValueStage(2, 8, 1, 1e-3)), ("1x8", ValueStage(2, 1, 8, 1e-3))):
        run_values(tiny_tokenizer, rows, tmp_path / name, stage, logging_steps=1)
        curves.append(curve(tmp_path / name))
    assert len(curves[0]) == len(curves[1]) == 6
    for (step, a), (other, b) in zip(*curves, strict=True):
        assert step == other and a == pytest.approx(b, rel=1e-5, abs=1e-5)


def test_a_killed_run_resumes_to_the_same_curve_and_weights(tiny_tokenizer, tmp_path, monkeypatch):
    def rows(model):
        return examples(model, 32)

    settings = dataclasses.replace(SMALL, logging_steps=1, evaluations=4)
    through = graft_tiny("llama", tiny_tokenizer)
    train(through, rows(through), examples(through, 8, seed=1), tmp_path / "through", settings)

    class KilledError(Exception):
        pass

    from causalqwen.training import trainer as module

    training_step = module.CausalTrainer.training_step

    def dies(self, *args, **kwargs):
        if self.state.global_step == 8:
            raise KilledError
        return training_step(self, *args, **kwargs)

    killed = graft_tiny("llama", tiny_tokenizer)
    monkeypatch.setattr(module.CausalTrainer, "training_step", dies)
    with pytest.raises(KilledError):
        train(killed, rows(killed), examples(killed, 8, seed=1), tmp_path / "killed", settings)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="unfinished run"):
        train(killed, rows(killed), [], tmp_path / "killed", settings)
    with pytest.raises(ValueError, match="other settings"):
        train(killed, rows(killed), [], tmp_path / "killed", dataclasses.replace(settings, seed=9), resume=True)
    shutil.copytree(tmp_path / "killed", tmp_path / "copied")
    fresh, held = graft_tiny("llama", tiny_tokenizer), examples(killed, 8, seed=1)
    train(killed, rows(killed), held, tmp_path / "killed", settings, resume=True)  # the model that has moved since
    for name, tensor in through.state_dict().items():
        assert torch.equal(tensor, killed.state_dict()[name]), name
    shutil.rmtree(tmp_path / "killed")
    (tmp_path / "copied").rename(tmp_path / "killed")
    named = [dataclasses.replace(row, group="one") for row in rows(fresh)]
    for other in (rows(fresh)[1:], named, [dataclasses.replace(row, numeric_values=[1.0] * len(row)) for row in named]):
        with pytest.raises(ValueError, match="a run with other rows; it cannot be resumed"):
            train(fresh, other, held, tmp_path / "killed", settings, resume=True)
    with pytest.raises(ValueError, match="a run with another model; it cannot be resumed"):
        train(graft_tiny("qwen2", tiny_tokenizer), rows(fresh), held, tmp_path / "killed", settings, resume=True)
    train(fresh, rows(fresh), examples(fresh, 8, seed=1), tmp_path / "killed", settings, resume=True)
    assert curve(tmp_path / "killed") == curve(tmp_path / "through")
    for name, tensor in through.state_dict().items():
        assert torch.equal(tensor, fresh.state_dict()[name]), name


def test_a_model_that_is_no_number_is_not_kept(tiny_tokenizer, tmp_path):
    model = graft_tiny("llama", tiny_tokenizer)
    with pytest.raises(ValueError, match="training ended in .* that is not finite: lower the learning rate, or scale"):
        train(
            model,
            encode_rows(
                [Row("prompt", "r", {"prompt": f"It {n} is", "value": (-1) ** n * 1e308}) for n in range(32)],
                model.processor,
            ),
            [],
            tmp_path / "out",
            TrainSettings(values=ValueStage(epochs=2)),
        )
    assert not (tmp_path / "out" / "config.json").exists()


def test_a_checkpoint_cut_off_while_it_was_written_is_passed_over(tmp_path):
    for step, state in ((5, "{}"), (10, '{"cut')):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "trainer_state.json").write_text(state)
    (tmp_path / "checkpoint-15").mkdir()
    assert last_checkpoint(tmp_path).name == "checkpoint-5"
    assert last_checkpoint(tmp_path / "none") is None


# ---- stages ----------------------------------------------------------------------------------------------------------


def test_stage_one_learns_numbers_and_leaves_text_alone(tiny_tokenizer, tmp_path):
    model = graft_tiny("llama", tiny_tokenizer)
    text = model.processor(speech_paragraphs(numbers=False)[0][:150], return_tensors="pt")
    with torch.no_grad():
        before = model(**text, output_ovr=True)
    frozen = {n: p.clone() for n, p in model.named_parameters() if n.startswith(("backbone.", "abduction."))}
    rows, held_out = examples(model, 200), examples(model, 60, seed=9)
    settings = dataclasses.replace(SMALL, values=ValueStage(epochs=40, batch_size=16, learning_rate=3e-3))
    metrics = train(model, rows, held_out, tmp_path / "out", settings)
    constant = torch.tensor([v for e in held_out for v in e.numeric_values if v]).sub(450.0).abs().median()
    assert metrics["median_error"] < 0.6 * constant.item()
    assert metrics["coverage"]["0.9"] == pytest.approx(0.9, abs=0.05)
    with torch.no_grad():
        after = model(**text, output_ovr=True)
    others = [i for i in range(model.config.vocab_size) if i != model.config.num_token_id]
    assert torch.equal(before.logits[..., others], after.logits[..., others])
    assert torch.equal(before.ovr_probs[..., others], after.ovr_probs[..., others])
    for name, parameter in model.named_parameters():
        if name in frozen:
            assert torch.equal(parameter, frozen[name]), name
    loaded = type(model).from_pretrained(tmp_path / "out")
    assert loaded.config.interval_levels == model.config.interval_levels and loaded.config.value_range
    predictions = loaded.predict_number(["The nine of five is", "The one of five is"])
    assert predictions[0].median > predictions[1].median


def test_a_start_without_noise_is_trained_and_tells_nobody_apart(tiny_tokenizer, tmp_path):
    model = graft_tiny("qwen2", tiny_tokenizer, start="documents", value_branch=True)
    settings = TrainSettings(values=ValueStage(epochs=1, batch_size=8, center=True))
    train(model, examples(model, 16), examples(model, 8, seed=1), tmp_path / "out", settings)
    assert not model.action.noise.any() and all(bool(p.isfinite().all()) for p in model.parameters())
    rows = [dataclasses.replace(example, individual="a") for example in examples(model, 8)]
    with pytest.raises(ValueError, match="tell who from noise, and this model has none"):
        train(model, rows, [], tmp_path / "people", settings)


def test_metrics_have_the_documents_names(model, tmp_path):
    """In the documents' own training, of all words (overview 5); stage 1 moves no word, and says `<NUM>`'s own term."""
    settings = dataclasses.replace(SMALL, heads=HeadStage(epochs=1, batch_size=8))
    train(model, examples(model, 32), examples(model, 8, seed=1), tmp_path / "out", settings)
    records = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    keys = {key for record in records for key in record}
    expected = {
        "train/accuracy", "train/total_loss", "train/cls_loss_mean", "train/reg_loss_effective",
        "eval/accuracy", "eval/num_precision", "eval/num_recall", "eval/num_f1", "eval/reg_mae", "eval/reg_mdae",
        "dist/ovr_prob_sum_median", "dist/ovr_prob_sum_individual_median",
        *(f"dist/{name}_{stat}" for name in ("U_loc", "U_scale", "noise") for stat in ("mean", "median", "std", "iqr")),
    }  # fmt: skip
    assert expected <= keys
    for record in records:
        if "train/total_loss" in record:
            of_words = record.get(
                "train/cls_loss_mean" if record["stage"] == "heads" else "train/num_cls_loss_mean", 0.0
            )
            total = of_words + record["train/reg_loss_effective"]
            assert record["train/total_loss"] == pytest.approx(total, rel=1e-4)


def test_a_line_that_is_no_text_is_no_record(tmp_path):
    """Of a damaged file the records that stand are kept; nothing guesses at encodings."""
    whole = json.dumps({"stage": "values", "step": 1})
    (tmp_path / "m.jsonl").write_bytes(whole.encode("utf-16-be") + b"\n\xfe\xff\xd8\n" + whole.encode() + b"\n{")
    MetricsFile(tmp_path / "m.jsonl", "values").on_train_begin(None, SimpleNamespace(global_step=4), None)
    assert (tmp_path / "m.jsonl").read_text() == whole + "\n"


def test_metrics_reach_tensorboard(model, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = dataclasses.replace(SMALL, report_to=("tensorboard",))
    train(model, examples(model, 32), examples(model, 8, seed=1), tmp_path / "out", settings)
    events = next((tmp_path / "out").rglob("events.out.tfevents*"))
    tags = EventAccumulator(str(events.parent)).Reload().Tags()["scalars"]
    assert {"train/total_loss", "eval/num_f1", "dist/U_scale_median", "dist/ovr_prob_sum_median"} <= set(tags)


def test_a_tracker_that_is_not_installed_stops_a_run_before_it_begins(monkeypatch):
    with pytest.raises(ValueError, match="report_to: 'tensorbord' is no tracker; did you mean tensorboard"):
        dataclasses.replace(SMALL, report_to=("tensorbord",))
    monkeypatch.setattr(settings_module, "get_available_reporting_integrations", lambda: ["tensorboard"])
    dataclasses.replace(SMALL, report_to=("tensorboard",))
    with pytest.raises(ValueError, match="report_to: wandb is not installed; pip install wandb"):
        dataclasses.replace(SMALL, report_to=("tensorboard", "wandb"))


def test_what_a_run_would_trip_over_or_pass_over_later_stops_it_before_it_begins(model, tmp_path):
    rows = examples(model, 4)
    people = encode_rows([parse_row('{"prompt": "It is", "value": 1.5, "individual": "Ann"}', "x")], model.processor)
    unread = graft_tiny("llama", model.processor.tokenizer)
    bare = graft_tiny("llama", model.processor.tokenizer, value_branch=False, number_context="value")
    unset = graft_tiny("llama", model.processor.tokenizer)
    unset.config.value_digits = 0
    sharp = graft_tiny("llama", model.processor.tokenizer, value_loss="crps")
    words = encode_rows([parse_row('{"text": "no number here"}', "x")], model.processor)
    late = {"values": ValueStage(epochs=1)}
    adapted, named = LoraStage(target_modules=("q_porj",)), HeadStage(domain="the law")
    for given, examined, message, settings in (
        (model, rows, "values: patience does nothing without evaluation rows", {"values": ValueStage(patience=2)}),
        (bare, rows, "values: center needs value_branch=True", {"values": ValueStage(center=True)}),
        (bare, people, "training on rows that name individuals needs value_branch=True", late),
        (unread, rows, "direction: false needs number_context=", {**late, "lora": LoraStage(direction=False)}),
        (
            bare,
            rows,
            "backbone: 3 layers are to be trained, and there are 2",
            {**late, "backbone": BackboneStage(layers=3)},
        ),
        (bare, rows, "an adapter of lm_head would", {**late, "lora": LoraStage(target_modules=("lm_head",))}),
        (model, rows, "this backbone has no q_porj to adapt; did you mean q_proj", {**late, "lora": adapted}),
        (model, rows, "lora: target_modules names nothing", {**late, "lora": LoraStage(target_modules=())}),
        (model, rows, "'log' needs a support above 0", {**late, "value_transform": "log", "support": None}),
        (model, rows, "support: none of the training values", {**late, "support": [5000, 6000]}),
        (model, rows, "heads: 401 negatives of 400 tokens", {"values": None, "heads": HeadStage(negatives=401)}),
        (model, rows, "a domain needs a name of its own, .* got 'the law'", {"values": None, "heads": named}),
        (model, words, "hold no number to learn from", late),
        (sharp, people, "needs value_loss='nll', but this model has 'crps'", late),
        (unset, rows, "value_digits: input should be greater than or equal to 1, got 0", late),
    ):
        with pytest.raises(ValueError, match=message):
            train(given, examined, [], tmp_path / "out", TrainSettings(**settings))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # wandb's own
def test_metrics_reach_weights_and_biases(model, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.chdir(tmp_path)
    settings = dataclasses.replace(SMALL, report_to=("wandb",))
    train(model, examples(model, 32), examples(model, 8, seed=1), tmp_path / "out", settings)
    wandb.teardown()  # what it still holds is written
    (record,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    names = ("train/total_loss", "eval/num_f1", "dist/U_scale_median", "dist/ovr_prob_sum_individual_median")
    assert all(name.encode() in record.read_bytes() for name in names)


@pytest.mark.parametrize(("family", "matrix"), [("llama", "own"), ("llama", "shared"), ("mistral", "shared")])
def test_the_documents_whole_stage_one_trains_the_score_matrix(tiny_tokenizer, tmp_path, family, matrix):
    """Abduction, W_cls, b_cls, W_reg; own beside a backbone that stays, or lm_head, with the embedding where they are one."""
    model = graft_tiny(family, tiny_tokenizer)
    inputs = model.processor("The one of two is", return_tensors="pt")
    with torch.no_grad():
        untouched = model(**inputs, output_ovr=True)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    rows, held_out = examples(model, 24), examples(model, 8, seed=1)
    before = score_tokens(model, (facts for _, facts in stream_facts(model, held_out)))["metrics"]
    stage = HeadStage(epochs=6, batch_size=8, learning_rate=3e-3, score_matrix=matrix)
    settings = TrainSettings(values=None, heads=stage, logging_steps=1, evaluations=2, recalibrate=False)
    metrics = train(model, rows, held_out, tmp_path / "out", settings)
    assert metrics["cls_loss"] < 0.9 * before["cls_loss"]
    now = dict(model.named_parameters())
    moved = {name for name, p in now.items() if name not in start or not torch.equal(p, start[name])}
    tied = family == "llama"
    of_matrix = {"score_head.weight", "score_head.bias"}
    if matrix == "shared":
        of_matrix = {"backbone.model.embed_tokens.weight" if tied else "backbone.lm_head.weight"}
    assert {name for name in moved if name.startswith(("backbone.", "score_head."))} == of_matrix
    assert {"abduction.loc_net.weight", "abduction.scale_net.weight", "action.value_head.weight"} <= moved
    loaded = load_model(tmp_path / "out", "cpu")
    with torch.no_grad():
        mine, theirs = model(**inputs), loaded(**inputs)
        assert torch.equal(mine.logits, theirs.logits) and torch.equal(mine.loc_Y, theirs.loc_Y)
        same = torch.equal(loaded.backbone(inputs["input_ids"]).logits, untouched.logits[..., : loaded.action.rows])
    assert not torch.equal(mine.logits, untouched.logits) and same == (matrix == "own")
    table, head = loaded.get_input_embeddings().weight, loaded.backbone.get_output_embeddings().weight
    assert (head is table) == tied and loaded.config.own_scores == (matrix == "own")
    if matrix == "own":  # what has its own is trained on, and no other can be shared
        shared = TrainSettings(values=None, heads=HeadStage(score_matrix="shared"))
        with pytest.raises(ValueError, match="score_matrix 'shared' is the backbone's lm_head"):
            train(loaded, rows, [], tmp_path / "again", shared)


def test_a_score_matrix_of_its_own_starts_as_the_backbones(tiny_tokenizer, tmp_path):
    model = graft_tiny("llama", tiny_tokenizer, own_scores=True)
    plain = graft_tiny("llama", tiny_tokenizer)
    inputs = model.processor("The one of two is 5 and", return_tensors="pt")
    with torch.no_grad():
        ours, theirs = (one(**inputs, output_ovr=True) for one in (model, plain))
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-5, atol=1e-5)
    assert torch.equal(ours.decisions, theirs.decisions) and model.config.own_scores
    with torch.no_grad():
        model.score_head.bias[7] += 3.0
        model.save_pretrained(tmp_path)
        moved = CausalQwenForCausalLM.from_pretrained(tmp_path)(**inputs).logits - ours.logits
    assert torch.allclose(moved[..., 7], torch.tensor(3.0), atol=1e-5) and moved[..., 8:].abs().max() == 0


@pytest.mark.parametrize("whole_vocabulary", [False, True])
def test_stage_two_trains_adapters_and_merges_them(tiny_tokenizer, tmp_path, whole_vocabulary):
    model = graft_tiny("llama", tiny_tokenizer)
    rows, held_out = examples(model, 48), examples(model, 12, seed=3)
    start = {n: p.clone() for n, p in model.backbone.named_parameters()}
    settings = TrainSettings(
        values=ValueStage(epochs=2, batch_size=16),
        lora=LoraStage(epochs=3, batch_size=8, learning_rate=5e-3, whole_vocabulary=whole_vocabulary),
        logging_steps=2,
        evaluations=2,
    )
    metrics = train(model, rows, held_out, tmp_path / "out", settings)
    assert metrics["reg_loss"] == pytest.approx(metrics["reg_loss"])
    of_all, of_number = (curve(tmp_path / "out", f"train/{name}") for name in ("cls_loss_mean", "num_cls_loss_mean"))
    assert bool(of_all) == (not of_number) == whole_vocabulary  # in stage 1 neither: `<NUM>`'s row has a fit of its own
    now = dict(model.backbone.named_parameters())
    assert now.keys() == start.keys(), "adapters are merged into plain layers"
    moved = {n for n, p in now.items() if not torch.equal(p, start[n])}
    assert moved and all("_proj" in n and "self_attn" in n for n in moved)
    losses = [value for _, value in curve(tmp_path / "out", "train/reg_loss_effective")]
    assert losses[-1] < losses[0]
    loaded = type(model).from_pretrained(tmp_path / "out")
    inputs = model.processor("The one of two is", return_tensors="pt")
    with torch.no_grad():
        assert torch.equal(loaded(**inputs).loc_Y, model(**inputs).loc_Y)


@pytest.mark.parametrize("layers", [1, 0])
def test_the_backbones_own_weights_are_trained_at_a_rate_of_their_own(tiny_tokenizer, tmp_path, layers):
    def moved(name, **settings):
        model = graft_tiny("llama", tiny_tokenizer)
        start = {n: p.clone() for n, p in model.named_parameters()}
        stage = BackboneStage(epochs=2, batch_size=8, layers=layers, **settings)
        train(model, examples(model, 24), [], tmp_path / name, TrainSettings(values=None, backbone=stage))
        loaded = type(model).from_pretrained(tmp_path / name)
        assert all(torch.equal(p, dict(loaded.named_parameters())[n]) for n, p in model.named_parameters())
        far = {n: (p - start[n]).abs().max().item() for n, p in model.named_parameters()}
        return {n: distance for n, distance in far.items() if distance > 0}

    found = moved("small", whole_vocabulary=True)
    of_backbone = {n for n in found if n.startswith("backbone.")}
    last = {n for n in of_backbone if ".layers.1." in n}
    assert last and (of_backbone == last if layers else {"backbone.model.embed_tokens.weight"} < of_backbone - last)
    assert max(found[n] for n in of_backbone) < 1e-3 < 20 * max(found[n] for n in found.keys() - of_backbone)
    none = moved("none", backbone_learning_rate=0.0)
    assert none and not any(n.startswith("backbone.") for n in none)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])  # <NUM> behind the matrix, and on a free row
def test_an_anchor_is_the_divergence_from_the_untrained_backbone(kind, tiny_tokenizer):
    model = graft_tiny(kind, tiny_tokenizer).double().eval()
    anchor = TextAnchor(model, speeches((1941,)), tokens=12, count=5)
    assert 1 < len(anchor) <= 5
    assert anchor.loss(model, 0).item() == pytest.approx(0, abs=1e-12)
    with torch.no_grad():
        before = model.backbone(anchor.ids).logits[:, :-1, anchor.used].softmax(-1)
        for name, parameter in model.backbone.named_parameters():
            if "_proj" in name:
                parameter += 0.1 * torch.randn_like(parameter)
        after = model.backbone(anchor.ids).logits[:, :-1, anchor.used].softmax(-1)
    divergence = (before * (before / after).log()).sum(-1).mean(-1)
    assert divergence.min() > 1e-3
    for index in range(len(anchor)):
        assert anchor.loss(model, index).item() == pytest.approx(divergence[index].item(), rel=1e-6)


def test_the_anchor_holds_the_language(tiny_tokenizer, tmp_path):
    drift = {}
    for weight in (0.0, 100.0):
        model = graft_tiny("llama", tiny_tokenizer)
        anchor = TextAnchor(model, speeches((1941,)), tokens=16, count=8)
        held = {"anchor": weight, "anchor_tokens": 16} if weight else {}
        stage = LoraStage(epochs=3, batch_size=8, learning_rate=5e-3, **held)
        train(model, examples(model, 48), [], tmp_path / str(weight), TrainSettings(values=None, lora=stage))
        with torch.no_grad():
            drift[weight] = sum(anchor.loss(model, index).item() for index in range(len(anchor)))
    assert drift[100.0] < 0.5 * drift[0.0]


def test_runs_that_cannot_be_are_refused(model, tmp_path):
    missing = TrainSettings(lora=LoraStage(anchor=1.0, anchor_text="no-such-file.txt"))
    with pytest.raises(FileNotFoundError, match=r"no-such-file\.txt"):
        train(model, examples(model, 8), [], tmp_path / "c", missing)
    assert not (tmp_path / "c").exists()
    with pytest.raises(ValueError, match="nothing to train"):
        TrainSettings(values=None)
    train(model, examples(model, 8), [], tmp_path / "b", dataclasses.replace(SMALL, values=ValueStage(epochs=1)))
    with pytest.raises(ValueError, match="already holds a model"):
        train(model, examples(model, 8), [], tmp_path / "b", SMALL)


# ---- settings --------------------------------------------------------------------------------------------------------


def test_settings_come_from_yaml(tmp_path):
    path = tmp_path / "s.yaml"
    path.write_text(
        "value_transform: symlog\nvalues: {epochs: 3, learning_rate: 2e-4}\nlora: true\nreport_to: tensorboard\n"
    )
    settings = TrainSettings.from_yaml(path)
    assert settings.values == ValueStage(epochs=3, learning_rate=2e-4)
    assert LoraStage(target_modules=["q_proj"]) == LoraStage(target_modules=("q_proj",))
    assert (
        settings.lora == LoraStage() and settings.report_to == ("tensorboard",) and settings.value_transform == "symlog"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("vlaues: {}", "s.yaml: unknown setting vlaues; did you mean values?"),
        ("values: {epoch: 3}", "s.yaml, values: unknown setting epoch; did you mean epochs?"),
        ("values: {learning_rate: fast}", "s.yaml, values: learning_rate: input should be a valid number, got 'fast'"),
        ("values: {epochs: 1.5}", "epochs: input should be a valid integer, got 1.5"),
        ("values: {learning_rate: .nan}", "learning_rate: input should be a finite number, got nan"),
        ("values: 3", "s.yaml: values: input should be"),
        ("lora: {target_modules: [1]}", "target_modules[0]: input should be a valid string, got 1"),
        ("bf16: 1", "s.yaml: bf16: input should be a valid boolean or 'auto', got 1"),
        ("support: [1, a]", "s.yaml: support[1]: input should be a valid number, got 'a'"),
        ("report_to:", "report_to: input should be a valid tuple, got None"),
        ("lora: {target_modules: }", "s.yaml, lora: target_modules: input should be a valid tuple, got None"),
        ("1: 2", "s.yaml: unknown setting 1"),
        ("value_transform: logs", "value_transform 'logs' is not one of"),
        ("[1]", "expected keys and values"),
        ("a: [", "is not YAML"),
        ("values: false", "nothing to train"),
        ("heads: {domain: law, score_matrix: own}", "a domain is fitted in closed form: leave score_matrix out"),
        ("heads: {score_matrix: mine}", "score_matrix: input should be 'kept', 'own' or 'shared', got 'mine'"),
        ("heads: {domain_limit: 0.2}", "domain_limit does nothing without domain"),
        ("lora: {negatives: 8}", "s.yaml, lora: negatives does nothing without whole_vocabulary"),
        ("lora: {anchor_text: a.txt}", "anchor_text does nothing without anchor"),
        ("backbone: {anchor_tokens: 8}", "anchor_tokens does nothing without anchor"),
    ],
)
def test_wrong_settings_are_named(tmp_path, text, message):
    path = tmp_path / "s.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        TrainSettings.from_yaml(path)
    with pytest.raises(FileNotFoundError):
        TrainSettings.from_yaml(tmp_path / "none.yaml")


def test_zeros_are_an_atom_of_the_law(tiny_tokenizer, tmp_path):
    model = graft_tiny("qwen2", tiny_tokenizer)
    generator = torch.Generator().manual_seed(0)
    rows = []
    for index in range(240):
        word, spread = WORDS[index % 2], torch.rand((), generator=generator).item()
        value = (
            0.0 if (index % 2 == 0) == (spread < 0.8) else round(50 + 100 * spread, 2)
        )  # "one" is nought in 4 of 5 rows
        rows.append(parse_row(json.dumps({"prompt": f"The height of {word} is", "value": value}), "x"))
    found = encode_rows(rows, model.processor)
    stage = ValueStage(epochs=30, batch_size=40, learning_rate=3e-3)
    settings = TrainSettings(values=stage, value_transform="quantile", recalibrate=False)
    train(model, found[:200], found[200:], tmp_path / "out", settings)
    often, seldom = model.predict_number(["The height of one is", "The height of two is"])
    assert often.median == 0.0 and often.cdf(0.0) > 0.6 > 0.4 > seldom.cdf(0.0)
    assert math.exp(often.log_prob(0.0)) == pytest.approx(often.cdf(0.0))
    assert 50 < seldom.median < 150 and seldom.interval(0.8)[0] >= 0.0
    assert model.config.value_place == -2  # as the training values are given
    texts = model.generated_values(torch.linspace(-3, 3, 50))
    assert torch.equal(texts, (texts * 100).round() / 100) and bool((texts == 0).any())


@pytest.mark.parametrize("trained", [True, False])
def test_the_direction_of_numbers_may_stay(values_alone, tmp_path, trained):
    start = values_alone.numeric_embedding.direction.detach().clone()
    rows = encode_rows(
        [Row("prompt", f"row {i}", {"prompt": f"After {i}.5 comes", "value": float(i)}) for i in range(8)],
        values_alone.processor,
    )
    stage = LoraStage(epochs=1, batch_size=4, learning_rate=1e-2, direction=trained)
    train(values_alone, rows, [], tmp_path / "out", TrainSettings(values=None, lora=stage))
    assert torch.equal(values_alone.numeric_embedding.direction, start) != trained


def test_long_gradients_are_scaled_down(model, tmp_path):
    """Below AdamW's epsilon the length counts."""
    moved = []
    start = {name: p.detach().clone() for name, p in model.value_branch.named_parameters()}
    for limit in (1.0, 1e-12):
        model.value_branch.load_state_dict(start, strict=False)
        stage = ValueStage(epochs=3, batch_size=4, weight_decay=0.0, standardize=False)
        settings = TrainSettings(values=stage, max_grad_norm=limit, recalibrate=False)
        train(model, examples(model, 8), [], tmp_path / str(limit), settings)
        moved.append(sum((p.detach() - start[n]).abs().sum().item() for n, p in model.value_branch.named_parameters()))
    assert 0 < moved[1] < 0.1 * moved[0]


def test_bfloat16_is_for_the_backbone_alone(tiny_tokenizer, tmp_path):
    """Kept features and adapters: other numbers, near, of a precision that shows; weights and heads stay float32."""
    model = graft_tiny("llama", tiny_tokenizer)
    rows = examples(model, 12)
    with torch.no_grad():
        exact = FactStore.build(model, rows, tmp_path).facts.features
        model.bf16 = True
        near = FactStore.build(model, rows, tmp_path).facts.features  # not those that were kept in float32
    assert not np.array_equal(exact, near) and near.dtype == np.float32
    model.bf16 = False
    np.testing.assert_allclose(near, exact, atol=0.05 * np.abs(exact).max())
    stage = {"epochs": 1, "batch_size": 4}
    settings = TrainSettings.from_dict({"bf16": True, "values": False, "lora": stage, "logging_steps": 1})
    found = train(model, rows, rows[:4], tmp_path / "run", settings)
    assert not model.bf16 and {p.dtype for p in model.parameters()} == {torch.float32}
    assert math.isfinite(found["reg_loss"])
    moved = model.backbone.get_decoder().layers[0].self_attn.q_proj.weight
    assert not torch.equal(
        moved, graft_tiny("llama", tiny_tokenizer).backbone.get_decoder().layers[0].self_attn.q_proj.weight
    )
    with pytest.raises(ValueError, match="9 layers are to be trained"):
        train(model, rows, [], tmp_path / "wrong", TrainSettings.from_dict({"bf16": True, "backbone": {"layers": 9}}))
    assert not model.bf16


def test_a_reading_in_bfloat16_casts_each_weight_once(tiny_tokenizer, monkeypatch, tmp_path):
    """A weight that is emptied behind the first batch is not looked at again, while rows are read and not behind it; and
    nothing but the backbone is cast."""
    model = graft_tiny("llama", tiny_tokenizer)
    rows, weight = examples(model, 60), model.backbone.get_decoder().layers[0].mlp.down_proj.weight
    model.bf16 = True
    monkeypatch.setattr(features, "stream_facts", partial(stream_facts, tokens=100))
    of_all = FactStore.build(model, rows, tmp_path / "one").facts.features
    calls, read = [], type(model).features

    def then_emptied(self, *given, **named):
        assert torch.nn.functional.linear(torch.ones(1, 2), torch.ones(2, 2)).dtype == torch.float32
        calls.append(read(self, *given, **named))
        weight.data.zero_()
        return calls[-1]

    monkeypatch.setattr(type(model), "features", then_emptied)
    again = FactStore.build(model, rows, tmp_path / "two").facts.features
    assert len(calls) > 2 and np.array_equal(of_all, again)
    with torch.no_grad():
        assert not np.array_equal(of_all, FactStore.build(model, rows, tmp_path / "three").facts.features)


def test_bfloat16_is_taken_where_it_is_faster(tiny_tokenizer, monkeypatch, tmp_path):
    model = graft_tiny("llama", tiny_tokenizer)
    rows, size = examples(model, 8), model.config.hidden_size
    for has, fewest, taken in (("avx512_bf16", size, True), ("amx_bf16", size, True), ("avx2", size, False)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda has=has: {has: True})
        monkeypatch.setattr("causalqwen.modeling.backbones._FEWEST_COLUMNS", fewest)
        assert bf16_pays(model) is taken
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True})
    monkeypatch.setattr("causalqwen.modeling.backbones._FEWEST_COLUMNS", size + 1)
    assert not bf16_pays(model)  # too narrow
    monkeypatch.setattr("causalqwen.modeling.backbones._FEWEST_COLUMNS", size)
    for given, wanted in (({}, True), ({"bf16": False}, False), ({"heads": True}, False), ({"lora": True}, False)):
        assert TrainSettings.from_dict(given).takes_bf16(model) is wanted, given
    read, features = [], type(model).features

    def recorded(self, *given, **named):
        read.append(self.bf16)
        return features(self, *given, **named)

    monkeypatch.setattr(type(model), "features", recorded)
    train(model, rows, rows[:4], tmp_path, TrainSettings.from_dict({"values": {"epochs": 1}}))
    evaluate(model, examples(model, 6), tmp_path / "more")
    assert len(read) > 1 and all(read) and not model.bf16
    assert not bf16_pays(model.to(torch.bfloat16))


@pytest.mark.slow
def test_rows_read_in_bfloat16_are_predicted_alike(smollm2):
    rows = ["The boiling point of water is", "In 1990 the town had 400 people; it grew by"]
    exact = smollm2.features(**smollm2.processor(rows, padding=True, return_tensors="pt")).last_hidden_state
    with reading(smollm2, True):
        near = smollm2.features(**smollm2.processor(rows, padding=True, return_tensors="pt")).last_hidden_state
    assert not torch.equal(near, exact) and not smollm2.bf16
    assert torch.cosine_similarity(near[:, -1], exact[:, -1]).min() > 0.999


def test_a_stage_of_one_update_learns(tiny_tokenizer, tmp_path):
    model = graft_tiny("llama", tiny_tokenizer)
    before = {name: one.clone() for name, one in model.named_parameters()}
    stage = ValueStage(epochs=1, batch_size=64, standardize=False)
    train(model, examples(model, 4), [], tmp_path / "run", TrainSettings(values=stage, support=None))
    moved = [name for name, one in model.named_parameters() if not torch.equal(one, before[name])]
    assert "action.value_head.weight" in moved and any(name.startswith("value_branch") for name in moved), moved
