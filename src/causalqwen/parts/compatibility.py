"""What goes with some settings of a graft only. The errors are made from this table, and the one of docs/training.md."""

from typing import Any

_SEEN = ("value", "both")

NEEDS: dict[str, dict[str, Any]] = {
    "the setting number_embedding": {"number_context": _SEEN},
    "the setting initial_direction": {"number_context": _SEEN},
    "the setting normalize_direction": {"number_context": _SEEN},
    "the setting abduction_hidden_size": {"deep_abduction": True},
    "the setting value_branch_hidden_size": {"value_branch": True},
    "the setting value_branch_dropout": {"value_branch": True},
    "the setting value_branch_direct": {"value_branch": True},
    "the setting value_crossing": {"value_branch": True},
    "value_crossing above 1": {"value_family": "gaussian"},
    "the setting copy_size": {"copy_numbers": True},
    "values: center": {"value_branch": True},
    "direction: false": {"number_context": _SEEN},
    "generating from inputs_embeds": {"number_context": "value"},
    "training on rows that name individuals": {"copy_numbers": False, "value_loss": "nll", "value_branch": True},
    "training by gradients": {"value_kernel": None},
    "beam search": {"copy_numbers": False},
    "drafting from the text": {"copy_numbers": False},
    "a text under observed noise": {"copy_numbers": False, "score_scale": "common", "vocabulary_family": "gaussian"},
    "top_k, top_p or min_p in a plan": {"score_scale": "common"},
    "a value that is set": {"copy_numbers": False},
    "a text with numbers that somebody said, or that a world holds,": {"copy_numbers": False},
    "a number that a survey asks for": {"copy_numbers": False},
    "the number of somebody known by draws": {"copy_numbers": False},
    "a prompt of token ids": {"number_context": "digits"},
    "the likelihood of a prompt": {"number_context": "digits"},
    "vLLM": {"number_embedding": "added"},
    "the likelihood 'ovr' of words": {"score_scale": "common"},
}
"""By what is asked for, the settings that it is there for; several of one setting in a tuple."""

WHY = {
    "training by gradients": "its values were fitted in closed form, and can be fitted anew: values: auto",
    "the likelihood 'ovr' of words": "use 'softmax'",
    "top_k, top_p or min_p in a plan": "it draws no race that tokens could be left out of; use the preset 'softmax'",
}
"""What else is worth saying, of some."""


def missing(what: str, settings: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    """The values that `what` is there for, of each setting that it is not there for."""
    needs = {name: needed if isinstance(needed, tuple) else (needed,) for name, needed in NEEDS[what].items()}
    return {name: allowed for name, allowed in needs.items() if settings[name] not in allowed}


def check_needs(what: str, settings: dict[str, Any]) -> None:
    """ValueError where `what` is asked of a graft whose settings it is not there for."""
    for name, allowed in missing(what, settings).items():
        wanted = " or ".join(repr(value) for value in allowed)
        why = f": {WHY[what]}" if what in WHY else ""
        raise ValueError(f"{what} needs {name}={wanted}, but this model has {settings[name]!r}{why}")
