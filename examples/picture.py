"""The picture of README: what a number could be, and what would have been said. A minute on two cores.

.venv/bin/python examples/picture.py --model runs/demo/model --output docs/picture.svg
"""

import argparse
import difflib
import re
import textwrap
from pathlib import Path

import matplotlib
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from causalqwen import CausalDecoding, CausalQwenForCausalLM, Intervention, Observation

PROMPT = "My neighbour opened the old book in the attic, and she"
EDIT = "My neighbour opened the old box in the attic, and she"
CHANGED, COLUMNS = "#d2692c", 66


def write(axes: Axes, title: str, text: str, said: str, top: float) -> float:
    """A text below its title, the words that are not what was said in colour; returns where it ends."""
    axes.text(0, top, title, weight="bold", size=9)
    words, old = re.findall(r"\S+", text), re.findall(r"\S+", said)
    kept = {
        at for block in difflib.SequenceMatcher(None, old, words).get_matching_blocks()
        for at in range(block.b, block.b + block.size)
    }  # fmt: skip
    lines, at = textwrap.wrap(" ".join(words), COLUMNS), 0
    for line in lines:
        top, column = top - 0.075, 0
        for word in line.split():
            axes.text(
                column / COLUMNS, top, word, size=8.5, family="monospace", color="black" if at in kept else CHANGED
            )
            column, at = column + len(word) + 1, at + 1
    return top - 0.13


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="runs/demo/model")
    parser.add_argument("--output", type=Path, default=Path("docs/picture.svg"))
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=28)
    given = parser.parse_args()
    model = CausalQwenForCausalLM.from_pretrained(given.model).eval()
    matplotlib.rcParams["svg.hashsalt"] = "picture"
    figure, (number, worlds) = plt.subplots(1, 2, figsize=(11, 3.6), width_ratios=(1, 1.5))

    (toluene,) = model.predict_number("The boiling point of toluene (C7H8) is")
    toluene.plot(383.8, number, "K")
    number.set_title("The boiling point of toluene (C7H8) is …", size=9, weight="bold", loc="left")

    plan = CausalDecoding.preset("persona", seed=given.seed)
    inputs = model.processor(PROMPT, prompt=True, return_tensors="pt")
    out = model.generate(**inputs, max_new_tokens=given.tokens, causal_decoding=plan)
    start = inputs["input_ids"].shape[1]
    said = model.processor.decode(out.sequences[0, start:], out.numeric_values[0, start:], skip_special_tokens=True)
    observed, edit = Observation(said, prompt=PROMPT), Intervention(prompt=EDIT)
    who = model.abduct([observed], name="she")
    (same,), (kept,) = model.counterfactual_samples(observed, [Intervention(), edit], individual=who)
    ((fresh,),) = model.counterfactual_samples(observed, [edit], individual=who, noise="redraw", seed=1)
    assert same.text == said, "the world that was gives back what was said"
    worlds.axis("off")
    top = 1.0
    for title, prompt, text in (
        ("What was said", PROMPT, said),
        ("Had it been a box: the same person, the same chances", EDIT, kept.text),
        ("Had it been a box: the same person, other chances", EDIT, fresh.text),
    ):
        top = write(worlds, title, prompt + text, PROMPT + said, top)
    given.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(given.output, format="svg", bbox_inches="tight", metadata={"Date": None})
    print(f"{given.output}: {toluene}")


if __name__ == "__main__":
    main()
