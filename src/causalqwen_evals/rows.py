"""Rows of the tasks, made of speeches and tables that come with the package, the same ones each time; and how an
answer with a number in it is scored."""

import random
import re
from typing import Any

import torch

from causalqwen.data.boiling_points import PROMPT, SIZES, boiling_points
from causalqwen.data.splits import split_by_entity
from causalqwen.data.synthetic import choices, questions
from causalqwen.data.texts import HELD_OUT_YEARS, speech_paragraphs
from causalqwen.losses import quantile_crps
from causalqwen.modeling import NumberPrediction
from causalqwen.numbers import CRPS_LEVELS, find_numbers

Rows = list[dict[str, Any]]
_FEWEST_WORDS = 12


def continuations(count: int = 60, seed: int = 0) -> Rows:
    """The first half of a paragraph, and four second halves of which one is its own: text, choices, answer (its index)."""
    chance = random.Random(seed)
    halves = [(words[: len(words) // 2], words[len(words) // 2 :]) for words in _paragraphs()]
    rows = []
    for first, second in halves[:count]:
        others = chance.sample([rest for _, rest in halves if rest != second], 3)
        offered = [" ".join(rest[:12]) for rest in (second, *others)]
        order = chance.sample(range(4), 4)
        rows.append({"text": " ".join(first), "choices": [offered[i] for i in order], "answer": order.index(0)})
    return rows


def last_words(count: int = 60) -> Rows:
    """A paragraph without its last word, and the word: text, word."""
    pairs = (re.fullmatch(r"(.*) (\w+)\W*", " ".join(words)) for words in _paragraphs())
    return [{"text": pair[1], "word": pair[2]} for pair in pairs if pair][:count]


def paragraphs(count: int = 60) -> Rows:
    """Paragraphs, numbers among them: text."""
    return [{"text": line} for year in HELD_OUT_YEARS for line in speech_paragraphs(year)][:count]


def numbers_to_choose(count: int = 60, seed: int = 0) -> Rows:
    """A question, and the numbers of its context, of which one is the answer: text, choices, answer (its index)."""
    rows = []
    for row in choices(count, seed):
        offered = [f"{number.value:g}" for number in find_numbers(row["context"])]
        rows.append({"text": _asked(row), "choices": offered, "answer": offered.index(f"{row['answer']:g}")})
    return rows


def numbers_to_find(count: int = 60, seed: int = 0) -> Rows:
    """A question whose context holds the answer, a number: text, number (as it is written there)."""
    return [{"text": _asked(row), "number": f"{row['answer']:g}"} for row in questions(count, seed)]


def boiling(count: int = 200) -> Rows:
    """Compounds that the demo's training never saw: text, which ends where the number starts, and value, in kelvin.

    ImportError where the package `chemicals` is not installed.
    """
    held_out = split_by_entity(boiling_points(), SIZES)["test"]
    return [{"text": PROMPT.format(**record), "value": record["kelvin"]} for record in held_out[:count]]


def _paragraphs() -> list[list[str]]:
    lines = (line for year in HELD_OUT_YEARS for line in speech_paragraphs(year, numbers=False))
    return [words for words in map(str.split, lines) if len(words) >= _FEWEST_WORDS]


def _asked(row: dict[str, Any]) -> str:
    return f"{row['context']}\nQuestion: {row['question']}\nAnswer:"


def law_of(prediction: NumberPrediction) -> dict[str, list[float]]:
    """A predicted number as plain data: quantiles, the 199 raw ones k/200, clipped as everywhere (`ValueLaw.clip`), and
    interval_90, recalibrated."""
    raw = [prediction.quantile(level, raw=True) for level in CRPS_LEVELS.tolist()]
    clipped = prediction.law.clip(torch.tensor(raw, dtype=torch.float64)).tolist()
    return {"quantiles": clipped, "interval_90": list(prediction.interval(0.9))}


def score_number(value: float, answer: str, law: dict[str, list[float]] | None = None) -> dict[str, float]:
    """How near an answer comes to a number.

    Args:
        answer: a text, of which the first number counts; a text without any counts as 0.
        law: the answer as a distribution, `law_of`; then it counts, and not the text.

    Returns:
        crps, in the number's units, lower is better, from 199 quantiles; of a text it is its error. error: of the median, or of
        the number in the text. covered_90: whether the central 90% hold the value, for one number whether it is the value.
        has_number: whether there was a number to score.
    """
    has_number = law is not None
    if law is None:
        found = find_numbers(answer)
        has_number, predicted = bool(found), found[0].value if found else 0.0
        law = {"quantiles": [predicted] * len(CRPS_LEVELS), "interval_90": [predicted, predicted]}
    quantiles = torch.tensor(law["quantiles"], dtype=torch.float64)
    low, high = law["interval_90"]
    return {
        "crps": quantile_crps(torch.tensor(value, dtype=torch.float64), quantiles, CRPS_LEVELS).item(),
        "error": abs(law["quantiles"][len(CRPS_LEVELS) // 2] - value),
        "covered_90": float(low <= value <= high),
        "has_number": float(has_number),
    }
