"""What a larger backbone and a trillion tokens cost, part by part (`docs/research/scale.md`; a minute).

.venv/bin/python experiments/scale.py [--achieved 4e14] [--gpus 1024] [--tokens 1e12]

Counted on the project's own code: parameters and operations, on models without weights (torch's meta device). Measured
here: bytes per position of kept features, bytes of an individual, how much text is numbers, and the loss beside softmax
cross-entropy. What a GPU achieves is given, not measured.
"""

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedConfig, Qwen2Config

from benchmarks.speed.losses import SOFTMAX, LossSize, score_losses
from causalqwen import CausalQwenConfig, CausalQwenForCausalLM, CausalQwenProcessor, Individual
from causalqwen.data import encode_rows, parse_row
from causalqwen.data.texts import speech_paragraphs
from causalqwen.kernels.chunked import BLOCK, BLOCK_ON_GPU
from causalqwen.modeling.backbones import resolve_backbone
from causalqwen.training import FactStore

CONTEXT = 4096


def qwen(hidden: int, inner: int, layers: int, heads: int, key_value: int, vocabulary: int, tied: bool) -> Qwen2Config:
    """The shape of a Qwen2.5."""
    return Qwen2Config(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
    )


SHAPES: dict[str, PreTrainedConfig] = {
    "SmolLM2-135M": LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        tie_word_embeddings=True,
    ),
    "Qwen2.5-0.5B": qwen(896, 4864, 24, 14, 2, 151936, True),
    "Qwen2.5-7B": qwen(3584, 18944, 28, 28, 4, 152064, False),
    "Qwen2.5-72B": qwen(8192, 29568, 80, 64, 8, 152064, False),
}


@dataclass
class Counted:
    """A grafted model: parameters of its parts, operations per token (forward), bytes of KV cache per token (bfloat16)."""

    hidden: int
    vocabulary: int
    backbone: int
    text_heads: int
    number_channel: int
    layers_flops: float
    heads_flops: float
    kv_bytes: int

    @property
    def matrix_flops(self) -> float:
        """One product with the vocabulary matrix."""
        return 2.0 * self.hidden * self.vocabulary


def count(shape: PreTrainedConfig) -> Counted:
    """Counts on a model without weights."""
    with torch.device("meta"):
        model = CausalQwenForCausalLM(CausalQwenConfig(text_config=shape, num_token_id=shape.vocab_size - 1))
        ids = torch.zeros(1, CONTEXT, dtype=torch.long)
    parameters = {name: p.numel() for name, p in model.named_parameters()}
    backbone = sum(p.numel() for p in model.backbone.parameters())
    text = sum(n for name, n in parameters.items() if name.startswith("abduction.") or name == "action.b_noise")
    with FlopCounterMode(display=False) as layers, torch.no_grad():
        features = model.features(ids).last_hidden_state
    with FlopCounterMode(display=False) as heads:  # with gradients on, or an identity W_loc would be skipped
        model.heads(features, skip_logits=True)
    head_size = shape.hidden_size // shape.num_attention_heads
    kv = 2 * shape.num_hidden_layers * shape.num_key_value_heads * head_size * 2
    return Counted(
        shape.hidden_size,
        shape.vocab_size,
        backbone,
        text,
        sum(parameters.values()) - backbone - text,
        layers.get_total_flops() / CONTEXT,
        heads.get_total_flops() / CONTEXT,
        kv,
    )


