"""Pages as a person sees them, in a real Chromium, on a phone and on a desk; see tests/test_explore.py."""

# ruff: noqa: F401, F811 # fixtures
import re
from contextlib import closing, contextmanager
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from causalqwen import Individual, Intervention, NumberPrediction, Observation, Question
from causalqwen.evaluation import plots
from causalqwen.evaluation.page import figure, number_row, write_page
from causalqwen.evaluation.portrait import write_portrait
from causalqwen.evaluation.survey_report import survey_report, write_survey_report
from causalqwen.evaluation.worlds import write_worlds
from causalqwen.modeling.worlds import world_numbers
from causalqwen.numbers import ValueLaw
from test_explore import SMALL, browser, fill, go_to, open_token, opened, write
from test_explore_people import SAID, add_text, model, read_text, server

LARGE = {"width": 1280, "height": 900}
SCREENS = pytest.mark.parametrize("screen", [SMALL, LARGE], ids=["phone", "desk"])
GAUSSIAN = ValueLaw(family="gaussian")


def law(loc, scale, num_prob=0.9):
    return NumberPrediction(loc, scale, num_prob, GAUSSIAN)


def answers():
    pandas = pytest.importorskip("pandas")
    rng = np.random.default_rng(0)
    table = pandas.DataFrame({
        "person": [f"somebody {n // 2}" for n in range(400)],
        "town": "Llanfairpwllgwyngyllgogerychwyrndrobwllllantysiliogogogoch",
        "salary": np.exp(rng.normal(10.5, 0.6, 400)),
        "minutes": 45 + 8 * rng.standard_cauchy(400),
        "children": rng.poisson(2, 400).astype(float),
        **{f"another rather long question {n}": rng.normal(size=400) for n in range(6)},
        "often": rng.choice(["never", "only on Sundays"], 400),
    })  # fmt: skip
    table.loc[0, "salary"] = 1e9
    named = [name for name in table.columns if name not in ("person", "town", "often")]
    return table, [*(Question("x", name=name) for name in named), Question("x", ("never", "only on Sundays"), "often")]


SCORES = {
    "median_error": 1506.2,
    "mae": 12345.6, "quantile_crps": 0.00123456, "log_score": -5.64, "numbers": 1200, "own_levels": True,
    "coverage": {"0.5": 0.6, "0.8": 0.88, "0.9": 0.92}, "coverage_raw": {"0.5": 0.6, "0.8": 0.88, "0.9": 0.92},
}  # fmt: skip
EXAMPLES = [
    number_row("The boiling point of water is …", 373.15, law(374.2, 20.0)),
    *(number_row(f"Row {n} …", 300.0 + 20 * n, law(310.0 + 20 * n, 15.0)) for n in range(5)),
    number_row("My salary is …", 52000.0, law(400.0, 30.0)),
    number_row("The weight is …", 1000123.25, law(1000122.0, 2.0)),
    number_row("It was fine and …", 373.15, law(9000.0, 4000.0)) | {"announced": False},
]


@pytest.fixture(scope="module")
def pages(model, tmp_path_factory):
    """All pages that the library writes to files, of awkward content."""
    folder = tmp_path_factory.mktemp("pages")
    metrics = SCORES | {"seconds": 90.0, "rivals": {"ridge": SCORES}}
    metrics["classes"] = {"the mass of the whole thing": SCORES, "price": SCORES}
    values = {"interval": torch.randn(90, 3)} | {name: torch.ones(90).double() for name in ("loc", "scale", "value")}
    drawn = plots.value_figures(GAUSSIAN, values, "K")
    world = dict.fromkeys(("prompt", "said", "unchanged", "edited_prompt", "edited"), "We have come a long way.")
    write_page(
        folder / "report.html", "demo.html", backbone="b", sizes={"train": 9999, "test": 9}, metrics=metrics, world=world,
        people=[{"seed": 1, "texts": ["a house", "a small town"]}], openings=["When I was", "The best thing"],
        examples=EXAMPLES, **drawn,
    )  # fmt: skip
    write_survey_report(folder / "survey.html", *answers())
    ann = model.abduct(SAID, likelihood="values", name="Ann")
    observed = Observation(" 12.5 people, then 31", "They say that")
    write_portrait(folder / "who.html", model, ann, [SAID], [("Bob", Individual.from_seed(4, 32))], [observed])
    edits = [Intervention(), Intervention(prompt="We say that"), Intervention(values={0: 12345.678})]
    cells = model.counterfactual_samples(observed, edits, individual=ann, seed=5)
    told = [[(world, world_numbers(model, world, ann)) for world in cell] for cell in cells]
    write_worlds(folder / "worlds.html", observed, edits, [("Ann", ann)], [told], "abduct")
    return folder


