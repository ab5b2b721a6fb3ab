"""Files that are there whole, or not at all."""

from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text beside `path`, then put it there by rename."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
