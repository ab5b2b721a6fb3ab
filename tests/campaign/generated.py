"""Generated texts: each number that was predicted is read where it stands, as its value, and no other one over it."""

import random
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from causalqwen import CausalDecoding, CausalQwenForCausalLM
from causalqwen.decoding import PRESETS
from causalqwen.numbers import find_numbers
from conftest import broken_numbers

from . import Bounds, Tally

AT_ONCE, NEW = 32, 24
PROMPTS = [
    "The boiling point is", "The boiling point of toluene (C7H8) is", "In January", "It costs $", "It costs US$ ",
    "a -", "1", "so `x =", "```\ny =", "It was 427.6", "It was 427.6.", "call 555", "+86", "价格第", "负", "1万",
    "https://a.b/", "10^", "at 12:", "2", "(1", "No.",
]  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "penalty": {"do_sample": False, "repetition_penalty": 1.3},
    "sample": {"do_sample": True, "top_k": 0},
    "nucleus": {"do_sample": True, "top_p": 0.9},
    "beams": {"num_beams": 3, "do_sample": False},
    "drawn beams": {"num_beams": 2, "do_sample": True},
    "drafts": {"prompt_lookup_num_tokens": 3, "do_sample": False},
} | {name: {"causal_decoding": name} for name in PRESETS}
_SLOW = ("sample", "nucleus", "beams", "drawn beams", "drafts", "softmax")  # and how often they are left out
_LEFT_OUT = 0.9


class Fond(LogitsProcessor):
    """Makes a model fond of what makes another number of one before it."""

    def __init__(self, tokenizer: Any, by: float = 2.0) -> None:
        names = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        marks = set("0123456789.,eE%-+/`$½KĠkgmn^:'")
        self.fond = torch.tensor([token for token, name in enumerate(names) if name and set(name) <= marks])
        self.by = by

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[:, self.fond] += self.by
        return scores


def write(
    model: CausalQwenForCausalLM, prompts: list[str], way: dict[str, Any], new: int = NEW, fond: bool = False
) -> list[tuple[list[int], list[float], int]]:
    """Ids and values of what a model makes of each prompt, and where its own part begins, without padding."""
    way = dict(way)
    if fond:
        way["logits_processor"] = LogitsProcessorList([Fond(model.processor.tokenizer)])
    if "prompt_lookup_num_tokens" in way and len(prompts) > 1:
        return [row for prompt in prompts for row in write(model, [prompt], way, new)]
    inputs = model.processor(prompts, padding=True, padding_side="left", return_tensors="pt", prompt=True)
    pad = model.processor.tokenizer.pad_token_id
    made = model.generate(**inputs, max_new_tokens=new, return_dict_in_generate=True, pad_token_id=pad, **way)
    padding, width = (inputs["attention_mask"] == 0).sum(-1).tolist(), inputs["input_ids"].shape[1]
    rows = zip(made.sequences.tolist(), made.numeric_values.tolist(), padding, strict=True)
    return [(ids[empty:], values[empty:], width - empty) for ids, values, empty in rows]


def unannounced(model: CausalQwenForCausalLM, ids: list[int], values: list[float], start: int) -> int:
    """How many numbers of a model's own part are digits without a `<NUM>`."""
    number, decode = model.config.num_token_id, model.processor.decode
    before = len(decode(ids[:start], values[:start], skip_special_tokens=True))
    spans = find_numbers(decode(ids, values, skip_special_tokens=True), model.processor.number_rules)
    return sum(span.start >= before for span in spans) - ids[start:].count(number)


def run(bounds: Bounds, models: dict[str, CausalQwenForCausalLM]) -> Tally:
    """The models in turn, `AT_ONCE` texts a draw; prompts of `PROMPTS`, some of which come with a number before them."""
    tally = Tally()
    for draw, chance in bounds.draws():
        name = list(models)[draw % len(models)]
        model = models[name]
        way = chance.choice(list(WAYS))
        if way in _SLOW and chance.random() < _LEFT_OUT:
            way = chance.choice([one for one in WAYS if one not in _SLOW])
        fond, seed = chance.random() < 0.3 and way != "drafts", chance.randrange(2**31)
        torch.manual_seed(seed)
        how = dict(WAYS[way])
        if "causal_decoding" in how:
            plan = CausalDecoding.preset(way)
            how["causal_decoding"] = replace(plan, seed=seed)
        prompts = [_prompt(chance) for _ in range(AT_ONCE)]
        for prompt, (ids, values, start) in zip(prompts, write(model, prompts, how, fond=fond), strict=True):
            what = f"{name}, texts"
            tally.tried[what] += 1
            tally.tried[f"{name}, numbers"] += ids.count(model.config.num_token_id)
            tally.tried[f"{name}, digits of the backbone's own"] += unannounced(model, ids, values, start)
            if broken := broken_numbers(model.processor, ids, values):
                text = model.processor.decode(ids, values, skip_special_tokens=True)
                tally.find(what, f"draw {draw}, {way}: {broken} in {text!r} behind {prompt!r}")
    return tally


def _prompt(chance: random.Random) -> str:
    prompt = chance.choice(PROMPTS)
    return (
        f"{chance.choice(['It was', 'about', '-', '(', '是'])} {chance.randrange(10000) / 10} and {prompt}"
        * (chance.random() < 0.2)
        or prompt
    )
