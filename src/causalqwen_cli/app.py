"""`causalqwen`: graft, calibrate, train, predict, generate, abduct, counterfactual, evaluate, benchmark, serve,
demo, doctor."""

from causalqwen_cli import making, scoring, serving, speaking
from causalqwen_cli.base import app

__all__ = ["app", "main", "making", "scoring", "serving", "speaking"]


def main() -> None:
    """Entry point of the console script."""
    app()
