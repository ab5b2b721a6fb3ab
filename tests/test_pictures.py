"""Pictures of individuals and of their worlds: what the pages say is what the model says."""

import json
import re
from html.parser import HTMLParser

import pytest
import torch

from causalqwen import Individual, Intervention, Observation
from causalqwen.evaluation.portrait import write_portrait
from causalqwen.evaluation.worlds import mark_changes, segments, write_worlds
from causalqwen.modeling.explain_individual import (
    covariance_of,
    favoured_tokens,
    lie_among,
    telling_plane,
    token_texts,
    what_told,
)
from causalqwen.modeling.reading import contexts_of, encode_text, read_contexts, token_evidence, value_evidence
from causalqwen.modeling.worlds import word_changes, world_numbers
from conftest import graft_tiny
from test_cli import run
from test_generation import eager

EMPTY = {"meta", "br", "link", "img", "path", "use", "rect", "circle", "hr"}
OBSERVED = Observation(" 12.5 people, then 31 <b>&more", "They say $that$ the")
EDITS = [Intervention(), Intervention(prompt="We say <i>that"), Intervention(tokens={2: " men"}, values={0: 99.0})]


class Page(HTMLParser):
    """Checks that every tag is closed in its turn, and keeps the texts and attributes of all elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[list] = []
        self.found: list[tuple[str, dict, str]] = []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        if tag in EMPTY:
            self.found.append((tag, dict(attrs), ""))
        else:
            self.open.append([tag, dict(attrs), ""])

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs), ""))

    def handle_data(self, data):
        for element in self.open:
            element[2] += data

    def handle_endtag(self, tag):
        if tag in EMPTY:
            return
        element = self.open.pop()
        assert element[0] == tag, (element, tag)
        self.found.append(tuple(element))

    def texts(self, tag, **attributes):
        return [text for name, given, text in self.found if name == tag and attributes.items() <= given.items()]


def read_page(path) -> Page:
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    for name, given, _ in page.found:  # opened from a disk, it asks nobody for anything
        assert name not in ("link", "img", "iframe"), name
        assert not given.get("src") and (given.get("xlink:href") or given.get("href") or "#").startswith("#")
    assert not re.search(r"url\((?!#)|@import", text)
    assert "prefers-color-scheme: dark" in text and "max-width: " in text and "default-src 'none'" in text
    assert not list(path.parent.glob("*.part"))
    return page


def drawn(page: Page, component: str) -> list[dict]:
    """What the explorer's components draw on a page."""
    return [json.loads(told) for told in page.texts("script", **{"data-draw": component})]


@pytest.fixture(scope="module", params=["value", "digits"])
def model(request, tiny_tokenizer):
    made = eager(graft_tiny("llama", tiny_tokenizer, value_family="gaussian", number_context=request.param))
    made.config.value_range = [0.0, 100.0]  # as after training: numbers are <NUM>
    made.generation_config.eos_token_id = None
    return made


@pytest.fixture(scope="module")
def people(model):
    said = "It is 5 and <b>& we have 61, then 17 of the people who 我们 are here, and it is so."
    return {"Ann <A>": model.abduct(said, name="Ann <A>", spread=0.2), "Bob": Individual.from_seed(4, 32, "Bob")}


@pytest.fixture(scope="module")
def told(model, people):
    return [
        [
            [(world, world_numbers(model, world, who)) for world in cell]
            for cell in model.counterfactual_samples(OBSERVED, EDITS, individual=who, num_samples=2, seed=3)
        ]
        for who in people.values()
    ]


def test_intervals_are_those_of_the_number_predicted_there(model, people, told):
    checked = 0
    for who, of_person in zip(people.values(), told, strict=True):
        for world, numbers in (pair for cell in of_person for pair in cell):
            assert [number.value for number in numbers] == world.values[world.tokens == 400].tolist()
            for number in numbers:
                assert float(world.text[number.start : number.end]) == number.value
                before = world.text[: number.start]
                if 0 in world.forced and number.start == 0:
                    assert number.value == 99.0 and number.low is None and str(number) == "set"
                elif encode_text(model, world.prompt + before).ids.tolist() == [
                    *encode_text(model, world.prompt).ids.tolist(),
                    *world.tokens[: len(encode_text(model, before).ids)].tolist(),
                ]:  # the text reads back as the tokens that were said  # fmt: skip
                    (law,) = model.predict_number(world.prompt + before, individual=who)
                    assert number.median == pytest.approx(law.median, rel=1e-4, abs=1e-4)
                    assert (number.low, number.high) == pytest.approx(law.interval(0.9), rel=1e-4, abs=1e-4)
                    checked += 1
    assert checked >= 8


