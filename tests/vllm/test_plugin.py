"""The plug-in against `generate`, in float32: the same tokens, the same values; and what it refuses."""

import statistics
from functools import cache, reduce
from types import SimpleNamespace

import pytest
import torch
from reference import (
    CLASSES,
    PROMPTS,
    RUNNER,
    SETTINGS,
    Engines,
    compare,
    load_reference,
    lookups,
    make_numbers_likely,
    whole_graphs,
    worker_of,
    write_closed,
    write_copying,
    write_tiny,
    write_with_classes,
)
from vllm.config import CompilationMode, CUDAGraphMode

import causalqwen_vllm
from causalqwen import PRESETS, CausalQwenForCausalLM, Individual
from causalqwen.modeling.context import CONTEXTS
from causalqwen_vllm.client import graphs
from causalqwen_vllm.model import CausalQwenForCausalLM as InVLLM
from causalqwen_vllm.model import refuse_settings
from causalqwen_vllm.request_options import RequestOptions
from causalqwen_vllm.requests import Request
from vllm import LLM

pytestmark = pytest.mark.filterwarnings("default")  # vLLM warns of what it uses itself
every_runner = pytest.mark.runners
"""Run again on vLLM's other model runners."""
PERSONA = {"preset": "persona", "temperature": 0.9}


@pytest.fixture(scope="session")
def engines():
    return Engines()


@pytest.fixture(scope="session")
def folders(tiny_tokenizer, tmp_path_factory):
    """Of tiny models, by family, and of llamas by what their context holds of a number; written once.

    Those write few digits: where rounding moves the last one, the text behind it is another.
    """
    families = {
        family: write_tiny(tmp_path_factory.mktemp(family), family, tiny_tokenizer)
        for family in ("llama", "qwen2", "qwen3")
    }
    return families | {
        context: write_tiny(
            tmp_path_factory.mktemp(context), "llama", tiny_tokenizer, number_context=context, value_digits=2
        )
        for context in ("digits", "both")
    }


@pytest.fixture(scope="session")
def closed(tiny_tokenizer, tmp_path_factory):
    """The folder of a model with values in closed form, by family and context; each is fitted once."""

    @cache
    def written(family="llama", context="digits"):
        return write_closed(tmp_path_factory.mktemp("closed"), family, tiny_tokenizer, context)

    return written


def ask(llm, prompts=PROMPTS[:12], **settings):
    settings = (
        PERSONA | {"seed": list(range(len(prompts))), "max_tokens": 100, "params": {"ignore_eos": True}} | settings
    )
    return causalqwen_vllm.generate(llm, prompts, **settings)


def requested(model, prompts, keys, of_rows=(), **settings):
    """Prompts and parameters as `LLM.generate` takes them; a row's seed is its place, and each may have settings of its own."""
    settings = {"params": {"ignore_eos": True}} | settings
    rows = of_rows or [{}] * len(keys)
    asked = [
        causalqwen_vllm.request(model.processor, prompt, seed=row, key=key, **settings, **own)
        for row, (prompt, key, own) in enumerate(zip(prompts, keys, rows, strict=False))
    ]
    return tuple(map(list, zip(*asked, strict=True)))


def served_by(llm):
    return worker_of(llm).get_model()


def assert_same(found, wanted):
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one.values == pytest.approx(other.values, rel=1e-4, abs=1e-4)


# ---- the same tokens and values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("family", [pytest.param("llama", marks=every_runner), "qwen2", "qwen3"])
def test_every_preset_writes_what_generate_writes(family, preset, folders, engines):
    prompts = PROMPTS[:: 4 if RUNNER.startswith("second") else 1]  # interpreted kernels are slow
    same, numbers = compare(
        engines(folders[family]), load_reference(folders[family]), preset, prompts, **SETTINGS[preset]
    )
    assert same >= len(prompts) * 15 // 16 and numbers > len(prompts)


@every_runner
@pytest.mark.parametrize("preset", ["standard", "causal", "noise"])
@pytest.mark.parametrize(
    "form",
    [{"score_scale": "documents"}, {"token_thresholds": 0.1}, {"causal_size": 64}],
    ids=lambda form: next(iter(form)),
)
def test_other_forms_of_the_model(form, preset, tiny_tokenizer, tmp_path_factory, engines):
    folder = tmp_path_factory.getbasetemp() / next(iter(form))
    if not folder.exists():
        write_tiny(folder, "llama", tiny_tokenizer, **form)
    same, _ = compare(engines(folder), load_reference(folder), preset, PROMPTS[:16], 32)
    assert same >= 15


@every_runner
@pytest.mark.parametrize(("context", "preset"), [*(("digits", preset) for preset in PRESETS), ("both", "persona")])
def test_digits_in_the_context(context, preset, folders, engines):
    prompts = PROMPTS[:: 4 if RUNNER.startswith("second") else 1]
    llm, model = engines(folders[context]), load_reference(folders[context])
    same, numbers = compare(llm, model, preset, prompts, **SETTINGS[preset])
    assert same >= len(prompts) * 15 // 16 and numbers > len(prompts)


