"""What clients send to a server and expect of it: log-probabilities, echoes, ids, keys, the log, slow connections, its end."""

import json
import logging
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

import openai
import pytest
import torch

from causalqwen.serving import listening, read_keys
from causalqwen.serving.journal import JsonLines
from causalqwen.serving.keys import Keys
from causalqwen.serving.logprobs import _spelled_word
from causalqwen.serving.settings import ApiError
from causalqwen.serving.text import GrowingText
from causalqwen_vllm.request_options import RequestOptions
from conftest import FREE_ROWS, graft_tiny, make_backbone
from test_serving import PROMPT, held, raw, serving, start, talker, until

WORDS = "They say that 31.5 of the people, 价格 in all, went on"


@pytest.fixture(scope="module")
def model(tiny_tokenizer):
    return talker(tiny_tokenizer)


@pytest.fixture(scope="module")
def server(model):
    with serving(model, window=0.002) as made:
        yield made


def backbones_own(backbone, ids):
    """log p of each token but the first [L - 1], and of all tokens [L - 1, V], of the bare backbone."""
    with torch.no_grad():
        rows = backbone(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return rows.gather(-1, torch.tensor(ids[1:]).unsqueeze(-1)).squeeze(-1).tolist(), rows


# ---- log-probabilities and echoes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_an_echo_has_the_bare_backbones_log_probabilities(tiny_tokenizer, family):
    backbone, graft = make_backbone(family, tiny_tokenizer), graft_tiny(family, tiny_tokenizer)
    with torch.no_grad():
        graft.action.num_row.normal_()
    texts = [WORDS, "A new year"]
    ids = [tiny_tokenizer(text)["input_ids"] for text in texts]
    with serving(graft) as server:
        of_text = server.complete(prompt=texts, echo=True, logprobs=3, max_tokens=0)
        of_ids = server.complete(prompt=ids, echo=True, logprobs=3, max_tokens=0)
        one = server.complete(prompt=ids[0], echo=True, logprobs=3, max_tokens=0)
    assert [choice.logprobs for choice in of_text.choices] == [choice.logprobs for choice in of_ids.choices]
    assert one.choices[0].logprobs == of_ids.choices[0].logprobs
    for row, (text, choice) in enumerate(zip(texts, of_text.choices, strict=True)):
        told, (expected, every) = choice.logprobs, backbones_own(backbone, ids[row])
        assert choice.text == text == of_ids.choices[row].text and choice.finish_reason == "length"
        assert told.token_logprobs[0] is None and told.top_logprobs[0] is None
        assert told.token_logprobs[1:] == pytest.approx(expected, abs=1e-5)
        offsets = tiny_tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
        assert told.text_offset == [start for start, _ in offsets]
        assert told.tokens == [_spelled_word(tiny_tokenizer, token)[0] for token in ids[row]]
        for place, top in enumerate(told.top_logprobs[1:]):
            usable = every[place, : len(tiny_tokenizer)]  # no name for rows that no token uses
            assert sorted(top.values())[-3:] == pytest.approx(usable.topk(3).values.flip(0).tolist(), abs=1e-5)
            assert told.token_logprobs[place + 1] in top.values() and 3 <= len(top) <= 4
        p = graft(torch.tensor([ids[row]]), output_ovr=True).ovr_probs[0, :-1]
        of_tokens = p.gather(-1, torch.tensor(ids[row][1:]).unsqueeze(-1)).squeeze(-1)
        assert choice.causal["ovr"]["token_logprobs"][1:] == pytest.approx(of_tokens.log().tolist(), rel=1e-3)
        of_ovr = choice.causal["ovr"]["top_logprobs"]
        assert [top and top.keys() for top in of_ovr] == [top and top.keys() for top in told.top_logprobs]
    assert (FREE_ROWS[family] > 0) == (len(every[0]) > len(tiny_tokenizer))
    assert of_ids.usage.prompt_tokens == sum(map(len, ids)) and of_ids.usage.completion_tokens == 0


@pytest.mark.parametrize("seed", [13, 14])
def test_written_tokens_have_the_log_probabilities_that_an_echo_gives_them(server, model, seed):
    """Digits too, whose `<NUM>` the backbone does not see."""
    tokenizer, fields = model.processor.tokenizer, {"logprobs": 2, "max_tokens": 40, "n": 2, "seed": seed}
    known = {_spelled_word(tokenizer, token)[0]: token for token in range(len(tokenizer))}
    begun = tokenizer(PROMPT)["input_ids"]
    answer = server.complete({"preset": "causal", "alternatives": 2}, **fields)
    assert answer.usage.completion_tokens == sum(len(choice.logprobs.tokens) for choice in answer.choices)
    found = 0
    for choice in answer.choices:
        told = choice.logprobs
        written = [known[name] for name in told.tokens if name != "<NUM>"]
        echoed = server.complete(prompt=begun + written, echo=True, logprobs=2, max_tokens=0).choices[0].logprobs
        of_words = [value for name, value in zip(told.tokens, told.token_logprobs, strict=True) if name != "<NUM>"]
        assert of_words == pytest.approx(echoed.token_logprobs[len(begun) :], abs=2e-4)
        text = GrowingText(model.processor, [], [], [])
        for place, name in enumerate(told.tokens):
            is_part = any(one.startswith("bytes:") for one in told.tokens[max(place - 1, 0) : place + 1])
            assert name == "<NUM>" or is_part or choice.text.startswith(name, told.text_offset[place])
            text.append(known.get(name, 0), 0.0)
        places = [place for place, name in enumerate(told.tokens) if name == "<NUM>"]
        for place, number in zip(places, choice.causal["numbers"], strict=True):
            said = choice.text[slice(*number["span"])]
            assert 0 <= number["span"][0] - told.text_offset[place] <= 2, "behind its space, and a byte before that"
            is_cut = place + len(said) + 2 > len(told.tokens)
            assert is_cut or "".join(told.tokens[place + 1 :]).lstrip().startswith(said)
            found += 1
        shares = [one["chosen"]["softmax"] for one in choice.causal["tokens"] if one["chosen"]["name"] == "<NUM>"]
        assert [math.exp(told.token_logprobs[place]) for place in places] == pytest.approx(shares, rel=1e-3)
    assert found > 2


def test_streamed_log_probabilities_join_to_the_whole(server):
    fields = {"logprobs": 1, "echo": True, "n": 2, "max_tokens": 20, "stop": ["the", "q"]}
    whole = server.complete({"preset": "causal"}, **fields).choices
    joined, texts, numbers, ends = [{}, {}], ["", ""], [[], []], [None, None]
    for event in server.complete({"preset": "causal"}, stream=True, **fields):
        for choice in event.choices:
            texts[choice.index] += choice.text
            numbers[choice.index] += choice.causal["numbers"]
            ends[choice.index] = choice.finish_reason or ends[choice.index]
            for name, column in choice.logprobs.model_dump().items():
                joined[choice.index].setdefault(name, []).extend(column)
    assert joined == [choice.logprobs.model_dump() for choice in whole]
    assert ends == [choice.finish_reason for choice in whole]
    assert texts == [choice.text for choice in whole] and all(text.startswith(PROMPT) for text in texts)
    assert numbers == [choice.causal["numbers"] for choice in whole] and any(numbers)
    for choice in whole:
        assert all(float(choice.text[slice(*one["span"])]) == one["value"] for one in choice.causal["numbers"])


def test_chats_have_log_probabilities_in_their_own_shape(server):
    fields = {"model": "tiny", "messages": [{"role": "user", "content": "Say"}], "max_tokens": 12, "seed": 3}
    fields |= {"logprobs": True, "top_logprobs": 2, "extra_body": {"causal": {"preset": "standard"}}}
    choice = server.client.chat.completions.create(**fields).choices[0]
    entries = choice.logprobs.content
    assert len(entries) == 12 and all(len(entry.top_logprobs) == 2 for entry in entries)
    assert all(entry.logprob <= entry.top_logprobs[0].logprob for entry in entries if entry.token != "<NUM>")
    words = [entry for entry in entries if entry.bytes is not None]
    assert all(bytes(entry.bytes).decode() == entry.token for entry in words if not entry.token.startswith("bytes:"))
    assert len(choice.causal["ovr"]["token_logprobs"]) == 12
    with server.client.chat.completions.stream(**fields) as stream:
        last = [event for event in stream if event.type == "logprobs.content.delta"][-1].snapshot
    assert [one.model_dump() for one in last] == [one.model_dump() for one in entries]
    bare = server.client.chat.completions.create(**fields | {"top_logprobs": None}).choices[0].logprobs.content
    assert [one.logprob for one in bare] == [one.logprob for one in entries] and not bare[0].top_logprobs
    with pytest.raises(openai.BadRequestError, match="belong to logprobs"):
        server.client.chat.completions.create(**fields | {"logprobs": False})


def test_a_part_of_a_character_is_spelled_by_its_bytes(tiny_tokenizer):
    ids = tiny_tokenizer("价")["input_ids"]
    spelled = [_spelled_word(tiny_tokenizer, token) for token in ids]
    assert bytes(byte for _, raw in spelled for byte in raw).decode() == "价" and len(ids) > 1
    assert spelled[0] == ("bytes:\\xe4", [0xE4])
    assert "".join(_spelled_word(tiny_tokenizer, token)[0] for token in tiny_tokenizer(PROMPT)["input_ids"]) == PROMPT


def test_ids_are_a_prompt_as_they_are(server, model):
    tokenizer = model.processor.tokenizer
    ids = tokenizer(PROMPT)["input_ids"]
    for preset in ("standard", "persona"):  # under softmax draws count `<NUM>` too
        of_text, of_ids = (server.complete({"preset": preset}, prompt=one, max_tokens=20) for one in (PROMPT, ids))
        assert of_ids.choices[0].text == of_text.choices[0].text, preset
    split = [token for letter in "They say" for token in tokenizer(letter)["input_ids"]]
    answer = server.complete(prompt=[split, ids], echo=True, max_tokens=1)
    assert [choice.text.startswith(text) for choice, text in zip(answer.choices, ("They say", PROMPT), strict=True)]
    assert answer.usage.prompt_tokens == len(split) + len(ids) > len(ids) + len(tokenizer("They say")["input_ids"])
    for wrong in (len(tokenizer), model.config.num_token_id, 10**6):
        with pytest.raises(openai.BadRequestError, match=f"no token has the id {wrong}"):
            server.complete(prompt=[5, wrong])


def test_an_echo_goes_before_each_text_and_no_text_is_enough(server):
    plain = server.complete({"preset": "standard"}, n=2).choices[0]
    echoed = server.complete({"preset": "standard"}, n=2, echo=True)
    assert [choice.text for choice in echoed.choices] == [PROMPT + plain.text] * 2
    assert echoed.choices[0].logprobs is None
    none = server.complete(echo=True, max_tokens=0, prompt=PROMPT + " ")
    assert none.choices[0].text == PROMPT + " " and none.usage.completion_tokens == 0


def test_bytes_that_never_become_a_character_are_read_in_time(model):
    token = model.processor.tokenizer.convert_tokens_to_ids("ä")  # the byte 0xE4, which begins a character
    growing, start = GrowingText(model.processor, [], [], []), time.perf_counter()
    for _ in range(3000):
        growing.append(token, 0.0)
    assert growing.take(final=True).count("\ufffd") >= 2990 and time.perf_counter() - start < 5


# ---- fields that are not there ---------------------------------------------------------------------------------------


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "f", "schema": {"type": "object"}}}


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [TOOL]}, {"tool_choice": "auto"}, {"functions": [TOOL["function"]]}, {"response_format": SCHEMA},
        {"response_format": {"type": "json_object"}}, {"frequency_penalty": 0.5}, {"logit_bias": {"5": 1}}, {"store": True},
        {"metadata": {"a": "b"}}, {"modalities": ["text", "audio"]}, {"reasoning_effort": "low"}, {"web_search_options": {}},
    ],
    ids=lambda fields: next(iter(fields)),
)  # fmt: skip
def test_what_is_not_there_is_refused_with_the_standard_error(server, fields):
    with pytest.raises(openai.BadRequestError, match="not supported") as caught:
        server.client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "It"}], **fields)
    error, field = caught.value, next(iter(fields))
    assert (error.type, error.param, error.code) == ("invalid_request_error", field, "unsupported_parameter")


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("completions", {"stop": list("abcde")}, "stop"),
        ("completions", {"stop": ["a", ""]}, "stop.1"),
        ("completions", {"prompt": [[1, -1]]}, "prompt.0.1"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "file"}]}]}, "messages.0.content.0.type"),
        ("chat/completions", {"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
        ("numbers", {"prompts": ["a", 3]}, "prompts.1"),
        ("numbers", {"prompts": ["a"], "classes": [3]}, "classes.0"),
        ("individuals", {"individuals": [{"observations": [{"prompt": "a", "text": 3}]}]}, "individuals.0.observations.0.text"),
        ("individuals", {"individuals": [{"observations": [3]}]}, "individuals.0.observations.0"),
    ],
)  # fmt: skip
def test_an_error_names_the_field_and_the_place_in_it(server, path, fields, param):
    server.check_refused(path, fields, f"{param}: ", param)


