"""The model card: a checkpoint's README.md, from its configuration and from what is known of its training.

`training.json` beside it holds the facts: how many rows and numbers, the stages, the scores on held-out rows. A figure that is
not there is not shown. A card that was changed by hand is somebody's own and stays; any other is written anew with the weights,
which its last line tells: the SHA-256 of all before it.
"""

import hashlib
import json
import math
import os
import re
import tempfile
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, HfApi, ModelCardData, parse_eval_result_entries
from transformers.utils import cached_file

from causalqwen.files import writing
from causalqwen.modeling.backbones import KNOWN_BACKBONES
from causalqwen.modeling.configuration import SECTIONS, CausalQwenConfig
from causalqwen.numbers.rendering import brief

CARD, TRAINED = "README.md", "training.json"
EVAL_RESULTS = ".eval_results"
_SEAL = re.compile(r"<!-- written by causalqwen, and anew with the weights unless changed: ([0-9a-f]{64}) -->\n?")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_CITATION = """```bibtex
@software{causalqwen,
  title = {CausalQwen: numbers with honest uncertainty and individuals who last, grafted onto a pretrained language model},
  version = {VERSION},
  license = {Apache-2.0}
}
```"""
_USE = """```python
from causalqwen import CausalQwenForCausalLM

model = CausalQwenForCausalLM.from_pretrained("this folder, or its name on the hub")
(prediction,) = model.predict_number("a text that ends where the number would start")
print(prediction, prediction.interval(0.9))
```
After `import causalqwen`, transformers' `AutoModelForCausalLM`, `AutoProcessor` and `pipeline` load it too."""
_SCORES = {
    "quantile_crps": "CRPS, from 199 quantiles, in the units of the values",
    "median_error": "median error of the median, in the units of the values",
    "mae": "mean error of the median, in the units of the values",
    "log_score": "log score: mean log density at the value, higher is better",
    "num_precision": "precision of announcing a number",
    "num_recall": "recall of announcing a number",
    "backbone_agreement": "share of next-token decisions that are the backbone's",
}
_OF_HUB = {"quantile_crps": "crps", "median_error": "median_error", "mae": "mae"}


def base_model(config: CausalQwenConfig) -> dict[str, str]:
    """Facts of the backbone: its name on the hub as base_model, license and language. Nothing of a folder's."""
    name = str(config.text_config._name_or_path)
    known = KNOWN_BACKBONES.get(Path(name).name)
    if known is not None:
        return known
    return {"base_model": name} if _HUB_NAME.fullmatch(name) and not os.path.exists(name) else {}


def card_text(config: CausalQwenConfig, trained: dict[str, Any] | None) -> str:
    """The card of a model, sealed.

    trained: what `training.json` holds (`train`), None for a graft that has learned nothing.
    """
    release = version("causalqwen")
    known: dict[str, Any] = dict(base_model(config))
    base = known.get("base_model")
    title = f"CausalQwen on {base.split('/')[-1]}" if base else "CausalQwen"
    results = None
    if trained is not None:
        known.pop("license", None)  # of what was learned from somebody's rows, whoever publishes it says
        results = _eval_results(trained["metrics"])
    data = ModelCardData(
        library_name="causalqwen",
        pipeline_tag="text-generation",
        tags=["causalqwen", "numbers", "uncertainty", "regression"],
        eval_results=results or None,
        model_name=title if results else None,
        **known,
    )
    if not results:
        data.pop("model_name")
    sections = [
        f"# {title}",
        f"{f'[{base}](https://huggingface.co/{base})' if base else 'A decoder of transformers'} with a number channel and an "
        f"individual grafted onto it by causalqwen {release}: it gives the next number of a text as a distribution, and draws "
        "texts by who speaks and by noise.",
        "## Use\n" + _USE,
        "## Data\n" + _data(config, trained),
        "## Settings\n" + _settings(config, trained),
        "## Scores\n" + _scores(trained),
        "## Calibration\n" + _calibration(config, trained),
        "## Limits\n" + _limits(config, trained),
        "## Citation\n" + _CITATION.replace("VERSION", release),
    ]
    return sealed(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(sections) + "\n")


def sealed(text: str) -> str:
    """A card with the line that tells whether it was changed since."""
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f"{text}\n<!-- written by causalqwen, and anew with the weights unless changed: {digest} -->\n"


