"""The server, over real HTTP on this machine, by the official client."""

import gc
import http.client
import json
import random
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from types import SimpleNamespace

import openai
import pytest
import torch
from typer.testing import CliRunner

from causalqwen import PRESETS, CausalDecoding, CausalQwenProcessor, Individual, NumberPrediction
from causalqwen.distributions import NOISE_STREAM, uniform_draws
from causalqwen.modeling.loading import fingerprint
from causalqwen.numbers import NumberRules
from causalqwen.serving import ServerSettings, create_app, listening, load_individuals
from causalqwen.serving.listening import Listener
from causalqwen.serving.softmax_sampling import RowSoftmaxSampler, _fall
from causalqwen.serving.text import GrowingText
from causalqwen_cli.app import app as cli
from conftest import graft_tiny, make_backbone

PEOPLE = {"Ann": Individual.from_seed(11, 32), "Bob": Individual.from_seed(12, 32)}
PEOPLE["Eva"] = Individual(Individual.from_seed(13, 32).factor, precision=torch.eye(32, dtype=torch.float64) * 1e6)
PROMPT = "They say that -3.5 of the people who came here went on to count"


def talker(tiny_tokenizer, **settings):
    """A tiny model with a long context that often decides for `<NUM>` and never ends by itself."""
    from causalqwen import CausalQwenForCausalLM

    backbone = make_backbone("llama", tiny_tokenizer, max_position_embeddings=4096)
    torch.manual_seed(1)
    made = CausalQwenForCausalLM.from_backbone(backbone, tokenizer=tiny_tokenizer, **settings)
    torch.manual_seed(3)
    with torch.no_grad():
        made.action.num_row.normal_(std=0.6)
        made.action.num_bias += 3.5
    made.config.value_transform = {"kind": "affine", "center": 40.0, "width": 7.0}
    made.generation_config.eos_token_id = None
    return made


@pytest.fixture(scope="module")
def model(tiny_tokenizer):
    return talker(tiny_tokenizer, number_context="value")


class Server:
    """An application that serves in a thread."""

    def __init__(self, app, listener):
        self.app, self.listener = app, listener
        self.port = self.listener.getsockname()[1]
        self.uvicorn = Listener(self.app)
        self.thread = threading.Thread(target=self.uvicorn.run, kwargs={"sockets": [self.listener]})
        self.thread.start()
        self.client = self.client_with("none")

    def client_with(self, key):
        url = f"http://127.0.0.1:{self.port}/v1"
        return openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=60)

    def complete(self, causal=None, **fields):
        fields = {"prompt": PROMPT, "max_tokens": 24, "seed": 5} | fields
        return self.client.completions.create(model="tiny", extra_body={"causal": causal or {}}, **fields)

    def request(self, path, method="GET", body=None, **headers):
        """(status, headers, text) of a raw request."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, response.headers, response.read()

    def send(self, body, path="/v1/completions", method="POST", **headers):
        """(status, text) of a request in JSON."""
        body = json.dumps(body) if isinstance(body, dict) else body
        status, _, text = self.request(path, method, body, **{"Content-Type": "application/json"} | headers)
        return status, text

    def ask(self, path, **fields):
        """(status, parsed answer) of a request to an endpoint."""
        status, text = self.send({"model": "tiny"} | fields, f"/v1/{path}")
        return status, json.loads(text)

    def check_refused(self, path, fields, why, param=None):
        """400 that says why, of a field if it is given."""
        status, told = self.ask(path, **fields)
        error = told["error"]
        assert status == 400 and error["type"] == "invalid_request_error" and why in error["message"], told
        assert param is None or error["param"] == param, told

    def metric(self, name):
        _, text = self.send(None, "/metrics", "GET")
        return sum(float(line.split()[-1]) for line in text.decode().splitlines() if line.startswith(name))

    def close(self):
        self.client.close()
        self.uvicorn.should_exit = True
        self.thread.join()
        self.listener.close()


def start(model, **settings):
    """A server on a free port."""
    app = create_app(model, ServerSettings(**{"name": "tiny", "max_tokens": 4000, **settings}))
    return Server(app, socket.create_server(("127.0.0.1", 0)))


def serving(model, **settings):
    return closing(start(model, **settings))


@pytest.fixture(scope="module")
def server(model):
    with serving(model, window=0.002, individuals=PEOPLE) as made:
        yield made


@contextmanager
def held(model):
    """While the block runs, batches wait before their first step."""
    gate, generate = threading.Event(), model.generate

    def wait(*args, **kwargs):
        assert gate.wait(30)
        return generate(*args, **kwargs)

    model.generate = wait
    try:
        yield gate
    finally:
        gate.set()
        del model.generate


def until(true, seconds=20.0):
    """Wait for something to become true."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def numbers_of(choice):
    return [number["value"] for number in choice.causal["numbers"]]


def assert_same(one, other):
    """The same words, the same end, and numbers that agree but for the last digit, which float32 may move."""
    texts = []
    for choice in (one, other):
        texts.append(choice.text)
        for number in reversed(choice.causal["numbers"]):
            first, end = number["span"]
            texts[-1] = texts[-1][:first] + "#" + texts[-1][end:]
    assert texts[0] == texts[1] and one.finish_reason == other.finish_reason
    assert numbers_of(one) == pytest.approx(numbers_of(other), rel=1e-5)


