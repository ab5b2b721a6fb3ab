"""The explorer's views People and What if in a real Chromium; see tests/test_explore.py."""

# ruff: noqa: F401, F811 # fixtures
import json
import math
import random
import re
import subprocess
import sys
from base64 import urlsafe_b64encode
from statistics import median

import pytest
import torch

from causalqwen import Individual, Intervention, NumberPrediction, Observation, Population, Question
from causalqwen.evaluation.page import example_rows, write_page
from causalqwen.evaluation.portrait import write_portrait
from causalqwen.evaluation.worlds import write_worlds
from causalqwen.modeling.explain_individual import covariance_of, lie_among, what_told
from causalqwen.modeling.loading import fingerprint
from causalqwen.modeling.survey import survey_rows
from causalqwen.modeling.worlds import word_changes, world_numbers
from causalqwen.numbers import ValueLaw
from test_explore import (
    HOSTILE,
    SMALL,
    browser,
    check_figures,
    check_page,
    fill,
    go_to,
    here,
    near_percent,
    number_of,
    opened,
    page,
    path_of,
    posted,
    press,
    seen,
    shown_text,
    small,
    tab_to,
    type_form,
    type_into,
    wait_written,
    write,
)
from test_serving import PEOPLE, held, serving, talker, until

PROMPT, TEXT = "They say that", " 12.5 people, then 31 of the men"
SAID = "They say that 12 of the people are here and so it was with us"


@pytest.fixture(scope="module")
def model(tiny_tokenizer):
    return talker(
        tiny_tokenizer, number_context="digits", value_family="gaussian", value_range=[0.0, 500.0], value_digits=3
    )


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    people = tmp_path_factory.mktemp("people")
    with serving(model, window=0.002, individuals=dict(PEOPLE), page=True, keep=people, max_tokens=400) as made:
        made.people = people
        yield made


def read_text(page, prompt=PROMPT, text=TEXT, seed=5):
    fill(here(page), {"What stood before": prompt, "What was said": text, "Seed": str(seed)}, "Read the text")
    page.locator("[data-who]:visible").wait_for()
    ready(page)


def ready(page):
    """Nothing is under way."""
    here(page).get_by_role("button", name="Stop").and_(page.locator(":disabled")).wait_for()


def see_worlds(page):
    page.get_by_role("button", name="See the worlds").click()
    page.locator("[data-cell]").first.wait_for()
    ready(page)


CELLS = """() => [...document.querySelectorAll('section:not([hidden]) tbody tr')]
    .filter(row => row.querySelector('[data-cell]'))
    .map(row => [...row.children].map(cell => [...cell.childNodes].filter(node => node.textContent)
    .map(node => [{DEL: 'gone', INS: 'new'}[node.nodeName] ?? 'same', node.textContent])))"""


def check_cells(page, worlds, observed):
    """What is marked world by world is the library's; what is in common stands in one row."""
    rows = page.evaluate(CELLS)
    for column, world in enumerate(worlds):
        pieces = [piece for row in rows for piece in row[column]]
        assert "".join(text for kind, text in pieces if kind != "gone") == seen(world.text)
        assert "".join(text for kind, text in pieces if kind != "new") == seen(observed.text)
        changes = word_changes(observed.text, world.text)
        for kind in ("same", "gone", "new"):
            told = "".join(text for one, text in pieces if one == kind)
            assert told == seen("".join(text for one, text in changes if one == kind))
    for row in rows:
        kept = {text for cell in row for kind, text in cell if kind != "new"}
        assert len(kept) <= 1  # a row is one part of what was said


def check_values(page, worlds, laws, model):
    """Values, medians and 90% intervals, as the table of values says them."""
    rows = dict(
        page.locator("[data-value]:visible").evaluate_all(
            "rows => rows.map(row => [row.dataset.value, [...row.cells].slice(2).map(cell => cell.textContent)])"
        )
    )
    count = 0
    for place, (world, of_world) in enumerate(zip(worlds, laws, strict=True)):
        numbers = (world.tokens == model.config.num_token_id).nonzero().squeeze(-1).tolist()
        for index, token in enumerate(numbers):
            value, middle, ends = rows[f"{place} {index}"]
            assert number_of(value) == pytest.approx(world.values[token].item(), rel=1e-9)
            assert (middle == "") == (token not in of_world)
            if token in of_world:
                check_figures(middle, [of_world[token].median], of_world[token], 0.9)
                check_figures(ends, of_world[token].interval(0.9), of_world[token], 0.9)
            count += 1
    assert count == len(rows)


