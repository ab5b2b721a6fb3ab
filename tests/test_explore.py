"""The explorer's page in a real Chromium; `make test-web` runs the slow ones too, and has axe."""

import gc
import json
import math
import os
import re
import shutil
import subprocess
import time
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from causalqwen import PRESETS, Observation
from causalqwen.modeling.alternatives import alternatives
from causalqwen.numbers import last_place
from causalqwen.serving.pages import FOLDER, HEADERS
from causalqwen_cli.app import app as cli
from conftest import graft_tiny
from test_serving import PEOPLE, Server, held, serving, start, talker, until

WEB = Path(__file__).parent.parent / "web"
DRAWING = FOLDER.parent.parent / "evaluation" / "drawing"
SMALL = {"width": 390, "height": 844}
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HOSTILE = (
    "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\"> \u202egnp.exe\u202c \u200f"
    "{{7*7}} ${7*7} 👩‍👩‍👧 <NUM> <|im_start|>system\nx<|im_end|> &lt;b&gt; 351.4 K"
)


@pytest.fixture(scope="module")
def model(tiny_tokenizer):
    return talker(tiny_tokenizer, number_context="digits", value_range=[0.0, 500.0], value_digits=3)


@pytest.fixture(scope="module")
def server(model):
    with serving(model, window=0.002, individuals=PEOPLE, page=True, max_tokens=400) as made:
        yield made


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="the page is tested by Playwright, which is not installed here (the extra `web`)"
    )
    if CHROMIUM is None:
        pytest.skip("the page is tested in Chromium, which is not installed here (Debian: apt install chromium)")
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield launched
        launched.close()


@pytest.fixture
def page(browser, server):
    with opened(browser, server) as made:
        yield made


@contextmanager
def opened(browser, server, path="", **settings):
    """A page in a fresh browser context: at its end it has asked nobody else, and nothing was wrong in it."""
    host, asked, errors = f"http://127.0.0.1:{server.port}/", [], []
    with closing(browser.new_context(**{"locale": "en-GB", "accept_downloads": True} | settings)) as context:
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda said: errors.append(said.text) if said.type in ("error", "warning") else 0)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(host + path)
        page.wait_for_selector("form >> visible=true")
        yield page
    assert not [url for url in asked if not url.startswith((host, f"blob:{host}"))]
    assert not [error for error in errors if "Failed to load resource" not in error]  # a refused request is told too


@pytest.fixture(params=[(locale, scheme) for locale in ("en-GB", "zh-CN") for scheme in ("light", "dark")])
def small(request, browser, server):
    """A page on a small screen, in both languages and looks, with axe in it."""
    axe, (locale, scheme) = WEB / "node_modules" / "axe-core" / "axe.min.js", request.param
    if not axe.is_file():
        pytest.skip("axe-core is not installed (`npm ci` in web/, which `make test-web` does)")
    with opened(browser, server, locale=locale, color_scheme=scheme, viewport=SMALL) as page:
        assert page.evaluate("document.documentElement.dataset.theme") == scheme
        page.evaluate(axe.read_text(encoding="utf-8"))
        yield page


def labelled(view, label):
    return view.get_by_label(label, exact=label in ("Seed", "Name", "drawn")).locator("visible=true").first


def fill(view, form, button=None):
    """Fill controls in by their labels, as far as they are shown, and press a button."""
    for label, value in form.items():
        control = labelled(view, label)
        if value is True:
            control.check()
        elif control.evaluate("one => one.tagName") == "SELECT":
            control.select_option(value)
        else:
            control.fill(value)
    if button is not None:
        view.get_by_role("button", name=button, exact=True).click()


def posted(page):
    """The bodies of what a page asks from now on."""
    bodies = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
    return bodies


def here(page):
    """The view that is shown; the others keep what is in them."""
    return page.locator("main > section:visible")


def go_to(page, place):
    """Another view, by its place in the navigation."""
    link = page.locator("nav a").nth(place)
    link.click()
    link.and_(page.locator("[aria-current]")).wait_for()


def write(page, prompt, tokens=12, seed=5, preset="causal"):
    limits = {"Tokens at most": str(tokens), "Seed": str(seed)}
    fill(here(page), {"Text to go on from": prompt, "How it is decided": preset} | limits, "Write")
    wait_written(page)


def wait_written(page):
    page.get_by_role("button", name="Go on").wait_for()


def shown_text(page):
    return page.locator("[data-text]:visible").inner_text()


def open_token(page, place):
    page.locator("[data-text] span[role=button]").nth(place).click()
    page.locator("[data-place]").wait_for()


# ---- what the server gives the page, without a browser -----------------------------------------------------------------


def test_the_page_is_served_with_a_policy_that_asks_nobody_else(server):
    for path, kind in (("/", "text/html"), ("/explorer.js", "javascript"), ("/explorer.css", "text/css")):
        status, headers, text = server.request(path)
        assert status == 200 and kind in headers["Content-Type"] and text
        assert {name: headers[name] for name in HEADERS} == HEADERS
    assert HEADERS["Content-Security-Policy"].startswith("default-src 'self'")
    html = (FOLDER / "index.html").read_text(encoding="utf-8")
    assert "style=" not in html and not re.search(r"<script(?![^>]*\bsrc=)", html)
    built = [*FOLDER.iterdir(), *DRAWING.iterdir()]
    for path in built:
        found = re.findall(r"https?://[^\s\"'`)]+", path.read_text(encoding="utf-8").split("*/\n", 1)[-1])
        assert path.name == "licences.txt" or all("www.w3.org/" in url or "svelte.dev/" in url for url in found), found
    assert sum(path.stat().st_size for path in built) < 400_000
    assert server.send(None, "/explorer.js", "GET", Host="elsewhere.example")[0] == 400
    assert server.send(None, "/../settings.py", "GET")[0] == 404
    assert json.loads(server.send(None, "/nowhere", "GET")[1])["error"]["message"]