# ---- answers ---------------------------------------------------------------------------------------------------------


def test_what_a_server_says_about_itself(server):
    (card,) = server.client.models.list().data
    assert card.id == "tiny" and card.causal["fingerprint"] == fingerprint(server.app.state.batcher.model)
    assert server.client.models.retrieve("tiny").id == "tiny"
    assert server.send(None, "/health", "GET") == (200, b'{"status":"ok"}')
    before = server.metric("causalqwen_tokens_total")
    usage = server.complete().usage
    assert server.metric("causalqwen_tokens_total") - before == usage.total_tokens > 24 == usage.completion_tokens
    assert server.metric('causalqwen_requests_total{path="/v1/completions",status="200"}') >= 1
    assert server.metric("process_resident_memory_bytes") > 1e6


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "softmax"])
def test_texts_and_numbers_are_those_of_generate(server, model, name):
    compare_with_generate(server, model, name)


@pytest.mark.parametrize("context", ["digits", "both"])
def test_digits_in_the_context_are_served_as_generate_writes_them(tiny_tokenizer, context):
    other = talker(tiny_tokenizer, number_context=context)
    other.config.value_digits = 3  # the last of six may round either way in float32, and the text goes on otherwise
    with serving(other, window=0.002) as server:
        for name in ("standard", "causal", "persona"):
            compare_with_generate(server, other, name)
        kept = server.complete({"preset": "standard"}, max_tokens=24).choices[0]
        for length in range(1, 24):  # a number whose digits are cut short is written whole
            cut = server.complete({"preset": "standard"}, max_tokens=length).choices[0]
            assert kept.text.startswith(cut.text)


TABLE = " nation nation nation nation 3\n"  # seven tokens, and `<NUM>` one more where it is not in code


@pytest.mark.parametrize(
    ("prompt", "status", "at_least"),
    [(f"```\n{TABLE * 530}```", 200, False), (f"```\n{TABLE * 600}```", 400, False), ("1 2 3 " * 50_000, 400, True)],
)
def test_a_prompt_is_too_long_by_its_start_only_where_it_is(tiny_tokenizer, monkeypatch, prompt, status, at_least):
    """The end of a block of code is behind its start: until it is seen, the numbers of a table in it count as numbers."""
    model = talker(tiny_tokenizer, number_context="digits")
    assert len(prompt) > 4 * model.config.context_length
    read, encode = [], type(model.processor).__call__

    def note(processor, text, **more):
        read.append(text)
        return encode(processor, text, **more)

    monkeypatch.setattr(type(model.processor), "__call__", note)
    with serving(model) as server:
        told, answer = server.send({"model": "tiny", "prompt": prompt, "max_tokens": 1})
    assert told == status and (b"more than the context" in answer) == (status == 400)
    assert (b"at least" in answer) == at_least == (prompt not in read)


def compare_with_generate(server, model, name):
    drawn = {"temperature": 0.7} if name != "standard" else {}
    choices = server.complete({"preset": name, **drawn}, n=2).choices
    inputs = model.processor(PROMPT, prompt=True, return_tensors="pt")
    plan = CausalDecoding.preset(name, seed=5, **drawn)
    out = model.generate(**inputs, max_new_tokens=24, num_return_sequences=2, causal_decoding=plan)
    whole = model(out.sequences, numeric_values=out.numeric_values)
    start = inputs["input_ids"].shape[1]
    found = 0
    for row, choice in enumerate(choices):
        whole_text = model.processor.decode(out.sequences[row], out.numeric_values[row], skip_special_tokens=True)
        assert PROMPT + choice.text == whole_text
        places = [i for i in range(start, start + 24) if out.sequences[row, i] == model.config.num_token_id]
        assert numbers_of(choice) == pytest.approx([out.numeric_values[row, i].item() for i in places], rel=1e-5)
        for place, number in zip(places, choice.causal["numbers"], strict=True):
            columns = (whole.loc_Y[row, place - 1], whole.scale_Y[row, place - 1], whole.num_prob[row, place - 1])
            prediction = NumberPrediction(*(column.item() for column in columns), model.value_law)
            assert number["median"] == pytest.approx(prediction.median, rel=1e-3, abs=1e-3)
            assert number["intervals"]["0.9"] == pytest.approx(prediction.interval(0.9), rel=1e-3, abs=1e-3)
            assert float(choice.text[slice(*number["span"])]) == number["value"]
            found += 1
    assert found and choices[1].causal["seed"] == 6


