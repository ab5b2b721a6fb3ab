"""The scores of a language on tiny backbones; test_backbone.py has the real one."""

import math

import numpy as np
import pytest
import torch

from causalqwen import CausalQwenForCausalLM
from causalqwen.evaluation.language import (
    calibration_error,
    choice_diversity,
    evaluate_language,
    individual_resemblance,
    language_facts,
    perplexity_ratios,
    score_language,
    score_texts,
)
from conftest import graft_tiny

TEXT = " ".join(
    f"the long road number {i % 7} goes past the small house and the {'old' if i % 3 else 'new'} mill"
    for i in range(60)
)


@pytest.fixture(scope="module")
def model(tiny_tokenizer) -> CausalQwenForCausalLM:
    return graft_tiny("llama", tiny_tokenizer)


@pytest.mark.parametrize("family", ["gaussian", "cauchy"])
def test_probabilities_sum_to_about_one_wherever_the_logits_lie(tiny_tokenizer, family):
    """A constant on all logits moves no P_k, as it moves no softmax."""
    model = graft_tiny("llama", tiny_tokenizer, vocabulary_family=family)
    found = score_language(model, TEXT)
    assert found["agreement"] == 1.0
    if family == "gaussian":  # the tails of 400 Cauchy scores add up to more
        assert found["sum_within"] > 0.9
    model.get_output_embeddings().bias = torch.nn.Parameter(torch.full((model.action.rows,), 7.0))
    model.action.num_bias.data += 7.0
    moved = score_language(model, TEXT)
    for name in ("ovr_nll", "ece", "sum_within"):
        assert moved[name] == pytest.approx(found[name], abs=1e-4)


def test_calibration_error_is_its_definition():
    probability = torch.tensor([0.9, 0.9, 0.9, 0.9, 0.1, 0.1])
    right = torch.tensor([True, True, True, False, False, True])
    error, bins = calibration_error(probability, right)
    assert error == pytest.approx(4 / 6 * 0.15 + 2 / 6 * 0.4)
    assert [count for *_, count in bins] == [2, 4]


def test_sample_chooses_nearly_as_the_softmax(model):
    found = choice_diversity(model, TEXT, positions=12, draws=400)
    assert found["total_variation"] < found["sampling_error"] + 0.04


def test_texts_are_scored_by_fluency_and_diversity(model):
    prompts = ["the long road", "the small house"]
    scores = score_texts(model, prompts, [" goes past the mill", " goes past the mill"])
    assert scores["distinct_1"] == scores["distinct_2"] == 0.5 and scores["self_bleu"] == pytest.approx(1.0)
    ids = model.processor.tokenizer("the long road goes", add_special_tokens=False)["input_ids"]
    start = len(model.processor.tokenizer("the long road", add_special_tokens=False)["input_ids"])
    with torch.no_grad():
        log_p = model.backbone(torch.tensor([ids])).logits[0].log_softmax(-1)
    nats = -np.mean([log_p[i - 1, ids[i]].item() for i in range(start, len(ids))])
    assert score_texts(model, ["the long road"], [" goes"])["perplexity"] == pytest.approx(math.exp(nats), rel=1e-4)


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


def test_resemblance_finds_an_individual_who_speaks_through_and_none_in_noise(model):
    """A held individual without other randomness repeats itself; at temperature 0 nobody speaks and nothing differs."""
    prompts = ["the long road", "the small house", "the old mill", "the new"]
    setting = {"noise": "off", "own": "marginal", "temperature": 20.0}
    found = individual_resemblance(model, prompts, setting=setting, individuals=5, new_tokens=12)
    assert found["difference"] > 3 * found["null_std"] and found["p_value"] < 0.05
    nobody = individual_resemblance(model, prompts, setting={"temperature": 0.0}, individuals=3, new_tokens=6)
    assert abs(nobody["difference"]) < 1e-9 and nobody["p_value"] > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("form", [{}, {"token_thresholds": 0.05}, {"causal_size": 16}], ids=str)
def test_everything_about_a_language_in_one_call(tiny_tokenizer, form):
    metrics = evaluate_language(graft_tiny("llama", tiny_tokenizer, **form), "\n".join([TEXT, TEXT]), texts=2)
    assert {"curves", "perplexity_at_equal_diversity", "resemblance", "sample", "reliability"} <= metrics.keys()
    assert (metrics["agreement"] < 1.0) is bool(form) and metrics["sum_within"] > 0.8
    assert len(language_facts(metrics)) > 6
