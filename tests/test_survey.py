"""Choices, a population, and a survey of it (theory 3.15)."""

import csv
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from scipy import stats

from causalqwen import Choice, Individual, Observation, Population, Question
from causalqwen.data.people import read_questions
from causalqwen.decoding import Observed
from causalqwen.evaluation import TableSurvey
from causalqwen.evaluation.portrait import evidence_of_each
from causalqwen.evaluation.survey_report import survey_report
from causalqwen.evaluation.surveys import survey_file
from causalqwen.modeling import survey as surveys
from causalqwen.modeling.chain import Chain
from causalqwen.modeling.choices import choice_evidence
from causalqwen.modeling.loading import load_model
from causalqwen.modeling.survey import Survey, survey_rows
from conftest import graft_tiny
from test_cli import run, write
from test_docs import ROOT, python_blocks

OPTIONS = ("yes", "no", "no way", "never mind")
CHOICES = [Choice("He said", OPTIONS, "no way"), Choice("She said", ("blue", "red"), "red")]
ASKED_APART = [
    {"prompt": "The long one is", "name": "number"},
    {"prompt": "He said", "options": ["yes", "no", "no way"]},
    {"prompt": "She said", "name": "text", "max_new_tokens": 4},
]
QUESTIONS = [
    Question("The long one is", name="number"),
    Question("The short one is", (1, 3, 2), "values"),
    Question("How often?", {"never": -4, "rarely": -2, "often": 0}, "scale"),
    Question("He said", OPTIONS, "words"),
]


@pytest.fixture(params=["gaussian", "cauchy"])
def model(request, tiny_tokenizer):
    """A model that says it has learned values."""
    made = graft_tiny("llama", tiny_tokenizer, value_family=request.param)
    made.config.value_range = [0.0, 500.0]
    return made


@pytest.fixture
def people(model):
    """Thirty drawn, ten who were inferred from numbers, and ten from words."""
    size, generator = model.config.causal_size, torch.Generator().manual_seed(3)
    known = Observed(0, 5, 1.0, 1.0, 1.0, "values")
    g = torch.randn(50, 32, size, generator=generator)
    g[:30] = Population.drawn(30, size).draws
    evidence = [()] * 30 + [(known,)] * 10 + [(Observed(9, 0, 1.0, 1.0, 1.0, "softmax"),)] * 10
    facts = {"age": [20 + 2 * n for n in range(50)], "sex": ["woman", None] * 25}
    return Population([f"p{n}" for n in range(50)], g, facts, evidence)


def answers(model, people, questions=QUESTIONS, **settings):
    return {row["person"]: row for row in survey_rows(model, people, questions, **settings)}


