"""Generation through transformers' `generate`, on tiny backbones."""

import itertools
import math
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from scipy import stats
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList, TextStreamer

from benchmarks.speed.generation import compiled_steps
from causalqwen import (
    PRESETS,
    CausalDecoding,
    Individual,
    Intervention,
    NumberTextIteratorStreamer,
    NumberTextStreamer,
    Observation,
)
from causalqwen.decoding import BoundDecoding
from causalqwen.distributions import (
    INDIVIDUAL_STREAM,
    NOISE_STREAM,
    WHOLE_TEXT,
    get_family,
    own_uniforms,
    uniform_draws,
)
from causalqwen.modeling.logits_processors import SamplerBesideNumber
from causalqwen.numbers import round_significant
from causalqwen_vllm.requests import Company
from conftest import broken_numbers, graft_tiny

PROMPTS = [
    "It is 5 and then",
    "A new year",
    "They say that -3.5 of the people who came here went on to count 1,000 more",
]
MODES = list(itertools.product(("marginal", "token", "sequence"), ("marginal", "token", "sequence", "off")))


def encode(model, prompts):
    return model.processor(prompts, padding=True, padding_side="left", return_tensors="pt")


@pytest.fixture
def talker(tiny_tokenizer):
    """A tiny model that often decides for `<NUM>`, which alone stands for a number: test_number_context has the others."""
    return eager(graft_tiny("llama", tiny_tokenizer, number_context="value"))


def eager(model):
    """Raise `<NUM>` so that it is decided for every few tokens, and give values some size."""
    torch.manual_seed(3)
    with torch.no_grad():
        model.action.num_row.normal_(std=0.6)
        model.action.num_bias += 3.5
    model.config.value_transform = {"kind": "affine", "center": 40.0, "width": 7.0}
    model.generation_config.eos_token_id = None
    return model


def step_by_step(model, prompt: str, plan: CausalDecoding, new_tokens: int):
    """The slow obvious loop: no cache, no batch, the law written out at every step (theory 3.9)."""
    inputs = model.processor(prompt, return_tensors="pt")
    ids, values = inputs["input_ids"], inputs["numeric_values"]
    action, head, law = model.action, model.vocabulary(), model.action.law
    seed = torch.tensor([plan.seed])
    margins = []
    for _ in range(new_tokens):
        with torch.no_grad():
            z = model.features(ids, numeric_values=values).last_hidden_state[:, -1]
            loc, scale = model.abduction(z)
            value_loc, value_scale = model.value_branch(z, loc, scale)
            position = ids.shape[1] - 1
            spread, taken, first, T = {"value": [], "token": []}, [], loc, plan.temperature
            for mode, stream, size in (
                (plan.individual, INDIVIDUAL_STREAM, (scale, value_scale)),
                (plan.noise, NOISE_STREAM, (action.noise, action.noise)),
            ):
                if mode == "marginal":
                    spread["token"].append(size[0].expand_as(scale))
                    spread["value"].append(size[1].expand_as(scale))
                elif mode != "off":
                    e = uniform_draws(seed, stream, WHOLE_TEXT if mode == "sequence" else position, loc.shape[-1])
                    loc = loc + T * size[0] * law.quantile(e).float()
                    value_loc = value_loc + min(T, 1.0) * size[1] * action.value_law.quantile(e).float()
                    taken.append((T * size[0]) ** law.alpha)
            left = law.add(*spread["token"]) if spread["token"] else torch.zeros_like(scale)
            loc_S, scale_S = action.score_loc(loc, head), action.score_scale_of(left, head)
            is_common, races = model.config.score_scale == "common", plan.own == "token"
            first_S, threshold = action.score_loc(first, head).float(), action.threshold
            if is_common:
                words = first_S[..., : action.rows].masked_fill(~action.rest_mask, -torch.inf) / max(T, 1e-6)
                threshold = max(T, 1e-6) * (action.threshold + words.logsumexp(-1, keepdim=True))
            excess = loc_S.float() - threshold
            if is_common and (races or (taken and plan.noise != "off")):
                a, noise = law.alpha, action.noise.expand_as(scale)
                whole = action.score_scale_of(scale if plan.noise == "off" else law.add(scale, noise), head)
                below = (threshold - first_S).clamp(min=0)
                of_rows = (sum(taken) + 0 * scale) @ (head.rows_of_all()[0].abs() ** a).T
                power = T**a * whole**a + T ** (a - 1) * action.score_slope * below - of_rows
                scale_S = power.clamp(min=1e-6**a) ** (1 / a)
            scores = (loc_S.float() if scale_S.shape[-1] == 1 or plan.decision == "loc" else excess / scale_S)[0]
            if is_common and races:
                e3 = own_uniforms(seed, torch.tensor([position]), scores.shape[-1])
                scores = (loc_S.float() + scale_S * law.quantile(e3).float())[0]
            scores = scores.masked_fill(~action.vocabulary_mask, -torch.inf)
            value, _ = action.value(value_loc, torch.ones_like(value_scale))
            value = round_significant(model.value_transform.inverse(value), model.config.value_digits)
            token = scores.argmax()
            while broken_numbers(
                model.processor, [*ids[0].tolist(), token.item()], [*values[0].tolist(), value.item()]
            ):
                scores[token] = -torch.inf
                token = scores.argmax()
            best = scores.topk(2).values
            margins.append((best[0] - best[1]).item())
        ids = torch.cat([ids, token.view(1, 1)], dim=1)
        shown = value.view(1, 1) if token == model.config.num_token_id else torch.zeros(1, 1, dtype=torch.float64)
        values = torch.cat([values, shown], dim=1)
    return ids[0], values[0], margins