def measure_kept() -> tuple[int, float]:
    """Bytes per position of kept features beside the features themselves; the share of `<NUM>` among tokens of speeches."""
    hidden = 64
    tokenizer = AutoTokenizer.from_pretrained(resolve_backbone("smollm2-135m"))
    torch.manual_seed(0)
    backbone = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=hidden,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=1,
            vocab_size=len(tokenizer),
        )
    )
    model = CausalQwenForCausalLM.from_backbone(backbone, tokenizer=tokenizer, number_context="value")
    rows = [parse_row(f'{{"text": "It is {number} or so."}}', "row") for number in range(200)]
    with tempfile.TemporaryDirectory() as folder:
        store = FactStore.build(model, encode_rows(rows, model.processor), Path(folder))
        columns = [path for path in store.folder.glob("*.npy") if path.stem != "offsets"]
        headers = 128 * len(columns)  # of NumPy's format
        kept = sum(path.stat().st_size for path in columns) - headers
        positions = len(store.facts)
    processor = CausalQwenProcessor(tokenizer)
    ids = [token for text in speech_paragraphs() for token in processor(text)["input_ids"]]
    return kept // positions - 4 * hidden, ids.count(processor.num_token_id) / len(ids)


def measure_individual(size: int = 256) -> float:
    """Bytes of a saved individual, inferred from an observation, over its causal size squared."""
    who = Individual(torch.full((size,), 0.5, dtype=torch.float64), "", torch.eye(size, dtype=torch.float64))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "who.safetensors"
        who.save(path)
        return path.stat().st_size / size**2


def amount(count: float, unit: str = "") -> str:
    """Three digits and a prefix."""
    prefixes = iter(("", "k", "M", "G", "T", "P", "E"))
    prefix = next(prefixes)
    while abs(count) >= 999.5:
        count, prefix = count / 1000, next(prefixes)
    return f"{count:.3g} {prefix}{unit}".strip()


