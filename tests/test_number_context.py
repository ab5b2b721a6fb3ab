"""What the context holds of a number: its value, its digits, or both."""

import copy
import math

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from causalqwen import CausalDecoding, CausalQwenForCausalLM, CausalQwenProcessor, NumberTextStreamer, Observation
from causalqwen.data import Row, encode_rows
from causalqwen.data.encoding import collate
from causalqwen.modeling.outputs import CACHE
from causalqwen.modeling.reading import contexts_of, encode_text, read_contexts
from causalqwen.numbers import find_numbers
from conftest import FAMILIES, graft_tiny
from test_generation import PROMPTS, eager, encode

CONTEXTS = ["value", "digits", "both"]
TEXTS = [
    "It is 5 and then -3.5 of the 1,000 people",
    "7",
    "12 stands first, and 1,272.50 last: (-8)",
    "价格是99.9元 或 三百二十",
    "no number",
    "",
    "<|im_start|>user\n42<|im_end|>\n3-4 km",
]


@pytest.fixture(scope="module", params=CONTEXTS)
def processor(request, tiny_tokenizer) -> CausalQwenProcessor:
    return CausalQwenProcessor(tiny_tokenizer, number_context=request.param)


@pytest.fixture(params=CONTEXTS[1:])
def talker(request, tiny_tokenizer) -> CausalQwenForCausalLM:
    """A tiny model that often decides for `<NUM>`, and writes digits behind it."""
    return eager(graft_tiny("llama", tiny_tokenizer, number_context=request.param))


@pytest.mark.parametrize("family", list(FAMILIES))
def test_digits_are_read_exactly_as_the_bare_backbone_reads_the_text(family, tiny_tokenizer):
    model = graft_tiny(family, tiny_tokenizer, number_context="digits").double()
    texts = [text for text in TEXTS if text]
    batch = model.processor(texts, padding=True, padding_side="left", return_tensors="pt")
    padded = model.features(**batch).last_hidden_state
    with_plan = model(**batch, causal_decoding=CausalDecoding(individual="token", seed=3)).loc_Y
    for row, text in enumerate(texts):
        plain = tiny_tokenizer(text, return_tensors="pt")["input_ids"]
        theirs = model.backbone.base_model(input_ids=plain).last_hidden_state[0]
        inputs = model.processor(text, return_tensors="pt")
        ids = inputs["input_ids"][0]
        words = ids != model.config.num_token_id
        assert ids[words].tolist() == plain[0].tolist() and (~words).sum() == len(find_numbers(text))
        torch.testing.assert_close(model.features(**inputs).last_hidden_state[0, words], theirs, rtol=0, atol=1e-9)
        torch.testing.assert_close(padded[row, -len(ids) :][words], theirs, rtol=0, atol=1e-9)
        if row in (0, 2):  # draws belong to places in the plain text, however long the row is
            alone = model(**inputs, causal_decoding=CausalDecoding(individual="token", seed=3)).loc_Y
            torch.testing.assert_close(with_plan[row, -len(ids) :][words], alone[0, words], rtol=0, atol=1e-6)


