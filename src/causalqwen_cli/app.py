"""`causalqwen`: graft, calibrate, train, fit, predict, generate, abduct, counterfactual, evaluate, benchmark, serve, explore,
demo, doctor."""

from causalqwen_cli import making, scoring, serving, speaking, tables
from causalqwen_cli.base import app

__all__ = ["app", "main", "making", "scoring", "serving", "speaking", "tables"]


def main() -> None:
    """Entry point of the console script."""
    app()