@pytest.mark.parametrize(
    ("message", "param", "why"),
    [
        ({"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}, "tool_calls", "tool_calls is not supported"),
        ({"role": "assistant", "content": None, "refusal": "No."}, "refusal", "refusal is not supported"),
        ({"role": "user", "content": None}, "messages.0", "a message of the role 'user' needs content"),
        ({"role": "user"}, "messages.0", "a message of the role 'user' needs content"),
        ({"role": "user", "content": "x", "weight": 0}, "messages.0.weight", "Extra"),
    ],
)  # fmt: skip
def test_a_message_that_asks_for_more_is_refused(server, message, param, why):
    server.check_refused("chat/completions", {"messages": [message], "max_tokens": 1}, why, param)


def test_none_asks_vllm_for_nothing():
    names = "individual_mode noise_mode values places key kept_from top_p individual x"
    nulls = dict.fromkeys(names.split())
    for asked in ({}, {"preset": "persona", "temperature": 0.5, "seed": 3}):
        assert RequestOptions.read(asked | nulls) == RequestOptions.read(asked)
    with pytest.raises(ValueError, match=r"unknown setting temprature; did you mean temperature\?"):
        RequestOptions.read({"temprature": 0.5})


def test_a_history_goes_back_as_the_official_client_dumps_it(server):
    said = [{"role": "user", "content": "How far is it?"}]
    fields = {"model": "tiny", "max_tokens": 4, "seed": 3}
    answer = server.client.chat.completions.create(messages=said, **fields).choices[0].message
    plain = {"role": "assistant", "content": answer.content}
    dumped = answer.model_dump()
    assert {"refusal", "audio", "function_call", "tool_calls", "annotations"} <= dumped.keys()
    histories = [
        [*said, plain, *said],
        [*said, dumped, *said],
        [*said, dumped | {"annotations": [], "tool_calls": [], "name": None, "reasoning": None}, *said],
        [said[0] | {"name": None}, plain | {"content": [{"type": "text", "text": answer.content, "x": None}]}, *said],
    ]
    made = [server.client.chat.completions.create(messages=one, **fields).choices[0] for one in histories]
    assert len({one.message.content for one in made}) == 1
    empty = [*said, {"role": "assistant", "content": None, "refusal": None}, *said]
    assert server.client.chat.completions.create(messages=empty, **fields).usage.completion_tokens == 4


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("completions", {"prompt": "It was", "max_tokens": 2, "seed": 3, "causal": {"seed": None, "none": None}}),
        ("completions", {"prompt": "It was", "max_tokens": 5, "seed": 3}
            | dict.fromkeys(("n", "causal", "stop", "stream", "logprobs", "echo"))),
        ("completions", {"prompt": "It was", "max_tokens": 2, "seed": 3, "stream_options": {"include_usage": None},
                         "stream": True}),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "seed": 3,
                              "continue_final_message": None}),
        ("numbers", {"prompts": ["It was"], "levels": None, "values": [None]}),
        ("individuals", {"individuals": [{"seed": 7, "observations": None, "likelihood": None, "share": None}]}),
        ("individuals", {"individuals": [{"observations": [{"text": "a b c", "prompt": None, "options": None}]}],
                         "words": None, "save": None}),
        ("population", {"individuals": None, "drawn": {"count": 2, "seed": None}, "draws": None,
                        "questions": [{"prompt": "It was", "options": ["a", "b"], "name": None}]}),
        ("worlds", {"prompt": "It was", "text": " a b", "interventions": [{"prompt": "He was", "tokens": None,
                    "values": None}], "noise": None, "num_samples": None, "seed": None}),
    ],
)  # fmt: skip
def test_null_asks_for_nothing_in_every_object(server, path, fields):
    def without_nulls(part):
        if isinstance(part, dict):
            return {name: without_nulls(one) for name, one in part.items() if one is not None}
        return list(map(without_nulls, part)) if isinstance(part, list) else part

    def answer(body):
        status, text = server.send({"model": "tiny"} | body, f"/v1/{path}")
        assert status == 200, text
        return re.sub(rb'"(id|created|seconds)": ?[^,}]+', b"", text)

    assert answer(fields | {"anything": None}) == answer(without_nulls(fields))