@pytest.mark.parametrize(
    ("score_scale", "own"), [("common", "marginal"), ("common", "token"), ("documents", "marginal")]
)
@pytest.mark.parametrize(("individual", "noise"), MODES)
def test_every_point_of_the_grid_is_the_slow_loop(tiny_tokenizer, individual, noise, score_scale, own):
    settings = {} if score_scale == "documents" else {"score_noise": 0.05, "score_slope": 0.02}
    model = eager(graft_tiny("qwen2", tiny_tokenizer, score_scale=score_scale, start="minimal", initial_scale=0.02,
                             initial_noise=0.01, value_branch=True, **settings))  # fmt: skip
    plan = CausalDecoding(individual, noise, own, temperature=0.8, seed=11)
    ids, values, margins = step_by_step(model, PROMPTS[0], plan, 16)
    made = model.generate(**encode(model, PROMPTS[:1]), max_new_tokens=16, causal_decoding=plan)
    assert min(margins) > 1e-5, "the reference itself is a coin toss here: take another seed"
    assert torch.equal(made.sequences[0], ids)
    torch.testing.assert_close(made.numeric_values[0], values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [n for n in PRESETS if n != "softmax"])
def test_presets_decide_as_the_slow_loop_and_write_numbers(talker, name):
    plan = CausalDecoding.preset(name, seed=7)
    ids, values, _ = step_by_step(talker, PROMPTS[1], plan, 20)
    made = talker.generate(**encode(talker, PROMPTS[1:2]), max_new_tokens=20, causal_decoding=plan)
    assert torch.equal(made.sequences[0], ids)
    torch.testing.assert_close(made.numeric_values[0], values, rtol=1e-4, atol=1e-5)
    is_num = ids == talker.config.num_token_id
    assert is_num.any() and (values[~is_num] == 0).all() and (values[is_num] != 0).all()
    text = talker.processor.decode(made.sequences[0], made.numeric_values[0])
    assert "<NUM>" not in text


