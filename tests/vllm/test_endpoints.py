"""vLLM's own server with the plug-in's endpoints, as a process of its own, against `causalqwen serve`: the same answers."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from itertools import chain

import httpx
import pytest
from fastapi.testclient import TestClient
from reference import ONE_CORE, PROMPTS, SETTINGS, write_closed, write_tiny

from causalqwen import PRESETS, Individual
from causalqwen.modeling.loading import load_model
from causalqwen.serving import ServerSettings, create_app, load_individuals

pytestmark = pytest.mark.filterwarnings("default")
TEXTS, CHATS, NUMBERS = "/v1/completions", "/v1/chat/completions", "/v1/numbers"
ROWS = 6


@contextmanager
def served(folder, individuals):
    """A client of `python -m causalqwen_vllm`, once it answers; the server ends with it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "causalqwen_vllm", str(folder), "--individuals", str(individuals)]
    command += ["--port", str(port), "--dtype", "float32", "--max-model-len", "256"]
    command += ["--served-model-name", "tiny", "--api-key", "sesame"]
    log = folder.parent / "server.log"
    with log.open("w") as out:
        settings = os.environ | ONE_CORE | {"VLLM_LOGGING_LEVEL": "WARNING"}
        settings.pop("VLLM_ENABLE_V1_MULTIPROCESSING")
        process = subprocess.Popen(command, stdout=out, stderr=out, env=settings)
        key = {"Authorization": "Bearer sesame"}
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, headers=key) as client:
                deadline = time.monotonic() + 240
                while True:
                    assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
                    try:
                        if client.get("/health").status_code == 200:
                            break
                    except httpx.TransportError:
                        time.sleep(0.5)
                yield client
        finally:
            process.terminate()
            process.wait(60)


@pytest.fixture(scope="module", params=["closed form", "value"])
def servers(request, tiny_tokenizer, tmp_path_factory):
    """Clients of vLLM's server and of ours, of the same model and the same people. Where values are read in closed form, digits
    stand in the context."""
    folder = tmp_path_factory.mktemp("served") / "model"
    if request.param == "value":
        write_tiny(folder, "llama", tiny_tokenizer)
    else:
        folder = write_closed(folder, "llama", tiny_tokenizer, "digits")
    model = load_model(folder)
    people = folder.parent / "people"
    people.mkdir()
    Individual.from_seed(3, model.config.causal_size).save(people / "ann.safetensors")
    model.abduct("We have 12.5 of them, and it was about 7 days in.").save(people / "bob.safetensors")
    individuals = load_individuals(people, model.config.causal_size)
    settings = ServerSettings(name="tiny", individuals=individuals, max_tokens=200)
    with TestClient(create_app(model, settings)) as ours, served(folder, people) as theirs:
        yield theirs, ours


def plain(choice):
    """A text without the characters of its numbers, whose last digit may differ by rounding."""
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    for number in reversed(choice["causal"]["numbers"]):
        first, end = number["span"]
        text = text[:first] + "#" + text[end:]
    return text, choice["finish_reason"], choice["causal"].get("seed")


def alike(told, known):
    """Numbers within what float32 moves, and the same fields."""
    for one, other in zip(told, known, strict=True):
        assert one.keys() == other.keys()
        assert one["value"] == pytest.approx(other["value"], rel=1e-3, abs=1e-4)
        assert one["median"] == pytest.approx(other["median"], rel=1e-3, abs=1e-4)


def agree(theirs, ours):
    """Whether two answers are alike."""
    if list(map(plain, theirs["choices"])) != list(map(plain, ours["choices"])) or theirs["usage"] != ours["usage"]:
        return False
    for one, other in zip(theirs["choices"], ours["choices"], strict=True):
        alike(one["causal"]["numbers"], other["causal"]["numbers"])
    return True


def streamed(client, path, body):
    """The events of an answer."""
    with client.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def asked(preset, row, **more):
    settings = SETTINGS[preset] if preset != "standard" else {}
    outer = {name: settings[name] for name in ("temperature", "top_p") if name in settings}
    causal = {name: value for name, value in settings.items() if name not in outer} | more.pop("causal", {})
    return {"model": "tiny", "prompt": PROMPTS[row], "max_tokens": 40, "seed": row, **outer, **more} | {
        "causal": {"preset": preset} | causal
    }