@pytest.mark.parametrize("preset", ["softmax", "standard"])
def test_a_space_at_the_end_of_a_prompt_is_given_back_once(server, preset):
    asked = {"echo": True, "max_tokens": 12}
    answers = [server.complete({"preset": preset}, prompt=one, **asked) for one in (WORDS, WORDS + " ", " ")]
    bare, spaced, only = (answer.choices[0] for answer in answers)
    behind = bare.text.removeprefix(WORDS)
    assert spaced.text == WORDS + " " + behind.removeprefix(" ")
    assert only.text.startswith(" ") and len(only.text) > 1
    moved = 1 - behind.startswith(" ")
    for one, other in zip(bare.causal["numbers"], spaced.causal["numbers"], strict=True):
        assert [at + moved for at in one["span"]] == other["span"]
        assert spaced.text[slice(*other["span"])] == bare.text[slice(*one["span"])]
    alone = server.complete({"preset": preset}, prompt=WORDS + " ", max_tokens=12).choices[0].text
    assert WORDS + " " + alone == spaced.text
    streamed = server.complete({"preset": preset}, prompt=WORDS + " ", max_tokens=12, stream=True)
    assert "".join(event.choices[0].text for event in streamed) == alone


def test_a_space_at_the_end_is_read_where_nothing_is_to_follow(server):
    asked = {"echo": True, "max_tokens": 0, "logprobs": 0}
    bare, spaced = (server.complete(prompt=prompt, **asked).choices[0] for prompt in ("A b", "A b "))
    assert (bare.text, spaced.text) == ("A b", "A b ") and "".join(spaced.logprobs.tokens) == "A b "
    assert len(spaced.logprobs.tokens) == len(bare.logprobs.tokens) + 1


