"""Calibration, and the scores of a language, on tiny backbones; test_backbone.py has the real one."""

import math

import numpy as np
import pytest
import torch

from causalqwen import CausalDecoding, CausalQwenForCausalLM
from causalqwen.evaluation.language import (
    calibration_error,
    choice_diversity,
    evaluate_language,
    language_facts,
    score_language,
)
from causalqwen.evaluation.texts import individual_resemblance, perplexity_ratios, score_texts
from causalqwen.training import CalibrationSettings, calibrate
from causalqwen.training.calibration import ScoreSummary, summarize_scores, text_chunks
from conftest import graft_tiny

TEXT = " ".join(
    f"the long road number {i % 7} goes past the small house and the {'old' if i % 3 else 'new'} mill"
    for i in range(60)
)
QUICK = CalibrationSettings(anchors=40, chunk=64)


@pytest.fixture(scope="module")
def calibrated(tiny_tokenizer) -> CausalQwenForCausalLM:
    model = graft_tiny("llama", tiny_tokenizer)
    calibrate(model, TEXT, QUICK)
    return model


@pytest.mark.parametrize("family", ["gaussian", "cauchy"])
def test_calibration_brings_sums_to_one_and_moves_no_decision(tiny_tokenizer, family):
    model = graft_tiny("llama", tiny_tokenizer, vocabulary_family=family)
    with torch.no_grad():
        model.action.threshold += 2.0  # a start that is off
    before = score_language(model, TEXT, solve=False)
    report = calibrate(model, TEXT, QUICK)
    after = score_language(model, TEXT)
    assert before["agreement"] == after["agreement"] == 1.0
    assert before["sum_within"] < 0.2 < 0.9 < after["sum_within"]
    assert after["nll_gap"] < before["nll_gap"]
    assert after["solved"]["sum_within"] == 1.0
    assert report["score_slope"] > 0 if family == "gaussian" else report["score_slope"] == 0


@pytest.mark.parametrize("form", [{"token_thresholds": 0.05}, {"causal_size": 16}], ids=lambda form: next(iter(form)))
def test_other_forms_are_calibrated_too(tiny_tokenizer, form):
    model = graft_tiny("llama", tiny_tokenizer, **form)
    calibrate(model, TEXT, QUICK)
    assert score_language(model, TEXT)["sum_within"] > 0.8
    assert evaluate_language(model, "\n".join([TEXT, TEXT]), texts=2)["agreement"] < 1.0  # it is another head


def test_decisions_hold_where_a_scale_is_left_and_nothing_is_drawn(calibrated):
    """`causal` leaves the noise's scale; at temperature 0 it has to decide as the backbone does."""
    inputs = calibrated.processor("the long road goes", return_tensors="pt")
    greedy = calibrated.backbone.generate(inputs["input_ids"], max_new_tokens=8, do_sample=False)
    for name in ("causal", "noise", "shared-individual", "persona"):
        plan = CausalDecoding.preset(name, temperature=0.0, seed=1)
        made = calibrated.generate(**inputs, max_new_tokens=8, causal_decoding=plan)
        assert torch.equal(made.sequences, greedy)


def test_a_calibrated_model_comes_back_bit_for_bit(calibrated, tmp_path):
    calibrated.save_pretrained(tmp_path)
    loaded = CausalQwenForCausalLM.from_pretrained(tmp_path)
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        ours, theirs = (m(ids, output_ovr=True) for m in (calibrated, loaded))
    assert torch.equal(ours.ovr_probs, theirs.ovr_probs) and torch.equal(ours.scale_S, theirs.scale_S)
    assert loaded.config.anchor_tokens == 40


def test_anchors_and_the_rest_estimate_the_partition(calibrated):
    """With every token an anchor the estimate is exact; with some, it is near the truth on the calibration text."""
    facts = summarize_scores(calibrated, text_chunks(calibrated, TEXT, 64))
    head = calibrated.vocabulary()
    estimate = calibrated.action.partition(facts.features, facts.loc, head).squeeze(-1)
    assert (estimate - facts.log_partition).abs().median() < 0.1
    model = calibrated.action.partition
    kept = model.anchor_ids, model.rest.bias.data
    model.anchor_ids, model.rest.bias.data = torch.arange(head.weight.shape[0]), torch.full((1,), -torch.inf)
    exact = model(facts.features, facts.loc, head).squeeze(-1)
    torch.testing.assert_close(exact, head(facts.loc).logsumexp(-1), rtol=1e-5, atol=1e-5)
    model.anchor_ids, model.rest.bias.data = kept


def test_a_summary_counts_every_token_once(calibrated):
    facts: ScoreSummary = summarize_scores(calibrated, text_chunks(calibrated, TEXT, 64))
    used = calibrated.action.rows - len(calibrated.config.free_token_ids)
    assert (facts.counts.sum(-1) + facts.top.shape[1] == used).all()
    mass = facts.top.exp().sum(-1) + (facts.tail_locations().exp() * facts.counts).sum(-1)
    torch.testing.assert_close(mass, torch.ones_like(mass), rtol=0.01, atol=0)
    assert facts.mass.sum().item() == pytest.approx(1.0)