@pytest.mark.parametrize("context", ["value", "digits"])
def test_numbers_of_a_model_that_copies_are_those_of_generate(tiny_tokenizer, context):
    """Copied ones exactly, with the law that each came from, of somebody too; what it cannot do is a 400."""
    model = talker(tiny_tokenizer, number_context=context, copy_numbers=True)
    torch.nn.init.normal_(model.copy_head.query.weight, std=0.3)
    model.copy_head.bias.data.fill_(1.5)
    prompts = ["They say that 12.3456789 and 5 of", "We have come", PROMPT]
    copied, numbers = 0, 0
    with serving(model, individuals=PEOPLE) as server:
        answers = server.complete({"preset": "standard", "alternatives": 3}, prompt=prompts).choices
        for prompt, choice in zip(prompts, answers, strict=True):
            inputs = model.processor(prompt, prompt=True, return_tensors="pt")
            out = model.generate(**inputs, max_new_tokens=24, causal_decoding="standard")
            ids, values = out.sequences, out.numeric_values
            assert prompt + choice.text == model.processor.decode(ids[0], values[0])
            z = model.features(ids, numeric_values=values).last_hidden_state
            offered = model.candidates(z, ids, values, None)
            start = inputs["input_ids"].shape[1]
            num = model.config.num_token_id
            places = [place for place in range(start, start + 24) if ids[0, place] == num]
            told = iter([one for one in choice.causal["tokens"] if one["chosen"]["token"] == num])
            for place, number in zip(places, choice.causal["numbers"], strict=True):
                (law,) = model.predict_values(z[:, place - 1], candidates=offered[:, place - 1])
                again = getattr(law, "copied", None)
                assert again is None or number["value"] == again == values[0, place].item()
                assert number["median"] == pytest.approx(law.median, rel=1e-4)
                assert number["intervals"]["0.9"] == pytest.approx(law.interval(0.9), rel=1e-3, abs=1e-3)
                assert float(next(told)["chosen"]["text"]) == pytest.approx(number["value"])
                copied, numbers = copied + (again is not None), numbers + 1
        assert 3 < copied < numbers
        (entry,) = server.ask("numbers", prompts=prompts[:1])[1]["data"]
        assert entry["median"] == pytest.approx(model.predict_number(prompts[0])[0].median)
        for name in ("Ann", "Eva"):  # whose numbers are known; who is nobody in particular there
            (entry,) = server.ask("numbers", prompts=prompts[:1], individual=name)[1]["data"]
            law = model.predict_number(prompts[0], individual=PEOPLE[name])[0]
            assert entry["median"] == pytest.approx(law.median) and law.candidates
            said = server.complete({"preset": "shared-individual", "individual": name}, prompt=prompts[0]).choices[0]
            for one in said.causal["numbers"]:
                assert all(low <= one["median"] <= high for low, high in one["intervals"].values())
        asked = {"questions": [{"prompt": prompts[0]}], "individual": "Ann", "draws": 1}
        server.check_refused("answers", asked, "a number that a survey asks for needs copy_numbers=False")


@pytest.mark.parametrize("name", ["Ann", "Eva"])
def test_a_named_individual_speaks_and_their_numbers_are_theirs(name, server, model):
    choice = server.complete({"preset": "shared-individual", "individual": name}, max_tokens=90).choices[0]
    inputs = model.processor(PROMPT, prompt=True, return_tensors="pt")
    plan = CausalDecoding(individual=PEOPLE[name])
    out = model.generate(**inputs, max_new_tokens=90, causal_decoding=plan)
    made = out.numeric_values[0, inputs["input_ids"].shape[1] :]
    text = model.processor.decode(out.sequences[0], out.numeric_values[0], skip_special_tokens=True)
    assert PROMPT + choice.text == text
    assert numbers_of(choice) == pytest.approx(made[made != 0].tolist(), rel=1e-5)
    first = choice.causal["numbers"][0]  # noise is integrated out under this preset, so that the value is the median
    if PEOPLE[name].knows_values:
        assert first["median"] == pytest.approx(first["value"], rel=1e-4)
    low, high = first["intervals"]["0.9"]
    assert low < first["median"] < high


OTHERS = [{"max_tokens": 3 + 5 * i, "seed": 100 + i, "prompt": "A new year " * (i % 3 + 1)} for i in range(7)]


@pytest.mark.parametrize(
    "causal",
    [
        {"preset": "persona", "temperature": 0.6},
        {"preset": "sample", "temperature": 0.9},
        {"preset": "shared-individual", "individual": "Ann", "temperature": 0.6},
        {"preset": "softmax"},
    ],
    ids=lambda causal: causal["preset"],
)
def test_a_request_gets_the_same_alone_and_among_others(server, model, causal):
    mine = {"max_tokens": 30, "stop": ["zq", "the"]} | ({"temperature": 0.9, "top_p": 0.95} if len(causal) == 1 else {})
    alone = server.complete(causal, **mine).choices[0]
    of_others = causal | ({"individual": "Bob"} if "individual" in causal else {})
    alone_too = [server.complete(of_others, **other).choices[0] for other in OTHERS]
    rows = server.metric("causalqwen_batch_rows_sum"), server.metric("causalqwen_batch_rows_count")
    with ThreadPoolExecutor(9) as pool, held(model) as gate:
        blocker = pool.submit(server.complete, {"preset": "standard"}, max_tokens=1)
        until(lambda: server.metric("causalqwen_running") == 1)
        others = [pool.submit(server.complete, of_others, **other) for other in OTHERS]
        together = pool.submit(server.complete, causal, **mine)
        until(lambda: server.metric("causalqwen_waiting") == 8)
        gate.set()
        blocker.result()
        for choice, before in zip([together, *others], [alone, *alone_too], strict=True):
            assert_same(choice.result().choices[0], before)
    assert numbers_of(alone)
    after = server.metric("causalqwen_batch_rows_sum"), server.metric("causalqwen_batch_rows_count")
    assert (after[0] - rows[0], after[1] - rows[1]) == (9, 2)  # the eight ran as one batch


