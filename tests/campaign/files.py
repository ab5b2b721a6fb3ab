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
import torch

from causalqwen import CausalDecoding, CausalQwenForCausalLM, Individual, Population
from causalqwen.data import encode_rows, read_rows
from causalqwen.data.columns import read_table
from causalqwen.data.people import read_questions
from causalqwen.decoding import Voices
from causalqwen.modeling.layer_shift import depths_of
from causalqwen.modeling.loading import check_files, load_model
from causalqwen.training import FactStore, TrainSettings
from causalqwen.training.run import learn

from . import Bounds, Tally, is_clear

TEXT = "the long road goes past the small house and the old mill\n" * 12
WRONG = [None, "x", "", -1, 0, 10**12, 1.5, float("nan"), True, [], [1], {}, {"a": 1}]
ROWS = [
    {
        "prompt": f"The {'long' if i % 2 else 'short'} one is",
        "value": 50 + 40 * (i % 2) + i % 5,
        "individual": f"p{i % 3}",
    }
    for i in range(24)
]
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

    make: Callable[[Path], None]
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
        self._questions(folder)
        self.people = Population.drawn(3, model.config.causal_size, seed=1)
        self.examples = encode_rows(read_rows(folder / "rows.jsonl"), model.processor)

    def targets(self) -> dict[str, Target]:
        return {
            "checkpoint": Target(self._checkpoint, self._use, "doctor", share=12),
            "individual": Target(self._save_individual, self._individual),
            "population": Target(lambda folder: self.people.save(folder / "people.safetensors"), self._population),
            "voices": Target(lambda folder: self._voices().save(folder / "voices.safetensors"), self._heard),
            "domain": Target(self._save_domain, self._domain),
            "kept facts": Target(self._build_facts, self._facts),
            "training run": Target(self._start_training, self._go_on, share=1),
            "kept predictions": Target(self._start_predicting, self._go_on_predicting, "", share=1),
            "settings": Target(self._settings, lambda folder: TrainSettings.from_yaml(folder / "settings.yaml"), "", share=2),
            "rows, JSON lines": Target(self._rows_in("rows.jsonl"), self._read("rows.jsonl"), "", share=2),
            "rows, CSV": Target(self._rows_in("rows.csv"), self._read("rows.csv"), "", share=2),
            "rows, Parquet": Target(self._rows_in("rows.parquet"), self._read("rows.parquet"), "", share=2),
            "table, CSV": Target(self._rows_in("table.csv"), self._read_table("table.csv"), "", share=2),
            "table, JSON lines": Target(self._rows_in("table.jsonl"), self._read_table("table.jsonl"), "", share=2),
            "questions": Target(self._questions, lambda folder: read_questions(folder / "questions.jsonl"), "", share=2),
        }  # fmt: skip

    # ---- a model ------------------------------------------------------------------------------------------------------

    def _checkpoint(self, folder: Path) -> None:
        """With every kind of setting."""
        self.model.save_pretrained(folder)

    def _use(self, folder: Path) -> Any:
        model = load_model(folder)
        inputs = model.processor(
            ["It is 5 and then", "A new year"], padding=True, padding_side="left", return_tensors="pt"
        ).to(model.device)
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
            return {
                name: tensor.tolist() for name, tensor in self.model.abduction.domains["court"].state_dict().items()
            }
        finally:
            if self.model.config.domains:
                self._drop_domain()

    # ---- people -------------------------------------------------------------------------------------------------------

    def _save_individual(self, folder: Path) -> None:
        Individual.from_seed(1, self.model.config.causal_size).save(folder / "who.safetensors")

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

    def _build_facts(self, folder: Path) -> None:
        FactStore.build(self.model, self.examples, folder)

    def _facts(self, folder: Path) -> Any:
        (kept,) = folder.iterdir() if any(folder.iterdir()) else [folder]
        facts = FactStore(kept).facts
        return {name: np.nan_to_num(np.array(getattr(facts, name))).tolist() for name in facts.columns}

    def _train(self, folder: Path, resume: bool) -> Any:
        model = load_model(self.folder / "model")
        settings = TrainSettings.from_dict(
            {"values": {"epochs": 2, "batch_size": 8}, "evaluations": 2, "recalibrate": False}
        )
        with contextlib.redirect_stdout(io.StringIO()):
            learn(model, self.examples, self.examples[:8], folder, settings, resume=resume)
        return model.predict_number(["The long one is"])[0].median

    def _start_training(self, folder: Path) -> None:
        self._train(folder, resume=False)

    def _go_on(self, folder: Path) -> Any:
        return self._train(folder, resume=True)

    def _start_predicting(self, folder: Path) -> None:
        from causalqwen.evaluation import predict_file

        self._rows(folder / "rows.jsonl")
        kept, note = folder / "out.jsonl.part.jsonl", folder / "out.jsonl.part.json"
        made = []
        predict = CausalQwenForCausalLM.predict_number

        def stopped(*args: Any, **named: Any) -> Any:
            made.append(1)
            if len(made) == 3:
                raise KeyboardInterrupt
            return predict(*args, **named)

        CausalQwenForCausalLM.predict_number = stopped  # type: ignore[method-assign]
        try:
            with contextlib.suppress(KeyboardInterrupt):
                predict_file(self.model, folder / "rows.jsonl", folder / "out.jsonl", batch_size=4)
        finally:
            CausalQwenForCausalLM.predict_number = predict  # type: ignore[method-assign]
        assert kept.exists() and note.exists()

    def _go_on_predicting(self, folder: Path) -> Any:
        from causalqwen.evaluation import predict_file

        predict_file(self.model, folder / "rows.jsonl", folder / "out.jsonl", batch_size=4, resume=True)
        return (folder / "out.jsonl").read_text()

    # ---- what people write --------------------------------------------------------------------------------------------

    def _settings(self, folder: Path) -> None:
        (folder / "settings.yaml").write_text(
            "values: {epochs: 2, batch_size: 8, learning_rate: 1e-3}\nseed: 7\nsupport: [0, null, 1]\nlora:\n  rank: 2\n"
        )

    def _rows(self, path: Path) -> None:
        if path.suffix == ".jsonl":
            path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS))
        else:
            import pandas

            frame = pandas.DataFrame(ROWS)
            frame.to_csv(path, index=False) if path.suffix == ".csv" else frame.to_parquet(path)

    def _rows_in(self, name: str) -> Callable[[Path], None]:
        return lambda folder: self._rows(folder / name)

    def _read(self, name: str) -> Callable[[Path], Any]:
        return lambda folder: [
            example.input_ids for example in encode_rows(read_rows(folder / name), self.model.processor)
        ]

    def _read_table(self, name: str) -> Callable[[Path], Any]:
        return lambda folder: read_table(folder / name)

    def _questions(self, folder: Path) -> None:
        questions = [{"prompt": "How long?", "name": "a"}, {"prompt": "Yes?", "name": "b", "options": ["yes", "no"]}]
        (folder / "questions.jsonl").write_text("".join(json.dumps(one) + "\n" for one in questions))

    # ---- what is written ----------------------------------------------------------------------------------------------

    def writers(self) -> dict[str, Callable[[Path], None]]:
        """Whatever writes to a path, which may not be there yet."""
        from causalqwen.evaluation import predict_file
        from causalqwen.evaluation.surveys import survey_file
        from causalqwen_cli.making import save_model

        rows, questions = self.folder / "rows.jsonl", read_questions(self.folder / "questions.jsonl")
        return {
            "checkpoint": lambda path: save_model(self.model, path),
            "individual": lambda path: Individual.from_seed(1, 32).save(path),
            "population": self.people.save,
            "voices": self._voices().save,
            "kept facts": lambda path: FactStore.build(self.model, self.examples, path) and None,
            "predictions, JSON lines": lambda path: predict_file(self.model, rows, path.with_suffix(".jsonl")) and None,
            "predictions, Parquet": lambda path: predict_file(self.model, rows, path.with_suffix(".parquet")) and None,
            "survey, CSV": lambda path: (
                survey_file(self.model, self.people, questions, path.with_suffix(".csv")) and None
            ),
            "training run": lambda path: self._train(path, resume=path.exists()) and None,
        }