@every_runner
@pytest.mark.parametrize("context", ["value", "digits", "both"])
def test_a_model_that_copies(context, tiny_tokenizer, tmp_path_factory, engines):
    """Copied numbers come back exactly, those of prompts and those that were generated; laws are those of the same places."""
    folder = tmp_path_factory.getbasetemp() / f"copies-{context}"
    model = load_reference(write_copying(folder, tiny_tokenizer, context))
    prompts = [prompt.replace("12.5", "12.3456789") for prompt in PROMPTS[: 8 if RUNNER.startswith("second") else 32]]
    llm = engines(folder, max_num_batched_tokens=64) if RUNNER == "first" else engines(folder)
    for preset in ("standard", "persona", "softmax"):
        same, _ = compare(llm, model, preset, prompts, **SETTINGS[preset])
        assert same >= len(prompts) * 15 // 16
    copied, new = 0, 0
    for answer, prompt in zip(ask(llm, prompts, preset="standard", temperature=1.0), prompts, strict=True):
        before = {float(word.replace(",", "")) for word in prompt.split() if word[-1].isdigit()}
        for number in answer.numbers:
            again = number.value in before and number.median == number.value
            copied, new = copied + again, new + (number.value not in before)
            before.add(number.value)
    assert copied > len(prompts) // 3 and new >= len(prompts) // 3
    who = Individual.from_seed(1, model.config.causal_size)
    for answer in ask(llm, prompts[:4], preset="shared-individual", individual=who, temperature=1.0):
        assert all(low <= number.median <= high for number in answer.numbers for low, high in number.intervals.values())
    with pytest.raises(ValueError, match="the prefix cache knows tokens"):
        causalqwen_vllm.load(folder, enable_prefix_caching=True)


@pytest.mark.parametrize("context", ["value", "digits", "both"])
def test_whoever_looks_at_the_numbers_of_a_text_that_goes_on_does_not_change_it(
    context, tiny_tokenizer, tmp_path, engines
):
    """As a server does at every token, whether it is a number or not."""
    folder = write_copying(tmp_path / "m", tiny_tokenizer, context)
    model = load_reference(folder)
    llm, prompts = engines(folder), ["We have 12.3456789 of", "The year 5 or", "It was"]
    wanted = ask(llm, prompts, preset="standard", temperature=1.0, max_tokens=40)
    llm.reset_prefix_cache()
    keys = [f"k{row}" for row in range(3)]
    asked = list(zip(*requested(model, prompts, keys, max_tokens=40), strict=True))
    for row, (tokens, params) in enumerate(asked):
        llm.llm_engine.add_request(str(row), tokens, params)
    seen, done = [], {}
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            if output.finished:
                done[int(output.request_id.split("-")[0])] = output
        seen.append(llm.collective_rpc("see_numbers", args=([(key, 0, None) for key in keys],))[-1])
    numbers = llm.collective_rpc("take_numbers", args=(keys,))[-1]
    answer = causalqwen_vllm.client.answer
    assert_same([answer(model.processor, done[row], *asked[row], numbers[row], row) for row in range(3)], wanted)
    assert all(len(told) <= len(answer.numbers) + 1 for told, answer in zip(seen[-1], wanted, strict=True))


@pytest.mark.parametrize("context", ["digits", "both"])
def test_a_number_cut_short_is_told_whole(context, folders, engines):
    llm, processor = engines(folders[context]), load_reference(folders[context]).processor
    answers = ask(llm)
    for prompt, answer in zip(PROMPTS, answers, strict=False):
        encoded = processor(prompt, prompt=True)
        values = [*encoded["numeric_values"], *answer.values]
        text = processor.decode([*encoded["input_ids"], *answer.token_ids], values, [], skip_special_tokens=True)
        assert text.endswith(answer.text)
    assert {number.value < 0 for answer in answers for number in answer.numbers} == {True, False}
    row, index = next(
        (row, index)
        for row, answer in enumerate(answers)
        for index, number in enumerate(answer.numbers[:-1])
        if index and number.value < 0  # a sign and a digit at least
    )
    number = answers[row].numbers[index]
    made = number.token + 2  # the sign is the last token
    hidden = index + 1 if context == "digits" else 0
    (cut,) = ask(llm, PROMPTS[row : row + 1], seed=row, max_tokens=made - hidden)
    assert cut.finish == "length" and cut.token_ids == answers[row].token_ids[:made]
    assert (cut.values[number.token], cut.numbers[-1].span) == (number.value, number.span)
    assert cut.text == answers[row].text[: number.span[1]]


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_the_real_backbone(preset, tmp_path_factory, engines):
    folder = tmp_path_factory.getbasetemp() / "smollm2"
    if not folder.exists():
        model = CausalQwenForCausalLM.from_backbone("smollm2-135m", number_context="value")
        torch.manual_seed(1)
        make_numbers_likely(model, share=0.05)
        model.save_pretrained(folder)
    same, numbers = compare(engines(folder), load_reference(folder), preset, PROMPTS, **SETTINGS[preset])
    assert same >= 56 and numbers > 20


