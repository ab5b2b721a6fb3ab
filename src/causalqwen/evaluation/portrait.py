"""A page about one individual: where they lie among others, what told so, and what they favour (theory 3.12)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from causalqwen.decoding import Individual
from causalqwen.evaluation.heard import what_each_told
from causalqwen.evaluation.page import number_row, write_page
from causalqwen.modeling import CausalQwenForCausalLM, Choice, NumberPrediction, Observation
from causalqwen.modeling.explain_individual import Said, covariance_of, favoured_tokens, lie_among, what_told
from causalqwen.modeling.reading import encode_text
from causalqwen.numbers import ValueLaw
from causalqwen.numbers.rendering import brief

_SHOWN = {"coordinates": 20, "values": 12, "heard": 40}


def _moved_values(said: Sequence[Sequence[Said]]) -> list[tuple[str, Said]]:
    """The values of texts, those first that moved furthest beside their noise, each behind what stands before it."""
    told = [
        ("".join(earlier.text for earlier in text[max(place - 12, 0) : place]), piece)
        for text in said
        for place, piece in enumerate(text)
        if piece.own is not None and piece.nobodys is not None
    ]
    return sorted(told, key=lambda one: -abs(one[1].own.loc - one[1].nobodys.loc) / one[1].own.scale)


def _coordinate(place: int, mean: float, width: float) -> dict[str, Any]:
    """Of Phi^-1(e1), with its posterior."""
    posterior = NumberPrediction(mean, max(width, 1e-9), None, ValueLaw(family="gaussian"))
    return number_row(str(place), 0.0, posterior)


def write_portrait(
    path: Path,
    model: CausalQwenForCausalLM,
    individual: Individual,
    texts: Sequence[str],
    beside: Sequence[tuple[str, Individual]] = (),
    heard: Sequence[Observation | Choice] = (),
) -> None:
    """The page of an individual abducted from texts, and from the answers and choices that were `heard`, among others; it
    appears by rename.

    Raises ValueError for somebody of another size, by name.
    """
    size = len(individual.factor)
    for name, other in beside:
        if len(other.factor) != size:
            raise ValueError(f"{name} has {len(other.factor)} coordinates, and cannot stand beside one of {size}")
    name = individual.name or "this individual"
    people = [(name, individual), *beside]
    normal, widths = individual.normal, covariance_of(individual).diagonal().sqrt()
    order = (normal.abs() / widths.clamp(min=1e-12)).argsort(descending=True)[: _SHOWN["coordinates"]]
    said, evidence = what_told(model, texts, individual) if texts else ([], ())
    pieces = [piece for text in said for piece in text]
    each = what_each_told(model, individual, heard)
    favoured = favoured_tokens(model, evidence, individual) if evidence and len(evidence[0]) else ([], [])
    numbers = _moved_values(said)
    write_page(
        path, "portrait.html", title=name[:1].upper() + name[1:], width="58rem", about=str(individual),
        names=[name for name, _ in people], plane=lie_among([who for _, who in people]).plain,
        coordinates=[_coordinate(at, normal[at].item(), widths[at].item()) for at in order.tolist()],
        apart=int((normal.abs() > 1.645 * widths).sum()), size=size, shown=len(pieces),
        total=sum(int((~encode_text(model, text).digits).sum()) for text in texts),
        portrait={
            "name": name, "words": [[piece.plain for piece in text] for text in said],
            "favoured": [vars(one) for one in favoured[0]], "avoided": [vars(one) for one in favoured[1]],
        },
        numbers=[
            number_row(f"… {before}", one.value, one.own, f"nobody's median {brief(one.nobodys.median)}")
            for before, one in numbers[: _SHOWN["values"]]
        ],
        of_numbers=len(numbers),
        each=each[: _SHOWN["heard"]], of_each=len(each), gained_each=sum(one.gain for one in each),
    )  # fmt: skip
