"""Files that are there whole, or not at all, and are what was written; tensors with a note of what they are; and rows, some at
a time."""

import glob
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

try:
    import fcntl
except ImportError:  # where there is none, nobody is kept out
    fcntl = None  # type: ignore[assignment]

SUMS = "SHA256SUMS"
"""Beside the files of a folder: their checksums, as `sha256sum --check` reads them too."""
_SUMMED = (".safetensors", ".npy", ".pt", ".pth", ".json", ".jinja", ".txt", ".model")


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Keep everybody else who asks for the same from `path`, a file or a folder, there or not yet, until the end, or until this
    process dies, however it does. ValueError where another process has it; where nothing can be locked, nobody is kept out."""
    path = Path(os.path.realpath(path))
    note = path.with_name(f".{path.name}.lock")
    missing = [folder for folder in note.parents if not folder.exists()]
    descriptor = None
    try:
        with suppress(OSError):
            note.parent.mkdir(parents=True, exist_ok=True)
            descriptor = _locked(note, path)
        yield
    finally:
        with suppress(OSError):
            if descriptor is not None:
                note.unlink(missing_ok=True)
                os.close(descriptor)
            for folder in missing:
                folder.rmdir()  # an OSError where something is in it now


def _locked(note: Path, path: Path) -> int:
    while True:
        descriptor = os.open(note, os.O_RDWR | os.O_CREAT)
        try:
            _lock(descriptor)
        except BlockingIOError:
            os.close(descriptor)
            raise ValueError(f"another process is writing {path}: wait for it, or name another output") from None
        except OSError:
            os.close(descriptor)
            note.unlink()
            raise
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)  # whoever had it has just removed the file: lock the next one


def _lock(descriptor: int) -> None:
    """BlockingIOError where another process has locked the same, and another OSError where nobody can."""
    if fcntl is None:
        raise OSError("no locks here")
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to, in a folder that is made where it is missing; what is written is put there by rename at
    the end, and removed after an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    try:
        yield part
        put(part, path)
    finally:
        part.unlink(missing_ok=True)


def put(part: Path, path: Path) -> None:
    """A file that is whole into its place, by rename."""
    part.replace(path)


@contextmanager
def writing_folder(path: Path, *, named_by_content: bool = False) -> Iterator[Path]:
    """A new folder beside `path` to write into, which becomes `path` by rename at the end, and is removed after an error.
    `path` must not be there by then, but where it is named by its content: then what another process made in the meantime is
    the same, and stays. What a process that died has left of the same folder is removed."""
    for left in glob.glob(f"{glob.escape(str(path))}.part-*"):
        with suppress(OSError), _held_folder(Path(left)):
            shutil.rmtree(left, ignore_errors=True)
    part = path.with_name(f"{path.name}.part-{os.getpid()}")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        with ExitStack() as stack:
            with suppress(OSError):
                stack.enter_context(_held_folder(part))
            yield part
        try:
            part.rename(path)
        except OSError:
            if not (named_by_content and path.is_dir()):
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextmanager
def _held_folder(folder: Path) -> Iterator[None]:
    """OSError where another process holds it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def move_into(folder: Path, whole: Path, last: str) -> None:
    """Move the files of `whole`, and of the folders in it, over those of `folder`, `last` at the end, and remove it. What is
    stopped on the way is done by doing it again."""
    files = (path.relative_to(whole) for path in whole.rglob("*") if path.is_file())
    for file in sorted(files, key=lambda path: path.name == last):
        (folder / file).parent.mkdir(exist_ok=True)
        (whole / file).replace(folder / file)
    shutil.rmtree(whole)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text; it appears by rename."""
    with writing(path) as part:
        part.write_text(text, encoding="utf-8")


def finite(plain: Any) -> Any:
    """Plain data with None for what is infinite or no number, which JSON does not have."""
    if isinstance(plain, dict):
        return {key: finite(inner) for key, inner in plain.items()}
    if isinstance(plain, list):
        return [finite(inner) for inner in plain]
    return None if isinstance(plain, float) and not math.isfinite(plain) else plain


def json_line(row: dict[str, Any]) -> str:
    """A row as a line of JSON, `finite`."""
    return json.dumps(finite(row), ensure_ascii=False, default=str) + "\n"


def write_sums(folder: Path) -> None:
    """Write the checksums of the weights, arrays and settings in a folder into `SUMS` beside them."""
    files = sorted(path for path in folder.iterdir() if path.suffix in _SUMMED and path.is_file())
    write_text(folder / SUMS, "".join(f"{_sum_of(path)}  {path.name}\n" for path in files))


def check_sums(folder: Path) -> None:
    """ValueError that names the first file of a folder that is not what was written there by its `SUMS`, if it has some."""
    if not (folder / SUMS).exists():
        return
    try:
        lines = (folder / SUMS).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder / SUMS} is damaged: {error}") from None
    if not lines:
        raise ValueError(f"{folder / SUMS} is damaged: it is empty")
    for line in lines:
        written = re.fullmatch(r"([0-9a-f]{64})  ([^/\\]+)", line)
        if written is None:
            raise ValueError(f"{folder / SUMS} is damaged: {line[:80]!r} is no checksum of a file")
        path = folder / written[2]
        found = _sum_of(path) if path.is_file() else "no file"
        if found != written[1]:
            raise ValueError(
                f"{path} is not what was saved: damaged, or changed since (SHA-256 {found}, in {SUMS} {written[1]})"
            )


def _sum_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def update_digest(digest: Any, name: str, tensor: Tensor) -> None:
    """Take a tensor, whatever its device, into a hash: name, dtype, shape and bytes."""
    digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
    digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def save_tensors(path: str | os.PathLike, kind: str, about: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file of a kind ("individual", "domain"), `about` and a checksum beside the tensors; it appears by
    rename. OSError where it cannot be written."""
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    about = {"kind": kind} | about
    about["sha256"] = _sum_of_tensors(about, whole)
    with writing(Path(path)) as part, writing_tensors(path):
        save_file(whole, part, metadata={"causalqwen": json.dumps(about)})


