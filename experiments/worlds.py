"""Counterfactual texts: is the world that was given back, and how far does a one-word edit carry? (25 minutes on two cores)

Real paragraphs that the model did not write: a prompt of 16 tokens and the 24 that follow. First every text under the empty
intervention, then texts that hold two numbers of one to nine digits, then some with the individual behind them. Then one word
of the prompt is edited, and what the individual would have said is compared with what was said: own noise kept (ours), Gumbel
noise kept (Oberst and Sontag 2019), a generator replayed, and noise drawn anew, ours and the softmax's own.

    .venv/bin/python experiments/worlds.py --model DIR
"""

import argparse
import random
import re
import statistics

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import LogitsProcessor, LogitsProcessorList

from causalqwen import CausalDecoding, CausalQwenForCausalLM, Individual, Intervention, Observation
from causalqwen.data.texts import speech_paragraphs
from causalqwen.modeling.individuals import abduct_noise
from causalqwen.modeling.reading import encode_text

YEARS, BEFORE, BEHIND = (1941, 1962, 1985, 2002, 2012, 2016), 16, 24
EDITS = {
    "America": "Europe", "American": "British", "Americans": "workers", "people": "soldiers", "year": "week",
    "years": "weeks", "war": "peace", "world": "city", "Congress": "court", "nation": "town", "Nation": "Town",
    "country": "school", "government": "army", "Government": "Army", "tonight": "yesterday", "economy": "army",
    "children": "students", "women": "girls", "jobs": "books", "work": "sleep", "freedom": "money", "peace": "war",
    "security": "poetry", "families": "farmers", "states": "cities",
}  # fmt: skip


class ObservedGumbel(LogitsProcessor):
    """Adds Gumbel noise under which the softmax's observed tokens were the best scores, and fresh noise after their end; a row
    for each seed."""

    def __init__(self, scores: Tensor, tokens: Tensor, seeds: list[int]) -> None:
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        best = self._gumbel(scores.logsumexp(-1, keepdim=True))
        shifted = -torch.log(torch.exp(-best) + torch.exp(-self._gumbel(scores)))  # truncated at the best
        shifted.scatter_(-1, tokens.expand(len(seeds), -1).unsqueeze(-1), best)
        self.noise, self.step = shifted - scores, 0

    def _gumbel(self, loc: Tensor) -> Tensor:
        uniforms = torch.stack([torch.rand(loc.shape, generator=generator) for generator in self.generators])
        return loc - torch.log(-torch.log(uniforms.clamp(1e-20, 1 - 1e-7)))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        known = self.step < self.noise.shape[1]
        noise = self.noise[:, self.step] if known else self._gumbel(torch.zeros_like(scores[0]))
        self.step += 1
        return scores + noise