def test_the_page_of_worlds_says_what_the_worlds_are(model, people, told, tmp_path):
    path = tmp_path / "worlds.html"
    write_worlds(path, OBSERVED, EDITS, list(people.items()), told, "abduct")
    page = read_page(path)
    rows = page.texts("th", scope="row")
    assert len(rows) == 2 and rows[0].startswith("Ann <A>") and rows[1].startswith("Bob")
    heads = page.texts("th", scope="col")
    assert [re.match("as it was|edit [12]", head)[0] for head in heads] == ["as it was", "edit 1", "edit 2"]
    assert "We say <i>that" in re.sub("They|\\$that\\$ the", "", heads[1]).replace("  ", " ")
    assert "after 0 tokens: do(99)" in heads[2] and "after 2 tokens: “ men”" in heads[2]
    cells = [given["data-world"] for name, given, _ in page.found if name == "td"]
    assert cells == ["as it was", "edit 1", "edit 2"] * 2
    # What is marked is what changed, world by world, and the text without marks and intervals is the world's.
    shown = [world for of_person in told for cell in of_person for world in dict.fromkeys(w.text for w, _ in cell)]
    body = path.read_text(encoding="utf-8").split("<tbody>")[1].split("</tbody>")[0]
    bare = re.sub(r"<small>\([^<]*\)</small>", "", body)
    marked_up = re.findall(r'<p class="text">(.*?)</p>', bare, re.S)
    assert len(marked_up) == len(shown)
    for html, text in zip(marked_up, shown, strict=True):
        marked = Page(f"<p>{html}</p>")
        changes = word_changes(OBSERVED.text, text)
        assert "".join(marked.texts("del")) == "".join(piece for kind, piece in changes if kind == "gone")
        new = "".join(marked.texts("ins")).replace(" ", "")
        assert new == "".join(piece for kind, piece in changes if kind == "new").replace(" ", "")
        kept = Page("<p>" + re.sub(r"<del>.*?</del>", "", html, flags=re.S) + "</p>").texts("p")[0]
        assert kept.replace(" ", "") == text.replace(" ", "")
    assert marked_up[0].count("<ins>") == marked_up[0].count("<del>") == 0 and "2 of 2 worlds" in body
    titles = [given["title"] for _, given, _ in page.found if given.get("class") == "value"]
    distinct = [list({w.text: n for w, n in cell}.values()) for of_person in told for cell in of_person]
    assert titles == [str(number) for cell in distinct for numbers in cell for number in numbers] and "set" in titles
    (values,) = drawn(page, "Values")
    numbers = [number for cell in distinct for numbers in cell for number in numbers]
    assert sorted(row["value"] for row in values["rows"]) == sorted(number.value for number in numbers)
    places = [int(row["name"].split(" · ")[2]) for row in values["rows"]]
    assert places == sorted(places) and values["rows"][0]["name"] == "Ann <A> · as it was · 1"
    first = values["rows"][0]
    assert first["intervals"]["0.9"] == [numbers[0].low, numbers[0].high] and first["note"] == "2 of 2 worlds"
    curve = numbers[0].law.curve(100, numbers[0].value)
    assert [list(row) for row in curve] == [list(row) for row in zip(*first["curve"].values(), strict=True)]


def test_numbers_cut_the_pieces_that_hold_them(model, told):
    for world, numbers in (pair for of_person in told for cell in of_person for pair in cell):
        pieces = segments(OBSERVED.text, world.text, numbers)
        assert "".join(piece.text for piece in pieces if piece.kind != "gone") == world.text
        assert [piece.number for piece in pieces if piece.number] == numbers
        line = mark_changes(OBSERVED.text, world.text, numbers)
        assert re.sub(r" \((90%: \S+ to \S+|set)\)", "", line) == mark_changes(OBSERVED.text, world.text)


