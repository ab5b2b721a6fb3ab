"""Claims of the documents that no other file tests, each shown or refuted; docs/research/claims.md lists them all."""

import math
import re
from functools import partial

import pytest
import torch
from scipy import stats
from torch.nn import functional as F

from causalqwen import (
    AbductionNetwork,
    CausalDecoding,
    CausalQwenConfig,
    CausalQwenForCausalLM,
    Individual,
    cauchy_nll,
    ovr_loss,
)
from causalqwen.data import Row, encode_rows
from causalqwen.decoding import BoundDecoding, draws
from causalqwen.distributions import (
    FAMILIES,
    INDIVIDUAL_STREAM,
    NOISE_STREAM,
    SCALE_FLOOR,
    get_family,
)
from causalqwen.losses import ovr_log_probs, shift_targets, total_loss
from causalqwen.modeling import ValueBranch
from causalqwen.modeling.chain import Chain, Scores
from causalqwen.modeling.embedding import GatedFeatures, NumericEmbedding
from causalqwen.numbers import find_numbers, symlog
from causalqwen.training import score_tokens
from causalqwen.training.features import stream_facts
from causalqwen.training.scores import individual_prob_sums
from conftest import action_of, graft_tiny, make_backbone

CAUCHY = get_family("cauchy")
MIDPOINTS = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000  # integrates over a uniform e
QUANTILES = CAUCHY.quantile(MIDPOINTS)