def test_a_number_behind_a_space_has_its_digits_where_they_are(tiny_tokenizer, model):
    processor, ids = model.processor, model.processor("It is ", prompt=True)
    growing = GrowingText(processor, ids["input_ids"], ids["numeric_values"], (), after_space=True)
    assert growing.append(processor.num_token_id, -351.4) == (0, 6)
    ends = [growing.end]
    for token in processor.tokens_of(ids["input_ids"], -351.4):
        growing.append(token, 0.0)
        ends.append(growing.end)
    assert growing.take(final=True) == "-351.4" and ends == sorted(ends) and (ends[0], ends[-1]) == (0, 6)


def test_usage_comes_last_and_null_before(server):
    events = list(server.complete(stream=True, stream_options={"include_usage": True}, max_tokens=5))
    assert events[-1].usage.completion_tokens == 5 and not events[-1].choices
    assert all("usage" in event.model_fields_set and event.usage is None for event in events[:-1])
    bare = list(server.complete(stream=True, max_tokens=5))
    assert all("usage" not in event.model_fields_set for event in bare)


# ---- keys, the log, what is told of the server -------------------------------------------------------------------------


def test_a_key_has_so_many_requests_a_minute():
    now = [0.0]
    keys = Keys({"a": 2, "b": None}, clock=lambda: now[0])
    names = [keys.admit("Bearer a") for _ in range(2)]
    assert names[0] == names[1] != keys.admit("bearer  b ") and len(names[0]) == 8
    with pytest.raises(ApiError, match="2 requests a minute; the next one is in 30 s") as caught:
        keys.admit("Bearer a")
    assert (caught.value.status, caught.value.retry_after) == (429, 30)
    for _ in range(100):
        keys.admit("Bearer b")
    now[0] = 30.0
    keys.admit("Bearer a")
    with pytest.raises(ApiError, match="next one is in 30 s"):
        keys.admit("Bearer a")
    now[0] = 1e6  # no more than a minute's can be saved
    for _ in range(2):
        keys.admit("Bearer a")
    with pytest.raises(ApiError, match="requests a minute"):
        keys.admit("Bearer a")
    for wrong in ("Bearer c", "Basic a", "a", "", "Bearer", "Bearer a b"):
        with pytest.raises(ApiError, match="wrong or no API key"):
            keys.admit(wrong)


