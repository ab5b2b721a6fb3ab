"""Files of every kind, damaged: one clear error that names the file, or the same results as before; where files have a
checksum, never others. And files that cannot be written: an error, what was there stays whole, and nothing is left over."""

import codecs
import contextlib
import faulthandler
import io
import json
import os
import random
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import torch

from causalqwen import CausalDecoding, CausalQwenForCausalLM, Individual, Population
from causalqwen.data import RowError, encode_rows, read_rows
from causalqwen.data.columns import read_table
from causalqwen.data.people import read_questions
from causalqwen.decoding import Voices
from causalqwen.evaluation import predict_file
from causalqwen.evaluation.surveys import survey_file
from causalqwen.modeling.layer_shift import depths_of
from causalqwen.modeling.loading import check_files, load_model
from causalqwen.training import FactStore, TrainSettings
from causalqwen.training.run import learn
from causalqwen_cli.making import save_model

from . import Bounds, Tally, is_clear

TEXT = "the long road goes past the small house and the old mill\n" * 12
WRONG = [None, "x", "", -1, 0, 10**12, 1.5, float("nan"), True, [], [1], {}, {"a": 1}]
ROWS = [
    {"prompt": f"The {('short', 'long')[i % 2]} one is", "value": 50 + 40 * (i % 2) + i % 5, "individual": f"p{i % 3}"}
    for i in range(24)
]
QUESTIONS = [{"prompt": "How long?", "name": "a"}, {"prompt": "Yes?", "name": "b", "options": ["yes", "no"]}]
SETTINGS = "values: {epochs: 2, batch_size: 8, learning_rate: 1e-3}\nseed: 7\nsupport: [0, null, 1]\nlora:\n  rank: 2\n"
_ITS_SECONDS = 60
_NOBODY = 65534
codecs.lookup("latin1")  # loads what nobody may not be allowed to read


@dataclass(frozen=True)
class Target:
    """Something that is read. make: write it, whole, into an empty folder. ask: read it there; what comes is compared.

    sealed: whether other results than before are a finding, because the files tell of what is in them: "load", when they are
        read; "doctor", when `causalqwen doctor --scan` looks; "" for files that people write, of which nobody can know.
    share: how often its turn comes.
    """

    make: Callable[[Path], Any]
    ask: Callable[[Path], Any]
    sealed: str = "load"
    share: int = 4