def test_chat_uses_the_template_whole_and_streamed(server, model):
    said = {"role": "user", "content": [{"type": "text", "text": "to 5"}]}
    messages = [{"role": "developer", "content": "Count."}, said]
    fields = {"model": "tiny", "messages": messages, "max_completion_tokens": 20, "seed": 3, "temperature": 0.8}
    answer = server.client.chat.completions.create(**fields)
    plain = [{"role": "system", "content": "Count."}, {"role": "user", "content": "to 5"}]
    text = model.processor.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
    assert answer.usage.prompt_tokens == len(model.processor(text)["input_ids"])
    same = server.complete(prompt=text, max_tokens=20, seed=3, temperature=0.8).choices[0]
    assert answer.choices[0].message.content == same.text and answer.choices[0].message.role == "assistant"
    with server.client.chat.completions.stream(**fields) as stream:
        events = list(stream)
    snapshot = [event.snapshot for event in events if event.type == "chunk"][-1]
    assert snapshot.choices[0].message.content == same.text and snapshot.choices[0].message.role == "assistant"


def test_temperature_zero_is_greedy_and_a_seed_is_told(server):
    greedy = server.complete(temperature=0).choices[0].text
    assert greedy == server.complete({"preset": "softmax"}, temperature=0, seed=9).choices[0].text
    assert greedy == server.complete(top_p=0, seed=8).choices[0].text
    assert greedy == server.complete({"preset": "standard"}).choices[0].text
    drawn = server.complete(seed=None).choices[0]
    assert server.complete(seed=drawn.causal["seed"]).choices[0].text == drawn.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # the second has many tokens as likely as others
@pytest.mark.parametrize("top_ps", [[0.9, 0.5, 0.99, 0.01, 1.0, 0.3], [0.9, 0.5, 0.6, 0.0, 0.7, 0.3], [1.0] * 6])
@pytest.mark.parametrize("temperatures", [[1.0] * 6, [0.7, 2.0, 1.0, 0.5, 1.3, 0.9]])
def test_rows_are_drawn_by_their_own_temperature_and_nucleus(temperatures, top_ps, dtype):
    """Whether the nucleus ends among the likeliest tokens or not."""
    spread = torch.tensor([0.02, 1.0, 4.0, 4.0, 2.0, 8.0]).unsqueeze(-1)
    scores = (torch.randn(6, 9001, generator=torch.Generator().manual_seed(0)) * spread).to(dtype)
    scores[:, 1500] = -torch.inf

    def drawn(rows: range) -> torch.Tensor:
        columns = temperatures[rows.start : rows.stop], top_ps[rows.start : rows.stop], [3] * len(rows)
        return RowSoftmaxSampler(rows, *columns, 1, torch.device("cpu"))(
            torch.zeros(len(rows), 1), scores[rows]
        ).argmax(-1)

    found = drawn(range(6))
    assert torch.equal(found, torch.cat([drawn(range(row, row + 1)) for row in range(6)]))
    probs = torch.softmax(scores.double() / torch.tensor(temperatures).double().unsqueeze(-1), dim=-1)
    ordered = probs.sort(descending=True).values
    before, masses = ordered.cumsum(-1) - ordered, torch.tensor(top_ps, dtype=torch.float64).unsqueeze(-1)
    size = (before < masses).sum(-1, keepdim=True)
    least = ordered.gather(-1, size.clamp(min=1) - 1)
    upto = probs.masked_fill(probs < least, 0.0).cumsum(-1)
    draws = uniform_draws(torch.arange(6), NOISE_STREAM, torch.full((6,), 2), 1)
    wanted = torch.searchsorted(upto, draws * upto[:, -1:])
    assert torch.equal(found.unsqueeze(-1), wanted)


@pytest.mark.parametrize("temperature", [1e-3, 0.05, 1.0])
def test_draws_at_every_border_fall_into_shares_beside_it(temperature):
    """Against float64, at draws within 1e-9 of a border: the token above or below, never one without a share."""
    rows = 400
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(rows, 333, generator=generator) * 3
    scores[torch.rand(rows, 333, generator=generator) < 0.6] = -torch.inf
    scores[:, 7] = 9.0
    probs = torch.softmax(scores.double() / temperature, dim=-1)
    upto = probs.cumsum(-1)
    borders = upto[:, ::37].T.reshape(-1, rows, 1)
    cells = (scores - scores.amax(-1, keepdim=True)).div(temperature).exp()
    cells = torch.nn.functional.pad(cells, (0, 51)).unflatten(-1, (6, 64))
    for ends in (*borders - 1e-9, *borders + 1e-9, torch.full((rows, 1), 1e-12), torch.full((rows, 1), 1 - 1e-12)):
        token = _fall(cells, cells.sum(-1), ends.clamp(1e-12, 1 - 1e-12))
        share = cells.flatten(1).gather(-1, token)
        assert (share > 0).all()
        end = upto.gather(-1, token)
        assert (ends <= end + 1e-6).all() and (ends >= end - probs.gather(-1, token) - 1e-6).all()


