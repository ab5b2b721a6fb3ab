"""Loading a grafted model with one clear message for whatever is wrong."""

import copy
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoTokenizer, GenerationConfig
from transformers.models.auto import CONFIG_MAPPING
from transformers.trainer_pt_utils import safe_globals

from causalqwen.files import SUMS, check_sums
from causalqwen.modeling import remote_code
from causalqwen.modeling.backbones import resolve_device
from causalqwen.modeling.card import EVAL_RESULTS
from causalqwen.modeling.configuration import CausalQwenConfig
from causalqwen.modeling.model import CausalQwenForCausalLM

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_OURS = (
    *(
        "config.json",
        "generation_config.json",
        "processor_config.json",
        "chat_template.jinja",
        "README.md",
        "metrics.jsonl",
    ),
    *("model.safetensors.index.json", "estimator.json", "training.json", "choice.json", SUMS),
)
_WEIGHTS = re.compile(r"(model|model-\d{5}-of-\d{5}|estimator)\.safetensors")
_VOCABULARIES = ("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model")
_OF_WORK = re.compile(r"work/.*(\.(json|jsonl|safetensors|npy|pt|pth)|/events\.out\.tfevents\.[^/]*)")
_LAYER = re.compile(r"backbone\.[a-z_.]*\.(\d+)\.")


def load_model(folder: str | Path, device: str = "auto", dtype: torch.dtype | None = None) -> CausalQwenForCausalLM:
    """The grafted model in a folder, with its processor, in evaluation mode.

    Args:
        device: "auto" for an accelerator where there is one, or a torch device.

    Raises:
        ValueError: no folder, no grafted model in it, or a damaged file, which the message names, and in it the field.
    """
    folder = Path(folder)
    path = folder / "config.json"
    if (folder / "estimator.json").is_file():
        raise ValueError(f"{folder} holds a regressor of tables: `causalqwen predict` and NumberRegressor.load read it")
    if not path.is_file():
        raise ValueError(
            f"{folder} holds no model (no config.json); make one with `causalqwen graft --backbone NAME --output {folder}`"
        )
    kind = _read_json(path).get("model_type")
    if kind != "causalqwen":
        raise ValueError(
            f"{folder} holds a {kind or 'nameless'} model, not a grafted one; graft it with "
            f"`causalqwen graft --backbone {folder} --output ...`"
        )
    config = _read_config(path)
    with _telling(folder / "generation_config.json"):
        _check_generation(folder / "generation_config.json", config)
    try:
        _check_shapes(folder, config)
        model, info = CausalQwenForCausalLM.from_pretrained(
            folder,
            config=config,
            output_loading_info=True,
            local_files_only=True,
            **({"dtype": dtype} if dtype else {}),
        )
    except (SafetensorError, OSError) as error:
        raise ValueError(f"the weights in {folder} are missing or damaged: {error}") from None
    except (RuntimeError, TypeError, KeyError, AttributeError, IndexError, ZeroDivisionError, AssertionError) as error:
        message = f"{type(error).__name__}: {error}"
        raise ValueError(f"the weights in {folder} do not fit its config.json: {message}") from error
    wrong = {key: sorted(str(name) for name in info.get(key, ())) for key in ("missing_keys", "mismatched_keys")}
    for key, names in wrong.items():
        if names:
            raise ValueError(f"the weights in {folder} do not fit: {key.replace('_', ' ')} {', '.join(names[:3])}")
    _read_processor(folder, model)
    return model.to(resolve_device(device)).eval()


