"""Several right answers: all of them right at once, one drawn, or a row for each (about eight minutes on one core).

Questions of a few right words, half of them held out. The heads of a graft learn them from kept features, each way
for as many updates on all rows. On the questions held out, after "Answer:": how many of the right first tokens are among as
many of the largest P_k, their mean P_k, and the sum of all others.

    .venv/bin/python experiments/several_answers.py --model DIR
"""

import argparse
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from causalqwen import CausalQwenForCausalLM
from causalqwen.data import check_row, encode_rows
from causalqwen.training import HeadStage, TrainSettings, train

QUESTIONS = """a primary colour: red, blue, yellow | a noble gas: helium, neon, argon | a season: spring, summer, winter
a planet: Mars, Venus, Jupiter | a day of the weekend: Saturday, Sunday | a day of the week: Monday, Tuesday, Friday
a summer month: June, July, August | a winter month: December, January, February | a continent: Africa, Asia, Europe
an ocean: Atlantic, Pacific, Indian | a country of Asia: China, India, Japan | a country of Africa: Egypt, Kenya, Nigeria
a country of Europe: France, Germany, Italy | a city of England: London, Manchester, Oxford | a precious metal: gold, silver
a city of the United States: Chicago, Boston, Houston | a capital of Europe: Paris, Rome, Berlin | a metal: iron, copper, zinc
a river: Nile, Amazon, Thames | a domestic animal: dog, cat, horse | a wild animal: lion, tiger, wolf | a bird: eagle, owl, crow
a fish: salmon, tuna, shark | an insect: ant, bee, fly | a fruit: apple, orange, banana | a vegetable: carrot, onion, potato
a flower: rose, lily, tulip | a tree: oak, pine, maple | a drink: water, milk, tea | a sport: football, tennis, golf
a musical instrument: piano, violin, guitar | a language: English, French, Spanish | a religion: Christianity, Islam, Buddhism
a member of the family: mother, father, sister | a part of the body: hand, foot, head | a sense: sight, hearing, smell
a piece of clothing: shirt, hat, coat | a piece of furniture: table, chair, bed | a room of a house: kitchen, bedroom, bathroom
a tool: hammer, saw, knife | a vehicle: car, bus, train | a school subject: history, science, music | an organ: heart, liver
a profession: doctor, lawyer, teacher | a meal: breakfast, lunch, dinner | a unit of time: hour, minute, second
a unit of length: metre, mile, foot | a shape: circle, square, triangle | a state of matter: solid, liquid, gas
a direction: north, south, east | an emotion: anger, fear, joy | a disease: cancer, malaria, diabetes | a spice: pepper, salt
a painter: Picasso, Monet, Rembrandt | a composer: Mozart, Bach, Beethoven | a physicist: Einstein, Newton, Bohr
a president of the United States: Lincoln, Washington, Kennedy | a currency: dollar, euro, pound | a fuel: coal, oil, wood
a greek letter: alpha, beta, gamma | an even digit in words: two, four, six | a colour of a traffic light: red, green, yellow"""


def shown(model: CausalQwenForCausalLM, kind: str, answers: Sequence[str]) -> tuple[float, float, float]:
    """The share of the right first tokens among the largest P_k, their mean P_k, and the sum of the others."""
    texts = [
        check_row({"question": f"Name {kind}.", "answer": answer}, kind).text(model.processor) for answer in answers
    ]
    ids = [model.processor(text)["input_ids"] for text in texts]
    before = next(place for place, tokens in enumerate(zip(*ids, strict=False)) if len(set(tokens)) > 1)
    right = torch.tensor(sorted({tokens[before] for tokens in ids}))
    with torch.no_grad():
        probs = model(torch.tensor([ids[0][:before]]), output_ovr=True).ovr_probs[0, -1]
    found = torch.isin(probs.topk(len(right)).indices, right).double().mean()
    return found.item(), probs[right].mean().item(), (probs.sum() - probs[right].sum()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a graft")
    parser.add_argument("--splits", type=int, default=2)
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--rate", type=float, default=3e-4)
    given = parser.parse_args()
    pairs = [pair.strip().split(": ") for line in QUESTIONS.splitlines() for pair in line.split("|")]
    print(f"{len(pairs)} questions\n| split | taught | right among the top | mean P of a right one | P of all others |")
    for split in range(given.splits):
        draw = random.Random(split)
        questions = [(kind, draw.sample(found := words.split(", "), len(found))) for kind, words in pairs]
        draw.shuffle(questions)
        half = len(questions) // 2
        ways = {
            "nothing": [],
            "all": questions[:half],
            "one": [(kind, answers[:1]) for kind, answers in questions[:half]],
            "each": [(kind, [answer]) for kind, answers in questions[:half] for answer in answers],
        }
        for name, taught in ways.items():
            model = CausalQwenForCausalLM.from_pretrained(given.model).eval()
            rows = [check_row({"question": f"Name {kind}.", "answer": answers}, kind) for kind, answers in taught]
            stage = HeadStage(epochs=given.updates, batch_size=max(len(rows), 1), learning_rate=given.rate)
            with tempfile.TemporaryDirectory() as folder:
                if rows:
                    examples = encode_rows(rows, model.processor)
                    train(model, examples, [], Path(folder), TrainSettings(values=None, heads=stage))
            scores = torch.tensor([shown(model, *question) for question in questions[half:]]).mean(0).tolist()
            print(f"| {split} | {name} | {scores[0]:.3f} | {scores[1]:.4f} | {scores[2]:.3f} |", flush=True)


if __name__ == "__main__":
    main()
