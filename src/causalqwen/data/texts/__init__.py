"""Real text that comes with the package."""

from importlib.resources import files

from causalqwen.numbers import find_numbers


def speech_paragraphs(*, numbers: bool = True) -> list[str]:
    """Paragraphs of Roosevelt's address of 1941 (public domain); without `numbers`, those that hold none."""
    lines = files(__package__).joinpath("speech.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if numbers or not find_numbers(line)]
