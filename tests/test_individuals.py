"""Individuals inferred from what was said, their noise, and their worlds."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from torch.nn import functional as F

from causalqwen import CausalDecoding, CausalQwenForCausalLM, Individual, Intervention, Observation
from causalqwen.decoding import Observed
from causalqwen.distributions import get_family
from causalqwen.individuals.evidence import TokenEvidence, ValueEvidence
from causalqwen.individuals.posterior import find_posterior, likeliest_population, likeliest_spread
from causalqwen.losses import ovr_log_probs
from causalqwen.modeling import individuals
from causalqwen.modeling.chain import Chain
from causalqwen.modeling.reading import EncodedText, contexts_of, encode_text, read_contexts, token_evidence
from causalqwen.modeling.worlds import continue_prompt
from conftest import graft_tiny
from test_generation import eager

N, C, V = 23, 6, 40
LAWS = [get_family("gaussian"), get_family("cauchy")]


def evidence_of(law, likelihood="softmax", same_reach=True, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    reach = (normal(1, C).exp() * (0.5 + torch.rand(N, 1, generator=generator, dtype=torch.float64))).contiguous()
    reach = reach if same_reach else reach * normal(N, C).exp()
    mask = torch.ones(V, dtype=torch.bool)
    mask[7] = False
    targets = torch.randint(8, V, (N,), generator=generator)
    settings = {}
    if likelihood == "ovr":
        scale = normal(N, 1).exp()
        settings = {"known": lambda part: (scale[part], 0.4), "thresholds": 2 + normal(N)}
    weight, bias = normal(V, C), normal(V)
    return TokenEvidence(
        normal(N, C), reach, targets, weight, bias, mask, law, likelihood, **settings, positions_at_once=10
    )


def log_likelihood(evidence, g):
    """The slow obvious form."""
    q = evidence.law.quantile(torch.special.ndtr(g))
    scores = F.linear(evidence.loc + evidence.reach * q, evidence.weight, evidence.bias)
    if evidence.likelihood == "softmax":
        return -F.cross_entropy(scores.masked_fill(~evidence.mask, -torch.inf), evidence.targets, reduction="sum")
    scale, slope = evidence.known(torch.arange(N))
    log_p, log_not = ovr_log_probs(scores, scale, evidence.thresholds[:, None], family=evidence.law.name, slope=slope)
    right = F.one_hot(evidence.targets, V).bool()
    return torch.where(right, log_p, log_not)[:, evidence.mask].sum()


# ---- evidence and posterior ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("likelihood", ["softmax", "ovr"])
@pytest.mark.parametrize("same_reach", [True, False])
def test_evidence_is_the_likelihood_and_its_gradient(law, likelihood, same_reach):
    evidence = evidence_of(law, likelihood, same_reach)
    g = torch.linspace(-1, 1, C, dtype=torch.float64).requires_grad_(True)
    exact = log_likelihood(evidence, g)
    (slope,) = torch.autograd.grad(exact, g)
    value, gradient, information = evidence.evaluate(g.detach(), True)
    assert value == pytest.approx(exact.item(), rel=1e-6)
    torch.testing.assert_close(gradient, slope, rtol=1e-5, atol=1e-6)
    assert torch.linalg.eigvalsh(information).min() > -1e-6


@pytest.mark.parametrize("likelihood", ["softmax", "ovr"])
def test_the_curvature_is_the_fisher_information(likelihood):
    """Expected outer product of the gradient over tokens (for OvR: over one-vs-rest outcomes) drawn from the model."""
    evidence = evidence_of(LAWS[0], likelihood)
    g = torch.linspace(-0.3, 0.3, C, dtype=torch.float64)
    information = evidence.evaluate(g, True)[2]
    scores = F.linear(evidence.loc + evidence.reach * g, evidence.weight, evidence.bias)
    if likelihood == "softmax":
        p = scores.masked_fill(~evidence.mask, -torch.inf).softmax(-1)
        spread = [torch.diag(row) - torch.outer(row, row) for row in p]
    else:
        scores = scores.requires_grad_(True)
        scale, slope = evidence.known(torch.arange(N))
        log_p, log_not = ovr_log_probs(scores, scale, evidence.thresholds[:, None], family="gaussian", slope=slope)
        yes, no = (torch.autograd.grad(t.sum(), scores, retain_graph=True)[0] for t in (log_p, log_not))
        spread = [torch.diag(row) for row in (log_p.exp() * yes**2 + log_not.exp() * no**2) * evidence.mask]
    rows = [evidence.weight * row for row in evidence.reach]
    exact = sum(row.T @ (middle @ row) for row, middle in zip(rows, spread, strict=True))
    torch.testing.assert_close(information, exact.detach(), rtol=1e-4, atol=1e-6)


def value_evidence(values=12, noise=0.5):
    generator = torch.Generator().manual_seed(3)
    loc, reach = (torch.randn(values, C, generator=generator, dtype=torch.float64) for _ in range(2))
    row = torch.randn(C, generator=generator, dtype=torch.float64)
    observed = torch.randn(values, generator=generator, dtype=torch.float64)
    scale = torch.full((values,), noise, dtype=torch.float64)
    bias = torch.tensor(0.3, dtype=torch.float64)
    return ValueEvidence(loc, reach.abs(), observed, row, bias, scale, LAWS[0])


def test_the_posterior_of_gaussian_values_is_that_of_linear_regression():
    evidence = value_evidence()
    design = evidence.reach * evidence.row
    rest = evidence.values - evidence.loc @ evidence.row - evidence.bias
    precision = design.T @ design / 0.5**2 + torch.eye(C, dtype=torch.float64) / 0.8**2
    found = find_posterior([evidence], torch.zeros(C, dtype=torch.float64), 0.8**-2)
    torch.testing.assert_close(found.mode, torch.linalg.solve(precision, design.T @ rest / 0.5**2))
    torch.testing.assert_close(found.precision, precision)
    gain = evidence.evaluate(found.mode)[0] - evidence.evaluate(torch.zeros(C, dtype=torch.float64))[0]
    assert found.gained == pytest.approx(gain) and gain > 0
    # The likeliest spread is that of the marginal Gaussian law of the values.
    covariances = {s: 0.5**2 * torch.eye(12) + s**2 * design @ design.T for s in torch.logspace(-2, 0.3, 400).tolist()}
    best = max(
        covariances,
        key=lambda s: stats.multivariate_normal(torch.zeros(12), covariances[s].numpy()).logpdf(rest.numpy()),
    )
    _, gradient, information = evidence.evaluate(torch.zeros(C, dtype=torch.float64), True)
    assert likeliest_spread(gradient, information, 2.0) == pytest.approx(best, rel=0.06)
    assert likeliest_spread(gradient, information) <= 1.0


def test_fisher_scoring_finds_the_mode(monkeypatch):
    monkeypatch.setattr("causalqwen.individuals.posterior.TOLERANCE", 1e-10)
    evidence = evidence_of(LAWS[0])
    found = find_posterior([evidence], torch.zeros(C, dtype=torch.float64), 1.0, evaluations=30)
    g = found.mode.clone().requires_grad_(True)
    (slope,) = torch.autograd.grad(log_likelihood(evidence, g) - 0.5 * g.square().sum(), g)
    assert slope.abs().max() < 1e-3
    assert 0 < found.directions < C


# ---- a model's individuals and worlds --------------------------------------------------------------------------------


@pytest.fixture
def speaker(tiny_tokenizer):
    model = graft_tiny("llama", tiny_tokenizer, initial_scale=0.5)  # somebody who is heard
    model.generation_config.eos_token_id = None
    return model


def test_abduction_finds_who_spoke(speaker, monkeypatch):
    """Texts drawn token by token from the softmax of a known individual."""
    truth = Individual(torch.special.ndtr(0.8 * Individual.from_seed(3, 32).normal))
    prompts = [f"It is {word} and then" for word in ("new", "old", "so", "the", "a man", "for", "we")]

    @torch.no_grad()
    def speak(prompt, seed):
        generator = torch.Generator().manual_seed(seed)
        ids, *_ = encode_text(speaker, prompt, prompt=True)
        start = len(ids)
        for _ in range(40):
            chain = Chain(speaker, speaker.features(ids[None]).last_hidden_state[0, -1:])
            loc = chain.loc_U + chain.scale_U * speaker.action.law.quantile(truth.factor).float()
            scores = speaker.action.score_loc(loc, speaker.vocabulary())[0, :-1]
            ids = torch.cat([ids, torch.multinomial(scores.softmax(-1), 1, generator=generator)])
        return ids[start:]

    said = [(prompt, speak(prompt, seed)) for seed, prompt in enumerate(prompts)]
    contexts = []
    for prompt, tokens in said:
        text = encode_text(speaker, prompt, prompt=True)
        spoken = EncodedText(tokens, torch.zeros(len(tokens)), torch.zeros(len(tokens), dtype=torch.bool))
        contexts.append((text.then(spoken), len(text.ids)))
    monkeypatch.setattr(individuals, "contexts_of", lambda model, observations: [contexts[i] for i in observations])
    found = speaker.abduct([0, 1, 2, 3, 4], spread=0.8)
    cosine = F.cosine_similarity(found.normal, truth.normal, dim=0).item()
    assert cosine > 0.5
    # Who they are said to be is within the width that goes with it: a z-score per coordinate.
    error = found.normal - truth.normal
    assert (error @ found.precision @ error / len(error)).item() < 2.0
    # Half the evidence, then the other half: as all of it at once.
    first = speaker.abduct([0, 1], spread=0.8)
    both = speaker.abduct([2, 3, 4], prior=first)
    assert F.cosine_similarity(both.normal, found.normal, dim=0) > 0.98
    assert sum(e.tokens for e in both.evidence) == found.evidence[0].tokens == 200
    assert "200 tokens" in str(both)


def test_a_population_is_learned_from_people():
    """Linear evidence of many people about a known law: its width, and its mean as far as people tell it."""
    generator = torch.Generator().manual_seed(0)
    people, size = 300, 3
    mean, spread = torch.tensor([0.8, -0.5, 0.0], dtype=torch.float64), 0.4
    g = mean + spread * torch.randn(people, size, generator=generator, dtype=torch.float64)
    information = torch.tensor([[4.0, 1.0, 0.0], [1.0, 6.0, 0.0], [0.0, 0.0, 9.0]], dtype=torch.float64)
    errors = torch.randn(people, size, generator=generator, dtype=torch.float64)
    gradients = g @ information + errors @ torch.linalg.cholesky(information).T
    found, width = likeliest_population(list(gradients), [information] * people)
    assert torch.allclose(found, mean, atol=0.1)
    assert width == pytest.approx(spread, abs=0.05)
    assert likeliest_population(list(gradients), [information] * people, widest=0.2)[1] == pytest.approx(0.2, rel=0.02)


def test_the_evidence_of_a_population_is_that_of_one_gaussian():
    """Two people and their mean as one vector g with covariance s^2 (I + 1 1^T): its evidence is largest at the same s."""
    generator, size = torch.Generator().manual_seed(1), 6
    drawn = torch.randn(2, size, size + 2, generator=generator, dtype=torch.float64)
    roots, people, errors = drawn.split([size, 1, 1], -1)
    informations = list(roots @ roots.mT)
    gradients = list((roots @ (roots.mT @ people + errors)).squeeze(-1))
    mean, spread = likeliest_population(gradients, informations, widest=3.0)
    both, of_both = torch.cat(gradients), torch.block_diag(*informations)
    together = torch.kron(torch.ones(2, 2) + torch.eye(2), torch.eye(size)).double()

    def evidence(s):
        prior = s**2 * together
        told = both @ torch.linalg.solve(of_both + torch.linalg.inv(prior), both)
        return (told - torch.logdet(torch.eye(2 * size).double() + prior @ of_both)) / 2

    grid = torch.linspace(0.02, 3.0, 600).tolist()
    assert spread == pytest.approx(max(grid, key=lambda s: evidence(s).item()), rel=0.02)
    people = torch.linalg.solve(of_both + torch.linalg.inv(spread**2 * together), both).view(2, size)
    assert torch.allclose(mean, people.sum(0) / 3, atol=1e-8)


def test_a_population_of_any_precision_has_a_law():
    """Informations that rounding left no square root, float32, and a spread that is wanted wider than allowed."""
    columns = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).mT * 100
    rounded = (columns @ columns.mT).double() * 10
    pull = (columns.double() @ torch.ones(4).double()) * 1e3
    mean, spread = likeliest_population([pull, pull], [rounded, rounded], widest=1.8)
    assert bool(mean.isfinite().all()) and 0 < spread <= 1.8
    generator = torch.Generator().manual_seed(2)
    roots, people = torch.randn(3, 32, 9, generator=generator, dtype=torch.float64).split([8, 1], -1)
    gradients = list((1e4 * roots @ (roots.mT @ people)).squeeze(-1))
    informations = list(1e4 * roots @ roots.mT)
    wide = likeliest_population(gradients, informations, widest=3.0)
    narrow = likeliest_population([g.float() for g in gradients], [f.float() for f in informations], widest=3.0)
    assert narrow[1] == pytest.approx(wide[1], rel=0.02) and torch.allclose(narrow[0], wide[0], atol=0.05)
    far = likeliest_population([g * 1e6 for g in gradients], informations, widest=2.0)
    assert far[1] == pytest.approx(2.0, abs=1e-9)


class Breaking:
    """Evidence whose likelihood is no number beyond 1."""

    def __len__(self):
        return 1

    def evaluate(self, g, curvature):
        value = (30 * g).sum().item() if bool((g.abs() < 1).all()) else math.nan
        return value, torch.full_like(g, 30.0), torch.zeros(len(g), len(g)).double() if curvature else None


def test_a_step_to_where_nothing_is_known_is_halved():
    found = find_posterior([Breaking()], torch.zeros(3, dtype=torch.float64), 0.5)
    assert 0 < found.gained < 90 and bool((found.mode.abs() < 1).all())


def test_a_new_person_is_expected_to_be_like_the_population(speaker):
    texts = ["We have come here to speak of it.", "We have seen a new year come.", "We have come to the land."]
    population = speaker.abduct_population({f"person {i}": [text, text] for i, text in enumerate(texts)})
    unheard = Observation(" have come to see it.", "We")
    read = token_evidence(speaker, read_contexts(speaker, contexts_of(speaker, unheard, 512)))
    nobody = Individual.nobody(32)
    assert read.evaluate(population.normal)[0] > read.evaluate(nobody.normal)[0]
    heard = speaker.abduct(texts[0], prior=population, name="Ann")
    away = heard.normal - population.normal
    assert away.norm() > 0 and (heard.precision.diagonal() > population.precision.diagonal()).all()
    assert population.draw(1).factor.shape == (32,) and str(population).startswith("Individual(one like 3 people")
    with pytest.raises(ValueError, match="two people or more, got 1"):
        speaker.abduct_population({"Ann": texts})


def test_an_abducted_individual_survives_a_file(speaker, tmp_path):
    found = speaker.abduct("It is a new year, and we have come here to speak of it.", name="somebody")
    found.save(tmp_path / "who.safetensors")
    again = Individual.load(tmp_path / "who.safetensors")
    assert torch.equal(again.factor, found.factor) and torch.equal(again.precision, found.precision)
    assert again.evidence == found.evidence and str(again) == str(found)
    assert not torch.equal(found.draw(1).factor, found.draw(2).factor)
    assert [path.name for path in tmp_path.iterdir()] == ["who.safetensors"]


OBSERVED = Observation(" people of the land who had not been seen at all, and then more.", "They say that the")


@pytest.mark.parametrize("settings", [{}, {"token_thresholds": 0.2}, {"score_slope": 0.0}], ids=str)
def test_the_world_that_was_gives_the_observed_text_back(tiny_tokenizer, family, settings):
    model = graft_tiny(family, tiny_tokenizer, **settings)
    model.generation_config.eos_token_id = None
    edited = Intervention(prompt=lambda text: text.replace("They", "We"))
    worlds = model.counterfactual_samples(OBSERVED, [Intervention(), edited], num_samples=2, seed=5)
    assert [world.text for world in worlds[0]] == [OBSERVED.text] * 2
    assert worlds[1][0].prompt == "We say that the"
    again = model.counterfactual_samples(OBSERVED, edited, num_samples=1, seed=6)
    assert again[0][0].text == worlds[1][1].text
    fresh = model.counterfactual_samples(OBSERVED, Intervention(), noise="redraw", seed=5)
    assert fresh[0][0].text != OBSERVED.text


@pytest.mark.parametrize("settings", [{"vocabulary_family": "cauchy"}, {"start": "minimal"}, {"start": "documents"}])
def test_scores_without_gaussian_own_noise_explain_no_text(tiny_tokenizer, settings):
    model, known = graft_tiny("llama", tiny_tokenizer, **settings), graft_tiny("llama", tiny_tokenizer)
    plan = CausalDecoding(individual=Individual.nobody(32), own=known.abduct_noise(OBSERVED))
    for asked in (
        lambda: model.abduct_noise(OBSERVED),
        lambda: model.counterfactual_samples(OBSERVED, Intervention()),
        lambda: model.generate(**model.processor("They", return_tensors="pt"), causal_decoding=plan, max_new_tokens=2),
    ):
        with pytest.raises(ValueError, match="a text under observed noise needs (score_scale|vocabulary_family)="):
            asked()


@torch.no_grad()
def test_who_and_noise_write_the_same_text_alone_in_a_batch_and_after_files(speaker, tmp_path):
    who = speaker.abduct(OBSERVED, name="somebody")
    plans = [CausalDecoding(individual=who, own=speaker.abduct_noise(OBSERVED, who, seed=3), seed=3)]
    plans.append(CausalDecoding(individual=who, own="token", seed=[3, 3, 3]))
    prompts = ["We say that the", "They say that the", "And so it is said of all men that the"]

    def written(model, plan, texts):
        inputs = model.processor(texts, prompt=True, padding=True, padding_side="left", return_tensors="pt")
        out = model.generate(**inputs, causal_decoding=plan, max_new_tokens=12)
        return out.sequences[:, inputs["input_ids"].shape[1] :].tolist()

    everybody = written(speaker, CausalDecoding(own=speaker.abduct_noise(OBSERVED)), [OBSERVED.prompt])
    assert OBSERVED.text.startswith(speaker.processor.decode(everybody[0]))
    who.save(tmp_path / "who.safetensors")
    speaker.save_pretrained(tmp_path / "model")
    loaded = CausalQwenForCausalLM.from_pretrained(tmp_path / "model").eval()
    loaded.generation_config.eos_token_id = None
    again = Individual.load(tmp_path / "who.safetensors")
    kept = loaded.abduct_noise(OBSERVED, again, seed=3)
    assert torch.equal(kept.tokens, plans[0].own.tokens) and torch.equal(kept.normals, plans[0].own.normals)
    for plan, other in zip(plans, (kept, "token"), strict=True):
        together = written(speaker, plan, prompts)
        alone = replace(plan, seed=3)
        assert together == [written(speaker, alone, [prompt])[0] for prompt in prompts]
        assert together == written(loaded, replace(plan, individual=again, own=other), prompts)


def test_another_checkpoint_speaks_with_the_same_individual_and_noise(speaker):
    twin, other = copy.deepcopy(speaker), copy.deepcopy(speaker)
    with torch.no_grad():
        for weight in other.backbone.model.layers[0].parameters():
            weight.mul_(1.3)
    worlds = [Intervention(model=twin), Intervention(model=other)]
    ((same,), (differs,)) = speaker.counterfactual_samples(OBSERVED, worlds, seed=5)
    assert same.text == OBSERVED.text != differs.text
    other.config.num_token_id += 1
    apart = graft_tiny("llama", speaker.processor.tokenizer, number_context="value")
    for unfit, message in (
        (other, "another vocabulary or causal size"),
        (apart, "has number_context='value': noise that is shared needs number_context='digits'"),
    ):
        with pytest.raises(ValueError, match=message):
            speaker.counterfactual_samples(OBSERVED, Intervention(model=unfit))


SAID = [
    " 12345 people came, 3.14159 each",
    " 1,272.50 and then 7",
    " 123456789 or 98765.4321 of 100",
    " -0.000123 at 1,000,000.",
]


@pytest.mark.parametrize("context", ["value", "digits", "both"])
@pytest.mark.parametrize("settings", [{}, {"value_family": "gaussian"}], ids=str)
@pytest.mark.parametrize("transform", ["affine", "symlog"])
def test_numbers_of_any_length_come_back_as_they_were_written(tiny_tokenizer, context, settings, transform):
    model = eager(graft_tiny("llama", tiny_tokenizer, number_context=context, **settings))
    model.config.value_range, model.config.value_digits, model.config.value_place = [0.0, 100.0], 4, -1
    model.config.value_transform = {"kind": transform, "center": 3.0, "width": 2.0}
    who = Individual.from_seed(3, 32)
    for seed, text in enumerate(SAID):
        observed = Observation(text, "They say that 3.0")
        was, other = model.counterfactual_samples(
            observed,
            [Intervention(), Intervention(values={0: 99.0})],
            individual=who,
            seed=seed,
            temperature=(0.1, 1.0, 4.0)[seed % 3],
        )
        said = encode_text(model, text)
        assert was[0].text == text and was[0].values.tolist() == said.values.tolist()
        assert was[0].digits == tuple(said.digits.nonzero().squeeze(-1).tolist())
        assert other[0].text.startswith(" 99") and other[0].values[0] == 99.0


@pytest.mark.parametrize("context", ["digits", "both"])
def test_what_is_set_waits_for_the_end_of_a_number_and_brings_digits_of_its_own(tiny_tokenizer, context):
    model = eager(graft_tiny("llama", tiny_tokenizer, number_context=context))
    model.config.value_range = [0.0, 100.0]
    number, tokens = model.config.num_token_id, model.processor.tokenizer
    what = Intervention(tokens={2: " of 1,000 men", 9: " so"}, values={0: -7.25})
    plan = CausalDecoding.preset("causal", seed=3)
    for world in continue_prompt(model, "They say", plan, 3, 40, what):
        spoken = [at for at in range(40) if at not in world.digits]
        assert world.tokens[:2].tolist() == [number, *tokens(" -7.25")["input_ids"][:1]]
        assert world.text.startswith(" -7.25 of 1,000 men") and world.values[0] == -7.25
        assert world.values[world.tokens == number].tolist()[:2] == [-7.25, 1000.0]
        set_here = encode_text(model, " -7.25 of 1,000 men")
        assert world.forced[: len(set_here.ids)] == tuple(range(len(set_here.ids)))
        last = world.forced[len(set_here.ids) :]
        assert tokens.decode(world.tokens[list(last)]) == " so" and last[0] in spoken and last[0] >= 9
        ids = world.tokens.tolist()
        for place in (at for at in spoken if ids[at] == number and at > len(set_here.ids)):
            whole = model.processor.tokens_of(ids[:place], world.values[place].item())
            assert ids[place + 1 : place + 1 + len(whole)] == whole  # the last one too, however long the text is


@pytest.mark.parametrize("context", ["value", "digits", "both"])
def test_a_world_breaks_off_no_number_and_nothing_that_is_set(tiny_tokenizer, context):
    model = eager(graft_tiny("llama", tiny_tokenizer, number_context=context))
    model.config.value_range = [0.0, 100.0]
    observed = Observation(" 5 men", "They say")
    set_here = Intervention(tokens={0: " 1,234.5 men"}), Intervention(tokens={3: " but we were not"})
    (first,), (second,) = model.counterfactual_samples(observed, set_here, max_new_tokens=5)
    assert first.values[0] == 1234.5 and len(first.text) > len(" 1234.5")
    assert first.text.startswith(" 1,234.5") and 0 in first.forced
    assert second.text.endswith(" but we were not") and " 5" in second.text
    found = 0
    for length in range(1, 12):  # a number that the model writes is whole too
        for world in model.interventional_samples("They say", num_samples=2, max_new_tokens=length)[0]:
            places = (world.tokens == model.config.num_token_id).nonzero().squeeze(-1).tolist()
            for place in places if context != "value" else ():
                end = next((at for at in range(place + 1, len(world.tokens)) if at not in world.digits), None)
                assert float(tiny_tokenizer.decode(world.tokens[place + 1 : end])) == world.values[place]
            found += len(places)
    assert found > 5


@pytest.mark.parametrize("context", ["value", "digits"])
def test_padding_within_a_prompt_is_read(tiny_tokenizer, context):
    """A chat's end marks are padding too, and part of what was said."""
    model = eager(graft_tiny("llama", tiny_tokenizer, number_context=context))
    model.config.value_range = [0.0, 100.0]
    end = tiny_tokenizer.pad_token
    observed = Observation(" 12.5 people", f"They say{end} that{end} then")
    assert tiny_tokenizer.pad_token_id in encode_text(model, observed.prompt).ids
    assert model.counterfactual_samples(observed, Intervention())[0][0].text == observed.text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"values": {0: "7"}}, r"values\[0\]: input should be a valid number, got '7'"),
        ({"values": {-1: 5.0}}, "values.*greater than or equal to 0, got -1"),
        ({"tokens": {0: 5}}, r"tokens\[0\]: input should be a valid string, got 5"),
    ],
)
def test_what_cannot_be_set_is_told(given, message):
    assert Intervention(values={np.int64(3): 5.0}).values == {3: 5.0}
    with pytest.raises(ValueError, match=message):
        Intervention(**given)


