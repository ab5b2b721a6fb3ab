"""Copying: a number of the context comes back exactly."""

import dataclasses
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from causalqwen import CausalQwenForCausalLM, Individual, Intervention, Observation, Population, Question
from causalqwen.data import Row, encode_rows
from causalqwen.data.encoding import collate
from causalqwen.data.synthetic import choices
from causalqwen.decoding import Observed
from causalqwen.evaluation.predict import predict_rows
from causalqwen.modeling.chain import Chain
from causalqwen.modeling.prediction import CopiedNumberPrediction
from causalqwen.numbers import ValueLaw, ValueTransform, find_numbers
from causalqwen.parts.copying import CopyLaw
from causalqwen.training import FactStore, TrainSettings, ValueStage, score_tokens, train
from causalqwen.training.batches import FactRows, collate_tokens
from causalqwen.training.features import COLUMNS, facts_key, stream_facts
from causalqwen.training.trainer import TrainedForCausalLM
from conftest import graft_tiny
from test_generation import PROMPTS, eager, encode

CONTEXTS = ["value", "digits", "both"]
TEXTS = [
    "3 stands first, then 12.5 and 12.5 and -7; so 12.5 again, or 1,000",
    "no number",
    "a is 5 and b is 5",
    "7",
    "Of 20 it is 21 or 20",
]


def random_head(model: CausalQwenForCausalLM) -> CausalQwenForCausalLM:
    """A copy head that prefers some numbers to others, and values of some size."""
    torch.manual_seed(7)
    torch.nn.init.normal_(model.copy_head.query.weight, std=0.3)
    torch.nn.init.normal_(model.copy_head.new.weight, std=0.05)
    torch.nn.init.normal_(model.action.value_head.weight, std=0.3)
    model.copy_head.bias.data.fill_(0.3)
    return model


@pytest.fixture(params=CONTEXTS)
def copier(request, tiny_tokenizer) -> CausalQwenForCausalLM:
    return random_head(graft_tiny("llama", tiny_tokenizer, copy_numbers=True, number_context=request.param))


def examples_of(model: CausalQwenForCausalLM, texts=TEXTS) -> list:
    return encode_rows([Row("text", str(i), {"text": text}) for i, text in enumerate(texts)], model.processor)


# ---- the law ---------------------------------------------------------------------------------------------------------


@st.composite
def laws(draw):
    """A law of each kind, its loc and scale, and its weights as floats."""
    kind = draw(st.sampled_from(["identity", "affine", "symlog", "quantile"]))
    family = draw(st.sampled_from(["cauchy", "gaussian"]))
    levels = draw(st.sampled_from([None, tuple((np.linspace(0, 1, 101) ** 2 * 0.999).tolist())]))
    known = torch.tensor([-4.0, 0, 0, 0, 1, 2.5, 7, 19], dtype=torch.float64)
    law = ValueLaw(ValueTransform.fit(kind, known), family, (-4.0, 19.0), levels)
    values = draw(st.lists(st.sampled_from([-30.0, -3.0, 0.0, 1.0, 1.25, 2.5, 90.0]), min_size=0, max_size=5))
    scores = draw(st.lists(st.floats(-4, 4), min_size=len(values) + 1, max_size=len(values) + 1))
    log_pi = torch.tensor(scores, dtype=torch.float64).log_softmax(-1)
    loc, scale = (torch.tensor(draw(st.floats(*ends)), dtype=torch.float64) for ends in ((-2, 2), (0.05, 3)))
    return CopyLaw(law, torch.tensor(values, dtype=torch.float64), log_pi), loc, scale


def slow_cdf(found: CopyLaw, loc, scale, y: float, raw: bool) -> float:
    """F(y), number by number; the recalibrated F_0 by reading its levels backwards."""
    of_new = found.of_new.cdf(loc, scale, torch.tensor(y, dtype=torch.float64)).item()
    if not raw and found.of_new.interval_levels is not None:
        central = np.interp(abs(2 * of_new - 1), found.of_new.interval_levels, np.linspace(0, 1, 101))
        of_new = 0.5 + 0.5 * math.copysign(central, of_new - 0.5)
    pairs = zip(found.candidates.tolist(), found.log_weights[1:].tolist(), strict=True)
    return sum(math.exp(w) for v, w in pairs if v <= y) + math.exp(found.log_weights[0]) * of_new