def test_a_generated_value_is_read_back_by_the_next_step(talker):
    plan, inputs = CausalDecoding.preset("standard"), encode(talker, PROMPTS[1:2])
    made = talker.generate(**inputs, max_new_tokens=20, causal_decoding=plan, output_logits=True)
    place = (made.sequences[0] == talker.config.num_token_id).nonzero()[0].item()
    after = made.sequences[:, : place + 1]
    with torch.no_grad():
        right = talker(after, numeric_values=made.numeric_values[:, : place + 1]).logits[0, -1]
        without = talker(after).logits[0, -1]
    met = made.logits[place + 1 - inputs["input_ids"].shape[1]][0]
    assert not torch.allclose(met, without, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(met, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("asked", ["output_scores", "output_logits"])
def test_scores_that_are_asked_for_are_those_of_every_token_however_many_rows(talker, asked):
    plan = CausalDecoding.preset("causal", seed=3)
    counts = []
    for rows in (2, 20):
        inputs = encode(talker, PROMPTS[1:2] * rows)
        made = talker.generate(**inputs, max_new_tokens=1, causal_decoding=plan, **{asked: True})
        scores = (made.scores if asked == "output_scores" else made.logits)[0][0]
        counts.append(torch.isfinite(scores).sum().item())
    assert counts[0] == counts[1] > 100
    with torch.no_grad():  # and those of a forward pass
        logits = talker(**inputs, causal_decoding=plan, scores_only=True).logits
    assert torch.isfinite(logits[0, -1]).sum() == counts[0]


@pytest.mark.parametrize("name", [n for n in PRESETS if n != "softmax"])
def test_the_same_seed_gives_the_same_text_alone_in_a_batch_and_after_a_reload(talker, name, tmp_path):
    plan = CausalDecoding.preset(name, seed=[7, 8, 9])
    together = talker.generate(**encode(talker, PROMPTS), max_new_tokens=12, causal_decoding=plan)
    talker.save_pretrained(tmp_path)
    again = type(talker).from_pretrained(tmp_path)
    for row, prompt in enumerate(PROMPTS):
        own = CausalDecoding.preset(name, seed=7 + row)
        for model in (talker, again):
            alone = model.generate(**encode(model, [prompt]), max_new_tokens=12, causal_decoding=own)
            assert torch.equal(alone.sequences[0, -12:], together.sequences[row, -12:])
            values, of_row = alone.numeric_values[0, -12:], together.numeric_values[row, -12:]
            torch.testing.assert_close(values, of_row, rtol=1e-4, atol=1e-4)


def test_returned_sequence_j_uses_the_seed_plus_j(talker):
    inputs = encode(talker, PROMPTS[:2])
    plan = CausalDecoding.preset("causal", seed=20)
    made = talker.generate(**inputs, max_new_tokens=10, num_return_sequences=3, causal_decoding=plan)
    assert made.sequences.shape[0] == 6
    for copy in range(3):
        plan = CausalDecoding.preset("causal", seed=20 + copy)
        own = talker.generate(**inputs, max_new_tokens=10, causal_decoding=plan)
        assert torch.equal(made.sequences[copy::3], own.sequences)


def test_without_a_seed_torchs_generator_decides(talker):
    plan, texts = CausalDecoding.preset("causal"), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(talker.generate(**encode(talker, PROMPTS[:1]), max_new_tokens=10, causal_decoding=plan).sequences)
    assert torch.equal(texts[0], texts[1]) and not torch.equal(texts[0], texts[2])


def test_temperature_zero_draws_nothing_and_leaves_the_whole_law():
    """The documents call T = 0 the non-sampling mode, but their scale lacks the noise (inference 3)."""
    law = get_family("cauchy")
    plan = CausalDecoding.preset("noise", temperature=0.0, seed=1)
    loc, scale, noise = torch.randn(1, 1, 4), torch.rand(1, 1, 4), torch.full((4,), 0.3)
    drawn = BoundDecoding.bind(plan, 1, 4, torch.device("cpu")).at(torch.zeros(1, 1, dtype=torch.long))
    assert torch.equal(drawn.move(loc, scale, noise, law), loc)
    whole = law.add(scale, noise.expand_as(scale))
    torch.testing.assert_close(drawn.left(scale, noise, law, whole=True), whole)
    of_the_documents = drawn.left(scale, noise, law)
    assert torch.equal(of_the_documents, scale) and not torch.equal(of_the_documents, whole)


# ---- individuals -----------------------------------------------------------------------------------------------------


def test_an_individual_can_be_kept_and_given_to_another_prompt(talker, tmp_path):
    individual = Individual.from_seed(4, talker.config.causal_size)
    individual.save(tmp_path / "someone.safetensors")
    kept = Individual.load(tmp_path / "someone.safetensors")
    assert torch.equal(kept.factor, individual.factor) and kept.name == "seed 4" and "32 coordinates" in str(kept)

    def written(prompts, plan):
        return talker.generate(**encode(talker, prompts), max_new_tokens=12, causal_decoding=plan).sequences[:, -12:]

    for prompt in PROMPTS[:2]:
        by_seed = written([prompt], CausalDecoding.preset("shared-individual", seed=4))
        assert torch.equal(written([prompt], CausalDecoding(individual=kept)), by_seed)
    two = CausalDecoding(individual=[Individual.from_seed(5, talker.config.causal_size), kept])
    assert torch.equal(written(PROMPTS[:2], two)[1], by_seed[0])


def test_individuals_that_do_not_fit_are_refused(talker, tmp_path):
    inputs, small, text = encode(talker, PROMPTS[:2]), Individual.from_seed(1, 8), Observation("It was 5")
    for asked in (
        lambda: talker.generate(**inputs, causal_decoding=CausalDecoding(individual=small), max_new_tokens=2),
        lambda: talker.predict_number("It was", individual=small),
        lambda: talker.abduct(text, prior=small),
        lambda: talker.counterfactual_samples(text, Intervention("It is"), individual=small),
    ):
        with pytest.raises(ValueError, match="does not fit a model whose causal size is 32"):
            asked()
    three = (
        CausalDecoding(individual=[Individual.from_seed(1, 32)] * 3),
        CausalDecoding.preset("causal", seed=[1, 2, 3]),
    )
    for plan, counted in zip(three, ("individuals", "seeds"), strict=True):
        with pytest.raises(ValueError, match=f"3 {counted} for 2 prompts"):
            talker.generate(**inputs, causal_decoding=plan, max_new_tokens=2)
    for bad in (torch.tensor([0.0, 0.5]), torch.rand(2, 2)):
        with pytest.raises(ValueError, match="individual"):
            Individual(bad)
    (tmp_path / "x").write_text("nothing")
    with pytest.raises(ValueError, match="not a safetensors file"):
        Individual.load(tmp_path / "x")


# ---- transformers' own generation ------------------------------------------------------------------------------------


def test_greedy_search_on_text_is_the_backbones(tiny, family):
    tiny.generation_config.eos_token_id = None
    inputs = encode(tiny, PROMPTS[1:2])
    plain = {k: v for k, v in inputs.items() if k != "numeric_values"}
    theirs = tiny.backbone.generate(**plain, max_new_tokens=20, do_sample=False, eos_token_id=None,
                                    suppress_tokens=tiny.config.free_token_ids or None)  # fmt: skip
    ours = tiny.generate(**inputs, max_new_tokens=20, do_sample=False)
    standard = tiny.generate(**inputs, max_new_tokens=20, causal_decoding=CausalDecoding.preset("standard"))
    if tiny.config.num_token_id in theirs:  # a random backbone may choose the row that has become <NUM>
        end = (theirs[0] == tiny.config.num_token_id).nonzero()[0].item() + 1
        theirs, ours, standard.sequences = theirs[:, :end], ours[:, :end], standard.sequences[:, :end]
    assert torch.equal(ours, theirs) and torch.equal(standard.sequences, theirs)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("sampler", [{"top_k": 20}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.8, "temperature": 0.7}])
def test_softmax_draws_the_backbones_own_tokens(tiny_llama, rows, sampler):
    """`<NUM>` stands behind the matrix here, and still the draws of the backbone are not disturbed."""
    tiny_llama.generation_config.eos_token_id = None
    with torch.no_grad():
        tiny_llama.action.num_bias -= 30.0  # text without numbers
    inputs = encode(tiny_llama, ["A new year", "We, the people", "Yes"][:rows])
    plain = {k: v for k, v in inputs.items() if k != "numeric_values"}
    torch.manual_seed(7)
    theirs = tiny_llama.backbone.generate(**plain, max_new_tokens=16, do_sample=True, eos_token_id=None, **sampler)
    plan = CausalDecoding.preset("softmax", seed=7)
    state = torch.get_rng_state()
    ours = tiny_llama.generate(**inputs, max_new_tokens=16, causal_decoding=plan, output_scores=True, **sampler)
    assert torch.equal(ours.sequences, theirs)
    assert torch.equal(torch.get_rng_state(), state), "a seeded plan must leave torch's generator alone"
    assert len(ours.scores) == 16 and not torch.isnan(ours.scores[0]).any()
    torch.manual_seed(7)
    assert torch.equal(tiny_llama.generate(**inputs, max_new_tokens=16, do_sample=True, **sampler), theirs)


def test_the_race_draws_num_with_its_softmax_probability():
    """And takes it where a sampler leaves nothing else."""
    torch.manual_seed(0)
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.0, 0.5], [-torch.inf] * 4 + [2.0], [0.0] * 4 + [-torch.inf]])
    for row in logits:  # the last column is <NUM>
        drawn = SamplerBesideNumber()(None, row.expand(100_000, -1)).argmax(-1)
        counts, p = torch.bincount(drawn, minlength=5).double(), row.double().softmax(-1)
        assert not counts[p == 0].any()
        assert p.max() == 1 or stats.chisquare(counts[p > 0], p[p > 0] * len(drawn)).pvalue > 1e-3


