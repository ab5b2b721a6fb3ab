"""`python -m causalqwen_evals ...` is `lm-eval ...`, with the model `causalqwen` and the tasks of this package known to it."""

import sys

from causalqwen_evals import TASKS


def main() -> None:
    """lm-evaluation-harness's own command line."""
    try:
        import lm_eval.models  # noqa: F401 # its own first: it looks for them only where nobody has registered one
        from lm_eval.__main__ import cli_evaluate
    except ImportError as error:
        sys.exit(f"causalqwen_evals: {error}; pip install 'causalqwen[evals]'")
    import causalqwen_evals.harness  # noqa: F401 # registers the model

    if len(sys.argv) > 1 and "--include_path" not in sys.argv:
        sys.argv += ["--include_path", str(TASKS)]
    cli_evaluate()


if __name__ == "__main__":
    main()