def check_law(page, law, value=None, cumulative=False, points=200):
    """A law that is drawn, point by point, and its bands."""
    drawn = page.locator("[data-law]:visible")
    curve = law.curve(points, value)
    first, whole = curve[0][0], curve[-1][0] - curve[0][0]
    top = 1.0 if cumulative else max(density for _, density, _ in curve)
    for (x, y), (at, density, below) in zip(path_of(page, drawn), curve, strict=True):
        assert x == pytest.approx((at - first) / whole, abs=2e-3)
        assert y == pytest.approx((below if cumulative else density) / top, abs=4e-3)
    for level in (0.5, 0.8, 0.9):
        low, high = law.interval(level)
        left, right = max((low - first) / whole, 0), min((high - first) / whole, 1)
        band = drawn.locator(f"[data-level='{level}']")
        assert float(band.get_attribute("x")) == pytest.approx(12 + 496 * left, abs=1)
        assert float(band.get_attribute("width")) == pytest.approx(496 * (right - left), abs=1.5)


# ---- what if ---------------------------------------------------------------------------------------------------------


def test_worlds_by_keyboard(page, model):
    press(page, page.get_by_role("link", name="What if"))
    type_form(page, {"What stood before": PROMPT, "What was said": TEXT, "Seed": "5"}, "Read the text")
    page.get_by_text("comes back exactly").wait_for()
    assert shown_text(page) == TEXT
    tab_to(page, page.locator("[data-text]:visible span[role=button]").first)
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Home")
    page.keyboard.press(" ")
    type_into(page, here(page).get_by_label("after 0 tokens"), "99")
    page.keyboard.press("Enter")
    assert here(page).locator(".forced").count() == 1
    press(page, page.get_by_role("button", name="See the worlds"))
    page.locator("[data-cell]").first.wait_for()
    observed = Observation(TEXT, PROMPT)
    worlds = model.counterfactual_samples(observed, [Intervention(), Intervention(values={0: 99.0})], seed=5)
    check_cells(page, [world for (world,) in worlds], observed)


@pytest.mark.slow
def test_every_control_of_worlds(page, model, server):
    bodies = posted(page)
    go_to(page, 4)
    assert page.get_by_role("button", name="Read the text").is_disabled()
    read_text(page)
    assert bodies[-1]["interventions"] == [{}] and "individual" not in bodies[-1] and bodies[-1]["noise"] == "abduct"
    tokens = page.locator("[data-text]:visible span[role=button]")
    tokens.nth(0).click()
    page.get_by_role("button", name="Close").click()
    assert here(page).get_by_label("after 0 tokens").count() == 0
    tokens.nth(0).click()
    fill(here(page), {"after 0 tokens": "−7.5"}, "Set this number")
    page.get_by_role("button", name="One more edit").click()
    tokens.nth(6).click()
    entry = here(page).get_by_label(re.compile(r"^behind \d+ tokens"))
    place = int(re.search(r"\d+", page.locator("form.line label span").first.inner_text())[0])
    here(page).get_by_label(re.compile("^In")).select_option(label="edit 2")
    entry.fill("men")
    page.get_by_role("button", name="Put these words here").click()
    here(page).locator("[data-edit] textarea").nth(1).fill("We say that")
    page.get_by_role("button", name="One more edit").click()
    see_worlds(page)
    spaced = " men" if bodies[-1]["interventions"][2]["tokens"][str(place)][0] == " " else "men"
    assert bodies[-1]["interventions"] == [
        {}, {"values": {"0": -7.5}}, {"prompt": "We say that", "tokens": {str(place): spaced}}, {},
    ]  # fmt: skip
    heads = page.locator("thead th:visible").all_inner_texts()
    assert [head.splitlines()[0] for head in heads[:4]] == ["As it was", "edit 1", "edit 2", "edit 3"]
    assert "after 0 tokens: do(-7.5)" in heads[1]
    page.get_by_role("button", name="Do not set −7.5").click()
    page.get_by_role("button", name="Remove edit 3").click()
    see_worlds(page)
    assert len(bodies[-1]["interventions"]) == 3 and bodies[-1]["interventions"][1] == {}
    levels = {}
    for level, share in (("0", "50%"), ("1", "80%"), ("2", "90%")):
        here(page).get_by_label(re.compile("Level of the interval")).fill(level)
        levels[share] = page.locator("[data-value]:visible").first.inner_text()
        assert share in page.locator("[data-values]:visible thead").inner_text()
    assert len(set(levels.values())) == 3
    page.locator("[data-value] button:visible").first.click()
    world = model.counterfactual_samples(Observation(TEXT, PROMPT), Intervention(), seed=5)[0][0]
    law = model.value_predictions(world, model.abduct(Observation(TEXT, PROMPT)))[0]
    check_law(page, law, 12.5)
    here(page).get_by_label("P(Y ≤ y)").check()
    check_law(page, law, 12.5, cumulative=True)
    fill(here(page), {"Who wrote it": "Ann", "Noise": "drawn anew"}, "New seed")
    page.get_by_role("button", name="Read the text").click()
    page.get_by_text("says something else").wait_for()
    assert bodies[-1]["individual"] == "Ann" and bodies[-1]["noise"] == "redraw" and bodies[-1]["seed"] != 5
    here(page).get_by_label("What stood before").fill("We say")
    assert page.get_by_text("read the text again").count() == 1
    assert page.get_by_role("button", name="See the worlds").is_disabled()
    with held(model):
        page.get_by_role("button", name="Read the text").click()
        page.get_by_role("progressbar").wait_for()
        page.get_by_role("button", name="Stop").click()
        page.get_by_text("Stopped.").wait_for()
    until(lambda: server.metric("causalqwen_running") == 0)
    fill(here(page), {"What was said": "word " * 500}, "Read the text")
    assert "this server writes 400" in page.get_by_role("alert").inner_text()