def test_keys_are_compared_whole_and_in_constant_time(monkeypatch):
    import hmac

    seen, compare = [], hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda one, other: seen.append((one, other)) or compare(one, other))
    keys = Keys({"first": None, "second": None, "third": None})
    keys.admit("Bearer first")
    assert len(seen) == 3 and {len(one) for pair in seen for one in pair} == {32}  # digests, whatever was sent


def test_a_file_of_keys_is_checked():
    assert read_keys("one\n\n two 60 \n") == {"one": None, "two": 60}
    wrong_lines = {"": "empty", "a\nb 0": "line 2", "a 5 6": "line 1", "a x": "line 1", "a\na 5": "line 2"}
    for wrong, said in wrong_lines.items():
        with pytest.raises(ValueError, match=said):
            read_keys(wrong)


def test_each_request_has_an_id_and_one_line_of_the_log(model, caplog):
    caplog.set_level(logging.INFO, "causalqwen.serving")
    body = json.dumps({"model": "tiny", "prompt": "a secret", "max_tokens": 2})
    with serving(model, api_keys={"right": None}) as server:
        fields = {"Content-Type": "application/json", "Authorization": "Bearer right", "X-Request-Id": "mine-1.a"}
        assert server.request("/v1/completions", "POST", body, **fields)[1]["x-request-id"] == "mine-1.a"
        given = server.request("/v1/models", "GET", **{"X-Request-Id": "a b\u00e9"})[1]["x-request-id"]
        assert len(given) == 32 and given != server.request("/health")[1]["x-request-id"]
        answer = server.client_with("right").completions.create(model="tiny", prompt="It", max_tokens=1)
        assert answer._request_id and answer.id == f"cmpl-{answer._request_id}"
    lines = [json.loads(JsonLines().format(record)) for record in caplog.records]
    assert [(line["path"], line["status"]) for line in lines] == [
        ("/v1/completions", 200), ("/v1/models", 401), ("/health", 200), ("/v1/completions", 200),
    ]  # fmt: skip
    first = lines[0]
    assert first["request_id"] == "mine-1.a" and first["method"] == "POST" and first["seconds"] > 0
    assert first["completion_tokens"] == 2 and len(first["key"]) == 8
    assert first["logger"] == "causalqwen.serving.journal"
    assert "secret" not in str(lines) and "right" not in str(lines) and "key" not in lines[1]