class Kinds:
    """What is made once, from a tiny model, and then copied and damaged."""

    def __init__(self, model: CausalQwenForCausalLM, folder: Path) -> None:
        """folder: an empty one."""
        self.model, self.folder = model, folder
        model.save_pretrained(folder / "model")
        (folder / "model" / "model.safetensors").chmod(0o644)  # safetensors lets nobody else read it
        self._rows(folder / "rows.jsonl")
        self._questions(folder / "questions.jsonl")
        self.people = Population.drawn(3, model.config.causal_size, seed=1)
        self.examples = encode_rows(read_rows(folder / "rows.jsonl"), model.processor)

    def targets(self) -> dict[str, Target]:
        def written(name: str, make: Callable[[Path], None], read: Callable[[Path], Any]) -> Target:
            """A file that people write."""
            return Target(lambda folder: make(folder / name), lambda folder: read(folder / name), "", share=2)

        return {
            "checkpoint": Target(self.model.save_pretrained, self._use, "doctor", share=12),
            "individual": Target(lambda folder: self._one().save(folder / "who.safetensors"), self._individual),
            "population": Target(lambda folder: self.people.save(folder / "people.safetensors"), self._population),
            "voices": Target(lambda folder: self._voices().save(folder / "voices.safetensors"), self._heard),
            "domain": Target(self._save_domain, self._domain),
            "kept facts": Target(lambda folder: FactStore.build(self.model, self.examples, folder), self._facts),
            "training run": Target(self._train, lambda folder: self._train(folder, resume=True), share=1),
            "kept predictions": Target(self._start_predicting, self._go_on_predicting, "", share=1),
            "settings": written("settings.yaml", lambda file: file.write_text(SETTINGS), TrainSettings.from_yaml),
            "rows, JSON lines": written("rows.jsonl", self._rows, self._read),
            "rows, CSV": written("rows.csv", self._rows, self._read),
            "rows, Parquet": written("rows.parquet", self._rows, self._read),
            "table, CSV": written("table.csv", self._rows, read_table),
            "table, JSON lines": written("table.jsonl", self._rows, read_table),
            "questions": written("questions.jsonl", self._questions, read_questions),
        }

    # ---- a model ------------------------------------------------------------------------------------------------------

    def _use(self, folder: Path) -> Any:
        model = load_model(folder)
        prompts = ["It is 5 and then", "A new year"]
        inputs = model.processor(prompts, padding=True, padding_side="left", return_tensors="pt").to(model.device)
        out = model.generate(**inputs, causal_decoding=CausalDecoding.preset("persona", seed=1), max_new_tokens=4)
        said = model.processor.batch_decode(out.sequences, out.numeric_values)
        interval = model.predict_number(["The long one is"])[0].interval(0.9)
        model.save_pretrained(folder.with_name("saved-again"))
        return said, interval

    def _save_domain(self, folder: Path) -> None:
        self.model.add_domain("court", layers=1, width=4)
        self.model.save_domain("court", folder / "court.safetensors")
        self._drop_domain()

    def _drop_domain(self) -> None:
        self.model.set_domain(None)
        if "court" in self.model.abduction.domains:
            del self.model.abduction.domains["court"]
        self.model.config.domains = {}

    def _domain(self, folder: Path) -> Any:
        try:
            self.model.load_domain(folder / "court.safetensors")
            tensors = self.model.abduction.domains["court"].state_dict()
            return {name: tensor.tolist() for name, tensor in tensors.items()}
        finally:
            if self.model.config.domains:
                self._drop_domain()

    # ---- people -------------------------------------------------------------------------------------------------------

    def _one(self) -> Individual:
        return Individual.from_seed(1, self.model.config.causal_size)

    def _individual(self, folder: Path) -> Any:
        one = Individual.load(folder / "who.safetensors")
        return one.factor.tolist(), one.name, one.evidence

    def _population(self, folder: Path) -> Any:
        people = Population.load(folder / "people.safetensors")
        return people.draws.tolist(), list(people.names), dict(people.facts)

    def _voices(self) -> Voices:
        layers, size = depths_of(self.model.backbone)
        one = torch.linspace(-1, 1, layers * size).view(layers, size)
        each = one.expand(3, layers, size)
        return Voices(one, 0 * one, 2 * one, each.clone(), 0.1 * each, torch.ones(3), 2.0, 5, (0.1, 0.2))

    def _heard(self, folder: Path) -> Any:
        voices = Voices.load(folder / "voices.safetensors")
        one = self.model.abduct(TEXT, prior=voices, name="Ann")
        one.save(folder.with_name("heard"))
        return Individual.load(folder.with_name("heard")).voice.tolist(), str(voices)

    # ---- what runs keep -----------------------------------------------------------------------------------------------

    def _facts(self, folder: Path) -> Any:
        (kept,) = folder.iterdir() if any(folder.iterdir()) else [folder]
        facts = FactStore(kept).facts
        return {name: np.nan_to_num(np.array(getattr(facts, name))).tolist() for name in facts.columns}

    def _train(self, folder: Path, resume: bool = False) -> Any:
        model = load_model(self.folder / "model")
        brief = {"values": {"epochs": 2, "batch_size": 8}, "evaluations": 2, "recalibrate": False}
        with contextlib.redirect_stdout(io.StringIO()):
            learn(model, self.examples, self.examples[:8], folder, TrainSettings.from_dict(brief), resume=resume)
        return model.predict_number(["The long one is"])[0].median

    def _start_predicting(self, folder: Path) -> None:
        """A row that cannot be read stops it after two batches; then the file is whole."""
        source = folder / "rows.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in [*ROWS[:8], {}]))
        with contextlib.suppress(RowError):
            predict_file(self.model, source, folder / "out.jsonl", batch_size=4)
        self._rows(source)
        assert (folder / "out.jsonl.part.jsonl").exists() and (folder / "out.jsonl.part.json").exists()

    def _go_on_predicting(self, folder: Path) -> Any:
        predict_file(self.model, folder / "rows.jsonl", folder / "out.jsonl", batch_size=4, resume=True)
        return (folder / "out.jsonl").read_text()

    # ---- what people write --------------------------------------------------------------------------------------------

    def _rows(self, path: Path) -> None:
        if path.suffix == ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        else:
            frame = pandas.DataFrame(ROWS)
            frame.to_csv(path, index=False) if path.suffix == ".csv" else frame.to_parquet(path)

    def _read(self, path: Path) -> Any:
        return [example.input_ids for example in encode_rows(read_rows(path), self.model.processor)]

    def _questions(self, path: Path) -> None:
        path.write_text("".join(json.dumps(one) + "\n" for one in QUESTIONS))

    # ---- what is written ----------------------------------------------------------------------------------------------

    def writers(self) -> dict[str, Callable[[Path], Any]]:
        """Whatever writes to a path, which may not be there yet."""
        rows, questions = self.folder / "rows.jsonl", read_questions(self.folder / "questions.jsonl")
        return {
            "checkpoint": lambda path: save_model(self.model, path),
            "individual": lambda path: self._one().save(path),
            "population": self.people.save,
            "voices": self._voices().save,
            "kept facts": lambda path: FactStore.build(self.model, self.examples, path),
            "predictions, JSON lines": lambda path: predict_file(self.model, rows, path.with_suffix(".jsonl")),
            "predictions, Parquet": lambda path: predict_file(self.model, rows, path.with_suffix(".parquet")),
            "survey, CSV": lambda path: survey_file(self.model, self.people, questions, path.with_suffix(".csv")),
            "training run": lambda path: self._train(path, resume=path.exists()),
        }