class ReplayedUniforms(LogitsProcessor):
    """A generator replayed: per step one uniform number, read by the inverse of the softmax's distribution function; a row for
    each seed.

    The numbers are drawn given the observed tokens, as if a generator had made them.
    """

    def __init__(self, scores: Tensor, tokens: Tensor, seeds: list[int]) -> None:
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        share = torch.stack([torch.rand(len(tokens), generator=own, dtype=torch.float64) for own in generators])
        p = scores.double().softmax(-1)
        own = p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        self.uniforms = p.cumsum(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - own * share
        self.step = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        sums = scores.double().softmax(-1).cumsum(-1)
        token = torch.searchsorted(sums, self.uniforms[:, self.step, None].contiguous())
        self.step += 1
        return torch.full_like(scores, -torch.inf).scatter(-1, token.clamp(max=scores.shape[-1] - 1), 0.0)


def observed_texts(model: CausalQwenForCausalLM) -> list[tuple[Observation, Tensor]]:
    """Paragraphs long enough whose tokens come out the same when prompt and text are read apart."""
    tokenizer, found = model.processor.tokenizer, []
    for year in YEARS:
        for paragraph in speech_paragraphs(year, numbers=False):
            ids = tokenizer(paragraph, add_special_tokens=False)["input_ids"]
            if len(ids) < BEFORE + BEHIND:
                continue
            prompt, text = tokenizer.decode(ids[:BEFORE]), tokenizer.decode(ids[BEFORE : BEFORE + BEHIND])
            apart = [encode_text(model, prompt, prompt=True)[0], encode_text(model, text)[0]]
            if torch.cat(apart).tolist() == ids[: BEFORE + BEHIND]:
                found.append((Observation(text, prompt), torch.cat(apart)))
    return found


def texts_with_numbers(texts: list[tuple[Observation, Tensor]], count: int) -> list[Observation]:
    """Two numbers of one to nine digits behind the same prompts, the second with decimals in every third text."""
    generator, found = random.Random(0), []
    for place in range(count):
        first, second = (
            generator.randrange(10 ** (size - 1), 10**size) for size in (place % 9 + 1, (place // 9) % 9 + 1)
        )
        told = f"{second / 100:,.2f}" if place % 3 == 0 else f"{second:,}"
        prompt = texts[place % len(texts)][0].prompt
        found.append(Observation(f" of {first:,} people, and then {told} more were with them.", prompt))
    return found


def distance(a: list[int], b: list[int]) -> float:
    """Levenshtein's, over the longer length."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1] / max(len(a), len(b), 1)


def common_prefix(a: list[int], b: list[int]) -> float:
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return same / max(len(a), 1)


def told_apart(said: list[int], tokens: list[int]) -> tuple[float, float, float]:
    """Edit distance, common prefix, and whether the two are one."""
    return distance(said, tokens), common_prefix(said, tokens), float(said == tokens)


def edited(prompt: str) -> str | None:
    """The prompt with its last word that is in `EDITS` replaced."""
    words = [m for m in re.finditer(r"[A-Za-z]+", prompt) if m[0] in EDITS]
    return prompt[: words[-1].start()] + EDITS[words[-1][0]] + prompt[words[-1].end() :] if words else None


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--numbers", type=int, default=200)
    parser.add_argument("--abducted", type=int, default=50)
    parser.add_argument("--edits", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args()
    model = CausalQwenForCausalLM.from_pretrained(given.model).eval()
    model.generation_config.eos_token_id = None
    nobody, texts = Individual.nobody(model.config.causal_size), observed_texts(model)

    plain = [observed for observed, _ in texts[: given.texts]]
    numbered = texts_with_numbers(texts, given.numbers)
    groups = (("nobody", plain), ("nobody, with numbers", numbered), ("abducted", plain[: given.abducted]))
    for what, told in groups:
        same = 0
        for index, observed in enumerate(tqdm(told, desc=f"the world that was, {what}")):
            who = nobody if what.startswith("nobody") else model.abduct(observed)
            ((world,),) = model.counterfactual_samples(observed, Intervention(), individual=who, seed=index)
            same += world.text == observed.text
        if told:
            print(f"{what}, identical: {same} of {len(told)}", flush=True)

    chosen = [(o, ids, edited(o.prompt)) for o, ids in texts if edited(o.prompt)][: given.edits]
    columns: dict[str, list[tuple[float, float, float]]] = {}
    for place, (observed, ids, prompt) in enumerate(tqdm(chosen, desc="edits")):
        said, keys = ids[BEFORE:].tolist(), [place + 10_000 * seed for seed in range(given.seeds)]
        people = {"population average": None, "abducted": model.abduct(observed)}
        scores = model.backbone(input_ids=ids[None]).logits[0, BEFORE - 1 : -1].float()
        start = encode_text(model, prompt, prompt=True)[0].expand(len(keys), -1)
        values = torch.full(start.shape, torch.nan, dtype=torch.float64)
        asked = {
            "attention_mask": torch.ones_like(start), "max_new_tokens": BEHIND, "eos_token_id": None, "pad_token_id": 0
        }  # fmt: skip
        for name, who in people.items():
            kept = [abduct_noise(model, observed, who, seed=key) for key in keys]
            for noise, own in (("kept", kept), ("drawn anew", "token")):
                plan = CausalDecoding(individual=who or "marginal", own=own, seed=keys)
                out = model.generate(start, numeric_values=values, causal_decoding=plan, **asked).sequences
                made = columns.setdefault(f"{name}, noise {noise}", [])
                made += [told_apart(said, row[start.shape[1] :].tolist()) for row in out]
        rivals = (
            ("Gumbel noise kept", ObservedGumbel(scores, ids[BEFORE:], keys)),
            ("uniform numbers replayed", ReplayedUniforms(scores, ids[BEFORE:], keys)),
            ("softmax, drawn anew", ObservedGumbel(scores[:0], ids[:0], keys)),
        )
        for name, processor in rivals:
            out = model.backbone.generate(
                start, do_sample=False, logits_processor=LogitsProcessorList([processor]), **asked
            )
            made = columns.setdefault(name, [])
            made += [told_apart(said, row[start.shape[1] :].tolist()) for row in out]
    print(f"{len(chosen)} edits, {given.seeds} seeds: edit distance, common prefix, identical")
    for name, rows in columns.items():
        far, prefix, same = (statistics.mean(column) for column in zip(*rows, strict=True))
        print(f"{name:42} {far:.3f} {prefix:.3f} {same:.3f}", flush=True)


if __name__ == "__main__":
    main()