@settings(max_examples=60)
@given(laws(), st.sampled_from([0.05, 0.3, 0.5, 0.77, 0.95]), st.booleans())
def test_quantiles_are_the_least_value_that_reaches_the_level(law, p, raw):
    found, loc, scale = law
    exact = found.quantile(loc, scale, p, raw=raw).item()
    low, high = -1e9, 1e9
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (low, middle) if slow_cdf(found, loc, scale, middle, raw) >= p else (middle, high)
    near = 1e-5 * (1 + abs(exact))
    ends = (slow_cdf(found, loc, scale, y, raw) for y in (exact - near, exact + near))
    # Where F is all but flat at p, any of these values reaches it within the last digits of p.
    assert abs(exact - high) <= near or all(abs(end - p) < 1e-7 for end in ends)
    low, high = found.interval(loc, scale, 0.6, raw=raw)
    assert low == found.quantile(loc, scale, 0.2, raw=raw) and high == found.quantile(loc, scale, 0.8, raw=raw)


@settings(max_examples=30)
@given(laws())
def test_without_weight_on_a_number_the_law_is_that_of_a_new_one(law):
    found, loc, scale = law
    nobody = dataclasses.replace(found, log_weights=torch.full_like(found.log_weights, -torch.inf))
    nobody.log_weights[0] = 0.0
    value = torch.tensor(0.7, dtype=torch.float64)
    for name, argument in {"quantile": 0.3, "cdf": value, "log_prob": value, "quantile_crps": value}.items():
        ours, theirs = (getattr(one, name)(loc, scale, argument) for one in (nobody, found.of_new))
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_scores_of_a_mixture_that_is_known():
    """Three quarters on 10, the rest N(0, 1)."""
    weights = torch.tensor([0.25, 0.5, 0.25], dtype=torch.float64)
    law = CopyLaw(ValueLaw(family="gaussian"), torch.tensor([10.0, 10.0], dtype=torch.float64), weights.log())
    zero, one, ten = (torch.tensor(x, dtype=torch.float64) for x in (0.0, 1.0, 10.0))
    assert law.quantile(zero, one, 0.5) == 10 and law.copied()[0] and law.copied()[1] == 10
    assert law.log_prob(zero, one, ten).exp().item() == pytest.approx(0.75)
    assert law.log_prob(zero, one, zero).item() == pytest.approx(math.log(0.25) - 0.5 * math.log(2 * math.pi))
    assert law.cdf(zero, one, torch.tensor(9.0, dtype=torch.float64)).item() == pytest.approx(0.25)
    draws = torch.where(torch.rand(20_000, dtype=torch.float64) < 0.75, ten, torch.randn(20_000, dtype=torch.float64))
    spread = (draws[:10_000] - draws[10_000:]).abs().mean() / 2
    assert law.crps(zero, one, ten).item() == pytest.approx(((draws - 10).abs().mean() - spread).item(), abs=0.1)


# ---- the head and the loss -------------------------------------------------------------------------------------------


