"""The five criteria by which the minimal version says that it has succeeded, on its text-only form, by their names."""

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats

from causalqwen import AbductionNetwork, CausalDecoding, CausalQwenForCausalLM, Individual, ovr_loss
from causalqwen.losses import ovr_log_probs, shift_targets
from conftest import action_of, graft_tiny

TEXTS = ["We, the people, look back on what was done.", "A new year", "Yes"]


@pytest.fixture
def minimal(tiny_tokenizer) -> CausalQwenForCausalLM:
    """Text only: no value branch, and `<NUM>` out of reach."""
    model = graft_tiny("qwen2", tiny_tokenizer, start="minimal", value_branch=False)
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        model.action.num_bias -= 1e4
    return model


def encode(model, texts):
    return model.processor(texts, padding=True, padding_side="left", return_tensors="pt")


def test_criterion_1_the_law_of_every_score_is_that_of_drawn_individuals_and_noise():
    torch.manual_seed(0)
    abduction = AbductionNetwork(3, initial_scale=0.6931471805599453).double()
    action, lm_head = (part.double() for part in action_of(3, 4, score_scale="documents", initial_noise=0.1))
    loc_U, scale_U = abduction(torch.randn(3, dtype=torch.float64))
    loc_S, scale_S = action(loc_U, scale_U, lm_head)
    e1, e2 = torch.rand(2, 200_000, 3, dtype=torch.float64)
    drawn = loc_U + scale_U * action.law.quantile(e1) + action.noise * action.law.quantile(e2)
    for token, sample in enumerate(lm_head(drawn).detach().T):
        truth = stats.cauchy(loc_S[token].item(), scale_S[token].item())
        assert stats.kstest(sample.numpy(), truth.cdf).pvalue > 1e-3


def test_criterion_1_probabilities_are_exact_in_both_tails():
    far = torch.tensor([-1e12, -1e4, -0.3, 0.0, 2.0, 1e4, 1e12])
    log_p, log_not_p = ovr_log_probs(far, torch.ones(7))
    for place, found in ((far, log_p), (-far, log_not_p)):
        expected = [float(mpmath.log(mpmath.atan2(1, -mpmath.mpf(x)) / mpmath.pi)) for x in place.tolist()]
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


def test_criterion_1_gradients_are_finite_differences():
    torch.manual_seed(0)
    z, targets = torch.randn(4, 3, dtype=torch.float64), torch.arange(4)
    abduction = AbductionNetwork(3).double()
    action, lm_head = (part.double() for part in action_of(3, 5, score_scale="documents", initial_noise=0.1))
    parameters = [*abduction.parameters(), lm_head.weight, lm_head.bias, action.b_noise]

    def loss(*_: torch.Tensor) -> torch.Tensor:
        return ovr_loss(*action(*abduction(z), lm_head), targets, 0.2)

    assert torch.autograd.gradcheck(loss, parameters, eps=1e-6, atol=1e-6)


def test_criterion_2_outputs_at_the_start_differ_from_qwens_by_less_than_a_thousandth(minimal):
    inputs = encode(minimal, TEXTS)
    with torch.no_grad():
        theirs = minimal.backbone(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        ours = minimal(**inputs).logits
    others = torch.arange(theirs.shape[-1]) != minimal.config.num_token_id
    assert torch.equal(ours[..., others], theirs[..., others])  # the difference is 0


def test_criterion_3_training_on_a_small_data_set_lowers_the_loss_and_raises_the_accuracy(minimal):
    """Abduction, noise and thresholds by L_cls, on features of a backbone that stands still."""
    texts = [f"the {size} house by the {place}" for size in ("old", "new") for place in ("road", "sea")]
    inputs = minimal.processor(texts, padding=True, return_tensors="pt")
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    with torch.no_grad():
        z = minimal.features(**inputs).last_hidden_state
    heads = [*minimal.abduction.parameters(), minimal.action.b_noise, minimal.action.threshold]
    optimizer = torch.optim.Adam(heads, lr=0.05)

    masks, losses = shift_targets(labels, None, None, minimal.config.num_token_id), []

    def accuracy() -> float:
        with torch.no_grad():
            decisions = minimal.heads(z, output_ovr=True).decisions
        real = labels[:, 1:] != -100
        return (decisions[:, :-1] == labels[:, 1:])[real].double().mean().item()

    before = accuracy()
    for _ in range(300):
        optimizer.zero_grad()
        loss = minimal.heads(z, masks).loss_cls
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert max(losses[-20:]) < 0.2 * losses[0]
    assert before < 0.1 < 0.4 < accuracy()


def test_criterion_4_causal_sampling_differs_from_standard_inference_and_holds_to_its_individual(minimal):
    inputs = encode(minimal, TEXTS)

    def texts(name, **settings):
        plan = CausalDecoding.preset(name, **settings)
        made = minimal.generate(**inputs, max_new_tokens=8, causal_decoding=plan).sequences[:, -8:]
        return [tuple(row.tolist()) for row in made]

    standard = texts("standard")
    drawn = [texts("causal", seed=seed) for seed in range(3)]
    assert texts("standard") == standard and texts("causal", seed=0) == drawn[0]
    for row in range(len(TEXTS)):
        assert len({standard[row], *(made[row] for made in drawn)}) == 4
    people = [Individual.from_seed(seed, minimal.config.causal_size) for seed in (1, 1, 2)]
    one, same, other = (texts("shared-individual", individual=who) for who in people)
    assert one == same and one != other


@pytest.mark.parametrize("sampler", [{"top_k": 20}, {"top_p": 0.9}])
def test_criterion_5_top_k_and_top_p_give_qwens_own_tokens(minimal, sampler):
    inputs = encode(minimal, TEXTS)
    plan, sampler = CausalDecoding.preset("softmax", seed=7), {"max_new_tokens": 12, "eos_token_id": None, **sampler}
    ours = minimal.generate(**inputs, causal_decoding=plan, **sampler).sequences
    torch.manual_seed(7)
    unused = [minimal.config.num_token_id, *minimal.config.free_token_ids]
    del inputs["numeric_values"]
    theirs = minimal.backbone.generate(**inputs, do_sample=True, suppress_tokens=unused, **sampler)
    assert torch.equal(ours, theirs)
