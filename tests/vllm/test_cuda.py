"""What a GPU alone can show: CUDA graphs of the backbone, around which the heads decide as `generate` does."""

import pytest
import torch
from reference import PROMPTS, RUNNER, SETTINGS, Engines, compare, load_reference, write_tiny
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode

pytestmark = [
    pytest.mark.filterwarnings("default"),  # vLLM warns of what it uses itself
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and vLLM for it"),
]


@pytest.mark.parametrize("context", ["value", "digits", "both"])
def test_graphs_of_the_backbone_change_no_text(context, tiny_tokenizer, tmp_path):
    """Seven rows, between two sizes that are captured: behind them the graph reads what stood there before."""
    folder = write_tiny(tmp_path / "model", "llama", tiny_tokenizer, number_context=context, value_digits=2)
    engines, model = Engines(), load_reference(folder)
    llm = engines(folder, enforce_eager=False)
    whole = RUNNER.startswith("second") and context == "digits"
    expected = CUDAGraphMode.FULL_AND_PIECEWISE if whole else CUDAGraphMode.PIECEWISE
    assert llm.llm_engine.vllm_config.compilation_config.cudagraph_mode == expected
    try:
        for preset in ("standard", "causal", "persona", "softmax"):
            for prompts in (PROMPTS[::9][:7], PROMPTS[::4]):
                same, _ = compare(llm, model, preset, prompts, 48, **SETTINGS[preset])
                assert same >= len(prompts) - 1
        assert any(wrapper.concrete_cudagraph_entries for wrapper in CUDAGraphWrapper._all_instances)
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        assert not whole or worker.model_runner.cudagraph_manager.graphs
    finally:
        engines.close()