# ---- choices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gaussian", "cauchy"])
def test_the_gradient_and_the_information_of_choices_are_those_of_the_likelihood(tiny_tokenizer, family):
    evidence = choice_evidence(graft_tiny("llama", tiny_tokenizer, vocabulary_family=family), CHOICES)
    g = torch.randn(32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def log_probs(g):
        q = evidence.law.quantile(torch.special.ndtr(g))
        return [question.log_probs(q) for question in evidence.questions]

    def total(g):
        return sum(log_p[taken] for log_p, taken in zip(log_probs(g), evidence.taken, strict=True))

    value, gradient, information = evidence.evaluate(g, True)
    assert value == pytest.approx(total(g).item(), abs=1e-12) and len(evidence) == 2
    torch.testing.assert_close(gradient, torch.autograd.functional.jacobian(total, g))
    # of the fork that "red" was taken at, E[score score'] over what might have been taken there
    one = evidence.questions[1]
    assert len(one.sizes) == 1
    scores = torch.autograd.functional.jacobian(
        lambda g: one.log_probs(evidence.law.quantile(torch.special.ndtr(g))), g
    )
    of_first = type(evidence)(evidence.questions[:1], evidence.taken[:1], evidence.law).evaluate(g, True)[2]
    p = one.log_probs(evidence.law.quantile(torch.special.ndtr(g))).exp()
    torch.testing.assert_close(information - of_first, (scores.T * p) @ scores)


def test_somebody_who_may_lie_far_out_has_probabilities(model):
    normal = torch.zeros(model.config.causal_size, dtype=torch.float64)
    far = Individual.from_normal(normal, draws=torch.full((4, len(normal)), 9.0, dtype=torch.float64))
    assert sum(model.predict_choice("He said", OPTIONS, individual=far)[0].probabilities) == pytest.approx(1)


@torch.no_grad()
def test_options_are_decided_token_by_token_among_those_that_go_on(model):
    prompt, tokenizer = "He said", model.processor.tokenizer
    who = Individual.from_seed(5, model.config.causal_size)
    before = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    ways = [tokenizer(f" {option}\n", add_special_tokens=False)["input_ids"] for option in OPTIONS]
    assert max(map(len, ways)) > 2
    expected = []
    for way in ways:
        p = 1.0
        for length, token in enumerate(way):
            onward = sorted({other[length] for other in ways if other[:length] == way[:length]})
            z = model.features(torch.tensor([before + way[:length]])).last_hidden_state[:, -1]
            chain = Chain(model, z)
            u = chain.loc_U + chain.scale_U * model.action.law.quantile(who.factor)
            scores = (u.double() @ chain.words.weight.double().T)[0, onward]
            p *= scores.softmax(-1)[onward.index(token)].item()
        expected.append(p)
    (predicted,) = model.predict_choice(prompt, OPTIONS, individual=who)
    assert sum(predicted.probabilities) == pytest.approx(1, abs=1e-12)
    assert predicted.probabilities == pytest.approx(expected, rel=1e-4)
    assert predicted.likeliest == OPTIONS[expected.index(max(expected))]
    assert predicted.log_prob("no") == pytest.approx(torch.tensor(expected[1]).log().item(), rel=1e-4)
    nobody = model.predict_choice(prompt, OPTIONS)[0]
    assert nobody.probabilities != pytest.approx(predicted.probabilities, rel=1e-2)
    with pytest.raises(ValueError, match="'maybe' is none of the options"):
        predicted.log_prob("maybe")


def test_whoever_chose_is_likelier_to_choose_so_again(model):
    before = model.predict_choice(CHOICES[0].prompt, OPTIONS)[0]
    who = model.abduct([CHOICES[0]] * 8, spread=1.0)
    after = model.predict_choice(CHOICES[0].prompt, OPTIONS, individual=who)[0]
    assert after.log_prob("no way") > before.log_prob("no way") + 0.1
    assert "8 choices" in str(who) and who.evidence[0].choices == 8


@pytest.mark.parametrize("options", [("one",), ("a", "a "), ("a", ""), ("a", 1), ("a", "b\nc")])
def test_options_are_words_that_differ(options):
    with pytest.raises(ValueError, match="two options or more"):
        Choice("He said", options, options[0])
    with pytest.raises(ValueError, match="'b' is none of the options"):
        Choice("He said", ("a", "c"), "b")


# ---- people ----------------------------------------------------------------------------------------------------------


def test_a_population_is_saved_and_parted(people, tmp_path):
    people.save(tmp_path / "people")
    again = Population.load(tmp_path / "people")
    assert torch.equal(again.draws, people.draws)
    for column in ("names", "facts", "evidence"):
        assert list(getattr(again, column)) == list(getattr(people, column)), column
    chosen = again.where("age > 60", "sex == woman", "name != p48")
    assert chosen.names == ["p22", "p24", "p26", "p28", "p30", *(f"p{n}" for n in range(32, 48, 2))]
    assert torch.equal(chosen["p30"].draws, people.draws[30].double()) and chosen["p30"].knows_values
    assert not chosen["p22"].is_inferred and not chosen["p44"].knows_values
    torch.testing.assert_close(chosen["p22"].normal.float(), people.draws[22, 0])
    told = Population(["a", "b", "c"], torch.zeros(3, 1, 4), {"age": ["100", "9", "old"]})  # as a CSV file has them
    assert told.where("age > 20").names == ["a"] and told.where("age == old").names == ["c"]
    assert len(people.where("age <= 20")) == 1 and len(people.where("age < 20.5", "age >= 20")) == 1
    for condition, message in (
        ("age", "is not FACT == VALUE"),
        ("hair == red", "no fact is called 'hair'; known are name, age, sex"),
        ("age > old", "'old' is none"),
        ("sex == man", "of nobody among 50 people"),
    ):
        with pytest.raises(ValueError, match=message):
            people.where(condition)
    (tmp_path / "broken").write_bytes((tmp_path / "people").read_bytes()[:-40])
    with pytest.raises(ValueError, match="broken is not a safetensors file"):
        Population.load(tmp_path / "broken")
    Individual.from_seed(1, 4).save(tmp_path / "one")
    with pytest.raises(ValueError, match="one holds no population"):
        Population.load(tmp_path / "one")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"names": ["a", "a"]}, "two people are called 'a'"),
        ({"names": ["a"]}, "1 people have draws of the shape"),
        ({"facts": {"age": [1]}}, "the fact 'age' is given for 1 people, and they are 2"),
        ({"evidence": [()]}, "the evidence is given for 1 people"),
    ],
)
def test_a_population_that_does_not_fit_together_is_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        Population(**{"names": ["a", "b"], "draws": torch.zeros(2, 1, 4), **changed})


