"""vLLM on one core, tiny models that write numbers, and `generate` as what vLLM is measured against."""

import importlib
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from transformers import LogitsProcessorList, PreTrainedTokenizerBase

import causalqwen_vllm
from causalqwen import PRESETS, CausalDecoding, CausalQwenConfig, CausalQwenForCausalLM
from causalqwen.data import Row, encode_rows
from causalqwen.distributions import NOISE_STREAM, uniform_draws
from causalqwen.modeling.loading import load_model
from causalqwen.numbers import format_number
from causalqwen.serving.softmax_sampling import RowSoftmaxSampler
from causalqwen.training import TrainSettings, train
from conftest import make_backbone

ONE_CORE = {  # read when vLLM is imported, which `load` does
    "VLLM_CPU_OMP_THREADS_BIND": str((os.cpu_count() or 1) - 1),
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TRITON_F32_DEFAULT": "ieee",  # float32 to its last digit on a GPU too
}
ON_A_GPU = {
    "kv_cache_memory_bytes": 2**28,  # several engines beside each other
    "gpu_memory_utilization": 0.05,
}
RUNNER = os.environ.get("CAUSALQWEN_VLLM_RUNNER", "first")
"""Which of vLLM's model runners is tested: "first", or "second" (V2); "-async" behind it schedules asynchronously."""

SETTINGS = {preset: {"temperature": 1.0} for preset in PRESETS} | {
    "softmax": {"temperature": 0.7, "top_p": 0.9},
    "persona": {"temperature": 0.9},
}
"""Of presets: temperatures at which tiny models write numbers."""

SCORES, DRAW, VALUES = 1e-3, 1e-5, 1e-3
"""What rounding may move: two scores, in the spread of all; borders of tokens in the unit interval (float32 and float64 have
them 1e-6 apart on these models, and values before them move them further); a value (`generate` itself writes some that lie 2e-4
apart, alone and in a batch of seven)."""
CLASSES = {
    "men": {"kind": "symlog", "center": 2.0, "width": 0.5},
    "miles": {"kind": "affine", "center": 500.0, "width": 80.0},
}
"""Their axes, by name."""
WIDE = {  # vLLM's attention on CPU takes heads of 32 and more
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
}
PROMPTS = [
    f"{start} {number} {end}"
    for start in ("My friends,", "We have", "It was", "The year", "Of all", "Not even", "About", "There is")
    for number, end in zip(
        (5, 12.5, -3, 1776, 0.25, 1e6, 42, 7),
        ("men and", "of", "or", "when we", "to the", "it", "days in", "and 3 of"),
        strict=True,
    )
]


def write_tiny(folder: Path, family: str, tokenizer: PreTrainedTokenizerBase, layers: int = 2, **settings) -> Path:
    """A tiny model of a family, in which about one token of seven is a number, written to a folder."""
    torch.manual_seed(1)
    settings = {"number_context": "value"} | settings
    model = CausalQwenForCausalLM.from_backbone(
        make_backbone(family, tokenizer, **WIDE, num_hidden_layers=layers), tokenizer=tokenizer, **settings
    )
    make_numbers_likely(model)
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def write_copying(folder: Path, tokenizer: PreTrainedTokenizerBase, context: str) -> Path:
    """The same of one that copies about half of its numbers."""
    write_tiny(folder, "llama", tokenizer, number_context=context, value_digits=2, copy_numbers=True)
    model = load_reference(folder)
    model.copy_head.query.weight.normal_(std=0.3)
    model.copy_head.bias.fill_(1.0)
    model.save_pretrained(folder)
    return folder


def write_with_classes(folder: Path, tokenizer: PreTrainedTokenizerBase, context: str) -> Path:
    """The same of one whose numbers are of the classes `CLASSES`, each with an axis of its own: no bounds, no last place."""
    write_tiny(folder, "llama", tokenizer, number_context=context, value_digits=2)
    config = CausalQwenConfig.from_pretrained(folder)
    nowhere = {"value_range": None, "value_place": None}
    config.class_values = {name: {"value_transform": axis} | nowhere for name, axis in CLASSES.items()}
    config.save_pretrained(folder)
    return folder