@pytest.mark.parametrize("noise", ["abduct", "redraw"])
@pytest.mark.parametrize(
    ("given", "length", "message"),
    [
        ({"values": {"n": 5.0}}, None, r"values: place {n} lies after the {n} tokens of the text; name one from 0 to {last}"),
        ({"values": {0: 5.0, "n": 5.0}}, None, r"values: place {n} lies after the {n} tokens"),
        ({"tokens": {0: " a", 10**12: " b"}, "prompt": "We say"}, None, r"tokens: place 10{{12}} lies after the {n} tokens"),
        ({"tokens": {2: " men"}}, 2, r"tokens: place 2 lies after the 2 tokens of the text; .* or give more max_new_tokens"),
    ],
)  # fmt: skip
def test_nothing_is_set_after_the_end_of_a_text_without_a_word(speaker, noise, given, length, message):
    n = len(encode_text(speaker, OBSERVED.text).ids)
    for name in ("values", "tokens"):
        if name in given:
            given = given | {name: {n if place == "n" else place: what for place, what in given[name].items()}}
    with pytest.raises(ValueError, match=message.format(n=n, last=n - 1)):
        speaker.counterfactual_samples(
            OBSERVED, [Intervention(), Intervention(**given)], noise=noise, max_new_tokens=length
        )
    ((world,),) = speaker.counterfactual_samples(OBSERVED, Intervention(tokens={n - 1: " men"}), noise=noise)
    assert world.text.endswith(" men") and n - 1 in world.forced


