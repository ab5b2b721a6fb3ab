"""Real text that comes with the package."""

from importlib.resources import files

from causalqwen.numbers import find_numbers


def speech_paragraphs(year: int = 1941, *, numbers: bool = True) -> list[str]:
    """Paragraphs of an address to Congress (1941 or 2012, public domain); without `numbers`, those that hold none."""
    lines = files(__package__).joinpath(f"speech_{year}.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if numbers or not find_numbers(line)]
