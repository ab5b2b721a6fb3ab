"""`causalqwen`: the commands of `_DOORS`."""

import importlib.metadata
from typing import Annotated

import typer

from causalqwen_cli import asking, making, scoring, serving, speaking, tables
from causalqwen_cli.base import app

__all__ = ["app", "asking", "main", "making", "scoring", "serving", "speaking", "tables"]

_DOORS = {
    "A table": ["fit", "predict"],
    "Your own language model": ["graft", "train", "evaluate", "generate", "serve"],
    "People and worlds": ["abduct", "counterfactual", "population", "survey", "voices", "explore"],
    "To begin with": ["demo", "doctor", "synthesize"],
}
"""The commands under the headings of `--help`, in its order."""

_RANKS = {name: (place, door) for place, (door, name) in enumerate((d, n) for d in _DOORS for n in _DOORS[d])}
app.registered_commands.sort(key=lambda command: _RANKS[command.callback.__name__][0])
for _command in app.registered_commands:
    _command.rich_help_panel = _RANKS[_command.callback.__name__][1]


def _show_version(asked: bool) -> None:
    if asked:
        print(importlib.metadata.version("causalqwen"))
        raise typer.Exit


@app.callback()
def _whole(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Let a pretrained language model say how sure it is of a number, and who could be speaking."""


def main() -> None:
    """Entry point of the console script."""
    app()