@every_runner
def test_a_given_individual_and_its_numbers(folders, engines, tmp_path):
    llm, model = engines(folders["llama"]), load_reference(folders["llama"])
    individual = Individual.from_seed(5, 128)
    individual.save(tmp_path / "ann.safetensors")
    found = ask(llm, individual=str(tmp_path / "ann.safetensors"))
    assert_same(ask(llm, individual=individual), found)
    assert [a.token_ids for a in found] != [a.token_ids for a in ask(llm)]
    answer = next(answer for answer in found if answer.numbers)
    number, row = answer.numbers[0], found.index(answer)
    encoded = model.processor(PROMPTS[row], prompt=True)
    ids = torch.tensor([encoded["input_ids"] + answer.token_ids[: number.token]])
    values = torch.tensor([[*encoded["numeric_values"], *answer.values[: number.token]]], dtype=torch.float64)
    law = model.predict_values(model.features(ids, numeric_values=values).last_hidden_state[:, -1], individual)[0]
    assert (number.loc, number.scale) == pytest.approx((law.loc, law.scale), rel=1e-3, abs=1e-4)
    assert number.median == pytest.approx(law.median, rel=1e-3)
    assert float(answer.text[slice(*number.span)]) == number.value
    assert compare(llm, model, "shared-individual", PROMPTS[:16], individual=individual)[0] >= 15  # at temperature 1


@every_runner
@pytest.mark.parametrize("context", ["value", "digits"])
def test_each_request_names_the_class_of_its_numbers(context, tiny_tokenizer, tmp_path_factory, engines):
    """Classes with axes of their own: each text is that of a model whose numbers are of its class; one without is refused."""
    folder = tmp_path_factory.getbasetemp() / f"classes_{context}"
    if not folder.exists():
        write_with_classes(folder, tiny_tokenizer, context)
    llm, model = engines(folder), load_reference(folder)
    written = []
    for name in CLASSES:
        model.number_class, named = name, {"number_class": name}
        same, numbers = compare(llm, model, "persona", PROMPTS[:16], 32, asked=named, **SETTINGS["persona"])
        assert same >= 15 and numbers > 8
        answers = ask(llm, PROMPTS[:16], **named)
        written.append(statistics.median(number.value for answer in answers for number in answer.numbers))
        for answer in answers:
            for number in answer.numbers:
                assert number.median == pytest.approx(
                    model.value_law.transform.inverse(torch.tensor(number.loc)).item()
                )
    assert written[0] < 100 < written[1]
    with pytest.raises(ValueError, match="name one of men, miles"):
        ask(llm)


@every_runner
@pytest.mark.parametrize("model", ["llama", "digits"])
def test_each_request_has_a_plan_of_its_own(model, folders, engines):
    """Rows of all presets in one batch are decided as they are alone."""
    llm = engines(folders[model])
    presets = [*PRESETS, *PRESETS]
    of_rows = [{"preset": preset, "max_tokens": 20 + row} | SETTINGS[preset] for row, preset in enumerate(presets)]
    asked = requested(load_reference(folders[model]), PROMPTS, presets, of_rows)
    together = llm.generate(*asked, use_tqdm=False)
    for output, tokens, params in zip(together, *asked, strict=True):
        alone = llm.generate([tokens], params, use_tqdm=False)[0]
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids


@every_runner
@pytest.mark.parametrize("model", ["llama", "digits"])
def test_the_values_of_a_prompt_matter(model, folders, engines):
    """Two prompts of the same words with different values: whatever came first, each is answered as when it is alone."""
    llm = engines(folders[model], block_size=32)
    prompts = ["It was 3 days in the year " * 12 + "of", "It was 900 days in the year " * 12 + "of"]
    first, second = ask(llm, prompts, seed=1)
    assert first.token_ids != second.token_ids or first.values != second.values
    assert_same(ask(llm, prompts[::-1], seed=1), [second, first])
    assert_same(ask(llm, prompts[1:], seed=1), [second])


@every_runner
def test_a_text_ends_at_its_end_token(folders, engines):
    answers = ask(engines(folders["llama"]), PROMPTS, params={}, preset="causal", temperature=1.0)
    stopped = [answer for answer in answers if answer.finish == "stop"]
    assert stopped and all(answer.token_ids[-1] == 0 for answer in stopped)


@every_runner
@pytest.mark.parametrize("model", ["llama", "digits", "both", "closed"])
def test_a_compiled_backbone(model, folders, closed, engines):
    folder = closed() if model == "closed" else folders[model]
    llm = engines(folder, enforce_eager=False)
    assert llm.llm_engine.vllm_config.compilation_config.mode != CompilationMode.NONE
    same, numbers = compare(llm, load_reference(folder), "persona", PROMPTS[:16], **SETTINGS["persona"])
    assert same >= 15 and numbers > 16


