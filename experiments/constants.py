"""Does a template fool the intervals? Ratings of words, in sentences that hold one, two and three numbers besides which are the
same in every row (five minutes a row kind and sentence on two cores).

600 words are asked, and all others that nothing was learned from: of 600, shares have a standard error of two points.
Rows are given as texts, where every number is learned, and as prompts, where the rating alone is. `causalqwen graft` and
`causalqwen train` with their defaults; rows to choose and recalibrate by are `train`'s own. Nothing was tuned to these rows.

    pip download --no-deps vaderSentiment==3.3.2 && unzip vaderSentiment-*.whl
    .venv/bin/python experiments/constants.py --lexicon vaderSentiment/vader_lexicon.txt --output runs/constants

vader_lexicon.txt (MIT licence, Hutto and Gilbert 2014), by its SHA-256: mean ratings of words by ten people, from -4 to 4.
"""

import argparse
import hashlib
import json
import subprocess
import sys
from pathlib import Path

from causalqwen import CausalQwenForCausalLM
from causalqwen.data.splits import split_by_entity
from causalqwen.files import write_text

SHA256 = "1ec9c6e9ee19aade328f8beb393a6afa71a5bb3acf7d3cc22d4ef568df374bf5"
SIZES = {"train": 1500, "test": 600}
SENTENCES = {
    1: 'On a scale that goes up to {4}, the word "WORD" is rated',
    2: 'On a scale from {-4} to {4}, the word "WORD" is rated',
    3: 'Asked to rate it from {-4} to {4}, a group of {10} people gave the word "WORD"',
}
LEVELS = (0.5, 0.8, 0.9)


def rated_words(lexicon: Path, seed: int) -> dict[str, list[dict]]:
    data = lexicon.read_bytes()
    if (found := hashlib.sha256(data).hexdigest()) != SHA256:
        raise SystemExit(f"{lexicon}: SHA-256 {found}, expected {SHA256}")
    fields = [line.split("\t") for line in data.decode().splitlines()]
    words = [(word, float(mean)) for word, mean, *_ in fields if word.isalpha() and len(word) > 2]
    rows = [{"name": word, "entity": word, "value": mean} for word, mean in words]
    parts = split_by_entity(rows, SIZES, seed)
    taken = {row["name"] for part in parts.values() for row in part}
    return parts | {"others": [row for row in rows if row["name"] not in taken]}


def pieces(sentence: str, word: str) -> list[tuple[str, float]]:
    """(all before it, number) of the constants of a sentence."""
    found, before, rest = [], "", sentence.replace("WORD", word)
    while "{" in rest:
        text, _, rest = rest.partition("{")
        number, _, rest = rest.partition("}")
        found.append((before + text.rstrip(), float(number)))
        before += text + number
    return found


def covered(model: CausalQwenForCausalLM, asked: list[tuple[str, float]]) -> dict[str, float]:
    """Shares of numbers within the intervals of LEVELS, and the median width at 80%."""
    predictions = model.predict_number([prompt for prompt, _ in asked])
    found = {}
    for level in LEVELS:
        inside = [p.interval(level) for p in predictions]
        found[f"{level:.0%}"] = sum(
            low <= value <= high for (low, high), (_, value) in zip(inside, asked, strict=True)
        ) / len(asked)
    widths = sorted(high - low for low, high in (p.interval(0.8) for p in predictions))
    found["crps"] = sum(p.crps(value) for p, (_, value) in zip(predictions, asked, strict=True)) / len(asked)
    return found | {"width": widths[len(widths) // 2]}


def measure(count: int, kind: str, parts: dict[str, list[dict]], folder: Path) -> dict:
    sentence, files = SENTENCES[count], folder / f"{count}-{kind}"
    plain = sentence.replace("{", "").replace("}", "")
    rows = []
    for row in parts["train"]:
        prompt = plain.replace("WORD", row["name"])
        as_text = {"text": f"{prompt} {row['value']}."}
        rows.append(as_text if kind == "text" else {"prompt": prompt, "value": row["value"]})
    write_text(files / "train.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    if not (files / "model" / "config.json").exists():
        command = [sys.executable, "-m", "causalqwen_cli"]
        subprocess.run([*command, "graft", "--backbone", "smollm2-135m", "--output", files / "graft"], check=True)
        train = ["train", "--model", files / "graft", "--train", files / "train.jsonl", "--output", files / "model"]
        resume = ["--resume"] if (files / "model").exists() else []
        subprocess.run([*command, *train, *resume], check=True)
    model = CausalQwenForCausalLM.from_pretrained(files / "model")
    found = {"constants": count, "rows": kind}
    for part, name in (("test", "rating"), ("others", "others")):
        found[name] = covered(model, [(plain.replace("WORD", row["name"]), row["value"]) for row in parts[part]])
    if kind == "text":
        words = [row["name"] for row in parts["test"][:100]]
        asked = [piece for word in words for piece in pieces(sentence, word)]
        found["constant"] = covered(model, asked)
    law = model.value_law
    return found | {"chosen": {"axis": law.transform.kind, "law": law.family}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lexicon", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=Path("runs/constants"))
    parser.add_argument("--constants", type=int, nargs="+", default=list(SENTENCES))
    parser.add_argument("--rows", nargs="+", default=["text", "prompt"])
    parser.add_argument(
        "--seed", type=int, default=0, help="which words are learned from; a folder of its own for each"
    )
    given = parser.parse_args()
    parts = rated_words(given.lexicon, given.seed)
    for count in given.constants:
        for kind in given.rows:
            found = measure(count, kind, parts, given.output)
            write_text(given.output / f"{count}-{kind}.json", json.dumps(found, indent=1))
            print(json.dumps({name: what for name, what in found.items() if name != "chosen"}), flush=True)


if __name__ == "__main__":
    main()