def test_what_goes_wrong_inside_is_a_500_with_an_id_and_a_traceback_in_the_log(model, caplog, monkeypatch):
    from causalqwen.serving import texts

    monkeypatch.setattr(texts, "job_of", lambda *of: 1 / 0)
    with serving(model) as server:
        with pytest.raises(openai.InternalServerError, match="something went wrong inside") as caught:
            server.complete()
        until(lambda: server.metric('causalqwen_requests_total{path="/v1/completions",status="500"}') == 1)
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    line = json.loads(JsonLines().format(record))
    assert caught.value.request_id in line["message"] and "ZeroDivisionError" in line["traceback"]


def test_a_server_that_would_take_nothing_says_that_it_is_not_ready(model):
    with serving(model, max_waiting=1, max_rows=1) as server, ThreadPoolExecutor(2) as pool:
        assert server.request("/ready")[0] == 200
        with held(model):
            jobs = [pool.submit(server.complete)]
            until(lambda: server.metric("causalqwen_running") == 1)
            jobs.append(pool.submit(server.complete))
            until(lambda: server.metric("causalqwen_waiting") == 1)
            assert server.request("/ready")[0] == 503 and server.request("/health")[0] == 200
        assert all(job.result().choices for job in jobs) and server.request("/ready")[0] == 200
        server.app.state.batcher.refuse()
        assert server.request("/ready")[0] == 503
        with pytest.raises(openai.InternalServerError, match="shutting down"):
            server.complete()


