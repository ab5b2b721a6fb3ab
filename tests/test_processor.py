"""Text to tokens and values, and back."""

import copy
import pickle
import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from causalqwen import CausalQwenProcessor
from causalqwen.data.boiling_points import sentence
from causalqwen.data.texts import speech_paragraphs
from causalqwen.modeling.backbones import free_rows
from causalqwen.modeling.processor import SLOT
from causalqwen.numbers import KINDS, NumberRules, find_numbers
from conftest import make_backbone

CONTEXTS = ["value", "digits", "both"]
TEXTS = [
    "The price is 1,272.50 dollars and <NUM> is text.",
    "no numbers at all",
    "5",
    "−7 and 3.0 and 3 and 0.10, 价格是99.9元, x1, 2024-01-05\nnext line  12",
    "a  5   6 7",
    " 8 starts with a space",
    "ends in 9 ",
    "<|im_start|>user\n42<|im_end|>",
    "１２．５％ 和 ５",
]


@pytest.fixture(scope="module")
def processor(tiny_tokenizer) -> CausalQwenProcessor:
    return CausalQwenProcessor(tiny_tokenizer)


FEW_RULES = NumberRules(kinds=("number",), groups=",")
OTHER_RULES = NumberRules(kinds=KINDS, decimal=",", groups=" .")


@pytest.fixture(
    scope="module",
    params=[(FEW_RULES, "value"), (OTHER_RULES, "both"), *((NumberRules(), name) for name in CONTEXTS)],
)
def any_processor(request, tiny_tokenizer) -> CausalQwenProcessor:
    rules, context = request.param
    return CausalQwenProcessor(tiny_tokenizer, number_rules=rules, number_context=context)


def test_the_context_of_a_processor_is_a_context(tiny_tokenizer):
    processor = CausalQwenProcessor(tiny_tokenizer)
    with pytest.raises(ValueError, match=r"context is one of modeling\.context\.CONTEXTS, not 'digits'"):
        processor.context = "digits"
    assert processor.number_context == "value"


@pytest.mark.parametrize("text", TEXTS)
def test_decoding_gives_the_text_back(processor, text):
    encoded = processor(text)
    assert processor.decode(encoded) == text
    assert processor.decode(encoded["input_ids"], encoded["numeric_values"], encoded.number_texts[0]) == text


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_values_stay_aligned_in_padded_batches_on_both_sides(tiny_tokenizer, side, context, monkeypatch):
    """And in cut ones."""
    processor = CausalQwenProcessor(tiny_tokenizer, number_context=context)
    batch = processor(TEXTS, padding=True, padding_side=side, return_tensors="pt")
    assert batch["numeric_values"].dtype == torch.float64
    assert batch["input_ids"].shape == batch["attention_mask"].shape == batch["numeric_values"].shape
    is_num = batch["input_ids"] == processor.num_token_id
    assert (batch["numeric_values"][~is_num] == 0).all()
    for row, text in enumerate(TEXTS):
        alone = processor(text)
        kept = batch["attention_mask"][row].bool()
        assert batch["input_ids"][row, kept].tolist() == alone["input_ids"]
        assert batch["numeric_values"][row, kept].tolist() == list(alone["numeric_values"])
    assert processor.batch_decode(batch) == TEXTS
    columns = batch["input_ids"], batch["numeric_values"], batch.number_texts
    rows = [processor.decode(i, v, written, skip_special_tokens=True) for i, v, written in zip(*columns, strict=True)]
    assert rows[:7] == TEXTS[:7]  # the next one is made of special tokens
    whole, window = processor(TEXTS[3]), slice(-6, None) if side == "left" else slice(6)
    for tokenizer in (processor.slotted_tokenizer, processor.tokenizer):
        monkeypatch.setattr(tokenizer, "truncation_side", side)
    cut = processor(TEXTS[2:4], truncation=True, max_length=6, padding="max_length")
    for name in ("input_ids", "numeric_values"):
        assert list(cut[name][1]) == list(whole[name])[window] and len(cut[name][0]) == 6


@pytest.mark.parametrize("context", ["value", "digits"])
def test_a_long_text_is_written_in_linear_time(tiny_tokenizer, context):
    processor = CausalQwenProcessor(tiny_tokenizer, number_context=context)
    text = "7 " * 60_000
    encoded = processor([text])
    started = time.process_time()
    assert processor.batch_decode(encoded) == [text]
    assert time.process_time() - started < 5  # a fifth of a second; a minute where each number looks at all behind it