def number(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def passes(loc: torch.Tensor, scale: float, threshold: float = 0.0) -> torch.Tensor:
    """P(S > threshold), S ~ Cauchy(loc, scale)."""
    return CAUCHY.log_sf(number(threshold), loc, number(scale)).exp()


# ---- the Cauchy law --------------------------------------------------------------------------------------------------


def test_a_cauchy_has_no_mean_and_averaging_narrows_nothing():
    """Foundations 1.1.3. E|X| up to R is log(1 + R^2)/pi, without end; the mean of n draws is as wide as one."""
    for limit in (1e2, 1e4):
        x = torch.linspace(0, math.asinh(limit), 200_001, dtype=torch.float64).sinh()
        part = 2 * torch.trapezoid(x * CAUCHY.log_prob(x, number(0.0), number(1.0)).exp(), x).item()
        assert part == pytest.approx(math.log1p(limit**2) / math.pi, rel=1e-6)
    for count in (10, 1000):
        weights = torch.full((1, count), 1 / count, dtype=torch.float64)
        assert CAUCHY.linear_scale(torch.ones(count, dtype=torch.float64), weights).item() == pytest.approx(1.0)
        assert get_family("gaussian").linear_scale(torch.ones(count).double(), weights).item() < 0.4


def test_extreme_events_keep_a_probability():
    """Minimal version, the choice of the law: ten scales out, 3% against 8e-24."""
    zero, one, far = number(0.0), number(1.0), number(10.0)
    assert CAUCHY.log_sf(far, zero, one).exp().item() == pytest.approx(1 / (10 * math.pi), rel=0.01)
    assert get_family("gaussian").log_sf(far, zero, one).exp().item() < 1e-23


def test_linear_stability_needs_independent_variables():
    """Foundations 1.2. Two scores of one U are dependent: the scale of their difference is |W_0 - W_1| scale, no sum."""
    rows, scale = number(1.0, -2.0, 1.1, -1.9).view(2, 2), number(1.0, 0.5)
    of_scores = CAUCHY.linear_scale(scale, rows)
    of_difference = CAUCHY.linear_scale(scale, (rows[0] - rows[1]).unsqueeze(0))
    assert of_difference.item() == pytest.approx(0.15) and CAUCHY.add(*of_scores).item() == pytest.approx(4.05)


@pytest.mark.parametrize("source", ["individual", "noise"])
def test_drawing_a_source_and_averaging_is_integrating_it_out(source):
    """Foundations 2.2, inference 3: P(S > C) is the mean of P(S > C | u), and of P(S > C | noise)."""
    loc, scale, noise, weight, threshold = 0.4, 1.5, 0.3, -0.7, 0.9
    drawn, left = (scale, noise) if source == "individual" else (noise, scale)
    mean = passes(weight * (loc + drawn * QUANTILES), abs(weight) * left, threshold).mean().item()
    whole = passes(number(weight * loc), abs(weight) * (scale + noise), threshold).item()
    assert mean == pytest.approx(whole, abs=1e-5)


def test_scores_that_share_an_individual_are_dependent():
    """Foundations 3.1.1 calls the tokens independent: each P_k is computed alone, but two tokens pass together more often."""
    given_u = passes(QUANTILES, 0.2)
    assert given_u.mean().item() == pytest.approx(0.5) and (given_u**2).mean().item() > 0.4


def test_one_world_does_not_tell_what_two_worlds_share():
    """Overview 1. Same law in each world, three different joint laws: nothing shared, the individual, or the noise."""
    scale, noise, threshold = 2.0, 0.5, 1.0
    whole = passes(number(0.0), scale + noise, threshold).item()
    same_individual = passes(scale * QUANTILES, noise, threshold)  # fresh noise in each world
    same_noise = passes(noise * QUANTILES, scale, threshold)  # an individual drawn anew in each world
    for given in (same_individual, same_noise):
        assert given.mean().item() == pytest.approx(whole, abs=1e-5)
    both = [whole**2, (same_noise**2).mean().item(), (same_individual**2).mean().item()]
    assert both[0] + 0.02 < both[1] < both[2] - 0.05


# ---- numbers in ------------------------------------------------------------------------------------------------------


def test_phi_compresses_and_keeps_the_ratios_of_large_numbers():
    """Overview 2.1: steps in the log are ratios of the numbers, where |v| is far above 1."""
    assert symlog(number(1e300)).item() < 700
    doubling = (symlog(number(2e6, 0.02)) - symlog(number(1e6, 0.01))).tolist()
    assert doubling[0] == pytest.approx(math.log(2), rel=1e-5) and doubling[1] < 0.01


def test_multiplied_features_saturate_where_added_ones_do_not():
    """Architecture 2.2.4 multiplies features by sigmoid(a v + b) to tell values of `<NUM>` apart."""
    gate = GatedFeatures(1, 0, appended=True)
    torch.nn.init.constant_(gate.direction, 0.1)
    gated = gate.gate(torch.ones(1, 2, 1), torch.zeros(1, 2, dtype=torch.long), number(1e3, 1e6).view(1, 2))
    assert gated[0, 0, 0] == gated[0, 1, 0] != 0
    phi = NumericEmbedding(1, 0, appended=True)
    torch.nn.init.ones_(phi.direction)
    read = phi(torch.zeros(1, 2, dtype=torch.long), number(1e3, 1e6).view(1, 2), torch.nn.Embedding(1, 1))
    assert (read[0, 1, 0] - read[0, 0, 0]).item() == pytest.approx(math.log(1000), rel=1e-3)


def test_the_pattern_of_the_documents_misses_signs_separators_and_chinese():
    """Architecture 4.2.2. A word boundary stands neither before a sign nor between a digit and a Chinese character."""
    pattern = re.compile(r"\b\d+(?:\.\d+)?(?:[eE][+-]?\d+)?\b")
    for text, theirs, ours in (
        ("it was -5", [5.0], [-5.0]),
        ("1,272 people", [1.0, 272.0], [1272.0]),
        ("价格是99.9元", [], [99.9]),
    ):
        assert [float(found) for found in pattern.findall(text)] == theirs
        assert [span.value for span in find_numbers(text)] == ours


def test_a_normalised_direction_does_not_know_its_spread(tiny_tokenizer):
    """Overview 4, step 1, draws it with a small sigma and then normalises: the length is all that is left to choose."""
    one, other = (
        graft_tiny("llama", tiny_tokenizer, start="documents", initial_direction=length).numeric_embedding.direction
        for length in (0.02, 5.0)
    )
    assert one.norm().item() == pytest.approx(0.02) and other.norm().item() == pytest.approx(5.0)
    torch.testing.assert_close(one / 0.02, other / 5.0)


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_resizing_to_the_tokenizer_changes_the_backbone_and_a_graft_does_not(tiny_tokenizer, family):
    """Architecture 4.2.2 adds `<NUM>` and resizes: that takes spare rows away, as Qwen's, or adds one that is drawn."""
    backbone, ids = make_backbone(family, tiny_tokenizer), torch.arange(5, 40).view(1, -1)
    rows = backbone.get_output_embeddings().weight.shape[0]
    with torch.no_grad():
        theirs = backbone(ids).logits
        model = graft_tiny(family, tiny_tokenizer)
        ours = model(ids).logits
        others = torch.arange(rows) != model.config.num_token_id
        assert model.get_output_embeddings().weight is model.backbone.get_output_embeddings().weight
        assert model.get_output_embeddings().weight.shape[0] == rows
        assert torch.equal(ours[..., :rows][..., others], theirs[..., others])
        backbone.resize_token_embeddings(len(tiny_tokenizer) + 1)
        resized = backbone(ids).logits
    assert resized.shape[-1] == len(tiny_tokenizer) + 1 == (rows - 7 if family == "qwen2" else rows + 1)
    assert not torch.allclose(resized.logsumexp(-1), theirs.logsumexp(-1))
    for size in (len(tiny_tokenizer) + 1, rows):
        with pytest.raises(ValueError, match="never resizes its vocabulary matrix"):
            model.resize_token_embeddings(size)


def test_the_shape_of_larger_qwens_is_grafted_as_it_is(tiny_tokenizer):
    """Architecture 4.5. From 7B on Qwen2.5 has an lm_head of its own and 152,064 rows; the first Qwen is no model here."""
    settings = {"tie_word_embeddings": False, "vocab_size": 152_064}
    backbone, size = make_backbone("qwen2", tiny_tokenizer, **settings), len(tiny_tokenizer)
    model = CausalQwenForCausalLM.from_backbone(backbone, tokenizer=tiny_tokenizer)
    ids = torch.arange(5, 30).view(1, -1)
    assert model.config.num_token_id == size and model.config.free_token_ids == list(range(size + 1, 152_064))
    with torch.no_grad():
        theirs, ours = backbone(ids).logits, model(ids, output_ovr=True)
    assert torch.equal(ours.logits, theirs)
    assert torch.equal(ours.decisions, theirs[..., : size + 1].argmax(-1)) and (theirs.argmax(-1) > size).any()
    with pytest.raises(ValueError, match="'qwen' is no model of transformers"):
        CausalQwenConfig(text_config={"model_type": "qwen"})


def test_by_default_a_number_is_read_as_its_digits_and_said_as_a_value(tiny_tokenizer):
    """Overview 7.1: nothing that is read depends on the value at a hidden `<NUM>`; what is said lies on a real axis."""
    text = "It is 5 and 500 of them"
    for context in ("digits", "value"):
        model = graft_tiny("llama", tiny_tokenizer, number_context=context)
        inputs = model.processor(text, return_tensors="pt")
        with torch.no_grad():
            one, other = model(**inputs), model(**inputs | {"numeric_values": 100 * inputs["numeric_values"]})
        seen = inputs["input_ids"] != model.config.num_token_id  # at `<NUM>` itself nothing is asked
        same = [torch.equal(one[name][seen], other[name][seen]) for name in ("logits", "loc_U", "loc_Y")]
        assert same == [context == "digits"] * 3
    model = graft_tiny("llama", tiny_tokenizer)
    assert model.config.number_context == "digits"
    inputs = model.processor(text, return_tensors="pt")
    ids = inputs["input_ids"]
    seen = ids[0] != model.config.num_token_id
    plain = torch.tensor([model.processor.tokenizer(text)["input_ids"]])
    assert torch.equal(ids[:, seen], plain)
    with torch.no_grad():
        theirs = model.backbone(plain).logits
        torch.testing.assert_close(model(**inputs).logits[:, seen, :-1], theirs, rtol=1e-4, atol=1e-4)
        losses = [model(**inputs, labels=ids, numeric_labels=scale * inputs["numeric_values"]) for scale in (1, 100)]
    assert losses[0].loss_cls == losses[1].loss_cls and losses[0].loss_reg < losses[1].loss_reg - 1
    (said,) = model.predict_number("It is")
    assert said.cdf(said.median) == pytest.approx(0.5) and 0 < said.cdf(-100.0) < 0.5 < said.cdf(100.0) < 1


# ---- start values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_qwen_has_no_output_bias(tiny_tokenizer, family):
    """The minimal version copies `lm_head.bias`; a graft adds none to the scores of the backbone's tokens."""
    model = graft_tiny(family, tiny_tokenizer)
    assert model.vocabulary().bias is None and model.backbone.get_output_embeddings().bias is None
    assert not model.action.score_loc(torch.zeros(1, model.config.causal_size), model.vocabulary()).any()


@pytest.mark.parametrize("activation", ["softplus", "exp"])
def test_a_scale_is_positive_because_it_is_floored(activation):
    """Overview 2.3, architecture 2.3.4: softplus and exp are positive on paper, and 0 in float32 below some -104."""
    abduction = AbductionNetwork(4, scale_activation=activation)
    torch.nn.init.constant_(abduction.scale_net.bias, -200.0)
    loc, scale = abduction(torch.randn(3, 4))
    assert (scale == 0).all()
    for score_scale in ("common", "documents"):
        action, lm_head = action_of(4, 5, score_scale=score_scale)
        for _, floored in (action(loc, scale, lm_head), action.value(loc, scale)):
            assert (floored >= SCALE_FLOOR).all()


def test_the_value_starts_at_w_reg_z_and_w_reg_is_not_small():
    """Overview 2.4 and 4, step 4: Y ~ Cauchy(0, .) because |W_reg|_1 is small. It is sqrt(2 H / pi), 24 for H = 896."""
    torch.manual_seed(0)
    action, z = action_of(896, 3)[0], torch.randn(5, 896)
    loc, scale = action.value(z, torch.full_like(z, 10.0))
    torch.testing.assert_close(loc, z @ action.value_head.weight[0])
    assert loc.abs().min() > 0.01
    assert scale[0].item() / 10 == pytest.approx(math.sqrt(2 * 896 / math.pi), rel=0.1)


def test_noise_that_starts_at_zero_never_learns():
    """Overview 4, step 5, has its influence learned step by step; the gradient of |b| at 0 is 0."""
    torch.manual_seed(0)
    for start, moves in ((0.0, False), (0.1, True)):
        action, lm_head = action_of(4, 5, score_scale="documents", initial_noise=start)
        loc_S, scale_S = action(torch.randn(8, 4), torch.ones(8, 4), lm_head)
        loc_Y, scale_Y = action.value(torch.randn(8, 4), torch.ones(8, 4) + action.noise)
        loss = ovr_loss(loc_S, scale_S, torch.arange(8) % 5) + cauchy_nll(torch.ones(8), loc_Y, scale_Y).mean()
        loss.backward()
        assert bool(action.b_noise.grad.any()) is moves


@pytest.mark.parametrize("settings", [{}, {"start": "minimal"}], ids=["default", "documents"])
def test_the_loss_sees_the_sum_of_individual_and_noise_alone(tiny_tokenizer, settings):
    """Overview 4: which of the two a text is due to cannot be learned from one-position losses, so neither need shrink."""
    model = graft_tiny("llama", tiny_tokenizer, scale_activation="exp", **settings)
    ids, alpha, losses = torch.arange(5, 40).view(1, -1), model.action.law.alpha, []
    for _ in range(2):
        losses.append(model(ids, labels=ids).loss_cls.item())
        with torch.no_grad():  # half of scale_U^a becomes noise
            moved = model.abduction(torch.zeros(1, 32))[1][0] ** alpha / 2
            model.abduction.scale_net.bias += math.log(0.5) / alpha
            model.action.b_noise.copy_((model.action.noise**alpha + moved) ** (1 / alpha))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    with torch.no_grad():
        model.action.b_noise *= 2
    assert model(ids, labels=ids).loss_cls.item() != pytest.approx(losses[0], rel=1e-3)


def test_no_recommended_threshold_is_sparse_under_a_wide_individual():
    """Overview 4, step 6, at its own gamma = 10 and |W_k|_1 = 10, that is scale_S = 100; at scale 1, C = 0 is no coin."""
    zero = number(0.0)
    assert passes(zero, 100.0, 10.0).item() == pytest.approx(0.47, abs=0.01)
    assert passes(zero, 100.0, 100.0).item() == pytest.approx(0.25)
    assert passes(number(10.0), 100.0, 0.0).item() == pytest.approx(0.53, abs=0.01)
    assert passes(number(10.0), 1.0, 0.0).item() > 0.96


def test_the_recommended_start_pays_tens_of_thousands_of_nats():
    """Overview 4, step 6: at scale_S = 100 and C = 100 a token costs V log(4/3); a uniform softmax costs log V = 12."""
    loss = ovr_loss(torch.zeros(1, 151_936), torch.full((1, 1), 100.0), torch.tensor([7]), 100.0)
    assert loss.item() == pytest.approx(151_935 * math.log(4 / 3) + math.log(4), rel=1e-3)


def test_a_wide_individual_writes_noise(tiny_tokenizer):
    """Overview 4, step 2: with gamma = 10 what a drawn individual says is all but uniform to the backbone."""
    said = {}
    for start in ("documents", "faithful"):
        model = graft_tiny("llama", tiny_tokenizer, start=start)
        ids = torch.arange(5, 69).view(1, -1)
        plan = CausalDecoding.preset("individual-only", seed=1)
        with torch.no_grad():
            chosen = model(ids, causal_decoding=plan).logits[..., :-1].argmax(-1, keepdim=True)
            said[start] = model.backbone(ids).logits.softmax(-1).gather(-1, chosen).mean().item()
    assert said["faithful"] > 5 * said["documents"]


# ---- one-vs-rest -----------------------------------------------------------------------------------------------------


def test_a_probability_depends_on_its_own_row_alone():
    """Foundations 3.1.1; under the documents' scale. A softmax moves every token."""
    torch.manual_seed(0)
    (action, lm_head), loc, scale = action_of(4, 6, score_scale="documents"), torch.randn(3, 4), torch.rand(3, 4)
    before = action(loc, scale, lm_head)
    with torch.no_grad():
        lm_head.weight[1] += 2.0
    after = action(loc, scale, lm_head)
    others = torch.arange(7) != 1
    one, other = (ovr_log_probs(*law)[0][..., others] for law in (before, after))
    torch.testing.assert_close(one, other)
    assert not torch.allclose(before[0].log_softmax(-1)[..., others], after[0].log_softmax(-1)[..., others])


def test_several_answers_can_be_right():
    """Architecture 5.1: two right tokens both reach P = 1; a softmax pays log 2 for each at best."""
    loc = number(1e6, 1e6, -1e6)
    log_p, log_not_p = ovr_log_probs(loc, torch.ones(3).double())
    assert -(log_p[:2].sum() + log_not_p[2]).item() < 1e-5
    assert -loc.log_softmax(-1)[:2].sum().item() == pytest.approx(2 * math.log(2))


def test_thresholds_that_minimise_the_loss_follow_the_frequencies_and_sum_to_one():
    """Overview 4, step 6, and 5.4: where the scores tell nothing, P_k is the frequency of k, and C_k falls with it."""
    frequency = number(0.6, 0.3, 0.08, 0.02)
    fitted = -CAUCHY.quantile(frequency)  # P(S > C) = f for S ~ Cauchy(0, 1)
    thresholds = fitted.clone().requires_grad_(True)

    def expected_loss(at: torch.Tensor) -> torch.Tensor:
        zeros, ones = torch.zeros(4, 4).double(), torch.ones(4, 1).double()
        return (frequency * ovr_loss(zeros, ones, torch.arange(4), at, reduction="none")).sum()

    best = expected_loss(thresholds)
    best.backward()
    assert thresholds.grad.abs().max() < 1e-12
    for token in range(4):
        for step in (-0.5, 0.5):
            assert expected_loss(fitted + step * torch.eye(4).double()[token]) > best
    log_p, _ = ovr_log_probs(torch.zeros(4).double(), torch.ones(1).double(), fitted)
    assert (fitted.diff() > 0).all() and log_p.exp().sum().item() == pytest.approx(1)


def test_the_sum_for_one_individual_strays_from_one_more_than_the_marginal_sum(tiny_tokenizer):
    """Overview 5.4, the author's question: its mean over individuals is the marginal sum, and its distance to 1 no smaller."""
    for settings in ({}, {"vocabulary_family": "cauchy"}):
        model, count = graft_tiny("llama", tiny_tokenizer, **settings), 4000
        with torch.no_grad():
            z = model.features(torch.arange(5, 9).view(1, -1)).last_hidden_state[0, -1:]
            for offset in (0.0, 3.0):
                model.action.threshold += offset
                own = individual_prob_sums(model, z.expand(count, -1), seed=1).double()
                marginal = Chain(model, z).scores.p().sum().item()
                assert own.mean().item() == pytest.approx(marginal, abs=5 * own.std().item() / count**0.5)
                assert own.std() > 0.01 * marginal and (own - 1).abs().mean() > abs(marginal - 1) - 0.01
    model = graft_tiny("llama", tiny_tokenizer, start="architecture", score_scale="documents")  # no noise
    with torch.no_grad():
        model.action.threshold += 0.7  # off the scores of rows that are 0
        z = model.features(torch.arange(5, 9).view(1, -1)).last_hidden_state[0, -1:]
        own = individual_prob_sums(model, z.expand(50, -1), seed=1)
    assert (own - own.round()).abs().max() < 1e-2 and own.std() > 0  # how many tokens pass, a whole number


def test_a_cauchy_link_hardly_pushes_a_target_that_is_far_off():
    """Foundations 3.1.2: P does not saturate, but the slope of -log P dies as 1/d, where logistic and Gaussian ones do not."""
    slopes = {}
    for family in ("cauchy", "gaussian"):
        loc = number(-100.0).requires_grad_(True)
        (-ovr_log_probs(loc, number(1.0), family=family)[0]).sum().backward()
        slopes[family] = -loc.grad.item()
    logistic = number(-100.0).requires_grad_(True)
    (-F.logsigmoid(logistic)).sum().backward()
    assert slopes["cauchy"] == pytest.approx(1 / 100, rel=0.01)
    assert -logistic.grad.item() == pytest.approx(1.0) and slopes["gaussian"] == pytest.approx(100, rel=0.01)


def test_a_small_constant_inside_the_logarithm_is_not_exact():
    """Architecture 2.5.5 adds 1e-10 to P; in float32 a far token then costs 23.03 whatever its distance."""
    far = torch.tensor([-1e8, -1e9])
    textbook = -torch.log(0.5 + torch.atan(far) / torch.pi + 1e-10)
    exact = -ovr_log_probs(far, torch.ones(2))[0]
    assert not textbook[0] < textbook[1] and (textbook - exact).abs().max() > 1
    assert (exact[1] - exact[0]).item() == pytest.approx(math.log(10), rel=1e-4)


def test_a_sampled_individual_without_scale_makes_every_passing_token_certain():
    """Architecture 3.2.2 decides by argmax P at scale 0: the first token that passes wins, not the best one."""
    scores = torch.tensor([0.1, 5.0])
    assert (0.5 + torch.atan(scores / 0.0) / torch.pi).tolist() == [1.0, 1.0]
    action, lm_head = action_of(1, 2, score_scale="documents")
    with torch.no_grad():
        lm_head.weight.copy_(scores.unsqueeze(1))
        lm_head.bias.zero_()
    loc_S, scale_S = action(torch.ones(1, 1), torch.zeros(1, 1), lm_head)
    mask = torch.ones(loc_S.shape[-1], dtype=torch.bool)
    assert Scores(loc_S, scale_S, torch.zeros(1, 1), 0.0, action.law, mask, common=False).decide().item() == 1


# ---- the value's loss ------------------------------------------------------------------------------------------------


def gated(num_prob: torch.Tensor, nll: torch.Tensor, **settings):
    """The losses of one position whose token is `<NUM>`, every other token left out."""
    masks = shift_targets(torch.tensor([[0, 9]]), torch.tensor([[0.0, 1.0]]).double(), None, 9)
    of_number = num_prob.log().view(1, 1), (1 - num_prob).log().view(1, 1)
    return total_loss(masks, torch.zeros(1, 1).double(), of_number, nll, **settings)


def test_the_literal_gate_settles_at_announcing_numbers_seldom():
    """Foundations 3.2.3, theorem 3.4: -log P + n P is least at P = 1/n, not at 1, as long as the likelihood term is n > 1."""
    losses = {}
    for prob in (0.1, 0.2, 0.5, 0.99):
        p = number(prob).requires_grad_(True)
        losses[prob] = gated(p, number(5.0), alpha=0.0, detach_gate=False).total
        losses[prob].backward()
        assert p.grad.item() == pytest.approx(-1 / prob + 5, abs=1e-9)
        p = number(prob).requires_grad_(True)
        gated(p, number(5.0), alpha=0.0).total.backward()
        assert p.grad.item() == pytest.approx(-1 / prob)
    assert min(losses, key=losses.get) == 0.2


def test_a_closed_gate_holds_the_value_back_in_proportion():
    """Foundations 3.2.2: at alpha = 0 the gradient of the value is P_NUM times what it is at alpha = 1."""
    gradients = []
    for alpha in (0.0, 1.0):
        nll = number(2.0).requires_grad_(True)
        gated(number(1e-4), nll, alpha=alpha).reg.backward()
        gradients.append(nll.grad.item())
    assert gradients[0] == pytest.approx(1e-4 * gradients[1])


def test_numbers_are_not_diluted_by_the_text_around_them():
    """Overview 6, figure 5.3: the value's part is a mean over numbers, whatever the number of tokens."""
    for tokens in (3, 300):
        labels = torch.ones(1, tokens, dtype=torch.long)
        labels[0, 1] = 9
        masks = shift_targets(labels, torch.ones(1, tokens).double(), None, 9)
        zeros = torch.zeros(1, tokens - 1).double()
        assert total_loss(masks, zeros, (zeros, zeros), number(3.0)).reg == 3.0


def test_the_slope_of_the_value_loss_is_bounded_by_the_scale_not_by_the_outlier():
    """Foundations 3.3.2 expects explosions from heavy tails; the slope is at most 1/scale and falls off; a Gaussian's grows."""
    for scale in (0.01, 1.0):
        loc = torch.zeros(4).double().requires_grad_(True)
        cauchy_nll(scale * number(0.5, 1.0, 1e3, 1e9), loc, number(scale)).sum().backward()
        slopes = loc.grad.abs() * scale
        assert slopes.max().item() == pytest.approx(1.0) and slopes[2] < 0.01 and slopes[3] < 1e-8


def test_the_value_loss_overflows_only_where_a_square_is_formed():
    """Architecture 2.5.5: the squared distance is past float32 from 2e19 scales on, and past float64 from 1.4e154."""
    for dtype, far in ((torch.float32, 30), (torch.float64, 200)):
        value, zero, one = (torch.tensor(x, dtype=dtype) for x in (10.0**far, 0.0, 1.0))
        assert torch.isinf(torch.log(math.pi * one) + torch.log1p(((value - zero) / one) ** 2))
        assert cauchy_nll(value, zero, one).item() == pytest.approx(math.log(math.pi) + 2 * far * math.log(10))


@pytest.mark.parametrize("transform", [None, {"kind": "symlog", "center": 1.0, "width": 2.0}], ids=["plain", "symlog"])
def test_the_median_is_the_best_point_by_absolute_error(tiny_llama, transform):
    """Overview 3.1. E|Y - a| is infinite for every a; what it exceeds that of the median by, the integral of 2 F - 1 from
    the median to a, is positive. By squared error no point is best: the second moment has no end."""
    tiny_llama.config.value_transform = transform
    (said,) = tiny_llama.predict_number("It is so")
    width = said.interval(0.5)[1] - said.interval(0.5)[0]
    for step in (-2.0, -0.1, 0.1, 2.0):
        points = torch.linspace(said.median, said.median + step * width, 201, dtype=torch.float64)
        passed = torch.tensor([2 * said.cdf(point) - 1 for point in points.tolist()], dtype=torch.float64)
        assert torch.trapezoid(passed, points).item() > 0
    assert said.median == tiny_llama.value_transform.inverse(torch.tensor(said.loc, dtype=torch.float64)).item()
    tails = [1 - said.cdf(said.median + 10.0**power * width) for power in (3, 6)]
    assert tails[1] * 10**12 > 100 * tails[0] * 10**6  # y^2 P(Y > y) grows


def test_mean_errors_follow_outliers_and_median_errors_do_not(tiny_llama):
    """Overview 5.3, on what `evaluate` scores; both also part where most values are met exactly, without any outlier."""
    prompts = [f"The long one, of {index}, is" for index in range(21)]
    tiny_llama.config.value_range = [-100.0, 100.0]
    medians = [said.median for said in tiny_llama.predict_number(prompts)]

    def errors(*added: float) -> dict[str, float]:
        values = [median + more for median, more in zip(medians, added, strict=True)]
        rows = [Row("prompt", p, {"prompt": p, "value": v}) for p, v in zip(prompts, values, strict=True)]
        examples = encode_rows(rows, tiny_llama.processor)
        return score_tokens(tiny_llama, [facts for _, facts in stream_facts(tiny_llama, examples)])["metrics"]

    clean, wild = errors(*[1.0] * 21), errors(*[1.0] * 20, 1e6)
    assert clean["mae"] == pytest.approx(1.0, rel=1e-3) and clean["median_error"] == pytest.approx(1.0, rel=1e-3)
    assert wild["mae"] > 1e4 and wild["median_error"] == pytest.approx(1.0, rel=1e-3)
    many_exact = errors(*[0.0] * 11, *[1.0] * 10)
    assert many_exact["mae"] > 100 * many_exact["median_error"]


def test_a_small_divergence_under_a_wide_individual_still_turns_decisions():
    """Overview 2.3: D(U, U_base) <= eps keeps what was known only if the scale is small beside the scores' margins."""
    rows = number(1.0, 0.0, 0.0, 1.0).view(2, 2)
    base, moved = number(3.0, 1.0), number(1.9, 2.1)  # logits; the decision turns from token 0 to token 1
    divergence = {}
    for scale in (10.0, 0.1):
        wide = torch.full_like(base, scale)
        divergence[scale] = CAUCHY.kl(moved, wide, base, wide).mean().item()
    assert (rows @ base).argmax() != (rows @ moved).argmax()
    assert divergence[10.0] < 0.01 < 1 < divergence[0.1]


# ---- decoding --------------------------------------------------------------------------------------------------------


def situated(preset: str, noise: float = 0.3, **settings):
    """loc and scale of U' that a plan leaves of U ~ Cauchy(0, 1)."""
    drawn = BoundDecoding.bind(CausalDecoding.preset(preset, **settings), 1, 4, torch.device("cpu"))
    zeros, ones, noise_scale = torch.zeros(1, 2, 4), torch.ones(1, 2, 4), torch.full((4,), noise)
    drawn = drawn.at(torch.arange(2).view(1, 2))
    return drawn.move(zeros, ones, noise_scale, CAUCHY), drawn.left(ones, noise_scale, CAUCHY)


def test_temperature_acts_on_draws_alone():
    """Inference 3: without sampling T changes nothing."""
    cold, hot = (situated("standard", temperature=temperature) for temperature in (0.1, 5.0))
    assert all(map(torch.equal, cold, hot))
    assert not torch.equal(situated("noise", seed=1)[0], situated("noise", seed=1, temperature=5.0)[0])


def test_both_generations_of_sampling_draw_one_number_per_coordinate(monkeypatch):
    """Inference 2 and 3: V1 is said to draw twice, V2 to be spared a high-dimensional draw; both draw C numbers."""
    drawn = []
    uniform = draws.uniform_draws
    monkeypatch.setattr(draws, "uniform_draws", lambda *key: drawn.append((key[1], uniform(*key))) or drawn[-1][1])
    for preset in ("causal", "noise"):
        drawn.clear()
        situated(preset, seed=3)
        assert [values.shape for _, values in drawn] == [(2, 4)], preset


@pytest.mark.parametrize(
    ("preset", "stream"), [("shared-individual", INDIVIDUAL_STREAM), ("shared-noise", NOISE_STREAM)]
)
def test_a_held_source_is_the_only_draw(monkeypatch, preset, stream):
    """Overview 3.4: one vector for the whole text, and nothing of the other source."""
    drawn = []
    uniform = draws.uniform_draws
    monkeypatch.setattr(draws, "uniform_draws", lambda *key: drawn.append(key[1]) or uniform(*key))
    loc, _ = situated(preset, seed=3)
    assert drawn == [stream] and torch.equal(loc[:, 0], loc[:, 1])


def _raced(model: CausalQwenForCausalLM, z: torch.Tensor, count: int, **settings) -> torch.Tensor:
    """Shares of the tokens that `sample` decides for, [V'], of `count` draws at features z [1, 1, H]."""
    bound = BoundDecoding.bind(CausalDecoding.preset("sample", seed=0, **settings), 1, z.shape[-1], z.device)
    with torch.no_grad():
        scores = Chain(model, z.expand(1, count, -1), bound.at(torch.arange(count).view(1, -1))).decision_scores()
    return torch.bincount(scores.argmax(-1)[0], minlength=scores.shape[-1]) / count


def _softmax(model: CausalQwenForCausalLM, z: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    with torch.no_grad():
        scores = Chain(model, z).scores
        return (scores.masked(scores.loc, -torch.inf)[0, 0] / temperature).softmax(-1)


def test_a_race_leaves_out_the_tokens_that_a_softmax_sampler_leaves_out(tiny_tokenizer):
    """Overview 6, thresholds: top_k, top_p and min_p before the race, of the backbone's scores over the temperature."""
    model = graft_tiny("llama", tiny_tokenizer, initial_scale=1e-6, initial_noise=1e-6)  # nothing drawn moves a score
    torch.manual_seed(0)
    z = torch.randn(1, 1, 32)
    for temperature in (0.7, 1.0):
        p, order = _softmax(model, z, temperature).sort(descending=True)
        wanted = {"top_k": 5, "top_p": int((p.cumsum(-1) - p < 0.5).sum()), "min_p": int((p >= 0.3 * p[0]).sum())}
        for name, value in {"top_k": 5, "top_p": 0.5, "min_p": 0.3}.items():
            shares = _raced(model, z, 2000, temperature=temperature, **{name: value})
            assert set(shares.nonzero()[:, 0].tolist()) == set(order[: wanted[name]].tolist()), name


def test_noise_makes_texts_vary_by_its_size_and_its_temperature(tiny_llama):
    """Inference 3, with overview 4, step 5 (b_noise = 0): V2's draws then move nothing; by default they do."""
    inputs = tiny_llama.processor("It is so", return_tensors="pt")
    tiny_llama.generation_config.eos_token_id = None

    def texts(preset: str, temperature: float) -> list[list[int]]:
        plans = [CausalDecoding.preset(preset, seed=seed, temperature=temperature) for seed in range(6)]
        made = [tiny_llama.generate(**inputs, max_new_tokens=8, causal_decoding=plan).sequences[0] for plan in plans]
        return [ids.tolist()[-8:] for ids in made]

    hot = 8.0
    (certain, *_), law, named = texts("standard", 1.0), texts("noise", 1.0), texts("noise", hot)
    first = [sum(text[0] != certain[0] for text in made) for made in (law, named)]
    assert len(set(map(tuple, named))) == 6 and first[0] < first[1]
    with torch.no_grad():
        tiny_llama.action.b_noise.zero_()
    assert texts("noise", hot) == [certain] * 6
    assert torch.equal(situated("noise", noise=0.0, seed=1)[0], torch.zeros(1, 2, 4))


def test_words_and_values_share_draws_and_not_their_law_by_default(tiny_tokenizer):
    """Architecture 1.6. A branch says what law of U the value head reads, and a value is Cauchy where scores are Gaussian."""
    ids = torch.arange(5, 30).view(1, -1)
    model = graft_tiny("llama", tiny_tokenizer)
    assert (model.action.law.alpha, model.action.value_law.alpha) == (2, 1)
    with torch.no_grad():
        before = model(ids, output_ovr=True)
        model.value_branch.residual.last.bias += 0.3
        model.value_branch.log_noise += 0.3
        after = model(ids, output_ovr=True)
    for name in ("logits", "scale_S", "ovr_probs", "scale_U"):
        assert torch.equal(before[name], after[name]), name
    assert (after.scale_Y > 1.3 * before.scale_Y).all() and not torch.allclose(after.loc_Y, before.loc_Y)
    one = graft_tiny("llama", tiny_tokenizer, value_branch=False, value_family="gaussian")
    with torch.no_grad():
        out = one(ids)
        whole = one.action.law.add(out.scale_U, one.action.noise.expand_as(out.scale_U))
        of_values = one.action.law.linear_scale(whole, one.action.value_linear[0]).squeeze(-1)
    torch.testing.assert_close(out.scale_Y, of_values)


def test_under_a_draw_loc_and_p_decide_differently(tiny_llama):
    """Overview 3.2 takes them for one: they are where nothing is drawn; what is drawn is taken off each token's own scale."""
    z = tiny_llama.features(torch.arange(5, 200).view(1, -1)).last_hidden_state

    def decisions(preset: str, by: str) -> torch.Tensor:
        plan = CausalDecoding.preset(preset, seed=1, decision=by)
        bound = BoundDecoding.bind(plan, 1, z.shape[-1], z.device).at(torch.arange(z.shape[1]).view(1, -1))
        with torch.no_grad():
            return Chain(tiny_llama, z, bound).decision_scores().argmax(-1)

    assert torch.equal(decisions("standard", "loc"), decisions("standard", "ovr"))
    assert 0.02 < (decisions("causal", "loc") != decisions("causal", "ovr")).double().mean() < 0.5


def test_a_held_individual_is_the_same_point_of_every_context_and_has_no_course(tiny_llama):
    """Architecture 5.4.2: what moves U from token to token is the context alone, and nothing of it comes from what follows."""
    one, other = torch.arange(5, 45).view(1, -1), torch.arange(5, 45).view(1, -1)
    other[0, 20:] += 100
    bound = BoundDecoding.bind(CausalDecoding.preset("shared-individual", seed=3), 1, 32, one.device)
    found = []
    with torch.no_grad():
        for ids in (one, other):
            z = tiny_llama.features(ids).last_hidden_state
            chain = Chain(tiny_llama, z, bound.at(torch.arange(40).view(1, -1)))
            found.append((chain.loc_U, (chain.loc - chain.loc_U) / chain.scale_U))
    (loc, who), (loc_of_other, who_of_other) = found
    torch.testing.assert_close(loc[:, :20], loc_of_other[:, :20])
    assert not torch.allclose(loc[:, 20:], loc_of_other[:, 20:], atol=0.1)
    torch.testing.assert_close(who, who[:, :1].expand_as(who), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(who, who_of_other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_a_graft_holds_its_backbone_and_takes_its_place(tiny_tokenizer, family):
    """Overview 3.3 and 7: no subclass of Qwen but a model around one; `generate` without a plan is the backbone's own."""
    model = graft_tiny(family, tiny_tokenizer)
    backbone, theirs = model.backbone, make_backbone(family, tiny_tokenizer).state_dict()
    assert not isinstance(model, type(backbone)) and backbone.state_dict().keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in backbone.state_dict().items())
    model.generation_config.eos_token_id = backbone.generation_config.eos_token_id = None
    with torch.no_grad():
        model.action.num_bias -= 1e4  # words alone
    unused = [model.config.num_token_id, *model.config.free_token_ids] if family == "qwen2" else None
    plain = model.processor.tokenizer("It is 5 and so", return_tensors="pt")
    inputs = model.processor("It is 5 and so", return_tensors="pt")
    for search in ({"do_sample": False}, {"do_sample": False, "num_beams": 3}, {"do_sample": True, "top_p": 0.9}):
        made = []
        for speaker, given, more in ((model, inputs, {}), (backbone, plain, {"suppress_tokens": unused})):
            torch.manual_seed(5)
            ids = speaker.generate(**given, max_new_tokens=10, **search, **(more if unused else {}))
            made.append(ids[0, -10:])
        assert torch.equal(*made), search
    for refused in ({"assistant_model": backbone}, {"prefill_chunk_size": 2}):
        with pytest.raises(ValueError, match="assistant model|prefill_chunk_size"):
            model.generate(**inputs, max_new_tokens=4, do_sample=False, **refused)


def width_of_a_sum(log_density, quantile) -> float:
    """How much more the 95% quantile of X_1 + X_2 is than that of X, over the same of the 75% quantile: 1 for a stable law."""
    x = torch.linspace(-4000, 4000, 400_001, dtype=torch.float64)
    density = log_density(x).exp()
    density = density / density.sum()
    power = torch.fft.rfft(density, n=2 * len(x)).square()
    cdf = torch.fft.irfft(power, n=2 * len(x)).cumsum(0)
    grid = torch.arange(2 * len(x), dtype=torch.float64) * (x[1] - x[0]) + 2 * x[0]
    found = [grid[torch.searchsorted(cdf, torch.tensor(p, dtype=torch.float64))].item() for p in (0.75, 0.95)]
    return (found[1] / quantile(0.95)) / (found[0] / quantile(0.75))


def test_sums_of_students_are_no_students_and_stay_in_the_families_here(tiny_tokenizer):
    """Architecture 5.4.3: |W| scale is the scale of W U for stable laws alone; a Student-t is none, and none is built."""
    zero, one = number(0.0), number(1.0)
    for name in FAMILIES:
        law = get_family(name)
        density, quantile = (
            partial(law.log_prob, loc=zero, scale=one),
            lambda p, law=law: law.quantile(number(p)).item(),
        )
        assert width_of_a_sum(density, quantile) == pytest.approx(1.0, abs=0.01), name
    student = stats.t(3)
    ratio = width_of_a_sum(lambda x: torch.from_numpy(student.logpdf(x.numpy())), student.ppf)
    assert ratio < 0.97
    for setting in ("vocabulary_family", "value_family"):
        with pytest.raises(ValueError, match="'student-t'"):
            graft_tiny("llama", tiny_tokenizer, **{setting: "student-t"})
    model = graft_tiny("llama", tiny_tokenizer)
    far = number(10.0)
    of_scores, of_value = (law.log_sf(far, zero, one).exp() for law in (model.action.law, model.action.value_law))
    assert of_scores < 1e-20 and of_value > 0.03  # by default the scores have no heavy tail


def test_a_held_source_leaves_no_other_randomness(tiny_tokenizer):
    """Overview 3.4: once the individual (the noise) is held, nothing is unforeseen any more; `persona` meets fresh noise."""
    model = graft_tiny("llama", tiny_tokenizer, start="minimal")
    inputs = model.processor("It is so", return_tensors="pt")
    somebody = Individual.from_seed(3, model.config.causal_size)

    def texts(preset: str) -> int:
        plans = [CausalDecoding.preset(preset, individual=somebody, seed=seed) for seed in range(3)]
        made = [model.generate(**inputs, max_new_tokens=8, causal_decoding=plan).sequences[0] for plan in plans]
        return len({tuple(ids.tolist()) for ids in made})

    assert texts("shared-individual") == 1 and texts("persona") > 1


def test_a_text_without_sampling_is_the_same_under_every_seed(tiny_llama):
    """Overview 5.1, foundations 2.6.2."""
    inputs = tiny_llama.processor("It is so", return_tensors="pt")
    made = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        plan = CausalDecoding.preset("standard")
        made.append(tiny_llama.generate(**inputs, max_new_tokens=8, causal_decoding=plan).sequences)
    assert torch.equal(*made)


# ---- training and deployment -----------------------------------------------------------------------------------------


def test_training_draws_no_individual_and_no_noise_but_dropout(tiny_tokenizer, monkeypatch):
    """Foundations 2.6.1: the losses are closed form. By default the value branch drops units, and nothing else is drawn."""
    model = graft_tiny("llama", tiny_tokenizer).train()
    assert model.config.value_branch_dropout > 0
    inputs = model.processor("It is 5 and so on", return_tensors="pt")
    monkeypatch.setattr(draws, "uniform_draws", lambda *key: pytest.fail("an individual or a noise was drawn"))

    def losses() -> tuple[float, float, bool]:
        state = torch.get_rng_state()
        out = model(**inputs, labels=inputs["input_ids"])
        out.loss.backward()
        return out.loss_cls.item(), out.loss_reg.item(), torch.equal(torch.get_rng_state(), state)

    torch.nn.init.normal_(model.value_branch.residual.last.weight)
    one, other = losses(), losses()
    assert one[0] == other[0] and one[1] != other[1] and not one[2]
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    one, other = losses(), losses()
    assert one == other and one[2]


def test_a_value_is_computed_only_where_a_number_comes_and_that_saves_little(tiny_tokenizer, monkeypatch):
    """Architecture 4.4.2, early exit: what is skipped is less than a hundredth of SmolLM2's 134,515,008 weights per token."""
    tiny_llama = graft_tiny("llama", tiny_tokenizer, number_context="value")  # four tokens, four numbers
    calls = []
    value = Chain.value
    monkeypatch.setattr(Chain, "value", lambda *args, **kw: calls.append(1) or value(*args, **kw))
    inputs = tiny_llama.processor("It is so", return_tensors="pt")
    for bias, expected in ((-30.0, 0), (1e3, 4)):
        calls.clear()
        with torch.no_grad():
            tiny_llama.action.num_bias.fill_(bias)
        tiny_llama.generate(**inputs, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
        assert len(calls) == expected
    branch = ValueBranch(576, 576, 512)  # at SmolLM2's size
    head = action_of(576, 1)[0].value_head.weight.numel()
    assert head == 576 and head + sum(p.numel() for p in branch.parameters()) < 134_515_008 / 100
