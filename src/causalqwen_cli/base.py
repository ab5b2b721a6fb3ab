"""What every command shares: the app, its common options, how results and mistakes are shown."""

import json
import logging
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer import Option

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

AsJson = Annotated[bool, Option("--json", help="Print one JSON object to stdout instead of text.")]
Model = Annotated[Path, Option("--model", help="Folder of a grafted model.")]
Device = Annotated[str, Option(help="Torch device, or auto for an accelerator where there is one.")]


def say(message: str) -> None:
    """A line of progress, on stderr."""
    print(message, file=sys.stderr, flush=True)


def refuse(wrong: Any, message: str) -> None:
    """ValueError with the message, where something is wrong."""
    if wrong:
        raise ValueError(message)


def show(result: dict[str, Any], text: str, as_json: bool) -> None:
    """The result on stdout: as JSON, or as text for people."""
    print(json.dumps(result, ensure_ascii=False) if as_json else text, flush=True)


@dataclass(frozen=True)
class Made:
    """Beside an option in its annotation: a path that the command makes, and never writes over; every other path is read.

    kinds: how the name of a file may end, as `suffix_of` gives it; none for a folder. whole: the file that a folder has once it
    is complete, and is gone on with until then; "" for one that is always gone on with; None for one that must be new or empty.
    """

    kinds: tuple[str, ...] = ()
    whole: str | None = None

    def check(self, path: Path, resume: bool = False) -> None:
        """ValueError for a name that ends otherwise, and for what is there already; an empty folder is removed. resume: a run
        is taken up, maybe one that died when its file was there and its note (`write_kept`) not gone yet."""
        from causalqwen.files import check_kind

        if self.kinds and path.is_dir():
            raise ValueError(f"{path} is a folder; name a file")
        if self.kinds:
            check_kind(path, self.kinds)
        elif path.is_dir() and self.whole is not None and not (path / self.whole).is_file():
            return
        elif path.is_dir() and not any(path.iterdir()):
            path.rmdir()
        if path.exists() and not (resume and path.with_name(f"{path.name}.part.json").exists()):
            raise ValueError(f"{path} exists already; choose another output")


Individuals = Made((".safetensors",))
Page = Made((".html",))


def _to_make(function: Callable, given: dict[str, Any]) -> list[tuple[Made, Path]]:
    """The paths that a command is to make. FileNotFoundError for one that is to be read and is not there: at once, and not
    after seconds of imports."""
    hints, made = get_type_hints(function, include_extras=True), []
    for name, value in given.items():
        about = [about for about in get_args(hints[name]) if isinstance(about, Made)]
        for path in value if isinstance(value, list) else [value]:
            if isinstance(path, Path) and about:
                made.append((about[0], path))
            elif isinstance(path, Path) and not path.exists():
                hint = "; make a model with `causalqwen graft`" if name == "model" else ""
                raise FileNotFoundError(f"{path}: there is no such file or folder{hint}")
    return made


def _alone(given: dict[str, Any], rank: str) -> AbstractContextManager:
    """While a command runs, no other writes to its output."""
    if not given.get("output") or rank != "0":
        return nullcontext()
    from causalqwen.files import alone

    return alone(given["output"])


def command(function: Callable, group: typer.Typer = app) -> Callable:
    """Register a command: quiet libraries, and one line on stderr with exit status 1 for a mistake of the user's."""

    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> None:
        default = {"TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "true", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        # Threads that spin for long take a shared machine's cores; those that never do are slow on an idle one.
        default |= {} if "OMP_WAIT_POLICY" in os.environ else {"GOMP_SPINCOUNT": "10000"}
        for name, value in default.items():
            os.environ.setdefault(name, value)
        logging.getLogger("causalqwen").setLevel(logging.WARNING)  # commands tell what they made themselves
        ranks = int(os.environ.get("WORLD_SIZE", "1"))  # as torchrun and `accelerate launch` set it
        rank = os.environ.get("RANK", "0") if ranks > 1 else "0"
        who = f"causalqwen (rank {rank})" if ranks > 1 else "causalqwen"
        if rank != "0":
            os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        try:
            if ranks > 1 and function.__name__ != "train":
                raise ValueError(f"{function.__name__} is work for one process, and {ranks} were started; start one")
            to_make = _to_make(function, kwargs)
            with _alone(kwargs, rank):
                for made, path in to_make:
                    made.check(path, kwargs.get("resume", False))
                function(*args, **kwargs)
        except (ValueError, OSError, ImportError, RuntimeError) as error:
            message = str(error).strip() or type(error).__name__
            print(f"{who}: {message}", file=sys.stderr)
            raise typer.Exit(1) from None

    return group.command()(guarded)


def config_fields(settings: list[str] | None) -> dict[str, Any]:
    """What `--set NAME=VALUE` gives, values read as YAML. ValueError for one without "="."""
    import yaml

    made = {}
    for name, equals, value in (setting.partition("=") for setting in settings or ()):
        refuse(not equals, f"--set {name}: expected NAME=VALUE")
        try:
            made[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ValueError(f"--set {name}: {value!r} is no YAML ({' '.join(str(error).split())})") from None
    return made


def in_words(metrics: dict[str, Any]) -> str:
    """The scores of held-out rows for people: how far off, how often intervals held, whether numbers are announced."""
    if "median_error" not in metrics:
        return "the rows held out hold no number to score"
    from causalqwen.modeling.prediction import how_well

    count = metrics["value_count"]
    accuracy = how_well(count, metrics["median_error"], metrics.get("held_coverage", metrics["coverage"]["0.9"]))
    announced = round(metrics["announced"] * count)
    few = ", too few: texts will hold the backbone's digits, without a distribution. More rows, or others, are needed"
    return f"{accuracy}; <NUM> is announced at {announced:,} of them{few if announced < count / 2 else ''}"


def figures_line(metrics: dict[str, Any], *, words: bool = True) -> str:
    """Some figures in one line. words: those of words too, which a table has none of."""
    keys = ["median_error", "mae", "crps", "log_score"] + words * ["announced", "accuracy", "backbone_agreement"]
    figures = [f"{key.replace('_', ' ')} {metrics[key]:.4g}" for key in keys if key in metrics]
    if coverage := metrics.get("coverage"):
        levels, covered = (
            "/".join(f"{100 * float(share):.0f}" for share in of) for of in (coverage, coverage.values())
        )
        figures.append(f"{levels}% intervals cover {covered}%")
    return ", ".join(figures)
