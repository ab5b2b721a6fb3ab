"""Loading a grafted model with one clear message for whatever is wrong."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError

from causalqwen.modeling.model import CausalQwenForCausalLM


def load_model(folder: str | Path, device: str = "auto", dtype: torch.dtype | None = None) -> CausalQwenForCausalLM:
    """The grafted model in a folder, in evaluation mode.

    Args:
        device: "auto" for an accelerator where there is one, or a torch device.

    Raises:
        ValueError: no folder, no grafted model in it, or a damaged file, which the message names.
    """
    folder = Path(folder)
    config = folder / "config.json"
    if not config.is_file():
        raise ValueError(
            f"{folder} holds no model (no config.json); make one with `causalqwen graft --output {folder}`"
        )
    try:
        kind = json.loads(config.read_text(encoding="utf-8")).get("model_type")
    except (ValueError, AttributeError):
        raise ValueError(f"{config} is damaged: it is not a JSON object") from None
    if kind != "causalqwen":
        raise ValueError(
            f"{folder} holds a {kind or 'nameless'} model, not a grafted one; graft it with "
            f"`causalqwen graft --backbone {folder} --output ...`"
        )
    try:
        model, info = CausalQwenForCausalLM.from_pretrained(
            folder, output_loading_info=True, local_files_only=True, **({"dtype": dtype} if dtype else {})
        )
    except (SafetensorError, OSError) as error:
        raise ValueError(f"the weights in {folder} are missing or damaged: {error}") from None
    wrong = {key: sorted(str(name) for name in info.get(key, ())) for key in ("missing_keys", "mismatched_keys")}
    for key, names in wrong.items():
        if names:
            raise ValueError(f"the weights in {folder} do not fit: {key.replace('_', ' ')} {', '.join(names[:3])}")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return model.to(device).eval()