@pytest.mark.parametrize("sampler", [{"top_p": 0.9}, {"top_k": 1}, {"min_p": 0.5}])
def test_samplers_that_leave_num_alone_take_it(talker, sampler):
    """P_NUM = 0.95: the nucleus of 0.9 is `<NUM>`."""
    inputs = talker.processor("They say that it is", prompt=True, return_tensors="pt")
    logits = talker(**inputs).logits[0, -1]
    with torch.no_grad():
        rest, number = logits[:-1].logsumexp(-1), logits[-1]
        talker.action.num_bias += rest - number + math.log(0.95 / 0.05)
    for seed in range(20):
        plan = CausalDecoding.preset("softmax", seed=seed)
        made = talker.generate(**inputs, causal_decoding=plan, max_new_tokens=1, **sampler)
        assert made.sequences[0, -1] == talker.config.num_token_id


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("preset", ["persona", "individual-only", "causal"])
def test_a_plan_that_leaves_no_scale_spoils_nothing_for_later_ones(tiny_tokenizer, preset, noise):
    texts = []
    for first in (None, preset):
        model = graft_tiny("llama", tiny_tokenizer, start="minimal", initial_noise=noise)
        inputs = model.processor("They say that it is", prompt=True, return_tensors="pt")
        for name in (first, "standard"):
            if name is not None:
                plan = CausalDecoding.preset(name, seed=3)
                made = model.generate(**inputs, causal_decoding=plan, max_new_tokens=12, eos_token_id=None)
        texts.append(made.sequences)
    assert torch.equal(*texts)