def fit_everything(model: CausalQwenForCausalLM) -> None:
    """Settings of every kind, as a model that was trained has them."""
    model.config.value_transform = {"kind": "quantile", "knots": [[-1.0, 0.0], [0.0, 1.0], [1.0, 5.0]]}
    model.config.value_range, model.config.interval_levels = [0.0, 5.0], [step / 100 for step in range(101)]


# ---- damages ---------------------------------------------------------------------------------------------------------


def _cut(chance: random.Random, file: Path, files: list[Path]) -> str:
    data = file.read_bytes()
    file.write_bytes(data[: chance.randrange(max(len(data), 1))])
    return ""


def _flip(chance: random.Random, file: Path, files: list[Path]) -> str:
    data = bytearray(file.read_bytes() or b"\0")
    place, bit = chance.randrange(len(data)), chance.randrange(8)
    data[place] ^= 1 << bit
    file.write_bytes(data)
    return f"bit {bit} of byte {place}"


def _empty(chance: random.Random, file: Path, files: list[Path]) -> str:
    file.write_bytes(b"")
    return ""


def _garbage(chance: random.Random, file: Path, files: list[Path]) -> str:
    file.write_bytes(bytes(chance.randrange(256) for _ in range(200)))
    return ""


def _zeros(chance: random.Random, file: Path, files: list[Path]) -> str:
    """As a disk gives them back that lost power."""
    data = bytearray(file.read_bytes())
    place = chance.randrange(max(len(data), 1))
    data[place : place + 512] = bytes(len(data[place : place + 512]))
    file.write_bytes(data)
    return f"from byte {place}"


