"""Rows that are made up, and whose truth is therefore known (architecture 3.4.2).

A value is uniform on 0 to 100 and rounded to 0, 1 or 2 digits, whatever the sentence speaks of. So nothing in a statement tells
its value, and no forecast of it has a lower expected CRPS than 100/6, that of the uniform law itself (but for the rounding);
whereas a question's context holds the answer, and the error can be 0.
"""

import random
from collections.abc import Callable
from typing import Any

QUANTITIES = (
    ("The price of the item is {value} dollars.", "What is the price of the item, in dollars?"),
    ("The temperature today is {value} degrees.", "What is the temperature today, in degrees?"),
    ("The distance between the towns is {value} kilometres.", "How far apart are the towns, in kilometres?"),
    ("The weight of the parcel is {value} kilograms.", "How heavy is the parcel, in kilograms?"),
    ("The journey takes {value} hours.", "How long does the journey take, in hours?"),
)

BEST_CRPS = 100 / 6
"""The CRPS of a statement's value: E|Y - Y'| / 2 for Y, Y' uniform on 0 to 100."""


def statements(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """`prompt` rows whose value nothing tells: "The price of the item is", 42.5."""
    return [{"prompt": statement.split(" {value}")[0], "value": value} for statement, _, value in _values(count, seed)]


def questions(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """`question` rows whose context holds the answer."""
    return [
        {"context": statement.format(value=f"{value:g}"), "question": question, "answer": value}
        for statement, question, value in _values(count, seed)
    ]


def choices(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """`question` rows whose context holds two or three numbers, the answer among them."""
    chance, rows = random.Random(seed), []
    for _ in range(count):
        chosen = chance.sample(QUANTITIES, chance.randint(2, 3))
        values = [round(chance.uniform(0, 100), chance.randint(0, 2)) for _ in chosen]
        statements = [
            statement.format(value=f"{value:g}") for (statement, _), value in zip(chosen, values, strict=True)
        ]
        asked = chance.randrange(len(chosen))
        rows.append({"context": " ".join(statements), "question": chosen[asked][1], "answer": values[asked]})
    return rows


def _values(count: int, seed: int) -> list[tuple[str, str, float]]:
    chance = random.Random(seed)
    return [(*chance.choice(QUANTITIES), round(chance.uniform(0, 100), chance.randint(0, 2))) for _ in range(count)]


KINDS: dict[str, Callable[[int, int], list[dict[str, Any]]]] = {"statements": statements, "questions": questions}
"""What can be made up, by name."""