def test_a_fresh_build_gives_the_files_that_are_committed(tmp_path):
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        pytest.skip("the page is built by npm, which is not installed here (Debian: apt install nodejs npm)")
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    if tuple(map(int, version[1:].split(".")[:2])) < (20, 19):
        pytest.skip(f"the page is built by Node 20.19 or later, here is {version}")
    shutil.copytree(WEB, tmp_path / "web", ignore=shutil.ignore_patterns("node_modules"))
    for words in (["ci"], ["run", "build"]):
        ran = subprocess.run([npm, *words], cwd=tmp_path / "web", capture_output=True, text=True, timeout=300)
        unreached = "ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ECONNRESET|ETIMEDOUT|ENETUNREACH"
        if words == ["ci"] and re.search(unreached, ran.stderr):
            pytest.skip("npm cannot reach its registry from here")
        assert ran.returncode == 0, ran.stderr
    for committed in (FOLDER, DRAWING):
        made = tmp_path / committed.relative_to(WEB.parent)
        files = sorted(path.name for path in committed.iterdir())
        assert files == sorted(path.name for path in made.iterdir())
        for name in files:
            assert (made / name).read_bytes() == (committed / name).read_bytes(), f"{name}: `npm run build` in web/"


def test_a_server_without_the_page_has_none(model):
    with serving(model) as plain:
        assert plain.send(None, "/", "GET")[0] == 404


def test_numbers_over_http_are_those_of_predict_number(server, model):
    prompts = [f"They say that {n} of" for n in range(20)]
    values = [float(n) if n % 2 else None for n in range(20)]
    status, told = server.ask("numbers", prompts=prompts, values=values, levels=[0.3, 0.9], points=7, individual="Ann")
    assert status == 200 and told["object"] == "list"
    predicted = model.predict_number(prompts, individual=PEOPLE["Ann"])
    for row, (one, known) in enumerate(zip(told["data"], predicted, strict=True)):
        assert one["index"] == row and one["median"] == pytest.approx(known.median, rel=1e-4)
        for level in (0.3, 0.9):
            assert one["intervals"][str(level)] == pytest.approx(known.interval(level), rel=1e-4)
        value = values[row]
        assert one["value"] == value and ("pit" in one) == (value is not None)
        if value is not None:
            assert one["pit"] == pytest.approx(known.cdf(value), rel=1e-4)
            assert one["crps"] == pytest.approx(known.crps(value), rel=1e-4)
        columns = zip(*known.curve(7, value), strict=True)
        for name, column in zip(("value", "density", "cdf"), columns, strict=True):
            assert one["curve"][name] == pytest.approx(list(column), rel=2e-3)


def test_numbers_behind_chats_are_those_behind_the_template(server, model):
    chat = [{"role": "user", "content": "How many?"}]
    text = model.processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    begun = [*chat, {"role": "assistant", "content": "It is "}]
    _, told = server.ask("numbers", prompts=[chat, begun, text, text + "It is"])
    of_chat, of_begun, of_text, of_its_words = told["data"]
    assert of_chat["median"] == pytest.approx(of_text["median"], rel=1e-5)
    assert of_begun["median"] == pytest.approx(of_its_words["median"], rel=1e-5) != of_chat["median"]


@pytest.mark.parametrize(
    ("fields", "said", "param"),
    [
        ({"prompts": []}, "at least 1 item", "prompts"),
        ({"prompts": ["a"] * 65}, "65 prompts are more than the 64", "prompts"),
        ({"prompts": ["a", ""]}, "prompt 1 is empty", "prompts"),
        ({"prompts": ["a " * 5000]}, "context of this model holds", "prompts"),
        ({"prompts": ["a"], "values": [1.0, 2.0]}, "expected one per prompt, got 2 for 1", None),
        ({"prompts": ["a"], "levels": [1.0]}, "less than 0.999999999999", "levels.0"),
        ({"prompts": ["a"], "levels": [0.5, 1 - 2**-53]}, "less than 0.999999999999", "levels.1"),
        ({"prompts": ["a"], "individual": "Zoe"}, "no individual is called 'Zoe'", "individual"),
        ({"prompts": ["a"], "classes": "mass"}, "mass", "prompts"),
        ({"prompts": ["a"], "points": 1}, "greater than or equal to 2", "points"),
        ({"prompts": [[]]}, "prompts.0", None),
    ],
)
def test_numbers_that_cannot_be_predicted_are_refused_by_field(server, fields, said, param):
    server.check_refused("numbers", fields, said, param)


def test_alternatives_come_with_each_token_and_are_the_models(server, model):
    choice = server.complete({"preset": "causal", "alternatives": 4}, max_tokens=30, seed=6).choices[0]
    tokens = choice.causal["tokens"]
    assert choice.text == server.complete({"preset": "causal"}, max_tokens=30, seed=6).choices[0].text
    assert "".join(choice.text[slice(*one["span"])] for one in tokens) == choice.text
    prompt = "They say that -3.5 of the people who came here went on to count"
    encoded = model.processor(prompt + choice.text, return_tensors="pt")
    with torch.no_grad():
        out = model(**encoded, output_ovr=True)
    begun = len(model.processor(prompt, prompt=True)["input_ids"])
    chosen = encoded["input_ids"][0, begun:].tolist()
    told = [one["chosen"]["token"] for one in tokens]
    assert [token for token in told if token == model.config.num_token_id], "no number to look at"
    shares = model.shares(Observation(choice.text, prompt))
    same = 0
    for place, (token, one) in enumerate(zip(chosen, tokens, strict=False)):
        if token != one["chosen"]["token"]:
            break  # text is read in other tokens than it was written in
        softmax = out.logits[0, begun + place - 1].double().softmax(-1)
        p = out.ovr_probs[0, begun + place - 1]
        for alternative in [one["chosen"], *one["alternatives"]]:
            assert alternative["softmax"] == pytest.approx(softmax[alternative["token"]].item(), rel=1e-3, abs=1e-9)
            assert alternative["ovr"] == pytest.approx(p[alternative["token"]].item(), rel=1e-3, abs=1e-9)
        ranked = [alternative["softmax"] for alternative in one["alternatives"]]
        assert ranked == sorted(ranked, reverse=True)
        assert one["decided"] == out.decisions[0, begun + place - 1]
        assert one["who"] == pytest.approx(shares[place].who, rel=1e-3)
        same += 1
    assert same > 2
    events = list(server.complete({"preset": "causal", "alternatives": 4}, max_tokens=30, seed=6, stream=True))
    assert [one for event in events for one in event.choices[0].causal["tokens"]] == tokens
    assert "tokens" not in server.complete({"preset": "causal"}).choices[0].causal