def is_own(card: bytes) -> bool:
    """Whether this card is unchanged since it was written here."""
    text = card.decode("utf-8", "replace")
    *_, last = [None, *_SEAL.finditer(text)]
    return last is not None and sealed(text[: last.start() - 1]).encode() == card


def is_somebodys(path: Path) -> bool:
    """Whether there is a card, and somebody wrote or changed it."""
    return path.is_file() and not is_own(path.read_bytes())


@dataclass(frozen=True)
class Beside:
    """What stands beside the weights: trained_on, `training.json`; edited, the card where somebody changed it; results, the
    files of `.eval_results`, by which the hub's leaderboards know scores."""

    trained_on: dict[str, Any] | None
    edited: bytes | None = None
    results: dict[str, bytes] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Any) -> "Beside":
        """Facts of a model: what its last training says, or else what lay where it was loaded from.

        ValueError for a `training.json` that is damaged, and for results that the hub would not take.
        """
        if model.trained_on is not None or model.loaded_from is None:
            return cls(model.trained_on)
        card, facts = (_file_of(name, **model.loaded_from) for name in (CARD, TRAINED))
        trained_on = None if facts is None else _checked(facts, f"{TRAINED} of {model.loaded_from['source']}")
        results = Path(model.loaded_from["source"], EVAL_RESULTS).glob("*.yaml")
        edited = None if card is None or is_own(card) else card
        return cls(trained_on, edited, {file.name: _checked_results(file) for file in results})

    def write(self, folder: Path, config: CausalQwenConfig) -> None:
        """Into a folder with the weights. A card that is there, and is somebody's, stays."""
        files = {Path(EVAL_RESULTS, name): content for name, content in self.results.items()}
        if self.trained_on is not None:
            files[Path(TRAINED)] = (json.dumps(self.trained_on, indent=1) + "\n").encode()
        if not is_somebodys(folder / CARD):
            files[Path(CARD)] = self.edited or card_text(config, self.trained_on).encode()
        for name, content in files.items():
            with writing(folder / name) as part:
                part.write_bytes(content)


def _file_of(name: str, source: str, **where: Any) -> bytes | None:
    """A file beside the weights, in a folder or on the hub; None where there is none, or no network."""
    quiet = dict.fromkeys((f"_raise_exceptions_for_{what}" for what in ("missing_entries", "connection_errors")), False)
    found = cached_file(source, name, **where, **quiet)
    return None if found is None else Path(found).read_bytes()


def _checked_results(file: Path) -> bytes:
    """A file of benchmark scores. ValueError unless the hub knows its format."""
    content = file.read_bytes()
    try:
        parse_eval_result_entries(yaml.safe_load(content))
    except (ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError) as error:
        raise ValueError(
            f"{file} holds no scores as the hub takes them ({' '.join(str(error).split())}): expected a list of "
            "{dataset: {id: ..., task_id: ...}, value: ...}"
        ) from None
    return content


def _checked(content: bytes, place: str) -> dict[str, Any]:
    try:
        facts = json.loads(content.decode())
        whole = all(type(facts[name]) is int for name in ("rows", "numbers", "held_out"))
        if not whole or not all(isinstance(facts[name], dict) for name in ("stages", "metrics")):
            raise TypeError("expected rows, numbers and held_out as integers, stages and metrics as objects")
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{place} is damaged ({type(error).__name__}: {error}); remove it, or train anew") from None
    return facts


def upload(
    model: Any,
    repo_id: str,
    *,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str = "Upload model",
    commit_description: str | None = None,
    max_shard_size: int | str = "50GB",
    remote_code: bool = False,
) -> Any:
    """Upload what `save_pretrained` writes, in one commit, to a repository of the hub, which is made where it is missing.

    A card in the repository that is not one of this library's, unchanged, stays as it is. Arguments are those of transformers'
    `push_to_hub`, and `remote_code` of `save_pretrained`. Returns huggingface_hub's CommitInfo.
    """
    api = HfApi(token=token, library_name="causalqwen", library_version=version("causalqwen"))
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision is not None and not revision.startswith("refs/pr"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    there = _file_of(CARD, repo_id, token=token, revision=revision, force_download=True)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, max_shard_size=max_shard_size, remote_code=remote_code)
        return api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            revision=revision,
            create_pr=create_pr,
            commit_message=commit_message,
            commit_description=commit_description,
            ignore_patterns=None if there is None or is_own(there) else [CARD],
        )