def slow_loss(model: CausalQwenForCausalLM, example) -> torch.Tensor:
    """Sum over the numbers of one text, each with its own forward pass over what stands before it."""
    total = torch.zeros((), dtype=torch.float64)
    num, head = model.config.num_token_id, model.copy_head
    ids, values = example.input_ids, example.numeric_values

    def state(place: int) -> torch.Tensor:
        kwargs = {"numeric_values": torch.tensor([values[: place + 1]], dtype=torch.float64)}
        z = model.features(torch.tensor([ids[: place + 1]]), **kwargs).last_hidden_state[0, -1]
        return model.value_branch.standardize(z), z

    for place in range(1, len(ids)):
        if ids[place] != num:
            continue
        x, z = state(place - 1)
        query, scores, equal = head.query(x), [head.new(x).squeeze()], []
        for j in range(place):
            if ids[j] == num:
                x_j = state(max(j - 1, 0))[0]
                if j == 0 and model.config.context.hides:
                    x_j = model.value_branch.standardize(torch.zeros_like(z))
                key = head.key(x_j)
                scores.append((query * key).sum() / math.sqrt(len(key)) + head.bias)
                equal.append(values[j] == values[place])
        log_pi = torch.stack(scores).log_softmax(0)
        same = [log_pi[1 + j].exp() for j, is_it in enumerate(equal) if is_it]
        if same:
            total = total - sum(same).log()
        else:
            loc, scale = Chain(model, z).value()
            value = torch.tensor(values[place], dtype=torch.float64)
            total = total - log_pi[0] + model.value_law.axis_losses(loc, scale, value, model.config.value_loss)
    return total


