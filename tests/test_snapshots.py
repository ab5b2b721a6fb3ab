"""What people call and are told, against `tests/snapshots/*.json`: public names, commands, endpoints, a regressor.

    .venv/bin/python -m pytest -n0 tests/test_snapshots.py --snapshots-update    writes them anew: read the diff

Equal to the bit on the machine that wrote a snapshot. On another, floats may differ in the sixth digit, and by a fifth behind a
fit, whose trees and steps go other ways there.
"""

import hashlib
import inspect
import json
import platform
import re
import shlex
from collections.abc import Iterator
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch

import causalqwen
import causalqwen.sklearn
import causalqwen.training
from causalqwen.data.texts import speech_paragraphs
from causalqwen.sklearn import NumberRegressor
from test_cli import place, run, trained, write  # noqa: F401  fixtures
from test_commands import commands
from test_served_people import EDITS, REQUESTS
from test_served_people import model as speaker  # noqa: F401  a fixture
from test_serving import PEOPLE, serving
from test_tables import products

SNAPSHOTS = Path(__file__).parent / "snapshots"
RUNTIME = {f"train/train_{name}" for name in ("runtime", "samples_per_second", "steps_per_second")}
PASSING = {"id", "created", "seconds", "fingerprint", *RUNTIME}
"""Fields that are others each time."""


def machine() -> str:
    """A name for all that the last bits of a float depend on."""
    told = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else platform.processor()
    about: list[Any] = sorted(set(re.findall(r"^(?:cpu family|model|stepping|flags|cache size).*", told, re.M)))
    about += [version(name) for name in ("torch", "transformers", "numpy", "scikit-learn")]
    about += [torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()]
    return hashlib.sha256(repr(about).encode()).hexdigest()[:16]