def check_files(folder: str | Path) -> None:
    """ValueError unless a folder holds what a saved model is made of and nothing else: weights that are safetensors, settings
    that are JSON, a tokenizer, a model card, metrics. No code, nor any named, but the one file of `remote_code`, byte for
    byte. What was saved with checksums must still be it. In a training run's `work`: arrays and optimizers' states that are
    numbers alone."""
    folder = Path(folder)
    if not any((folder / name).is_file() for name in ("config.json", "estimator.json")):
        raise ValueError(f"{folder} holds no model (no config.json, no estimator.json)")
    known = {*_OURS, *_TOKENIZER, *_VOCABULARIES}
    for path in sorted(folder.rglob("*")):
        if path.is_dir() and not path.is_symlink():
            continue
        if path.name == remote_code.FILE and not path.is_symlink() and path.read_bytes() == remote_code.TEXT.encode():
            continue
        in_work = _OF_WORK.fullmatch(path.relative_to(folder).as_posix())
        of_results = path.suffix == ".yaml" and path.parent.name == EVAL_RESULTS
        if path.is_symlink() or not (in_work or path.name in known or of_results or _WEIGHTS.fullmatch(path.name)):
            what = f"weights in safetensors, {', '.join(_OURS)}, a tokenizer"
            raise ValueError(f"{path} is no file of a saved model, which are: {what}")
        if path.suffix in (".npy", ".pt", ".pth"):
            _check_kept(path)
            continue
        settings = _read_json(path) if path.suffix == ".json" else {}
        if settings.get("auto_map") not in (None, remote_code.NAMED.get(path.name)):
            raise ValueError(f"{path} names code to run when it is loaded: auto_map is {settings['auto_map']!r}")
        if path.suffix == ".safetensors":
            try:
                with safe_open(path, framework="pt"):
                    pass
            except SafetensorError as error:
                raise ValueError(f"{path} is not a safetensors file: {error}") from None
    check_sums(folder)


def _check_kept(path: Path) -> None:
    """ValueError where what training kept, to be taken up, holds more than numbers."""
    try:
        if path.suffix == ".npy":
            np.load(path, mmap_mode="r", allow_pickle=False)
        else:
            with safe_globals():  # as transformers' Trainer reads it again
                torch.load(path, map_location="meta", mmap=True, weights_only=True)
    except (ValueError, RuntimeError, OSError, EOFError, UnpicklingError) as error:
        raise ValueError(f"{path} is damaged, or holds something other than numbers") from error


def _read_json(path: Path) -> dict[str, Any]:
    """What a file of a model says. ValueError where it is no JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: it is not a JSON object")
    return content


@contextmanager
def _telling(place: Path | str) -> Iterator[None]:
    """Whatever a library makes of a damaged file, as one error that names it."""
    try:
        yield
    except Exception as error:  # raised again, with the place
        message = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        message = " ".join(message.split())
        raise ValueError(message if str(place) in message else f"{place} is damaged: {message}") from error


def _read_config(path: Path) -> CausalQwenConfig:
    """The configuration, its backbone's part held against the types of that kind's defaults."""
    with _telling(path):
        backbone = _read_json(path).get("text_config")
        if not isinstance(backbone, dict) or not isinstance(backbone.get("model_type"), str):
            raise ValueError("text_config: expected the backbone's configuration, with its model_type")
        if backbone["model_type"] not in CONFIG_MAPPING:
            raise ValueError(f"text_config.model_type: {backbone['model_type']!r} is no model of transformers")
        _check_types(backbone, CONFIG_MAPPING[backbone["model_type"]](), "text_config.")
        return CausalQwenConfig.from_pretrained(path.parent, local_files_only=True)


def _check_types(fields: dict[str, Any], defaults: Any, place: str = "") -> None:
    """ValueError that names the first field whose value is of another type than its default's, or no token's id."""
    known = vars(defaults)
    for name, value in fields.items():
        default: Any = known.get(name)
        if name.endswith("_token_id") or (name.endswith("_token_ids") and value is not None):
            ids = value if isinstance(value, list) else [] if value is None else [value]
            least = -1 if name == "pad_token_id" else 0  # some pad with no token
            if not all(type(token) is int and token >= least for token in ids):
                raise ValueError(f"{place}{name}: expected the id of a token, got {value!r}")
        elif name in _OUTPUTS and value is not None and type(value) not in (bool, list):
            raise ValueError(f"{place}{name}: expected true or false, got {value!r}")
        elif isinstance(default, float):
            if value is not None and type(value) not in (int, float):
                raise ValueError(f"{place}{name}: expected a number, got {value!r}")
        elif isinstance(default, bool | int | str | list | dict) and value is not None:
            if type(value) is not type(default):
                raise ValueError(f"{place}{name}: expected {_KINDS[type(default)]}, got {value!r}")
            if isinstance(value, int) and name in _SIZES and value <= 0:
                raise ValueError(f"{place}{name}: expected a positive whole number, got {value!r}")


_OUTPUTS = ("output_attentions", "output_hidden_states", "output_router_logits")
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
_KINDS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    str: "a text",
    list: "a list",
    dict: "an object",
}


def _check_generation(path: Path, config: CausalQwenConfig) -> None:
    if not path.exists():
        return
    fields = _read_json(path)
    _check_types(fields, GenerationConfig())
    for name in ("eos_token_id", "pad_token_id", "bos_token_id"):
        ids = fields.get(name)
        for token in ids if isinstance(ids, list) else [ids]:
            if token is not None and token >= config.vocab_size:
                raise ValueError(f"{name}: {token} lies outside the {config.vocab_size} tokens of this model")
    GenerationConfig.from_pretrained(path.parent, local_files_only=True)


def _check_shapes(folder: Path, config: CausalQwenConfig) -> None:
    """ValueError where the backbone's weights have other sizes than its configuration says, before anything is built."""
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise OSError(f"there is no model.safetensors in {folder}")
    layers, rows = set(), None
    for file in files:
        with safe_open(file, framework="pt") as weights:
            for name in iter(weights.keys()):
                if match := _LAYER.match(name):
                    layers.add(int(match[1]))
                if name.endswith(("embed_tokens.weight", "wte.weight", "word_embeddings.weight")):
                    rows = weights.get_slice(name).get_shape()[0]
    text = config.text_config
    if rows not in (None, text.vocab_size):
        raise ValueError(
            f"{folder / 'config.json'} is damaged: text_config.vocab_size is {text.vocab_size}, and the embedding has "
            f"{rows} rows"
        )
    if layers and len(layers) != text.num_hidden_layers:
        raise ValueError(
            f"{folder / 'config.json'} is damaged: text_config.num_hidden_layers is {text.num_hidden_layers}, and there are "
            f"weights of {len(layers)} layers"
        )