def table(head: list[str], rows: list[list[str]]) -> None:
    """As Markdown."""
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--achieved", type=float, default=4e14, help="operations a second that one GPU achieves")
    parser.add_argument("--gpus", type=int, default=1024)
    parser.add_argument("--tokens", type=float, default=1e12)
    given = parser.parse_args()
    found = {name: count(shape) for name, shape in SHAPES.items()}
    beside, share = measure_kept()
    of_individual = measure_individual()
    case = "equal, Gaussian"
    size = LossSize(tokens=256, vocabulary=32768, hidden=1536)
    ratio = score_losses(size, [SOFTMAX, case], repeats=3, memory=False)["time_ratio"][case]
    print(
        f"Measured: {beside} bytes beside the features of a position; numbers are {share:.2%} of the tokens of speeches;"
    )
    print(
        f"an individual takes {of_individual:.2f} bytes x C^2; the loss {ratio:.2f} of softmax cross-entropy's time.\n"
    )

    print("## Per token\n")
    table(
        ["", *found],
        [
            ["backbone, parameters", *(amount(m.backbone) for m in found.values())],
            ["abduction and noise, parameters", *(amount(m.text_heads) for m in found.values())],
            ["number channel, parameters", *(amount(m.number_channel) for m in found.values())],
            ["backbone's layers, forward", *(amount(m.layers_flops, "FLOP") for m in found.values())],
            ["vocabulary matrix", *(amount(m.matrix_flops, "FLOP") for m in found.values())],
            ["all heads of the graft", *(amount(m.heads_flops, "FLOP") for m in found.values())],
            [
                "… of the whole forward pass",
                *(f"{m.heads_flops / (m.layers_flops + m.matrix_flops + m.heads_flops):.1%}" for m in found.values()),
            ],
            ["KV cache, bfloat16", *(amount(m.kv_bytes, "B") for m in found.values())],
            ["value beside a token, float64", *("8 B" for _ in found)],
            ["kept features", *(amount(4 * m.hidden + beside, "B") for m in found.values())],
            ["an individual inferred, as a file", *(amount(of_individual * m.hidden**2, "B") for m in found.values())],
        ],
    )

    name, model = list(found.items())[-1]
    per_token = model.layers_flops
    kept = 4 * model.hidden + beside

    def cost(flops: float) -> str:
        hours = flops * given.tokens / given.achieved / 3600
        alone = f"{amount(hours)} GPU hours"
        return alone if hours < given.gpus / 10 else f"{alone}: {amount(hours / given.gpus)} hours of {given.gpus:,}"

    print(f"## {amount(given.tokens)} tokens through {name}, {amount(given.achieved, 'FLOP/s')} achieved per GPU\n")
    positions_a_second = given.achieved / (2 * model.matrix_flops)
    table(
        ["", "cost"],
        [
            ["features once (forward pass)", cost(per_token)],
            ["… kept, every position", amount(kept * given.tokens, "B")],
            ["… kept, positions before numbers", amount(kept * given.tokens * share, "B")],
            [
                "heads on kept features, whole vocabulary, an epoch",
                cost(2 * model.matrix_flops + 3 * model.heads_flops),
            ],
            ["… which each GPU reads", amount(positions_a_second * kept, "B/s")],
            ["… a sixteenth of the wrong tokens", cost(2 * model.matrix_flops / 16 + 3 * model.heads_flops)],
            ["number channel on kept features, an epoch", cost(3 * model.heads_flops * share)],
            [
                "LoRA (backward pass without weights)",
                cost(2 * (per_token + model.matrix_flops) + 3 * model.heads_flops),
            ],
            ["full fine-tuning", cost(3 * (per_token + model.matrix_flops + model.heads_flops))],
        ],
    )

    print(f"## Memory per GPU, {name}\n")
    trained = model.text_heads + model.number_channel
    ranks = (8, 64, 512)
    table(
        ["", *(f"{n} ranks" for n in ranks)],
        [
            ["weights, bfloat16, sharded", *(amount(2 * model.backbone / n, "B") for n in ranks)],
            ["heads in training (16 bytes a parameter), sharded", *(amount(16 * trained / n, "B") for n in ranks)],
            [
                "full fine-tuning (16 bytes a parameter), sharded",
                *(amount(16 * (model.backbone + trained) / n, "B") for n in ranks),
            ],
            ["one gathered layer", *(amount(2 * model.backbone / SHAPES[name].num_hidden_layers, "B") for _ in ranks)],
            ["the vocabulary matrix, gathered", *(amount(model.matrix_flops, "B") for _ in ranks)],
            ["… its shard, vocabulary-parallel", *(amount(model.matrix_flops / n, "B") for n in ranks)],
            [
                f"scores of {CONTEXT:,} tokens, if they were held",
                *(amount(4.0 * CONTEXT * model.vocabulary, "B") for _ in ranks),
            ],
            ["… in blocks (the loss's own), on a CPU", *(amount(4.0 * BLOCK, "B") for _ in ranks)],
            ["… in blocks on a GPU; half in bfloat16", *(amount(4.0 * BLOCK_ON_GPU, "B") for _ in ranks)],
        ],
    )

    print(f"## Vocabulary-parallel: bytes per position that ranks add up, {name}\n")
    back = 2 * model.hidden
    table(
        ["", "forward", "rounds", "backward"],
        [
            ["softmax cross-entropy", "12 (maximum, sum, the target's score)", "2", amount(back, "B")],
            ["one-vs-rest, the documents' scale", "4 (the rank's part of the loss)", "1", amount(back + 4, "B")],
            [
                "one-vs-rest, the common scale",
                "12 (maximum, sum, the rank's part of the loss)",
                "3",
                amount(back + 4, "B"),
            ],
            ["a decision", "8 (best score, whose it is)", "1", "-"],
            ["sum of P_k, the common scale", "12 (maximum, sum, the rank's part)", "3", "-"],
        ],
    )

    print("## Individuals\n")
    rows: dict[str, list[str]] = {"memory (the matrix in float32, three C x C in float64)": [], "its curvature": []}
    rows["… in tokens of the backbone's forward pass"] = []
    for one in found.values():
        curvature = 2.0 * one.vocabulary * one.hidden**2
        needed = 4.0 * one.hidden * one.vocabulary + 3 * 8.0 * one.hidden**2
        cells = (amount(needed, "B"), amount(curvature, "FLOP"), f"{curvature / one.layers_flops:,.0f}")
        for row, cell in zip(rows.values(), cells, strict=True):
            row.append(cell)
    table(["to infer one", *found], [[name, *row] for name, row in rows.items()])


if __name__ == "__main__":
    main()
