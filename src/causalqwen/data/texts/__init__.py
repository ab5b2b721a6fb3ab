"""Real text that comes with the package."""

from importlib.resources import files
from pathlib import Path

from causalqwen.numbers import find_numbers

FITTED_YEARS, HELD_OUT_YEARS = (1962, 1985, 2002), (2012, 2016)
"""Which addresses are fitted to, and which are only measured on."""


def speech_paragraphs(year: int = 1941, *, numbers: bool = True) -> list[str]:
    """Paragraphs of an address to Congress (see README.md beside them); without `numbers`, those that hold none."""
    lines = files(__package__).joinpath(f"speech_{year}.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if numbers or not find_numbers(line)]


def speeches(years: tuple[int, ...]) -> str:
    """Whole addresses, a paragraph per line."""
    return "\n".join(line for year in years for line in speech_paragraphs(year))


def read_text(path: str | Path | None) -> str:
    """A text file in UTF-8; None for the speeches that are fitted to. The error names what cannot be read."""
    if path is None:
        return speeches(FITTED_YEARS)
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text in UTF-8 (byte {error.start})") from None
    if not text.strip():
        raise ValueError(f"{path} is empty")
    return text
