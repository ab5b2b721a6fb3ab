"""Grafted models in vLLM, as a plug-in: the heads on vLLM's own Qwen2, Qwen3 and Llama. See docs/serving.md.

Nothing here imports vLLM until a function is called or vLLM itself loads the plug-in.
"""

from causalqwen_vllm.asking import Answer, Number, generate, load, request

__all__ = ["Answer", "Number", "generate", "load", "register", "request"]


def register() -> None:
    """The entry point `vllm.general_plugins`: vLLM calls it in each of its processes."""
    from vllm import ModelRegistry

    name = "CausalQwenForCausalLM"
    if name not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(name, f"causalqwen_vllm.model:{name}")