def test_every_preset_is_answered_as_by_our_own_server_whole_and_streamed(servers):
    theirs, ours = servers
    same, numbers = 0, 0
    for preset in PRESETS:
        for row in range(ROWS):
            body = asked(preset, row)
            whole = theirs.post(TEXTS, json=body).json()
            same += agree(whole, ours.post(TEXTS, json=body).json())
            (choice,) = whole["choices"]
            events = streamed(theirs, TEXTS, body)
            assert "".join(event["choices"][0]["text"] for event in events) == choice["text"], (preset, row)
            told = [number for event in events for number in event["choices"][0]["causal"]["numbers"]]
            alike(told, choice["causal"]["numbers"])
            assert [number["span"] for number in told] == [number["span"] for number in choice["causal"]["numbers"]]
            assert all(choice["text"][slice(*number["span"])].strip() for number in told)
            numbers += len(told)
    print(f"{same} of {len(PRESETS) * ROWS} answers alike, {numbers} numbers")
    assert same >= 0.9 * len(PRESETS) * ROWS and numbers > 50  # a number's last digit may move the words behind it


def test_people_stop_strings_several_texts_chats_echoes_and_modes(servers):
    theirs, ours = servers
    bodies = [
        asked("persona", 0, causal={"individual": "ann"}),
        asked("persona", 1, causal={"individual": "bob"}),
        asked("shared-individual", 2, causal={"individual": "bob"}),
        asked("causal", 3, stop=["e"], n=3),
        asked("noise", 4, echo=True),
        {"model": "tiny", "prompt": PROMPTS[5], "max_tokens": 0, "echo": True, "seed": 1},
        {"model": "tiny", "prompt": PROMPTS[6], "seed": 1, "top_p": 0},
        {
            "model": "tiny",
            "prompt": PROMPTS[:3],
            "seed": 5,
            "causal": {"individual_mode": "token", "noise_mode": "off"},
        },
    ]
    assert sum(agree(theirs.post(TEXTS, json=body).json(), ours.post(TEXTS, json=body).json()) for body in bodies) >= 7
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "It was 5 or"}], "max_tokens": 20, "seed": 3}
    if ours.post(CHATS, json=chat).status_code == 200:
        assert agree(theirs.post(CHATS, json=chat).json(), ours.post(CHATS, json=chat).json())
        said = "".join(event["choices"][0]["delta"].get("content", "") for event in streamed(theirs, CHATS, chat))
        assert said == theirs.post(CHATS, json=chat).json()["choices"][0]["message"]["content"]


def likely(choice):
    """Tokens; where each starts; in turn each one's log-probability and those beside it, under the softmax and one against the
    rest."""
    of_softmax, of_ovr = choice["logprobs"], choice["causal"]["ovr"]
    if "content" in of_softmax:  # a chat's
        rows = of_softmax["content"]
        of_softmax = {"tokens": [row["token"] for row in rows], "text_offset": None}
        of_softmax["token_logprobs"] = [row["logprob"] for row in rows]
        of_softmax["top_logprobs"] = [{one["token"]: one["logprob"] for one in row["top_logprobs"]} for row in rows]
    told = []
    for one in (of_softmax, of_ovr):
        for own, top in zip(one["token_logprobs"], one["top_logprobs"], strict=True):
            told += [-1.0, -1.0] if own is None else [own, *(top or {}).values()]
    return of_softmax["tokens"], of_softmax["text_offset"], told


def test_how_likely_tokens_were_and_what_else_could_stand_there(servers):
    """Of what was written, of prompts that are given back, and of both."""
    theirs, ours = servers
    bodies = [asked(preset, row, logprobs=3, causal={"alternatives": 4}) for preset in PRESETS for row in (1, 2)]
    if ours.post(TEXTS, json=asked("standard", 0, echo=True, logprobs=0)).status_code == 200:
        bodies += [asked("standard", row, logprobs=2, echo=True, max_tokens=row) for row in range(ROWS)]
        bodies += [asked("standard", 0, prompt=["It", "a 7 and 12.5 b" * 9], logprobs=0, echo=True, max_tokens=0)]
        bodies += [asked("causal", 3, prompt=[5, 6, 7], logprobs=1, echo=True, max_tokens=4, n=2)]
    same = count = tokens = 0
    for body in bodies:
        told, known = (client.post(TEXTS, json=body).json()["choices"] for client in (theirs, ours))
        count += len(known)
        for one, other in zip(told, known, strict=True):
            (texts, starts, values), (texts_known, starts_known, values_known) = likely(one), likely(other)
            if texts != texts_known:  # a number's last digit moved the words behind it
                continue
            same, tokens = same + 1, tokens + len(texts)
            assert values == pytest.approx(values_known, abs=2e-3), body
            written_alike = one["text"] == other["text"]
            assert starts == starts_known or not written_alike
            places, places_known = (choice["causal"].get("tokens", []) for choice in (one, other))
            for place, place_known in zip(places, places_known, strict=True):
                assert place["chosen"]["token"] == place_known["chosen"]["token"]
                assert place["span"] == place_known["span"] or not written_alike
                assert place["who"] == pytest.approx(place_known["who"], abs=1e-3)
                for name in ("softmax", "ovr"):
                    pair = ([at[name] for at in found["alternatives"]] for found in (place, place_known))
                    assert next(pair) == pytest.approx(next(pair), abs=1e-3)
    print(f"{same} of {count} choices told as by our own server, {tokens} tokens")
    assert same >= 0.9 * count and tokens > 300
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "It was 5 or"}], "max_tokens": 9, "seed": 3}
    chat |= {"logprobs": True, "top_logprobs": 2}
    if ours.post(CHATS, json=chat).status_code == 200:
        one, other = (likely(client.post(CHATS, json=chat).json()["choices"][0]) for client in (theirs, ours))
        assert one[0] == other[0] and one[2] == pytest.approx(other[2], abs=2e-3)
    body = asked("noise", 1, logprobs=1)
    pieces = [likely(event["choices"][0])[0] for event in streamed(theirs, TEXTS, body)]
    assert list(chain.from_iterable(pieces)) == likely(theirs.post(TEXTS, json=body).json()["choices"][0])[0]