def test_a_text_that_ends_before_a_place_says_so(speaker, monkeypatch, caplog):
    end = int(speaker.processor.tokenizer(" of")["input_ids"][-1])
    monkeypatch.setattr(speaker.generation_config, "eos_token_id", end)
    what = Intervention(tokens={1: " of", 5: " men"})
    ((world,),) = speaker.counterfactual_samples(OBSERVED, what, noise="redraw")
    assert len(world.tokens) < 5 and set(world.forced) < set(range(5))
    assert f"a text ends after {len(world.tokens)} tokens: what was to be set at 5 is not in it" in caplog.text


def test_interventional_samples_are_those_of_a_persona(speaker):
    individual = Individual.from_seed(4, 32)
    worlds = speaker.interventional_samples(
        ["It is", "A new year"], individual, num_samples=3, max_new_tokens=6, seed=9
    )
    inputs = speaker.processor(["A new year"], return_tensors="pt")
    plan = CausalDecoding.preset("persona", individual=individual, seed=9)
    made = speaker.generate(**inputs, causal_decoding=plan, max_new_tokens=6, num_return_sequences=3)
    assert [w.tokens.tolist() for w in worlds[1]] == made.sequences[:, inputs["input_ids"].shape[1] :].tolist()
    forced = Intervention(tokens={2: " and"})
    rows = continue_prompt(speaker, "A new year", plan, 3, 6, forced)
    whole = speaker.processor.tokenizer(" and")["input_ids"]
    assert all(row.tokens[:2].tolist() == w.tokens[:2].tolist() for row, w in zip(rows, worlds[1], strict=True))
    assert all(row.tokens[2 : 2 + len(whole)].tolist() == whole for row in rows)
    assert len({tuple(row.tokens.tolist()) for row in rows}) == len({tuple(w.tokens.tolist()) for w in worlds[1]})