@every_runner
@pytest.mark.skipif(not RUNNER.startswith("second"), reason="the older runner warms up without requests")
@pytest.mark.parametrize("context", ["value", "digits"])
def test_requests_that_a_gpu_is_warmed_up_by(context, tiny_tokenizer, tmp_path, engines):
    """V2 sends them before it serves, and only on a GPU. They name neither a plan, nor a class for their numbers."""
    from vllm.v1.worker.gpu.warmup import run_mixed_prefill_decode_warmup

    model = load_reference(write_with_classes(tmp_path / "classes", tiny_tokenizer, context))
    with torch.no_grad():
        model.action.num_bias += 50.0
    model.save_pretrained(tmp_path / "numbers alone")
    for folder in (tmp_path / "numbers alone", tmp_path / "classes"):
        llm = engines(folder)
        worker = worker_of(llm)
        assert run_mixed_prefill_decode_warmup(
            worker.model_runner, worker.execute_model, worker.sample_tokens, num_tokens=16
        )
    model = load_reference(tmp_path / "classes")
    model.number_class = "men"
    same, _ = compare(llm, model, "standard", PROMPTS[:4], 32, asked={"number_class": "men"})
    assert same >= 3


@every_runner
@pytest.mark.skipif(not RUNNER.startswith("second"), reason="the older runner has no graphs of the whole decoder")
@pytest.mark.parametrize(
    ("model", "preset"), [("digits", "standard"), ("digits", "persona"), ("digits", "softmax"), ("closed", "standard")]
)
def test_graphs_of_the_whole_decoder(model, preset, folders, closed, engines):
    """Seven rows, filled up to eight: what `forward` would note of a step is noted around the graph."""
    folder = closed() if model == "closed" else folders[model]
    llm, model = engines(folder), load_reference(folder)
    with whole_graphs(llm) as steps:
        same, numbers = compare(llm, model, preset, PROMPTS[::9][:7], 48, **SETTINGS[preset])
    assert same >= 6 and numbers > 20 and len(steps) > 40


@every_runner
@pytest.mark.skipif(not RUNNER.startswith("second"), reason="the older runner has no graphs of the whole decoder")
def test_what_a_graph_of_the_whole_decoder_leaves_to_note(tiny_tokenizer, tmp_path, engines):
    """What later numbers may copy, and what is asked for of tokens."""
    model = load_reference(write_copying(tmp_path / "copying", tiny_tokenizer, "digits"))
    llm, prompts = engines(tmp_path / "copying"), PROMPTS[1:40:6]
    keys = [f"row {row}" for row in range(len(prompts))]

    def told():
        outputs = llm.generate(*requested(model, prompts, keys, kept_from=1, max_tokens=12), use_tqdm=False)
        questions = [
            (key, len(output.prompt_token_ids), list(output.outputs[0].token_ids), 0)
            for key, output in zip(keys, outputs, strict=True)
        ]
        seen = llm.collective_rpc("see_likelihoods", args=(questions,))[-1]
        llm.collective_rpc("forget_numbers", args=(keys,))
        return [log_prob for of_row in seen for [(_, log_prob, _)] in of_row]

    wanted = told()
    with whole_graphs(llm) as steps:
        same, numbers = compare(llm, model, "standard", prompts, 48, temperature=1.0)
        found = told()
    assert same >= len(prompts) - 1 and numbers > 20 and len(steps) > 50
    assert len(found) == 12 * len(prompts) and found == pytest.approx(wanted)


# ---- values that are read from the whole backbone --------------------------------------------------------------------


@torch.no_grad()
def assert_laws(model, prompts, answers):
    """Each number's law is the one that the model itself has behind the same text."""
    told = []
    for prompt, answer in zip(prompts, answers, strict=True):
        encoded = model.processor(prompt, prompt=True)
        for number in answer.numbers:
            ids = torch.tensor([encoded["input_ids"] + answer.token_ids[: number.token]])
            values = torch.tensor([[*encoded["numeric_values"], *answer.values[: number.token]]], dtype=torch.float64)
            law = model.predict_values(model.features(ids, numeric_values=values).last_hidden_state[:, -1])[0]
            near = {"abs": 1e-3 * law.scale, "rel": 0}
            assert (number.loc, number.scale) == pytest.approx((law.loc, law.scale), **near)
            low, high = law.interval(0.9)
            assert number.intervals["0.9"] == pytest.approx([low, high], abs=1e-3 * (high - low), rel=0)
            told.append(law.loc)
    assert len({round(loc, 3) for loc in told}) > len(told) / 2 > 8


@every_runner
@pytest.mark.parametrize(
    ("family", "context"), [("llama", "digits"), ("qwen2", "digits"), ("llama", "value"), ("llama", "both")]
)
def test_values_in_closed_form(family, context, closed, engines):
    """Prompts of all lengths, in chunks and then out of the prefix cache: texts, values and laws as `generate` has them."""
    folder = closed(family, context)
    model, llm = load_reference(folder), engines(folder, block_size=32, max_num_batched_tokens=48, max_num_seqs=8)
    shared = "It was 3 days in the year 1776, and 12.5 of 900 men were there; " * 4
    prompts = [*PROMPTS[:: 16 if RUNNER.startswith("second") else 4], shared + "of", shared + "it was 7 or"]
    for preset in ("standard", "persona"):
        same, numbers = compare(llm, model, preset, prompts, 32, **SETTINGS[preset])
        assert same >= len(prompts) - 1 and numbers > len(prompts)
    for _ in range(2):
        with lookups(llm) as seen:
            assert_laws(model, prompts, ask(llm, prompts, max_tokens=32))
    assert any(hit.cached > 100 for hit in seen) == (context == "digits")


