"""`python -m causalqwen_vllm MODEL [options of `vllm serve`]`: vLLM's own OpenAI server, with what a grafted model needs."""

import argparse
import json
import os
import sys
from importlib.metadata import entry_points
from pathlib import Path

import yaml

from causalqwen.modeling import CausalQwenConfig
from causalqwen_vllm.client import WORKER, graphs
from causalqwen_vllm.endpoints import INDIVIDUALS, Endpoints
from causalqwen_vllm.request_options import FOLLOWER


def main() -> None:
    """Set the variables and the options that are needed, and give the rest to vLLM, whose own options win."""
    parser = argparse.ArgumentParser(prog="python -m causalqwen_vllm", description=__doc__, allow_abbrev=False)
    parser.add_argument("model", help="folder of a grafted model")
    parser.add_argument("--individuals", help="folder of individuals who can be asked for by name")
    parser.add_argument("--host", help="address to listen on: 127.0.0.1 (vLLM's own default is every one)")
    parser.add_argument("--api-key", "--api_key", nargs="*", help="vLLM's: of which a request must hold one")
    parser.add_argument("--config", help="vLLM's: YAML file of options")
    given, further = parser.parse_known_args()
    options = {} if given.config is None else yaml.safe_load(Path(given.config).read_text(encoding="utf-8")) or {}
    options = {name.replace("_", "-"): value for name, value in options.items()}
    host = given.host or options.get("host") or "127.0.0.1"
    keys = options.get("api-key") or os.environ.get("VLLM_API_KEY") if given.api_key is None else any(given.api_key)
    further += [] if given.config is None else ["--config", given.config]
    further += [] if given.api_key is None else ["--api-key", *given.api_key]
    config = CausalQwenConfig.from_pretrained(given.model)
    # Naming one plug-in leaves out all others: those that vLLM loads unasked are named too.
    unasked = [group for group in entry_points().groups if group.startswith("vllm.") and "endpoint" not in group]
    known = ",".join(plugin.name for group in unasked for plugin in entry_points(group=group))
    plugins = os.environ.get("VLLM_PLUGINS", known).split(",")
    os.environ["VLLM_PLUGINS"] = ",".join(dict.fromkeys([*filter(None, plugins), Endpoints.name]))
    if given.individuals is not None:
        os.environ[INDIVIDUALS] = given.individuals
    needed = ["--skip-tokenizer-init", "--logits-processors", FOLLOWER, "--worker-extension-cls", WORKER]
    needed += ["--enable-prefix-caching" if config.by_tokens_alone else "--no-enable-prefix-caching"]
    needed += ["--enforce-eager", "--compilation-config", json.dumps(graphs(config.context)), "--host", host]
    if host not in ("127.0.0.1", "::1", "localhost") and not keys:
        print(f"anybody who reaches {host} may use this server: no API key is set", file=sys.stderr)
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    sys.argv = ["vllm", "--model", given.model, *needed, *further]
    serve()


if __name__ == "__main__":
    main()