def test_a_solved_threshold_is_written_into_the_checkpoint(tiny_tokenizer, tmp_path):
    model = graft_tiny("llama", tiny_tokenizer, threshold_shift="solved")
    model.save_pretrained(tmp_path)
    loaded = CausalQwenForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        out = loaded(torch.arange(5, 25)[None], output_ovr=True)
    torch.testing.assert_close(out.ovr_probs.sum(-1), torch.ones(1, 20), rtol=1e-3, atol=0)


def test_the_documents_scale_cannot_be_calibrated(tiny_tokenizer):
    with pytest.raises(ValueError, match="score_scale='common'"):
        calibrate(graft_tiny("llama", tiny_tokenizer, start="documents"), TEXT)
    with pytest.raises(ValueError, match="no two tokens"):
        calibrate(graft_tiny("llama", tiny_tokenizer), "")


def test_calibration_error_is_its_definition():
    probability = torch.tensor([0.9, 0.9, 0.9, 0.9, 0.1, 0.1])
    right = torch.tensor([True, True, True, False, False, True])
    error, bins = calibration_error(probability, right)
    assert error == pytest.approx(4 / 6 * 0.15 + 2 / 6 * 0.4)
    assert [count for *_, count in bins] == [2, 4]


def test_sample_chooses_nearly_as_the_softmax(tiny_tokenizer):
    model = graft_tiny("llama", tiny_tokenizer)
    calibrate(model, TEXT, QUICK)
    found = choice_diversity(model, TEXT, positions=12, draws=400)
    assert found["total_variation"] < found["sampling_error"] + 0.04


def test_texts_are_scored_by_fluency_and_diversity(calibrated):
    prompts = ["the long road", "the small house"]
    scores = score_texts(calibrated, prompts, [" goes past the mill", " goes past the mill"])
    assert scores["distinct_1"] == scores["distinct_2"] == 0.5 and scores["self_bleu"] == pytest.approx(1.0)
    ids = calibrated.processor.tokenizer("the long road goes", add_special_tokens=False)["input_ids"]
    start = len(calibrated.processor.tokenizer("the long road", add_special_tokens=False)["input_ids"])
    with torch.no_grad():
        log_p = calibrated.backbone(torch.tensor([ids])).logits[0].log_softmax(-1)
    nats = -np.mean([log_p[i - 1, ids[i]].item() for i in range(start, len(ids))])
    assert score_texts(calibrated, ["the long road"], [" goes"])["perplexity"] == pytest.approx(
        math.exp(nats), rel=1e-4
    )


def test_perplexity_is_compared_at_equal_diversity():
    points = [
        {"sampler": "top-p", "top_p": p, "distinct_2": p - 0.4, "perplexity": n} for p, n in ((0.7, 5.0), (0.9, 10.0))
    ]
    points += [{"sampler": "causal", "distinct_2": d, "perplexity": p} for d, p in ((0.4, 4.0), (0.6, 9.0))]
    points += [{"sampler": "persona", "distinct_2": d, "perplexity": 5.0} for d in (0.1, 0.2)]
    ratios = perplexity_ratios(points)
    assert ratios["top-p"] == pytest.approx({"at": 1.0, "along": 1.0})
    assert ratios["causal"] == pytest.approx({"at": 6.0 / 10.0, "along": 4.0 / 50**0.5})
    assert ratios["persona"] == {"at": None, "along": None}


def test_resemblance_finds_an_individual_who_speaks_through_and_none_in_noise(calibrated):
    """A held individual without other randomness repeats itself; at temperature 0 nobody speaks and nothing differs."""
    prompts = ["the long road", "the small house", "the old mill", "the new"]
    found = individual_resemblance(
        calibrated,
        prompts,
        setting={"noise": "off", "own": "marginal", "temperature": 20.0},
        individuals=5,
        new_tokens=12,
    )
    assert found["difference"] > 3 * found["null_std"] and found["p_value"] < 0.05
    nobody = individual_resemblance(calibrated, prompts, setting={"temperature": 0.0}, individuals=3, new_tokens=6)
    assert abs(nobody["difference"]) < 1e-9 and nobody["p_value"] > 0.5


def test_everything_about_a_language_in_one_call(calibrated):
    metrics = evaluate_language(calibrated, "\n".join([TEXT, TEXT]), texts=2)
    assert {
        "curves",
        "perplexity_at_equal_diversity",
        "resemblance",
        "sample",
        "solved",
        "reliability",
    } <= metrics.keys()
    assert metrics["agreement"] == 1.0 and len(language_facts(metrics)) > 6
