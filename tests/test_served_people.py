"""Individuals and worlds over HTTP: what the endpoints say is what the library says."""

import ctypes
import json
import os
import re
import socket
import sys
import threading
from pathlib import Path

import pytest
import torch

from causalqwen import Choice, Individual, Intervention, Observation, Population, Question
from causalqwen.decoding import mix
from causalqwen.modeling.explain_individual import lie_among, what_told
from causalqwen.modeling.survey import survey_rows
from causalqwen.modeling.worlds import word_changes
from causalqwen.serving.people import MOST_PEOPLE
from test_serving import PEOPLE, held, raw, serving, talker, until

SAID = ["They say that 12 of the people are here", " 我们 have 3.5 and so"]
TOLD = {"observations": SAID, "name": "Zed"}
ANSWERED = {"observations": [{"prompt": "He said", "options": ["yes", "no", "never"], "chosen": "no"}]}
OBSERVED = Observation(" 12.5 people, then 31 of the men", "They say that")
EDITS = [{}, {"prompt": "We say that"}, {"tokens": {"9": " men"}, "values": {"0": 99}}]


@pytest.fixture(scope="module")
def model(tiny_tokenizer):
    return talker(
        tiny_tokenizer, number_context="digits", value_family="gaussian", value_range=[0.0, 500.0], value_digits=3
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("people")


@pytest.fixture(scope="module")
def server(model, folder):
    with serving(model, window=0.002, individuals=dict(PEOPLE), keep=folder) as made:
        yield made


def events(server, path, **fields):
    status, told = server.send({"model": "tiny", "stream": True, **fields}, path)
    assert status == 200
    lines = told.decode().split("\n\n")[:-1]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def made_by_library(model):
    """Who the requests mean, by the library's own functions."""
    choice = Choice("He said", ("yes", "no", "never"), "no")
    inferred, answered = model.abduct(SAID, name="Zed"), model.abduct([choice])
    of_values = model.abduct(SAID, likelihood="values")
    drawn = Individual.from_seed(7, 32)
    return [PEOPLE["Ann"], drawn, inferred, answered, of_values, mix(PEOPLE["Ann"], inferred, 0.3)]


ASKED = ["Ann", {"seed": 7}, TOLD, ANSWERED, {"observations": SAID, "likelihood": "values"}]
ASKED.append({"mix": ["Ann", TOLD], "share": 0.3})


def test_individuals_are_those_of_the_library(server, model):
    status, told = server.ask("individuals", individuals=ASKED, words=True)
    assert status == 200 and told["object"] == "list", told
    known = made_by_library(model)
    for place, (one, individual) in enumerate(zip(told["data"], known, strict=True)):
        assert one["index"] == place and one["name"] == ("Ann" if place == 0 else individual.name)
        assert one["about"] == str(individual)
        assert (one["inferred"], one["knows_values"]) == (individual.is_inferred, individual.knows_values)
        assert one["evidence"] == [vars(seen) for seen in individual.evidence]
        assert ("words" in one) == (place in (2, 4))
    said, _ = what_told(model, SAID, known[2])
    for text, words in zip(said, told["data"][2]["words"], strict=True):
        assert [word["text"] for word in words] == [word.text for word in text]
        for word, one in zip(words, text, strict=True):
            assert word["gain"] == (None if one.gain is None else pytest.approx(one.gain, abs=1e-5))
    assert [one["text"] for one in told["data"][2]["favoured"]] and told["data"][2]["avoided"]
    numbers = [word for text in told["data"][4]["words"] for word in text if "median" in word]
    assert [word["value"] for word in numbers] == [12.0, 3.5]
    (law,) = model.predict_number("They say that", individual=known[4])
    assert numbers[0]["median"] == pytest.approx(law.median, rel=1e-4)
    assert numbers[0]["interval"] == pytest.approx(law.interval(0.9), rel=1e-4)
    plane = lie_among(known)
    assert told["plane"]["share"] == pytest.approx(plane.share) and told["plane"]["known"]
    for name in ("points", "covariances"):
        drawn = torch.tensor(told["plane"][name], dtype=torch.float64)
        torch.testing.assert_close(drawn, getattr(plane, name), rtol=1e-4, atol=1e-6)
    parts = events(server, "/v1/individuals", individuals=ASKED[:2])
    assert [list(part)[-1] for part in parts] == ["data", "data", "plane"]


def test_somebody_is_saved_and_can_be_named(server, model, folder):
    status, told = server.ask("individuals", individuals=[TOLD], save="Zed B.")
    assert status == 200, told
    path = folder / "Zed B..safetensors"
    assert Individual.load(path).name == "Zed B."
    assert "Zed B." in server.client.models.list().data[0].causal["individuals"]
    named = server.complete({"preset": "persona", "individual": "Zed B."}).choices[0].text
    assert named != server.complete({"preset": "persona", "individual": "Ann"}).choices[0].text
    for name, said in (("Zed B.", "called 'Zed B.' already"), ("Ann", "called 'Ann' already")):
        server.check_refused("individuals", {"individuals": [TOLD], "save": name}, said, "save")
    for name in ("../up", "", ".hidden", "a/b", "x" * 65, "a\n"):
        status, told = server.ask("individuals", individuals=[TOLD], save=name)
        said = told["error"]["message"]
        assert status == 400 and told["error"]["param"] == "save"
        assert "cannot be saved under; a name has 1 to 64 letters, digits" in said and not set(said) & set("[]^${}")
    assert sorted(one.name for one in path.parent.iterdir()) == [path.name]
    with serving(model) as plain:
        plain.check_refused("individuals", {"individuals": [{"seed": 1}], "save": "x"}, "--individuals FOLDER")


def compare(told, worlds, observed):
    for one, world in zip(told, worlds, strict=True):
        assert (one["prompt"], one["text"]) == (world.prompt, world.text)
        assert [number["value"] for number in one["numbers"]] == world.values[world.tokens == 400].tolist()
        assert one["forced"] == list(world.forced) and "".join(one["tokens"]) == world.text
        assert [tuple(piece) for piece in one["changes"]] == word_changes(observed.text, world.text)
        assert [tuple(piece) for piece in one["prompt_changes"]] == word_changes(observed.prompt, world.prompt)


@pytest.mark.parametrize("noise", ["abduct", "redraw"])
@pytest.mark.parametrize("who", [None, TOLD, {"seed": 7}])
def test_worlds_are_those_of_counterfactual_samples(server, model, noise, who):
    asked = {"prompt": OBSERVED.prompt, "text": OBSERVED.text, "noise": noise, "seed": 3, "points": 5}
    asked |= {} if who is None else {"individual": who}
    status, told = server.ask("worlds", interventions=EDITS, **asked)
    assert status == 200, told
    individual = model.abduct(SAID, name="Zed") if who is TOLD else who and Individual.from_seed(7, 32)
    edits = [Intervention(), Intervention(prompt="We say that"), Intervention(tokens={9: " men"}, values={0: 99.0})]
    known = model.counterfactual_samples(OBSERVED, edits, noise=noise, individual=individual, seed=3)
    compare(told["data"], [world for (world,) in known], OBSERVED)
    assert (told["data"][0]["text"] == OBSERVED.text) == (noise == "abduct")
    speaker = individual or model.abduct(OBSERVED)
    assert told["individual"]["about"] == str(speaker)
    for one, (world,) in zip(told["data"], known, strict=True):
        laws = model.value_predictions(world, speaker)
        places = (world.tokens == 400).nonzero().squeeze(-1).tolist()
        for number, place in zip(one["numbers"], places, strict=True):
            assert float(one["text"][slice(*number["span"])]) == number["value"]
            assert ("median" in number) == (place in laws)
            if place in laws:
                assert number["median"] == pytest.approx(laws[place].median, rel=1e-4, abs=1e-4)
                assert number["intervals"]["0.8"] == pytest.approx(laws[place].interval(0.8), rel=1e-3, abs=1e-3)
                curve = list(zip(*laws[place].curve(5, number["value"]), strict=True))
                assert number["curve"]["density"] == pytest.approx(list(curve[1]), rel=1e-3)
    parts = events(server, "/v1/worlds", interventions=EDITS, **asked)
    assert [world for part in parts for world in part.get("data", [])] == told["data"]
    shares = [part["progress"] for part in parts if "progress" in part]
    assert shares[0] == 0 and shares == sorted(shares) and shares[-1] <= 1


def test_a_prompt_is_gone_on_from_by_somebody(server, model):
    asked = {"prompt": "They say that", "max_tokens": 9, "seed": 4, "num_samples": 2, "temperature": 1.5}
    status, told = server.ask("worlds", individual=TOLD, **asked)
    who = model.abduct(SAID, name="Zed")
    (known,) = model.interventional_samples(
        "They say that", who, num_samples=2, max_new_tokens=9, seed=4, temperature=1.5
    )
    assert status == 200 and [one["text"] for one in told["data"]] == [world.text for world in known]
    assert "changes" not in told["data"][0] and told["individual"]["name"] == "Zed"
    status, told = server.ask("worlds", **asked)
    (known,) = model.interventional_samples("They say that", num_samples=2, max_new_tokens=9, seed=4, temperature=1.5)
    assert [one["text"] for one in told["data"]] == [world.text for world in known] and told["individual"] is None


def test_a_client_that_leaves_ends_its_task_and_others_go_on(server, model):
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(raw({"prompt": "They say", "max_tokens": 4000, "stream": True}, "worlds"))
        while b"progress" not in client.recv(1000):
            pass
        assert server.metric("causalqwen_running") == 1
        assert server.ask("numbers", prompts=["They say"])[0] == 200  # between two of its tokens
        assert server.metric("causalqwen_running") == 1
    until(lambda: server.metric("causalqwen_running") == 0)
    assert server.complete(max_tokens=2).choices[0].text


@pytest.mark.parametrize(("path", "fields"), [("worlds", {"prompt": "They"}), ("numbers", {"prompts": ["a"]})])
def test_a_task_and_short_work_wait_their_turn_and_are_told_when_time_is_up(model, path, fields):
    with serving(model, max_waiting=1, timeout=0.5) as small, held(model) as gate:
        late: list = []
        running = threading.Thread(target=lambda: small.send({"model": "tiny", "prompt": "a"}))
        running.start()
        until(lambda: small.metric("causalqwen_running") == 1)
        waiting = threading.Thread(target=lambda: late.append(small.ask(path, **fields)))
        waiting.start()
        until(lambda: small.metric("causalqwen_waiting") == 1)
        assert small.ask(path, **fields)[0] == 429
        waiting.join()
        assert late[0][0] == 503 and late[0][1]["error"]["code"] == "timeout"
        gate.set()
        running.join()
        until(lambda: small.metric("causalqwen_waiting") == 0)
        assert small.ask("numbers", prompts=["a"])[0] == 200


QUESTIONS = [
    {"prompt": "The long one is", "name": "number"},
    {"prompt": "The short one is", "options": [1.0, 3.5, 2.0], "name": "values"},
    {"prompt": "How often?", "options": {"never": -4, "often": 0}, "name": "scale"},
    {"prompt": "He said", "options": ["yes", "no", "never"]},
]


@pytest.mark.parametrize("draws", [0, 1, 3])
def test_a_population_answers_as_the_librarys_does(server, model, draws):
    asked = [Question(**one) for one in QUESTIONS]
    status, told = server.ask("population", drawn={"count": 70, "seed": 5}, questions=QUESTIONS, draws=draws, seed=9)
    assert status == 200 and told["object"] == "population", told
    known = list(survey_rows(model, Population.drawn(70, 32, 5), asked, draws=draws, seed=9))
    assert told["data"] == json.loads(json.dumps(known))
    people = {"A": "Ann", "Z": TOLD}
    status, told = server.ask("population", individuals=people, questions=QUESTIONS, draws=draws)
    of_people = Population.of({"A": PEOPLE["Ann"], "Z": model.abduct(SAID, name="Zed")})
    assert told["data"] == json.loads(json.dumps(list(survey_rows(model, of_people, asked, draws=draws))))
    parts = events(server, "/v1/population", drawn={"count": 70}, questions=QUESTIONS, draws=draws)
    assert len(parts) > 1 and parts[-1]["progress"] == 1


def test_people_answer_with_texts(server, model):
    question = {"prompt": "They say", "max_new_tokens": 4, "name": "text"}
    status, told = server.ask("population", drawn={"count": 2}, questions=[question])
    known = survey_rows(model, Population.drawn(2, 32, 0), [Question(**question)])
    assert status == 200 and told["data"] == list(known)


NOBODY = [
    (["Zoe"], "(a server knows those whose files are in its folder --individuals)"),
    (["An"], "no individual is called 'An'; did you mean Ann?"),
    ([], "at least 1 item"),
    ([{"seed": 1}] * (MOST_PEOPLE + 1), f"at most {MOST_PEOPLE} items"),
    ([{"seed": 1, "observations": ["a"]}], "exactly one of seed, observations and mix"),
    ([{}], "exactly one of seed, observations and mix"),
    ([{"seed": "x"}], "individuals.0.seed: Input should be a valid integer"),
    ([{"observations": []}], "at least 1 item"),
    ([{"observations": ["x"]}], "no token that something comes before"),
    ([{"observations": ["They say so"], "likelihood": "values"}], "hold no number"),
    ([{"observations": [{"prompt": "a", "options": ["b", "c"], "chosen": "d"}]}], "'d' is none of the options b, c"),
    ([{"observations": [{"prompt": "", "options": ["b", "c"], "chosen": "b"}]}], "prompt of a choice is empty"),
    ([{"observations": ["word " * 5000]}], "this server reads 4096 at once"),
    ([{"mix": ["Ann"], "share": 0.5}], "at least 2 items"),
    ([{"mix": ["Ann", "Bob"], "share": 1.5}], "less than or equal to 1"),
]
NO_WORLDS = [
    ({"prompt": ""}, "at least 1 character"),
    ({"text": ""}, "at least 1 character"),
    ({"text": None}, "give its text"),
    ({"interventions": []}, "at least 1 item"),
    ({"interventions": [{}] * 9}, "9 worlds are more than the 8 texts"),
    ({"interventions": [{"prompt": ""}]}, "at least 1 character"),
    ({"interventions": [{"values": {"x": 1.0}}]}, "valid integer"),
    ({"interventions": [{"values": {"-1": 1.0}}]}, "greater than or equal to 0"),
    ({"interventions": [{"tokens": {"0": 1}}]}, "valid string"),
    ({"max_tokens": 5000}, "5000 tokens, this server writes 4000"),
    ({"noise": "none"}, "'abduct' or 'redraw'"),
    ({"individual": "Zoe"}, "no individual is called 'Zoe'"),
    ({"prompt": "a " * 5000}, "context"),
    ({"temperature": -1.0}, "greater than or equal to 0"),
]
NO_SURVEYS = [
    ({}, "either individuals by their names, or drawn"),
    ({"drawn": {"count": 1}, "individuals": {"A": "Ann"}}, "either individuals by their names, or drawn"),
    ({"drawn": {"count": 0}}, "greater than or equal to 1"),
    ({"drawn": {"count": 5000}, "draws": 3}, "15000 rows are more than the 10000"),
    ({"drawn": {"count": 1}, "questions": []}, "at least 1 item"),
    ({"drawn": {"count": 1}, "questions": [{"prompt": ""}]}, "field prompt: expected text"),
    ({"drawn": {"count": 1}, "questions": [{"prompt": "a", "options": ["b"]}]}, "two options or more"),
    ({"drawn": {"count": 1}, "questions": [{"prompt": "a", "max_new_tokens": 5000}]}, "this server writes 4000"),
    ({"individuals": {"A": "Zoe"}}, "no individual is called 'Zoe'"),
]
ASKS_FOR_A_WORLD = {"prompt": "They say", "text": " so", "interventions": [{"prompt": "We say"}]}


@pytest.mark.parametrize(
    ("path", "fields", "said"),
    [
        *(("individuals", {"individuals": who}, said) for who, said in NOBODY),
        *(("worlds", ASKS_FOR_A_WORLD | fields, said) for fields, said in NO_WORLDS),
        *(("population", {"questions": [{"prompt": "a"}]} | fields, said) for fields, said in NO_SURVEYS),
    ],
)
def test_what_cannot_be_is_refused(server, path, fields, said):
    server.check_refused(path, fields, said)


@pytest.mark.parametrize("name", ["serving.md", "serving.zh.md"])
def test_what_the_documents_ask_is_answered(model, name):
    text = (Path(__file__).parent.parent / "docs" / name).read_text(encoding="utf-8")
    asked = re.findall(r"8000(/v1/(?:individuals|worlds|population)) [^\n]* -d '(\{.*?\})'\n```", text, re.S)
    assert len(asked) == 3
    with serving(model, name="trained", individuals={"ann": PEOPLE["Ann"]}) as plain:
        for path, body in asked:
            status, told = plain.send(json.loads(body), path)
            assert status == 200 and json.loads(told)["data"], told


QUESTIONS = [{"prompt": "He said", "options": ["yes", "no"], "name": "said"}, {"prompt": "They say that"}]
WHO = ["Ann", TOLD, ANSWERED, {"mix": ["Ann", "Bob"], "share": 0.5}]
BY_ANN = {"preset": "persona", "individual": "Ann"}
REQUESTS = [
    ("completions", {"prompt": "a", "max_tokens": 1, "stop": ["b"], "user": "c", "causal": BY_ANN}),
    ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "causal": BY_ANN}),
    ("numbers", {"prompts": ["a"], "individual": "Ann"}),
    ("answers", {"questions": QUESTIONS, "individual": "Ann"}),
    ("individuals", {"individuals": WHO}),
    ("individuals", {"individuals": [{"seed": 1}], "save": "b"}),
    ("worlds", {"text": " 12 men", "prompt": "They", "individual": "Ann", "interventions": [{"prompt": "We"}]}),
    ("population", {"individuals": {"A": "Ann"}, "questions": QUESTIONS}),
]


