"""The rows of the batch in vLLM's model runner V2."""

from collections import OrderedDict
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.states import RequestState

from causalqwen_vllm.requests import Request, Step
from causalqwen_vllm.table import RequestTable

_RECENT = 65_536  # requests that a preemption may still bring back


class GraftState(DefaultModelState):
    """What V2 keeps beside a grafted model: whose row is whose.

    V2 sends a preempted request anew, as if it had never run, but under its id and with the tokens that it wrote: what is known
    of it is found by that. One that has written nothing starts afresh, and so does a new one under an old id.
    """

    def __init__(
        self, vllm_config: VllmConfig, model: nn.Module, encoder_cache: EncoderCache | None, device: torch.device
    ) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)
        self._table = RequestTable(vllm_config, device)
        model.table = self._table  # type: ignore[assignment]
        self._graft: Any = model
        self._slots: dict[int, Request] = {}
        self._by_id: OrderedDict[str, Request] = OrderedDict()
        self._attention: dict[str, Any] = {}

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        super().add_request(req_index, new_req_data)
        params, name = new_req_data.sampling_params, new_req_data.req_id
        assert params is not None, "a grafted model generates"
        prompt, tokens = new_req_data.prompt_token_ids or (), new_req_data.prefill_token_ids or ()
        if name not in self._by_id or len(tokens) <= len(prompt):
            self._by_id[name] = self._table.arrive(params, prompt)
            if len(self._by_id) > _RECENT:
                self._by_id.popitem(last=False)
        self._slots[req_index] = self._by_id[name]

    def prepare_attn(self, *args: Any, **settings: Any) -> dict[str, Any]:
        self._attention = super().prepare_attn(*args, **settings)
        return self._attention

    def prepare_inputs(self, input_batch: InputBatch, req_states: RequestState) -> dict[str, Any]:
        requests = [self._slots[slot] for slot in input_batch.idx_mapping_np.tolist()] if self._slots else []
        self._table.stand(requests)
        step = None
        if requests:  # none while vLLM warms up
            starts = input_batch.query_start_loc_np[: len(requests) + 1].tolist()
            first = input_batch.num_computed_tokens_np.tolist()
            step = Step.of(requests, starts, first, input_batch.positions, self._attention)
        self._graft.begin(step, input_batch.input_ids)
        return super().prepare_inputs(input_batch, req_states)

    def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> dict[str, Any]:
        self._table.stand([])
        self._graft.begin(None, torch.empty(0))
        return super().prepare_dummy_inputs(num_reqs, num_tokens)