@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        ([], " 351.4 dollars. 你好！ It is 7.25 in all."),
        (["."], " 351.4 dollars"),  # never inside a number
        (["25"], " 351.4 dollars. 你好！ It is 7.25 in all."),
        (["ll. Then", "好！ It"], " 351.4 dollars. 你"),
        (["n all?"], " 351.4 dollars. 你好！ It is 7.25 in all."),
    ],
)
@pytest.mark.parametrize("context", ["value", "digits", "both"])
def test_a_growing_text_is_the_text_up_to_its_stop_string(model, stops, expected, context):
    processor = CausalQwenProcessor(model.processor.tokenizer, model.processor.num_token_id, number_context=context)
    prompt, text = processor("The price is"), " 351.4 dollars. 你好！ It is 7.25 in all."
    encoded = processor("The price is" + text)
    start = len(prompt["input_ids"])
    growing = GrowingText(processor, prompt["input_ids"], prompt["numeric_values"], stops)
    pieces = []
    tokens = list(zip(encoded["input_ids"], encoded["numeric_values"], strict=True))[start:]
    for index, (token, value) in enumerate(tokens):
        growing.append(token, value)
        pieces.append(growing.take(final=index == len(tokens) - 1))
        if growing.stopped:
            break
    assert "".join(pieces) == growing.text == expected
    assert growing.stopped == (expected != text)
    assert sum(map(bool, pieces)) > 3 and not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("prompt", ["Add 3 to 12", "The price is", "价格是"])
def test_a_number_is_written_with_its_num_and_its_digits_add_nothing(model, prompt):
    processor = CausalQwenProcessor(model.processor.tokenizer, model.processor.num_token_id, number_context="digits")
    start = processor(prompt)
    ids, values = start["input_ids"], list(start["numeric_values"])
    growing, number, written = GrowingText(processor, ids, values, ["."]), -351.4, []
    for token in [number, *processor.tokens_of(ids, number), *processor.tokenizer(" K, 7")["input_ids"]]:
        is_number = token == number
        span = growing.append(processor.num_token_id if is_number else token, number if is_number else 0.0)
        written.append(growing.text)
        assert (span is not None) == is_number
        assert span is None or growing.text[slice(*span)] == "-351.4"
    between = "" if prompt == "价格是" else " "
    assert written[0] == between + "-351.4" == written[len(processor.tokens_of(ids, number))] and len(set(written)) > 2
    assert growing.take(final=True) == between + "-351.4 K, 7" and not growing.stopped