def leaves(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Where each number, text and empty object of a JSON value stands, and what it is."""
    inner = dict(enumerate(value)) if isinstance(value, list) else value
    if not inner or not isinstance(inner, dict):
        yield where, value
    else:
        for key in inner:
            yield from leaves(inner[key], f"{where}/{key}")


def same(now: Any, kept: Any, rel: float) -> bool:
    """Whether two leaves are equal; rel: how far floats may be apart, and then those in texts are not looked at."""
    if rel and isinstance(kept, float):
        return now == pytest.approx(kept, rel=rel, abs=1e-9)
    found, expected = (re.sub(r"\d\.\d+", "#", leaf) if rel and isinstance(leaf, str) else leaf for leaf in (now, kept))
    return found == expected and type(found) is type(expected)


@pytest.fixture
def unchanged(request):
    """A function that holds what is found against its snapshot, or writes that."""

    def check(name: str, found: Any, rel: float = 1e-5) -> None:
        path, found = SNAPSHOTS / f"{name}.json", json.loads(json.dumps(found))
        if request.config.getoption("--snapshots-update"):
            SNAPSHOTS.mkdir(exist_ok=True)
            text = json.dumps({"machine": machine(), "found": found}, indent=1, sort_keys=True, ensure_ascii=False)
            path.write_text(f"{text}\n", encoding="utf-8")
        snapshot = json.loads(path.read_text(encoding="utf-8"))
        rel *= snapshot["machine"] != machine()
        now, kept = dict(leaves(found)), dict(leaves(snapshot["found"]))
        pairs = {key: (kept.get(key, "nothing"), now.get(key, "nothing")) for key in sorted(kept.keys() | now.keys())}
        assert {key: (was, is_now) for key, (was, is_now) in pairs.items() if not same(is_now, was, rel)} == {}

    return check


def without(value: Any, names: set[str]) -> Any:
    """A JSON value whose objects lack some fields."""
    if isinstance(value, dict):
        return {name: without(inner, names) for name, inner in value.items() if name not in names}
    return [without(inner, names) for inner in value] if isinstance(value, list) else value


# ---- names -----------------------------------------------------------------------------------------------------------


def shown(thing: Any) -> str:
    """As it is written, without places in memory and the names of modules: files may move."""
    return re.sub(r"\b[A-Za-z_][\w.]*\.(\w+)| at 0x\w+", r"\1", str(thing))


def signature(thing: Any) -> str:
    return shown(inspect.signature(thing))


def described(thing: Any) -> Any:
    if not inspect.isclass(thing):
        return signature(thing) if callable(thing) else sorted(map(str, thing))
    members = {}
    for name in dir(thing):
        owner = next(base for base in thing.__mro__ if name in vars(base))
        if (name.startswith("_") and name != "__call__") or not owner.__module__.startswith("causalqwen"):
            continue
        if isinstance(vars(owner)[name], property | cached_property):
            members[name] = "property"
        elif inspect.isroutine(getattr(thing, name)):
            members[name] = signature(getattr(thing, name))
    return {"()": signature(thing), **members}


@pytest.mark.parametrize(
    "module", [causalqwen, causalqwen.sklearn, causalqwen.training], ids=lambda module: module.__name__
)
def test_public_names_and_how_they_are_called(module, unchanged):
    here = [name for name, thing in vars(module).items() if getattr(thing, "__module__", None) == module.__name__]
    names = getattr(module, "__all__", [name for name in here if name[0] != "_"])
    unchanged(module.__name__, {name: described(getattr(module, name)) for name in names})


def test_commands_and_their_options(unchanged):
    found = {}
    for words, command in commands():
        kinds = get_type_hints(inspect.unwrap(command.callback))
        found[" ".join(words)] = {
            "/".join([*option.opts, *option.secondary_opts]): [
                shown(kinds[option.name]),
                str(option.default),
                option.required,
            ]
            for option in command.params
            if option.name in kinds
        }
    unchanged("causalqwen_cli", found)


# ---- commands --------------------------------------------------------------------------------------------------------

SAID = "The long one is 31. The short one is 5, and that is all. "
ASKED = [
    {"prompt": "The long one is", "name": "number"},
    {"prompt": "He said", "name": "choice", "options": ["yes", "no", "never"]},
    {"prompt": "She said", "name": "text", "max_new_tokens": 4},
]
TOLD = [
    {"individual": "Ann", "prompt": "The long one is", "value": 93, "age": 30},
    {"individual": "Ann", "prompt": "The short one is", "value": 51, "age": 30},
    {"individual": "Bob", "prompt": "The long one is", "value": 90, "age": 61},
]
WORDS = [
    {"individual": f"p{n % 6}", "text": text[:200]} for n, text in enumerate(speech_paragraphs(numbers=False)[:12])
]
FILES = {
    "rows.jsonl": [{"prompt": "The long one is", "value": 91, "id": 7}, {"text": "The short one is 52 in all."}],
    "told.jsonl": TOLD,
    "ann.jsonl": TOLD[:2],
    "words.jsonl": WORDS,
    "asked.jsonl": ASKED,
    "closed.jsonl": ASKED[:2],
}
CALLS = {
    "graft": "graft --backbone backbone --output grafted --set gate_alpha=0.5 --json",
    "synthesize": "synthesize --output synthetic.jsonl --count 6 --json",
    "predict": "predict --model trained --input rows.jsonl --output predicted.jsonl --json",
    "generate standard": "generate --model trained --prompt 'The long one is' --max-new-tokens 12 --json",
    "generate persona": "generate --model trained --prompt 'The long one is' --preset persona --seed 9 --max-new-tokens 12"
    " --save-individual drawn.safetensors --json",
    "generate softmax": "generate --model trained --prompt Yes --preset softmax --seed 1 --max-new-tokens 9 --top-p 0.9 --json",
    "abduct": "abduct --model trained --text said.txt --output who.safetensors --name Zed --json",
    "abduct rows": "abduct --model trained --rows ann.jsonl --likelihood values --output of-rows.safetensors --json",
    "counterfactual": "counterfactual --model trained --prompt 'The long one' --text ' is 31, and' --edit 'The short one'"
    " --individual who.safetensors --individual drawn.safetensors --samples 2 --json",
    "voices": "voices --model trained --rows words.jsonl --output voices.safetensors --directions 2 --steps 2 --json",
    "population": "population --model trained --rows told.jsonl --output people.safetensors --json",
    "population drawn": "population --model trained --drawn 4 --output drawn-people.safetensors --json",
    "survey": "survey --model trained --population people.safetensors --questions asked.jsonl --output answers.jsonl --draws 2"
    " --json",
    "survey drawn": "survey --model trained --population drawn-people.safetensors --questions closed.jsonl --output drawn.jsonl"
    " --draws 0 --json",
    "evaluate": "evaluate --model trained --data eval.jsonl --output scores --train train.jsonl --validation eval.jsonl --json",
    "fit": "fit products.csv --target price --backbone backbone --output fitted --seed 3 --json",
    "predict table": "predict --model fitted --input few.csv --output table.jsonl --json",
}
"""Words of each command, in the order in which they are run, in a folder that holds what the first of them read."""
UNTOLD = {"train", "serve", "explore", "demo", "doctor"}
"""Whose output is kept elsewhere, waits for requests, is a page for people, or tells of this machine."""


@pytest.fixture(scope="module")
def told(place, trained):  # noqa: F811
    """What each command prints, and the rows that it writes; and the records of the training."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        for name, rows in FILES.items():
            write(place / name, rows)
        (place / "said.txt").write_text(SAID * 6)
        frame, price = products()
        frame.assign(price=price).to_csv("products.csv", index=False)
        frame[:6].to_csv("few.csv", index=False)
        found = {"train": [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]}
        for name, words in CALLS.items():
            there = {*place.glob("*.jsonl")}
            found[name] = {"stdout": json.loads(run(*shlex.split(words)).stdout)}
            for file in {*place.glob("*.jsonl")} - there:
                found[name]["rows"] = [json.loads(line) for line in file.read_text().splitlines()]
    return without(found, PASSING)


@pytest.mark.parametrize("name", ["train", *CALLS])
def test_what_a_command_tells(name, told, unchanged):
    unchanged(f"causalqwen {name}".replace(" ", "-"), told[name], 0.2)


def test_every_command_that_tells_something_is_run():
    names = {" ".join(words) for words, _ in commands()}
    assert names == UNTOLD | {name.split()[0] for name in CALLS}


def test_the_quantiles_of_a_regressor(place, told, unchanged):  # noqa: F811
    quantiles = NumberRegressor.load(place / "fitted").predict(products()[0], "quantiles")
    unchanged("quantiles", [level.tolist() for level in quantiles], 0.2)


# ---- endpoints -------------------------------------------------------------------------------------------------------

ASKS = [
    *(("GET", path, None) for path in ("/health", "/ready", "/v1/models", "/v1/models/tiny", "/v1/models/other")),
    *(("GET", path, None) for path in ("/metrics", "/openapi.json", "/nowhere", "/v1/completions")),
    *(("POST", f"/v1/{path}", body) for path, body in REQUESTS),
    *(
        ("POST", f"/v1/{path}", {**body, "stream": True})
        for path, body in REQUESTS
        if path not in ("numbers", "answers")
    ),
    ("POST", "/v1/completions", {"prompt": "They say that", "max_tokens": 16, "n": 2, "logprobs": 2}),
    ("POST", "/v1/completions", {"prompt": "They say that", "max_tokens": 9, "causal": {"preset": "casual"}}),
    (
        "POST",
        "/v1/worlds",
        {"prompt": "They say that", "text": " 12.5 people", "interventions": EDITS, "num_samples": 2},
    ),
    ("POST", "/v1/answers", {"questions": [{"prompt": "They say that"}], "individual": "Ann", "draws": 3}),
    ("POST", "/v1/numbers", {"prompts": ["They say that", "We count"], "points": 8}),
]
"""Method, path and body of requests."""


def test_what_the_endpoints_answer(speaker, tmp_path, unchanged):  # noqa: F811
    found = []
    with serving(speaker, individuals=dict(PEOPLE), keep=tmp_path) as server:
        for method, path, body in ASKS:
            seeded = {"seed": 3} if path.endswith("completions") else {}
            status, raw = server.send(body and {"model": "tiny", **seeded, **body}, path, method)
            text = raw.decode()
            if path == "/metrics":
                told = sorted(set(re.findall(r"^\w+", text, re.M)))
            elif path == "/openapi.json":
                told = without(json.loads(text), {"description", "summary", "title"})
            elif text.startswith("data: "):
                told = [json.loads(line[6:]) for line in text.split("\n\n")[:-2]]
            else:
                told = json.loads(text)
            found.append([method, path, body, status, without(told, PASSING)])
    (schema,) = (told for _, path, _, _, told in found if path == "/openapi.json")
    assert {path.format(name="tiny") for path in schema["paths"]} <= {path for _, path, *_ in found}
    unchanged("endpoints", found)