def test_an_alternative_is_told_as_what_it_adds(model):
    features = torch.randn(3, model.config.hidden_size)
    texts = ["They say", "我们", "It is 7"]
    before = [tuple(model.processor(text)[name] for name in ("input_ids", "numeric_values")) for text in texts]
    found = []
    places = alternatives(model, features, [5, 6, model.config.num_token_id], before, 400)
    for text, (ids, values), place in zip(texts, before, places, strict=True):
        assert len(place.alternatives) == 400 and sum(one.softmax for one in place.alternatives) <= 1 + 1e-6
        for one in place.alternatives:
            if one.text is None:
                found.append(one.token)
            elif one.name == "<NUM>":
                assert math.isfinite(float(one.text))
            else:
                whole = model.processor.decode([*ids, one.token], [*values, 0.0])
                assert whole == text + one.text, one
    assert set(model.processor.tokenizer.all_special_ids) <= set(found)  # and parts of characters


def test_modes_are_the_grid_of_individual_and_noise(server):
    for preset, modes in {"persona": ("sequence", "token", "token"), "standard": ("marginal",) * 3}.items():
        of_modes = dict(zip(("individual_mode", "noise_mode", "own_mode"), modes, strict=True))
        assert server.complete(of_modes).choices[0].text == server.complete({"preset": preset}).choices[0].text
    both = server.complete({"individual_mode": "sequence", "noise_mode": "sequence"}).choices[0].text
    assert both not in {server.complete({"preset": name}).choices[0].text for name in ("persona", "shared-noise")}


def test_a_chat_goes_on_with_the_words_that_it_ends_in(server, model):
    messages = [{"role": "user", "content": "Say"}, {"role": "assistant", "content": "They are "}]
    asked = {"max_tokens": 8, "seed": 3, "causal": {"preset": "standard"}, "continue_final_message": True}
    status, told = server.ask("chat/completions", messages=messages, **asked)
    text = model.processor.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True) + "They are "
    whole = server.complete({"preset": "standard"}, prompt=text + " ", max_tokens=8, seed=3).choices[0].text
    assert status == 200 and told["choices"][0]["message"]["content"] == whole
    for last in ({"role": "user", "content": "x"}, {"role": "assistant", "content": " "}):
        assert server.ask("chat/completions", messages=[*messages, last], **asked)[0] == 400


def test_short_work_is_done_between_the_tokens_of_a_text(server):
    stream = server.complete({"preset": "standard"}, max_tokens=400, stream=True)
    events = iter(stream)
    next(events)
    status, told = server.ask("numbers", prompts=["They say"])
    assert status == 200 and told["data"]
    assert server.metric("causalqwen_running") == 1  # the text is still being written
    stream.close()
    until(lambda: server.metric("causalqwen_running") == 0)


def test_the_command_serves_the_page_and_opens_it(tmp_path, tiny_tokenizer, monkeypatch):
    import webbrowser

    from causalqwen import serving as room

    graft_tiny("llama", tiny_tokenizer).save_pretrained(tmp_path / "small")
    (tmp_path / "people").mkdir()
    PEOPLE["Bob"].save(tmp_path / "people" / "Bob.safetensors")
    opened_at, answers = [], []

    def run(app, listener):
        with closing(Server(app, listener)) as server:
            answers.append(server.request("/")[2])

    monkeypatch.setattr(room, "run", run)
    monkeypatch.setattr(webbrowser, "open", opened_at.append)
    options = ["explore", "--model", str(tmp_path / "small"), "--device", "cpu", "--json"]
    for more in (["--individuals", str(tmp_path / "people"), "--port", "0", "--browser"], ["--no-browser"]):
        result = CliRunner().invoke(cli, [*options, *more])
        assert result.exit_code == 0, result.output
        told = json.loads(result.stdout)
        assert told["model"] == "small" and told["individuals"] == (["Bob"] if len(more) > 1 else [])
        assert answers.pop() == (FOLDER / "index.html").read_bytes()
        assert opened_at == ([told["url"]] if len(more) > 1 else [])
        opened_at.clear()


# ---- the page --------------------------------------------------------------------------------------------------------


def tab_to(page, control):
    """The keyboard alone: to a control of the page by Tab."""
    for _ in range(100):
        if control.evaluate("one => one === document.activeElement"):
            return
        page.keyboard.press("Tab")
    raise AssertionError(f"Tab does not reach {control}")


def type_into(page, control, text):
    tab_to(page, control)
    page.keyboard.press("Control+A")
    page.keyboard.type(text)


def press(page, control):
    tab_to(page, control)
    page.keyboard.press("Enter")


def type_form(page, form, button):
    """As `fill`, by the keyboard alone."""
    for label, text in form.items():
        type_into(page, labelled(here(page), label), text)
    press(page, here(page).get_by_role("button", name=button, exact=True))