@every_runner
@pytest.mark.parametrize("context", ["value", "digits"])
def test_preempted_values_in_closed_form(context, closed, engines):
    folder = closed("llama", context)
    llm = engines(folder, block_size=32, num_gpu_blocks_override=24)
    with lookups(llm) as seen:
        found = ask(llm)
    assert len([hit for hit in seen if hit.preempted]) >= 3
    assert_laws(load_reference(folder), PROMPTS[:12], found)


@every_runner
@pytest.mark.parametrize("context", ["value", "digits"])
def test_the_whole_backbone_is_asked_where_a_number_is(context, closed, engines, monkeypatch):
    """Or where its law is told; text alone asks nothing."""
    llm, asked = engines(closed("llama", context)), []
    heads, model = served_by(llm), load_reference(closed("llama", context))
    means = heads._means
    monkeypatch.setattr(heads, "_means", lambda step: asked.append(step) or means(step))
    assert sum(len(answer.numbers) for answer in ask(llm, PROMPTS[:4])) == len(asked) > 4
    asked.clear()
    heads.action.num_bias.data -= 1e3
    try:
        assert not any(answer.numbers for answer in ask(llm, PROMPTS[:4])) and not asked
        tokens, params = requested(model, PROMPTS, PROMPTS[:3], max_tokens=3, laws=True, kept_from=1)
        ends = [len(prompt["prompt_token_ids"]) for prompt in tokens]
        llm.generate(tokens, params, use_tqdm=False)
    finally:
        heads.action.num_bias.data += 1e3
    assert len(asked) == 9
    number, text = model.config.num_token_id, ([1], [0.0])
    questions = [(key, end, number, text, 2) for key, end in zip(PROMPTS, ends, strict=False)]
    told = llm.collective_rpc("see_alternatives", args=(questions,))[0]
    for prompt, place in zip(PROMPTS, told, strict=False):
        said = float(place["chosen"]["text"])
        assert said == pytest.approx(model.predict_number(prompt)[0].median, rel=0.06)  # two digits


@every_runner
def test_the_law_behind_a_prompt_in_closed_form(closed, engines):
    llm, model = engines(closed()), load_reference(closed())
    llm.generate(*requested(model, PROMPTS, PROMPTS[:5], max_tokens=1, laws=True), use_tqdm=False)
    told = llm.collective_rpc("tell_laws", args=([(text, None) for text in PROMPTS[:5]], [0.9], None))[-1]
    for law, known in zip(told, model.predict_number(PROMPTS[:5]), strict=True):
        low, high = known.interval(0.9)
        assert [law["median"], *law["intervals"]["0.9"]] == pytest.approx(
            [known.median, low, high], abs=1e-3 * (high - low)
        )


# ---- what vLLM does to requests under way ----------------------------------------------------------------------------


@every_runner
@pytest.mark.parametrize("model", ["llama", "digits"])
def test_preempted_requests_keep_their_values(model, folders, engines):
    """Where the context holds no values, what they wrote before is found in the prefix cache when they come back."""
    wanted = ask(engines(folders[model], enable_prefix_caching=False))
    llm = engines(folders[model], block_size=32, num_gpu_blocks_override=24)
    with lookups(llm) as seen:
        found = ask(llm)
    resumed = [hit for hit in seen if hit.preempted]
    assert len(resumed) >= 3
    assert any(hit.cached > hit.prompt for hit in resumed) == (model == "digits")
    assert sum(len(answer.numbers) for answer in found) > 20
    assert_same(found, wanted)


@every_runner
def test_a_shared_prefix_is_read_once(folders, engines):
    """The texts behind 1,000 tokens that prompts share are those of `generate`, with a prefix cache and without."""
    folder, shared = folders["digits"], "It was 3 days in the year 1776, and 12.5 of 900 men were there; " * 30
    prompts = [shared + prompt for prompt in PROMPTS[:: 8 if RUNNER.startswith("second") else 1]]
    wanted = ask(engines(folder, max_model_len=2048, enable_prefix_caching=False), prompts, max_tokens=32)
    llm, model = engines(folder, max_model_len=2048), load_reference(folder)
    for _ in range(2):
        with lookups(llm) as seen:
            found = ask(llm, prompts, max_tokens=32)
        assert min(hit.prompt for hit in seen) > 1000
        assert sum(hit.cached >= 1000 - 128 for hit in seen) >= len(prompts) - 1  # in blocks of 128 tokens
        assert_same(found, wanted)
    slices = [prompts[start : start + 16] for start in range(0, len(prompts), 16)]
    same = [compare(llm, model, "persona", part, 32, **SETTINGS["persona"])[0] for part in slices]
    assert sum(same) >= len(prompts) - 1


@every_runner
@pytest.mark.parametrize(
    ("model", "settings"), [("llama", PERSONA), ("digits", PERSONA), ("digits", {"preset": "softmax"})]
)
def test_prompts_cut_into_chunks(model, settings, folders, engines):
    prompts = [" ".join(PROMPTS[row : row + 6]) for row in range(8)]
    wanted = ask(engines(folders[model]), prompts, **settings)
    cut = engines(folders[model], max_num_batched_tokens=16, max_num_seqs=8)
    assert_same(ask(cut, prompts, **settings), wanted)


