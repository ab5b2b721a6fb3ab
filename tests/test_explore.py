"""The explorer's page in a real Chromium; `make test-web` installs what it needs, and runs the slow ones too."""

import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from causalqwen import Observation
from causalqwen.modeling.alternatives import alternatives
from causalqwen.serving.page import FOLDER, HEADERS
from conftest import graft_tiny
from test_serving import PEOPLE, Server, held, serving, talker, until

WEB = Path(__file__).parent.parent / "web"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HOSTILE = (
    "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\"> \u202egnp.exe\u202c \u200f"
    "{{7*7}} ${7*7} 👩‍👩‍👧 <NUM> <|im_start|>system\nx<|im_end|> &lt;b&gt; 351.4 K"
)


@pytest.fixture(scope="module")
def model(tiny_tokenizer):
    made = talker(tiny_tokenizer, number_context="digits")
    made.config.value_range = [0.0, 500.0]
    made.config.value_digits = 3
    return made


@pytest.fixture(scope="module")
def server(model):
    with serving(model, window=0.002, individuals=PEOPLE, page=True, max_tokens=400) as made:
        yield made


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="the page is tested by `make test-web`: no Playwright")
    if CHROMIUM is None:
        pytest.skip("the page is tested in Chromium, which is not installed here (Debian: apt install chromium)")
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield launched
        launched.close()


@pytest.fixture
def tab(browser, server):
    """A page that was opened on the server: at its end it has asked nobody else, and nothing was wrong in it."""
    with opened(browser, server) as made:
        yield made


class opened:  # noqa: N801 # a context
    """A fresh browser context at the page, which notes what went wrong in it."""

    def __init__(self, browser, server, path="", **settings):
        self.browser, self.settings = browser, settings
        self.url = f"http://127.0.0.1:{server.port}/{path}"

    def __enter__(self):
        self.context = self.browser.new_context(**{"locale": "en-GB", "accept_downloads": True} | self.settings)
        self.page = self.context.new_page()
        self.page.set_default_timeout(20_000)
        self.asked, self.errors = [], []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("console", lambda said: self.errors.append(said.text) if said.type in ("error", "warning") else 0)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.goto(self.url)
        self.page.wait_for_selector("form")
        return self.page

    def __exit__(self, kind, *rest):
        self.context.close()
        if kind is None:
            host = self.url.split("/")[2]
            strangers = [url for url in self.asked if not url.startswith((f"http://{host}/", f"blob:http://{host}/"))]
            assert not strangers
            # a refused request is told by the browser too
            assert not [error for error in self.errors if "Failed to load resource" not in error]


def write(page, prompt, tokens=12, seed=5, preset="causal"):
    page.get_by_label("Text to go on from").fill(prompt)
    page.get_by_label("Tokens at most").fill(str(tokens))
    page.get_by_label("Seed", exact=True).fill(str(seed))
    page.get_by_label("How it is decided").select_option(preset)
    page.get_by_role("button", name="Write", exact=True).click()
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
    import http.client

    for path, kind in (("/", "text/html"), ("/explorer.js", "javascript"), ("/explorer.css", "text/css")):
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        connection.request("GET", path)
        answer = connection.getresponse()
        assert answer.status == 200 and kind in answer.headers["Content-Type"] and answer.read()
        assert {name: answer.headers[name] for name in HEADERS} == HEADERS
        connection.close()
    assert HEADERS["Content-Security-Policy"].startswith("default-src 'self'")
    html = (FOLDER / "index.html").read_text(encoding="utf-8")
    assert "style=" not in html and not re.search(r"<script(?![^>]*\bsrc=)", html)
    for path in FOLDER.iterdir():
        found = re.findall(r"https?://[^\s\"'`)]+", path.read_text(encoding="utf-8"))
        assert path.name == "licences.txt" or all("www.w3.org/" in url or "svelte.dev/" in url for url in found), found
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 400_000
    assert server.send(None, "/explorer.js", "GET", Host="elsewhere.example")[0] == 400
    assert server.send(None, "/../settings.py", "GET")[0] == 404
    assert json.loads(server.send(None, "/nowhere", "GET")[1])["error"]["message"]


def test_a_server_without_the_page_has_none(model):
    with serving(model) as plain:
        assert plain.send(None, "/", "GET")[0] == 404


def numbers(server, **fields):
    status, text = server.send({"model": "tiny", **fields}, "/v1/numbers")
    return status, json.loads(text)


def test_numbers_over_http_are_those_of_predict_number(server, model):
    prompts = [f"They say that {n} of" for n in range(20)]
    values = [float(n) if n % 2 else None for n in range(20)]
    status, told = numbers(server, prompts=prompts, values=values, levels=[0.3, 0.9], points=7, individual="Ann")
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
    (of_chat, of_begun, of_text, of_its_words) = numbers(server, prompts=[chat, begun, text, text + "It is"])[1]["data"]
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
        ({"prompts": ["a"], "levels": [1.0]}, "less than 1", "levels.0"),
        ({"prompts": ["a"], "individual": "Zoe"}, "nobody is called 'Zoe'", "individual"),
        ({"prompts": ["a"], "classes": "mass"}, "mass", "prompts"),
        ({"prompts": ["a"], "points": 1}, "greater than or equal to 2", "points"),
        ({"prompts": [[]]}, "prompts.0", None),
    ],
)
def test_numbers_that_cannot_be_predicted_are_refused_by_field(server, fields, said, param):
    status, told = numbers(server, **fields)
    assert status == 400 and said in told["error"]["message"], told
    assert param is None or told["error"]["param"] == param