@contextmanager
def shown(browser, path, screen):
    """A page of a file, on a screen."""
    with closing(browser.new_context(viewport=screen)) as context:
        page = context.new_page()
        page.goto(path.as_uri())
        yield page


def in_view(page, part, whole=True):
    """Whether a part lies on the screen, or its beginning, and nothing over it."""
    return page.evaluate(
        """([part, whole]) => {
            const at = [...part.getClientRects()].at(-1); // a token may stand on two lines
            const top = document.elementFromPoint(at.left + at.width / 2, at.top + Math.min(at.height / 2, 8));
            return at.left >= 0 && at.right <= innerWidth + 0.5 && at.top >= -0.5 && at.top < innerHeight
                && (!whole || at.bottom <= innerHeight + 0.5) && (part.contains(top) || top?.contains(part));
        }""",
        [part.element_handle(), whole],
    )


def off_screen(page, parts):
    """The parts that a reader of this screen does not see without moving it sideways."""
    return page.locator(parts).evaluate_all(
        "them => them.filter(one => one.getBoundingClientRect().right > innerWidth || one.getBoundingClientRect().left < 0)"
        ".map(one => one.textContent)"
    )


@pytest.mark.slow
@SCREENS
@pytest.mark.parametrize("name", ["report", "survey", "who", "worlds"])
def test_a_page_is_as_wide_as_the_screen_and_its_numbers_are_for_people(browser, pages, screen, name):
    with shown(browser, pages / f"{name}.html", screen) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= screen["width"]
        assert not re.findall(r"\d[eE][+-]?\d+", page.inner_text("body"))
        assert not off_screen(page, "[data-values] td, [data-values] th")
        for button in page.locator("[data-value] button").all()[-2:]:
            button.click()
            assert in_view(page, button.locator("xpath=ancestor::table").locator("[data-law]"))
            assert page.evaluate("document.documentElement.scrollWidth") <= screen["width"]


@pytest.mark.slow
def test_numbers_on_pages_are_those_that_were_predicted_and_observed(browser, pages):
    with shown(browser, pages / "report.html", LARGE) as page:
        rows = page.locator("[data-value]").evaluate_all(
            "them => them.map(one => [...one.cells].map(cell => cell.innerText))"
        )
        told = [[cell.replace(",", "") for cell in cells[2:]] for cells in rows]
        assert told[0] == ["373.15", "374", "341 – 407"]
        assert told[6] == ["52000", "400", "350 – 449"] or told[6] == ["52000", "400", "351 – 449"]
        assert told[7] == ["1000123.25", "1000122.0", "1000118.7 – 1000125.3"]
        for one, cells in zip(EXAMPLES, told, strict=True):
            known = law(one["median"], (one["intervals"]["0.9"][1] - one["median"]) / 1.6448536).format(0.9)
            middle, low, high = re.fullmatch(r"(\S+) \(90%: (\S+?)(?:-| to )(\S+)\)", known.replace(",", "")).groups()
            assert [cells[1], *cells[2].split(" – ")] == [middle, low, high]
        text = page.inner_text("body")
        assert "12,346" in text and "0.001235" in text and "1506" in text