@every_runner
def test_how_likely_tokens_were_is_told_of_any_place_and_then_forgotten(folders, engines):
    """Prompts in chunks, those of others in the prefix cache: log-probabilities as the model's own, and nothing stays."""
    from causalqwen.modeling.alternatives import likelihoods
    from causalqwen_vllm.client import of_tokens, processor_of

    llm = engines(folders["digits"], max_num_batched_tokens=48, max_num_seqs=4)
    model = load_reference(folders["digits"])
    processor = processor_of(str(folders["digits"]), model.config.context)
    texts = [" ".join(PROMPTS[row : row + 6]) for row in range(0, 16, 4)]
    encoded = [processor(text)["input_ids"] for text in texts]
    keys = [f"of {row}" for row in range(len(texts))]
    asked = [
        of_tokens(processor, ids, [0.0] * len(ids), {"seed": 1, "key": key, "kept_from": 1}, 8, {"ignore_eos": True})
        for ids, key in zip(encoded, keys, strict=True)
    ]
    for _ in range(2):
        for _, params in asked:
            params.skip_reading_prefix_cache = True
        outputs = llm.generate([tokens for tokens, _ in asked], [params for _, params in asked], use_tqdm=False)
        written = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]
        questions = [(key, 1, ids[1:], 2) for key, ids in zip(keys, written, strict=True)]
        told = llm.collective_rpc("see_likelihoods", args=(questions,))[0]
        for ids, rows in zip(written, told, strict=True):
            with torch.no_grad():
                features = model.features(torch.tensor([ids])).last_hidden_state[0]
            known = likelihoods(model, features[:-1], torch.tensor(ids[1:]), 2)
            for row, row_known in zip(rows, known, strict=True):
                assert [one[0] for one in row[:1]] == [one.token for one in row_known[:1]]
                assert [one[1:] for one in row] == [
                    pytest.approx((one.log_prob, one.log_ovr), abs=2e-3) for one in row_known
                ]
        worker = worker_of(llm)
        requests = [worker.get_model().table.by_key[key] for key in keys]
        assert all(request.kept for request in requests)
        last = [(keys[0], len(written[0]) - 1, written[0][-1:], 0)]
        llm.collective_rpc("see_likelihoods", args=(last,))
        assert list(requests[0].kept) == [len(written[0]) - 1]  # what comes before was told
        with pytest.raises(Exception, match=r"follows from is not kept"):
            llm.collective_rpc("see_likelihoods", args=(questions[:1],))
        llm.collective_rpc("forget_numbers", args=(keys,))
        assert not any(request.kept or request.followed for request in requests)
        requests[0].keep(3, torch.zeros(2, 128))  # a step that was under way
        assert not requests[0].kept
        assert llm.collective_rpc("see_likelihoods", args=(questions[:1],))[0] == [[]]


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "wrong", "message"),
    [
        ("digits", {"skip_tokenizer_init": False}, "cannot be served with skip_tokenizer_init="),
        ("llama", {"enable_prefix_caching": True}, "neither the values of numbers"),
        ("both", {"enable_prefix_caching": True}, "neither the values of numbers"),
    ],
)
def test_settings_that_load_refuses(model, wrong, message, folders):
    with pytest.raises(ValueError, match=message):
        causalqwen_vllm.load(folders[model], **wrong)


def test_an_engine_opened_without_load_refuses_too(folders, engines):
    engines.close()
    with pytest.raises(ValueError, match=r"follows no requests.*prefix cache knows tokens, but neither the values"):
        LLM(str(folders["llama"]), dtype="float32", max_model_len=256, enforce_eager=True)


WHOLE = "read from the whole backbone's cache"
ATTENTION = ["sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("model", "name", "value", "message"),
    [
        ("llama", "parallel_config.pipeline_parallel_size", 2, "the last rank of a pipeline decides numbers"),
        ("llama", "parallel_config.data_parallel_size", 2, "context and data parallelism"),
        ("llama", "compilation_config.cudagraph_mode", CUDAGraphMode.FULL_AND_PIECEWISE, "leaves out the values of numbers"),
        ("llama", "compilation_config.cudagraph_mode", CUDAGraphMode.FULL_AND_PIECEWISE, "older model runner, which runs here"),
        ("llama", "compilation_config.cudagraph_mode", CUDAGraphMode.PIECEWISE, "set cudagraph_copy_inputs=True"),
        ("llama", "speculative_config", object(), "a drafted token has no decision"),
        ("llama", "kv_transfer_config", object(), "another engine"),
        ("llama", "model_config.hf_config.text_config.model_type", "mistral", "'mistral': only llama, qwen2, qwen3"),
        ("closed", "parallel_config.pipeline_parallel_size", 2, WHOLE),
        ("closed", "cache_config.cache_dtype", "fp8", WHOLE),
        ("closed", "model_config.hf_config.text_config.layer_types", ATTENTION, WHOLE),
    ],
)  # fmt: skip
def test_engine_settings_that_a_cpu_cannot_have(model, name, value, message, folders, closed, engines, monkeypatch):
    config = engines(closed() if model == "closed" else folders[model]).llm_engine.vllm_config
    refuse_settings(config)
    *parts, last = name.split(".")
    monkeypatch.setattr(reduce(getattr, parts, config), last, value, raising=False)
    with pytest.raises(ValueError, match=message):
        refuse_settings(config)


