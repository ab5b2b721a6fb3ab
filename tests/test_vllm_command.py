"""`python -m causalqwen_vllm` up to where vLLM begins; tests/vllm starts the server itself, where vLLM is installed."""

import os
import sys
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from causalqwen_vllm import endpoints
from causalqwen_vllm.__main__ import main
from conftest import graft_tiny

ENTRY = "vllm.entrypoints.launchers.api_server.entry"


@pytest.fixture(scope="module")
def folder(tiny_tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("plugin") / "model"
    graft_tiny("llama", tiny_tokenizer).save_pretrained(path)
    return path


@pytest.fixture
def started(folder, monkeypatch):
    """What vLLM is started with, last given first."""

    def start(*options):
        seen = []
        monkeypatch.setitem(sys.modules, ENTRY, SimpleNamespace(main=lambda: seen.extend(sys.argv)))
        monkeypatch.setattr(sys, "argv", ["causalqwen_vllm", str(folder), *options])
        monkeypatch.setenv("VLLM_PLUGINS", os.environ.get("VLLM_PLUGINS", ""))
        main()
        return seen

    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    return start


def test_it_listens_on_this_machine_alone_unless_told(started, capsys, tmp_path):
    given = started("--port", "8000")
    assert given[given.index("--host") + 1] == "127.0.0.1" and given[-2:] == ["--port", "8000"]
    assert capsys.readouterr().err == ""
    given = started("--host", "0.0.0.0")
    assert given.count("--host") == 1 and given[given.index("--host") + 1] == "0.0.0.0"
    assert "anybody who reaches 0.0.0.0 may use this server" in capsys.readouterr().err
    for key in (("--api-key", "a"), ("--api-key=a",), ("--api_key", "a", "b")):
        given = started("--host", "0.0.0.0", *key)
        assert capsys.readouterr().err == "" and "a" in given[given.index("--api-key") :]
    started("--host", "0.0.0.0", "--api-key", "")
    assert "no API key is set" in capsys.readouterr().err
    (tmp_path / "vllm.yaml").write_text("host: 0.0.0.0\napi_key: a\n")
    given = started("--config", str(tmp_path / "vllm.yaml"))
    assert given[given.index("--host") + 1] == "0.0.0.0" and "--config" in given and capsys.readouterr().err == ""


def test_several_engines_behind_one_server_are_refused():
    """Each has its own requests' numbers, and what is asked of all is told by the first."""
    model = SimpleNamespace(hf_config=endpoints.CausalQwenConfig(), model="it")
    config = SimpleNamespace(model_config=model, parallel_config=SimpleNamespace(data_parallel_size=2))
    with pytest.raises(ValueError, match="data parallelism: run one engine per group of devices"):
        endpoints._Service(SimpleNamespace(vllm_config=config), SimpleNamespace())


def test_endpoints_of_texts_that_know_no_numbers_are_refused():
    app, refused = FastAPI(), ("/inference/v1/generate", "/cohere/v2/chat", "/generative_scoring", "/v1/systemone")
    for path in (*refused, "/v1/responses", "/health"):
        app.add_api_route(path, lambda: {"served": True}, methods=["POST"])
    endpoints.Endpoints().attach_router(app)
    app.router.routes.reverse()  # a plug-in's routes take the place of vLLM's own
    client = TestClient(app)
    for path in (*refused, "/v1/responses"):
        answer = client.post(path, json={})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found"), path
    assert client.post("/health").json() == {"served": True}