def test_people_who_are_drawn_are_individuals_of_seeds(tiny_llama):
    made = Population.drawn(3, 32, seed=7)
    torch.testing.assert_close(made["seed 9"].normal.float(), Individual.from_seed(9, 32).normal.float())


def test_several_people_are_inferred_as_each_alone(model):
    said = {
        "ann": ["We have come a long way.", Observation(" 31", "The long one is"), CHOICES[0]],
        "bob": [Observation(" 12", "The long one is"), *CHOICES],
    }
    together = model.abduct_people(said, facts={"ann": {"age": 70}})
    alone = Population.of({name: model.abduct(one, name=name) for name, one in reversed(said.items())})
    for name in said:
        torch.testing.assert_close(together[name].draws, alone[name].draws, rtol=1e-4, atol=1e-4)
        assert together[name].evidence[0].choices == len([one for one in said[name] if isinstance(one, Choice)])
    assert together.facts == {"age": [70, None]} and not together["ann"].knows_values
    numbers = {"ann": [Observation(" 31", "The long one is")] * 3, "bob": [Observation(" 2", "The long one is")]}
    together = model.abduct_people(numbers, likelihood="values")
    for name, one in numbers.items():
        expected = Population.of({name: model.abduct(one, likelihood="values", name=name)})[name]
        torch.testing.assert_close(together[name].draws, expected.draws, rtol=1e-4, atol=1e-4)
    assert together.knows_values == [True, True]


# ---- a survey --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draws", [1, 2, 0])
def test_answers_do_not_depend_on_order_batch_or_who_else_is_asked(model, people, monkeypatch, draws):
    questions = [*QUESTIONS, Question("At {age} the {name} one is", name="filled")]
    table = list(survey_rows(model, people, questions, draws=draws, seed=4))
    known = {(row["person"], row.get("draw")): row for row in table}
    assert len(known) == 50 * max(draws, 1)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(0)).tolist()
    for size, places, asked in (
        (1, order, questions[::-1]),
        (7, order, questions),
        (1024, order[:13], questions),
        (64, order[:1], [questions[0], questions[3]]),
        (64, range(50), [questions[2]]),
    ):
        monkeypatch.setattr(surveys, "PEOPLE_AT_ONCE", size)
        found = list(survey_rows(model, people.part(list(places)), asked, draws=draws, seed=4))
        assert [row["person"] for row in found[:: max(draws, 1)]] == [people.names[place] for place in places]
        for row in found:
            for question in asked:
                # == of floats is meant: to the last bit
                assert row[question.name] == known[row["person"], row.get("draw")][question.name], (size, question)
    other = list(survey_rows(model, people, questions, draws=draws, seed=5))
    assert (other == table) == (draws == 0)


def test_drawn_numbers_have_the_law_that_is_predicted(model, people):
    question = Question("The long one is")
    for name in ("p3", "p33", "p43"):  # exact, from numbers, from words
        rows = survey_rows(model, people.where(f"name == {name}"), question, draws=1500, seed=1)
        drawn = [row[question.name] for row in rows]
        law = model.predict_number(question.prompt, individual=people[name])[0]
        cdf = {value: law.cdf(value) for value in drawn}
        distance = stats.kstest(drawn, lambda values, cdf=cdf: np.array([cdf[float(value)] for value in values]))
        assert distance.pvalue > 0.005, name
        (row,) = survey_rows(model, people.where(f"name == {name}"), question, draws=0)
        assert row[question.name] == pytest.approx(law.median, rel=1e-4, abs=1e-4)
    assert model.predict_number(question.prompt, individual=people["p43"]) == model.predict_number(question.prompt)


