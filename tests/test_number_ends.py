"""A number ends where it ends: the numbers that are read in a generated text are those that were predicted."""


import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from causalqwen.decoding import PRESETS
from conftest import broken_numbers, graft_tiny
from test_generation import eager

CONTEXTS = ["value", "digits", "both"]
PROMPTS = [
    "The boiling point is",
    "In January",
    "It costs $",
    "a -",
    "1",
    "so `x =",
    "It was 427.6",
    "call 555",
    "价格第",
    "https://a.b/",
    "10^",
    "at 12:",
]
WAYS = {
    "greedy": {},
    "sample": {"do_sample": True, "top_k": 0},
    "nucleus": {"do_sample": True, "top_p": 0.9},
    "beams": {"num_beams": 3},
    "several": {"num_beams": 2, "do_sample": True},
    "penalty": {"repetition_penalty": 1.3},
} | {name: {"causal_decoding": name} for name in PRESETS}


class Fond(LogitsProcessor):
    """A model that is fond of what makes another number of one before it."""

    def __init__(self, tokenizer) -> None:
        names = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        fond = [
            token for token, name in enumerate(names) if name and set(name) <= set("0123456789.,eE%-+/`$½KĠkgmn^:'")
        ]
        self.fond = torch.tensor(fond)

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, self.fond] += 2.0
        return scores


@pytest.fixture(scope="module", params=CONTEXTS)
def talker(request, tiny_tokenizer):
    return eager(graft_tiny("llama", tiny_tokenizer, number_context=request.param))


def write(model, prompts=PROMPTS, new=24, **how):
    inputs = model.processor(prompts, padding=True, padding_side="left", return_tensors="pt", prompt=True)
    made = model.generate(**inputs, max_new_tokens=new, return_dict_in_generate=True, pad_token_id=2, **how)
    padding = (inputs["attention_mask"] == 0).sum(-1).tolist()
    copies = len(made.sequences) // len(prompts)
    rows = zip(made.sequences.tolist(), made.numeric_values.tolist(), strict=True)
    return [(ids[padding[n // copies] :], values[padding[n // copies] :]) for n, (ids, values) in enumerate(rows)]


def check(model, texts, most_unannounced=None):
    number, count = model.config.num_token_id, 0
    for ids, values in texts:
        assert broken_numbers(model.processor, ids, values) == [], model.processor.decode(ids, values)
        count += ids.count(number)
    assert count  # or nothing was tried


@pytest.mark.parametrize("fond", [False, True])
@pytest.mark.parametrize("way", list(WAYS))
def test_every_number_is_read_as_it_was_predicted(talker, way, fond):
    torch.manual_seed(0)
    how = dict(WAYS[way])
    if fond:
        how["logits_processor"] = LogitsProcessorList([Fond(talker.processor.tokenizer)])
    check(talker, write(talker, **how))