def fit_everything(model: CausalQwenForCausalLM) -> None:
    """Settings of every kind, as a model that was trained has them."""
    model.config.value_transform = {"kind": "quantile", "knots": [[-1.0, 0.0], [0.0, 1.0], [1.0, 5.0]]}
    model.config.value_range, model.config.interval_levels = [0.0, 5.0], [step / 100 for step in range(101)]


# ---- damages ---------------------------------------------------------------------------------------------------------


def _flip(chance: random.Random, file: Path, files: list[Path]) -> str:
    data = bytearray(file.read_bytes() or b"\0")
    place, bit = chance.randrange(len(data)), chance.randrange(8)
    data[place] ^= 1 << bit
    file.write_bytes(data)
    return f"bit {bit} of byte {place}"


def _zeros(chance: random.Random, file: Path, files: list[Path]) -> str:
    """As a disk gives them back that lost power."""
    data = bytearray(file.read_bytes())
    place = chance.randrange(max(len(data), 1))
    data[place : place + 512] = bytes(len(data[place : place + 512]))
    file.write_bytes(data)
    return f"from byte {place}"


def _folder(chance: random.Random, file: Path, files: list[Path]) -> None:
    file.unlink()
    file.mkdir()


def _swap(chance: random.Random, file: Path, files: list[Path]) -> str:
    other = chance.choice(files)
    mine, theirs = file.read_bytes(), other.read_bytes()
    file.write_bytes(theirs)
    other.write_bytes(mine)
    return f"with {other.name}"


def _places(node: Any, at: tuple = ()) -> Iterator[tuple]:
    """The path to every value of a JSON file; of a list, to the first ones."""
    pairs = node.items() if isinstance(node, dict) else enumerate(node[:3]) if isinstance(node, list) else ()
    for key, value in pairs:
        yield (*at, key)
        yield from _places(value, (*at, key))


