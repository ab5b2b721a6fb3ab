"""A little of the campaign's part of vLLM (tests/campaign/engine.py), and that it finds what is wrong."""

import pytest

from campaign import Bounds, engine
from causalqwen_vllm.requests import Request

pytestmark = pytest.mark.filterwarnings("default")


def test_texts_under_load_are_those_of_generate(tiny_tokenizer, tmp_path):
    tally = engine.run(Bounds(len(engine.MODELS), 600), tmp_path, tiny_tokenizer)
    print(tally.table())
    assert not tally.found, tally.table()
    told = {what.split(": ")[1] for what, count in tally.tried.items() if count}
    assert {"preempted", "called off", "persona", "softmax"} <= told
    assert sum(tally.tried.values()) >= len(engine.MODELS) * engine.AT_ONCE


@pytest.mark.parametrize("name", ["digits", "copies, value", "classes, digits"])
def test_a_number_that_another_request_wrote_is_found(name, tiny_tokenizer, tmp_path, monkeypatch):
    """Values that lie 1% off are another text."""
    write = Request.write
    monkeypatch.setattr(Request, "write", lambda self, value: write(self, value * 1.01))
    draw = list(engine.MODELS).index(name)
    assert engine.run(Bounds(len(engine.MODELS), 300, only=draw), tmp_path, tiny_tokenizer).found
