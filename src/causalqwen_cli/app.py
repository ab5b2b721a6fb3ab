"""`causalqwen`: graft, calibrate, train, predict, generate, abduct, counterfactual, evaluate, benchmark, demo, doctor."""

from causalqwen_cli import making, scoring, speaking
from causalqwen_cli.base import app

__all__ = ["app", "main", "making", "scoring", "speaking"]


def main() -> None:
    """Entry point of the console script."""
    app()
