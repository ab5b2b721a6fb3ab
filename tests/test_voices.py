"""Voices: individuals who are heard at every depth of a frozen backbone (theory 3.17)."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from causalqwen import CausalDecoding, CausalQwenForCausalLM, Choice, Individual, Intervention, Observation, Population
from causalqwen.data.texts import speech_paragraphs
from causalqwen.decoding import Voices, load_prior, mean, mix, move, nearest
from causalqwen.evaluation.portrait import evidence_of_each, write_portrait
from causalqwen.individuals.posterior import find_posterior
from causalqwen.modeling.choices import read_options
from causalqwen.modeling.explain_individual import favoured_tokens, what_told
from causalqwen.modeling.layer_shift import decoder_layers, depths_of
from causalqwen.modeling.logits_processors import ForcedToken, ForceTokens
from causalqwen.modeling.reading import contexts_of, read_contexts, token_evidence
from causalqwen.modeling.voice_likelihood import Words, log_likelihood, log_p_of, scores, windows_of
from causalqwen.serving import load_individuals
from causalqwen.training import learn_voices
from causalqwen.training import voices as learning
from causalqwen.training.voices import _closed_form, _Hearing
from causalqwen_vllm.request_options import RequestOptions, check_silent
from conftest import graft_tiny
from test_cli import run, write
from test_copying import random_head
from test_serving import PROMPT, held, serving, talker, until

SAID = "The people of this nation will not forget what they did here, and 25 of them said so."


def random_voice(model: CausalQwenForCausalLM, seed: int = 0, size: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return size * torch.randn(*depths_of(model.backbone), generator=generator)


def random_voices(model: CausalQwenForCausalLM, seed: int = 0) -> Voices:
    of = [random_voice(model, seed + place, 0.3) for place in range(9)]
    patience = torch.tensor([50.0, 200.0, 900.0])
    return Voices(*of[:3], torch.stack(of[3:6]), torch.stack(of[6:]), patience, 2.0, 7, (0.1, 0.2))


def speaker(model: CausalQwenForCausalLM, seed: int = 0, size: float = 1.0) -> Individual:
    return replace(Individual.nobody(model.config.causal_size), name="Ann", voice=random_voice(model, seed, size))


class Adding(nn.Module):
    """The slow obvious form: a layer that adds a vector for good."""

    def __init__(self, layer: nn.Module, vector: torch.Tensor) -> None:
        super().__init__()
        self.layer, self.vector = layer, vector

    def forward(self, *given, **named):
        out = self.layer(*given, **named)
        return (out[0] + self.vector, *out[1:]) if isinstance(out, tuple) else out + self.vector

    def __getattr__(self, name):
        return getattr(super().__getattr__("layer"), name) if name == "attention_type" else super().__getattr__(name)


def with_voice_built_in(model: CausalQwenForCausalLM, voice: torch.Tensor) -> CausalQwenForCausalLM:
    layers = model.backbone.model.layers
    for place, vector in enumerate(voice):
        layers[place] = Adding(layers[place], vector)
    return model


# ---- a voice in the backbone -----------------------------------------------------------------------------------------


def test_a_voice_is_added_behind_each_layer(tiny, family, tiny_tokenizer):
    ids = torch.randint(3, 300, (3, 9), generator=torch.Generator().manual_seed(1))
    voices = torch.stack([random_voice(tiny, seed) for seed in range(3)])
    before = tiny.features(ids).last_hidden_state
    spoken = tiny.features(ids, voice=voices).last_hidden_state
    assert torch.equal(tiny.features(ids).last_hidden_state, before)  # nothing stays behind
    for row, voice in enumerate(voices):
        built = with_voice_built_in(graft_tiny(family, tiny_tokenizer), voice)
        torch.testing.assert_close(spoken[row], built.features(ids).last_hidden_state[row], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        tiny.features(ids, voice=voices[1]).last_hidden_state[1], spoken[1], rtol=1e-5, atol=1e-5
    )
    assert (spoken - before).abs().max() > 0.1
    with pytest.raises(ValueError, match="belongs to the backbone that it was inferred with"):
        tiny.features(ids, voice=voices[:, :1])
    assert torch.equal(tiny.features(ids).last_hidden_state, before)


def test_a_voice_is_heard_in_its_own_pass_alone(tiny_llama):
    """Layers are shared by threads: somebody else who reads meanwhile hears nothing of it."""
    ids, voice = torch.arange(3, 203)[None], random_voice(tiny_llama)
    plain, own = (tiny_llama.features(ids, voice=one).last_hidden_state for one in (None, voice))
    with ThreadPoolExecutor(2) as pool:
        read = pool.map(lambda one: tiny_llama.features(ids, voice=one).last_hidden_state, [None, voice] * 40)
        for found, expected in zip(read, [plain, own] * 40, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("numbers", [False, True])
def test_the_score_is_the_gradient_of_the_likelihood(tiny_tokenizer, numbers):
    model = graft_tiny("qwen2", tiny_tokenizer).double().requires_grad_(False)
    model.config.value_range = [0.0, 100.0] if numbers else None
    contexts = contexts_of(model, [Observation(SAID, "She said:"), SAID, SAID], 64)
    origin, towards = random_voice(model).double(), random_voice(model, 1).double()
    gradients, counts = map(
        torch.cat, zip(*(one for each in contexts for one in scores(model, [each], origin)), strict=True)
    )
    step = 1e-2  # RMSNorm squares in float32
    for place, one in enumerate(contexts):
        up, down = (log_p_of(model, [one], origin + sign * step * towards) for sign in (1, -1))
        assert (gradients[place] * towards).sum().item() == pytest.approx((up - down) / (2 * step), rel=2e-3)
        evidence = token_evidence(model, read_contexts(model, [one], origin))  # by the documents' likelihood of words
        assert log_p_of(model, [one], origin) == pytest.approx(evidence.evaluate(torch.zeros(32).double())[0], abs=1e-6)
        assert counts[place] == len(evidence)
    both = log_likelihood(model, Words(model, contexts[1:]), origin)  # of one length: read together
    assert both[0].item() == pytest.approx(log_p_of(model, contexts[1:2], origin), abs=1e-8)
    assert read_contexts(model, contexts[:1]).targets.shape[0] == counts[0] + int(numbers)


# ---- hearing somebody ------------------------------------------------------------------------------------------------


@given(st.floats(1e-3, 1e3), st.integers(1, 10**6))
def test_a_voice_stays_within_reach(tiny_voices, size, tokens):
    score = size * tokens * torch.ones_like(tiny_voices.origin)
    place = tiny_voices.place(score, tokens)
    beyond = score - tokens * tiny_voices.expected
    exact = tiny_voices.probes.flatten(1) @ beyond.flatten() / (tokens + tiny_voices.patience)
    assert place.norm() <= tiny_voices.reach * (1 + 1e-5)
    torch.testing.assert_close(place, exact / (1 + exact.norm() ** 2 / 4) ** 0.5)
    moved = tiny_voices.heard(score, tokens) - tiny_voices.mean
    torch.testing.assert_close(moved, sum(a * one for a, one in zip(place, tiny_voices.loadings, strict=True)))


@pytest.fixture(scope="module")
def tiny_voices(tiny_tokenizer) -> Voices:
    return random_voices(graft_tiny("llama", tiny_tokenizer))


def test_somebody_is_heard_by_the_score_of_their_words(tiny_llama, tiny_voices):
    who = tiny_llama.abduct([SAID * 20, Observation(SAID, "She said:")], prior=tiny_voices, name="Ann")
    contexts = list(chain.from_iterable(windows_of(tiny_llama, [SAID * 20, Observation(SAID, "She said:")])))
    gradients, counts = map(torch.cat, zip(*scores(tiny_llama, contexts, tiny_voices.origin), strict=True))
    tokens = int(counts.sum())
    assert len(contexts) > 3 and who.name == "Ann" and who.evidence[0].tokens == tokens
    torch.testing.assert_close(who.voice, tiny_voices.heard(gradients.sum(0), tokens))
    gained = log_p_of(tiny_llama, contexts, who.voice) - log_p_of(tiny_llama, contexts, None)
    # e1 is inferred as without a voice, from what is read under it
    words = token_evidence(tiny_llama, read_contexts(tiny_llama, contexts, who.voice))
    widest = tiny_llama.action.scales.widest
    posterior = find_posterior([words], torch.zeros(32).double(), None, widest=widest)
    torch.testing.assert_close(who.normal, posterior.mode, rtol=1e-4, atol=1e-5)
    directions = posterior.directions + sum(tokens / (tokens + p) for p in (50, 200, 900))
    assert posterior.gained > 0.01 and who.evidence[0].method == "voice"
    assert who.evidence[0].gained == pytest.approx(gained + posterior.gained, abs=1e-3)
    assert who.evidence[0].directions == pytest.approx(directions, rel=1e-4)
    assert who.is_inferred and not who.knows_values
    assert "heard at every depth" in str(who) and "the population average's" in str(who)


def test_what_voices_cannot_do_is_refused(tiny_llama, tiny_voices, tmp_path):
    abduct, who, voices = tiny_llama.abduct, speaker(tiny_llama), tiny_voices
    wrong = replace(who, voice=who.voice[:1])
    choice = Choice("He said", ("yes", "no"), "no")
    for asked, message in (
        (lambda: abduct(SAID, prior=voices, likelihood="ovr"), "leave spread, likelihood and method out"),
        (lambda: abduct([SAID, choice], prior=voices), "a voice is inferred from words"),
        (lambda: abduct([], prior=voices), "no word that something comes before"),
        (lambda: abduct([Observation("a")], prior=voices), "no word that something comes before"),
        (lambda: abduct(SAID, prior=who), "give all that they said at once"),
        (lambda: Population.of({"Ann": who}), "Ann has a voice"),
        (lambda: tiny_llama.abduct_people({"Ann": SAID}, prior=voices), "a prior of several people is an individual"),
        (lambda: tiny_llama.predict_choice("He said", ("yes", "no"), individual=wrong), "does not fit a backbone"),
        (lambda: replace(who, voice=who.voice * torch.nan), "one finite vector for each layer"),
        (lambda: replace(voices, patience=torch.ones(2)), "voices whose shapes do not fit"),
        (lambda: replace(voices, reach=0.0), "positive"),
    ):
        with pytest.raises(ValueError, match=message):
            asked()


def test_files_of_voices_and_of_who_has_one(tiny_llama, tiny_voices, tmp_path):
    tiny_voices.save(tmp_path / "voices.safetensors")
    replace(tiny_voices, mean=tiny_voices.origin).save(tmp_path / "alike")  # one tensor may be there twice
    assert torch.equal(Voices.load(tmp_path / "alike").mean, tiny_voices.origin)
    found = load_prior(tmp_path / "voices.safetensors")
    assert vars(found).keys() == vars(tiny_voices).keys() and str(found) == str(tiny_voices)
    for name, value in vars(tiny_voices).items():
        torch.testing.assert_close(getattr(found, name), value, rtol=0, atol=0)
    who = speaker(tiny_llama)
    who.save(tmp_path / "ann.safetensors")
    assert torch.equal(load_prior(tmp_path / "ann.safetensors").voice, who.voice)
    with pytest.raises(ValueError, match="holds no voices"):
        Voices.load(tmp_path / "ann.safetensors")
    (tmp_path / "text").write_text("nobody")
    for path in ("text", "voices.safetensors"):
        with pytest.raises(ValueError, match=path):
            Individual.load(tmp_path / path)
    with pytest.raises(FileNotFoundError):
        load_prior(tmp_path / "missing")


# ---- somebody who speaks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["shared-individual", "persona"])
def test_a_text_is_that_of_a_backbone_with_the_voice_built_in(tiny_tokenizer, preset):
    model, who = graft_tiny("llama", tiny_tokenizer), speaker(graft_tiny("llama", tiny_tokenizer))
    nobody = Individual.nobody(32)
    prompts = ["The people", "We the old people"]
    inputs = model.processor(prompts, padding=True, padding_side="left", return_tensors="pt")
    settings = {"max_new_tokens": 24, "pad_token_id": 2, "eos_token_id": None}

    def texts(of: CausalQwenForCausalLM, individual):
        plan = CausalDecoding.preset(preset, individual=individual, seed=[3, 4])
        return of.generate(**inputs, causal_decoding=plan, **settings)

    spoken, silent = texts(model, who), texts(model, nobody)
    mixed = texts(model, [nobody, who])  # of one batch: each as in a batch of their own
    assert torch.equal(mixed.sequences[0], silent.sequences[0]) and torch.equal(mixed.sequences[1], spoken.sequences[1])
    built = texts(with_voice_built_in(graft_tiny("llama", tiny_tokenizer), who.voice), nobody)
    assert torch.equal(spoken.sequences, built.sequences) and torch.equal(spoken.numeric_values, built.numeric_values)
    assert not torch.equal(spoken.sequences, silent.sequences)
    other = replace(who, voice=torch.zeros(5, 32))
    with pytest.raises(ValueError, match="voices of different backbones"):
        texts(model, [who, other])


def test_rows_of_several_voices_keep_their_order(tiny_llama):
    """Copies of a prompt stand side by side, each with its own individual."""
    who = [speaker(tiny_llama, 1), Individual.nobody(32), speaker(tiny_llama, 2)]
    inputs = tiny_llama.processor(["We the"] * 3, return_tensors="pt")
    settings = {"max_new_tokens": 8, "pad_token_id": 2, "eos_token_id": None, "num_return_sequences": 2}

    def texts(individual, given) -> list[list[int]]:
        plan = CausalDecoding.preset("persona", individual=individual, seed=5)
        return tiny_llama.generate(**given, causal_decoding=plan, **settings).sequences.tolist()

    alone = [row for one in who for row in texts(one, {name: column[:1] for name, column in inputs.items()})]
    assert texts(who, inputs) == alone and alone[0] != alone[1] != alone[2]


def test_a_copied_number_is_found_under_the_voice(tiny_tokenizer):
    def copier():
        return random_head(graft_tiny("llama", tiny_tokenizer, copy_numbers=True, number_context="value"))

    model, who = copier(), speaker(copier(), size=0.5)
    built = with_voice_built_in(copier(), who.voice)
    inputs = model.processor("One is 5, one is 7.25, one is 31, and so", return_tensors="pt")
    number = model.config.num_token_id
    asked = {"max_new_tokens": 12, "pad_token_id": 2, "eos_token_id": None}

    def values(of: CausalQwenForCausalLM, individual: Individual) -> list[float]:
        plan = CausalDecoding.preset("shared-individual", individual=individual)
        forced = [ForceTokens([ForcedToken(place, number, None) for place in range(0, 12, 2)])]
        return of.generate(**inputs, causal_decoding=plan, logits_processor=forced, **asked).numeric_values[0].tolist()

    own = values(model, who)
    assert own == pytest.approx(values(built, Individual.nobody(32)), rel=1e-5)
    assert own != pytest.approx(values(model, Individual.nobody(32)), rel=1e-3)


def test_a_server_lets_voices_speak_beside_others(tiny_tokenizer, tmp_path):
    model = talker(tiny_tokenizer)
    people = {"Vera": speaker(model), "Ann": Individual.from_seed(11, 32)}
    for name, one in people.items():
        one.save(tmp_path / f"{name}.safetensors")
    fitting = load_individuals(tmp_path, 32, depths_of(model.backbone))
    for depths, told_of in (((5, 32), "has 5 layers of 32"), (None, "takes no voices")):
        with pytest.raises(ValueError, match=f"Vera in .* has a voice for 2 layers of 32, and this backbone {told_of}"):
            load_individuals(tmp_path, 32, depths)
    causal = {"preset": "shared-individual"}
    with serving(model, individuals=fitting) as server, ThreadPoolExecutor(3) as pool:
        with held(model) as gate:
            jobs = [pool.submit(server.complete, causal | {"individual": name}) for name in people]
            until(lambda: server.metric("causalqwen_running") + server.metric("causalqwen_waiting") == 2)
            gate.set()
            said = [job.result().choices[0].text for job in jobs]
        status, told_of = server.send({"model": "tiny", "individuals": ["Vera"]}, "/v1/individuals")
        assert status == 200 and b"heard at every depth" in told_of
    inputs = model.processor(PROMPT, prompt=True, return_tensors="pt")
    for text, one in zip(said, people.values(), strict=True):
        plan = CausalDecoding(individual=one)
        out = model.generate(**inputs, max_new_tokens=24, causal_decoding=plan)
        assert PROMPT + text == model.processor.decode(out.sequences[0], out.numeric_values[0])
    with pytest.raises(ValueError, match="serve them by `causalqwen serve`"):
        check_silent(people["Vera"])
    with pytest.raises(ValueError, match="serve them by `causalqwen serve`"):
        RequestOptions.read({"preset": "persona", "individual": str(tmp_path / "Vera.safetensors")})


def test_choices_and_worlds_are_heard_under_the_voice(tiny_tokenizer):
    model, who = graft_tiny("llama", tiny_tokenizer), speaker(graft_tiny("llama", tiny_tokenizer), size=0.3)
    built = with_voice_built_in(graft_tiny("llama", tiny_tokenizer), who.voice)
    options = ("yes", "no", "no way")
    (own,), (expected,), (nobodys,) = (
        one.predict_choice("He said", options, individual=by)
        for one, by in ((model, who), (built, None), (model, None))
    )
    assert own.probabilities == pytest.approx(expected.probabilities, abs=1e-5)
    assert own.probabilities != pytest.approx(nobodys.probabilities, abs=1e-4)
    observed = Observation(" in this land and not in another", "We the people")
    asked = [Intervention(), Intervention(prompt="They the kings")]
    worlds = model.counterfactual_samples(observed, asked, individual=who, num_samples=2)
    assert [world.text for world in worlds[0]] == [observed.text] * 2  # the world that was
    built_worlds = built.counterfactual_samples(observed, asked, individual=Individual.nobody(32), num_samples=2)
    assert [[world.text for world in of] for of in worlds] == [[world.text for world in of] for of in built_worlds]


def test_what_is_told_about_a_voice(tiny_tokenizer, tmp_path):
    model, voices = graft_tiny("llama", tiny_tokenizer), random_voices(graft_tiny("llama", tiny_tokenizer))
    text = SAID.replace("25", "all")
    who = model.abduct(text, prior=voices, name="Ann")
    (said,), (nobodys, own) = what_told(model, [text], who)
    assert sum(one.gain or 0.0 for one in said) == pytest.approx(who.evidence[0].gained, abs=1e-3)
    more, less = favoured_tokens(model, (nobodys, own), who)
    added = own.weight.double() @ (own.reach.double().square().mean(0).sqrt() * own.law.quantile(who.factor))
    p = torch.softmax(own.loc @ own.weight.T, -1).mean(0).double() * added.exp()
    p = p / p.sum()
    token = model.processor.tokenizer(more[0].text, add_special_tokens=False)["input_ids"]
    assert len(token) != 1 or more[0].own == pytest.approx(p[token[0]].item(), rel=1e-3)
    assert more[0].own > more[0].nobodys and less[0].own < less[0].nobodys
    choice = Choice("He said", ("yes", "no"), "no")
    heard = {one.kind: one for one in evidence_of_each(model, who, [choice, Observation(text)])}
    own_p, nobodys_p = (
        branches.log_probs(model.action.law.quantile(one.factor))[1].item()
        for one in (who, Individual.nobody(32))
        for branches in [read_options(model, "He said", ("yes", "no"), one.voice)]
    )
    assert heard["choice"].gain == pytest.approx(own_p - nobodys_p, abs=1e-6)
    assert heard["words"].gain == pytest.approx(who.evidence[0].gained, abs=1e-3)
    write_portrait(tmp_path / "ann.html", model, who, [text], [("Bob", Individual.from_seed(1, 32))], [choice])
    assert "heard at every depth" in (tmp_path / "ann.html").read_text()


def test_numbers_are_nobodys(tiny_tokenizer):
    """Where a number is asked; in a text that somebody wrote they follow the voice, as the text does."""
    model, who = graft_tiny("llama", tiny_tokenizer), speaker(graft_tiny("llama", tiny_tokenizer))
    model.config.value_range = [0.0, 100.0]
    plain, own = (model.predict_number("The number is", individual=one)[0] for one in (None, who))
    assert (plain.loc, plain.scale) == (own.loc, own.scale)
    built = with_voice_built_in(graft_tiny("llama", tiny_tokenizer), who.voice)
    observed = Observation(" 25 and 31 of them", "We counted")
    ((world,),) = model.counterfactual_samples(observed, Intervention(), individual=who)
    z = built.features(model.processor("We counted", prompt=True, return_tensors="pt")["input_ids"]).last_hidden_state
    found = next(iter(model.value_predictions(world, who).values())).loc
    assert found == pytest.approx(model.predict_values(z[:, -1])[0].loc, rel=1e-3) and found != pytest.approx(
        plain.loc, rel=1e-2
    )


def test_arithmetic_of_voices(tiny_llama):
    ann, bob, nobody = speaker(tiny_llama, 0), speaker(tiny_llama, 1), Individual.from_seed(1, 32)
    torch.testing.assert_close(mix(ann, bob, 0.25).voice, 0.75 * ann.voice + 0.25 * bob.voice)
    torch.testing.assert_close(mix(nobody, bob, 0.25).voice, 0.25 * bob.voice)
    torch.testing.assert_close(move(ann, ann, bob, 2.0).voice, 2 * bob.voice - ann.voice)
    torch.testing.assert_close(mean([ann, bob, nobody]).voice, (ann.voice + bob.voice) / 3)
    stranger = Individual.from_seed(2, 32)
    for one in (mix(nobody, stranger), mix(nobody, bob, 0.0), move(nobody, bob, bob), move(nobody, ann, bob, 0)):
        assert one.voice is None and one.knows_values
    known = tiny_llama.abduct(SAID)
    assert torch.equal(mix(ann, known).draw(3).voice, mix(ann, known).voice)
    between = mix(ann, bob, 0.4)
    found = nearest(between, {"bob": bob, "ann": ann}, 2)
    assert [name for name, _ in found] == ["ann", "bob"]
    sizes = (between.voice.square().sum() + ann.voice.square().sum()).sqrt()
    assert found[0][1] == pytest.approx(((between.voice - ann.voice).norm() / sizes).item())
    with pytest.raises(ValueError, match="seed 1 has no voice and Ann has one, which cannot be compared: infer both"):
        nearest(ann, {"nobody": nobody})
    with pytest.raises(ValueError, match="different backbones"):
        mix(ann, replace(bob, voice=torch.zeros(3, 32)))


# ---- voices learned from people --------------------------------------------------------------------------------------


def test_the_closed_form_is_the_posterior_mean_of_people_like_those_it_knows():
    """Gradients of a window F v + noise of covariance F, v in two directions: heard as theory 3.17 says."""
    generator = torch.Generator().manual_seed(0)
    layers, size, windows = 2, 8, 16

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    fisher = normal(16).exp() / 100
    true, common = normal(2, 16) / fisher.sqrt() / 10, normal(16)

    def person(v):
        counts = torch.randint(50, 150, (windows,), generator=generator)
        each = counts[:, None]
        texts = [each * fisher * (common + v) + (each * fisher).sqrt() * normal(windows, 16) for _ in range(6)]
        return v, [_Hearing(one.view(windows, layers, size), counts, place) for place, one in enumerate(texts)]

    different = normal(150, 2) @ true
    people = [person(v) for v in torch.cat([different, -different])]  # on average nothing
    voices = _closed_form([heard for _, heard in people], torch.zeros(layers, size), 2)
    sizes = 30 / voices.patience  # eigenvalues: of what varies between people, in units of f
    torch.testing.assert_close(voices.expected.flatten(), fisher * common, rtol=0.2, atol=2e-3)
    free = replace(voices, reach=1e6)
    places = [free.place(one.scores.sum(0), int(one.counts.sum())) for heard in people for one in heard[1]]
    assert voices.reach == pytest.approx(2 * torch.stack(places).square().sum(1).mean().sqrt().item(), rel=1e-3)
    exact = torch.linalg.eigvalsh(true * fisher @ true.T).flip(0)
    torch.testing.assert_close(sizes, exact, rtol=0.25, atol=0.0)
    missed = torch.zeros(2)
    for _ in range(200):
        v, heard = person(normal(2) @ true)
        summed, tokens = sum(one.scores.sum(0) for one in heard[:2]), sum(int(one.counts.sum()) for one in heard[:2])
        plain = replace(voices, patience=voices.patience / 30, reach=1e6)  # without the caution that real texts need
        found = plain.heard(summed, tokens).flatten()
        precision = tokens * true * fisher @ true.T + torch.eye(2)
        best = torch.linalg.solve(precision, true @ (summed.flatten() - tokens * fisher * common)) @ true
        missed += torch.stack([((one - v) * fisher.sqrt()).square().sum() for one in (found, best)])
    assert missed[0] < 1.5 * missed[1]


class TwoKinds:
    """People of two kinds, each with a stock of words."""

    def __init__(self) -> None:
        words = sorted({word for text in speech_paragraphs() for word in text.split() if word.isalpha()})
        self.chance = random.Random(0)
        self.stocks = [words[::2][:40], words[1::2][:40]]

    def text(self, kind: int, words: int = 400) -> str:
        return " ".join(self.chance.choices(self.stocks[kind], k=words))


@pytest.fixture(scope="module")
def learned(tiny_tokenizer):
    kinds, model = TwoKinds(), graft_tiny("llama", tiny_tokenizer)
    people = {f"{place}": [kinds.text(place % 2) for _ in range(3)] for place in range(10)}
    return model, kinds, people, learn_voices(model, people, steps=60)


def test_one_text_of_somebody_tells_of_another(learned):
    model, kinds, _, voices = learned
    alone, heard = voices.gained
    assert voices.people == 8 and heard > alone + 0.05, voices
    assert not torch.equal(voices.mean, voices.origin) and not voices.loadings.requires_grad
    who = [model.abduct(kinds.text(kind, 60), prior=voices) for kind in (0, 1)]
    later = [list(chain.from_iterable(windows_of(model, [kinds.text(kind) for _ in range(4)]))) for kind in (0, 1)]
    tokens = [int(Words(model, one).count.sum()) for one in later]
    for kind in (0, 1):
        nats = [log_p_of(model, later[kind], one.voice) for one in who]
        assert nats[kind] > nats[1 - kind] and nats[kind] > log_p_of(model, later[kind], voices.mean)
    # what is told of people held out is what strangers to them find
    for expected, of in ((alone, [voices.mean] * 2), (heard, [one.voice for one in who])):
        gains = [log_p_of(model, later[kind], of[kind]) - log_p_of(model, later[kind], None) for kind in (0, 1)]
        assert sum(gains) / sum(tokens) == pytest.approx(expected, abs=0.08)
    assert model.backbone.training is False and all(parameter.grad is None for parameter in model.parameters())


def test_people_who_are_all_alike_are_worth_nothing_to_each_other(tiny_llama):
    """Nothing of who speaks can be known, and nothing is told to be."""
    kinds = TwoKinds()
    voices = learn_voices(tiny_llama, {f"{place}": [kinds.text(0) for _ in range(3)] for place in range(10)}, steps=40)
    alone, heard = voices.gained
    others = [tiny_llama.abduct(kinds.text(0, 60), prior=voices).voice for _ in range(8)]
    later = list(chain.from_iterable(windows_of(tiny_llama, [kinds.text(0) for _ in range(4)])))
    nats = [log_p_of(tiny_llama, later, voice) for voice in (voices.mean, torch.stack(others).mean(0), *others)]
    tokens = int(Words(tiny_llama, later).count.sum())
    assert abs(heard - alone) < 0.03 and max(nats) - min(nats) < 0.06 * tokens


def test_voices_are_the_same_again(learned):
    model, _, people, _ = learned
    first, again, other = (learn_voices(model, people, steps=2, directions=3, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.loadings, again.loadings) and first.gained == again.gained and len(first.loadings) == 3
    assert not torch.equal(first.mean, other.mean)


def test_steps_that_help_nobody_are_not_taken(tiny_llama, monkeypatch):
    kinds, starts = TwoKinds(), []

    def worth(model, voices, pairs):
        return float(voices is not None and torch.equal(voices.loadings, starts[0].loadings))

    monkeypatch.setattr(learning, "_worth", worth)
    monkeypatch.setattr(learning, "_closed_form", lambda *given: starts.append(_closed_form(*given)) or starts[0])
    people = {f"{place}": [kinds.text(place % 2, 70) for _ in range(3)] for place in range(6)}
    found = learn_voices(tiny_llama, people, steps=6)
    assert torch.equal(found.loadings, starts[0].loadings) and found.gained == (0.0, 1.0)


def test_whom_voices_cannot_be_learned_from(tiny_llama):
    text = TwoKinds().text(0)
    five = {name: [text] for name in "abcd"}
    for people, told_of in (
        ({"a": [text]}, "5 people or more, got 1"),
        (five | {"e": ["We the people"]}, "'e': a voice is learned from two texts at least"),
        (five | {"e": [Observation("", "He said")] * 300}, "'e'"),
        (five | {"e": [Choice("He said", ("yes", "no"), "no")]}, "'e': a voice is learned from texts"),
        ({name: [" the" * 2048] for name in "abcde"}, "the same again and again"),
    ):
        with pytest.raises(ValueError, match=told_of):
            learn_voices(tiny_llama, people, steps=1)
    with pytest.raises(ValueError, match="positive"):
        learn_voices(tiny_llama, {}, steps=0)
    tiny_llama.backbone._no_split_modules = None
    with pytest.raises(ValueError, match="does not say what its layers are"):
        learn_voices(tiny_llama, five | {"e": [text]})


@pytest.mark.parametrize("texts", ["short", "prompts", "numbers", "one window each", "one text"])
def test_voices_are_learned_from_texts_of_any_length(tiny_llama, texts):
    kinds, model = TwoKinds(), tiny_llama
    model.config.value_range = [0.0, 100.0]  # numbers are <NUM>, and no words

    def said(place: int) -> object:
        if texts == "short":
            return [kinds.text(place % 2, 8) for _ in range(60)]
        if texts == "prompts":
            return [Observation(kinds.text(place % 2, 30), kinds.text(0, 20)) for _ in range(9)]
        if texts == "numbers":
            return [kinds.text(place % 2, 70), "5 6 7", kinds.text(place % 2, 70), "12"]
        return [kinds.text(place % 2, 50) for _ in range(2)] if texts == "one window each" else kinds.text(place % 2)

    model.train()
    voices = learn_voices(model, {f"{place}": said(place) for place in range(6)}, steps=2)
    assert voices.people == 4 and model.training
    with torch.inference_mode():
        assert model.abduct(kinds.text(0, 20), prior=voices).voice is not None


def test_the_commands_of_a_voice(tiny_llama, tmp_path):
    kinds = TwoKinds()
    tiny_llama.save_pretrained(tmp_path / "model")
    rows = [{"text": kinds.text(place % 2), "individual": f"p{place % 5}"} for place in range(10)]
    base = "--model", tmp_path / "model"
    made = run(
        "voices", *base, "--rows", write(tmp_path / "rows.jsonl", rows), "--output", tmp_path / "voices.safetensors",
        "--directions", 2, "--steps", 3, "--seed", 1, "--device", "cpu", "--json",
    )  # fmt: skip
    told_of = json.loads(made.stdout)
    voices = Voices.load(tmp_path / "voices.safetensors")
    assert [told_of[name] for name in ("people", "directions", "gained")] == [4, 2, list(voices.gained)]
    (tmp_path / "said.txt").write_text(kinds.text(0, 60))
    given = "--text", tmp_path / "said.txt", "--prior", tmp_path / "voices.safetensors", "--name", "Ann"
    assert "heard at every depth" in run("abduct", *base, *given, "--output", tmp_path / "ann.safetensors").stdout
    ann = Individual.load(tmp_path / "ann.safetensors")
    assert ann.voice is not None and ann.name == "Ann"
    asked = "--prompt", "We the", "--preset", "persona", "--seed", 1, "--max-new-tokens", 8, "--json"
    spoken = json.loads(run("generate", *base, *asked, "--individual", tmp_path / "ann.safetensors").stdout)
    inputs = tiny_llama.processor("We the", prompt=True, return_tensors="pt")
    plan = CausalDecoding.preset("persona", individual=ann, seed=1)
    expected = tiny_llama.generate(**inputs, causal_decoding=plan, max_new_tokens=8)
    assert spoken["text"] == tiny_llama.processor.decode(
        expected.sequences[0], expected.numeric_values[0], skip_special_tokens=True
    )
    numbers = write(tmp_path / "numbers.jsonl", [{"prompt": "It is", "value": 5, "individual": "a"}])
    refused = run("voices", *base, "--rows", numbers, "--output", tmp_path / "none.safetensors", code=1)
    assert "learned from words alone" in refused.stderr and not (tmp_path / "none.safetensors").exists()


@pytest.mark.slow
def test_the_real_backbone_hears_who_speaks(smollm2):
    assert len(decoder_layers(smollm2.backbone)) == 30
    texts = speech_paragraphs()
    people = {f"{place}": ["\n\n".join(texts[place + half :: 12]) for half in (0, 6)] for place in range(6)}
    voices = learn_voices(smollm2, people, steps=6)
    alone, heard = voices.gained
    assert alone > 0 and heard > 0
    who = smollm2.abduct(people["0"][0][:2000], prior=voices)
    assert who.evidence[0].gained > 5 and who.voice.shape == (30, 576)
