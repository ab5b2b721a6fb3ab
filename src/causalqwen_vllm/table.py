"""Which request stands in which row of vLLM's batch, reported by its older model runner or by V2."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality
from vllm.v1.sample.logits_processor import LogitsProcessor as FirstLogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as SecondLogitsProcessor

from causalqwen_vllm.request_options import KEY, RequestOptions, check_params
from causalqwen_vllm.requests import Request
from vllm import SamplingParams

_KEPT = 65_536  # finished requests whose numbers nobody has asked for yet
_STATE = "causalqwen_request"


class RequestTable:
    """The requests of one engine.

    requests: in the order of the batch's rows; version: grows whenever they are others.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        config = vllm_config.model_config.hf_config
        self._of_model = config.num_token_id, config.causal_size, device, config.context.hides, config.copy_numbers
        self._unasked = {"number_class": next(iter(config.class_values or ()), None)}
        self.requests: list[Request] = []
        self.by_key: OrderedDict[str, Request] = OrderedDict()
        self.version = 0

    def stand(self, requests: list[Request]) -> None:
        """These are the rows of the next step."""
        if requests != self.requests:  # each is equal to itself alone
            for left in set(self.requests) - set(requests):
                left.rest()
            self.requests, self.version = requests, self.version + 1

    def arrive(self, params: SamplingParams, prompt: Sequence[int] | None) -> Request:
        """The `Request` kept for one that vLLM runs for the first time. One without options is the `standard` one: V2 warms up
        a GPU by requests of its own, which nobody checks."""
        options = RequestOptions.read((params.extra_args or {}).get(KEY, self._unasked))
        request = Request(options, prompt or (), *self._of_model)
        if options.key:
            self.by_key[options.key] = request
            if len(self.by_key) > _KEPT:
                self.forget(next(iter(self.by_key)))
        return request

    def forget(self, key: str) -> None:
        """Nobody will ask for what is kept under a key any more."""
        request = self.by_key.pop(key, None)
        if request is not None:
            request.forget()
            if request not in self.requests:
                request.rest()


class RowFollower(FirstLogitsProcessor, SecondLogitsProcessor):
    """A logits processor of both model runners that changes no score.

    In the older one it follows the rows. In V2, where `state.GraftState` does, it only checks what requests ask for.
    """

    of_engine: ClassVar[WeakValueDictionary] = WeakValueDictionary()
    """By the configuration's instance id: the model of the older runner looks its table up here."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        check_params(sampling_params)

    def __init__(self, vllm_config: VllmConfig, device_or_states: Any, is_pin_memory: bool = False) -> None:
        self._rows: dict[int, Request] = {}
        if isinstance(device_or_states, torch.device):
            self.table = RequestTable(vllm_config, device_or_states)
            self.of_engine[vllm_config.instance_id] = self.table

    def is_argmax_invariant(self) -> bool:
        return True

    def apply(self, logits: Tensor, ctx: Any = None) -> Tensor:
        return logits

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        return False  # no score of it is to be changed

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        rows = self._rows
        for row in batch_update.removed:
            rows.pop(row, None)
        for row, params, prompt, _ in batch_update.added:
            rows[row] = self._of(params, prompt)
        for here, there, direction in batch_update.moved:
            request, other = rows.pop(here, None), rows.pop(there, None)
            if request is not None:
                rows[there] = request
            if other is not None and direction == MoveDirectionality.SWAP:
                rows[here] = other
        self.table.stand([rows[row] for row in sorted(rows)])

    def _of(self, params: SamplingParams, prompt: list[int] | None) -> Request:
        """A preempted request comes back with the SamplingParams that it came with first; its `Request` is kept there."""
        extra: dict[str, Any] = params.extra_args or {}
        owner, request = extra.get(_STATE, (None, None))
        if owner is not params:  # a shallow copy of another request's parameters shares their extra_args
            request = self.table.arrive(params, prompt)
            extra[_STATE] = params, request
        return request