@pytest.mark.parametrize(
    ("context", "second", "mode"),
    [
        ("digits", None, "FULL_AND_PIECEWISE"),
        ("digits", "1", "FULL_AND_PIECEWISE"),
        ("digits", "0", "PIECEWISE"),
        ("both", "1", "PIECEWISE"),
        ("value", "1", "PIECEWISE"),
    ],
)
def test_graphs_that_are_asked_for(context, second, mode, monkeypatch):
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
    if second is not None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", second)
    assert graphs(CONTEXTS[context]) == {"cudagraph_mode": mode, "cudagraph_copy_inputs": True}


@every_runner
@pytest.mark.skipif(not RUNNER.startswith("second"), reason="the older runner has no graphs of the whole decoder")
def test_graphs_of_prompts_are_refused(folders, engines, monkeypatch):
    config = engines(folders["digits"]).llm_engine.vllm_config
    monkeypatch.setattr(config.compilation_config, "cudagraph_copy_inputs", True)
    monkeypatch.setattr(config.compilation_config, "cudagraph_mode", CUDAGraphMode.FULL_AND_PIECEWISE)
    refuse_settings(config)
    monkeypatch.setattr(config.compilation_config, "cudagraph_mode", CUDAGraphMode.FULL)
    with pytest.raises(ValueError, match="of a prompt would freeze"):
        refuse_settings(config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"params": {"temperature": 0.7}}, "leave SamplingParams.temperature at 0"),
        ({"params": {"logprobs": 3, "repetition_penalty": 1.1}}, "repetition_penalty, logprobs"),
        ({"params": {"detokenize": True}}, "detokenizer cannot write numbers"),
        ({"params": {"extra_args": None}}, "a grafted model needs extra_args"),
        ({"preset": "bold"}, "unknown preset"),
        ({"preset": "standard", "individual": [0.5] * 128}, "takes no individual"),
        ({"individual": "nobody.safetensors"}, "nobody.safetensors"),
        ({"individual": [0.5, 0.5]}, "does not fit"),
        ({"top_p": 0.9}, "top_p belongs to the preset 'softmax'"),
        ({"colour": 1}, "unknown setting colour"),
        ({"kept_from": 1.7}, "kept_from is a place"),
        ({"kept_from": True}, "kept_from is a place"),
        ({"kept_from": [1]}, "kept_from is a place"),
        ({"kept_from": 0}, "kept_from is a place"),
    ],
)
def test_requests_that_are_refused(settings, message, folders, engines):
    llm = engines(folders["llama"])
    with pytest.raises(ValueError, match=message):
        ask(llm, PROMPTS[:2], **settings)
    assert len(ask(llm, PROMPTS[:2])) == 2  # and the engine goes on


def test_values_that_do_not_fit_the_prompt():
    options = RequestOptions.read({"preset": "standard", "values": [5.0]})
    with pytest.raises(ValueError, match="2 numbers came with 1 values"):
        Request(options, [1, 400, 7, 400], 400, 128, torch.device("cpu"))


def test_a_number_is_never_fed_on_without_its_value():
    request = Request(
        RequestOptions.read({"preset": "standard", "values": [5.0]}), [1, 400], 400, 128, torch.device("cpu")
    )
    assert request.value(1) == 5.0 and not request.lacks(1)
    request.decide(2, torch.zeros(128))
    assert request.lacks(2) and not request.lacks(3)
    with pytest.raises(RuntimeError, match="no value is known for the number at 2"):
        request.value(2)
    request.write(7.0)
    assert request.value(2) == 7.0 and not request.lacks(2)


def test_a_hidden_number_is_not_in_the_sequence():
    options = RequestOptions.read({"preset": "standard", "values": [5.0]})
    with pytest.raises(ValueError, match="sees no <NUM>, but one stands at 1 of the prompt"):
        Request(options, [1, 400, 7], 400, 128, torch.device("cpu"), hides=True)
    request = Request(options, [1, 9, 7], 400, 128, torch.device("cpu"), hides=True)
    assert not request.decide(2, torch.zeros(128))  # a chunk of the prompt ends here: nothing is decided
    assert request.decide(3, torch.zeros(128)) and not request.decide(3, torch.zeros(128))
    request.write(12.0)
    request.write_digits(3, [8, 9])
    assert request.digits == {3: 8, 4: 9}
    assert [request.hidden_before(place) for place in (3, 4, 5)] == [1, 2, 2]


