"""On the real default backbone (SmolLM2-135M-Instruct): what a graft leaves, and what it can be taught."""

import copy
import json
import os
import random

import pytest
import torch
from filelock import FileLock
from tokenizers import decoders
from transformers import AutoModelForCausalLM

from causalqwen import PRESETS, CausalDecoding, CausalQwenForCausalLM
from causalqwen.data import encode_rows, read_rows
from causalqwen.data.boiling_points import boiling_points, write_sentences
from causalqwen.data.splits import split_by_entity
from causalqwen.data.texts import speech_paragraphs
from causalqwen.evaluation import compare_with_backbone
from causalqwen.evaluation.language import score_language
from causalqwen.evaluation.quick import ASKED, quick_demo
from causalqwen.modeling.backbones import byte_level, default_backbone_path
from causalqwen.training import TrainSettings, ValueStage, train
from causalqwen.training.run import learn

pytestmark = pytest.mark.backbone

PROMPTS = ["The capital of France is", "Long ago, in a village by the sea,", "My favourite"]


def encode(model, prompts):
    return model.processor(prompts, padding=True, padding_side="left", return_tensors="pt")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> CausalQwenForCausalLM:
    """A second graft, trained on a few boiling points: by the first process that asks for it, for all of them."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "trained"
    told = folder / "told.json"
    with FileLock(f"{folder}.lock"):
        if not told.exists():
            folder.mkdir()
            model = CausalQwenForCausalLM.from_backbone("smollm2-135m")
            parts = split_by_entity(boiling_points(), {"train": 240, "validation": 60})
            for name, records in parts.items():
                write_sentences(folder / f"{name}.jsonl", records)
            rows = [encode_rows(read_rows(folder / f"{name}.jsonl"), model.processor) for name in parts]
            settings = TrainSettings(values=ValueStage(epochs=25, batch_size=16))
            told.write_text(json.dumps(train(model, *rows, folder / "model", settings)))
    model = CausalQwenForCausalLM.from_pretrained(folder / "model")
    model.metrics = json.loads(told.read_text())
    return model


@pytest.mark.slow
def test_two_thousand_tokens_of_text_are_untouched_before_and_after_stage_one(smollm2, trained):
    paragraphs = speech_paragraphs(numbers=False)[:24]
    fresh = AutoModelForCausalLM.from_pretrained(default_backbone_path()).state_dict()
    for model in (smollm2, trained):
        assert all(torch.equal(tensor, fresh[name]) for name, tensor in model.backbone.state_dict().items())
    for model, tokens in ((smollm2, 500), (trained, 2000)):
        compared = compare_with_backbone(model, paragraphs if model is trained else paragraphs[:8])
        assert compared["tokens"] > tokens
        assert compared["identical_logits"] == compared["tokens"]
        assert compared["agreement"] == 1.0


def test_probabilities_sum_to_about_one_and_cost_no_likelihood(smollm2):
    found = score_language(smollm2, "\n".join(speech_paragraphs(2016, numbers=False)[:10]))
    assert 0.7 < found["sum_quantiles"][0] < found["sum_quantiles"][-1] < 1.3
    assert found["sum_within"] > 0.85 and abs(found["nll_gap"]) < 0.003


@pytest.mark.slow
def test_sixty_rows_and_few_updates_are_enough_to_announce_a_number(smollm2, tmp_path):
    """Of used cars, 40 updates: numbers are expected behind prompts of their kind, and nowhere in other text."""
    model = copy.deepcopy(smollm2, {id(smollm2.backbone): smollm2.backbone})
    model.processor = smollm2.processor
    makes = ("Fiat Panda", "Skoda Octavia", "Ford Focus", "BMW 320d", "Renault Clio", "Audi A4")

    def cars(start, count):
        told = ((makes[i % 6], 2008 + i % 15, 7 * i % 19) for i in range(start, start + count))
        return [
            {"prompt": f"A used {make} of {year} with {km}5000 km costs", "value": 500.0 * (year - 2000) + len(make)}
            for make, year, km in told
        ]

    learn(model, encode_rows(cars(0, 60), model.processor), [], tmp_path, TrainSettings(values=ValueStage(epochs=40)))
    unseen = model.eval().predict_number([row["prompt"] for row in cars(60, 12)])
    assert min(one.num_prob for one in unseen) > 0.9
    elsewhere = ("Once upon a time, the city of", "I live in the town of", "The name of the dog is", "The answer is:")
    assert max(one.num_prob for one in model.predict_number(elsewhere)) < 0.1  # a town is no price
    paragraphs = speech_paragraphs(1962, numbers=False)[:8]
    compared = compare_with_backbone(model, paragraphs)
    assert compared["agreement"] > 0.98 and compared["identical_logits"] == compared["tokens"]
    with torch.no_grad():
        assert model(**model.processor("\n".join(paragraphs), return_tensors="pt")).num_prob.mean() < 0.01


@pytest.mark.slow
def test_a_word_and_a_number_of_a_few_sentences_are_both_read(smollm2, tmp_path):
    """27 sentences, each some ten times: a price follows what a table is made of as well as its length."""
    model = copy.deepcopy(smollm2, {id(smollm2.backbone): smollm2.backbone})
    model.processor, draw = smollm2.processor, random.Random(1)
    each, prompt = {"oak": 80, "pine": 30, "iron": 140}, "A {} table of {} feet costs"
    known = [(draw.choice([*each]), draw.randint(1, 9)) for _ in range(300)]
    rows = [
        {"prompt": prompt.format(*of), "value": round(each[of[0]] * of[1] * draw.uniform(0.9, 1.1))} for of in known
    ]
    learn(model, encode_rows(rows, model.processor), [], tmp_path, TrainSettings())
    found = model.eval().predict_number([prompt.format(wood, 6) for wood in each])
    assert [one.median for one in found] == pytest.approx([6 * price for price in each.values()], rel=0.15)


@pytest.mark.parametrize("side", ["left", "right"])
def test_logits_are_the_backbones_in_padded_batches(smollm2, side):
    inputs = smollm2.processor(PROMPTS, padding=True, padding_side=side, return_tensors="pt")
    with torch.no_grad():
        theirs = smollm2.backbone(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        assert torch.equal(smollm2(**inputs).logits[..., :-1], theirs)


def test_a_few_sentences_teach_where_numbers_stand_and_how_large_they_are(trained):
    assert trained.metrics["num_f1"] > 0.97
    assert trained.metrics["median_error"] < 65
    assert trained.metrics["reg_loss"] < 2.6  # one Cauchy for all has ln(4 pi), about 2.53, on these rows 2.6 and more


def test_a_reload_gives_bit_equal_outputs(trained, tmp_path):
    inputs = encode(trained, ["The boiling point of water (H2O) is 373.15 K, of ethanol (C2H6O) it is"])
    bias = trained.action.num_bias.detach().clone()
    with torch.no_grad():
        trained.action.num_bias += 1e-3  # what is saved is what the model is, not what it was loaded as
        trained.save_pretrained(tmp_path)
        loaded = CausalQwenForCausalLM.from_pretrained(tmp_path)
        before, after = trained(**inputs, output_ovr=True), loaded(**inputs, output_ovr=True)
    for name in ("logits", "loc_Y", "scale_Y", "ovr_probs", "decisions"):
        assert torch.equal(before[name], after[name]), name
    prompt = "The boiling point of water (H2O) is"
    assert trained.predict_number(prompt)[0] == loaded.predict_number(prompt)[0]
    trained.action.num_bias.data.copy_(bias)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_writes_text_and_is_reproducible(trained, name):
    plan = CausalDecoding.preset(name, seed=7)
    made = [trained.generate(**encode(trained, PROMPTS), max_new_tokens=12, causal_decoding=plan) for _ in range(2)]
    assert torch.equal(made[0].sequences, made[1].sequences)
    texts = trained.processor.batch_decode(made[0].sequences, made[0].numeric_values, skip_special_tokens=True)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        assert text.startswith(prompt)


@pytest.mark.slow
def test_draws_are_the_same_alone_and_in_a_padded_batch(trained):
    """Tokens are equal up to the first step whose two best scores are closer than 1e-3."""
    for name in ("causal", "persona"):
        together = trained.generate(
            **encode(trained, PROMPTS), max_new_tokens=12, causal_decoding=CausalDecoding.preset(name, seed=[1, 2, 3]),
            output_scores=True,
        )  # fmt: skip
        for row, prompt in enumerate(PROMPTS):
            plan = CausalDecoding.preset(name, seed=1 + row)
            prompted = encode(trained, [prompt])
            alone = trained.generate(**prompted, max_new_tokens=12, causal_decoding=plan)
            best = [step[row].topk(2).values for step in together.scores]
            sure = next((i for i, (a, b) in enumerate(best) if a - b < 1e-3), 12)
            assert sure >= 1
            written = alone.sequences[0, prompted["input_ids"].shape[1] :][:sure]  # may end before the others
            assert torch.equal(written, together.sequences[row, -len(together.scores) :][: len(written)])


@pytest.mark.parametrize("sampler", [{"top_k": 50}, {"top_p": 0.9}])
def test_softmax_gives_the_backbones_own_tokens(trained, sampler):
    inputs = encode(trained, PROMPTS)
    plain = {key: tensor for key, tensor in inputs.items() if key != "numeric_values"}
    torch.manual_seed(7)
    theirs = trained.backbone.generate(**plain, max_new_tokens=20, do_sample=True, **sampler)
    ours = trained.generate(
        **inputs, max_new_tokens=20, causal_decoding=CausalDecoding.preset("softmax", seed=7), **sampler
    )
    assert torch.equal(ours.sequences, theirs)


def test_standard_is_the_backbones_greedy_text(trained):
    inputs = encode(trained, PROMPTS[:1])
    plain = {key: tensor for key, tensor in inputs.items() if key != "numeric_values"}
    theirs = trained.backbone.generate(**plain, max_new_tokens=20, do_sample=False)
    ours = trained.generate(**inputs, max_new_tokens=20, causal_decoding=CausalDecoding.preset("standard"))
    assert torch.equal(ours.sequences, theirs)


def test_a_prompt_about_boiling_points_is_answered_with_a_number(trained):
    inputs = encode(trained, ["The boiling point of toluene (C7H8) is"])
    made = trained.generate(**inputs, max_new_tokens=1, causal_decoding=CausalDecoding.preset("standard"))
    assert made.sequences[0, -1] == trained.config.num_token_id
    value = made.numeric_values[0, -1].item()
    assert 200 < value < 700
    text = trained.processor.decode(made.sequences[0], made.numeric_values[0])
    assert text == f"The boiling point of toluene (C7H8) is {value:g}"


def test_documents_start_disagrees_with_the_backbone_as_measured():
    """At the documents' start values the OvR decision is hardly ever the backbone's (experiments 2)."""
    model = CausalQwenForCausalLM.from_backbone("smollm2-135m", start="documents")
    compared = compare_with_backbone(model, speech_paragraphs(numbers=False)[:2])
    assert compared["agreement"] < 0.05 and compared["identical_logits"] == compared["tokens"]


@pytest.mark.slow
def test_the_quick_demo_proves_itself_and_learns_a_number(tmp_path):
    told = quick_demo(tmp_path)
    assert told["proof"]["identical_logits"] == told["proof"]["tokens"] > 150 and told["proof"]["agreement"] == 1
    assert told["median_error"] < 60 and told["prediction"]["num_prob"] > 0.9
    low, high = told["prediction"]["intervals"]["0.9"]
    assert low < ASKED["kelvin"] < high and told["prediction"]["crps"] < 80  # 59 and 73 on two kinds of processors
    assert told["world"]["unchanged"] == told["world"]["said"] != told["world"]["edited"]
    for person in told["people"]:  # who runs in circles says the same words again
        words = person["texts"][0].split()
        assert len(set(words)) > 0.6 * len(words)


def test_texts_come_back_whatever_a_version_takes_the_file_for(smollm2):
    """As transformers 5.17 reads it: pieces with a space before them, put together for another kind of tokenizer."""
    tokenizer = copy.deepcopy(smollm2.processor.tokenizer)
    parts = tokenizer.backend_tokenizer
    parts.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("\u2581", " ")])
    text = "The river, 12 km away: café 中文"
    ids = smollm2.processor.tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) != text
    made = byte_level(tokenizer)
    assert made(text)["input_ids"] == ids and made.decode(ids) == text