def test_a_name_that_another_site_gives_this_machine_is_refused(model):
    with serving(model, local=True) as server:
        for host, status in (
            ("127.0.0.1", 200), ("localhost:8000", 200), ("LOCALHOST", 200), ("[::1]:5", 200), ("evil.example", 400),
            ("127.0.0.1.evil.example", 400), ("", 400), ("x@127.0.0.1", 400), ("localhost:x", 400), ("[::1", 400),
        ):  # fmt: skip
            assert server.request("/health", Host=host)[0] == status, host
    with serving(model) as server:
        assert server.request("/health", Host="proxied.example")[0] == 200


def test_bodies_that_are_no_plain_json_are_refused(server):
    body = json.dumps({"model": "tiny", "prompt": "It"})
    for headers, status in (
        ({"Content-Encoding": "gzip"}, 415), ({"Content-Encoding": "identity"}, 200), ({"Content-Type": "text/json"}, 415),
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
    ):  # fmt: skip
        assert server.send(body, **headers)[0] == status
    for encoding in ("utf-16", "utf-32", "utf-8-sig"):
        assert server.send(body.encode(encoding))[0] == 400
    assert server.send(body.encode().replace(b"It", b"\xff\xfe"))[0] == 400
    assert server.send('{"model": "tiny", "prompt": "It", "n": 1' + "0" * 5000 + "}")[0] == 400


def test_long_requests_are_read_one_at_a_time_and_few_may_wait(model, monkeypatch):
    from causalqwen.serving import texts

    gate, read, busy = threading.Event(), texts.job_of, []

    def slowly(asked, *rest):
        if len(asked.prompt) > 1000:
            busy.append(asked)
            assert gate.wait(20) and len(busy) == 1
            busy.pop()
        return read(asked, *rest)

    trimmed = []
    monkeypatch.setattr(texts, "job_of", slowly)
    monkeypatch.setattr(listening, "_libc", lambda *_: trimmed.append(threading.current_thread()))
    body = json.dumps({"model": "tiny", "prompt": "1 2 3 " * 20_000})
    with serving(model) as server, ThreadPoolExecutor(5) as pool:
        (refused,), held_up = wait([pool.submit(server.send, body) for _ in range(5)], 20, FIRST_COMPLETED)
        assert refused.result()[0] == 429 and busy
        assert server.complete(max_tokens=2).usage.completion_tokens == 2  # a short one is not held up
        gate.set()
        assert [job.result()[0] for job in held_up] == [400] * 4
    assert len(trimmed) == 4 and len(set(trimmed)) == 1  # their memory is given back, a short one's is kept


# ---- connections that nothing comes over, and the end ------------------------------------------------------------------


def closed_after(client):
    """Seconds until the other side ends a connection, what it sends read on the way."""
    start = time.monotonic()
    client.settimeout(20)
    try:
        while client.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    return time.monotonic() - start