def test_the_laws_of_numbers_behind_prompts(servers):
    theirs, ours = servers
    for individual in (None, "ann", "bob"):
        body = {"model": "tiny", "prompts": PROMPTS[:5], "values": [5.0, None, -3.0, 2.0, 1.0], "levels": [0.5, 0.9]}
        body |= {"points": 4, "individual": individual}
        told, known = (client.post(NUMBERS, json=body).json()["data"] for client in (theirs, ours))
        assert len(told) == 5
        for one, other in zip(told, known, strict=True):
            assert one.keys() == other.keys() and one["value"] == other["value"]
            for name in ("median", "num_prob", "log_prob", "pit"):
                if name in other:
                    assert one[name] == pytest.approx(other[name], rel=2e-3, abs=1e-4), name
            assert one["intervals"]["0.5"] == pytest.approx(other["intervals"]["0.5"], rel=5e-3, abs=1e-3)


def test_what_cannot_be_served_is_refused_in_the_standard_shape(servers):
    theirs, _ = servers
    plain = {"model": "tiny", "prompt": "It was", "max_tokens": 2}
    wrong = {
        (TEXTS, 404, "model_not_found"): plain | {"model": "other"},
        (TEXTS, 400, None): plain | {"prompt": ""},
        (CHATS, 400, None): {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "causal": {"alternatives": 21}},
        (TEXTS, 400, "context_length_exceeded"): plain | {"prompt": "a " * 400},
        (NUMBERS, 400, "context_length_exceeded"): {"model": "tiny", "prompts": ["a", "a " * 400]},
        (NUMBERS, 400, None): {"model": "tiny", "prompts": ["a"], "classes": "year"},
        ("/invocations", 404, "not_found"): {"model": "tiny", "messages": [{"role": "user", "content": "a"}]},
        (NUMBERS, 400, "nobody"): {"model": "tiny", "prompts": ["a"], "individual": "carl"},
        ("/v1/responses", 404, "not_found"): {"model": "tiny", "input": "a"},
        ("/v1/messages", 404, "not_found"): {"model": "tiny", "max_tokens": 2, "messages": []},
        ("/v1/chat/completions/batch", 404, "not_found"): {},
        ("/tokenize", 404, "not_found"): {"model": "tiny", "prompt": "a"},
        ("/generative_scoring", 404, "not_found"): {"model": "tiny"},
    }  # fmt: skip
    for (path, status, code), body in wrong.items():
        answer = theirs.post(path, json=body)
        error = answer.json()["error"]
        assert answer.status_code == status and error["message"], (path, answer.text)
        assert error["code"] == code or (code == "nobody" and "no individual is called 'carl'" in error["message"])
    assert theirs.post(TEXTS, json=plain, headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert theirs.post(TEXTS, json=plain).status_code == 200


def test_a_client_that_leaves_gives_its_place_back(servers):
    theirs, _ = servers

    def running():
        return float(re.search(r"^vllm:num_requests_running\{.*\} (\S+)$", theirs.get("/metrics").text, re.M)[1])

    body = {"model": "tiny", "prompt": "It was", "max_tokens": 200, "n": 4, "seed": 1, "stream": True}
    with theirs.stream("POST", TEXTS, json=body) as response:
        next(response.iter_lines())
    deadline = time.monotonic() + 20
    while running() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert running() == 0
    assert theirs.post(TEXTS, json=body | {"stream": False, "max_tokens": 3}).status_code == 200