def test_a_typed_num_is_text(processor):
    tokens, values = processor.tokenize("<NUM> 5 <NUM>")
    assert tokens.count("<NUM>") == 1 and values[tokens.index("<NUM>")] == 5.0
    assert sum(v != 0 for v in values) == 1


def test_tokens_are_told_with_their_kinds_and_units(processor):
    told = processor.tokenize("is 351.4 K or 3.5万元")
    numbers = [row for row in zip(*told, told.kinds, told.units, strict=True) if row[2]]
    assert numbers == [("<NUM>", 351.4, "number", "K"), ("<NUM>", 35000.0, "chinese", "元")]
    tokens, values = told
    assert len(tokens) == len(values) == len(told.units) and "35000" in str(told).split("chinese")[0]
    assert processor.tokenize("")[0] == []


def test_num_absorbs_one_space_and_prompts_lose_a_trailing_one(processor):
    assert processor("is 5")["input_ids"] == processor("is")["input_ids"] + [processor.num_token_id]
    assert processor("is ", prompt=True)["input_ids"] == processor("is")["input_ids"]
    assert processor.decode(processor("is  5")) == "is  5"
    assert processor(" ", prompt=True)["input_ids"] == processor(" ")["input_ids"] != []
    assert processor(["  ", "\n "], prompt=True)["input_ids"] == processor([" ", "\n"])["input_ids"]
    assert processor("", prompt=True)["input_ids"] == []


def test_generated_numbers_are_written_from_their_values(processor):
    ids = processor("is")["input_ids"] + [processor.num_token_id]
    assert processor.decode(ids, numeric_values=[0.0] * (len(ids) - 1) + [351.4]) == "is 351.4"
    ids = processor("价格是")["input_ids"] + [processor.num_token_id]
    assert processor.decode(ids, numeric_values=[0.0] * (len(ids) - 1) + [99.0]) == "价格是99"
    assert processor.decode(ids) == "价格是<NUM>"
    with pytest.raises(ValueError, match="2 values for"):
        processor.decode(ids, numeric_values=[0.0, 1.0])


def test_bad_input_is_refused_with_its_index(processor):
    with pytest.raises(ValueError, match=r"text 1: the number 9{21}.* at characters 3-403"):
        processor(["fine 5", "is " + "9" * 400])
    with pytest.raises(ValueError, match="takes a string"):
        processor([5])
    with pytest.raises(ValueError, match="noncharacters"):
        processor(f"a {SLOT} b")
    with pytest.raises(ValueError, match="padding=True"):
        processor(["a", "a longer one"], return_tensors="pt")
    with pytest.raises(ValueError, match="return_tensors"):
        processor("a", return_tensors="tf")
    with pytest.raises(ValueError, match="text and numbers only"):
        processor("a", images=["x.png"])


def test_chat_templates_keep_their_special_tokens_and_read_numbers(processor):
    messages = [{"role": "user", "content": "Is 5 more than 3?"}]
    ids = processor.apply_chat_template(messages, tokenize=True, return_dict=True, add_generation_prompt=True)
    ids = ids["input_ids"][0] if isinstance(ids["input_ids"][0], list) else ids["input_ids"]
    start = processor.tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert ids.count(start) == 2 and ids.count(processor.num_token_id) == 2


def test_rules_go_with_a_checkpoint(tiny_llama, tmp_path):
    rules = NumberRules(kinds=KINDS, decimal=",")
    tiny_llama.processor.number_rules = rules
    tiny_llama.save_pretrained(tmp_path)
    loaded = CausalQwenProcessor.from_pretrained(tmp_path)
    assert loaded.number_rules == rules and list(loaded("1/2 ist 0,5")["numeric_values"])[:1] == [0.5]
    assert loaded.decode([loaded.num_token_id], numeric_values=[351.4]) == "351,4"
    assert CausalQwenProcessor.from_pretrained(tmp_path, number_rules=NumberRules()).number_rules == NumberRules()


def test_a_bare_backbone_gets_the_default_rules(tiny_tokenizer, tmp_path):
    make_backbone("llama", tiny_tokenizer).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    assert CausalQwenProcessor.from_pretrained(tmp_path).number_rules == NumberRules()