def _deep(chance: random.Random, file: Path, files: list[Path]) -> str:
    """JSON that is nested deeper than it can be read."""
    file.write_text(chance.choice(["[", '{"a":']) * 100_000)
    return ""


def _delete(chance: random.Random, file: Path, files: list[Path]) -> str:
    file.unlink()
    return ""


def _folder(chance: random.Random, file: Path, files: list[Path]) -> str:
    file.unlink()
    file.mkdir()
    return ""


def _unreadable(chance: random.Random, file: Path, files: list[Path]) -> str:
    file.chmod(0)
    return ""


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
    nodes = (
        [whole, *(value for value in whole.values() if isinstance(value, dict))] if isinstance(whole, dict) else [{}]
    )
    node = chance.choice(nodes)
    node[chance.choice(["of_a_later_version", "format_version", "format"])] = 99
    file.write_text(json.dumps(whole))
    return file.name


DAMAGES = {
    "cut": _cut, "flip": _flip, "empty": _empty, "garbage": _garbage, "zeros": _zeros, "deep": _deep, "delete": _delete,
    "folder": _folder, "unreadable": _unreadable, "swap": _swap, "retype": _retype, "later": _later,
}  # fmt: skip
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
    told = f"{kind} {file.relative_to(folder)} {DAMAGES[kind](chance, file, files)}"
    what = f"{name}: {kind}"
    try:
        with without_rights():
            found = _ask(target, folder)
    except Exception as error:
        tally.refused[what] += 1
        good = is_clear(error, str(folder), file.name, *(path.name for path in files))
        return what, "" if good else f"{told}: {type(error).__name__}: {str(error)[:300]}"
    else:
        same = repr(found) == repr(truth[name])
        return what, "" if same or not target.sealed or _doctor_tells(target, folder) else f"{told}: other results"
    finally:
        _clear(place)


def _ask(target: Target, folder: Path) -> Any:
    with contextlib.redirect_stderr(io.StringIO()):
        return target.ask(folder)


def _doctor_tells(target: Target, folder: Path) -> bool:
    if target.sealed != "doctor":
        return False
    try:
        check_files(folder)
    except ValueError:
        return True
    return False


def _clear(place: Path) -> None:
    for path in place.iterdir():
        if path.name != "whole":
            shutil.rmtree(path) if path.is_dir() else path.unlink()


# ---- what cannot be written ------------------------------------------------------------------------------------------


def _unwritten(
    chance: random.Random, name: str, writers: dict[str, Callable[[Path], None]], place: Path, tally: Tally
) -> tuple[str, str]:
    kind = chance.choice(["full", "read-only", "below a file", "a folder"])
    what = f"writing {name}: {kind}"
    folder = place / "out"
    folder.mkdir(mode=0o777)
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
        else:
            what_limit = ""
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
        left = {
            file
            for file in _content(folder).items() - before.items()
            if ".part." not in file[0] and "work" not in file[0]
        }
        odd = [file for file, _ in left if file.endswith(".part") or ".part-" in file or file.endswith(".lock")]
        return what, f"{what_limit}: left {odd}" if odd else ""
    finally:
        _clear(place)
    return what, ""


def _content(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