@contextmanager
def writing_tensors(path: str | os.PathLike) -> Iterator[None]:
    """What safetensors says where it cannot write (a full disk), as an OSError that names `path`."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error


def load_tensors(path: str | os.PathLike, kind: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What `save_tensors` wrote: about, tensors. FileNotFoundError, or ValueError for a file of another kind, a damaged one, or
    no safetensors file. Older files have no checksum."""
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get("causalqwen", "{}"))
            tensors = {name: file.get_tensor(name) for name in iter(file.keys())}
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from error
    if not isinstance(about, dict) or about.get("kind") != kind:
        raise ValueError(f"{path} holds no {kind}")
    wanted = about.pop("sha256", None)
    if wanted not in (None, _sum_of_tensors(about, tensors)):
        raise ValueError(f"{path} is damaged: what it holds is not what was saved (its checksum is another one)")
    del about["kind"]
    return about, tensors


def kind_of(path: str | os.PathLike) -> str:
    """The kind that `save_tensors` wrote it as; "" for what it did not write. FileNotFoundError where there is no file."""
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get("causalqwen", "{}"))
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError, ValueError):
        return ""
    return str(about.get("kind", "")) if isinstance(about, dict) else ""


def _sum_of_tensors(about: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(json.loads(json.dumps(about)), sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        update_digest(digest, name, tensor)
    return digest.hexdigest()


def suffix_of(path: str | os.PathLike) -> str:
    """How a file's name ends, in small letters; one ending for each kind of file: .parquet for .parq and .pq, .jsonl for
    .ndjson and .json."""
    suffix = Path(path).suffix.lower()
    return {".parq": ".parquet", ".pq": ".parquet", ".ndjson": ".jsonl", ".json": ".jsonl"}.get(suffix, suffix)


def check_kind(path: Path, kinds: Sequence[str]) -> None:
    """ValueError for a file whose name ends otherwise than its kinds, in words of `suffix_of`."""
    if suffix_of(path) not in kinds:
        raise ValueError(
            f"{path}: {path.suffix or 'a name without an ending'} is not written here; name it {' or '.join(kinds)}"
        )


def batches(rows: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Lists of `size` of them, the last one maybe shorter."""
    rows = iter(rows)
    while batch := list(islice(rows, size)):
        yield batch