def test_drawn_options_have_the_probabilities_that_are_told(model, people):
    one = people.part([33])
    (told,) = survey_rows(model, one, QUESTIONS, draws=0)
    rows = list(survey_rows(model, one, QUESTIONS, draws=2000, seed=2))
    for question in QUESTIONS[1:]:
        expected = told[question.name]
        assert list(expected) == list(question.options) and sum(expected.values()) == pytest.approx(1, abs=1e-9)
        drawn = [row[question.name] for row in rows]
        counts = [drawn.count(option) for option in expected]
        assert sum(counts) == 2000
        wanted = [2000 * p for p in expected.values()]
        assert all(abs(n - w) < 4 * (w * (1 - w / 2000)) ** 0.5 + 1 for n, w in zip(counts, wanted, strict=True))
    law = model.predict_number(QUESTIONS[1].prompt, individual=people["p33"])[0]
    below = [law.cdf(1.5), law.cdf(2.5)]
    assert list(told["values"].values()) == pytest.approx([below[0], 1 - below[1], below[1] - below[0]], abs=1e-6)
    choice = model.predict_choice("He said", OPTIONS, individual=people["p33"])[0]
    assert list(told["words"].values()) == pytest.approx(choice.probabilities, rel=1e-5)


def test_a_survey_is_a_table_of_people_and_questions(model, people):
    text = Question("The long one is", name="text", max_new_tokens=3)
    some = people.part([0, 30, 44])
    table = model.survey(some, [*QUESTIONS, text], draws=2, seed=3)
    assert table.index.names == ["person", "draw"] and len(table) == 6
    assert list(table) == ["age", "sex", "number", "values", "scale", "words", "text"]
    alone = model.survey(people.part([30]), text, draws=2, seed=3)
    assert table.loc[("p30", 1), "text"] == alone.loc[("p30", 1), "text"]
    assert len(set(model.survey(people.part([0]), text, draws=4)["text"])) > 1  # one who is known, and fresh noise
    assert model.survey(some, QUESTIONS[0]).index.name == "person"


def test_a_prompt_is_read_once(model, people, monkeypatch):
    read = []
    features = model.features
    monkeypatch.setattr(model, "features", lambda *a, **k: read.append(1) or features(*a, **k))
    list(survey_rows(model, people, [QUESTIONS[0], Question("A {sex} is", name="by sex")][:1], draws=3))
    assert len(read) == 1
    list(survey_rows(model, people, Question("At {age} it is", name="by age")))
    assert len(read) == 1 + 50


@pytest.mark.parametrize(
    ("questions", "settings", "message"),
    [
        ([], {}, "a survey needs one question"),
        ([Question("a is", name="age")], {}, "two columns would be called 'age'"),
        ([Question("a is"), Question("a is")], {}, "two columns would be called 'a is'"),
        ([Question("a is", max_new_tokens=2)], {"draws": 0}, "asks for a text, and texts are drawn"),
        ([Question("A {sex} is")], {}, "by the fact 'sex', which is not known of p1"),
        ([Question("a is")], {"draws": -1}, "draws are a whole number from 0 on"),
        ([Question("a " * 300)], {}, "the context of this model holds 256"),
    ],
)
def test_what_cannot_be_asked_is_refused(model, people, questions, settings, message):
    with pytest.raises(ValueError, match=message):
        list(survey_rows(model, people, questions, **settings))


@pytest.mark.parametrize(
    "prompt",
    [
        'Is {"a": 1} valid JSON?', "What is {{x}}?", r"Is \frac{1}{2} half?", "Is {x: 1} a set? {", "{}", "} {0} {",
        "{sex!r:>9}", "{hair}", "{age.real}", "{ age }", "a {{{b}}} c", "{'sex'}", "${total}", "%(age)s %s", "{\n}",
    ],
)  # fmt: skip
def test_braces_around_anything_but_a_known_field_are_text(model, people, monkeypatch, prompt):
    read = []
    encode = model.processor.__class__.__call__
    monkeypatch.setattr(
        model.processor.__class__, "__call__", lambda self, text=None, **k: read.append(text) or encode(self, text, **k)
    )
    rows = list(survey_rows(model, people, Question(prompt)))
    assert len(rows) == 50 and {text for text in read if isinstance(text, str)} == {prompt}
    read.clear()
    list(survey_rows(model, people, Question(f"{{age}} {prompt} {{{{age}}}}", name="age too")))
    ages = {str(row["age"]) for row in rows}
    assert {f"{age} {prompt} {{{age}}}" for age in ages} == {text for text in read if isinstance(text, str)}


def test_a_field_that_is_nearly_known_is_asked_as_it_stands_and_told(model, people, caplog):
    for prompt, told in (("At {Age} it is", "did you mean {age}?"), ("At {1} it is", None)):
        caplog.clear()
        list(survey_rows(model, people, Question(prompt)))
        assert [told in record.message for record in caplog.records] == ([] if told is None else [True])