@pytest.mark.parametrize("context", ["value", "digits", "both"])
def test_beam_search_carries_the_values_of_its_beams(tiny_tokenizer, context):
    talker = eager(graft_tiny("llama", tiny_tokenizer, number_context=context))
    inputs = encode(talker, PROMPTS)
    beams = {"max_new_tokens": 12, "num_beams": 4, "do_sample": False}
    told = beams | {"num_return_sequences": 2, "return_dict_in_generate": True}
    made = talker.generate(**inputs, **told)
    assert made.sequences.shape == made.numeric_values.shape and made.sequences.shape[0] == 6
    is_num = made.sequences == talker.config.num_token_id
    assert is_num.any() and (made.numeric_values[~is_num] == 0).all()
    for row in range(6):  # every generated value is what the model predicts after the tokens and values before it
        prompt = inputs["input_ids"][row // 2]
        pad = int((inputs["attention_mask"][row // 2] == 0).sum())
        ids, values = made.sequences[row, pad:], made.numeric_values[row, pad:]
        with torch.no_grad():
            out = talker(ids[None], numeric_values=values[None])
        predicted = round_significant(talker.value_transform.inverse(out.loc_Y[0]), talker.config.value_digits)
        for place in is_num[row, pad:].nonzero().flatten().tolist():
            if place >= len(prompt) - pad:
                assert values[place].item() == pytest.approx(predicted[place - 1].item(), rel=1e-4)
                if context != "value":
                    digits = talker.processor.tokens_of(ids[:place].tolist(), values[place].item())
                    assert ids[place + 1 : place + 1 + len(digits)].tolist() == digits[: len(ids) - place - 1]
    assert torch.equal(talker.generate(**inputs, **beams), made.sequences[::2])
    alone = talker.generate(**inputs, **told, use_cache=False)
    assert torch.equal(alone.sequences, made.sequences)
    torch.testing.assert_close(alone.numeric_values, made.numeric_values, rtol=1e-4, atol=0)  # the last of six digits


def test_transition_scores_count_the_column_of_num(talker):
    """transformers derives them from `vocab_size` of the configuration; `<NUM>` stands behind the matrix here."""
    assert talker.config.num_token_appended
    inputs, told = encode(talker, PROMPTS[:1]), {"return_dict_in_generate": True, "output_scores": True}
    made = talker.generate(**inputs, max_new_tokens=8, do_sample=False, **told)
    found = talker.compute_transition_scores(made.sequences, made.scores, normalize_logits=True)
    start = inputs["input_ids"].shape[1]
    for step, scores in enumerate(made.scores):
        expected = scores.log_softmax(-1)[0, made.sequences[0, start + step]]
        torch.testing.assert_close(found[0, step], expected)


@pytest.mark.parametrize("context", ["value", "digits", "both"])
def test_generation_without_a_cache_and_with_a_static_one_is_the_same(tiny_tokenizer, context):
    talker = eager(graft_tiny("llama", tiny_tokenizer, number_context=context))
    talker.config.value_digits = 3  # the last of six digits may round either way in float32
    inputs = encode(talker, PROMPTS)
    plan = CausalDecoding.preset("persona", seed=3)
    made = talker.generate(**inputs, max_new_tokens=10, causal_decoding=plan)
    for setting in ({"use_cache": False}, {"cache_implementation": "static", "disable_compile": True}):
        other = talker.generate(**inputs, max_new_tokens=10, causal_decoding=plan, **setting)
        assert torch.equal(other.sequences, made.sequences), setting
        torch.testing.assert_close(other.numeric_values, made.numeric_values, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_compiled_decoding_steps_over_a_static_cache_write_the_same_text(talker, backend):
    inputs = encode(talker, PROMPTS)
    for plan in (None, CausalDecoding.preset("standard"), CausalDecoding.preset("persona", seed=3)):
        settings = {"max_new_tokens": 10, "do_sample": None if plan else False, "return_dict_in_generate": True}
        made = talker.generate(**inputs, **settings, causal_decoding=plan)
        other = talker.generate(**inputs, **settings, causal_decoding=plan, **compiled_steps(backend))
        assert hasattr(talker, "_compiled_call") and torch.equal(other.sequences, made.sequences)
        torch.testing.assert_close(other.numeric_values, made.numeric_values, rtol=1e-4, atol=1e-4)


def test_streamers_write_numbers_as_they_come(talker, capsys):
    plan, prompt = CausalDecoding.preset("standard"), "It is 1,272 and"
    inputs, streamer = encode(talker, [prompt]), NumberTextStreamer(talker.processor)
    made = talker.generate(**inputs, max_new_tokens=12, causal_decoding=plan, streamer=streamer)
    text = talker.processor.decode(made.sequences[0], made.numeric_values[0])
    assert capsys.readouterr().out.rstrip("\n") == text.replace("1,272", "1272")
    queue = NumberTextIteratorStreamer(talker.processor, skip_prompt=True)
    talker.generate(**inputs, max_new_tokens=12, causal_decoding=plan, streamer=queue)
    assert "".join(queue) == text[len(prompt) :]
    talker.generate(**inputs, max_new_tokens=4, streamer=TextStreamer(talker.processor))
    assert "<NUM>" in capsys.readouterr().out


@pytest.mark.parametrize("kind", [NumberTextStreamer, NumberTextIteratorStreamer])
def test_streamers_go_on_behind_the_end_of_a_line(talker, capsys, kind):
    """Behind one, transformers decodes the last token alone, as a number and not as a list of one."""
    text = "It was here\n and so on\n\nnot there"
    ids = talker.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
    streamer = kind(talker.processor)
    streamer.begin(None)
    for token in ids:
        streamer.put(torch.tensor([token]))
    streamer.end()
    told = "".join(streamer) if kind is NumberTextIteratorStreamer else capsys.readouterr().out.removesuffix("\n")
    assert told == talker.processor.tokenizer.decode(ids) and told.count("\n") > 1


def test_stop_strings_and_stopping_criteria_end_a_text(talker):
    inputs = encode(talker, PROMPTS[1:2])
    plan = CausalDecoding.preset("standard")
    whole = talker.generate(**inputs, max_new_tokens=20, causal_decoding=plan)
    start = inputs["input_ids"].shape[1]
    later = [token for token in whole.sequences[0, start + 4 :].tolist() if token != talker.config.num_token_id]
    stop = {"stop_strings": [next(filter(str.isalpha, map(talker.processor.tokenizer.decode, later)))]}
    cut = talker.generate(**inputs, max_new_tokens=20, causal_decoding=plan, tokenizer=talker.processor, **stop)
    assert cut.sequences.shape[1] < whole.sequences.shape[1]
    assert torch.equal(cut.sequences, whole.sequences[:, : cut.sequences.shape[1]])

    class AfterFive(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((input_ids.shape[0],), input_ids.shape[1] >= start + 5)

    criteria = StoppingCriteriaList([AfterFive()])
    five = talker.generate(**inputs, max_new_tokens=20, causal_decoding=plan, stopping_criteria=criteria)
    assert five.sequences.shape[1] == start + 5


def test_requests_that_are_drawn_together_draw_as_each_alone():
    """As the plug-in of vLLM does at every step: rows stand at places of their own, and go on, jump or begin anew."""

    def bound(seed):
        return BoundDecoding.bind(CausalDecoding.preset("causal", seed=seed), 1, 16, torch.device("cpu"))

    company = Company.of([SimpleNamespace(bound=bound(seed)) for seed in (3, 4, 5)])
    law = get_family("gaussian")
    for step in range(40):
        places = torch.tensor([[step], [2 * step], [7 + step % 5]])
        for stream in (INDIVIDUAL_STREAM, NOISE_STREAM):
            together = company.read(stream, "token", places, law)
            rows = zip((3, 4, 5), places.split(1), strict=True)
            alone = [bound(seed).read(stream, "token", row, law) for seed, row in rows]
            assert torch.equal(together, torch.cat(alone))


def test_draws_are_made_ahead_from_the_second_on_and_are_those_of_their_position(monkeypatch):
    """Whoever asks once may want no more; whoever goes on has 32 at once; rows may stand and jump as they like."""
    bound = BoundDecoding.bind(CausalDecoding.preset("causal", seed=3), 2, 16, torch.device("cpu"), copies=2)
    made, draw = [], bound._draw
    monkeypatch.setattr(bound, "_draw", lambda stream, at: made.append(at.shape[1]) or draw(stream, at))
    law = get_family("gaussian")
    places = [(5, 9), (6, 10), *((6 + step, 10 + step) for step in range(1, 32)), (38, 42), (39, 40), (40, 41), (2, 3)]
    for pair in places:
        at = torch.tensor(pair)
        found = bound.read(INDIVIDUAL_STREAM, "token", at.unsqueeze(1), law)[:, 0]
        own = law.quantile(uniform_draws(torch.tensor([3, 4]), INDIVIDUAL_STREAM, at, 16))
        assert torch.equal(found, own.to(torch.float32)), pair
    assert made == [1, 32, 32, 32, 32]


def test_chat_prompts_generate(talker):
    messages = [{"role": "user", "content": "How much is 5?"}]
    inputs = talker.processor.apply_chat_template(
        [messages], tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
    )
    made = talker.generate(**inputs, max_new_tokens=5, causal_decoding=CausalDecoding.preset("causal", seed=1))
    assert made.sequences.shape[1] == inputs["input_ids"].shape[1] + 5


# ---- what is refused -------------------------------------------------------------------------------------------------


TAKES = "have no meaning under this plan. A plan that draws .the preset 'sample'.* takes temperature, .* 'softmax' all"


NARROWING = [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}]
REFUSED = [
    *itertools.product(
        ["faithful"], ["causal", "sample"], [{"do_sample": True}, {"num_beams": 2}, {"typical_p": 0.5}], [TAKES]
    ),
    *itertools.product(["faithful"], ["standard"], [{"temperature": 0.5}, *NARROWING], [TAKES]),
    *itertools.product(["faithful"], ["causal"], NARROWING, ["own='token'"]),
    *itertools.product(["documents"], ["sample"], NARROWING, ["needs score_scale='common'.*'softmax'"]),
]


@pytest.mark.parametrize(("start", "preset", "argument", "message"), REFUSED)
def test_arguments_of_samplers_that_a_plan_does_not_take_are_refused(tiny_tokenizer, start, preset, argument, message):
    model = graft_tiny("llama", tiny_tokenizer, start=start)
    inputs, plan = encode(model, PROMPTS[:1]), CausalDecoding.preset(preset)
    for by in (argument, {"generation_config": GenerationConfig(max_new_tokens=2, **argument)}):
        with pytest.raises(ValueError, match=f"{next(iter(argument))}.*{message}"):
            model.generate(**inputs, causal_decoding=plan, **by)


@pytest.mark.parametrize("argument", [{"temperature": 0.3}, {"top_k": 1}, {"top_p": 0.01, "temperature": 0.9}], ids=str)
def test_what_a_sampler_is_given_is_the_plans_own(talker, argument):
    inputs = encode(talker, PROMPTS[:1])
    of_plan, given = CausalDecoding(own="token", seed=3, **argument), CausalDecoding(own="token", seed=3)
    made = talker.generate(**inputs, causal_decoding=given, max_new_tokens=12, **argument)
    assert torch.equal(talker.generate(**inputs, causal_decoding=of_plan, max_new_tokens=12).sequences, made.sequences)
    config = GenerationConfig(max_new_tokens=12, **argument)
    by_config = talker.generate(**inputs, causal_decoding=given, generation_config=config)
    assert torch.equal(by_config.sequences, made.sequences)
    config.update(temperature=0.1, top_k=3, top_p=0.2)
    unasked = dict.fromkeys(("temperature", "top_k", "top_p")) | argument
    by_name = talker.generate(**inputs, causal_decoding=given, generation_config=config, **unasked)
    assert torch.equal(by_name.sequences, made.sequences)
    if "temperature" not in argument or "top_p" in argument:  # nothing but the likeliest is left
        greedy = talker.generate(**inputs, causal_decoding="standard", max_new_tokens=12)
        assert torch.equal(made.sequences, greedy.sequences)


def test_an_argument_stands_over_the_configurations_own(talker):
    """As pipelines of older transformers call it, which bring a configuration that samples."""
    inputs, plan = encode(talker, PROMPTS[:1]), CausalDecoding.preset("causal", seed=1)
    config = GenerationConfig(max_new_tokens=4, do_sample=True)
    said = talker.generate(**inputs, generation_config=config, causal_decoding=plan, do_sample=False)
    assert torch.equal(said.sequences, talker.generate(**inputs, max_new_tokens=4, causal_decoding=plan).sequences)


def test_a_models_own_sampling_defaults_do_not_stand_in_the_way(talker):
    """Nor a copy of them with another length."""
    inputs, plans = encode(talker, PROMPTS), [CausalDecoding(own=own, seed=1) for own in ("marginal", "token")]
    wanted = [talker.generate(**inputs, max_new_tokens=6, causal_decoding=plan).sequences for plan in plans]
    talker.generation_config.update(do_sample=True, temperature=0.7, top_k=20, top_p=0.8)
    config = deepcopy(talker.generation_config)
    config.max_new_tokens = 6
    for plan, expected in zip(plans, wanted, strict=True):
        for length in ({"max_new_tokens": 6}, {"generation_config": config}):
            assert torch.equal(talker.generate(**inputs, causal_decoding=plan, **length).sequences, expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"individual": "everybody"}, "unknown individual mode"),
        ({"noise": "loud"}, "unknown noise mode"),
        ({"decision": "coin"}, "unknown decision"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": math.inf}, "the temperature must be a finite number from 0 on, got inf"),
        ({"temperature": True}, "the temperature must be a finite number from 0 on, got True"),
        ({"individual": 7}, "individual: expected a mode, one Individual, or a list of them, got 7"),
        ({"individual": []}, "individual: expected a mode, one Individual"),
        ({"individual": "token", "own": [1]}, "own: expected a mode, one ObservedNoise"),
        ({"own": "sequence"}, "unknown own mode 'sequence'; use one of marginal, token"),
        ({"own": "token", "decision": "loc"}, "leave `decision` at 'ovr'"),
        ({"own": "token", "top_k": 0}, "top_k must be a whole number from 1 on, got 0"),
        ({"own": "token", "top_k": True}, "top_k must be a whole number from 1 on, got True"),
        ({"own": "token", "top_p": 1.5}, r"top_p must lie in \[0, 1\], got 1.5"),
        ({"own": "token", "min_p": "most"}, r"min_p must lie in \[0, 1\], got 'most'"),
        ({"top_p": 0.9}, "this plan runs none: use own='token'"),
        ({"decision": "softmax", "noise": "token"}, "draws neither"),
        ({"seed": 2**63}, r"a seed is a whole number from -2\^63 to 2\^63 - 1, not 9223372036854775808"),
        ({"seed": [1, 2.5]}, "a seed is a whole number .*, not 2.5"),
    ],
)
def test_impossible_plans_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        CausalDecoding(**arguments)


def test_generated_numbers_are_values_of_the_support(talker):
    support = {"low": 0.0, "high": 42.5, "step": 2.5}
    talker.config.value_transform = {"kind": "affine", "center": 40.0, "width": 7.0, "support": support}
    loc = torch.tensor([-20.0, -0.31, 0.2, 9.0])
    assert talker.generated_values(loc).tolist() == [0.0, 37.5, 42.5, 42.5]
    plan = CausalDecoding.preset("causal", seed=1)
    out = talker.generate(**encode(talker, PROMPTS), max_new_tokens=12, causal_decoding=plan)
    start = encode(talker, PROMPTS)["input_ids"].shape[1]
    made = out.numeric_values[:, start:][out.sequences[:, start:] == talker.config.num_token_id]
    assert len(made) > 3 and bool((made % 2.5 == 0).all()) and made.min() >= 0 and made.max() <= 42.5


def test_softmax_at_temperature_zero_takes_the_likeliest(talker):
    inputs = encode(talker, PROMPTS[:1])
    greedy = talker.generate(**inputs, max_new_tokens=8, do_sample=False)
    plan = CausalDecoding.preset("softmax", temperature=0.0, seed=2**63 - 1)
    assert torch.equal(talker.generate(**inputs, max_new_tokens=8, causal_decoding=plan).sequences, greedy)


def test_bad_prompts_are_refused(talker):
    ids = torch.full((1, 300), 5)
    with pytest.raises(ValueError, match="300 tokens, but the context of this model holds 256"):
        talker.generate(ids)
    with pytest.raises(ValueError, match="prompt is empty"):
        talker.generate(ids[:, :0])
    inputs = encode(talker, PROMPTS[:1])
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        talker.generate(ids[:, :4].repeat(2, 1), attention_mask=torch.tensor([[1] * 4, [0] * 4]))
    for given in ({}, 3):
        with pytest.raises(ValueError, match="causal_decoding: expected a CausalDecoding or a preset's name"):
            talker.generate(ids[:, :4], causal_decoding=given)
    with pytest.raises(ValueError, match="causal_decoding: expected a CausalDecoding, got 'causal'"):
        talker(ids[:, :4], causal_decoding="causal")
    with pytest.raises(ValueError, match="unknown preset 'casual'; known presets: standard, causal"):
        CausalDecoding.preset("casual")
    with pytest.raises(ValueError, match="unknown field temprature of a plan; did you mean temperature"):
        CausalDecoding.preset("causal", temprature=0.5)
    with pytest.raises(ValueError, match="they must agree"):
        talker.generate(inputs["input_ids"], numeric_values=inputs["numeric_values"][:, 1:])
    inputs["numeric_values"][inputs["numeric_values"] != 0] = torch.inf
    with pytest.raises(ValueError, match=r"row 0: the number at position \d+ is not finite"):
        talker.generate(**inputs)
    with pytest.raises(ValueError, match="prefill_chunk_size"):
        talker.generate(inputs["input_ids"], prefill_chunk_size=2)
    with pytest.raises(ValueError, match="one seed, not one per row"):
        talker.generate(inputs["input_ids"], causal_decoding=CausalDecoding.preset("softmax", seed=[1]))


# ---- drafts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", [None, "standard", "causal", "persona", "sample", "shared-noise"])
@pytest.mark.parametrize(
    ("family", "context"), [("qwen2", "value"), ("llama", "value"), ("llama", "digits"), ("qwen2", "both")]
)
def test_drafts_from_the_text_itself_change_no_token_and_no_value(tiny_tokenizer, family, context, preset):
    """Prompt lookup: several tokens per step where the text repeats itself, numbers among them."""
    model = eager(graft_tiny(family, tiny_tokenizer, number_context=context))
    model.config.value_digits = 3  # the last of six digits may round either way in float32
    with torch.no_grad():
        model.action.num_bias += 2.0  # numbers now and then
    prompt = encode(model, ["one two 5 one two 5 one two"])
    plan = {} if preset is None else {"causal_decoding": CausalDecoding.preset(preset, seed=5)}
    settings = {"max_new_tokens": 24, "do_sample": None if plan else False, "return_dict_in_generate": True}
    plain = model.generate(**prompt, **settings, **plan)
    drafted = model.generate(**prompt, **settings, **plan, prompt_lookup_num_tokens=4)
    assert torch.equal(plain.sequences, drafted.sequences)
    torch.testing.assert_close(plain.numeric_values, drafted.numeric_values, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("context", ["value", "digits", "both"])
def test_a_draft_knows_the_value_of_the_number_behind_it(tiny_tokenizer, context):
    """A value near 40 may follow a month, and one below 32, which would make a date of it, may not."""
    model = eager(graft_tiny("llama", tiny_tokenizer, number_context=context))
    with torch.no_grad():
        model.action.num_bias += 20.0
    prompt, settings = encode(model, ["In January In January"]), {"max_new_tokens": 6, "return_dict_in_generate": True}
    plain = model.generate(**prompt, **settings, do_sample=False)
    drafted = model.generate(**prompt, **settings, do_sample=False, prompt_lookup_num_tokens=3)
    start = prompt["input_ids"].shape[1]
    assert plain.sequences[0, start] == model.config.num_token_id and plain.numeric_values[0, start] > 32
    assert torch.equal(drafted.sequences, plain.sequences)
    assert not model._forward_hooks


def test_drafts_that_cannot_be_checked_are_refused(tiny_llama):
    prompt = encode(tiny_llama, PROMPTS[:1])
    with pytest.raises(ValueError, match="an assistant model cannot read"):
        tiny_llama.generate(**prompt, assistant_model=tiny_llama, max_new_tokens=4, do_sample=False)
    with pytest.raises(ValueError, match="checked against one decision"):
        tiny_llama.generate(**prompt, prompt_lookup_num_tokens=3, max_new_tokens=4, do_sample=True)