def _eval_results(metrics: dict[str, Any]) -> list[EvalResult]:
    results = {name: metrics[key] for key, name in _OF_HUB.items() if _finite(metrics.get(key))}
    covered = metrics.get("coverage", {}).get("0.9")
    if _finite(covered):
        results["coverage_90"] = covered
    return [
        EvalResult(
            task_type="text-generation",
            task_name="numbers in text",
            dataset_type="own-rows",
            dataset_name="rows held out in training",
            dataset_split="validation",
            metric_type=name,
            metric_value=value,
        )
        for name, value in results.items()
    ]


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _data(config: CausalQwenConfig, trained: dict[str, Any] | None) -> str:
    if trained is None:
        return "None: nothing was learned since the graft." if config.value_range is None else "Not recorded."
    held = f"; {trained['held_out']:,} further rows were held out" if trained["held_out"] else ""
    text = f"{trained['rows']:,} rows with {trained['numbers']:,} numbers were learned{held}."
    if config.value_range is not None:
        low, high = config.value_range
        text += f" Values lie between {low:g} and {high:g}."
    return text + " Whose rows they are, and under which terms, is for their publisher to say here."


def _settings(config: CausalQwenConfig, trained: dict[str, Any] | None) -> str:
    default = CausalQwenConfig()
    names = ["start", *(name for part in SECTIONS["settings"].values() for name in part if name != "start")]
    rows = {
        name: getattr(config, name)
        for name in names
        if name == "start" or getattr(config, name) != getattr(default, name)
    }
    rows["axis of values"] = (config.value_transform or {}).get("kind", "identity")
    if trained is not None:
        for name, given in trained["stages"].items():
            rows[f"stage {name}"] = ", ".join(f"{key} {value}" for key, value in given.items()) or "as it comes"
        rows["seed"] = trained.get("seed")
    return _table(
        ("setting, the default left out", "value"),
        {f"`{name}`" if "_" in name else name: value for name, value in rows.items()},
    )


def _table(head: tuple[str, str], rows: dict[str, Any]) -> str:
    lines = [f"| {head[0]} | {head[1]} |", "|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {value} |" for name, value in rows.items() if value is not None)])


def _scores(trained: dict[str, Any] | None) -> str:
    metrics = {} if trained is None else trained["metrics"]
    rows = {label: brief(metrics[key]) for key, label in _SCORES.items() if _finite(metrics.get(key))}
    if not rows:
        return "None were taken."
    return (
        f"On the {trained['held_out']:,} rows held out in training, {metrics.get('num_count', 0):,} numbers, with the weights "
        "as `train` left them. Choices and the intervals' levels were made by these very rows: what it does on others is for a "
        "test of one's own (`causalqwen evaluate`).\n\n" + _table(("score", "value"), rows)
    )


def _calibration(config: CausalQwenConfig, trained: dict[str, Any] | None) -> str:
    metrics = {} if trained is None else trained["metrics"]
    covered, raw = metrics.get("coverage"), metrics.get("coverage_raw", {})
    text = "Intervals of numbers were not fitted to rows."
    if covered:
        how = "recalibrated on these rows" if config.interval_levels is not None else "as the law gives them"
        rows = {
            f"{float(level):.0%}": f"{share:.1%} ({raw[level]:.1%})" for level, share in covered.items() if level in raw
        }
        text = _table(("central interval", f"numbers inside, {how} (raw)"), rows)
    return text


def _limits(config: CausalQwenConfig, trained: dict[str, Any] | None) -> str:
    limits = [
        "How much people differ is a constant of the start, not learned.",
        "Beyond the values that were learned its laws are extrapolation." if config.value_range else
        "It has learned no values: its distributions of numbers mean nothing until it is trained.",
        "What the backbone cannot do, or should not be asked for, holds here too.",
    ]  # fmt: skip
    if trained is not None and not trained["held_out"]:
        limits.append("No rows were held out: nothing here says how good it is.")
    return "\n".join(f"- {limit}" for limit in limits)
