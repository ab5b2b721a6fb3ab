"""The commands that serve a model over HTTP: to programs, and to a browser."""

import os
import socket
import webbrowser
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from causalqwen_cli.base import AsJson, Device, Model, command, say, show

if TYPE_CHECKING:
    from fastapi import FastAPI

    from causalqwen.serving import ServerSettings

_KEY = "CAUSALQWEN_API_KEY"


@command
def serve(
    model: Model,
    host: Annotated[str, Option(help="Address to listen on; 0.0.0.0 for every one.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="0 for a free one.")] = 8000,
    name: Annotated[str | None, Option(help="The model's name in requests (default: its folder's).")] = None,
    individuals: Annotated[Path | None, Option(help="Folder of individuals who can be asked for by name.")] = None,
    preset: Annotated[str, Option(help="Preset of requests that name none.")] = "softmax",
    api_key_file: Annotated[
        Path | None,
        Option(
            help="File of keys, of which a request must hold one: a key a line, and after it its requests a minute, if it has "
            f"a limit (or the variable {_KEY})."
        ),
    ] = None,
    max_rows: Annotated[int, Option(min=1, help="Texts generated at once.")] = 8,
    window: Annotated[float, Option(min=0, help="Seconds that a batch waits for company.")] = 0.01,
    max_waiting: Annotated[int, Option(min=1, help="Requests that may wait; one more is answered 429.")] = 64,
    max_tokens: Annotated[int, Option(min=1, help="The most that a request may ask for.")] = 1024,
    max_body: Annotated[int, Option(min=1, help="Bytes of a request.")] = 1 << 20,
    max_prompts: Annotated[int, Option(min=1, help="Numbers predicted by one request.")] = 64,
    max_heard: Annotated[int, Option(min=1, help="Tokens that one individual is inferred from.")] = 4096,
    timeout: Annotated[float, Option(min=0.001, help="Seconds from a request to the end of its answer.")] = 300.0,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Answer OpenAI's API on this machine until interrupted (see docs/serving.md)."""
    from causalqwen import serving

    keys = os.environ.get(_KEY) if api_key_file is None else api_key_file.read_text(encoding="utf-8")
    is_loopback = host in ("127.0.0.1", "::1", "localhost")
    settings = serving.ServerSettings(  # wrong ones are refused before the model is loaded
        name=name or model.resolve().name, preset=preset, window=window, timeout=timeout, max_rows=max_rows,
        max_waiting=max_waiting, max_tokens=max_tokens, max_body=max_body, max_prompts=max_prompts, max_heard=max_heard,
        api_keys={} if keys is None else serving.read_keys(keys), local=is_loopback and keys is None,
    )  # fmt: skip
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as listener:
        app, settings = _application(model, settings, individuals, device)
        if keys is None and not is_loopback:
            say(f"anybody who reaches {host} may use this server: no API key is set")
        where = f"[{host}]" if ":" in host else host
        url = f"http://{where}:{listener.getsockname()[1]}/v1"
        _show_place(url, settings, f"serving {settings.name} at {url}", as_json)
        serving.run(app, listener, log_requests=True)


@command
def explore(
    model: Model,
    individuals: Annotated[
        Path | None, Option(help="Folder of individuals who can be asked for by name, and where the page saves them.")
    ] = None,
    port: Annotated[int, Option(min=0, max=65535, help="0 for a free one.")] = 0,
    browser: Annotated[bool, Option(help="Open the page in a browser.")] = True,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """See in a browser what a model says, how sure it is, and what else it could have said (see docs/explore.md)."""
    from causalqwen import serving

    settings = serving.ServerSettings(name=model.resolve().name, page=True, keep=individuals)
    with socket.create_server(("127.0.0.1", port)) as listener:
        app, settings = _application(model, settings, individuals, device)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        _show_place(url, settings, f"exploring {settings.name} at {url} (Ctrl-C ends it)", as_json)
        if browser:
            webbrowser.open(url)  # it waits at the listening socket until the server takes it
        serving.run(app, listener)


def _show_place(url: str, settings: "ServerSettings", line: str, as_json: bool) -> None:
    show({"url": url, "model": settings.name, "individuals": list(settings.individuals)}, line, as_json)


def _application(
    model: Path, settings: "ServerSettings", individuals: Path | None, device: str
) -> tuple["FastAPI", "ServerSettings"]:
    """The model in a folder served over HTTP, and the settings with the individuals who can be named."""
    from causalqwen import serving
    from causalqwen.modeling.layer_shift import depths_of
    from causalqwen.modeling.loading import load_model

    loaded = load_model(model, device)
    if individuals is not None:
        fitting = loaded.config.causal_size, depths_of(loaded.backbone)
        settings = replace(settings, individuals=serving.load_individuals(individuals, *fitting))
    return serving.create_app(loaded, settings), settings
