"""`causalqwen`: graft, train, fit, predict, generate, abduct, voices, counterfactual, population, survey,
evaluate, serve, explore, demo, doctor."""

from causalqwen_cli import asking, making, scoring, serving, speaking, tables
from causalqwen_cli.base import app

__all__ = ["app", "asking", "main", "making", "scoring", "serving", "speaking", "tables"]


def main() -> None:
    """Entry point of the console script."""
    app()
