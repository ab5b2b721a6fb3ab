"""Abduction networks of domains: close to the base's, whatever they learned; added, selected, saved alone, loaded."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from causalqwen import CausalQwenForCausalLM
from causalqwen.data import encode_rows, parse_row
from causalqwen.data.texts import speech_paragraphs
from causalqwen.distributions import get_family
from causalqwen.modeling.abduction import divergence, held
from causalqwen.training import FactStore, HeadStage, TrainSettings, score_tokens, train
from causalqwen.training.domain_fit import gradients_of_loc, natural_step
from conftest import graft_tiny


def disturb(network, size=3.0):
    torch.nn.init.normal_(network.residual.last.weight, std=size)
    torch.nn.init.normal_(network.residual.last.bias, std=size)


@pytest.mark.parametrize("family", ["cauchy", "gaussian"])
@pytest.mark.parametrize("settings", [{}, {"layers": 2, "width": 16}])
def test_a_domain_starts_as_the_base_and_stays_within_its_limit(family, settings, tiny_tokenizer):
    model = graft_tiny("llama", tiny_tokenizer, vocabulary_family=family)
    z = 5 * torch.randn(7, 32)
    loc, scale = model.abduction(z)
    network = model.add_domain("medical", limit=0.02, **settings)
    assert all(torch.equal(one, other) for one, other in zip(model.abduction(z), (loc, scale), strict=True))
    disturb(network)
    own_loc, own_scale = model.abduction(z)
    law = model.abduction.law(z)
    assert torch.equal(law.scale, own_scale) and torch.equal(law.loc, own_loc)
    away = get_family(family).kl(own_loc, own_scale, loc, scale).mean(-1)
    torch.testing.assert_close(away, network.distance(z), rtol=1e-3, atol=1e-5)
    assert (away <= 0.02 * 1.001).all() and (away > 0.019).all()
    network.limit = None
    assert (get_family(family).kl(*model.abduction(z), loc, scale).mean(-1) > 1).all()
    model.set_domain(None)
    assert torch.equal(model.abduction(z)[0], loc)


@given(st.integers(0, 10_000), st.sampled_from(["cauchy", "gaussian"]), st.floats(0.001, 2.0), st.floats(0.01, 10.0))
def test_the_limit_is_held_and_not_undercut(seed, family, limit, size):
    generator = torch.Generator().manual_seed(seed)
    law = get_family(family)
    a, d = (size * torch.randn(2, 4, 8, generator=generator, dtype=torch.float64)).clamp(-20, 20)
    t = held(law, a, d, limit)
    assert (divergence(law, t * a, t * d) <= limit).all()
    free = divergence(law, a, d) <= limit
    assert torch.equal(free, t.squeeze(-1) == 1)
    further = t + 1e-5  # one step on, and the limit is broken, wherever t is not 1
    assert (divergence(law, further * a, further * d)[~free] > limit).all()


def texts(model, start, stop):
    lines = speech_paragraphs(numbers=False)[start:stop]
    return encode_rows([parse_row(json.dumps({"text": line[:120]}), "x") for line in lines], model.processor)


@pytest.mark.parametrize(("layers", "start"), [(0, "faithful"), (1, "faithful"), (0, "documents")])
def test_a_domain_alone_is_trained_and_its_limit_holds_on_other_text(layers, start, tiny_tokenizer, tmp_path):
    model = graft_tiny("llama", tiny_tokenizer, start=start)
    rows, others = texts(model, 0, 24), texts(model, 24, 36)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    base = score_tokens(model, FactStore.build(model, others, tmp_path).blocks())["metrics"]
    stage = HeadStage(domain="speeches", domain_layers=layers, domain_limit=0.05)
    settings = TrainSettings(values=None, heads=stage, recalibrate=False)
    lines = []
    metrics = train(model, rows, others, tmp_path / "run", settings, say=lines.append)
    assert "words held out" in lines[-1] and float(lines[-1].split(" takes ")[1].split()[0]) > 0
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
    assert metrics["cls_loss"] < base["cls_loss"]
    assert 0 < metrics["domain_divergence"] <= metrics["domain_divergence_max"] <= 0.05 * 1.001
    loaded = CausalQwenForCausalLM.from_pretrained(tmp_path / "run")
    again = score_tokens(loaded, FactStore.build(loaded, others, tmp_path).blocks())["metrics"]
    assert loaded.config.domain == "speeches" and again["cls_loss"] == pytest.approx(metrics["cls_loss"], rel=1e-5)
    loaded.set_domain(None)
    again = score_tokens(loaded, FactStore.build(loaded, others, tmp_path).blocks())["metrics"]
    assert again["cls_loss"] == base["cls_loss"] and "domain_divergence" not in again


def test_a_closed_form_is_the_natural_gradient_written_out(tiny_tokenizer):
    model = graft_tiny("llama", tiny_tokenizer)
    z, y = torch.randn(40, 32), torch.randint(0, 50, (40,))
    gradients, drawn = gradients_of_loc(model, z, y, seed=0)
    loc = z.clone().requires_grad_(True)
    scores = model.vocabulary()(loc).masked_fill(~model.action.rest_mask, -torch.inf)
    (wanted,) = torch.autograd.grad(torch.nn.functional.cross_entropy(scores, y, reduction="sum"), loc)
    torch.testing.assert_close(gradients, wanted.double(), rtol=1e-4, atol=1e-6)
    words = model.vocabulary().weight.detach()[model.action.rest_mask[: len(model.vocabulary().weight)]]
    tokens = (
        gradients + model.vocabulary().rows_at(y).detach() - drawn
    ).float()  # W'p less what was taken of it: the row of k
    assert torch.cdist(tokens, words).min(-1).values.max() < 1e-2
    c, x = drawn[:, :4], z[:, :5].double()
    s, m, g = c.T @ c / 40, x.T @ x / 40, gradients[:, :4].T @ x / 40
    step = natural_step(g, s, m, 0.5, 0.1)
    whole = torch.kron(s + 0.5 * s.diagonal().mean() * torch.eye(4), m + 0.1 * m.diagonal().mean() * torch.eye(5))
    torch.testing.assert_close(step.flatten(), torch.linalg.solve(whole, -g.flatten()))


def test_a_domain_without_words_or_without_a_limit_is_refused(tiny_tokenizer, tmp_path):
    model = graft_tiny("llama", tiny_tokenizer)
    rows = encode_rows([parse_row('{"text": "It is 3"}', "x")], model.processor)
    settings = TrainSettings(values=None, heads=HeadStage(domain="speeches"), recalibrate=False)
    with pytest.raises(ValueError, match="no words for a domain"):
        train(model, rows, [], tmp_path / "run", settings)
    with pytest.raises(ValueError, match="closed form: leave epochs out"):
        HeadStage(domain="speeches", epochs=3)
    model.add_domain("other")
    with pytest.raises(ValueError, match="domain 'other' has no limit"):
        train(
            model,
            texts(model, 0, 3),
            [],
            tmp_path / "other",
            TrainSettings(values=None, heads=HeadStage(domain="other")),
        )


def test_domains_are_kept_alone_and_together(tiny_tokenizer, tmp_path):
    model = graft_tiny("llama", tiny_tokenizer)
    disturb(model.add_domain("law", layers=1, width=8))
    disturb(model.add_domain("medical", limit=0.1))
    z = torch.randn(3, 32)
    wanted = {}
    for name in ("law", "medical"):
        model.set_domain(name)
        wanted[name] = model.abduction(z)[0]
        model.save_domain(name, tmp_path / f"{name}.safetensors")
    model.save_pretrained(tmp_path / "model")
    loaded = CausalQwenForCausalLM.from_pretrained(tmp_path / "model")
    other = graft_tiny("llama", tiny_tokenizer)
    for name in ("law", "medical"):
        assert other.load_domain(tmp_path / f"{name}.safetensors") == name
        for one in (loaded, other):
            one.set_domain(name)
            torch.testing.assert_close(one.abduction(z)[0], wanted[name], rtol=0, atol=0)
    with pytest.raises(ValueError, match="needs a name of its own"):
        model.add_domain("law")
    with pytest.raises(ValueError, match="none of torch's own; got 'forward'"):
        model.add_domain("forward")
    with pytest.raises(ValueError, match="unknown setting layer of a domain; did you mean layers"):
        model.add_domain("art", layer=2)
    with pytest.raises(ValueError, match="no domain 'art'; known domains: law, medical"):
        model.set_domain("art")
    with pytest.raises(ValueError, match="limit must be positive"):
        model.add_domain("art", limit=0.0)
    (tmp_path / "text.safetensors").write_text("nonsense")
    with pytest.raises(ValueError, match="not a safetensors file"):
        model.load_domain(tmp_path / "text.safetensors")
    with pytest.raises(ValueError, match="holds no domain"):
        model.load_domain(tmp_path / "model" / "model.safetensors")
    assert list(model.config.domains) == ["law", "medical"]
