"""A number ends where it ends: the numbers that are read in a generated text are those that were predicted."""

import pytest
import torch

from campaign.generated import PROMPTS, WAYS, write
from causalqwen import CausalDecoding, CausalQwenProcessor, Intervention
from causalqwen.modeling.ends import TextEnd
from causalqwen.modeling.reading import encode_text
from causalqwen.modeling.worlds import continue_prompt
from causalqwen.numbers import find_numbers
from causalqwen.serving.text import GrowingText
from conftest import broken_numbers, graft_tiny
from test_generation import eager

CONTEXTS = ["digits", *(pytest.param(name, marks=pytest.mark.slow) for name in ("value", "both"))]


@pytest.fixture(scope="module", params=CONTEXTS)
def talker(request, tiny_tokenizer):
    return eager(graft_tiny("llama", tiny_tokenizer, number_context=request.param))


@pytest.mark.parametrize("fond", [False, True])
@pytest.mark.parametrize("way", list(WAYS))
def test_every_number_is_read_as_it_was_predicted(talker, way, fond):
    if way == "drafts" and fond:
        pytest.skip("drafts take no processor of one's own")
    torch.manual_seed(0)
    few = PROMPTS if way not in ("drafts", "drawn beams") else PROMPTS[::4]
    texts, count = write(talker, few, WAYS[way], fond=fond), 0
    for ids, values, _ in texts:
        assert broken_numbers(talker.processor, ids, values) == [], talker.processor.decode(ids, values)
        count += ids.count(talker.config.num_token_id)
    assert count  # or nothing was tried


def test_a_value_that_is_set_by_hand_is_read_as_it(talker):
    """Behind words that would make a date of it, and before digits; values that digits alone would make a name of."""
    talker.config.value_range = [0.0, 100.0]
    values_behind = {"It was": 383.8, "In January": 5.0, "at": 13800138000.0, "负": 3.9, "1万": 5000.0, "a -": 900.0}
    for prompt, value in values_behind.items():
        plan = CausalDecoding.preset("causal", seed=1)
        (world,) = continue_prompt(talker, prompt, plan, 1, 16, Intervention(values={0: value}))
        before, of_before, _ = encode_text(talker, prompt, prompt=True)
        ids, values = [*before.tolist(), *world.tokens.tolist()], [*of_before.tolist(), *world.values.tolist()]
        assert value in values and broken_numbers(talker.processor, ids, values) == []
        assert value in [span.value for span in find_numbers(prompt + world.text)]


def test_a_text_that_grows_has_each_number_where_it_says(talker):
    for ids, values, start in write(talker, PROMPTS, WAYS["causal"]):
        text = GrowingText(talker.processor, ids[:start], values[:start], ())
        spans = [(value, text.append(token, value)) for token, value in zip(ids[start:], values[start:], strict=True)]
        text.take(final=True)
        before = talker.processor.decode(ids[:start], values[:start])
        read = {span.start: span for span in find_numbers(before + text.text)}
        for value, (begin, end) in ((value, span) for value, span in spans if span is not None):
            span = read[len(before) + begin]
            assert (span.value, span.end) == (value, len(before) + end), before + text.text


@pytest.mark.parametrize(
    ("text", "allowed", "barred"),
    [
        (" 427.6", [".", ",", " K", " ", "%", "\n", " 5", "-", "(", "元"], ["5", "e5", "x", "万", ".5"]),
        (" 427.6.", [" ", " The", "\n"], ["5", "12"]),
        (" 427", [" and"], [",000", ".5", " 000"]),
        (" 427,", [" 5", "5", " and"], ["000", "000,000"]),
        (" 5-", [" ", "6"], ["year", "methyl"]),
        (" 555", ["-123"], ["-1234", " 0013 8000", "-01-05"]),
        (" 12", [" and"], [":30", "th", " Jan", "月5日", "/7"]),
        (" `5", [" K", "\n"], ["`", " b`"]),
        (" 1.0", ["-year"], ["1"]),
    ],
)
def test_what_may_follow_is_what_the_reader_says(tiny_tokenizer, text, allowed, barred):
    """Behind a number and what was written since, whatever tokens it takes."""
    processor = CausalQwenProcessor(tiny_tokenizer, number_context="digits")
    encoded = processor("It was" + text)
    ids, values = encoded["input_ids"], encoded["numeric_values"]
    place = ids.index(processor.num_token_id)

    def may_follow(tail: str) -> bool:
        now = list(ids)
        for token in tiny_tokenizer(tail)["input_ids"]:
            end = TextEnd(processor.ends, now, [*values, *[0.0] * (len(now) - len(ids))], place)
            if not end.allows(token):
                return False
            now.append(token)
        return True

    assert [tail for tail in allowed if not may_follow(tail)] == []
    assert [tail for tail in barred if may_follow(tail)] == []
