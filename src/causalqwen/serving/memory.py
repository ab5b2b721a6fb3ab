"""The memory of a server that is there for weeks: what its libraries would keep is given back."""

import contextlib
import ctypes
import gc
from collections.abc import Callable, Iterator
from typing import Any

_MMAP_THRESHOLD = -3  # mallopt's M_MMAP_THRESHOLD
_LARGE = 16 << 20  # bytes; from 1 MiB a long prompt costs a quarter more time (docs/research/experiments/speed.md 9.1)


@contextlib.contextmanager
def held_small() -> Iterator[None]:
    """While a server runs, glibc and the garbage collector keep little.

    glibc keeps up to twice the largest piece that it ever gave back, 64 MiB for each thread, unless it is told from which
    size on a piece is the system's. What stands now, the model, is no garbage: whoever looks for some need not pass over
    half a million objects each time.
    """
    _libc("mallopt", _MMAP_THRESHOLD, _LARGE)
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()  # what is frozen as the process ends counts as lost in some libraries, which say so


def leaving_nothing(work: Callable[..., Any], *of: Any) -> Any:
    """Work whose memory the system has again afterwards: the C library keeps what thousands of small pieces lay in, and long
    requests would make a server grow for hours."""
    try:
        return work(*of)
    finally:
        trim()


def trim() -> None:
    """Give the system what the C library keeps of freed memory, where it is glibc."""
    _libc("malloc_trim", 0)


def _libc(name: str, *numbers: int) -> None:
    with contextlib.suppress(OSError, AttributeError, TypeError):
        getattr(ctypes.CDLL(None), name)(*numbers)
