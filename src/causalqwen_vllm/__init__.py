"""Grafted models in vLLM, as a plug-in: the heads on vLLM's own Qwen2, Qwen3 and Llama. See docs/serving.md.

Nothing here imports vLLM until a function is called or vLLM itself loads the plug-in.
"""

from causalqwen_vllm.client import Answer, Number, generate, load, register, request

__all__ = ["Answer", "Number", "generate", "load", "register", "request"]