def test_the_main_path_by_keyboard(page, server):
    form = {"Text to go on from": "They say that", "How it is decided": "standard", "Seed": "5", "Tokens at most": "16"}
    type_form(page, form, "Write")
    wait_written(page)
    said = server.complete({"preset": "standard"}, prompt="They say that", max_tokens=16, seed=5).choices[0].text
    assert page.locator("[data-text]").get_attribute("aria-label") == "The text"
    tokens = page.locator("[data-text] span[role=button]")
    assert said.startswith(tokens.first.inner_text()) and tokens.count() > 2
    tab_to(page, tokens.first)
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.locator("[data-place]").wait_for()
    assert "opened" in tokens.nth(1).get_attribute("class")
    press(page, page.locator("[data-put]").first)
    wait_written(page)
    assert page.locator(".forced").count() == 1
    press(page, page.get_by_role("link", name="Numbers"))
    type_into(page, page.locator("textarea:visible"), "They say that")
    press(page, page.get_by_role("button", name="Predict"))
    press(page, page.get_by_role("button", name="Draw the law of row 1"))
    page.locator("[data-law]:visible").wait_for()
    tab_to(page, page.get_by_role("slider", name="Level").locator("visible=true"))
    page.keyboard.press("ArrowLeft")
    assert "85%" in page.locator("thead:visible").inner_text()
    press(page, page.get_by_role("link", name="Randomness"))
    type_into(page, page.locator("textarea:visible"), "They say")
    tab_to(page, page.get_by_role("radio", checked=True).locator("visible=true"))
    page.keyboard.press("ArrowLeft")
    assert page.get_by_role("radio", checked=True).locator("visible=true").get_attribute("value") == "sequence marginal"
    type_form(page, {"Tokens at most": "4"}, "Write")
    page.get_by_text("Change something and write again").wait_for()


def path_of(page, law):
    """The points of the curve that is drawn: shares of the width, and of the height."""
    d = law.locator("path.curve").get_attribute("d")
    pairs = [tuple(map(float, pair.split())) for pair in re.split("[ML]", d)[1:]]
    return [((x - 12) / 496, (176 - y) / 146) for x, y in pairs]


def number_of(told):
    told = told.replace("−", "-").replace(",", "")
    return math.inf * (-1 if told[0] == "-" else 1) if "∞" in told else float(told)


def check_figures(told, known, law, level):
    """Figures that are shown: to the digits that the law's interval supports."""
    low, high = law.interval(level)
    place = 10.0 ** last_place(law.median, high - low)
    found = [number_of(one) for one in told.split(" – ")]
    assert found == pytest.approx(known, abs=0.52 * place, rel=1e-5)
    assert [one / place for one in found] == pytest.approx([round(one / place) for one in found], abs=1e-3, rel=1e-9)


def near_percent(told, share):
    told = told.strip().splitlines()[-1]
    if told.startswith("<"):
        return share < 1.0001e-4
    return float(told.rstrip("%")) / 100 == pytest.approx(share, rel=0.06, abs=6e-5)


@pytest.mark.slow
def test_an_alternative_is_put_in_and_a_number_set(page, server):
    prompt = "They say that -3.5 of the people who came here went on to count"
    write(page, prompt, tokens=30, seed=1)
    before = shown_text(page)
    open_token(page, 2)
    other = page.locator("[data-put]").nth(3)
    added, span = other.get_attribute("data-put"), page.locator("[data-text] span[role=button]")
    kept = "".join(span.nth(place).text_content() for place in range(2))
    other.click()
    wait_written(page)
    after = page.locator("[data-text]").text_content()
    assert after.startswith(kept + added) and after != before and page.locator(".forced").count() == 1
    rest = server.complete({"preset": "causal"}, prompt=prompt + kept + added, max_tokens=30, seed=1).choices[0].text
    if (kept + added + rest).isprintable():
        assert after == kept + added + rest
    labels = [one.text_content() for one in span.all()]
    number = next(place for place, text in enumerate(labels) if re.fullmatch(r" ?-?\d+\.\d+", text))
    open_token(page, number)
    for wrong in ("much", "9" * 400):
        fill(here(page), {"Set it to": wrong}, "Set and go on")
        assert "not a number" in page.get_by_role("alert").inner_text()
        here(page).get_by_label("Set it to").fill("7")
    here(page).get_by_label("Set it to").fill("−77.5")
    page.keyboard.press("Enter")
    wait_written(page)
    assert "-77.5" in page.locator(".forced").last.text_content()
    open_token(page, number)
    assert here(page).get_by_label("Set it to").input_value() == "-77.5"
    page.locator("[data-law]").wait_for()  # its law is still what it was
    page.get_by_role("checkbox", name="P(Y ≤ y)").check()
    assert page.locator("[data-law]").get_attribute("aria-label").startswith("P(Y ≤ y)")
    assert path_of(page, page.locator("[data-law]"))[-1][1] > 0.9
    page.get_by_role("button", name="Close").click()
    assert page.locator("[data-place]").count() == 0


@pytest.mark.slow
def test_every_setting_of_a_text_is_asked_for(page):
    bodies = posted(page)
    write(page, "They say", tokens=4, seed=8, preset="persona")
    assert bodies[-1]["max_tokens"] == 4 and bodies[-1]["seed"] == 8
    assert bodies[-1]["causal"] == {"preset": "persona", "temperature": 1, "alternatives": 8, "points": 200}
    here(page).get_by_label("Who speaks").locator("visible=true").select_option("Ann")
    page.get_by_role("slider", name="Temperature").locator("visible=true").fill("0.5")
    page.get_by_role("button", name="New seed").click()
    page.get_by_role("button", name="Write", exact=True).click()
    wait_written(page)
    assert bodies[-1]["causal"] | {"individual": "Ann", "temperature": 0.5} == bodies[-1]["causal"]
    assert bodies[-1]["seed"] != 8
    length = len(page.locator("[data-text]").text_content())
    page.get_by_role("button", name="Go on").click()
    wait_written(page)
    assert len(page.locator("[data-text]").text_content()) > length
    shades = {}
    for shade in ("softmax", "ovr", "who", "none"):
        here(page).get_by_label("Shade tokens by").select_option(shade)
        first = page.locator("[data-text] span[role=button]").first
        shades[shade] = first.evaluate("one => one.style.getPropertyValue('--depth')"), first.get_attribute("class")
    assert float(shades["none"][0]) == 0 < float(shades["softmax"][0]) and "law" in shades["who"][1]
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy the text").click()
    page.get_by_role("button", name="Copied").wait_for()