def test_the_portrait_tells_where_they_lie_and_what_told(model, people, tmp_path):
    (ann, bob), path = people.values(), tmp_path / "who.html"
    text = "It is 5 and <b>& we have 61, then 17 of the people who 我们 are here, and it is so."
    write_portrait(path, model, ann, [text, "And 12 more."], [("Bob", bob)])
    page = read_page(path)
    (among,), (coordinates,), (told,) = (drawn(page, name) for name in ("PeopleMap", "Values", "Told"))
    assert among["names"] == ["Ann <A>", "Bob"] and among["plane"] == lie_among([ann, bob]).plain
    covariance = covariance_of(ann)
    for row in coordinates["rows"]:
        mean, width = ann.normal[int(row["name"])].item(), covariance[int(row["name"])][int(row["name"])].sqrt().item()
        assert row["median"] == pytest.approx(mean, abs=1e-6) and row["value"] == 0
        assert row["intervals"]["0.9"] == pytest.approx([mean - 1.6449 * width, mean + 1.6449 * width], abs=1e-3)
    assert len(coordinates["rows"]) == 20
    assert "".join(word["text"] for word in told["portrait"]["words"][0]).replace(" ", "") == text.replace(" ", "")
    assert told["portrait"]["favoured"] and told["portrait"]["name"] == "Ann <A>"
    write_portrait(path, model, model.abduct(text, likelihood="values"), [text])
    _, values = drawn(read_page(path), "Values")
    assert values["title"] == "Whose values moved" and [row["value"] for row in values["rows"]].count(61) == 1
    with pytest.raises(ValueError, match="Eve has 5 coordinates"):
        write_portrait(path, model, ann, [text], [("Eve", Individual.from_seed(0, 5))])


def test_what_tokens_tell_adds_up_to_the_likelihood_gained(model, people):
    ann = people["Ann <A>"]
    text = "It is 5 and then 我们 have it, so we 61 are here. " * 12
    said, _ = what_told(model, [text], ann)
    assert "".join(piece.text for piece in said[0]) == text.rstrip() + text[len(text.rstrip()) :]
    read = read_contexts(model, contexts_of(model, text, 256))
    evidence = [token_evidence(model, read), value_evidence(model, read)]
    gained = sum(e.evaluate(ann.normal)[0] - e.evaluate(0 * ann.normal)[0] for e in evidence)
    assert sum(piece.gain or 0.0 for piece in said[0]) == pytest.approx(gained, abs=1e-3)
    for e in evidence:
        assert e.each(ann.normal).sum().item() == pytest.approx(e.evaluate(ann.normal)[0], abs=1e-6)
    values = [piece for piece in said[0] if piece.value]
    assert len(values) == 24 and values[0].value == 5 and values[0].own is None  # heard in words alone
    values = [piece for piece in what_told(model, [text], people["Bob"])[0][0] if piece.own is not None]
    assert len(values) == 24 and values[0].own.loc != values[0].nobodys.loc
    assert values[0].own.scale < values[0].nobodys.scale  # Bob is known exactly
    digits = encode_text(model, text).digits
    for shown in (40, *range(3, 9)):
        end = shown + digits[shown:].long().cumprod(0).sum()  # a number is not cut
        pieces = [piece for said in what_told(model, [text, text], ann, shown=shown)[0] for piece in said]
        assert len(pieces) == (~digits[:end]).sum() and all(piece.text for piece in pieces if piece.value)
    pieces = token_texts(model, encode_text(model, "我们 are"))
    assert "".join(pieces) == "我们 are" and "\ufffd" not in "".join(pieces) and "" in pieces


def test_favoured_tokens_at_one_position_are_its_softmax(model, people):
    bob = people["Bob"]
    read = read_contexts(model, contexts_of(model, Observation(" and", "They say that"), 99))
    evidence = token_evidence(model, read[:1])
    more, less = favoured_tokens(model, (evidence, evidence), bob, count=5)
    q = evidence.law.quantile(bob.factor).float()
    own, nobodys = (
        torch.softmax((loc @ evidence.weight.T).masked_fill(~evidence.mask, -torch.inf), -1)[0]
        for loc in (evidence.loc + evidence.reach * q, evidence.loc)
    )
    moved = own - nobodys
    assert [token.own - token.nobodys for token in more] == pytest.approx(moved.topk(5).values.tolist(), abs=1e-6)
    assert [token.own - token.nobodys for token in less] == pytest.approx((-(-moved).topk(5).values).tolist(), abs=1e-6)
    assert more[0].text == model.processor.tokenizer.decode([moved.argmax().item()])


def test_the_plane_is_that_in_which_they_differ_beside_what_is_known():
    covariance = torch.diag(torch.tensor([1.0, 4.0, 0.25, 0.01], dtype=torch.float64))
    means = torch.tensor([[3.0, 0, 0, 0], [0, 8.0, 0, 0]], dtype=torch.float64)
    plane, share = telling_plane(means, covariance)
    assert share == pytest.approx(1.0) and plane[2:].abs().max() < 1e-6
    assert torch.allclose(plane.T @ covariance @ plane, torch.eye(2, dtype=torch.float64), atol=1e-4)
    gaps = (means @ plane)[:, None] - (means @ plane)[None]
    assert gaps.norm(dim=-1)[0, 1].item() == pytest.approx((3**2 + (8 / 2) ** 2) ** 0.5, rel=1e-4)
    # One alone: how they differ from nobody, then what is known best about them.
    plane, _ = telling_plane(means[:1], covariance)
    assert plane[0, 0].item() == pytest.approx(1.0, rel=1e-4) and plane[:, 1].abs().argmax() == 3
    telling_plane(means, torch.zeros(4, 4, dtype=torch.float64))  # known exactly


