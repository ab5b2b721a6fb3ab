"""`/v1/answers`: questions to one person over HTTP."""

import json
import re

import pytest

from causalqwen import Individual, Observation, Population, Question
from test_serving import serving, talker

QUESTIONS = [
    {"prompt": "The long one is", "name": "number"},
    {"prompt": "The short one is", "name": "values", "options": [1, 3, 2]},
    {"prompt": "How often?", "options": {"never": -4, "often": 0}},
    {"prompt": "He said", "name": "words", "options": ["yes", "no", "no way"]},
]


@pytest.fixture(scope="module")
def model(tiny_tokenizer):
    made = talker(tiny_tokenizer, value_family="gaussian")
    made.config.value_range = [0.0, 500.0]
    return made


@pytest.fixture(scope="module")
def people(model):
    said = [Observation(f" {value}", "The long one is") for value in (90, 95)]
    heard = model.abduct(said, likelihood="values", name="Eva")
    return {"Ann": Individual.from_seed(11, model.config.causal_size), "Eva": heard}


@pytest.fixture(scope="module")
def server(model, people):
    with serving(model, individuals=people, max_tokens=20, max_prompts=5) as made:
        yield made


def ask(server, questions=QUESTIONS, **fields):
    body = {"model": "tiny", "individual": "Eva", "questions": questions} | fields
    status, text = server.send(body, "/v1/answers")
    return status, json.loads(text)


def test_one_person_is_told_as_the_library_tells_them(server, model, people):
    status, answer = ask(server, levels=[0.8], points=9)
    number, values, scale, words = answer["data"]
    assert status == 200 and answer["individual"] == "Eva"
    assert [one["name"] for one in answer["data"]] == ["number", "values", "How often?", "words"]
    (prediction,) = model.predict_number("The long one is", individual=people["Eva"])
    assert number["median"] == pytest.approx(prediction.median)
    assert number["intervals"] == {"0.8": pytest.approx(list(prediction.interval(0.8)))}
    assert len(number["curve"]["cdf"]) == 9 and "draws" not in number
    (said,) = model.predict_choice("He said", ["yes", "no", "no way"], individual=people["Eva"])
    assert list(words["probabilities"].values()) == pytest.approx(said.probabilities, abs=0.02)
    assert sum(values["probabilities"].values()) == pytest.approx(1)
    assert list(scale["probabilities"]) == ["never", "often"]


def test_braces_are_text_but_for_the_name(server, model, people):
    prompts = ['Is {"a": 1} JSON? It is', r"\frac{1}{2} is", "{name} said {{x}}", "{nobody} is"]
    status, answer = ask(server, [{"prompt": one} for one in prompts], draws=2)
    assert status == 200
    filled = [one.replace("{name}", "Eva") for one in prompts]
    for entry, prediction in zip(answer["data"], model.predict_number(filled, individual=people["Eva"]), strict=True):
        assert entry["median"] == pytest.approx(prediction.median)


def test_draws_are_those_of_the_survey(server, model, people):
    _, answer = ask(server, draws=40, seed=3)
    asked = [Question(**(one | {"options": one.get("options")})) for one in QUESTIONS]
    table = model.survey(Population.of({"Eva": people["Eva"]}, seed=3), asked, draws=40, seed=3)
    for question, entry in zip(asked, answer["data"], strict=True):
        assert entry["draws"] == table[question.name].tolist()
    assert ask(server, draws=40, seed=4)[1]["data"][0]["draws"] != answer["data"][0]["draws"]
    _, text = ask(server, [{"prompt": "He said", "max_new_tokens": 5}], draws=2, individual="Ann")
    assert len(text["data"][0]["draws"]) == 2 and all(isinstance(one, str) for one in text["data"][0]["draws"])


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"individual": "Zoe"}, "no individual is called 'Zoe'"),
        ({"questions": []}, "questions"),
        ({"questions": [{"prompt": "He said", "options": ["yes"]}]}, "question 0, .*two options"),
        ({"questions": [{"prompt": "He said", "max_new_tokens": 5}]}, "a text is drawn"),
        ({"questions": [{"prompt": "He said", "max_new_tokens": 9}], "draws": 3}, "27 tokens of texts"),
        ({"questions": [{"prompt": f"He said {n}"} for n in range(6)]}, "6 questions are more than the 5"),
        ({"questions": [{"prompt": "He said"}, {"prompt": "He said"}], "draws": 1}, "two columns"),
        ({"whatever": 1}, "whatever"),
    ],
)
def test_what_cannot_be_asked_is_refused_by_name(server, wrong, told):
    status, answer = ask(server, **wrong)
    assert status == 400
    assert re.search(told, answer["error"]["message"]), answer