def test_where_nothing_was_observed_it_says_what_to_give(speaker):
    for nothing in ("", "a", [], [Observation("", "We are")]):
        with pytest.raises(ValueError, match="give a text of two words or more"):
            speaker.abduct(nothing)


def test_an_individual_says_so_where_nobody_was_found():
    def told(directions):
        return str(Individual(torch.full((4,), 0.5), evidence=(Observed(47, 0, 0.0, directions, 1.0, "softmax"),)))

    assert told(0.4).endswith("0 directions determined: hardly apart from the population average)")
    assert told(0.6).endswith("1 directions determined)")


def test_errors_name_what_is_wrong(speaker):
    told, kept = speaker.abduct("It is new"), speaker.abduct_noise(OBSERVED, temperature=0.7)
    nobody, unheld = Individual.nobody(32), speaker.abduct_noise(OBSERVED)
    for wrong, message in (
        (lambda: speaker.counterfactual_samples(OBSERVED, Intervention(), noise="fresh"), "unknown noise"),
        (lambda: speaker.abduct("It is new", prior=Individual.from_seed(0, 5)), "does not fit"),
        (lambda: speaker.abduct("It is new", prior=told, spread=0.1), "brings its own width"),
        (lambda: speaker.counterfactual_samples(OBSERVED, Intervention(), temperature=0.0), "at temperature 0 nothing"),
        (lambda: CausalDecoding(individual="sequence", own=unheld), "one individual said"),
        (lambda: CausalDecoding(individual=nobody, own=kept), "at temperature 0.7, .* give temperature=0.7"),
        (lambda: CausalDecoding(individual=nobody, own=kept, temperature=0.8), "give temperature=0.7"),
        (lambda: nobody.draw(1), "known exactly"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()
    assert CausalDecoding(individual=nobody, own=[kept], temperature=0.7).noises == [kept]