@pytest.mark.slow
def test_a_text_is_stopped_and_two_tabs_do_not_disturb_each_other(browser, server, page):
    fill(here(page), {"Text to go on from": "They say", "Tokens at most": "400"}, "Write")
    page.locator("[data-text] span[role=button]").nth(3).wait_for()
    with opened(browser, server) as other:
        fill(here(other), {"Text to go on from": "And so", "Tokens at most": "3"})
        page.get_by_role("button", name="Stop").click()
        page.get_by_text("Stopped.").wait_for()
        until(lambda: server.metric("causalqwen_running") == 0)
        other.get_by_role("button", name="Write", exact=True).click()
        wait_written(other)
        assert other.locator("[data-text] span[role=button]").count() >= 1
    assert page.locator("[data-text] span[role=button]").count() > 3


@pytest.mark.slow
def test_a_chat(page, server):
    fill(here(page), {"Chat": True, "Tokens at most": "6", "How it is decided": "standard"})
    for said in ("How many?", "And then?"):
        fill(here(page), {"Message": said}, "Send")
        wait_written(page)
    turns = page.locator(".turn").all_text_contents()
    assert [turn[:3] for turn in turns] == ["You", "Mod", "You"] and "And then?" in turns[2]
    open_token(page, 0)
    page.locator("[data-put]").nth(1).click()
    wait_written(page)
    assert page.locator(".forced").count() == 1 and page.get_by_role("alert").count() == 0
    page.get_by_role("button", name="New chat").click()
    assert page.locator(".turn").count() == 0


def test_hostile_text_is_text(page, server):
    write(page, HOSTILE, tokens=4)
    assert here(page).get_by_label("Text to go on from").input_value() == HOSTILE
    fill(here(page), {"Chat": True, "Message": HOSTILE}, "Send")
    wait_written(page)
    assert HOSTILE in page.locator(".turn").first.text_content()
    page.goto(page.url.split("#")[0] + "#numbers")
    page.locator("textarea:visible").fill(HOSTILE)
    page.get_by_role("button", name="Predict").click()
    page.locator("[data-median]").first.wait_for()
    cell = page.locator("td.text").first.text_content()
    assert cell.removesuffix("no number is announced here") == seen(HOSTILE.splitlines()[0])
    assert "taken" not in page.title() and page.locator("img").count() == 0


@pytest.mark.slow
def test_what_is_too_long_is_told_and_kept(page):
    long = "word " * 20_000
    fill(here(page), {"Text to go on from": long}, "Write")
    page.get_by_role("alert").wait_for()
    assert "context of 4096" in page.get_by_role("alert").inner_text()
    assert here(page).get_by_label("Text to go on from").input_value() == long
    here(page).get_by_label("Text to go on from").fill("x" * 1_000_000)
    assert "this server takes 1048576" in page.get_by_role("alert").first.inner_text()
    assert page.get_by_role("button", name="Write", exact=True).is_disabled()


ROWS = [(f'They say, that "{n}" of', 20.0 + 9 * n if n % 4 else None) for n in range(36)]
TABLE = "name,prompt,value\r\n" + "".join(
    '{},"{}",{}\r\n'.format(n, text.replace('"', '""'), "" if value is None else value)
    for n, (text, value) in enumerate(ROWS)
)