def ended_within(client, part, seconds):
    """Whether the other side ends a connection over which it gets a part every now and then."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            client.sendall(part)
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_a_request_that_is_not_moved_on_loses_its_connection(model, monkeypatch):
    monkeypatch.setattr(listening, "PATIENCE", 0.5)
    with serving(model) as server:
        for sent in (b"", b"GET /health HTTP/1.1\r\nHost: x\r\nX", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /"):
            with socket.create_connection(("127.0.0.1", server.port)) as client:
                client.sendall(sent)
                assert 0.3 < closed_after(client) < 5, sent
        with socket.create_connection(("127.0.0.1", server.port)) as client:  # each byte is no step ahead
            assert ended_within(client, b"G", 4)
        with socket.create_connection(("127.0.0.1", server.port)) as client:  # a body that goes on after its answer
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 415")
            assert ended_within(client, b"x" * 1000, 4)
        assert not server.uvicorn.server_state.connections


def test_an_answer_that_nobody_takes_is_dropped(model, monkeypatch):
    monkeypatch.setattr(listening, "PATIENCE", 0.3)
    with serving(model, timeout=5) as server, socket.socket() as client:
        server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.port))
        client.sendall(raw({"prompts": ["It is"] * 8, "points": 1000, "levels": [0.5]}, "numbers"))
        until(lambda: server.metric("causalqwen_requests_total") > 0)
        until(lambda: not server.uvicorn.server_state.connections, 10)


def test_what_is_held_at_the_end_is_answered(model):
    server = start(model)
    with ThreadPoolExecutor(3) as pool:
        with held(model) as gate:
            jobs = [pool.submit(server.complete, {"preset": "standard"}, max_tokens=5) for _ in range(2)]
            until(lambda: server.metric("causalqwen_running") + server.metric("causalqwen_waiting") == 2)
            server.uvicorn.should_exit = True
            until(lambda: not server.app.state.batcher.ready)
            gate.set()
        assert all(job.result().usage.completion_tokens == 5 for job in jobs)
    server.close()


def test_what_cannot_be_ended_in_time_is_handed_back(model, monkeypatch):
    monkeypatch.setattr(listening.Listener, "patience", 0.3)
    server = start(model, max_rows=1)
    with ThreadPoolExecutor(3) as pool:
        long = pool.submit(server.complete, max_tokens=3900)
        until(lambda: server.metric("causalqwen_running") == 1)
        waiting = pool.submit(server.complete)
        stream = server.complete(max_tokens=5, stream=True)
        server.uvicorn.should_exit = True
        for job in (long, waiting):
            with pytest.raises(openai.InternalServerError, match="shutting down") as caught:
                job.result()
            assert caught.value.status_code == 503 and caught.value.response.headers["retry-after"] == "1"
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
    server.close()
    assert not server.thread.is_alive()


@pytest.mark.slow
@pytest.mark.parametrize("name", [signal.SIGTERM, signal.SIGINT])
def test_the_command_ends_a_text_on_a_signal_and_with_status_0(tmp_path, tiny_tokenizer, name):
    talker(tiny_tokenizer).save_pretrained(tmp_path / "small")
    command = [sys.executable, "-m", "causalqwen_cli", "serve", "--model", tmp_path / "small", "--port", "0", "--json"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=os.environ, **pipes) as process:
        told = json.loads(process.stdout.readline())
        answers = []
        with openai.OpenAI(base_url=told["url"], api_key="none", max_retries=0) as client:
            fields = {"model": told["model"], "prompt": "It is", "max_tokens": 300}
            asking = threading.Thread(target=lambda: answers.append(client.completions.create(**fields)))
            asking.start()
            metrics = told["url"].removesuffix("/v1") + "/metrics"
            until(lambda: b"causalqwen_running 1.0" in urllib.request.urlopen(metrics).read())
            process.send_signal(name)
            asking.join()
        out, err = process.communicate(timeout=60)
    assert answers[0].usage.completion_tokens == 300 and process.returncode == 0 and out == ""
    assert "Traceback" not in err and "leaked" not in err, err
    last = json.loads(err.splitlines()[-1])
    assert last["path"] == "/v1/completions" and last["status"] == 200