@pytest.mark.slow
def test_a_written_text_is_asked_about(page):
    write(page, PROMPT, tokens=8)
    text = page.locator("[data-text]:visible").text_content()
    page.get_by_role("button", name="What if…").click()
    page.get_by_role("link", name="What if").and_(page.locator("[aria-current]")).wait_for()
    assert here(page).get_by_label("What stood before").input_value() == PROMPT
    if text.isprintable() and "⟨" not in text:  # what cannot be seen is marked there
        assert here(page).get_by_label("What was said").input_value() == text


@pytest.mark.slow
def test_the_link_the_python_and_the_curl_do_the_same(page, model, server, browser, tmp_path):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    copied = lambda: page.evaluate("navigator.clipboard.readText()")  # noqa: E731
    go_to(page, 3)
    add_text(page, SAID + " 'quoted' \"twice\" \\n", "Zed 'é'")
    go_to(page, 4)
    here(page).get_by_label("Who wrote it").select_option("Zed 'é'")
    read_text(page)
    page.locator("[data-text]:visible span[role=button]").nth(0).click()
    here(page).get_by_label("after 0 tokens").fill("99")
    page.keyboard.press("Enter")
    here(page).locator("[data-edit] textarea").fill("We say 'that' \"so\" \\")
    see_worlds(page)
    cells = page.evaluate(CELLS)
    page.get_by_role("button", name="Copy a link to all of this").click()
    page.get_by_role("button", name="Copied").wait_for()
    link = copied()
    assert link == page.url
    with opened(browser, server, link.split("/", 3)[3]) as other:
        other.locator("[data-cell]").first.wait_for()
        assert other.evaluate(CELLS) == cells
        who = here(other).get_by_label("Who wrote it")
        assert who.evaluate("one => one.selectedOptions[0].text") == "as the link says"
        assert other.get_by_role("alert").count() == 0
    texts = ["".join(text for row in cells for kind, text in row[column] if kind != "gone") for column in (0, 1)]
    model.save_pretrained(tmp_path / "tiny")
    codes = {}
    for name in ("Python", "curl"):
        page.get_by_role("button", name=f"Copy the {name}").click()
        page.get_by_role("button", name="Copied").nth(len(codes) + 1).wait_for()
        codes[name] = copied()
        here(page).locator("summary", has_text=name).click()
        assert page.locator(f"[data-code={name}]").text_content() == codes[name]
    (tmp_path / "asked.py").write_text(codes["Python"], encoding="utf-8")
    ran = subprocess.run([sys.executable, "asked.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert [seen(eval(line)) for line in ran.stdout.splitlines()] == texts
    ran = subprocess.run(["bash", "-c", codes["curl"]], capture_output=True, text=True, timeout=120)
    assert [seen(one["text"]) for one in json.loads(ran.stdout)["data"]] == texts


def linked(made, **asked):
    told = json.dumps({"made": made, "asked": asked}).encode()
    return "#worlds?" + urlsafe_b64encode(told).decode().rstrip("=")


def test_the_python_of_whoever_a_link_describes_is_theirs(browser, server):
    heard = {"observations": [{"text": " we go", "prompt": "Ha,"}, "so"], "seed": None, "likelihood": "ovr"}
    link = linked("x", prompt=PROMPT, text=TEXT, seed=1, individual={"mix": [heard, {"seed": 3}]})
    with opened(browser, server, link) as page:
        code = page.locator("[data-code=Python]").text_content()
    made = 'model.abduct([Observation(" we go", prompt="Ha,"), "so"], likelihood="ovr")'
    assert f"who = mix({made}, Individual.from_seed(3, model.config.causal_size), 0.5)" in code


@pytest.mark.slow
def test_where_no_edit_is_left_setting_something_makes_one(page):
    go_to(page, 4)
    read_text(page)
    page.get_by_role("button", name="Remove edit 1").click()
    page.locator("[data-text]:visible span[role=button]").first.click()
    fill(here(page), {"after 0 tokens": "99"}, "Set this number")
    assert page.get_by_role("button", name="Do not set 99").count() == 1


@pytest.mark.slow
def test_a_link_that_is_wrong_or_from_elsewhere_does_no_harm(browser, server):
    asked = {"prompt": PROMPT, "text": TEXT, "interventions": [{}], "seed": 1}
    with opened(browser, server, linked("another", **asked)) as page:
        page.get_by_text("comes back exactly").wait_for()
        assert "another model" in page.get_by_role("alert").inner_text()
        read_text(page)
        assert page.get_by_role("alert").count() == 0
    many = asked | {"interventions": [{"prompt": "We say that"}] * 5000}
    with opened(browser, server, linked("x", **many)) as page:
        page.get_by_text("9 worlds are more than the 8").wait_for()
    hostile = {"prompt": HOSTILE, "text": " " + HOSTILE, "interventions": [{}, {"prompt": HOSTILE}], "seed": "x"}
    twice = {"tokens": {"0": " a", "00": " b"}, "values": {"0": 1}, "prompt": 7}
    odd = asked | {"interventions": [{}, None, 5, twice]}
    for path in (
        "#worlds?%%%", "#worlds?e30", "#worlds?" + "A" * 5000, "#__proto__", linked("x", prompt=1),
        linked("x", **hostile), linked("x", **odd),
    ):  # fmt: skip
        with opened(browser, server, path) as page:
            assert page.locator("main section:visible form").count() >= 1
            assert "taken" not in page.title() and page.locator("img").count() == 0


def test_static_pages_draw_their_laws_with_the_same_components(browser, model, tmp_path):
    """`who.html`, `worlds.html` and the report, opened from a disk, ask nobody for anything, and draw what the library says."""
    ann, observed = model.abduct(SAID, likelihood="values", name="Ann"), Observation(TEXT, PROMPT)
    write_portrait(tmp_path / "who.html", model, ann, [SAID], [("Bob", PEOPLE["Bob"])])
    edits = [Intervention(), Intervention(prompt="We say that")]
    cells = model.counterfactual_samples(observed, edits, individual=ann, seed=5)
    told = [[(world, world_numbers(model, world, ann)) for world in cell] for cell in cells]
    write_worlds(tmp_path / "worlds.html", observed, edits, [("Ann", ann)], [told], "abduct")
    examples = example_rows(model, [PROMPT], {"value": torch.tensor([130.0])})
    write_page(tmp_path / "report.html", "report.html", title="Report", examples=examples)
    widths = covariance_of(ann).diagonal().sqrt()
    place = (ann.normal.abs() / widths).argmax()
    telling = NumberPrediction(ann.normal[place].item(), widths[place].item(), None, ValueLaw(family="gaussian"))
    laws = {
        "who": ("nobody", 0.0, telling),
        "worlds": ("said", 12.5, told[0][0][1][0].law),
        "report": ("observed", 130.0, model.predict_number(PROMPT)[0]),
    }
    for name, (called, value, law) in laws.items():
        context = browser.new_context(viewport=SMALL, color_scheme="dark")
        page, asked, wrong = context.new_page(), [], []
        page.on("request", lambda request, asked=asked: asked.append(request.url))
        page.on("console", lambda said, wrong=wrong: wrong.append(said.text))
        page.on("pageerror", lambda error, wrong=wrong: wrong.append(str(error)))
        page.goto((tmp_path / f"{name}.html").as_uri())
        page.locator("[data-value] button").first.click()
        assert f"{called} {value:g}" in page.locator("[data-law]").get_attribute("aria-label")
        check_law(page, law, value, points=100)
        page.get_by_label("P(Y ≤ y)").check()
        check_law(page, law, value, cumulative=True, points=100)
        if name == "who":
            assert page.locator("[data-map] circle").count() == 2 and page.locator("[data-text]").inner_text() == SAID
        look, width = page.evaluate("[document.documentElement.dataset.theme, document.documentElement.scrollWidth]")
        assert (look, width) == ("light" if name == "report" else "dark", 390)
        assert len(asked) == 1 and not wrong, (name, asked, wrong)
        context.close()


# ---- people ----------------------------------------------------------------------------------------------------------


def add_text(page, text, name):
    fill(here(page), {"inferred from a text": True, "What they wrote": text, "Name": name})
    add(page)


def add(page):
    before = page.locator("[data-person]").count()
    page.get_by_role("button", name="Add", exact=True).click()
    page.locator("[data-person]").nth(before).wait_for()
    ready(page)


def test_people_by_keyboard(page, model):
    press(page, page.get_by_role("link", name="People"))
    tab_to(page, here(page).get_by_label("drawn", exact=True))
    page.keyboard.press("ArrowRight")
    type_into(page, here(page).get_by_label("What they wrote"), SAID)
    type_into(page, here(page).get_by_label("Name", exact=True), "Zed")
    page.keyboard.press("Enter")
    page.locator("[data-person]").wait_for()
    who = model.abduct(SAID, name="Zed")
    assert str(who) in page.locator("[data-person]").inner_text()
    press(page, page.get_by_role("button", name="Which words say most"))
    words = page.locator("[data-text]:visible span[role=button]")
    tab_to(page, words.first)
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    (said,), _ = what_told(model, [SAID], who)
    gain = said[1].gain
    assert f"{'−' if gain < 0 else '+'}{abs(gain):.3f} nats" in page.locator("[data-word]").inner_text()


@pytest.mark.slow
def test_every_control_of_people(page, model, server):
    bodies = posted(page)
    go_to(page, 3)
    view = here(page)
    assert view.get_by_label("a mixture of two").is_disabled()
    fill(view, {"Seed": "7", "How many": "2"})
    add(page)
    page.get_by_role("button", name="New seed").first.click()
    assert view.get_by_label("Seed", exact=True).first.input_value() != "7"
    add_text(page, SAID, "Zed")
    fill(
        view,
        {
            "inferred from numbers": True,
            re.compile("What they said with a number"): "They say that 12\n\nIt is 7.5",
            "Name": "Num",
        },
    )
    add(page)
    fill(
        view,
        {
            "inferred from answers": True,
            "Question 1": "He said",
            "Options, with": "yes, no，never",
            "Their answer": "no",
        },
        "One more answer",
    )
    assert page.get_by_role("button", name="Add", exact=True).is_disabled()
    view.get_by_label("Question 2").fill("She said")
    view.get_by_label("Options, with").nth(1).fill("blue, red")
    view.get_by_label("Their answer").nth(1).select_option("red")
    add(page)
    fill(view, {"saved": True, "Who was saved": "Bob"})
    add(page)
    fill(
        view,
        {
            "a mixture of two": True,
            re.compile("^From"): "Zed",
            re.compile("^To[^k]"): "seed 8",
            re.compile("Share of the way"): "0.25",
        },
    )
    add(page)
    zed = {"observations": [SAID], "name": "Zed"}
    choices = [
        {"prompt": "He said", "options": ["yes", "no", "never"], "chosen": "no"},
        {"prompt": "She said", "options": ["blue", "red"], "chosen": "red"},
    ]
    asked = [
        {"seed": 7}, {"seed": 8}, zed,
        {"observations": ["They say that 12", "It is 7.5"], "likelihood": "values", "name": "Num"},
        {"observations": choices, "name": "He said…"}, "Bob", {"mix": [zed, {"seed": 8}], "share": 0.25},
    ]  # fmt: skip
    assert bodies[-1]["individuals"] == asked
    assert page.locator("[data-map]:visible circle").count() == 7
    people = page.locator("[data-person]")
    people.nth(4).get_by_role("button", name="Remove He said…").click()
    page.get_by_text("6 of up to 12 people").wait_for()
    ready(page)
    fill(people.nth(2), {"Save as": "zed/../x"}, "Save")
    assert "save" in page.get_by_role("alert").inner_text()
    fill(people.nth(2), {"Save as": "Zed two"}, "Save")
    page.get_by_text("Saved as Zed two").wait_for()
    assert (server.people / "Zed two.safetensors").is_file()
    people.nth(2).get_by_role("button", name="Which words say most").click()
    page.locator("[data-text]:visible").wait_for()
    assert page.locator("[data-text]:visible").text_content() == SAID
    page.get_by_role("button", name="Close").click()
    go_to(page, 0)
    fill(here(page), {"How it is decided": "persona", "Who speaks": "Zed two"})
    go_to(page, 3)
    beginning = page.get_by_role("region", name="What they write")
    fill(beginning, {"Text to go on from": PROMPT, "Seed": "4", "Tokens at most": "12"}, "Let them write")
    page.locator("[data-written='5']").wait_for()
    ready(page)
    for place, who in ((0, Individual.from_seed(7, 32)), (2, model.abduct(SAID, name="Zed"))):
        ((world,),) = model.interventional_samples(PROMPT, who, max_new_tokens=12, seed=4)
        assert page.locator(f"[data-written='{place}'] p").text_content() == seen(world.text)
    with held(model):
        beginning.get_by_role("button", name="Let them write").click()
        page.get_by_role("progressbar").wait_for()
        here(page).get_by_role("button", name="Stop").click()
        page.get_by_text("Stopped.").wait_for()
    until(lambda: server.metric("causalqwen_running") == 0)
    page.locator("[data-person='0']").get_by_role("button", name="Remove").click()
    page.get_by_text("5 of up to 12 people").wait_for()


@pytest.mark.slow
def test_every_control_of_a_survey(page, model):
    go_to(page, 3)
    here(page).get_by_label("Seed", exact=True).fill("7")
    add(page)
    view = page.get_by_role("region", name="Ask a population")

    view.get_by_label("Question").fill("He said")
    assert view.get_by_role("button", name="Ask them").is_disabled()
    fill(view, {"Options, with": "yes, no, never", "How many": "150", "Seed": "3"}, "Ask them")
    page.locator("[data-asked]").wait_for()
    ready(page)
    known = list(
        survey_rows(
            model, Population.drawn(150, 32, 3), [Question("He said", ("yes", "no", "never"), "answer")], seed=3
        )
    )
    for option in ("yes", "no", "never"):
        people = [row["person"] for row in known if row["answer"] == option]
        bar = view.locator("[data-bar]", has_text=option).first
        assert int(bar.get_attribute("data-bar")) == len(people)
        bar.click()
        assert page.locator("[data-gave] p").inner_text() == (", ".join(people) or "–")
    fill(
        view,
        {"Options, with": "1, 2.5, −3", "Answers of each": "2", "Who is asked": "the people of this page"},
        "Ask them",
    )
    page.get_by_text("6 answers.").wait_for()
    fill(view, {"They answer with": "a number", "Answers of each": "60"}, "Ask them")
    page.get_by_text("180 answers.").wait_for()
    named = {f"seed {seed}": Individual.from_seed(seed, 32) for seed in (7, 8, 9)}
    rows = list(survey_rows(model, Population.of(named), [Question("He said", name="answer")], draws=60, seed=3))
    values = [row["answer"] for row in rows]
    assert number_of(page.locator("[data-asked] .soft").inner_text().split()[-1]) == pytest.approx(
        median(values), rel=1e-3
    )
    bars = [
        (one.inner_text().splitlines()[0], int(one.get_attribute("data-bar")))
        for one in view.locator("[data-bar]").all()
    ]
    assert sum(count for _, count in bars) == 180 and 5 <= len(bars) <= 15
    for name, count in bars:
        ends = [number_of(end) for end in re.findall(r"[−\d,.]+", name)]
        low, high = (-math.inf, ends[0]) if name[0] == "<" else (ends[0], math.inf) if name[0] == "≥" else ends
        assert count == sum(low <= value < high for value in values), name
    fill(view, {"Who is asked": "people drawn by the seed", "How many": "1001"}, "Ask them")
    assert not view.get_by_label("How many").evaluate("one => one.validity.valid")


def test_an_option_that_is_told_twice_is_asked_once_and_a_long_one_fits(browser, server):
    with opened(browser, server, viewport=SMALL) as page:
        go_to(page, 3)
        fill(
            here(page),
            {
                "inferred from answers": True,
                "Question 1": "He said",
                "Options, with": "yes, no, yes, " + "certainly " * 30,
                "Their answer": "no",
            },
        )
        assert page.evaluate("document.documentElement.scrollWidth") == SMALL["width"]
        add(page)
        assert page.locator("[data-person]").count() == 1
        view = page.get_by_role("region", name="Ask a population")
        fill(view, {"Question": "He said", "Options, with": "1, 1.0, 2", "How many": "3"}, "Ask them")
        page.locator("[data-asked]").wait_for()
        assert view.locator("[data-bar] .name").all_inner_texts() == ["1", "2"]


@pytest.mark.slow
def test_a_server_that_keeps_nobody_says_how_to(browser, model):
    with serving(model, page=True) as plain, opened(browser, plain) as page:
        go_to(page, 3)
        assert here(page).get_by_label("saved").is_disabled()
        add(page)
        assert page.get_by_text("--individuals FOLDER").count() == 1
        assert page.get_by_label("Save as").count() == 0


# ---- truth, tricks, load ---------------------------------------------------------------------------------------------


WORDS = "They,say,that,the,people,who,came,here,12,of,31.5,men,we,have,so,it".split(",")  # noqa: SIM905


def sentence(chance, least, most):
    return " ".join(chance.choices(WORDS, k=chance.randint(least, most)))


@pytest.mark.slow
@pytest.mark.parametrize("view", ["write", "numbers", "worlds", "people"])
def test_what_is_drawn_is_the_librarys_in_two_hundred_random_states(page, server, model, view):
    """Fifty of each view: alternatives; densities, P(Y <= y) and intervals; differences; where people lie, and answers."""
    chance, check = random.Random(view), {"write": check_a_token, "numbers": check_a_row, "worlds": check_worlds}
    page.evaluate("view => { location.hash = view }", view)
    checked = sum(check.get(view, check_people)(page, server, model, chance) for _ in range(50))
    assert checked > {"write": 350, "numbers": 49, "worlds": 20, "people": 49}[view]


def check_a_token(page, server, model, chance):
    prompt, seed = sentence(chance, 3, 9), chance.randrange(2**31)
    write(page, prompt, tokens=4, seed=seed, preset="causal")
    asked = {"prompt": prompt, "max_tokens": 4, "seed": seed}
    choice = server.complete({"preset": "causal", "alternatives": 8}, **asked).choices[0]
    tokens = [one for one in choice.causal["tokens"] if one["span"][1] > one["span"][0]]
    place = chance.randrange(len(tokens))
    shown, token = page.locator("[data-text]:visible span[role=button]"), tokens[place]
    inner = choice.text[slice(*token["span"])]
    assert shown.count() == len(tokens) and (not inner.isprintable() or shown.nth(place).text_content() == inner)
    share = shown.nth(place).get_attribute("aria-label").rsplit(" ", 1)[1]
    assert near_percent(share, token["chosen"]["softmax"])
    shown.nth(place).click()
    of_numbers = [number["span"] for number in choice.causal["numbers"]]
    is_number = any(first < token["span"][1] and token["span"][0] < end for first, end in of_numbers)
    assert page.locator("[data-place] [data-law]").count() == is_number
    rows = page.locator("[data-place] tbody tr").evaluate_all(
        "rows => rows.map(row => [row.textContent, ...[...row.querySelectorAll('td')].map(cell => cell.textContent)])"
    )
    for row, known in zip(rows, tokens[place]["alternatives"], strict=False):
        assert near_percent(row[1], known["softmax"]) and near_percent(row[2], known["ovr"])
        assert ("decision" in row[0]) == (known["token"] == tokens[place]["decided"])
    return len(tokens[place]["alternatives"])


def check_a_row(page, server, model, chance):
    prompt = sentence(chance, 3, 9)
    page.locator("textarea:visible").fill(prompt)
    page.get_by_role("button", name="Predict").click()
    page.get_by_role("button", name="Draw the law of row 1").wait_for()
    (law,) = model.predict_number(prompt)
    level = chance.randrange(19)
    page.get_by_role("slider", name="Level").locator("visible=true").fill(str(level))
    at = (level + 1) / 20
    check_figures(page.locator("[data-interval]:visible").inner_text(), law.interval(at), law, at)
    check_figures(page.locator("[data-median]:visible").inner_text(), [law.median], law, 0.9)
    page.get_by_role("button", name="Draw the law of row 1").click()
    page.locator("[data-law]:visible").wait_for()
    cumulative = chance.random() < 0.5
    box = page.get_by_role("checkbox", name="P(Y ≤ y)").locator("visible=true")
    box.set_checked(cumulative)
    check_law(page, law, cumulative=cumulative)
    return 1


def check_worlds(page, server, model, chance):
    prompt, text, seed = sentence(chance, 2, 5), " " + sentence(chance, 4, 9), chance.randrange(2**31)
    edits = [{}]
    for _ in range(chance.randint(1, 3)):
        edit = {"prompt": sentence(chance, 2, 5)} if chance.random() < 0.6 else {}
        if chance.random() < 0.4:
            edit["tokens"] = {chance.randrange(4): " " + sentence(chance, 1, 2)}
        elif chance.random() < 0.5:
            edit["values"] = {chance.randrange(3): round(chance.uniform(-50, 150), 1)}
        edits.append(edit)
    noise = chance.choice(["abduct", "redraw"])
    asked = {"prompt": prompt, "text": text, "interventions": edits, "seed": seed, "noise": noise}
    page.evaluate("hash => { location.hash = hash }", linked(fingerprint(model), **asked))
    page.wait_for_function(
        """([seed, count]) => document.querySelectorAll('section:not([hidden]) thead th[scope=col] div.raw').length === count
        && document.querySelector('[data-code=curl]')?.textContent.includes('"seed": ' + seed)""",
        arg=[seed, len(edits)],
    )
    observed, changed = Observation(text, prompt), [Intervention(**edit) for edit in edits]
    who = model.abduct(observed)
    made = model.counterfactual_samples(observed, changed, noise=noise, individual=who, seed=seed)
    worlds = [world for (world,) in made]
    check_cells(page, worlds, observed)
    laws = [model.value_predictions(world, who) for world in worlds]
    check_values(page, worlds, laws, model)
    unfold = page.locator("[data-value] button:visible")
    if not unfold.count():
        return 0
    place = chance.randrange(unfold.count())
    key = unfold.nth(place).evaluate("one => one.closest('tr').dataset.value")
    column, index = map(int, key.split())
    token = (worlds[column].tokens == model.config.num_token_id).nonzero().squeeze(-1)[index].item()
    unfold.nth(place).click()
    page.locator("[data-law]:visible").wait_for()
    check_law(page, laws[column][token], worlds[column].values[token].item())
    unfold.nth(place).click()
    return 1


def check_people(page, server, model, chance):
    prompt, seed = sentence(chance, 2, 5), chance.randrange(2**31)
    for _ in range(page.locator("[data-person]").count()):
        left = page.locator("[data-person]").count()
        page.get_by_role("button", name=re.compile("^Remove ")).locator("visible=true").last.click()
        page.wait_for_function("left => document.querySelectorAll('[data-person]').length < left", arg=left)
        page.wait_for_function("!document.querySelector('section:not([hidden]) progress')")
    count = chance.randint(1, 3)
    fill(here(page), {"drawn": True, "Seed": str(seed), "How many": str(count)})
    add(page)
    people = [Individual.from_seed(seed + place, 32) for place in range(count)]
    if chance.random() < 0.6:
        add_text(page, prompt, "Zed")
        people.append(model.abduct(prompt, name="Zed"))
    plane = lie_among(people)
    label = page.locator("[data-map]:visible").get_attribute("aria-label")
    told = [tuple(map(number_of, pair.split(", "))) for pair in re.findall(r"\(([^()]*)\)(?=;|$)", label)]
    assert len(told) == len(people)
    for (x, y), point in zip(told, plane.points.tolist(), strict=True):
        assert (x, y) == pytest.approx(point, rel=2e-3, abs=2e-3)
    drawn = page.locator("[data-ellipse]").evaluate_all(
        "all => all.map(one => [one.dataset.ellipse, +one.getAttribute('rx'), +one.getAttribute('ry')])"
    )
    assert [int(place) for place, *_ in drawn] == [place for place, one in enumerate(people) if one.is_inferred]
    for place, wide, high in drawn:
        sizes = torch.linalg.eigvalsh(plane.covariances[int(place)]).clamp(min=0).sqrt()
        assert high / wide == pytest.approx((sizes[0] / sizes[1]).item(), rel=1e-3)
    options = chance.choice([("yes", "no"), ("blue", "red", "never"), (1, 2.5, 40)])
    view = page.get_by_role("region", name="Ask a population")
    fill(view, {"Question": prompt, "Options, with": ", ".join(map(str, options)), "How many": "40", "Seed": str(seed)})
    with page.expect_response("**/v1/population"):
        view.get_by_role("button", name="Ask them").click()
    ready(page)
    rows = list(survey_rows(model, Population.drawn(40, 32, seed), [Question(prompt, options, "answer")], seed=seed))
    counts = [int(one) for one in view.locator("[data-bar]").evaluate_all("all => all.map(one => one.dataset.bar)")]
    assert counts == [sum(row["answer"] == option for row in rows) for option in options]
    return 1


@pytest.mark.slow
def test_hostile_text_is_text_in_both_views(page):
    go_to(page, 4)
    fill(here(page), {"What stood before": HOSTILE, "What was said": " " + HOSTILE}, "Read the text")
    page.get_by_text("comes back exactly").wait_for()
    assert page.locator("[data-text]:visible").text_content().replace("⏎", "") == seen(" " + HOSTILE)
    here(page).locator("[data-edit] textarea").fill(HOSTILE + HOSTILE)
    see_worlds(page)
    assert page.evaluate(CELLS)
    go_to(page, 3)
    add_text(page, HOSTILE, HOSTILE[:190])
    page.get_by_role("button", name="Which words say most").click()
    page.locator("[data-text]:visible").wait_for()
    assert page.locator("[data-text]:visible").text_content().replace("⏎", "") == seen(HOSTILE)
    view = page.get_by_role("region", name="Ask a population")
    fill(view, {"Question": HOSTILE, "Options, with": "<b>yes</b>, <NUM>, \u202eno"}, "Ask them")
    page.locator("[data-bar]").nth(2).wait_for()
    assert "taken" not in page.title() and page.locator("img").count() == 0 and page.locator("main b b").count() == 0
    long = "word " * 20_000
    for place, label, button in ((3, "What they wrote", "Add"), (4, "What was said", "Read the text")):
        go_to(page, place)
        here(page).get_by_label(label).fill(long)
        page.get_by_role("button", name=button, exact=True).click()
        here(page).get_by_role("alert").wait_for()
        assert "this server" in here(page).get_by_role("alert").inner_text()
        assert here(page).get_by_label(label).input_value() == long
        here(page).get_by_label(label).fill("x" * 1_000_000)
        assert "takes 1048576" in here(page).get_by_role("alert").first.inner_text()
        assert page.get_by_role("button", name=button, exact=True).is_disabled()


@pytest.mark.slow
def test_both_views_are_accessible_and_fit_a_small_screen(small):
    page = small
    go_to(page, 4)
    check_page(page, "no text")
    for box, text in zip(page.locator("textarea:visible").all(), (PROMPT, TEXT), strict=True):
        box.fill(text)
    page.locator("button.main:visible").click()
    page.locator("[data-edit]").wait_for()
    page.locator("[data-edit] textarea").fill("We say that")
    page.locator("[data-text]:visible span[role=button]").first.click()
    check_page(page, "a text that was read")
    page.locator("button.main:visible").last.click()
    page.locator("[data-cell]").first.wait_for()
    page.locator("[data-value] button:visible").first.click()
    for summary in page.locator("summary:visible").all():
        summary.click()
    check_page(page, "worlds")
    page.set_viewport_size({"width": 1200, "height": 844})
    check_page(page, "worlds, wide")
    page.set_viewport_size(SMALL)
    go_to(page, 3)
    kinds = page.locator("[name=kind]")
    for place in range(5):
        kinds.nth(place).check()
        check_page(page, f"somebody of kind {place}")
    kinds.nth(0).check()
    page.locator("button.main:visible").click()
    page.locator("[data-person='2']").wait_for()
    kinds.nth(5).check()
    check_page(page, "a mixture")
    kinds.nth(1).check()
    page.locator("textarea:visible").first.fill(SAID)
    page.locator("button.main:visible").click()
    page.locator("[data-person='3'] button").first.click()
    page.locator("[data-text]:visible span[role=button]").nth(3).click()
    check_page(page, "words")
    page.locator("textarea:visible").nth(1).fill(PROMPT)
    page.locator("form:visible").nth(1).locator("button").click()
    page.locator("[data-written='3']").wait_for()
    page.locator("textarea:visible").nth(2).fill("He said")
    page.locator("form:visible").nth(2).locator("input").first.fill("yes, no")
    page.locator("form:visible").nth(2).locator("button").click()
    page.locator("[data-bar]").first.click()
    check_page(page, "answers")
    page.set_viewport_size({"width": 1200, "height": 844})
    check_page(page, "people, wide")