def saying(body, said):
    """A request as texts that each say something else in one place, keys among them."""
    text = json.dumps(body)
    for found in re.finditer(r'"(\\.|[^"\\])*"', text):
        yield text[: found.start()] + json.dumps(said) + text[found.end() :]


@pytest.mark.skipif(sys.platform != "linux", reason="inotify is Linux's")
def test_no_path_of_a_request_is_looked_for_on_a_disk(model, tmp_path, monkeypatch):
    """Each string of a request is a path once: nothing is asked about it, no file is opened that it names, no folder read,
    nothing written there."""
    secret, kept = tmp_path / "secret" / "it.safetensors", tmp_path / "kept"
    secret.parent.mkdir()
    kept.mkdir()
    Individual.from_seed(1, 32).save(secret)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    libc = ctypes.CDLL(None)
    watch = libc.inotify_init1(os.O_NONBLOCK)
    assert libc.inotify_add_watch(watch, os.fsencode(secret.parent), 0xFFF) > 0  # whatever happens there
    asked_about, stat = [], os.stat
    monkeypatch.setattr(os, "stat", lambda path, **given: (asked_about.append(str(path)), stat(path, **given))[1])

    paths = [str(secret), str(secret.with_suffix("")), str(secret.parent), f"file://{secret}"]
    paths += ["../secret/it", "../secret/it.safetensors", "../secret"]  # from here, and from where people are kept
    asked = 0
    with serving(model, individuals=dict(PEOPLE), keep=kept) as server:
        for name, fields in REQUESTS:
            path, body = f"/v1/{name}", {"model": "tiny", **fields}
            status, told = server.send(body, path)
            assert status == 200, told
            for said in paths:
                for other in saying(body, said):
                    assert server.send(other, path)[0] in (200, 400, 404), other
                    asked += 1
        for said in ("secret/it", "..%2fsecret", "../secret/it.safetensors", "%2e%2e/secret", str(secret)):
            for start in ("/v1/models/", "/"):
                assert server.send(None, start + said, "GET")[0] in (400, 404)
    assert asked > 300 and [path.name for path in kept.iterdir()] == ["b.safetensors"]
    assert not [path for path in asked_about if "secret" in path]
    with pytest.raises(BlockingIOError):
        os.read(watch, 65536)
    assert secret.exists() and any("secret" in path for path in asked_about)
    secret.read_bytes()
    assert b"it.safetensors" in os.read(watch, 65536)
    os.close(watch)