def test_models_that_have_no_numbers_of_people_refuse(tiny_tokenizer, people, monkeypatch):
    untrained = graft_tiny("llama", tiny_tokenizer)
    with pytest.raises(ValueError, match="this model has not learned values yet"):
        list(survey_rows(untrained, people, QUESTIONS[0]))
    assert len(list(survey_rows(untrained, people, QUESTIONS[3]))) == 50
    copies = graft_tiny("llama", tiny_tokenizer, copy_numbers=True)
    copies.config.value_range = [0.0, 1.0]
    with pytest.raises(ValueError, match="copy_numbers"):
        list(survey_rows(copies, people, QUESTIONS[0]))
    with pytest.raises(ValueError, match="has 4 coordinates of each, and this model 32"):
        list(survey_rows(untrained, Population.drawn(2, 4), QUESTIONS[3]))
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"causalqwen\[tables\]"):
        untrained.survey(people, QUESTIONS[3])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompt": " "}, "field prompt"),
        ({"prompt": 3}, "field prompt"),
        ({"prompt": "a", "name": 3}, "field name"),
        ({"prompt": "a", "options": ["b", "c"], "max_new_tokens": 3}, "give one of them"),
        ({"prompt": "a", "max_new_tokens": 0}, "field max_new_tokens"),
        ({"prompt": "a", "options": "yes"}, "field options"),
        ({"prompt": "a", "options": [1, "b"]}, "two options or more"),
        ({"prompt": "a", "options": [1, 1.0]}, "no two alike"),
        ({"prompt": "a", "options": []}, "field options"),
        ({"prompt": "a", "options": [1, 10**400]}, "too large"),
        ({"prompt": "a", "options": {"b": 1, "c": "d"}}, "field options"),
        ({"prompt": "a", "answers": [1]}, "field answers: a question has no such field"),
    ],
)
def test_a_question_of_a_file_that_is_none_is_told_by_row_and_field(tmp_path, given, message):
    path = write(tmp_path / "q.jsonl", [{"prompt": "a"}, given])
    with pytest.raises(ValueError, match=rf"q.jsonl, row 2.*{message}"):
        read_questions(path)


@pytest.mark.backbone
def test_a_real_backbone_chooses_what_it_would_say(smollm2):
    question = Question("The capital of France is", ("Paris", "London", "the city of Lyon"), "capital")
    assert smollm2.predict_choice(question.prompt, question.options)[0].likeliest == "Paris"
    crowd = Population.drawn(70, smollm2.config.causal_size)
    known = answers(smollm2, crowd, [question], draws=0)
    assert np.std([row["capital"]["Paris"] for row in known.values()]) > 1e-3
    for row in survey_rows(smollm2, crowd.part([69, 3, 40]), [question], draws=0):
        assert row == known[row["person"]]


# ---- commands --------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tiny_tokenizer, tmp_path):
    """A model, people who said numbers, and questions."""
    made = graft_tiny("llama", tiny_tokenizer)
    made.config.value_range = [0.0, 500.0]
    made.save_pretrained(tmp_path / "model")
    said = {"prompt": "The long one is"}
    rows = [
        said | {"value": 10 * n + day, "individual": f"p{n}", "age": 50 + n, "day": day}
        for n in range(12)
        for day in (0, 1)
    ]
    write(tmp_path / "rows.jsonl", rows)
    asked = [{"prompt": "At {age} it is", "name": "number"}, {"prompt": "He said", "options": ["yes", "no"]}]
    write(tmp_path / "questions.jsonl", asked)
    return tmp_path