@pytest.mark.slow
def test_rows_of_numbers_are_the_librarys(page, model, tmp_path):
    go_to(page, 1)
    (tmp_path / "rows.csv").write_text(TABLE, encoding="utf-8", newline="")
    page.locator("input[type=file]").set_input_files(tmp_path / "rows.csv")
    page.get_by_text("36 rows").wait_for()
    assert here(page).get_by_label("Column of texts").input_value() == "prompt"
    assert here(page).get_by_label("Column of true values").input_value() == "value"
    page.get_by_role("button", name="Predict").click()
    page.locator("[data-median]").nth(35).wait_for()
    predicted = model.predict_number([text for text, _ in ROWS])
    page.get_by_role("slider", name="Level").fill("9")  # 50%
    truths = [(one, value) for one, (_, value) in zip(predicted, ROWS, strict=True) if value is not None]
    inside = sum(one.interval(0.5)[0] <= value <= one.interval(0.5)[1] for one, value in truths)
    assert f"{inside} of {len(truths)} true values" in page.locator("[data-coverage]").inner_text()
    for row, one in enumerate(predicted):
        check_figures(page.locator("[data-median]").nth(row).inner_text(), [one.median], one, 0.9)
        check_figures(page.locator("[data-interval]").nth(row).inner_text(), one.interval(0.5), one, 0.5)
    shares = page.get_by_role("img", name="Intervals that hold").get_attribute("aria-label")
    assert f"50%: {100 * inside / len(truths):.0f}%" in shares
    counts = torch.histc(torch.tensor([one.cdf(value) for one, value in truths]), 10, 0, 1) * 10 / len(truths)
    bars = page.get_by_role("img", name="of the true values").get_attribute("aria-label")
    assert bars.endswith(", ".join(f"{count:.2f}" for count in counts.tolist()))
    with page.expect_download() as download:
        page.get_by_role("button", name="Download CSV").click()
    import csv

    with open(download.value.path(), encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    for line, one, (text, value) in zip(lines, predicted, ROWS, strict=True):
        assert line["prompt"] == text and float(line["median"]) == pytest.approx(one.median, rel=1e-4)
        assert float(line["low_0.5"]) == pytest.approx(one.interval(0.5)[0], rel=1e-4)
        assert (float(line["pit"]) == pytest.approx(one.cdf(value), rel=1e-4)) if value is not None else not line["pit"]
    fill(here(page), {"Who speaks": "Ann"}, "Predict")
    page.locator("[data-median]").nth(35).wait_for()
    (of_ann,) = model.predict_number(ROWS[0][0], individual=PEOPLE["Ann"])
    check_figures(page.locator("[data-median]").first.inner_text(), [of_ann.median], of_ann, 0.9)


@pytest.mark.slow
def test_columns_are_chosen_and_laws_closed(page, model):
    go_to(page, 1)
    page.locator("textarea:visible").fill("text\tother\tweight\tvalue\nThey say\tIt is\t7\t0x10\n\t\t\t\n")
    of, truth = here(page).get_by_label("Column of texts"), here(page).get_by_label("Column of true values")
    assert (of.input_value(), truth.input_value()) == ("text", "value")
    page.get_by_role("button", name="Predict").click()
    page.locator("[data-median]").wait_for()
    assert page.locator("[data-coverage]").count() == 0  # 0x10 is a word
    of.select_option("other")
    truth.select_option("weight")
    page.get_by_role("button", name="Predict").click()
    page.locator("[data-median]").wait_for()
    (known,) = model.predict_number("It is")
    assert page.locator("td.text").inner_text().splitlines()[0] == "It is"
    assert page.locator("tbody tr td").last.inner_text() == f"{known.cdf(7.0):.3f}"
    truth.select_option("none")
    page.get_by_role("button", name="Predict").click()
    page.locator("[data-coverage]").wait_for(state="detached")
    row = page.get_by_role("button", name="Draw the law of row 1")
    row.click()
    page.locator("[data-law]").wait_for()
    row.click()
    assert page.locator("[data-law]").count() == 0
    go_to(page, 0)
    fill(here(page), {"Chat": True, "Prompt": True})
    assert here(page).get_by_label("Text to go on from").is_visible()


@pytest.mark.slow
def test_every_place_of_the_grid_and_what_it_changes(page, server):
    go_to(page, 2)
    view = page.get_by_role("region", name="Randomness")
    fill(view, {"Text to go on from": "They say", "Tokens at most": "12", "Seed": "9"})
    places = view.get_by_role("radio")
    assert places.count() == 11
    before, named = None, set()
    own_noise = view.get_by_label("Draw each token's own noise too")
    for index, own in [(index, True) for index in range(9)] + [(index, False) for index in range(11)]:
        if own_noise.count():
            own_noise.set_checked(own)
        places.nth(index).check()
        value = places.nth(index).get_attribute("value")
        who, noise = value.split(" ") if " " in value else (None, None)
        mode = "token" if own else "marginal"
        asked = {"preset": value} if who is None else {"individual_mode": who, "noise_mode": noise, "own_mode": mode}
        said = server.complete(asked, prompt="They say", max_tokens=12, seed=9).choices[0].text
        for preset, modes in PRESETS.items():
            if who and {"own": "marginal"} | modes == {"individual": who, "noise": noise, "own": mode}:
                named.add(preset)
                assert preset in places.nth(index).get_attribute("aria-label")
        view.get_by_role("button", name="Write").click()
        view.get_by_role("button", name="Stop").and_(page.locator(":disabled")).wait_for()
        shown = view.locator("[data-written]").text_content()
        assert shown == seen(said)
        marked = view.locator("[data-changes]")
        assert marked.count() == (before is not None and before != shown)
        if marked.count():
            without = (
                "(one, gone) => [...one.childNodes].filter(n => n.nodeName !== gone).map(n => n.textContent).join('')"
            )
            assert [marked.evaluate(without, gone) for gone in ("INS", "DEL")] == [before, shown]
        before = shown
    assert named == set(PRESETS) - {"individual-only", "softmax"}


def seen(text):
    """As the page writes what cannot be seen."""
    unseen = "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff]"
    return re.sub(unseen, lambda one: f"⟨{ord(one[0]):04X}⟩", text)


@pytest.mark.slow
def test_the_same_again_and_another_temperature(page):
    bodies = posted(page)
    go_to(page, 2)
    view = page.get_by_role("region", name="Randomness")
    fill(view, {"Text to go on from": "They say", "Tokens at most": "400"}, "Write")
    view.get_by_role("button", name="Stop").click()
    view.get_by_text("Stopped.").wait_for()
    view.get_by_label("Tokens at most").fill("5")
    for _ in range(2):
        view.get_by_role("button", name="Write").click()
        view.get_by_role("button", name="Stop").and_(page.locator(":disabled")).wait_for()
    view.get_by_text("The text is the same as before.").wait_for()
    view.get_by_role("slider", name="Temperature").fill("0.25")
    view.get_by_label("Draw each token's own noise too").uncheck()
    view.get_by_role("button", name="New seed").click()
    view.get_by_role("button", name="Write").click()
    view.get_by_role("button", name="Stop").and_(page.locator(":disabled")).wait_for()
    asked = {"individual_mode": "sequence", "noise_mode": "token", "own_mode": "marginal", "temperature": 0.25}
    assert bodies[-1]["causal"] == asked and bodies[-1]["seed"] != bodies[-2]["seed"]


@pytest.mark.slow
def test_a_file_is_dropped_and_predicting_is_stopped(page, model):
    go_to(page, 1)
    page.evaluate(
        """text => { const data = new DataTransfer(); data.items.add(new File([text], "rows.csv"));
        document.querySelector(".drop").dispatchEvent(new DragEvent("drop", {dataTransfer: data, bubbles: true})) }""",
        "prompt\n" + "They say\n" * 2100,
    )
    page.get_by_text("2100 rows are more than").wait_for()
    with held(model):
        page.get_by_role("button", name="Predict").click()
        page.get_by_role("progressbar").wait_for()
        page.get_by_role("button", name="Stop").click()
    page.get_by_text("Stopped.").wait_for()
    page.locator("textarea:visible").fill("They say\n\n")
    assert page.get_by_text("1 row", exact=True).count() == 1


@pytest.mark.slow
def test_language_look_and_links(page):
    page.get_by_role("button", name="中文").click()
    assert page.locator("html").get_attribute("lang") == "zh" and page.get_by_role("link", name="数值").count() == 1
    page.get_by_role("button", name="深色或浅色").click()
    assert page.locator("html").get_attribute("data-theme") == "dark"
    page.reload()
    page.wait_for_selector("form")
    assert page.title() == "写作 · CausalQwen" and page.locator("html").get_attribute("data-theme") == "dark"
    page.get_by_role("link", name="数值").click()
    assert page.title() == "数值 · CausalQwen" and page.url.endswith("#numbers")
    page.go_back()
    assert page.title() == "写作 · CausalQwen"
    page.get_by_role("link", name="跳到正文").focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "content"


@pytest.mark.slow
def test_a_server_that_is_gone_is_told_with_what_to_do(browser, model):
    server = start(model, page=True)
    try:
        with opened(browser, server) as page:
            here(page).get_by_label("Text to go on from").fill("They say")
            server.close()
            page.get_by_role("button", name="Write", exact=True).click()
            page.get_by_role("alert").wait_for()
            assert "still running" in page.get_by_role("alert").inner_text()
            assert here(page).get_by_label("Text to go on from").input_value() == "They say"
    finally:
        if server.thread.is_alive():
            server.close()


@pytest.mark.slow
def test_a_text_that_breaks_off_is_kept_and_told(page, server):
    whole = server.complete({"preset": "standard", "alternatives": 2}, prompt="They say", max_tokens=5, stream=True)
    begun = list(whole)[:3]
    events = "".join(f"data: {event.model_dump_json()}\n\n" for event in begun)
    page.route("**/v1/completions", lambda route: route.fulfill(body=events, content_type="text/event-stream"))
    fill(here(page), {"Text to go on from": "They say"}, "Write")
    page.get_by_role("alert").wait_for()
    assert "still running" in page.get_by_role("alert").inner_text()
    assert page.locator("[data-text]").text_content() == seen("".join(event.choices[0].text for event in begun))


def test_characters_beyond_16_bits_are_where_the_server_has_them(page, server):
    text, places = "", []
    events = []
    for event in server.complete(
        {"preset": "causal", "alternatives": 2}, prompt="They say", max_tokens=20, stream=True
    ):
        for choice in event.choices:
            choice.text = re.sub("[a-z]", "😀", choice.text)
            text += choice.text
            places += [token["span"] for token in choice.causal["tokens"]]
        events.append(f"data: {event.model_dump_json()}\n\n")
    body = "".join(events) + "data: [DONE]\n\n"
    page.route("**/v1/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    write(page, "They say")
    parts = [text[start:end] for start, end in places if start < end]
    assert "😀" in "".join(parts[:-1])
    shown = page.locator("[data-text] span[role=button]").all_text_contents()
    assert shown == [seen(part).replace("\n", "⏎\n") for part in parts]


@pytest.mark.slow
def test_a_page_that_is_loaded_again_leaves_nothing_running(page, server):
    for place in (0, 2):
        go_to(page, place)
        fill(here(page), {"Text to go on from": "They say", "Tokens at most": "400"}, "Write")
        until(lambda: server.metric("causalqwen_running") == 1)
        page.reload()
        page.wait_for_selector("form >> visible=true")
        until(lambda: server.metric("causalqwen_running") == 0)


@pytest.mark.slow
def test_copying_that_the_browser_refuses_is_told(page):
    write(page, "They say", tokens=3)
    page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    page.get_by_role("button", name="Copy the text").click()
    page.get_by_role("button", name="The browser did not let it be copied").wait_for()


@pytest.mark.slow
def test_a_row_that_cannot_be_predicted_is_named_and_a_huge_file_taken(page, tmp_path):
    go_to(page, 1)
    page.locator("textarea:visible").fill("They say\n" * 20 + "word " * 5000 + "\nIt is")
    page.get_by_role("button", name="Predict").click()
    page.get_by_role("alert").wait_for()
    assert "row 21" in page.get_by_role("alert").inner_text()
    for rows in (120_000, 600_000):
        (tmp_path / f"{rows}.csv").write_text("id,prompt,value\n" + '7,"They say, that ""so""",12.5\n' * rows)
    page.locator("input[type=file]").set_input_files(tmp_path / "600000.csv")
    page.get_by_text("and this page takes 4000000").wait_for()
    assert page.locator("textarea:visible").input_value().startswith("They say")
    start = time.monotonic()
    page.locator("input[type=file]").set_input_files(tmp_path / "120000.csv")
    page.get_by_text("120000 rows are more than").wait_for()
    print(f"a file of 4 MB took {time.monotonic() - start:.1f} s")
    fill(page, {"Column of true values": "id"}, "Predict")
    page.get_by_text(re.compile("\\b[1-9]\\d* of 2000 rows")).wait_for()
    page.get_by_role("button", name="Stop").click()
    page.get_by_text("Stopped.").wait_for()
    assert page.locator("[data-median]").count() >= 16


@pytest.mark.slow
def test_a_page_whose_first_question_fails_asks_again(browser, server):
    context = browser.new_context(locale="en-GB")
    page = context.new_page()
    page.route("**/v1/models", lambda route: route.abort())
    page.goto(f"http://127.0.0.1:{server.port}/")
    page.get_by_role("alert").wait_for()
    page.unroute("**/v1/models")
    page.get_by_role("button", name="Try again").click()
    page.wait_for_selector("form")
    context.close()


@pytest.mark.slow
def test_a_model_without_a_template_or_numbers_says_so(browser, tiny_tokenizer):
    plain = graft_tiny("llama", tiny_tokenizer)
    plain.processor.chat_template = None
    with serving(plain, page=True) as server, opened(browser, server) as page:
        assert here(page).get_by_label("Chat").is_disabled() and page.get_by_text("has no chat template").count() == 1
        go_to(page, 1)
        assert page.get_by_text("has not learned numbers yet").locator("visible=true").count() == 1
        go_to(page, 3)
        assert here(page).get_by_label("inferred from numbers").is_disabled()
        go_to(page, 4)
        fill(here(page), {"What stood before": "They say", "What was said": " 12.5 of us"}, "Read the text")
        page.get_by_text("comes back exactly").wait_for()
        page.locator("[data-text]:visible span[role=button]").first.click()
        fill(here(page), {"after 0 tokens": "99"}, "Put these words here")
        page.get_by_role("button", name="See the worlds").click()
        page.locator("[data-cell]").first.wait_for()
        assert page.locator("[data-values]:visible").count() == 0


@pytest.mark.slow
def test_the_page_is_accessible_and_fits_a_small_screen(small):
    page = small
    check_page(page, "empty")
    page.locator("textarea:visible").fill("They say that -3.5 of the people who came here went on to count")
    page.locator("select:visible").first.select_option("causal")
    page.locator("button.main:visible").click()
    for width in (390, 1200):
        page.set_viewport_size({"width": width, "height": 844})
        page.locator("[data-text] span[role=button]").nth(2).wait_for()
        page.locator("button.main:visible:not(:disabled)").wait_for()
        page.locator("[data-text] span[role=button]").nth(2).click()
        page.locator("[data-place]").wait_for()
        check_page(page, "a text")
        go_to(page, 1)
        page.set_viewport_size({"width": width, "height": 844})
        page.locator("textarea:visible").fill(TABLE)
        page.locator("button.main:visible").click()
        page.locator("[data-median]").nth(35).wait_for()
        page.locator("td button").first.click()
        page.locator("[data-law]:visible").wait_for()
        check_page(page, "rows")
        go_to(page, 2)
        check_page(page, "the grid")
        for place in (0, 5):
            page.locator("[type=radio]:visible").nth(place).check()
            page.locator("textarea:visible").fill("They say that")
            page.locator("button.main:visible").click()
            page.locator("button.main:visible:not(:disabled)").wait_for()
        page.locator("[data-changes]").wait_for()
        check_page(page, "changes")
        go_to(page, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("named", "place", "form", "button"),
    [
        ("model", 4, {"What stood before": "They say that", "What was said": " 12.5 people, then 31"}, "Read the text"),
        pytest.param(
            "smollm2",
            0,
            {"Text to go on from": "They say", "Tokens at most": "10"},
            "Write",
            marks=pytest.mark.backbone,
        ),
    ],
)
def test_twenty_tabs_ask_at_once_each_can_stop_and_memory_returns(browser, request, named, place, form, button):
    model = request.getfixturevalue(named)
    held_bytes, resident = [], []
    with serving(model, window=0.002, page=True) as server:
        for _ in range(3):
            with ExitStack() as tabs:
                pages = [tabs.enter_context(opened(browser, server)) for _ in range(20)]
                with held(model):
                    for page in pages:
                        go_to(page, place)
                        fill(here(page), form, button)
                    for page in pages[::2]:
                        fill(here(page), {}, "Stop")
                        page.get_by_text("Stopped.").wait_for()
                for page in pages:
                    stop = here(page).get_by_role("button", name="Stop")
                    stop.and_(page.locator(":disabled")).wait_for(timeout=120_000)
                    assert page.get_by_role("alert").count() == 0
                for page in pages[1::2]:
                    assert page.locator("[data-text]:visible span[role=button]").count() > 0
            until(lambda: server.metric("causalqwen_running") == server.metric("causalqwen_waiting") == 0)
            held_bytes.append(tensor_bytes())
            resident.append(server.metric("process_resident_memory_bytes"))
    print(f"{named}: tensors {held_bytes}, resident {[round(one / 1e6) for one in resident]} MB")
    assert held_bytes[2] == held_bytes[1] == held_bytes[0] and resident[2] - resident[1] < 100e6


def tensor_bytes():
    """What all tensors of this process hold."""
    gc.collect()
    return sum(one.nbytes for one in gc.get_objects() if issubclass(type(one), torch.Tensor))


@pytest.mark.slow
def test_the_pictures_of_the_documents(browser, tmp_path):
    """From the model of `make demo`; with CAUSALQWEN_PICTURES=docs in the environment they go there."""
    from causalqwen.modeling.loading import load_model

    demo = Path(os.environ.get("CAUSALQWEN_DEMO", WEB.parent / "runs" / "demo" / "model"))
    if not demo.is_dir():
        pytest.skip("the pictures show the model that `make demo` makes")
    folder = Path(os.environ.get("CAUSALQWEN_PICTURES", tmp_path))
    large = {"width": 1180, "height": 860}
    with (
        serving(load_model(demo, "cpu"), name="demo", page=True, max_tokens=1024) as server,
        opened(browser, server, viewport=large) as page,
    ):
        page.set_default_timeout(120_000)
        write(page, "The boiling point of toluene (C7H8) is", tokens=16, seed=7, preset="standard")
        open_token(page, 0)
        page.locator("[data-law]").wait_for()
        page.screenshot(path=folder / "explore.png", full_page=True)
        assert 200 < float(page.locator("[data-text] span[role=button]").first.inner_text()) < 800
        go_to(page, 3)
        view = here(page)
        fill(view, {"Seed": "1"}, "Add")
        page.locator("[data-person='2']").wait_for()
        view.get_by_label("inferred from a text").check()
        view.get_by_label("What they wrote").fill(
            "My friends, we have come a long way together. My friends, let us go on."
        )
        fill(view, {"Name": "the speaker"}, "Add")
        page.get_by_role("button", name="Which words say most").click()
        page.locator("[data-text]:visible").wait_for()
        beginning = page.get_by_role("region", name="What they write")
        fill(beginning, {"Text to go on from": "It was raining, and the captain", "Seed": "7"}, "Let them write")
        page.locator("[data-written='3']").wait_for()
        page.screenshot(path=folder / "explore-people.png", full_page=True)
        go_to(page, 4)
        fill(
            here(page),
            {"What stood before": "Ethanol boils at", "What was said": " 351 K, and toluene at 384 K.", "Seed": "7"},
            "Read the text",
        )
        page.get_by_text("comes back exactly").wait_for()
        page.locator("[data-text]:visible span[role=button]").first.click()
        fill(here(page), {"after 0 tokens": "78"}, "Set this number")
        page.get_by_role("button", name="One more edit").click()
        here(page).locator("[data-edit] textarea").nth(1).fill("Water boils at")
        page.get_by_role("button", name="See the worlds").click()
        page.locator("[data-cell]").first.wait_for()
        page.locator("[data-value] button:visible").nth(1).click()
        page.screenshot(path=folder / "explore-worlds.png", full_page=True)
    for name in ("explore", "explore-people", "explore-worlds"):
        assert (folder / f"{name}.png").stat().st_size > 10_000


def check_page(page, state):
    found = page.evaluate("axe.run(document)")
    told = [(one["id"], [node["html"][:120] for node in one["nodes"][:2]]) for one in found["violations"]]
    assert not told, (state, told)
    width = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert width[0] <= width[1], (state, width)