@pytest.mark.parametrize("context", ["digits", "both"])
def test_digits_ask_nothing_of_the_vocabulary(context, folders, engines, monkeypatch):
    """Which token they are is known as soon as the number is: the product with the vocabulary has other rows alone."""
    llm, model = engines(folders[context]), load_reference(folders[context])
    heads = served_by(llm)
    of_groups, scored = heads._scores_of_groups, []
    monkeypatch.setattr(
        heads, "_scores_of_groups", lambda rows, *rest: scored.append(len(rows)) or of_groups(rows, *rest)
    )
    tokens, params = requested(model, PROMPTS, [f"{context} {row}" for row in range(8)], max_tokens=40, **PERSONA)
    llm.generate(tokens, params, use_tqdm=False)
    digits = 0
    for row, prompt in enumerate(tokens):
        request, end = heads.table.by_key[f"{context} {row}"], len(prompt["prompt_token_ids"]) + 40
        firsts = request.values if request.hides else {}
        digits += sum(place < end and place not in firsts for place in request.digits)
    assert sum(scored) == 8 * 40 - digits and digits > 40
    assert min(scored) < 8


@pytest.mark.parametrize("model", ["llama", "both", "digits"])
def test_what_stands_behind_the_tokens_is_not_read(model, folders, engines, monkeypatch):
    """A CUDA graph's input is longer than the rows are; behind them stands what stood there before."""
    from causalqwen_vllm import model as module

    heads = served_by(engines(folders[model]))
    number = heads.config.num_token_id
    options = {"values": [5.0]}
    ids = [1, 2] if heads.config.context.hides else [1, number]
    requests = [
        Request(RequestOptions.read(options), ids, number, 128, torch.device("cpu"), hides=heads.config.context.hides)
        for _ in "ab"
    ]
    monkeypatch.setattr(heads.table, "requests", requests)
    starts = SimpleNamespace(query_start_loc=torch.tensor([0, 2, 4]))
    monkeypatch.setattr(module, "get_forward_context", lambda: SimpleNamespace(attn_metadata={"layer": starts}))
    seen = []
    features = torch.zeros(7, 128)
    monkeypatch.setattr(heads.backbone, "forward", lambda ids, places, _, given: seen.append(given) or features)
    for behind in ([], [number, number, 7]):
        tokens = torch.tensor(ids + ids + behind)
        heads(tokens, torch.tensor([0, 1, 0, 1] + [9] * len(behind)))
    if heads.config.context.hides:
        assert seen == [None, None]
    else:
        assert torch.equal(seen[0], seen[1][:4]) and not torch.equal(seen[0][1], seen[0][0])


def test_numbers_are_given_once(folders, engines):
    with pytest.raises(ValueError, match="no numbers are kept under the key 'nobody'"):
        engines(folders["llama"]).collective_rpc("take_numbers", args=(["nobody"],))


def test_of_a_number_and_words_that_are_as_likely_the_first_id_is_written():
    """As argmax does; in bfloat16 some row of many has equals at most steps."""
    scores = torch.tensor([[0, 1, 1, 0], [0, 0, 1, 1], [0, 0, 2, 1], [0, 1, 0, 1], [0, 0, 1, 1]], dtype=torch.bfloat16)
    wanted = (scores[:4].argmax(-1) == 2).nonzero().flatten().tolist()
    said: list[tuple[int, int]] = []
    requests = [SimpleNamespace(digits={}, say=lambda at, row=row: said.append((row, at))) for row in range(5)]
    served = SimpleNamespace(
        config=SimpleNamespace(num_token_id=2), _write=lambda chosen: None, _write_digits=lambda *given: None
    )
    InVLLM._announce(served, requests, [7] * 5, [True] * 4 + [False], scores)
    assert said == [(row, 7) for row in wanted] and wanted == [1, 2]
    assert (scores[:, 2] == -torch.inf).all()


@every_runner
@pytest.mark.parametrize("write", [write_with_classes, write_copying])
def test_numbers_of_many_requests_are_those_of_each(write, tiny_tokenizer, tmp_path, engines, monkeypatch):
    """Taken at once, of people and classes of their own, or request by request."""
    monkeypatch.setattr("causalqwen_vllm.model.LAWS_AT_ONCE", 7)
    write(tmp_path / "m", tiny_tokenizer, "value")
    llm, model = engines(tmp_path / "m"), load_reference(tmp_path / "m")
    people = [None, *(Individual.from_seed(seed, model.config.causal_size) for seed in (5, 6))]
    named = [{"number_class": name} for name in CLASSES] if write is write_with_classes else [{}]
    told = []
    for alone in (False, True):
        keys = [f"{alone} {row}" for row in range(16)]
        of_rows = [{"individual": people[row % 3]} | named[row % len(named)] for row in range(16)]
        llm.generate(*requested(model, PROMPTS, keys, of_rows, max_tokens=64, **PERSONA), use_tqdm=False)
        parts = [[key] for key in keys] if alone else [keys]
        told.append([of for part in parts for of in llm.collective_rpc("take_numbers", args=(part,))[-1]])
    for together, each in zip(*told, strict=True):
        assert together.keys() == each.keys()
        for place, number in each.items():
            assert together[place].keys() == number.keys()
            for name in ("value", "loc", "scale", "median", "num_prob"):
                assert together[place][name] == pytest.approx(number[name], rel=1e-4, abs=1e-5)
            for level, ends in number["intervals"].items():
                assert together[place]["intervals"][level] == pytest.approx(ends, rel=1e-3, abs=1e-4)
    assert len({round(number["loc"], 3) for of_one in told[1] for number in of_one.values()}) > 32