def test_positions_that_are_given_are_kept(tiny_tokenizer):
    """Counted with `<NUM>` or without it, from 0 or from elsewhere."""
    model = graft_tiny("llama", tiny_tokenizer, number_context="digits").double()
    inputs = model.processor("It is 5 and then -3.5 of", return_tensors="pt")
    hidden = inputs["input_ids"] == model.config.num_token_id
    length, words = hidden.shape[1], ~hidden[0]
    expected = model(**inputs).logits[0, words]
    raw = torch.arange(length)[None]
    told = inputs["attention_mask"].masked_fill(hidden, 0)
    seen = (told.cumsum(-1) - 1).clamp(min=0)
    for places in ({"position_ids": raw}, {"position_ids": seen, "attention_mask": told}):
        found = model(**{**inputs, **places}).logits[0, words]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    # rotary positions are relative: all moved by as much give the same, and a gap in them does not
    torch.testing.assert_close(model(**inputs, position_ids=raw + 7).logits[0, words], expected, rtol=0, atol=1e-4)
    gap = raw + 3 * (raw > length // 2)
    assert not torch.allclose(model(**inputs, position_ids=gap).logits[0, words], expected, atol=1e-3)


def test_only_digits_hide_num(tiny_tokenizer):
    """`both` shows the value to the backbone, `digits` does not, whatever the value is."""
    inputs = CausalQwenProcessor(tiny_tokenizer, number_context="both")("It is 5 and", return_tensors="pt")
    other = dict(inputs) | {"numeric_values": inputs["numeric_values"] * 1000}
    for context, same in (("digits", True), ("both", False)):
        model = graft_tiny("qwen2", tiny_tokenizer, number_context=context)
        first, second = (model.features(**one).last_hidden_state[0, -1] for one in (inputs, other))
        assert torch.equal(first, second) == same


def test_digits_stand_behind_num_and_only_it_has_a_value(processor):
    encoded = processor("It is 5 or 1,272.50 K")
    ids, values = encoded["input_ids"], list(encoded["numeric_values"])
    places = [place for place, token in enumerate(ids) if token == processor.num_token_id]
    assert [values[place] for place in places] == [5.0, 1272.5] and sum(value != 0 for value in values) == 2
    behind = "".join(processor.tokenizer.convert_ids_to_tokens(ids[places[1] + 1 :]))
    assert behind.startswith("ĠK" if processor.number_context == "value" else "Ġ1,272.50")
    written = [token for token, digit in zip(ids, encoded.digits[0], strict=True) if digit]
    assert processor.tokenizer.decode(written) == ("" if processor.number_context == "value" else " 5 1,272.50")
    tokens, shown = processor.tokenize("It is 5")
    assert tokens[:3] == processor.tokenizer.tokenize("It is")[:3] and shown[tokens.index("<NUM>")] == 5.0


def test_num_comes_before_a_token_that_reaches_into_its_number():
    """The token "(-" begins before the number; `<NUM>` is predicted before any of its signs is seen."""
    processor = CausalQwenProcessor.from_pretrained("smollm2-135m", number_context="digits")
    encoded = processor("we lost (-5) of them")
    shown = processor.tokenizer.convert_ids_to_tokens(encoded["input_ids"])
    place = encoded["input_ids"].index(processor.num_token_id)
    assert shown[place + 1 : place + 3] == ["Ġ(-", "5"]
    assert encoded.digits[0][place : place + 4] == [False, True, True, False]
    assert processor.decode(encoded) == "we lost (-5) of them"


def test_tokens_that_the_tokenizer_adds_are_no_digits(tiny_tokenizer):
    tokenizer = copy.deepcopy(tiny_tokenizer)
    around = {"single": "<|im_start|> $A <|endoftext|>", "special_tokens": [("<|endoftext|>", 0), ("<|im_start|>", 1)]}
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(**around)
    processor = CausalQwenProcessor(tokenizer, number_context="digits")
    encoded = processor("5 or 6")
    ids, digits = encoded["input_ids"], encoded.digits[0]
    assert ids[:2] == [1, processor.num_token_id] and ids[-1] == 0 and not digits[0] and not digits[-1] and digits[2]
    assert processor.decode(encoded, skip_special_tokens=True) == "5 or 6"


def test_digits_are_no_labels_and_a_prompt_ends_with_num(processor):
    rows = [
        Row("text", "x", {"text": "It is 5 now"}),
        Row("prompt", "x", {"prompt": "Of 20 it is", "value": 7.0}),
        Row("question", "x", {"question": "How many?", "answer": "some 30 of them"}),
    ]
    examples = encode_rows(rows, processor)
    batch = collate(examples, 2)
    num, decode = processor.num_token_id, processor.tokenizer.decode
    labels = [[token for token in row if token not in (-100, num)] for row in batch["labels"].tolist()]
    if processor.number_context == "value":
        whole = [examples[row].input_ids[1:] for row in (0, 1)]
        assert labels[:2] == [[token for token in ids if token != num] for ids in whole]
    assert decode(labels[0]).endswith("s now") and decode(labels[1]).endswith(" it is")
    assert "0" not in decode(labels[1]) and decode(labels[2]) == " some of them"
    assert (batch["labels"] == num).sum(1).tolist() == [1, 2, 1]
    known = [[value for value in row if math.isfinite(value) and value] for row in batch["numeric_labels"].tolist()]
    assert known == [[5.0], [7.0], [30.0]] and examples[1].input_ids[-1] == num
    assert [example.positions for example in examples] == (batch["labels"] != -100).sum(1).tolist()


@pytest.mark.parametrize(
    ("context", "preset"), [("digits", "causal"), ("digits", "softmax"), ("digits", None), ("both", "persona")]
)
def test_generated_numbers_are_followed_by_their_digits(tiny_tokenizer, context, preset):
    talker = eager(graft_tiny("llama", tiny_tokenizer, number_context=context))
    processor, num = talker.processor, talker.config.num_token_id
    plan = {} if preset is None else {"causal_decoding": CausalDecoding.preset(preset, seed=5)}
    inputs = encode(talker, PROMPTS)
    out = talker.generate(**inputs, **plan, max_new_tokens=30, return_dict_in_generate=True)
    texts = processor.batch_decode(out.sequences, out.numeric_values, skip_special_tokens=True)
    start, found = inputs["input_ids"].shape[1], 0
    for ids, values, text in zip(out.sequences.tolist(), out.numeric_values.tolist(), texts, strict=True):
        assert all((value == 0) or token == num for token, value in zip(ids, values, strict=True))
        for place in [place for place in range(start, len(ids)) if ids[place] == num]:
            whole = processor.tokens_of(ids[:place], values[place])
            room = len(ids) - place - 1
            assert ids[place + 1 : place + 1 + len(whole)] == whole[:room]
            # Read back by the grammar: the same value.
            form = processor.tokenizer.decode(whole)
            assert [span.value for span in find_numbers(f"is {form.strip()}")] == [values[place]]
            assert text.count(form) >= 1
            found += len(whole) <= room
        shown = processor.tokenizer.decode([token for token in ids if token != num], skip_special_tokens=True)
        assert text.startswith(shown)  # and each once: a number that was cut short is finished
    assert found > 2


def test_a_row_alone_writes_what_it_writes_in_a_batch_and_without_a_cache(talker):
    talker.config.value_digits = 3  # the last of six digits may round either way in float32
    plan = CausalDecoding.preset("causal", seed=[11, 12, 13])
    together = talker.generate(**encode(talker, PROMPTS), causal_decoding=plan, max_new_tokens=24)
    length, numbers = together.sequences.shape[1] - 24, 0
    for row, cache in ((0, False), (1, True), (2, True)):
        one = CausalDecoding.preset("causal", seed=11 + row)
        inputs = encode(talker, PROMPTS[row : row + 1])
        alone = talker.generate(**inputs, causal_decoding=one, max_new_tokens=24, use_cache=cache)
        assert torch.equal(alone.sequences[0, -24:], together.sequences[row, length:])
        torch.testing.assert_close(alone.numeric_values[0, -24:], together.numeric_values[row, length:])
        numbers += (alone.sequences[0, -24:] == talker.config.num_token_id).sum().item()
    assert numbers > 2


def test_what_was_generated_is_read_as_it_was_written(tiny_tokenizer):
    """In `digits`, greedy search on the plain text chooses what `generate` chose, number by number."""
    model = eager(graft_tiny("qwen2", tiny_tokenizer, number_context="digits"))
    out = model.generate(**encode(model, PROMPTS[2:3]), max_new_tokens=24, return_dict_in_generate=True)
    ids, num = out.sequences[0], model.config.num_token_id
    start = len(model.processor(PROMPTS[2])["input_ids"])
    assert (ids[start:] == num).sum() > 1
    chosen, place = 0, start
    while place < len(ids):
        plain = ids[:place][ids[:place] != num]
        z = model.backbone.base_model(input_ids=plain[None]).last_hidden_state
        assert model.heads(z[:, -1:]).logits[0, 0].argmax() == ids[place]
        digits = model.processor.tokens_of(ids[:place].tolist(), out.numeric_values[0, place].item())
        chosen, place = chosen + 1, place + 1 + len(digits) * (ids[place] == num)
    assert chosen > 3


def test_a_number_that_ends_a_prompt_is_written_out_first(talker):
    ids = [*talker.processor("It is")["input_ids"], talker.config.num_token_id]
    values = torch.tensor([[0.0] * (len(ids) - 1) + [351.5]], dtype=torch.float64)
    out = talker.generate(torch.tensor([ids]), numeric_values=values, max_new_tokens=8)
    assert talker.processor.tokenizer.decode(out[0, len(ids) :]).startswith(" 351.5")


def test_a_number_that_was_cut_short_is_written_whole(processor):
    ids = processor("It is 351.25")["input_ids"]
    values = [351.25 if token == processor.num_token_id else 0.0 for token in ids]
    place = ids.index(processor.num_token_id)
    for end in range(place + 1, len(ids) + 1):
        padded = [*ids[:end], 2, 2]
        assert processor.decode(ids[:end], values[:end]) == "It is 351.25"
        assert processor.decode(padded, [*values[:end], 0.0, 0.0], skip_special_tokens=True) == "It is 351.25"


def test_streamed_text_is_the_decoded_text(talker, capsys):
    inputs, streamer = encode(talker, PROMPTS[:1]), NumberTextStreamer(talker.processor)
    out = talker.generate(**inputs, max_new_tokens=30, streamer=streamer, return_dict_in_generate=True)
    assert capsys.readouterr().out.strip("\n") == talker.processor.decode(out.sequences[0], out.numeric_values[0])


def test_the_setting_is_saved_and_comes_back(talker, tmp_path):
    talker.save_pretrained(tmp_path)
    loaded = CausalQwenForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.number_context == loaded.processor.number_context == talker.config.number_context
    inputs = encode(talker, PROMPTS[:1])
    assert torch.equal(loaded(**inputs).logits, talker(**inputs).logits)
    assert CausalQwenProcessor(talker.processor.tokenizer).number_context == "value"
    anew = CausalQwenForCausalLM.from_pretrained(tmp_path, number_context="value")
    assert anew.processor.number_context == "value"


def test_digits_are_no_evidence_and_are_read_as_plain_text(tiny_tokenizer):
    """Who wrote a text chose its words and its numbers; digits follow from the numbers."""
    model = graft_tiny("llama", tiny_tokenizer, number_context="digits").double()
    model.config.value_range = [0.0, 100.0]  # as training leaves it: numbers are read
    prompt, text = "Of 20 people", " some 1,272.50 came (-5), and 7"
    read = read_contexts(model, contexts_of(model, Observation(text, prompt), 512))
    plain = tiny_tokenizer(prompt + text, return_tensors="pt")["input_ids"]
    assert plain[0].tolist() == [*tiny_tokenizer(prompt)["input_ids"], *tiny_tokenizer(text)["input_ids"]]
    theirs = model.backbone.base_model(input_ids=plain).last_hidden_state[0]
    encoded, at = encode_text(model, text), len(tiny_tokenizer(prompt)["input_ids"])
    expected, targets = [], []
    for token, is_digit in zip(encoded.ids.tolist(), encoded.digits.tolist(), strict=True):
        if not is_digit:
            expected.append(theirs[at - 1])
            targets.append(token)
        at += token != model.config.num_token_id
    assert read.targets.tolist() == targets and targets.count(model.config.num_token_id) == 3
    assert read.values[read.values != 0].tolist() == [1272.5, -5.0, 7.0]
    torch.testing.assert_close(read.features, torch.stack(expected), rtol=0, atol=1e-9)
    found = model.float().abduct(Observation(text, prompt))
    assert (found.evidence[0].tokens, found.evidence[0].values) == (len(targets) - 3, 3)
    with pytest.raises(ValueError, match="nothing can be learned"):
        model.abduct("5")  # nothing comes before the number, and digits say nothing
    shares = model.shares(Observation(text, prompt))
    assert [share.text for share in shares if any(sign.isdigit() for sign in share.text)] == ["1272.5", "-5", "7"]


def test_embeddings_hold_no_numbers_to_hide(talker):
    embeddings = talker.get_input_embeddings()(torch.tensor([[5, 6, 7]]))
    with pytest.raises(ValueError, match="generating from inputs_embeds needs number_context='value'"):
        talker.generate(inputs_embeds=embeddings, max_new_tokens=3)


def test_unknown_contexts_are_refused(tiny_tokenizer):
    with pytest.raises(ValueError, match="number_context: input should be 'value', 'digits' or 'both', got 'words'"):
        graft_tiny("llama", tiny_tokenizer, number_context="words")
    with pytest.raises(ValueError, match="unknown number_context 'words'; use one of value, digits, both"):
        CausalQwenProcessor(tiny_tokenizer, number_context="words")


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_features_read_a_cache_by_either_name(tiny_tokenizer, name):
    model = graft_tiny("llama", tiny_tokenizer, number_context="digits")
    inputs = encode(model, ["It is 5 and then more"])
    ids = inputs["input_ids"]
    mask = inputs["attention_mask"].masked_fill(ids == model.config.num_token_id, 0)
    with torch.no_grad():
        whole = model.features(**inputs).last_hidden_state[:, -1]
        past = model.features(**{key: column[:, :-1] for key, column in inputs.items()}, use_cache=True)[CACHE]
        step = model.features(ids[:, -1:], mask, **{name: past}).last_hidden_state[:, -1]
    torch.testing.assert_close(step, whole)
    with pytest.raises(ValueError, match="attention_mask beside a cache"):
        model(ids[:, :1], **{name: past})


def test_drafts_may_be_counted_by_a_tensor(talker, monkeypatch):
    """As transformers 5.17 does."""
    inputs = encode(talker, ["They count 12 and 12 and 12"])
    settings = {"do_sample": False, "max_new_tokens": 12, "return_dict_in_generate": True}
    plain = talker.generate(**inputs, **settings)
    update = type(talker)._update_model_kwargs_for_generation

    def counted(self, outputs, model_kwargs, *, num_new_tokens=1, **kwargs):
        return update(self, outputs, model_kwargs, num_new_tokens=torch.tensor(int(num_new_tokens)), **kwargs)

    monkeypatch.setattr(type(talker), "_update_model_kwargs_for_generation", counted)
    drafted = talker.generate(**inputs, **settings, prompt_lookup_num_tokens=3)
    torch.testing.assert_close(drafted.sequences, plain.sequences)
    torch.testing.assert_close(drafted.numeric_values, plain.numeric_values)


def test_sequences_packed_into_one_row_are_refused(tiny_tokenizer):
    model = graft_tiny("llama", tiny_tokenizer)
    with pytest.raises(ValueError, match="sequences packed into one row are not read apart"):
        model(torch.ones(1, 6, dtype=torch.int64), position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]))


def test_a_model_is_trained_without_a_cache_where_the_trainer_says_so(tiny_tokenizer):
    model = graft_tiny("llama", tiny_tokenizer)
    inputs = encode(model, PROMPTS[:1])
    assert CACHE in model(**inputs)
    model.config.use_cache = False  # as transformers' Trainer does
    assert CACHE not in model(**inputs)
