"""How well intervals of individuals cover, by what was observed of them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from causalqwen.modeling import CausalQwenForCausalLM
from causalqwen.numbers.law import LEVELS, WANTED_LEVELS
from causalqwen.training.levels_of_people import KNOWN, Asked, HeldPerson, asked_after

_MOST_CONTEXTS = 12


def coverage_of_people(
    model: CausalQwenForCausalLM, people: Sequence[HeldPerson], contexts: Sequence[str]
) -> dict[str, Any]:
    """Coverage of central intervals by how many numbers of a person were observed (`known`; "0": the population average), and,
    after one or more, by the text before the number that is asked for, where `_MOST_CONTEXTS` texts at most are before all.

    contexts: the text before each of the rows' numbers. Each entry holds `numbers`, `coverage`, and `coverage_raw`: of what the
    model believes.
    """
    after = {known: asked_after(model.action.value_law, people, known) for known in (0, *KNOWN)}
    held = {known: (block.places, _inside(model, block, known)) for known, block in after.items() if block is not None}
    made: dict[str, Any] = {
        "people": len(people),
        "known": {str(known): _shares(of) for known, (_, of) in held.items()},
    }
    if len(held) > 1 and len(set(contexts)) <= _MOST_CONTEXTS:
        places, inside = zip(*(of for known, of in held.items() if known), strict=True)
        texts, every = [contexts[place] for place in torch.cat(places).tolist()], torch.cat(inside, -1)
        rows = {text: [row for row, own in enumerate(texts) if own == text] for text in sorted(set(texts))}
        made["contexts"] = {text: _shares(every[..., of]) for text, of in rows.items()}
    return made


def _inside(model: CausalQwenForCausalLM, block: Asked, known: int) -> Tensor:
    """How far each number lies in its intervals, and in raw ones: [2, levels, n], a part of an atom."""
    fitted, at = (model.config.individual_levels if known else None) or {}, [round(100 * level) for level in LEVELS]
    factors = fitted.get("who", 1.0), fitted.get("noise", 1.0)
    levels = torch.tensor(fitted["levels"]).expand(len(block.noise), -1) if fitted else WANTED_LEVELS.expand(1, -1)
    levels = levels if known else model.value_law.levels_at(block.scale(*factors))
    ends = (block.central(*factors), levels), (block.central(1.0, 1.0), WANTED_LEVELS.expand(1, -1))
    shares = [(own.unsqueeze(1) <= of[:, at].unsqueeze(-1)).double().mean(-1).T for own, of in ends]
    return torch.stack(shares)


def _shares(inside: Tensor) -> dict[str, Any]:
    own, raw = (dict(zip(map(str, LEVELS), of, strict=True)) for of in inside.mean(-1).tolist())
    return {"numbers": inside.shape[-1], "coverage": own, "coverage_raw": raw}