def _retype(chance: random.Random, file: Path, files: list[Path]) -> str:
    """A value of a JSON file, or of a line of one, is another, or is gone."""
    files = [one for one in files if one.suffix in (".json", ".jsonl") and one.name != "tokenizer.json"]
    if not files:
        return _flip(chance, file, files)
    file = chance.choice(files)
    lines = file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
    line = chance.randrange(len(lines))
    whole = node = json.loads(lines[line])
    *path, last = chance.choice(list(_places(node)))
    for key in path:
        node = node[key]
    gone = chance.random() < 0.15
    told = f"{file.name} line {line}: {[*path, last]} {'removed' if gone else ''}"
    if gone:
        del node[last]
    else:
        node[last] = chance.choice(WRONG)
        told += repr(node[last])
    lines[line] = json.dumps(whole)
    file.write_text("\n".join(lines) + "\n")
    return told


def _later(chance: random.Random, file: Path, files: list[Path]) -> str:
    """A field that this version does not know, at some level, as a later one may write it."""
    files = [one for one in files if one.suffix == ".json" and one.name != "tokenizer.json"]
    if not files:
        return _zeros(chance, file, files)
    file = chance.choice(files)
    whole = json.loads(file.read_text())
    nodes = [whole, *whole.values()] if isinstance(whole, dict) else [{}]
    node = chance.choice([node for node in nodes if isinstance(node, dict)])
    node[chance.choice(["of_a_later_version", "format_version", "format"])] = 99
    file.write_text(json.dumps(whole))
    return file.name


DAMAGES: dict[str, Callable[[random.Random, Path, list[Path]], Any]] = {
    "cut": lambda chance, file, _: os.truncate(file, chance.randrange(max(file.stat().st_size, 1))),
    "flip": _flip,
    "empty": lambda chance, file, _: os.truncate(file, 0),
    "garbage": lambda chance, file, _: file.write_bytes(chance.randbytes(200)) and None,
    "zeros": _zeros,
    "deep": lambda chance, file, _: file.write_text(chance.choice(["[", '{"a":']) * 100_000) and None,
    "delete": lambda chance, file, _: file.unlink(),
    "folder": _folder,
    "unreadable": lambda chance, file, _: file.chmod(0),
    "swap": _swap,
    "retype": _retype,
    "later": _later,
}
"""What is done to a file, one of `files`; where, in words, or None."""
_WEIGHTS = {"flip": 3, "retype": 4}