def test_a_stop_string_spares_a_number_with_a_decimal_comma(model):
    processor = CausalQwenProcessor(model.processor.tokenizer, number_rules=NumberRules(decimal=","))
    prompt, encoded = processor("Es kostet"), processor("Es kostet 351,4 Euro, ja")
    growing = GrowingText(processor, prompt["input_ids"], prompt["numeric_values"], [","])
    start = len(prompt["input_ids"])
    for token, value in list(zip(encoded["input_ids"], encoded["numeric_values"], strict=True))[start:]:
        growing.append(token, value)
    assert growing.take(final=True) == " 351,4 Euro" and growing.stopped


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param", "why"),
    [
        ({"causal": {"preset": "causal"}, "top_p": 0.9}, "top_p", "no noise of a token's own is drawn"),
        ({"causal": {"preset": "standard"}, "temperature": 0.7}, "temperature", "draws nothing"),
        ({"causal": {"preset": "causal", "temperature": 0.5}, "temperature": 0.7}, "temperature", "given twice: 0.7 and 0.5"),
        ({"causal": {"seed": 1}, "seed": 2}, "seed", "given twice"),
        ({"causal": {"own_mode": "token"}}, "causal", "own_mode is given beside"),
        ({"causal": {"individual_mode": "token"}}, "causal", "given together"),
        ({"causal": {"individual_mode": "token", "noise_mode": "off", "preset": "causal"}}, "causal", "says the modes already"),
        ({"causal": {"individual_mode": "all", "noise_mode": "off"}}, "causal.individual_mode", "Input should be"),
        ({"causal": {"individual_mode": "token", "noise_mode": "off", "individual": "Ann"}}, "causal.individual",
         "no effect under the preset token x off"),
        ({"causal": {"individual_mode": "token", "noise_mode": "off", "own_mode": "sequence"}}, "causal.own_mode", "should be"),
        ({"causal": {"preset": "causal", "individual": "Ann"}}, "causal.individual", "no individual is held"),
        ({"causal": {"preset": "persona", "individual": "../Ann"}}, "causal.individual", "did you mean Ann?"),
        ({"causal": {"preset": "bold"}}, "causal.preset", "should be"),
        ({"temperature": -1}, "temperature", "greater than"),
        ({"n": 9}, "n", "n=9 are more than the 8"),
        ({"max_tokens": 4001}, "max_tokens", "max_tokens is 4001"),
        ({"max_tokens": 4000}, "prompt", "context of 4096"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": [1, 2]}, "prompt", "a prompt of token ids needs number_context='digits'"),
        ({"echo": True, "logprobs": 0}, "prompt", "the likelihood of a prompt needs number_context='digits'"),
        ({"prompt": []}, "prompt", "at least 1 item"),
        ({"prompt": [[1], []]}, "prompt.1", "at least 1 item"),
        ({"prompt": ["a", ""]}, "prompt", "prompt 1: the prompt is empty"),
        ({"max_tokens": 0}, None, "no text at all"),
        ({"prompt": "1" + "0" * 400}, "prompt", "too large for float64"),
        ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
        ({"suffix": "!"}, "suffix", "suffix is not supported"),
        ({"best_of": 2}, "best_of", "best_of is not supported"),
        ({"top_k": 5}, "top_k", "top_k: Extra"),
        ({"stream_options": {"include_usage": True}}, None, "stream=true"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_a_400_that_says_why(server, fields, param, why):
    server.check_refused("completions", {"prompt": "It is " * 100, "max_tokens": 4} | fields, why, param)


def test_a_nucleus_under_the_documents_scale_is_a_400(tiny_tokenizer):
    with serving(graft_tiny("llama", tiny_tokenizer, start="documents")) as server:
        asked = {"prompt": "It", "max_tokens": 1, "causal": {"preset": "sample"}}
        assert server.ask("completions", **asked)[0] == 200
        server.check_refused("completions", asked | {"top_p": 0.5}, "needs score_scale='common'")


def test_what_asks_for_nothing_is_let_through(server):
    neutral = {"frequency_penalty": 0.0, "presence_penalty": 0, "logit_bias": {}, "user": "me", "top_p": 1}
    assert server.ask("completions", prompt="It", max_tokens=1, causal={"preset": "causal"}, **neutral)[0] == 200


def test_errors_have_the_shape_of_openais(server):
    with pytest.raises(openai.NotFoundError, match="does not exist") as caught:
        server.client.completions.create(model="another", prompt="It")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match=r"messages\.0\.role"):
        server.client.chat.completions.create(model="tiny", messages=[{"role": "tool", "content": "x"}])
    for path, method, status in (("/v1/nothing", "GET", 404), ("/v1/completions", "GET", 405)):
        found, text = server.send(None, path, method)
        assert found == status and json.loads(text)["error"]["type"] == "invalid_request_error"
    assert server.send("{}", **{"Content-Type": "text/plain"})[0] == 415


def test_a_key_is_asked_for_everywhere_but_on_health(model):
    with serving(model, api_keys={"right": None}) as server:
        for key in ("wrong", "right2", "ríght"):
            assert server.send(None, "/v1/models", "GET", Authorization=f"Bearer {key}".encode())[0] == 401
        with pytest.raises(openai.AuthenticationError, match="API key"):
            server.complete()
        assert [server.send(None, path, "GET")[0] for path in ("/health", "/metrics", "/v1/models")] == [200, 401, 401]
        assert server.client_with("right").models.list().data[0].id == "tiny"
    with serving(model, api_keys={"few": 2, "many": None}) as server:
        few = server.client_with("few")
        for _ in range(2):
            few.models.list()
        with pytest.raises(openai.RateLimitError, match="2 requests a minute") as caught:
            few.models.list()
        assert int(caught.value.response.headers["retry-after"]) in range(1, 31)
        assert server.client_with("many").models.list()


def test_a_full_queue_says_429_and_what_was_accepted_is_answered(model):
    with serving(model, max_waiting=2, max_rows=1) as server, ThreadPoolExecutor(3) as pool:
        with held(model):
            running = pool.submit(server.complete)
            until(lambda: server.metric("causalqwen_running") == 1)
            waiting = [pool.submit(server.complete) for _ in range(2)]
            until(lambda: server.metric("causalqwen_waiting") == 2)
            with pytest.raises(openai.RateLimitError, match="2 requests are waiting") as caught:
                server.complete()
            assert caught.value.response.headers["retry-after"] == "1"
        assert len({job.result().choices[0].text for job in [running, *waiting]}) == 1
        assert server.complete().choices[0].text


def test_bodies_and_times_are_limited(model):
    with serving(model, max_body=1000, timeout=0.4) as server:
        status, text = server.send({"model": "tiny", "prompt": "x" * 1000})
        assert status == 413 and json.loads(text)["error"]["code"] == "body_too_large"
        with held(model):
            with pytest.raises(openai.InternalServerError, match="no answer in the time") as caught:
                server.complete()
            assert caught.value.status_code == 503
            with pytest.raises(openai.APIError, match="no answer in the time"):
                list(server.complete(stream=True))
            assert server.metric("causalqwen_waiting") == 0
        with socket.create_connection(("127.0.0.1", server.port)) as slow:
            slow.sendall(raw({})[:-5])
            assert slow.recv(100).startswith(b"HTTP/1.1 408")


def test_a_batch_that_fails_is_a_500_and_the_next_one_runs(server, model, caplog):
    def fail(*args, **kwargs):
        raise RuntimeError("no memory")

    model.generate = fail
    try:
        with pytest.raises(openai.InternalServerError, match="the model failed"):
            server.complete()
    finally:
        del model.generate
    assert "no memory" in caplog.text
    assert server.complete().choices[0].text


# ---- clients that vanish or send rubbish -----------------------------------------------------------------------------


def raw(fields, path="completions"):
    body = json.dumps({"model": "tiny"} | fields).encode()
    head = (
        f"POST /v1/{path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


LONG = {"prompt": PROMPT, "max_tokens": 3900}


def test_a_client_that_vanishes_frees_its_place_in_queue_and_batch(server, model):
    written = server.metric('causalqwen_tokens_total{kind="written"}')
    stream = server.complete(max_tokens=3900, stream=True)
    next(iter(stream))
    stream.close()  # in the middle of its stream
    until(lambda: server.metric("causalqwen_running") == 0)
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(raw(LONG))  # before an answer that is not streamed
        until(lambda: server.metric("causalqwen_running") == 1)
    until(lambda: server.metric("causalqwen_running") == 0)
    assert server.metric('causalqwen_tokens_total{kind="written"}') - written < 3900
    with ThreadPoolExecutor(1) as pool, held(model):
        running = pool.submit(server.complete)
        until(lambda: server.metric("causalqwen_running") == 1)
        for fields in (LONG, LONG | {"stream": True}):
            with socket.create_connection(("127.0.0.1", server.port)) as client:
                client.sendall(raw(fields))  # in the queue
                until(lambda: server.metric("causalqwen_waiting") == 1)
            until(lambda: server.metric("causalqwen_waiting") == 0)
    assert running.result().choices[0].text


def test_a_client_that_vanishes_before_its_body_was_there_is_no_error(server, caplog):
    def counted(status):
        return server.metric(f'causalqwen_requests_total{{path="/v1/completions",status="{status}"}}')

    gone, failed = counted(499), counted(500)
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(raw(LONG)[:-9])
        time.sleep(0.2)  # the head has arrived, and the server waits for the rest
    until(lambda: counted(499) == gone + 1)
    assert "failed" not in caplog.text and counted(500) == failed


def test_a_vanished_neighbour_does_not_disturb_its_batch(server, model):
    alone = server.complete(max_tokens=60).choices[0]
    with ThreadPoolExecutor(2) as pool, held(model) as gate:
        pool.submit(server.complete, {"preset": "standard"}, max_tokens=1)
        until(lambda: server.metric("causalqwen_running") == 1)
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(raw(LONG | {"stream": True}))
            together = pool.submit(server.complete, max_tokens=60)
            until(lambda: server.metric("causalqwen_waiting") == 2)
            gate.set()
            client.recv(500)
        assert_same(together.result().choices[0], alone)
    until(lambda: server.metric("causalqwen_running") == 0)


JUNK = [
    None, True, -1, 0, 3, 2.5, 1e308, 10**400, -(2**63), "", " ", "x", "\ud800", "\ufdd0NUM\ufdd1", "1e999", "\x00", [], {},
    [[]], {"a": 1}, ["x"] * 9, [1, 2], [{"role": "user"}], [{"role": "user", "content": 5}], "9" * 5000, {"type": "text"},
    float("nan"),
]  # fmt: skip


def malformed(chance):
    """(path, body) of a request with something wrong in it, nearly always."""
    chat = chance.random() < 0.5
    path = "/v1/chat/completions" if chat else "/v1/completions"
    said = {"messages": [{"role": "user", "content": "It is 5"}]} if chat else {"prompt": "It is 5"}
    body = {"model": "tiny", "max_tokens": 2, **said}
    kind = chance.randrange(6)
    if kind == 0:
        return path, bytes(chance.randrange(256) for _ in range(chance.randrange(80)))
    if kind == 1:
        return path, json.dumps(body)[: chance.randrange(len(json.dumps(body)))].encode()
    if kind == 2:
        return path, b"[" * chance.randrange(1, 100_000)
    if kind == 3:
        body |= {"".join(chance.choices("abcdef_", k=5)): chance.choice(JUNK)}
    elif kind == 4:
        names = ("preset", "individual", "seed", "temperature", "own_mode", "other")
        body["causal"] = {chance.choice(names): chance.choice(JUNK) for _ in range(2)}
    else:
        further = "n temperature top_p seed stop stream stream_options causal user logprobs"
        names = [*body, *further.split()]
        body |= {chance.choice(names): chance.choice(JUNK) for _ in range(2)}
    return path, json.dumps(body).encode()


@pytest.mark.parametrize("count", [150, pytest.param(1000, marks=pytest.mark.slow)])
def test_malformed_requests_are_answered_4xx(server, count):
    chance, refused = random.Random(count), 0
    for _ in range(count):
        path, body = malformed(chance)
        status, text = server.send(body, path)
        assert status == 200 or 400 <= status < 500, (status, body[:300], text)
        if status != 200:
            assert json.loads(text)["error"]["message"], body[:300]
            refused += 1
    assert refused > 0.8 * count
    assert server.complete().choices[0].text
    until(lambda: server.metric("causalqwen_running") == server.metric("causalqwen_waiting") == 0)


@pytest.mark.parametrize(
    "lines",
    [
        b"\x16\x03\x01\x02\x00\x01",
        b"GET\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
    ],
)
def test_what_is_not_http_gets_no_further(server, lines):
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(lines)
        client.shutdown(socket.SHUT_WR)
        assert client.recv(1000)[:12] in (b"", b"HTTP/1.1 400")
    assert server.send(None, "/health", "GET")[0] == 200


# ---- starting one ----------------------------------------------------------------------------------------------------


def test_settings_and_individuals_are_checked(tmp_path, model):
    for wrong in ({"preset": "bold"}, {"max_rows": 0}, {"window": -1.0}, {"timeout": 0.0}, {"api_keys": {"": None}}):
        with pytest.raises(ValueError, match=next(iter(wrong)).replace("api_keys", "API key")):
            ServerSettings(**wrong)
    Individual.from_seed(1, model.config.causal_size).save(tmp_path / "Bob.safetensors")
    assert list(load_individuals(tmp_path, model.config.causal_size)) == ["Bob"]
    with pytest.raises(ValueError, match="Bob .* has 32 coordinates"):
        load_individuals(tmp_path, 7)
    with pytest.raises(ValueError, match="not a folder"):
        load_individuals(tmp_path / "none", 32)


@pytest.mark.parametrize(
    ("options", "address", "local"),
    [("", "127.0.0.1", True), ("--host 0.0.0.0", "0.0.0.0", False), ("--api-key-file keys", "127.0.0.1", False)],
)
def test_it_listens_on_this_machine_alone_unless_told(options, address, local, tmp_path, monkeypatch):
    """local: whether it answers to requests for this machine alone, as no page of another site makes them."""
    from causalqwen import serving as room
    from causalqwen_cli import serving as commands

    (tmp_path / "keys").write_text("secret\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CAUSALQWEN_API_KEY", raising=False)
    seen = []
    monkeypatch.setattr(commands, "_application", lambda model, settings, *_: (seen.append(settings.local), settings))
    monkeypatch.setattr(room, "run", lambda app, listener, log_requests: seen.append(listener.getsockname()[0]))
    told = CliRunner().invoke(cli, ["serve", "--model", ".", "--port", "0", *options.split()])
    assert told.exit_code == 0 and seen == [local, address]
    assert ("anybody who reaches 0.0.0.0 may use this server" in told.stderr) is (address == "0.0.0.0")


def test_the_command_serves_a_folder(tmp_path, tiny_tokenizer, monkeypatch):
    from causalqwen import serving as room

    graft_tiny("llama", tiny_tokenizer).save_pretrained(tmp_path / "small")
    (tmp_path / "key").write_text("secret\n")
    (tmp_path / "people").mkdir()
    Individual.from_seed(1, 32).save(tmp_path / "people" / "Bob.safetensors")
    seen = []

    def run(app, listener, log_requests):
        assert log_requests
        with closing(Server(app, listener)) as server, server.client_with("secret") as client:
            fields = {"extra_body": {"causal": {"individual": "Bob"}}, "max_tokens": 3}
            seen.append(client.completions.create(model="small", prompt="It is", **fields).usage.completion_tokens)
            assert client.models.list().data[0].causal["limits"]["max_prompts"] == 5

    monkeypatch.setattr(room, "run", run)
    options = f"--model {tmp_path}/small --individuals {tmp_path}/people --api-key-file {tmp_path}/key --port 0 --json"
    options += " --preset persona --device cpu --host 127.0.0.1 --window 0.001 --max-rows 2 --max-waiting 3"
    options = f"{options} --max-tokens 4 --max-body 5000 --timeout 60 --max-prompts 5 --max-heard 7".split()
    result = CliRunner().invoke(cli, ["serve", *options])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["model"] == "small" and told["individuals"] == ["Bob"] and told["url"].startswith("http://127.0.0.1:")
    assert len(seen) == 1 and 1 <= seen[0] <= 3
    taken = socket.create_server(("127.0.0.1", 0))
    with taken:
        result = CliRunner().invoke(cli, ["serve", *options, "--port", str(taken.getsockname()[1])])
    assert result.exit_code == 1 and "in use" in result.stderr


def test_without_the_extra_the_message_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("causalqwen.serving")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("causalqwen.serving")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    result = CliRunner().invoke(cli, ["serve", "--model", "."])
    assert result.exit_code == 1 and "pip install 'causalqwen[serve]'" in result.stderr


def test_a_server_runs_where_the_collector_passes_over_the_model_and_large_pieces_are_given_back(monkeypatch):
    """Half a million objects of the model; what is still frozen as a process ends, libraries tell as lost."""
    seen, told = [], []
    monkeypatch.setattr(listening, "_libc", lambda *call: told.append(call))
    monkeypatch.setattr(listening.signal, "signal", lambda *_: None)
    monkeypatch.setattr(listening.sys, "setswitchinterval", lambda _: None)
    run = SimpleNamespace(run=lambda sockets: seen.append((gc.get_freeze_count(), list(told))))
    monkeypatch.setattr(listening, "Listener", lambda *_: run)
    listening.run(None, None)
    (frozen, before), after = seen[0], gc.get_freeze_count()
    assert frozen > 10_000 and after == 0 and before == [("mallopt", -3, 16 << 20)]
