"""Files that are there whole, or not at all."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to; what is written is put there by rename at the end, and removed after an error."""
    part = path.with_name(path.name + ".part")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text; it appears by rename."""
    with writing(path) as part:
        part.write_text(text, encoding="utf-8")