@contextmanager
def without_rights() -> Iterator[None]:
    """As a user who is not root: root may read what nobody may."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(_NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@contextmanager
def open_folder() -> Iterator[Path]:
    """A temporary folder that everybody may enter, and that is gone at the end."""
    folder = Path(tempfile.mkdtemp(prefix="campaign-"))
    folder.chmod(0o777)
    try:
        yield folder
    finally:
        for path in folder.rglob("*"):
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o777)
        shutil.rmtree(folder)


def _copy(whole: Path, to: Path) -> None:
    """What was made once, into a folder that anybody may change."""
    shutil.copytree(whole, to)
    for path in [to, *to.rglob("*")]:
        path.chmod(0o777 if path.is_dir() else 0o666)


def run(bounds: Bounds, model: CausalQwenForCausalLM) -> Tally:
    """One damage, or one write that fails, at a draw; of a model that has settings of every kind (`fit_everything`)."""
    tally, truth = Tally(), {}
    with open_folder() as place:
        (place / "whole").mkdir()
        kinds = Kinds(model, place / "whole")
        targets, writers = kinds.targets(), kinds.writers()
        turns = [name for name, target in targets.items() for _ in range(target.share)]
        for number, chance in bounds.draws():
            faulthandler.dump_traceback_later(_ITS_SECONDS, exit=True)  # no error is worse than a hang
            if chance.random() < 0.1:
                what, told = _unwritten(chance, chance.choice(list(writers)), writers, place, tally)
            else:
                name = chance.choice(turns)
                what, told = _damaged(chance, name, targets[name], truth, place, tally)
            tally.tried[what] += 1
            if told:
                tally.find(what, f"draw {number}: {told}")
            faulthandler.cancel_dump_traceback_later()
    return tally


def _damaged(
    chance: random.Random, name: str, target: Target, truth: dict[str, Any], place: Path, tally: Tally
) -> tuple[str, str]:
    whole, folder = place / "whole" / name, place / "damaged"
    if name not in truth:
        whole.mkdir()
        target.make(whole)
        _copy(whole, folder)
        truth[name] = _ask(target, folder)
        _clear(place)
    _copy(whole, folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    file = chance.choice(files)
    kind = chance.choices(list(DAMAGES), [_WEIGHTS.get(one, 1) for one in DAMAGES])[0]
    told = f"{kind} {file.relative_to(folder)} {DAMAGES[kind](chance, file, files) or ''}"
    what = f"{name}: {kind}"
    try:
        with without_rights():
            found = _ask(target, folder)
    except Exception as error:
        tally.refused[what] += 1
        good = is_clear(error, str(folder), file.name, *(path.name for path in files))
        return what, "" if good else f"{told}: {type(error).__name__}: {str(error)[:300]}"
    else:
        good = repr(found) == repr(truth[name]) or not target.sealed
        good = good or (target.sealed == "doctor" and _doctor_tells(folder))
        return what, "" if good else f"{told}: other results"
    finally:
        _clear(place)


def _ask(target: Target, folder: Path) -> Any:
    with contextlib.redirect_stderr(io.StringIO()):
        return target.ask(folder)


def _doctor_tells(folder: Path) -> bool:
    with contextlib.suppress(ValueError):
        check_files(folder)
        return False
    return True


def _clear(place: Path) -> None:
    for path in place.iterdir():
        if path.name != "whole":
            shutil.rmtree(path) if path.is_dir() else path.unlink()


# ---- what cannot be written ------------------------------------------------------------------------------------------


def _unwritten(
    chance: random.Random, name: str, writers: dict[str, Callable[[Path], Any]], place: Path, tally: Tally
) -> tuple[str, str]:
    kind = chance.choice(["full", "read-only", "below a file", "a folder"])
    what = f"writing {name}: {kind}"
    folder, what_limit = place / "out", ""
    folder.mkdir()
    folder.chmod(0o777)
    path, limit = folder / "new", resource.getrlimit(resource.RLIMIT_FSIZE)
    if kind == "read-only":
        folder.chmod(0o555)
    elif kind == "below a file":
        (folder / "file").write_text("there")
        path = folder / "file" / "new"
    elif kind == "a folder":
        for ending in ("", ".jsonl", ".parquet", ".csv"):
            path.with_suffix(ending).mkdir()
            (path.with_suffix(ending) / "there").write_text("there")
    before = _content(folder)
    try:
        if kind == "full":
            most = chance.choice([0, 10, 1000, 20_000, 200_000])
            what_limit = f" after {most} bytes"
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, limit[1]))
        try:
            with without_rights(), contextlib.redirect_stderr(io.StringIO()):
                writers[name](path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    except Exception as error:
        tally.refused[what] += 1
        if not is_clear(error, str(folder), "new", "too large"):
            return what, f"{what_limit}: {type(error).__name__}: {str(error)[:300]}"
        # Whatever is kept of a stopped run may stay, but nothing that looks whole, nor half a file beside it.
        left = [file for file, _ in _content(folder) - before if ".part." not in file and "work" not in file]
        odd = [file for file in left if file.endswith((".part", ".lock")) or ".part-" in file]
        return what, f"{what_limit}: left {odd}" if odd else ""
    finally:
        _clear(place)
    return what, ""


def _content(folder: Path) -> set[tuple[str, int]]:
    return {(str(path.relative_to(folder)), path.stat().st_size) for path in folder.rglob("*") if path.is_file()}
