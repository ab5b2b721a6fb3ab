"""Commands that are killed at any instant and taken up again: the same result as without, and nothing left over. And two at
once on one output: the second says so.

The commands run in children of this process, which has imported everything and computed nothing: a kill then falls into the
work, and not into imports. Half of the kills fall at a random moment, half right before a random change of a file.
"""

import contextlib
import faulthandler
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import causalqwen.sklearn  # noqa: F401 # before children are made
from benchmarks.numbers.__main__ import app as numbers
from causalqwen import Population
from causalqwen_cli.app import app
from conftest import graft_tiny, make_tokenizer

from . import Bounds, Tally
from .files import QUESTIONS, ROWS

_ITS_SECONDS = 120
_CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}
ROW_COUNT = 160


@dataclass(frozen=True)
class Command:
    """words: of the command line, in a folder with a model and rows. again: what is added to take it up. result: what it gave,
    out of the output `out`. ranks: processes that do it together, of which one is killed; the others then end, or are ended as
    torchrun does."""

    words: str
    result: Callable[[Path], Any]
    again: str = ""
    ranks: int = 1


def _sums(*names: str) -> Callable[[Path], Any]:
    """Of files of a folder, without what differs between any two runs."""
    return lambda folder: {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names if (folder / name).exists()
    }


def _rows(output: Path) -> bytes:
    return (output / "rows.jsonl").read_bytes()


def _scores(output: Path) -> Any:
    """Of a benchmark, its scores, and no seconds."""
    found = json.loads((output / "numbers.json").read_text())
    return {name: {m: one["crps"] for m, one in table["methods"].items()} for name, table in found["tables"].items()}


_MODEL = _sums("model.safetensors", "config.json")
_TRAIN = "train --model model --train rows.jsonl --eval few.jsonl --config settings.yaml --output out"
COMMANDS = {
    "graft": Command("graft --backbone backbone --output out", _MODEL),
    "train": Command(_TRAIN, _MODEL, "--resume"),
    "train, two ranks": Command(_TRAIN, _MODEL, "--resume", ranks=2),
    "predict": Command(
        "predict --model model --input rows.jsonl --batch-size 8 --output out/rows.jsonl", _rows, "--resume"
    ),
    "survey": Command(
        "survey --model model --population people.safetensors --questions questions.jsonl --draws 40 "
        "--output out/rows.jsonl",
        _rows,
        "--resume",
    ),
    "fit": Command(
        "fit table.csv --target value --backbone backbone --cache cache --output out",
        _sums("estimator.safetensors", "estimator.json"),
    ),
    "benchmarks.numbers": Command(
        "benchmarks.numbers --table table.csv --target value --rows 40,12,12 --methods constant,ridge --seeds 2 "
        "--backbone backbone --output out",
        _scores,
    ),
}


