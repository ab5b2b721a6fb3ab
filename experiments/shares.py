"""How much of what varies in a token's score, or in a value, is who speaks? By class of token (two minutes on two cores).

Over the held-out speeches, of the token that comes (theory 3.14): the rest is noise, shared and its own. --model gives a
folder; without it, the default backbone as it is grafted.

    .venv/bin/python experiments/shares.py [--model DIR]
"""

import argparse
import statistics
from pathlib import Path

from causalqwen import CausalQwenForCausalLM
from causalqwen.data.texts import HELD_OUT_YEARS, speeches

FREQUENT = {
    "the",
    "of",
    "and",
    "to",
    "in",
    "a",
    "that",
    "we",
    "is",
    "our",
    "for",
    "it",
    "this",
    "be",
    "have",
    "with",
    "not",
}


def class_of(text: str) -> str:
    word = text.strip()
    if any(letter.isdigit() for letter in word):
        return "a number's value"
    if not any(letter.isalpha() for letter in word):
        return "punctuation"
    if not text.startswith(" "):
        return "inside a word"
    return "frequent words" if word.lower() in FREQUENT else "other words"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--text", type=Path, help="a file of text; by default two held-out speeches")
    parser.add_argument("--words", type=int, default=3000)
    given = parser.parse_args()
    if given.model:
        model = CausalQwenForCausalLM.from_pretrained(given.model)
    else:
        model = CausalQwenForCausalLM.from_backbone("smollm2-135m")
    text = given.text.read_text(encoding="utf-8") if given.text else speeches(HELD_OUT_YEARS)
    text = " ".join(text.split(" ")[: given.words])
    classes: dict[str, list[float]] = {}
    for share in model.eval().shares(text):
        classes.setdefault(class_of(share.text), []).append(share.who)
    print("| class | tokens | share that is who: median | least | greatest |\n|---|---|---|---|---|")
    for name, of_class in sorted(classes.items()):
        middle = statistics.median(of_class)
        print(f"| {name} | {len(of_class)} | {middle:.3f} | {min(of_class):.3f} | {max(of_class):.3f} |")


if __name__ == "__main__":
    main()
