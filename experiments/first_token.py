"""How soon a server answers one client, with nobody else there.

.venv/bin/python experiments/first_token.py --model DIR [--rounds 12]

Medians in ms of whole answers: of one token, of sixteen under two presets, and of a number's law behind a prompt.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

PROMPT = "The weather in Paris today is"
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "one token": ("/completions", {"prompt": PROMPT, "max_tokens": 1}),
    "16 tokens": ("/completions", {"prompt": PROMPT, "max_tokens": 16}),
    "16 tokens, standard": ("/completions", {"prompt": PROMPT, "max_tokens": 16, "causal": {"preset": "standard"}}),
    "a number": ("/numbers", {"prompts": ["The boiling point of water is"]}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    command = [sys.executable, "-m", "causalqwen_cli", "serve", "--model", options.model, "--port", "0", "--json"]
    silent = subprocess.DEVNULL
    with subprocess.Popen([*command, "--name", "it"], stdout=subprocess.PIPE, stderr=silent, text=True) as server:
        try:
            url = json.loads(server.stdout.readline())["url"]
            for name, (path, fields) in ASKED.items():
                seconds = [ask(url + path, fields) for _ in range(options.rounds)]
                print(f"{name:20} {1000 * statistics.median(seconds):.0f} ms")
        finally:
            server.terminate()


def ask(url: str, fields: dict[str, Any]) -> float:
    """Seconds until the whole answer was there."""
    body = json.dumps({"model": "it"} | fields).encode()
    start = time.perf_counter()
    asked = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=600) as answer:
        answer.read()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