def test_people_are_inferred_and_asked_on_the_command_line(folder):
    base = ("--model", folder / "model", "--device", "cpu")
    kept = ("--output", folder / "people.safetensors")
    made = run("population", *base, "--rows", folder / "rows.jsonl", *kept, "--json")
    assert json.loads(made.stdout) == {"output": str(folder / "people.safetensors"), "people": 12, "facts": ["age"]}
    assert "inferred from their values by likelihood 'values'" in made.stderr
    people = Population.load(folder / "people.safetensors")
    assert people.facts == {"age": list(range(50, 62))} and all(people.knows_values)
    ask = ("survey", *base, "--population", folder / "people.safetensors", "--questions", folder / "questions.jsonl")
    whole, drawn, some = {}, ("--draws", 2, "--seed", 3), ("--where", "age > 52", "--where", "name != p4")
    for kind in ("jsonl", "csv", "parquet"):
        out = folder / f"answers.{kind}"
        told = run(*ask, "--output", out, *drawn, *some, "--json")
        assert json.loads(told.stdout) == {"output": str(out), "rows": 16, "people": 8, "questions": 2}
        whole[kind] = out
    lines = [json.loads(line) for line in whole["jsonl"].read_text().splitlines()]
    assert list(lines[0]) == ["person", "draw", "age", "number", "He said"]
    cells = csv.DictReader(whole["csv"].read_text().splitlines())
    kinds = {"draw": int, "age": int, "number": float}
    assert [{field: kinds.get(field, str)(cell) for field, cell in row.items()} for row in cells] == lines
    import pyarrow.parquet

    assert pyarrow.parquet.read_table(whole["parquet"]).to_pylist() == lines
    for kind in whole:
        told = run(*ask, "--output", folder / f"again.{kind}", *drawn, "--html", folder / f"{kind}.html")
        page = (folder / f"{kind}.html").read_text()
        assert "24 rows" in page and "yes" in page and "age 50" in page, (kind, told.stderr)
    run(*ask, "--output", folder / "expected.csv", "--draws", 0)
    wrong = run(*ask, "--output", folder / "x.csv", "--draws", 0, "--html", folder / "page.html", code=1)
    assert "--html is about answers that were drawn" in wrong.stderr
    assert '{""yes""' in (folder / "expected.csv").read_text()


@pytest.mark.parametrize("family", ["gaussian", "cauchy"])
def test_numbers_are_not_lost_where_words_are_heard_too(tiny_tokenizer, tmp_path, family):
    """Between words and numbers nothing was learned: each is told by what was heard of its kind."""
    model = graft_tiny("llama", tiny_tokenizer, value_family=family)
    model.config.value_range = [0.0, 500.0]
    numbers = [Observation(f" {value}", "The long one is") for value in (3, 4)]
    words = [CHOICES[0], Observation("and so we came to the river", "He said")]
    both = model.abduct_people({"a": [*numbers, *words], "b": words, "c": [*words, *numbers]})
    alone, spoken = model.abduct_people({"a": numbers}, likelihood="values"), model.abduct_people({"a": words})
    assert both.knows_values == [True, False, True] and spoken.numbers is None
    told = answers(model, both, draws=0)
    assert told["a"]["number"] == pytest.approx(answers(model, alone, draws=0)["a"]["number"], rel=1e-5)
    nobody = answers(model, spoken, draws=0)["a"]
    assert told["b"]["number"] == nobody["number"] != told["a"]["number"]
    assert told["b"]["words"] == answers(model, both.part([1]), draws=0)["b"]["words"]
    both.save(tmp_path / "people")
    assert answers(model, Population.load(tmp_path / "people"), seed=3) == answers(model, both, seed=3)
    with pytest.raises(ValueError, match="numbers tell of the shape"):
        Population(both.names, both.draws, numbers=both.draws[:1])


def test_each_answer_tells_what_it_gained(model):
    numbers = [Observation(f" {value}", "The long one is") for value in (3, 4)]
    words = Observation("and so we came to the river", "He said")
    who = model.abduct([*numbers, words, *CHOICES], name="Ann")
    told = {(one.asked, one.said): one for one in evidence_of_each(model, who, [*numbers, words, *CHOICES])}
    assert len(told) == 5 and {one.kind for one in told.values()} == {"number", "words", "choice"}
    assert sum(one.gain for one in told.values()) == pytest.approx(who.evidence[0].gained, rel=1e-4)
    chosen = told["She said", "red"]
    both = Individual(who.factor), Individual.nobody(len(who.factor))
    own, nobodys = (model.predict_choice("She said", ("blue", "red"), individual=one)[0] for one in both)
    assert (chosen.own, chosen.nobodys) == (f"{own.probabilities[1]:.0%}", f"{nobodys.probabilities[1]:.0%}")
    assert chosen.gain == pytest.approx(np.log(own.probabilities[1] / nobodys.probabilities[1]), rel=1e-5)
    counted = model.abduct(numbers, likelihood="values")
    told = {one.said: one for one in evidence_of_each(model, counted, [*numbers, words, *CHOICES])}
    assert told["3"].own != told["3"].nobodys and told["3"].gain != 0
    assert told["red"].gain == told["and so we came to the river"].gain == 0
    gains = [abs(one.gain) for one in told.values()]
    assert gains == sorted(gains, reverse=True)