def write_closed(folder: Path, family: str, tokenizer: PreTrainedTokenizerBase, context: str) -> Path:
    """The same of one whose values were fitted in closed form, and are read from all of its five layers."""
    plain = write_tiny(folder / "plain", family, tokenizer, 5, number_context=context, value_digits=2)
    model, settings = load_reference(plain), TrainSettings()
    values = [round(20 + 9 * (row // 8) + 3 * (row % 8) + 2 * math.sin(7 * row), 1) for row in range(len(PROMPTS))]
    rows = [
        Row("prompt", f"row {row}", {"prompt": prompt, "value": value})
        for row, (prompt, value) in enumerate(zip(PROMPTS, values, strict=True), 1)
    ]
    train(model, encode_rows(rows, model.processor), [], folder / "fitted", settings)
    axis = model.config.value_transform
    make_numbers_likely(model)  # which knows by now where numbers come
    model.config.value_transform = axis
    model.save_pretrained(folder / "likely")
    return folder / "likely"


@torch.no_grad()
def make_numbers_likely(model: CausalQwenForCausalLM, share: float = 0.15) -> None:
    """Give `<NUM>` a row of its own and the bias at which it wins that share of positions; values of some size."""
    action = model.action
    action.num_row += action.num_row.std() * torch.randn(len(action.num_row))
    model.config.value_transform = {"kind": "symlog", "center": 2.0, "width": 1.5}
    ids = torch.randint(400, (8, 64), generator=torch.Generator().manual_seed(0))
    logits, number = model(ids).logits, model.config.num_token_id
    gap = logits.amax(-1) - logits[..., number]
    action.num_bias += gap.flatten().quantile(share)


def _no_target(driver: Any) -> None:
    raise RuntimeError("Triton has no compiler here")  # as torch's own compiler expects to be told


def choose_runner(name: str) -> None:
    """Make vLLM use it; before vLLM is imported.

    On a CPU, V2 wants Triton's compiler for CPUs, which is in no package index: its kernels run in Triton's interpreter
    instead. And vLLM switches asynchronous scheduling off there, for it brings nothing: here it is switched on again.
    """
    runner, _, scheduling = name.partition("-")
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(runner == "second"))
    if torch.cuda.is_available():
        ON_A_GPU["async_scheduling"] = scheduling == "async"
        return
    if runner == "second":
        os.environ["TRITON_INTERPRET"] = "1"
        driver = type("Driver", (), {"is_active": staticmethod(lambda: True), "get_current_target": _no_target})
        importlib.import_module("triton.backends").backends["cpu"] = SimpleNamespace(driver=driver, compiler=None)
    if scheduling == "async":
        platform = importlib.import_module("vllm.platforms.cpu").CpuPlatform
        settle = platform.check_and_update_config

        def settle_asynchronously(cls: type, config: Any) -> None:
            settle(config)
            config.scheduler_config.async_scheduling = True

        platform.check_and_update_config = classmethod(settle_asynchronously)


choose_runner(RUNNER)


def load_reference(folder: Path) -> CausalQwenForCausalLM:
    """The model whose `generate` vLLM is measured against: on the processor, wherever vLLM runs."""
    return load_model(folder, device="cpu")


class Engines:
    """One vLLM at a time: a new one takes the place of the last."""

    def __init__(self) -> None:
        for name, value in ONE_CORE.items():
            os.environ.setdefault(name, value)
        self.key, self.llm = None, None

    def __call__(self, folder: Path, **settings):
        key = (str(folder), tuple(sorted(settings.items())))
        if key != self.key:
            self.close()
            here = ON_A_GPU if torch.cuda.is_available() else {}
            self.llm = causalqwen_vllm.load(folder, **{"dtype": "float32", "max_model_len": 256} | here | settings)
            self.key = key
        return self.llm

    def close(self) -> None:
        if self.llm is not None:
            self.llm.llm_engine.engine_core.shutdown()
        self.key, self.llm = None, None


class Lookup(NamedTuple):
    """A request that vLLM looked up in its prefix cache; tokens. Without a cache nothing is ever found."""

    preempted: bool
    prompt: int
    cached: int


@contextmanager
def lookups(llm: Any) -> Iterator[list[Lookup]]:
    """Those of an engine, while it is open."""
    of = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
    look_up, seen = of.get_computed_blocks, []

    def note(request: Any, *args: Any) -> Any:
        found = look_up(request, *args)
        seen.append(Lookup(request.num_preemptions > 0, request.num_prompt_tokens, found[1]))
        return found

    of.get_computed_blocks = note
    try:
        yield seen
    finally:
        del of.get_computed_blocks


def worker_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


@contextmanager
def whole_graphs(llm: Any) -> Iterator[list[int]]:
    """What CUDA graphs of the whole decoder do in V2, on a processor, while it is open: steps of one token a row, filled up to
    a multiple of four, run no line of the model's `forward` but the operations of a step that nobody tells of. Their tokens."""
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import set_forward_context
    from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

    runner = worker_of(llm).model_runner
    manager, state = runner.cudagraph_manager, runner.model_state
    dispatch, prepare, seen, steps = manager.dispatch, state.prepare_attn, {}, []

    def whole(num_reqs: int, num_tokens: int, uniform_token_count: int | None, *args: Any, **settings: Any) -> Any:
        if uniform_token_count != 1:
            return dispatch(num_reqs, num_tokens, uniform_token_count, *args, **settings)
        filled = min(-(-num_tokens // 4) * 4, runner.max_num_reqs)
        return BatchExecutionDescriptor(CUDAGraphMode.FULL, filled, filled, uniform_token_count=1)

    def note(batch: Any, mode: Any, tables: Any, slots: Any, *args: Any, **settings: Any) -> Any:
        found = prepare(batch, mode, tables, slots, *args, **settings)
        seen.update(metadata=found, slots=build_slot_mappings_by_layer(slots, runner.kv_cache_config))
        return found

    def replay(desc: Any) -> Any:
        buffers, model, many = runner.input_buffers, runner.model, desc.num_tokens
        steps.append(many)
        told, model._step = model._step, None
        with set_forward_context(seen["metadata"], runner.vllm_config, num_tokens=many, slot_mapping=seen["slots"]):
            features = model(buffers.input_ids[:many], buffers.positions[:many])
        model._step = told
        return features

    manager.dispatch, manager.run_fullgraph, state.prepare_attn = whole, replay, note
    try:
        yield steps
    finally:
        del manager.dispatch, manager.run_fullgraph, state.prepare_attn


@dataclass
class Reference:
    """What `generate` writes: tokens and values behind each prompt."""

    tokens: list[list[int]]
    values: list[list[float]]


@torch.no_grad()
def reference(
    model: CausalQwenForCausalLM,
    prompts: list[str],
    plan: CausalDecoding,
    seeds: list[int],
    max_tokens: int,
    top_p: float = 1.0,
) -> Reference:
    """`generate` with a seed per row; the preset `softmax` by the sampler of `causalqwen serve`. No text ends early."""
    batch = model.processor(prompts, prompt=True, padding=True, padding_side="left", return_tensors="pt")
    choice = {"causal_decoding": replace(plan, seed=seeds)}
    if plan.decision == "softmax":
        lengths, width = batch["attention_mask"].sum(-1).tolist(), batch["input_ids"].shape[1]
        rows = len(prompts)
        sampler = RowSoftmaxSampler(
            seeds, [plan.temperature] * rows, [top_p] * rows, lengths, width, torch.device("cpu")
        )
        choice = {
            "do_sample": False,
            "return_dict_in_generate": True,
            "logits_processor": LogitsProcessorList([sampler]),
        }
    found = model.generate(**batch, max_new_tokens=max_tokens, eos_token_id=None, pad_token_id=2, **choice)
    start = batch["input_ids"].shape[1]
    return Reference(found.sequences[:, start:].tolist(), found.numeric_values[:, start:].tolist())


def moved(model: CausalQwenForCausalLM, found: float, wanted: float) -> bool:
    """Whether float32 may have made one value of the other: `VALUES` apart, or neighbours at their last digit, both rounded as
    new numbers are. A copied number is exact."""
    digits = model.config.value_digits
    if found == wanted or not all(abs(float(f"{v:.{digits - 1}e}") - v) <= 1e-12 * abs(v) for v in (found, wanted)):
        return found == wanted
    least = min(abs(found), abs(wanted)) or max(abs(found), abs(wanted))
    finest = -math.inf if model.config.value_place is None else model.config.value_place
    place = 10.0 ** max(math.floor(math.log10(least)) + 1 - digits, finest)
    return abs(found - wanted) <= max(1.001 * place, VALUES * max(abs(wanted), 1.0))


@torch.no_grad()
def gap_where_they_part(
    model: CausalQwenForCausalLM,
    prompt: str,
    found: list[int],
    wanted: list[int],
    found_values: list[float],
    values: list[float],
    plan: CausalDecoding,
    top_p: float = 1.0,
) -> float:
    """How far apart the two tokens were that vLLM and `generate` chose first differently, in what rounding moves: `SCORES`, of
    their scores, in the spread of all; under `softmax` `DRAW`, of the draw and the borders between them. By the values that
    either had till then, whichever is less. 0 where they are digits of a number that was rounded otherwise, or the token after
    it; infinite where a value before them is another one."""
    at = next(i for i, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b)
    if not all(moved(model, *pair) for pair in zip(found_values[:at], values[:at], strict=True)):
        return math.inf
    last = max((i for i in range(at) if wanted[i] == model.config.num_token_id), default=None)
    if last is not None and found_values[last] != values[last]:  # what may follow a number depends on its digits
        of_digits = max(len(format_number(value)) for value in (found_values[last], values[last]))
        if at <= last + 1 + (of_digits if model.config.context.writes else 0):
            return 0.0
    encoded = model.processor(prompt, prompt=True)
    ids = torch.tensor([encoded["input_ids"] + wanted[:at]])
    gaps = []
    for known in (values, found_values):
        numbers = torch.tensor([list(encoded["numeric_values"]) + known[:at]], dtype=torch.float64)
        causal = None if plan.decision == "softmax" else plan
        scores = model(ids, numeric_values=numbers, causal_decoding=causal, scores_only=True).logits[0, -1].float()
        if causal is not None:
            spread = scores[scores.isfinite()].std()
            gaps.append(((scores[found[at]] - scores[wanted[at]]).abs() / spread).item() / SCORES)
            continue
        probs = (scores.double() / plan.temperature).softmax(-1)
        ordered, order = probs.sort(descending=True)
        probs[order[ordered.cumsum(-1) - ordered >= top_p]] = 0.0
        borders = probs.cumsum(-1) / probs.sum()
        draw = uniform_draws(torch.tensor([plan.seed]), NOISE_STREAM, torch.tensor([ids.shape[1] - 1]), 1).item()
        first, second = sorted((found[at], wanted[at]))
        gaps.append((borders[first:second] - draw).abs().max().item() / DRAW)
    return min(gaps)


def compare(
    llm: Any,
    model: CausalQwenForCausalLM,
    preset: str,
    prompts: list[str],
    tokens: int = 64,
    *,
    top_p: float = 1.0,
    asked: Mapping[str, Any] = MappingProxyType({}),
    **settings: float,
) -> tuple[int, int]:
    """How many texts of vLLM and of `generate` are the same, and how many numbers those hold. asked: of vLLM alone.

    AssertionError where a value differs by 1e-4 (relative, or on an axis near 0) and by more than its last digit's rounding, or
    where texts part by more than rounding.
    """
    seeds = list(range(100, 100 + len(prompts)))
    extra = {**asked} | ({"top_p": top_p} if top_p < 1 else {})
    answers = causalqwen_vllm.generate(
        llm, prompts, preset=preset, seed=seeds, max_tokens=tokens, params={"ignore_eos": True}, **settings, **extra
    )
    plan = CausalDecoding.preset(preset, **settings)
    wanted = reference(model, prompts, plan, seeds, tokens, top_p)
    same, numbers, gaps, apart = 0, 0, [], 0.0
    for row, answer in enumerate(answers):
        found_ids = answer.token_ids[:tokens]  # vLLM does not count a `<NUM>` that the backbone does not see
        if found_ids != wanted.tokens[row]:
            one = replace(plan, seed=seeds[row])
            columns = found_ids, wanted.tokens[row], answer.values[:tokens], wanted.values[row]
            gap = gap_where_they_part(model, prompts[row], *columns, one, top_p)
            assert gap < 1, f"row {row} parts where its two choices are {gap:.2g} times apart what rounding moves"
            gaps.append(f"{gap:.1g}")
            continue
        same += 1
        numbers += found_ids.count(model.config.num_token_id)
        for found, value in zip(answer.values[:tokens], wanted.values[row], strict=True):
            difference = abs(found - value) / max(abs(value), 1.0)
            assert difference < 1e-4 or moved(model, found, value), f"row {row}: {found} for {value}"
            apart = max(apart, difference)
    parted = f", ties at gaps of {', '.join(gaps)}" if gaps else ""
    print(f"{preset}: {same} of {len(prompts)} texts the same, {numbers} numbers within {apart:.1g}{parted}")
    return same, numbers
