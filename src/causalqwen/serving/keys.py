"""Who may ask, and how often: API keys, each with a number of requests a minute or without."""

import hashlib
import hmac
import math
import time
from collections.abc import Callable, Mapping

from causalqwen.serving.settings import ApiError


def read_keys(text: str) -> dict[str, int | None]:
    """Keys and their requests a minute, of a text with a key a line, the number after it where there is one. ValueError for a
    text without a key, a key that comes twice, or a line that is something else."""
    keys: dict[str, int | None] = {}
    for number, line in enumerate(text.splitlines(), 1):
        key, *limit = line.split() or [""]
        if not key:
            continue
        if len(limit) > 1 or not all(count.isascii() and count.isdigit() and int(count) > 0 for count in limit):
            raise ValueError(f"line {number} of the API keys: expected a key, or a key and its requests a minute")
        if key in keys:
            raise ValueError(f"line {number} of the API keys: the key stands in an earlier line already")
        keys[key] = int(limit[0]) if limit else None
    if not keys:
        raise ValueError("the API key is empty")
    return keys


class Keys:
    """The keys of a server. clock: seconds that only grow."""

    def __init__(self, limits: Mapping[str, int | None], clock: Callable[[], float] = time.monotonic) -> None:
        self._known = [(_digest(key), _Allowance(limit, clock)) for key, limit in limits.items()]

    def admit(self, authorization: str) -> str:
        """The first digits of the SHA-256 of the key in an `Authorization` header: what a log may hold of it.

        Every key is compared, each in a time that does not depend on how much of it is right. Raises ApiError 401 for none that
        is known, 429 for one that asked too often.
        """
        scheme, _, given = authorization.partition(" ")
        digest = _digest(given.strip())
        found = [allowance for known, allowance in self._known if hmac.compare_digest(known, digest)]
        if scheme.lower() != "bearer" or not found:
            raise ApiError(401, "wrong or no API key: send it as `Authorization: Bearer ...`", code="invalid_api_key")
        found[0].take()
        return digest.hex()[:8]


class _Allowance:
    """So many requests at once, and as many a minute from then on."""

    def __init__(self, a_minute: int | None, clock: Callable[[], float]) -> None:
        self.a_minute, self.clock = a_minute, clock
        self.left, self.seen = float(a_minute or 0), clock()

    def take(self) -> None:
        if self.a_minute is None:
            return
        now = self.clock()
        self.left = min(self.left + (now - self.seen) * self.a_minute / 60, self.a_minute)
        self.seen = now
        if self.left < 1:
            wait = math.ceil((1 - self.left) * 60 / self.a_minute)
            message = f"this key has {self.a_minute} requests a minute; the next one is in {wait} s"
            raise ApiError(429, message, code="rate_limit_exceeded", retry_after=wait)
        self.left -= 1


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