@pytest.mark.parametrize("loss", ["nll", "crps"])
def test_the_loss_is_that_of_a_slow_loop_and_so_are_its_gradients(copier, loss):
    model = copier.double()
    model.config.value_loss = loss
    examples = examples_of(model)
    batch = collate(examples, 2)
    numbers = sum(e.input_ids[1:].count(model.config.num_token_id) for e in examples)
    got = model(**batch).loss_reg * numbers
    expected = sum(slow_loss(model, example) for example in examples)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
    parameters = [*model.copy_head.parameters(), model.action.value_head.weight, model.numeric_embedding.direction]
    ours, theirs = (torch.autograd.grad(total, parameters) for total in (got, expected))
    for one, other in zip(ours[:-1], theirs[:-1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(ours[-1], theirs[-1], rtol=1e-4, atol=1e-4)  # the backbone's norms work in float32


def test_what_is_copied_gives_the_value_head_no_gradient(copier):
    texts = ["a is 12.5. a is 12.5"]
    batch = collate(examples_of(copier, texts), 2)
    batch["numeric_labels"][0, : batch["input_ids"].shape[1] // 2] = math.nan
    copier(**batch).loss_reg.backward()
    assert not copier.action.value_head.weight.grad.any() and copier.copy_head.query.weight.grad.any()


@pytest.mark.parametrize(("family", "context"), [("llama", "value"), ("qwen2", "digits")])
def test_kept_features_give_the_loss_of_tokens(family, context, tiny_tokenizer, tmp_path):
    model = random_head(graft_tiny(family, tiny_tokenizer, copy_numbers=True, number_context=context))
    question = {"context": "It costs 3 or 4.5.", "question": "How much?", "answer": "some 4.5"}
    alike = ["a is 5. b is 6", "a is 5. b is 5", "a is 7. b is 5"]  # which share what stands before
    rows = examples_of(model, [*TEXTS, *alike]) + encode_rows([Row("question", "q", question)], model.processor)
    store = FactStore.build(model, rows, tmp_path)
    assert FactStore.build(model, rows, tmp_path).folder == store.folder
    trained, facts = TrainedForCausalLM(model), FactRows(store)
    for chosen in ([0, 2, 8], [1, 3], [4, 0, 1], [5], [6], [7]):
        of_facts = trained(**facts.collate(chosen))
        of_tokens = trained(**collate_tokens([rows[i] for i in chosen], 2))
        torch.testing.assert_close(of_facts["loss_reg"], of_tokens["loss_reg"], rtol=1e-4, atol=1e-5)
    streamed = score_tokens(model, (block for _, block in stream_facts(model, rows, tokens=60)))["metrics"]
    for blocks in (store.blocks(50), store.renewed(model, 50)):
        kept = score_tokens(model, blocks)["metrics"]
        assert kept["reg_loss"] == pytest.approx(streamed["reg_loss"], abs=1e-4)
        assert kept["copied"] == streamed["copied"] and kept["quantile_crps"] == pytest.approx(
            streamed["quantile_crps"], rel=1e-3
        )


def test_a_single_number_starts_with_a_twentieth(tiny_tokenizer):
    model = graft_tiny("llama", tiny_tokenizer, copy_numbers=True)
    (found,) = model.predict_number("Of 20 it is")
    assert found.candidates == [(20.0, pytest.approx(0.05, abs=1e-6))] and found.copied is None


def test_off_changes_nothing(tiny_tokenizer, tmp_path):
    """Neither weights nor kept facts nor predictions know of it; on, the parts that were there are the same."""
    plain, on = (graft_tiny("llama", tiny_tokenizer, copy_numbers=copy) for copy in (False, True))
    assert not any("copy" in name for name in plain.state_dict())
    assert {name for name in on.state_dict() if "copy" not in name} == set(plain.state_dict())
    assert all(torch.equal(tensor, on.state_dict()[name]) for name, tensor in plain.state_dict().items())
    rows = examples_of(plain)
    assert facts_key(on, rows) != facts_key(plain, rows)
    store = FactStore.build(plain, rows, tmp_path)
    assert store.facts.numbers is None and not list(store.folder.glob("number_*"))
    assert "candidates" not in FactRows(store).collate([0])
    kept = FactStore.build(on, rows, tmp_path / "on")
    assert kept.facts.numbers is not None
    assert all(
        np.array_equal(getattr(kept.facts, name), getattr(store.facts, name), equal_nan=True) for name in COLUMNS
    )
    assert "copied" not in score_tokens(plain, store.blocks())["metrics"]
    assert type(plain.predict_number("Of 20 it is")[0]).__name__ == "NumberPrediction"


def test_it_is_saved_and_comes_back(copier, tmp_path):
    copier.save_pretrained(tmp_path)
    loaded = CausalQwenForCausalLM.from_pretrained(tmp_path)
    prompt = "a is 12.5. b is 77.25. b is"
    (one,), (other,) = copier.predict_number(prompt), loaded.predict_number(prompt)
    assert one.candidates == other.candidates and one.median == other.median
    (tmp_path / "plain").mkdir()
    copier.config.copy_numbers, copier.copy_head = False, None
    copier.save_pretrained(tmp_path / "plain")
    started = CausalQwenForCausalLM.from_pretrained(tmp_path / "plain", copy_numbers=True)
    assert not started.copy_head.query.weight.any() and started.copy_head.key.weight.std() > 0.1
    assert started.copy_head.bias.item() == pytest.approx(math.log(1 / 19))


# ---- predictions -----------------------------------------------------------------------------------------------------


def test_a_batch_of_different_numbers_of_candidates_is_one_by_one(copier):
    prompts = [*TEXTS, "12 of"]
    together = copier.predict_number(prompts)
    for prompt, found in zip(prompts, together, strict=True):
        (alone,) = copier.predict_number(prompt)
        assert type(found) is type(alone) and isinstance(found, CopiedNumberPrediction) == any(
            c.isdigit() for c in prompt
        )
        assert found.median == pytest.approx(alone.median, rel=1e-3)
        if isinstance(found, CopiedNumberPrediction):
            assert [value for value, _ in found.candidates] == [value for value, _ in alone.candidates]
            assert [w for _, w in found.candidates] == pytest.approx([w for _, w in alone.candidates], abs=1e-4)
            assert found.cdf(1e9) == pytest.approx(1, abs=1e-4) and found.interval(0.5)[0] <= found.median
            assert "P_NUM" in str(found) and len({found, alone}) == 2 and found == dataclasses.replace(found)


def test_rows_of_files_are_predicted_by_the_mixture(copier):
    prompt, text = "a is 12.5. b is 77.25. b is", "a is 12.5. b is 77.25. b is 12.5"
    rows = [Row("prompt", "0", {"prompt": prompt, "value": 12.5}), Row("text", "1", {"text": text})]
    asked, read = predict_rows(copier, rows)
    (expected,) = copier.predict_number(prompt)
    assert asked["median"] == pytest.approx(expected.median) and asked["log_prob"] == pytest.approx(
        expected.log_prob(12.5)
    )
    assert read["numbers"][2]["log_prob"] == pytest.approx(expected.log_prob(12.5), abs=1e-4)
    (first,) = copier.predict_number("a is")
    assert read["numbers"][0]["median"] == pytest.approx(first.median, rel=1e-3)


def test_probabilities_are_those_of_new_numbers_and_of_copied_ones(copier):
    """Each value's is the jump of the mixture's own distribution there; a number of the context stands as it does."""
    support = {"low": 0.0, "high": 20.0, "step": 1.0}
    copier.config.value_transform = {"kind": "affine", "center": 10.0, "width": 4.0, "support": support}
    (found,) = copier.predict_number("a is 5. b is 12.5. c is")
    each = found.probabilities()
    assert set(each) == {*range(21), 12.5} and sum(each.values()) == pytest.approx(1)
    loc, scale = found._parameters()
    at = torch.tensor([*each], dtype=torch.float64)
    jumps = [(found.law.cdf(loc, scale, y + 1e-6) - found.law.cdf(loc, scale, y - 1e-6)).item() for y in at]
    assert [*each.values()] == pytest.approx(jumps, abs=1e-9)


# ---- learned ---------------------------------------------------------------------------------------------------------


def asked_rows(count: int, seed: int) -> list[Row]:
    """Two numbers, and a question for one of them."""
    chance, rows = random.Random(seed), []
    for i in range(count):
        said = {name: round(chance.uniform(-200, 200), 2) for name in "ab"}
        asked = chance.choice("ab")
        told = " ".join(f"{name} is {value}." for name, value in said.items())
        rows.append(Row("prompt", str(i), {"prompt": f"{told} {asked} is", "value": said[asked]}))
    return rows


def test_a_tiny_model_learns_which_number_is_asked_for(tiny_tokenizer, tmp_path):
    model = graft_tiny("llama", tiny_tokenizer, copy_numbers=True, value_branch_hidden_size=32, number_context="value")
    rows = asked_rows(210, 0)
    examples = encode_rows(rows, model.processor)
    chosen = TrainSettings(values=ValueStage(epochs=30, batch_size=32, learning_rate=3e-3), evaluations=1)
    metrics = train(model, examples[:160], examples[160:], tmp_path / "run", chosen)
    assert metrics["copied"] >= 0.9 and metrics["median_error"] == 0
    model = CausalQwenForCausalLM.from_pretrained(tmp_path / "run")
    found = model.predict_number([row.fields["prompt"] for row in rows[160:]])
    values = [row.value for row in rows[160:]]
    exact = [abs(one.median - value) < 1e-4 * abs(value) for one, value in zip(found, values, strict=True)]
    assert sum(exact) >= 0.9 * len(exact)


# ---- generation ------------------------------------------------------------------------------------------------------


HOW = {"greedy": {}, "sample": {"do_sample": True}, "plan": {"causal_decoding": "standard"}}


@pytest.mark.parametrize(
    ("context", "how"), [*(("value", how) for how in HOW), ("digits", "greedy"), ("both", "greedy")]
)
def test_generated_numbers_are_those_that_a_pass_over_the_text_copies(tiny_tokenizer, context, how):
    model = eager(random_head(graft_tiny("llama", tiny_tokenizer, copy_numbers=True, number_context=context)))
    model.copy_head.bias.data.fill_(1.5)
    inputs = encode(model, ["We have 12.3456789 and 5 or", *PROMPTS[1:]])
    torch.manual_seed(3)
    out = model.generate(**inputs, **HOW[how], max_new_tokens=16, return_dict_in_generate=True)
    start, num, copied = inputs["input_ids"].shape[1], model.config.num_token_id, 0
    for row, mask in enumerate(inputs["attention_mask"].bool()):
        first = int((~mask).sum())
        ids, values = out.sequences[row, first:], out.numeric_values[row, first:]
        with torch.no_grad():
            z = model.features(ids[None], numeric_values=values[None]).last_hidden_state
            offered = model.candidates(z, ids[None], values[None], None)
            law = model.copy_law(z, offered)
        again, of_text = law.copied()
        for place in (ids == num).nonzero().squeeze(-1).tolist():
            if place + first < start:
                continue
            if again[0, place - 1]:
                copied += 1
                assert values[place] == of_text[0, place - 1]
            else:
                loc, _ = Chain(model, z[0, place - 1]).value()
                assert values[place].item() == pytest.approx(model.generated_values(loc).item(), rel=1e-3)
    assert copied > 0


def test_rows_to_choose_from_hold_their_answer_among_others():
    rows = choices(50, seed=2)
    found = [[span.value for span in find_numbers(row["context"])] for row in rows]
    assert all(row["answer"] in values and len(values) in (2, 3) for row, values in zip(rows, found, strict=True))
    assert rows == choices(50, seed=2) != choices(50, seed=3)


# ---- refused ---------------------------------------------------------------------------------------------------------


def test_what_does_not_copy_is_refused(tiny_tokenizer, tmp_path):
    model = eager(random_head(graft_tiny("llama", tiny_tokenizer, copy_numbers=True)))
    model.config.value_range = [0.0, 100.0]  # as training leaves it: numbers are read
    inputs, who = encode(model, PROMPTS[:1]), Individual.from_seed(1, model.config.causal_size)
    evidence = (Observed(0, 2, 0.0, 1.0, 1.0, "values"),)
    inferred = dataclasses.replace(who, draws=torch.zeros(9, model.config.causal_size), evidence=evidence)
    assert inferred.knows_values and not who.is_inferred
    said = Observation(" a long way.", prompt="We have come")
    rows = [Row("prompt", str(i), {"prompt": "It is", "value": float(i), "individual": "ab"[i % 2]}) for i in range(4)]
    shared = encode_rows(rows, model.processor)
    assert shared[0].individual == "a"
    refused = [
        lambda: model.generate(**inputs, num_beams=2, max_new_tokens=3),
        lambda: model.generate(**inputs, prompt_lookup_num_tokens=2, max_new_tokens=3),
        lambda: model.abduct("My friends, we are 5."),
        lambda: model.counterfactual_samples(
            said, Intervention(prompt="They have come"), individual=who, max_new_tokens=2
        ),
        lambda: model.counterfactual_samples(said, Intervention(values={0: 5.0}), individual=who, max_new_tokens=2),
        lambda: model.predict_number("Of 20 it is", individual=inferred),
        lambda: model.survey(Population.drawn(2, model.config.causal_size), [Question("Of 20 it is", name="n")]),
        lambda: train(model, shared, (), tmp_path / "run", TrainSettings(values=ValueStage(epochs=1))),
    ]
    for ask in refused:
        with pytest.raises(ValueError, match="needs copy_numbers=False, but this model has True"):
            ask()
    assert model.abduct("My friends, we are here.").evidence[0].tokens > 2  # no number, nothing to refuse
    with pytest.raises(ValueError, match="copy_size: input should be greater than or equal to 1"):
        graft_tiny("llama", tiny_tokenizer, copy_numbers=True, copy_size=0)
    with pytest.raises(ValueError, match="value_loss: input should be 'nll' or 'crps', got 'CRPS'"):
        graft_tiny("llama", tiny_tokenizer, value_loss="CRPS")


def test_somebodys_number_is_a_copy_as_often_as_anybodys_and_new_ones_are_theirs(tiny_tokenizer):
    model = eager(random_head(graft_tiny("llama", tiny_tokenizer, copy_numbers=True)))
    who = Individual.from_seed(1, model.config.causal_size)
    (theirs,), (anybodys,) = (model.predict_number("Of 20 and 7 it is", individual=one) for one in (who, None))
    assert theirs.candidates == anybodys.candidates
    plain = graft_tiny("llama", tiny_tokenizer)
    plain.load_state_dict(model.state_dict(), strict=False)
    (new,) = plain.eval().predict_number("Of 20 and 7 it is", individual=who)
    assert (theirs.loc, theirs.scale) == pytest.approx((new.loc, new.scale), rel=1e-5) and theirs.loc != anybodys.loc


# ---- what a review found --------------------------------------------------------------------------------------------


def test_the_key_of_a_number_that_begins_a_hidden_text_depends_on_nothing(tiny_tokenizer):
    """The backbone does not see it, and what attention gives there is padding's and the future's mean."""
    model = eager(random_head(graft_tiny("llama", tiny_tokenizer, copy_numbers=True, number_context="digits")))
    keys = []
    of_right = ["3 and"], ["3 and it was said by the people"]
    for texts, side in (*((texts, "right") for texts in of_right), (["3 and", TEXTS[0]], "left")):
        batch = dict(model.processor(texts, padding=True, padding_side=side, return_tensors="pt"))
        keys.append(model.candidates(model.features(**batch).last_hidden_state, **batch).features[0, 0])
    assert all(torch.equal(key, torch.zeros_like(key)) for key in keys)
    kept = next(stream_facts(model, examples_of(model, ["3 and"])))[1].numbers
    assert not kept.features.any()


def test_a_copy_is_not_clipped_and_small_numbers_are_their_own():
    law = ValueLaw(value_range=(0.0, 10.0))
    at = torch.zeros(1, dtype=torch.float64)
    sure = torch.tensor([[1e-9, 1.0 - 1e-9]], dtype=torch.float64).log()
    far = CopyLaw(law, torch.tensor([[1000.0]], dtype=torch.float64), sure)
    assert far.crps(at, at + 1, at + 1000).item() < 1e-3
    two = torch.tensor([[1.6e-19, 6.6e-34]], dtype=torch.float64)
    small = CopyLaw(law, two, torch.tensor([[0.2, 0.4, 0.4]]).log())
    assert not small.copied()[0].item() and not small.stands(at + 5e-10).item() and small.stands(two[:, 0]).item()


def test_the_law_of_a_sure_copy_is_a_law():
    """Weights come in float32: their sum is 1 all the same, no probability is above it, and an atom is no density."""
    law = CopyLaw(
        ValueLaw(value_range=(0.0, 10.0)), torch.tensor([7.0, 7.0]).double(), torch.tensor([-30.0, -0.7, -0.7])
    )
    prediction = CopiedNumberPrediction(0.0, 1.0, 1.0, law)
    assert prediction.cdf(7.0) <= 1 and prediction.log_prob(7.0) <= 0
    assert max(density for _, density, _ in prediction.curve(101)) < 1e-6


def test_many_numbers_in_a_context_take_a_law_little_longer_than_few():
    """Quantiles of a mixture with 2,000 numbers: halving finds them, each of them a step would take seconds."""
    levels, zero = torch.arange(1, 100).double() / 100, torch.zeros(1).double()
    calls = 0

    class Counting(ValueLaw):
        def quantile(self, *args, **kwargs):
            nonlocal calls
            calls += 1
            return super().quantile(*args, **kwargs)

    weights = torch.full((2001,), 1 / 2001.0).log()
    law = CopyLaw(Counting(family="gaussian"), torch.randn(2000, dtype=torch.float64), weights)
    found = law.beside_levels().quantile(zero, zero + 1, levels)
    assert calls < 20 and bool((found.diff() >= 0).all())
    assert bool((law.cdf(zero, zero + 1, found) >= levels - 1e-9).all())


def test_pages_show_the_mixture(tiny_tokenizer):
    from causalqwen.evaluation.page import example_rows
    from causalqwen.evaluation.plots import value_figures

    model = random_head(graft_tiny("llama", tiny_tokenizer, copy_numbers=True))
    model.copy_head.bias.data.fill_(50.0)
    scores = score_tokens(
        model, (facts for _, facts in stream_facts(model, examples_of(model, ["a is 5 and b is 9 and c is 5"])))
    )
    values = scores["values"]
    assert values["stands"].tolist() == [False, False, True]
    assert values["interval"][1].tolist() == [5.0, 5.0, 5.0]
    row, *_ = example_rows(model, ["a is 5 and b is 9 and c is"] * 3, values)
    assert [row["median"], *row["intervals"]["0.9"]] == values["interval"][2].tolist() and len(
        row["curve"]["cdf"]
    ) == 100
    assert {*value_figures(scores["law"], values, "m")} == {"scatter", "calibration"}
