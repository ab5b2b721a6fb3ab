"""Packages that come with an extra of the install, and one error where one is missing."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def extra(name: str, what: str) -> Iterator[None]:
    """Around imports: ModuleNotFoundError that says `what` needs a missing package, and that the extra `name` brings it. Around
    one another, the outer one tells its own, which brings all that it needs."""
    try:
        yield
    except ModuleNotFoundError as error:
        told = f"{what} needs the package {error.name}, which is not installed: pip install 'causalqwen[{name}]'"
        raise ModuleNotFoundError(told, name=error.name) from error