def test_real_sentences_survive_the_round_trip(any_processor):
    """Speeches, boiling points, and this library's own documents, which hold code, tables and Chinese."""
    root = Path(__file__).parent.parent
    documents = [path.read_text(encoding="utf-8") for path in (*root.glob("*.md"), *root.glob("docs/*.md"))]
    texts = [line for text in documents for line in text.splitlines()]
    texts += [text for year in (1941, 2016) for text in speech_paragraphs(year)]
    texts += [sentence({"name": "hexan-2-one", "formula": "C6H12O", "kelvin": k / 8}) for k in range(0, 4000, 7)]
    encoded = any_processor(texts)
    assert any_processor.batch_decode(encoded) == texts
    assert sum(map(len, encoded.number_texts)) > 1500


def test_free_rows_are_those_that_no_token_uses(tiny_tokenizer):
    size = len(tiny_tokenizer)
    assert free_rows(tiny_tokenizer, size) == [size]
    assert free_rows(tiny_tokenizer, size + 3) == [size, size + 1, size + 2]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=50) | st.text("0123456789.,-+eE%: aK年价三百万½/", max_size=30))
def test_any_text_survives_the_round_trip(any_processor, text):
    processor = any_processor
    try:
        encoded = processor(text)
    except ValueError:
        return  # beyond float64, or a noncharacter: refused, tested above
    ids = processor.tokenizer(text)["input_ids"]
    plain = processor.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    if plain == text:  # lone surrogates and the like do not survive the bare tokenizer either
        assert processor.decode(encoded) == text
        numbers = find_numbers(text, processor.number_rules)
        assert encoded["input_ids"].count(processor.num_token_id) == len(numbers)
    if processor.context.writes:
        assert [token for token in encoded["input_ids"] if token != processor.num_token_id] == ids
        assert processor.decode(encoded["input_ids"], encoded["numeric_values"]) == plain


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_value_that_is_changed_is_written_anew_in_every_context(tiny_tokenizer, context):
    processor = CausalQwenProcessor(tiny_tokenizer, number_context=context)
    encoded = processor(["sold for 1,272.50 or 3.50", "lost -$1,200 (x5, 7) and 7"], padding=True, return_tensors="pt")
    assert processor.batch_decode(encoded) == ["sold for 1,272.50 or 3.50", "lost -$1,200 (x5, 7) and 7"]
    rows = [(encoded["input_ids"][row] == processor.num_token_id).nonzero().flatten() for row in (0, 1)]
    encoded["numeric_values"][0, rows[0][0]] = -1300.0
    encoded["numeric_values"][1, rows[1][0]] = -1300.0
    encoded["numeric_values"][1, rows[1][2]] = 8.5
    assert processor.batch_decode(encoded) == ["sold for -1300 or 3.50", "lost -$1300 (x5, 7) and 8.5"]


@pytest.mark.parametrize("context", ["digits", "both"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_changed_value_of_a_text_that_was_cut(tiny_tokenizer, context, side):
    """Wherever it was cut: within a time, or a number."""
    processor = CausalQwenProcessor(tiny_tokenizer, number_context=context)
    text = "She paid 5 dollars at 12:30 then 1,200.50, or 1万5000"
    whole = processor(text)["input_ids"]
    for length in range(3, len(whole) + 1):
        encoded = processor(text, truncation=True, max_length=length, truncation_side=side)
        places = [i for i, token in enumerate(encoded["input_ids"]) if token == processor.num_token_id]
        before = processor.decode(encoded)
        for number, place in enumerate(places):
            was, encoded["numeric_values"][place] = encoded["numeric_values"][place], 77.0
            known = encoded.number_texts[0][number].strip()
            now = processor.decode(encoded)
            assert "77" in now and (known not in before or now.count(known) == before.count(known) - 1)
            encoded["numeric_values"][place] = was
    assert processor.decode(processor(text)) == text


def test_copies_of_an_encoding_know_how_numbers_were_written(tiny_tokenizer):
    processor = CausalQwenProcessor(tiny_tokenizer)
    encoded = processor("sold for 1,272.50 or 3.50", return_tensors="pt")
    for made in (copy.deepcopy(encoded), pickle.loads(pickle.dumps(encoded))):
        assert processor.decode(made) == "sold for 1,272.50 or 3.50" and made.number_texts[0][0].value == 1272.5