def _read_processor(folder: Path, model: CausalQwenForCausalLM) -> None:
    """Give the model its processor, which must fit it."""
    path = folder / "processor_config.json"
    if not path.is_file():
        raise ValueError(f"{folder} holds no processor: {path.name} is missing")
    settings = _read_json(path)
    if settings.get("num_token_id") != model.config.num_token_id:
        given, expected = settings.get("num_token_id"), model.config.num_token_id
        raise ValueError(f"{path} is damaged: num_token_id is {given!r}, and that of the model is {expected}")
    for name in _TOKENIZER:
        longest = _read_json(folder / name).get("model_max_length", 1) if (folder / name).is_file() else 1
        if type(longest) not in (int, float):
            raise ValueError(f"{folder / name} is damaged: model_max_length: expected a number, got {longest!r}")
    try:
        tokenizer = model.processor.tokenizer
        _ = model.processor.slotted_tokenizer  # a copy, which reads it once more
    except Exception:
        with _telling(f"{folder / 'tokenizer.json'}, or a file beside it,"):
            copy.deepcopy(AutoTokenizer.from_pretrained(folder, local_files_only=True))
        with _telling(path):
            raise
    rows, used = model.config.text_config.vocab_size, set(tokenizer.get_vocab().values())
    if model.config.num_token_id in used or any(index >= rows for index in used):
        raise ValueError(
            f"{folder / 'tokenizer.json'} is not the tokenizer of this model: it uses other rows of its matrix"
        )
    if not isinstance(tokenizer.pad_token_id, int):
        raise ValueError(f"{folder / 'tokenizer_config.json'} is damaged: it names no token for pad_token")


def fingerprint(model: CausalQwenForCausalLM) -> str:
    """SHA-256 of the settings and of up to 64 entries of every weight: tells one trained model from another."""
    digest = hashlib.sha256(model.config.to_json_string().encode())
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().reshape(-1)
        few = flat[:: max(1, len(flat) // 64)][:64]
        digest.update(f"{name}{tuple(tensor.shape)}{few.tolist()}".encode())
    return digest.hexdigest()