@pytest.mark.slow
def test_one_outlier_squeezes_no_other_row_and_is_an_arrow(browser, pages):
    with shown(browser, pages / "report.html", LARGE) as page:
        strips = page.locator("[data-value] svg")
        width = lambda row: float(strips.nth(row).locator(".band").get_attribute("width"))  # noqa: E731
        for row in range(6):
            assert width(row) > 15 and strips.nth(row).locator("[data-off]").count() == 0
            assert strips.nth(row).locator(".median").count() == strips.nth(row).locator("circle").count() == 1
        assert strips.nth(6).locator("[data-off]").get_attribute("data-off") == "value"  # 52,000
        assert strips.nth(7).locator("[data-off]").count() == 2  # median and value of a million
        page.locator("[data-value] button").nth(6).click()
        curve = page.locator("[data-law]")
        assert curve.locator("[data-beyond]").count() == 1 and "52,000" in curve.inner_html()
        assert float(page.locator("[data-law] [data-level='0.9']").get_attribute("width")) > 100


def test_a_curve_holds_its_intervals_and_no_value_that_would_squeeze_it():
    for loc, scale in ((350.0, 20.0), (-1e6, 3.0), (0.0, 1e-6)):
        known = law(loc, scale)
        for value in (None, loc + 3 * scale, loc + 1e6 * scale):
            curve = known.curve(50, value)
            assert curve[0][0] <= known.interval(0.9)[0] <= known.interval(0.9)[1] <= curve[-1][0]
            assert curve[-1][0] - curve[0][0] < 12 * scale
        assert known.curve(50, loc + 3 * scale)[-1][0] > loc + 3 * scale


@pytest.mark.slow
def test_what_is_not_announced_is_grey_and_says_so(browser, pages, server):
    with shown(browser, pages / "report.html", LARGE) as page:
        assert page.locator("tr.quiet").count() == page.get_by_text("no number is announced here").count() == 1
        assert page.locator("tr.quiet [data-off]").count()  # and it does not set the axis of the others
    with opened(browser, server, viewport=SMALL) as page:

        def unannounced(route):
            told = route.fetch().json()
            told["data"] = [one | {"announced": index != 1} for index, one in enumerate(told["data"])]
            route.fulfill(json=told)

        page.route("**/v1/numbers", unannounced)
        go_to(page, 1)
        page.locator("textarea:visible").fill("They say\nIt is\nWe are")
        page.get_by_role("button", name="Predict").click()
        page.locator("[data-median]").nth(2).wait_for()
        assert page.locator("tr.quiet").all_inner_texts()[0].count("no number is announced here") == 1
        assert page.locator("tr.quiet").count() == 1


class Silent(NumberPrediction):
    announced = False


def test_worlds_say_where_no_number_is_announced(model, tmp_path):
    ann, observed = Individual.from_seed(4, 32), Observation(" 12.5 people, then 31", "They say that")
    ((world,),) = model.counterfactual_samples(observed, [Intervention()], individual=ann, seed=5)
    first, second = world_numbers(model, world, ann)[:2]
    told = [
        replace(
            first, law=Silent(*(getattr(first.law, one.name) for one in fields(NumberPrediction) if not one.kw_only))
        ),
        second,
    ]
    write_worlds(tmp_path / "worlds.html", observed, [Intervention()], [("Ann", ann)], [[[(world, told)]]], "abduct")
    text = (tmp_path / "worlds.html").read_text(encoding="utf-8").split("<tbody>")[1].split("</tbody>")[0]
    assert re.findall(r"<small>\((.*?)\)</small>", text)[0] == "no number is announced here"


