"""Files that are there whole, or not at all; and tensors with a note of what they are."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to, in a folder that is made where it is missing; what is written is put there by rename at
    the end, and removed after an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def writing_folder(path: Path, *, named_by_content: bool = False) -> Iterator[Path]:
    """A new folder beside `path` to write into, which becomes `path` by rename at the end, and is removed after an error.
    `path` must not be there by then, but where it is named by its content: then what another process made in the meantime is
    the same, and stays."""
    part = path.with_name(f"{path.name}.part-{os.getpid()}")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
        try:
            part.rename(path)
        except OSError:
            if not (named_by_content and path.is_dir()):
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text; it appears by rename."""
    with writing(path) as part:
        part.write_text(text, encoding="utf-8")


def save_tensors(path: str | os.PathLike, kind: str, about: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file of a kind ("individual", "domain"), `about` beside the tensors; it appears by rename."""
    with writing(Path(path)) as part:
        whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(whole, part, metadata={"causalqwen": json.dumps({"kind": kind} | about)})


def load_tensors(path: str | os.PathLike, kind: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What `save_tensors` wrote: about, tensors. ValueError for a file of another kind, or no safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get("causalqwen", "{}"))
            if about.pop("kind", None) != kind:
                raise ValueError(f"{path} holds no {kind}")
            return about, {name: file.get_tensor(name) for name in iter(file.keys())}
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from error