def prepare(folder: Path) -> None:
    """A tiny backbone and model, rows, people and questions, made in a child: nothing is computed here."""
    (folder / "tmp").mkdir(parents=True)

    def make() -> None:
        model = graft_tiny("llama", make_tokenizer())
        model.config.value_range = [0.0, 500.0]  # it says that it has learned values
        model.backbone.save_pretrained(folder / "backbone")
        model.processor.tokenizer.save_pretrained(folder / "backbone")
        model.save_pretrained(folder / "model")
        rows = [row | {"value": row["value"] + place} for place, row in enumerate(ROWS * (ROW_COUNT // len(ROWS)))]
        rows = [{name: value for name, value in row.items() if name != "individual"} for row in rows]
        for name, some in (("rows.jsonl", rows), ("few.jsonl", rows[:16])):
            (folder / name).write_text("".join(json.dumps(row) + "\n" for row in some))
        cells = [f"{row['prompt']},{place % 7},{row['value']}\n" for place, row in enumerate(rows)]
        (folder / "table.csv").write_text("words,size,value\n" + "".join(cells))
        (folder / "settings.yaml").write_text("values: {epochs: 3, batch_size: 8}\nlora: {rank: 2}\nevaluations: 3\n")
        Population.drawn(40, model.config.causal_size, seed=1).save(folder / "people.safetensors")
        (folder / "questions.jsonl").write_text("".join(json.dumps(one) + "\n" for one in QUESTIONS))

    status, told = wait([child(make, folder / "made.log")])
    if status:
        raise RuntimeError(f"nothing could be made to try on: {told[-2000:]}")


def child(work: Callable[[], Any], log: Path) -> tuple[int, Path]:
    """A process that does this, with what it says in a file."""
    pid = os.fork()
    if pid:
        return pid, log
    status = 70
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(descriptor, stream)
        faulthandler.dump_traceback_later(0.9 * _ITS_SECONDS)  # what does not end says where it stands
        work()
        status = 0
    except SystemExit as leaving:
        status = int(leaving.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


Processes = list[tuple[int, Path]]


def start(
    one: Command, folder: Path, log: Path, again: str = "", before: Callable[[], None] = lambda: None
) -> Processes:
    """A command on all its ranks. before: what the first of them does first; it writes most of the files."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def work(rank: int) -> None:
        if one.ranks > 1:
            known = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": one.ranks, "LOCAL_WORLD_SIZE": one.ranks}
            known |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in known.items()})
        os.chdir(folder)
        os.environ["TMPDIR"] = str(folder / "tmp")
        tempfile.tempdir = None
        if rank == 0:
            before()
        name, *given = f"{one.words} {again}".split()
        numbers(given) if name == "benchmarks.numbers" else app([name, *given])

    return [child(partial(work, rank), log.with_name(f"{log.name}.{rank}")) for rank in range(one.ranks)]


def wait(processes: Processes, seconds: float = _ITS_SECONDS) -> tuple[int, str]:
    """The status of the first that failed (-9 where it was killed), 0 where none did, and what they said. Where one failed the
    others get a second to see it, and are ended then. What does not end is killed: status 71."""
    end, failed, running = time.monotonic() + seconds, 0, {pid for pid, _ in processes}
    while running and time.monotonic() < end:
        for pid in list(running):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                running.remove(pid)
                if status and not failed:
                    failed, end = os.waitstatus_to_exitcode(status), min(end, time.monotonic() + 1)
        time.sleep(0.005)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    told = "\n".join(log.read_text(errors="replace") for _, log in processes if log.exists())
    return (71, f"it did not end: {told}") if running and not failed else (failed, told)


def at_change(folder: Path, number: int, count: Path | None = None) -> Callable[[], None]:
    """Kill this process right before its change of this number to a file below `folder`. count: where to write how many."""

    def install() -> None:
        seen = 0

        def watch(event: str, arguments: tuple) -> None:
            nonlocal seen
            if event == "open":
                path, _, flags = arguments
                if not (isinstance(path, str | bytes | os.PathLike) and flags & (os.O_WRONLY | os.O_RDWR)):
                    return
            elif event not in _CHANGES:
                return
            path = os.path.abspath(os.fsdecode(arguments[0])) if not isinstance(arguments[0], int) else ""
            if not path.startswith(str(folder)) or (count is not None and path == str(count)):
                return
            seen += 1
            if count is not None:
                with open(count, "w") as file:
                    file.write(str(seen))
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)

    return install


class Known(NamedTuple):
    """Of a command that runs through: what it gives, in how many seconds, with how many changes of files."""

    result: Any
    seconds: float
    changes: int


def run(bounds: Bounds, names: tuple[str, ...] = tuple(COMMANDS)) -> Tally:
    """One kill at a draw; every fifth, two at once instead."""
    tally, known = Tally(), {}
    with tempfile.TemporaryDirectory(prefix="campaign-") as place:
        whole = Path(place) / "whole"
        prepare(whole)
        for number, chance in bounds.draws():
            name = names[number % len(names)]
            folder = Path(place) / "folder"
            if name not in known:
                known[name] = _through(name, whole, folder)
            shutil.copytree(whole, folder)
            if number // len(names) % 5 == 1:
                what, told = f"{name}: two at once", _at_once(name, folder)
            else:
                what, told = _killed(name, chance, known[name], folder)
            shutil.rmtree(folder)
            tally.tried[what] += 1
            if told:
                tally.find(what, f"draw {number}: {told}")
    return tally


def _through(name: str, whole: Path, folder: Path) -> Known:
    shutil.copytree(whole, folder)
    count = folder.with_name("count")
    started = time.monotonic()
    status, told = wait(start(COMMANDS[name], folder, folder.with_name("log"), before=at_change(folder, 0, count)))
    if status:
        raise RuntimeError(f"{name} does not run: {told[-2000:]}")
    made = Known(COMMANDS[name].result(folder / "out"), time.monotonic() - started, int(count.read_text()))
    shutil.rmtree(folder)
    return made


def _killed(name: str, chance: random.Random, known: Known, folder: Path) -> tuple[str, str]:
    one, log = COMMANDS[name], folder.with_name("log")
    if chance.random() < 0.5:
        what, moment = f"{name}: killed at a change", chance.randint(1, known.changes)
        told = f"change {moment} of {known.changes}"
        status, said = wait(start(one, folder, log, before=at_change(folder, moment)))
    else:
        what, moment = f"{name}: killed at a moment", chance.random() * known.seconds
        told = f"after {moment:.2f} s of {known.seconds:.2f}"
        processes = start(one, folder, log)
        time.sleep(moment)
        os.kill(chance.choice(processes)[0], signal.SIGKILL)
        status, said = wait(processes)
    if status not in (0, -signal.SIGKILL):
        return what, f"{told}: status {status}: {said[-300:]}"
    if _result(one, folder) == known.result:  # it was killed when all was done: there is nothing to take up
        return what, ""
    status, said = wait(start(one, folder, log, one.again))
    if status and "exists already" not in said:
        return what, f"{told}: taken up, status {status}: {said[-1500:]}"
    if _result(one, folder) != known.result:
        return what, f"{told}: taken up, another result"
    return what, _left_over(folder, told)


def _result(one: Command, folder: Path) -> Any:
    with contextlib.suppress(OSError):
        return one.result(folder / "out")
    return None


def _left_over(folder: Path, told: str) -> str:
    """Beside and in the output; what is in the system's own folder of temporary files is the system's to remove."""
    left = [
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if (".part" in path.name or path.name.endswith(".lock")) and folder / "tmp" not in path.parents
    ]
    return f"{told}: left over: {', '.join(left[:3])}" if left else ""


def _at_once(name: str, folder: Path) -> str:
    """The first is stopped while the second tries."""
    one = COMMANDS[name]
    first = start(one, folder, folder.with_name("log"))
    held = folder / (one.words.partition("--output ")[2] or "out")
    note, end = held.with_name(f".{held.name}.lock"), time.monotonic() + 20
    while not _is_locked(note) and time.monotonic() < end:
        time.sleep(0.001)
    for pid, _ in first:
        os.kill(pid, signal.SIGSTOP)
    status, said = wait(start(one, folder, folder.with_name("second"), one.again))
    for pid, _ in first:
        os.kill(pid, signal.SIGCONT)
    its_status, it_said = wait(first)
    if status != 1 or "another process is writing" not in said:
        return f"the second: status {status}: {said[-300:]}"
    return f"the first: status {its_status}: {it_said[-300:]}" if its_status else ""


def _is_locked(path: Path) -> bool:
    """Whether some process holds a lock of this file: it is there a moment before it is locked."""
    try:
        return f":{path.stat().st_ino} " in Path("/proc/locks").read_text()
    except FileNotFoundError:
        return False
