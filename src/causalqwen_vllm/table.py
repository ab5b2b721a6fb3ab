"""Which request stands in which row of vLLM's batch, told by its interface for logits processors."""

from collections import OrderedDict
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from causalqwen_vllm.requests import Request
from causalqwen_vllm.wishes import KEY, Wish, check_params
from vllm import SamplingParams

_KEPT = 65_536  # finished requests whose numbers nobody has asked for yet
_STATE = "causalqwen_request"


class RequestTable(LogitsProcessor):
    """Changes no score: it only follows the rows, so that the model knows whose tokens it embeds and decides.

    A `Request` belongs to the SamplingParams of its request, which vLLM keeps from its arrival to its end.
    """

    of_engine: ClassVar[WeakValueDictionary] = WeakValueDictionary()
    """By the configuration's instance id: the model looks its table up here."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        check_params(sampling_params)

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        config = vllm_config.model_config.hf_config
        self._num_token_id, self._causal_size, self._device = config.num_token_id, config.causal_size, device
        self._rows: dict[int, Request] = {}
        self.requests: list[Request] = []
        self.by_key: OrderedDict[str, Request] = OrderedDict()
        self.version = 0
        self.of_engine[vllm_config.instance_id] = self

    def is_argmax_invariant(self) -> bool:
        return True

    def apply(self, logits: Tensor) -> Tensor:
        return logits

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        rows = self._rows
        for row in batch_update.removed:
            rows.pop(row, None)
        for row, params, prompt, _ in batch_update.added:
            rows[row] = self._of(params, prompt)
        for here, there, direction in batch_update.moved:
            one, other = rows.pop(here, None), rows.pop(there, None)
            if one is not None:
                rows[there] = one
            if other is not None and direction == MoveDirectionality.SWAP:
                rows[here] = other
        self.requests = [rows[row] for row in sorted(rows)]
        self.version += 1

    def _of(self, params: SamplingParams, prompt: list[int] | None) -> Request:
        extra: dict[str, Any] = params.extra_args
        owner, found = extra.get(_STATE, (None, None))
        if owner is not params:  # a shallow copy of another request's parameters shares their extra_args
            wish = Wish.read(extra[KEY])
            found = Request(wish, prompt or (), self._num_token_id, self._causal_size, self._device)
            extra[_STATE] = params, found
            if wish.key:
                self.by_key[wish.key] = found
                if len(self.by_key) > _KEPT:
                    self.by_key.popitem(last=False)
        return found
