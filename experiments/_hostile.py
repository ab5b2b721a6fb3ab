"""Clients that mean harm, or are broken, for `experiments/serving.py`: each does one thing to a server and says what it got.

Only the server of that experiment, on this machine's loopback, is ever asked.
"""

import asyncio
import contextlib
import gzip
import json
import random
import socket
import struct
from collections.abc import Awaitable, Callable

LONGEST = 45.0  # seconds that one of them lasts
COMPLETION = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def body_of(**fields: object) -> bytes:
    return json.dumps({"model": "it", "prompt": "It is", "max_tokens": 2, **fields}).encode()


def post(body: bytes, head: str = COMPLETION) -> bytes:
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def status(reader: asyncio.StreamReader) -> str:
    """The status of an answer; "closed" where there is none."""
    try:
        line = await reader.readuntil(b"\r\n")
        return line.split()[1].decode()
    except (asyncio.IncompleteReadError, ConnectionError, IndexError):
        return "closed"


async def sent(to: Connection, *parts: bytes, pause: float = 0.0) -> str:
    """What comes back for parts that are sent one after the other, until somebody has had enough."""
    reader, writer = to
    answer = asyncio.ensure_future(status(reader))
    with contextlib.suppress(ConnectionError):
        for part in parts:
            writer.write(part)
            await writer.drain()
            if pause:
                await asyncio.wait((answer,), timeout=pause)
            if answer.done():
                break
    return await answer


async def slow_head(to: Connection, chance: random.Random) -> str:
    return await sent(to, *(bytes([byte]) for byte in b"GET /health HTTP/1.1\r\nX: " + b"y" * 100), pause=1.0)


async def slow_body(to: Connection, chance: random.Random) -> str:
    return await sent(to, post(b"x" * 1000)[:-1000], *[b" "] * 100, pause=1.0)


async def ten_megabytes(to: Connection, chance: random.Random) -> str:
    return await sent(to, post(b" " * 10_000_000))


async def endless_body(to: Connection, chance: random.Random) -> str:
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    return await sent(to, (COMPLETION + "Transfer-Encoding: chunked\r\n\r\n").encode(), *[chunk] * 200)


async def long_prompt(to: Connection, chance: random.Random) -> str:
    text = chance.choice(["1 2 3 ", "9", "1,", "-1.5e", "価格", "\u202e<NUM>", "a"])
    return await sent(to, post(body_of(prompt=text * (600_000 // len(text.encode())))))


async def deep_json(to: Connection, chance: random.Random) -> str:
    return await sent(to, post(chance.choice([b"[", b'{"a":', b'{"prompt":[']) * 80_000))


async def unbounded(to: Connection, chance: random.Random) -> str:
    fields = chance.choice(
        [{"n": 10**9}, {"n": 10**400}, {"max_tokens": 10**9}, {"logprobs": 10**6}, {"prompt": ["a"] * 10**5},
         {"prompt": [1] * 10**5}, {"stop": ["a"] * 10**4}, {"seed": 10**30}, {"causal": {"points": 10**9}}, {"n": -1}]
    )  # fmt: skip
    return await sent(to, post(body_of(**fields)))


async def wrong_encoding(to: Connection, chance: random.Random) -> str:
    plain = body_of(prompt="價格 é")
    head = COMPLETION + chance.choice(["", "Content-Encoding: gzip\r\n"])
    wrong = chance.choice(
        [plain.decode().encode("utf-16"), gzip.compress(plain), b"\xff\xfe\x00", b'{"prompt": "\xe9"}']
    )
    return await sent(to, post(wrong, head))


async def headers(to: Connection, chance: random.Random) -> str:
    start = "POST /v1/completions HTTP/1.1\r\n"
    here = "Host: 127.0.0.1\r\n"
    more = chance.choice(
        ["X: " + "y" * 100_000, "Host: a\r\nHost: b", "Host: evil.example", "Host: \xe9", here + " X: folded",
         here + "Content-Length: 5\r\nContent-Length: 6", here + "Content-Length: 5\r\nTransfer-Encoding: chunked",
         here + "Content-Length: -1", here + "X-Request-Id: a\x00b", here + "Upgrade: websocket\r\nConnection: upgrade",
         here + "Authorization: Bearer \xff\xfe"]
    )  # fmt: skip
    return await sent(to, f"{start}{more}\r\n\r\n".encode("latin-1"), b"0\r\n\r\n")


async def paths(to: Connection, chance: random.Random) -> str:
    path = chance.choice(
        ["/../../etc/passwd", "/v1/models/..%2f..%2fetc%2fpasswd", "//etc/passwd", "/%00", "http://evil.example/",
         "/" + "a" * 9000, "/v1/models/%ff", "/docs/../../x", "*", "/v1/models/it%0d%0aX: y"]
    )  # fmt: skip
    return await sent(to, f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())


async def no_http(to: Connection, chance: random.Random) -> str:
    return await sent(to, bytes(chance.randrange(256) for _ in range(chance.randrange(1, 500))) + b"\r\n\r\n")


async def pipelined(to: Connection, chance: random.Random) -> str:
    return await sent(to, post(body_of()) * 20)


async def takes_nothing(to: Connection, chance: random.Random) -> str:
    """Asks for much, and reads none of it."""
    body = json.dumps({"model": "it", "prompts": ["It is"] * 64, "points": 1000}).encode()
    to[1].write(post(body, COMPLETION.replace("completions", "numbers")))
    to[0]._limit = 1  # type: ignore[attr-defined]  # so that nothing more is taken from the socket
    await asyncio.sleep(20.0)
    return "closed"


async def resets(to: Connection, chance: random.Random) -> str:
    """Asks, and tears the connection down without a word."""
    to[1].write(post(body_of(max_tokens=200, stream=chance.random() < 0.5)))
    await asyncio.sleep(chance.random())
    kept = to[1].get_extra_info("socket")
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return "closed"


ATTACKS: list[Callable[[Connection, random.Random], Awaitable[str]]] = [
    slow_head, slow_body, ten_megabytes, endless_body, long_prompt, deep_json, unbounded, wrong_encoding, headers, paths,
    no_http, pipelined, takes_nothing, resets,
]  # fmt: skip


async def attack(port: int, chance: random.Random) -> tuple[str, str]:
    """One attack on a server on this machine: its name, and the status that it got, "closed" for none, "unanswered" where it
    lasted too long."""
    kind = chance.choice(ATTACKS)
    try:
        to = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return kind.__name__, "not let in"
    try:
        async with asyncio.timeout(LONGEST):
            return kind.__name__, await kind(to, chance)
    except TimeoutError:
        return kind.__name__, "unanswered"
    except ConnectionError:
        return kind.__name__, "closed"
    finally:
        to[1].transport.abort()