@pytest.mark.slow
def test_two_ranks_and_workers_give_the_answers_of_one(folder):
    """Other processes, each with a half of the people in an order of its own: bit for bit what one process writes."""
    import pyarrow

    model_folder, questions = folder / "model", write(folder / "asked.jsonl", ASKED_APART)
    people = Population.drawn(30, 32, seed=4)
    people.save(folder / "people.safetensors")
    model = load_model(model_folder, "cpu")
    survey_file(model, people, read_questions(questions), folder / "one.jsonl", draws=2, seed=5)
    whole = [json.loads(line) for line in (folder / "one.jsonl").read_text().splitlines()]
    program = ROOT / "tests" / "survey_worker.py"
    worker = [sys.executable, program, model_folder, folder / "people.safetensors", questions]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(part for part in sys.path if part)}
    ranks = [
        subprocess.Popen(
            [*map(str, worker), str(folder / f"{rank}.jsonl")],
            env=environment | {"RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": str(rank + 1)},
        )
        for rank in range(2)
    ]
    assert [process.wait(timeout=120) for process in ranks] == [0, 0]
    parts = [json.loads(line) for rank in range(2) for line in (folder / f"{rank}.jsonl").read_text().splitlines()]
    assert sorted(parts, key=lambda row: (int(row["person"].split()[1]), row["draw"])) == whole
    files = map(str, (model_folder, folder / "people.safetensors", questions))
    asked = TableSurvey(*files, draws=2, seed=5, device="cpu")
    rows = [{"person": row["person"], "draw": row["draw"]} for row in whole[::-1]]
    assert asked(pyarrow.Table.from_pylist(rows[7:])).to_pylist() == whole[::-1][7:]
    with pytest.raises(ValueError, match="called 'Zoe'"):
        asked(pyarrow.Table.from_pylist([{"person": "Zoe"}]))


def test_a_report_says_how_questions_are_answered_which_go_together_and_who_differs(model):
    import pandas

    questions = [
        Question("a", name="number"),
        Question("b", {"never": 0, "often": 9}, "scale"),
        Question("c", ("yes", "no"), "words"),
        Question("d", (1, 2), "values"),
        Question("e", name="text", max_new_tokens=3),
    ]
    rows = [
        {"person": f"p{n // 2}", "age": n // 2, "number": 10.0 * n, "scale": "often" if n > 9 else "never", "text": "so",
         "words": "yes" if n % 4 else "no", "values": float(1 + n % 2)}
        for n in range(20)
    ]  # fmt: skip
    report = survey_report(pandas.DataFrame(rows), questions)
    number, scale, words, values = report.questions
    assert (report.people, report.rows) == (10, 20)
    assert number.numbers[0] == pytest.approx(95) and sum(share for _, share in number.bars) == pytest.approx(1)
    assert scale.bars == [("never", 0.5), ("often", 0.5)] and scale.numbers[0] == pytest.approx(4.5)
    assert words.bars == [("yes", 0.75), ("no", 0.25)] and words.numbers is None
    assert values.bars == [("1", 0.5), ("2", 0.5)]
    assert report.named == ["number", "scale", "values"]
    spearman = stats.spearmanr([row["number"] for row in rows], [row["scale"] == "often" for row in rows]).statistic
    assert report.correlations[0][1] == pytest.approx(spearman) and abs(report.correlations[1][2]) < 1e-12
    assert {report.who[0][0], report.who[1][0]} == {"p0", "p9"} and report.who[0][1] in ("age 0", "age 9")
    integrated = pandas.DataFrame([{"person": "p", "words": {"yes": 0.5, "no": 0.5}}])
    with pytest.raises(ValueError, match="'words' was not drawn"):
        survey_report(integrated, questions[2:3])