@pytest.fixture(scope="module")
def folder(model, people, tmp_path_factory):
    place = tmp_path_factory.mktemp("pictures")
    model.save_pretrained(place / "model")
    for name, who in people.items():
        who.save(place / f"{name[:3]}.safetensors")
    (place / "said.txt").write_text("It is 5 and <b>& we have 61, then 17 of the people.")
    graft_tiny("llama", model.processor.tokenizer).save_pretrained(place / "untrained")
    return place


def test_the_command_line_writes_pages_and_intervals(folder, model, people, tmp_path):
    base = ("counterfactual", "--model", folder / "model")
    common = (*base, "--prompt", "They say that", "--text", " 12 of us, 31 more")
    who = [part for name in ("Ann", "Bob") for part in ("--individual", folder / f"{name}.safetensors")]
    page = tmp_path / "worlds.html"
    edits = ("--edit", "We say that", "--edit", "I say", "--force", "1= men")
    found = json.loads(run(*common, *who, *edits, "--html", page, "--json").stdout)
    assert [world["individual"] for world in found["worlds"]] == ["Ann <A>"] * 2 + ["Bob"] * 2
    assert all("men" in world["text"] for world in found["worlds"]) and found["html"] == str(page)
    world = next(w for w in found["worlds"][:2] if w["numbers"])
    first = world["numbers"][0]
    (law,) = model.predict_number(world["prompt"] + world["text"][: first["start"]], individual=people["Ann <A>"])
    assert [first["low"], first["high"]] == pytest.approx(law.interval(0.9), rel=1e-4)
    assert len(read_page(page).texts("th", scope="col")) == 3
    alone = run(*common, "--value", "0=-7.5").stdout
    assert alone.startswith("They say that |[- 12") and "{+ -7.5 (set)" in alone
    page = tmp_path / "twin.html"
    twin = run(*common, "--checkpoint", folder / "model", "--html", page).stdout  # the same weights say the same
    assert "[-" not in twin and "{+" not in twin and "spoken by model" in page.read_text()
    lines = run(*common, *who, "--edit", "We", "--noise", "redraw").stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == ["Ann <A>", "Bob"]

    page, said = tmp_path / "who.html", ("--text", folder / "said.txt")
    abduct = ("abduct", "--model", folder / "model", *said, "--output", tmp_path / "a.safetensors")
    beside = ("--beside", folder / "Ann.safetensors", "--beside", folder / "Bob.safetensors")
    assert str(page) in run(*abduct, "--html", page, *beside, "--json").stdout
    assert "Ann <A>" in drawn(read_page(page), "PeopleMap")[0]["names"]
    (tmp_path / "a.safetensors").unlink()
    assert "--beside is for the picture" in run(*abduct, *beside, code=1).stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--value", "three=4"], "--value 'three=4' is not POSITION="),
        (["--value", "3"], "--value '3' is not POSITION="),
        (["--value", "-1=4"], "--value '-1=4' is not POSITION="),
        (["--value", "0=much"], "--value: 'much' is not a number"),
        (["--value", "0=inf"], "--value: 'inf' is not a finite number"),
        (["--value", "0=1", "--value", "0=2"], "--value sets position 0 twice"),
        (["--value", "99=1"], "values: place 99 lies after the"),
        (["--force", "99= a"], "tokens: place 99 lies after the"),
        (["--force", "2="], "--force '2=' is not POSITION="),
        (["--force", "0= a", "--value", "0=1"], "--value and --force both set position 0"),
        (["--edit", ""], "--edit 1 is empty"),
        ([], "give --edit, --value, --force or --checkpoint"),
        (["--model", "untrained", "--value", "0=1"], "--value needs a model whose values were trained"),
    ],
)
def test_a_malformed_intervention_is_told_by_its_option(folder, options, message):
    options = [folder / option if option == "untrained" else option for option in options]
    arguments = ("counterfactual", "--model", folder / "model", "--prompt", "It is", "--text", " 5 and more")
    assert message in run(*arguments, *options, code=1).stderr