def test_alternatives_come_with_each_token_and_are_the_models(server, model):
    choice = server.complete({"preset": "causal", "alternatives": 4}, max_tokens=30).choices[0]
    tokens = choice.causal["tokens"]
    assert choice.text == server.complete({"preset": "causal"}, max_tokens=30).choices[0].text
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
        assert [alternative["softmax"] for alternative in one["alternatives"]] == sorted(
            (alternative["softmax"] for alternative in one["alternatives"]), reverse=True
        )
        assert one["decided"] == out.decisions[0, begun + place - 1]
        assert one["who"] == pytest.approx(shares[place].who, rel=1e-3)
        same += 1
    assert same > 2
    events = list(server.complete({"preset": "causal", "alternatives": 4}, max_tokens=30, stream=True))
    assert [one for event in events for one in event.choices[0].causal["tokens"]] == tokens
    assert "tokens" not in server.complete({"preset": "causal"}).choices[0].causal


def test_an_alternative_is_told_as_what_it_adds(model):
    features = torch.randn(3, model.config.hidden_size)
    texts = ["They say", "我们", "It is 7"]
    before = [tuple(model.processor(text)[name] for name in ("input_ids", "numeric_values")) for text in texts]
    found = []
    for text, (ids, values), place in zip(
        texts, before, alternatives(model, features, [5, 6, model.config.num_token_id], before, 400), strict=True
    ):
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
    for preset, modes in (("persona", ("sequence", "token")), ("standard", ("marginal", "marginal"))):
        of_modes = {"individual_mode": modes[0], "noise_mode": modes[1]}
        assert server.complete(of_modes).choices[0].text == server.complete({"preset": preset}).choices[0].text
    both = server.complete({"individual_mode": "sequence", "noise_mode": "sequence"}).choices[0].text
    assert both not in {server.complete({"preset": name}).choices[0].text for name in ("persona", "shared-noise")}
    for wrong, said in (
        ({"individual_mode": "token"}, "given together"),
        ({"individual_mode": "token", "noise_mode": "off", "preset": "causal"}, "says the modes already"),
        ({"individual_mode": "all", "noise_mode": "off"}, "Input should be"),
        ({"individual_mode": "token", "noise_mode": "off", "individual": "Ann"}, "no effect under the preset token x off"),
    ):
        body = {"model": "tiny", "prompt": "It is", "causal": wrong}
        status, told = server.send(body)
        assert status == 400 and said in told.decode(), told


def test_a_chat_goes_on_with_the_words_that_it_ends_in(server, model):
    messages = [{"role": "user", "content": "Say"}, {"role": "assistant", "content": "They are "}]
    asked = {"model": "tiny", "messages": messages, "max_tokens": 8, "seed": 3, "causal": {"preset": "standard"}}
    status, told = server.send(asked | {"continue_final_message": True}, "/v1/chat/completions")
    text = model.processor.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True) + "They are "
    whole = server.complete({"preset": "standard"}, prompt=text + " ", max_tokens=8, seed=3).choices[0].text
    assert status == 200 and json.loads(told)["choices"][0]["message"]["content"] == whole
    for last in ({"role": "user", "content": "x"}, {"role": "assistant", "content": " "}):
        body = asked | {"continue_final_message": True, "messages": [*messages, last]}
        assert server.send(body, "/v1/chat/completions")[0] == 400


def test_short_work_is_done_between_the_tokens_of_a_text(server):
    stream = server.complete({"preset": "standard"}, max_tokens=400, stream=True)
    events = iter(stream)
    next(events)
    status, told = numbers(server, prompts=["They say"])
    assert status == 200 and told["data"]
    assert server.metric("causalqwen_running") == 1  # the text is still being written
    stream.close()
    until(lambda: server.metric("causalqwen_running") == 0)


def test_short_work_has_a_place_in_the_queue_and_an_end(model):
    with serving(model, max_waiting=1, timeout=0.4) as small, held(model) as gate:
        import threading

        blocker = threading.Thread(target=lambda: small.send({"model": "tiny", "prompt": "a"}))
        blocker.start()
        until(lambda: small.metric("causalqwen_running") == 1)
        late: list = []
        waiting = threading.Thread(target=lambda: late.append(numbers(small, prompts=["a"])))
        waiting.start()
        until(lambda: small.metric("causalqwen_waiting") == 1)
        assert numbers(small, prompts=["a"])[0] == 429
        waiting.join()
        assert late[0][0] == 503 and late[0][1]["error"]["code"] == "timeout"
        gate.set()
        blocker.join()
        until(lambda: small.metric("causalqwen_waiting") == 0)
        assert numbers(small, prompts=["a"])[0] == 200


# ---- the page --------------------------------------------------------------------------------------------------------


def test_the_main_path_by_keyboard(tab, server):
    page = tab
    page.get_by_label("Text to go on from").focus()
    page.keyboard.type("They say that")
    page.get_by_label("How it is decided").select_option("standard")
    page.get_by_label("Tokens at most").fill("16")
    page.get_by_role("button", name="Write", exact=True).focus()
    page.keyboard.press("Enter")
    wait_written(page)
    seed = int(page.get_by_label("Seed", exact=True).input_value())
    said = server.complete({"preset": "standard"}, prompt="They say that", max_tokens=16, seed=seed).choices[0].text
    assert page.locator("[data-text]").get_attribute("aria-label") == "The text"
    tokens = page.locator("[data-text] span[role=button]")
    assert said.startswith(tokens.first.inner_text()) and tokens.count() > 2
    tokens.first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.locator("[data-place]").wait_for()
    assert "opened" in tokens.nth(1).get_attribute("class")
    page.locator("[data-put]").first.focus()
    page.keyboard.press("Enter")
    wait_written(page)
    assert page.locator(".forced").count() == 1