def test_a_survey_that_was_stopped_goes_on(folder, monkeypatch):
    model, people = load_model(folder / "model", "cpu"), Population.drawn(40, 32)
    asked, out = [Question("The long one is", name="number")], folder / "answers.jsonl"
    assert len(read_questions(folder / "questions.jsonl")) == 2
    survey_file(model, people, asked, folder / "whole.jsonl")
    monkeypatch.setattr("causalqwen.evaluation.surveys.PEOPLE_AT_ONCE", 16)
    rows, calls = Survey.rows, []

    def broken(self, items):
        calls.append(len(items))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return rows(self, items)

    monkeypatch.setattr(Survey, "rows", broken)
    with pytest.raises(KeyboardInterrupt):
        survey_file(model, people, asked, out)
    assert not out.exists()
    with pytest.raises(ValueError, match="holds an unfinished run"):
        survey_file(model, people, asked, out)
    for changed in ({"seed": 1}, {"draws": 0}):
        with pytest.raises(ValueError, match="other options"):
            survey_file(model, people, asked, out, resume=True, **changed)
    with pytest.raises(ValueError, match="other options"):
        survey_file(model, people.part(range(39)), asked, out, resume=True)
    survey_file(model, people, asked, out, resume=True)
    assert calls == [16, 16, 8, 8] and out.read_bytes() == (folder / "whole.jsonl").read_bytes()


def test_commands_tell_what_they_cannot_use(folder):
    base = ("--model", folder / "model")
    out = ("--output", folder / "out.safetensors")

    def anew(*words, code=0):
        for made in ("out.safetensors", "who.html"):
            (folder / made).unlink(missing_ok=True)
        return run(*words, code=code)

    assert "give one of them" in anew("population", *base, *out, code=1).stderr
    assert "200 people" in anew("population", *base, *out, "--drawn", 200, "--seed", 2).stdout
    assert Population.load(folder / "out.safetensors").names[0] == "seed 2"
    said = [
        {"text": "We have come.", "individual": "a"},
        {"prompt": "It is", "value": 3, "individual": "a"},
        {"question": "Who?", "answer": "somebody else", "individual": "a"},
        {"prompt": "He said", "options": ["b", "c"], "chosen": "c", "individual": "d"},
    ]
    words = write(folder / "words.jsonl", said)
    told = anew("population", *base, *out, "--rows", words).stderr
    assert "2 people, inferred from their choices, values, words by likelihood 'softmax'" in told
    assert "where numbers are asked, numbers alone tell who they are" in told
    nobodys = write(folder / "nobody.jsonl", [{"text": "We have come."}])
    assert "row 1, field individual" in anew("population", *base, *out, "--rows", nobodys, code=1).stderr
    silent = write(folder / "silent.jsonl", [{"prompt": "We have", "individual": "a"}])
    assert "row 1, field value: nothing was said" in anew("population", *base, *out, "--rows", silent, code=1).stderr
    someone = ("abduct", *base, *out)
    assert "give --text, or --rows" in anew(*someone, code=1).stderr
    assert "rows of 2 individuals, expected one: a, d" in anew(*someone, "--rows", words, code=1).stderr
    rows = write(folder / "one.jsonl", said[:3])
    page = ("--html", folder / "who.html")
    assert "32 coordinates" in anew(*someone, "--rows", rows, *page).stdout
    written = (folder / "who.html").read_text()
    assert "What each answer says" in written and "It is" in written and "<h2>Which words say most</h2>" not in written
    counted = anew(*someone, "--rows", write(folder / "n.jsonl", said[1:2]), *page, "--likelihood", "values").stdout
    assert "Individual(a, 32 coordinates, inferred from 1 values" in counted
    assert "leave --rows out" in anew(*someone, "--rows", rows, "--population", code=1).stderr
    assert "200 people" in anew("population", *base, *out, "--drawn", 200, "--seed", 2).stdout
    ask = ("survey", *base, "--population", folder / "out.safetensors")
    answered = ("--output", folder / "answers.jsonl")
    wrong = write(folder / "q.jsonl", [{"prompt": "a", "option": 1}])
    assert "q.jsonl, row 1, field option" in run(*ask, "--questions", wrong, *answered, code=1).stderr
    run(*ask, "--questions", folder / "questions.jsonl", *answered, "--where", "age > 3", "--resume", code=1)
    assert not (folder / "answers.jsonl").exists()


@pytest.mark.parametrize("name", ["guide.md", "guide.zh.md"])
def test_the_python_of_the_guide_runs(tiny_tokenizer, tmp_path, monkeypatch, name):
    made = graft_tiny("llama", tiny_tokenizer)
    made.config.value_range = [0.0, 24.0]
    made.save_pretrained(tmp_path / "trained")
    monkeypatch.chdir(tmp_path)
    (block,) = python_blocks(ROOT / "docs" / name)
    session: dict = {}
    exec(compile(block, name, "exec"), session)
    assert len(session["drawn"]) == 200 and list(session["likely"].index) == ["Ann"]