@pytest.mark.slow
@SCREENS
def test_what_a_press_opens_is_in_view(browser, server, screen):
    with opened(browser, server, viewport=screen) as page:
        write(page, "They say that -3.5 of the people who came here went on to count", tokens=120)
        tokens = page.locator("[data-text] span[role=button]")
        for place in (0, tokens.count() // 2, tokens.count() - 1):
            open_token(page, place)
            page.locator("[data-place] tbody tr").first.wait_for()
            assert in_view(page, page.locator("[data-place]"), whole=False)
            assert in_view(page, page.locator("[data-place] h2"))
            box = page.locator("[data-place]").bounding_box()
            assert box["y"] + box["height"] <= screen["height"] + 1
            assert in_view(page, page.locator("[data-text]:visible .opened"))
        go_to(page, 1)
        page.locator("textarea:visible").fill("\n".join(f"They say that {n} of the people" for n in range(14)))
        page.get_by_role("button", name="Predict").click()
        page.locator("[data-median]").nth(13).wait_for()
        assert not off_screen(page, "[data-median], [data-interval]")
        page.get_by_role("button", name="Draw the law of row 14").click()
        page.locator("[data-law]:visible").wait_for()
        assert in_view(page, page.locator("[data-law]:visible"))
        go_to(page, 3)
        add_text(page, SAID * 12, "Ann")
        page.get_by_role("button", name="Which words say most").click()
        words = page.locator("[data-text]:visible span[role=button]")
        words.first.wait_for()
        assert in_view(page, page.get_by_role("heading", name="Which words say most"))
        for place in (0, words.count() - 1):
            words.nth(place).click()
            assert in_view(page, page.locator("[data-word]"))
            assert in_view(page, page.locator("[data-text]:visible .opened"))
        view = page.get_by_role("region", name="Ask a population")
        fill(view, {"Question": "He said", "They answer with": "a number"}, "Ask them")
        page.locator("[data-asked]").wait_for()
        view.locator("[data-bar]").first.click()
        assert in_view(page, page.locator("[data-gave] h3"))
        assert page.evaluate("document.documentElement.scrollWidth") <= screen["width"]
        go_to(page, 4)
        read_text(page, text=" 12.5 people, then 31 of the men" * 8)
        parts = page.locator("[data-text]:visible span[role=button]")
        for place in (0, parts.count() - 1):
            parts.nth(place).click()
            assert in_view(page, page.get_by_role("button", name=re.compile("Set this number|Put these words")))
            assert in_view(page, page.locator("[data-text]:visible .opened"))


def test_bins_of_a_survey_are_round_and_an_outlier_has_one_of_its_own():
    table, questions = answers()
    bars = {one.name: one.bars for one in survey_report(table, questions).questions}
    assert bars["children"][:3] == [(str(n), float((table["children"] == n).mean())) for n in range(3)]
    for name in ("salary", "minutes", "children"):
        values, told = table[name].to_numpy(), dict(bars[name])
        assert sum(told.values()) == pytest.approx(1) and max(told.values()) < 0.7 and 5 <= len(told) <= 15
        for what, share in told.items():
            ends = [float(end.replace(",", "")) for end in re.findall(r"-?[\d,.]+", what)]
            low, high = (
                (-np.inf, ends[0]) if "less" in what else (ends[0], np.inf) if "more" in what else (ends[0], ends[-1])
            )
            inside = values == low if low == high else (low <= values) & (values < high)
            assert share == pytest.approx(inside.mean()), what
    outlier = ("120,000 or more", "130,000 or more", "140,000 or more", "150,000 or more")
    assert bars["salary"][-1][0] in outlier and bars["salary"][-1][1] < 0.05
    assert len(survey_report(table.assign(minutes=5.0), questions).questions[1].bars) == 1


@pytest.mark.parametrize("outlier", [None, 1e9])
def test_observed_values_are_not_squeezed_by_one(outlier):
    values = np.array([*np.linspace(300, 600, 11), *([outlier] if outlier else [])])
    axis = plots.plt.figure().subplots()
    plots.draw_predicted(axis, values, np.stack([values, values - 10, values + 10], 1), "K", 0.9)
    assert 200 < axis.get_xlim()[0] < 300 and 600 < axis.get_xlim()[1] < 700
    assert ("1 of 12 numbers lie outside" in axis.get_xlabel()) == (outlier is not None)
    plots.draw_predicted(axis, values[:1], values[None, [0, 0, 0]], "K", 0.9)  # of one value alone
    plots.plt.close("all")


def test_figures_of_pages():
    told = {
        1506.2: "1506", 12345.6: "12,346", 2.5e6: "2,500,000", 373.15: "373.1", 0.000123456: "0.0001235", 0.0: "0",
        -0.0001: "-0.0001", 9.99996: "10", -12.5: "-12.5", 1990.0: "1990",
    }  # fmt: skip
    assert {value: figure(value) for value in told} == told
    assert figure(373.15, 12) == "373.15" and figure(12345.678, 12) == "12,345.678" and figure(float("nan")) == "nan"
