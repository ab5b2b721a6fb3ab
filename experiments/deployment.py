"""What do smaller copies of a trained model cost, and what do caches and batches save? (30 minutes; needs torchao)

    pip install torchao
    python experiments/deployment.py --model runs/demo/model --rows runs/demo/data/test.jsonl

Quantized and pruned are the matrices of the backbone's layers; embedding, lm_head and our heads keep their precision. The
distilled models have some layers of the backbone, trained on features and softmax of the whole one, heads frozen.
Scored on held-out boiling points and on a speech of 2012; speeds take turns, on one thread.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from tqdm.auto import tqdm

from causalqwen import CausalQwenForCausalLM
from causalqwen.data import collate, encode_rows, read_rows
from causalqwen.data.rows import Row, check_row
from causalqwen.data.texts import FITTED_YEARS, HELD_OUT_YEARS, speech_paragraphs
from causalqwen.modeling.loading import load_model
from causalqwen.modeling.outputs import CACHE
from causalqwen.training import score_tokens, stream_facts

Change = Callable[[CausalQwenForCausalLM], None]


def rows_of(texts: list[str]) -> list[Row]:
    return [check_row({"text": text}, "row") for text in texts]


def matrices(model: CausalQwenForCausalLM) -> list[nn.Linear]:
    """Those of the backbone's layers."""
    return [module for module in model.backbone.base_model.modules() if isinstance(module, nn.Linear)]


def quantized(name: str, **settings) -> Change:
    """By torchao's configuration of that name."""

    def change(model: CausalQwenForCausalLM) -> None:
        from torchao import quantization

        quantization.quantize_(model.backbone.base_model, getattr(quantization, name)(**settings))

    return change


def int4(model: CausalQwenForCausalLM) -> None:
    """Weights in groups of 32."""
    from torchao.quantization import PerGroup

    quantized("IntxWeightOnlyConfig", weight_dtype=torch.int4, granularity=PerGroup(32))(model)


def halved_precision(model: CausalQwenForCausalLM) -> None:
    """The backbone in bfloat16, and W_loc, whose product with W_cls is the backbone's."""
    model.backbone.to(torch.bfloat16)
    model.abduction.loc_net.to(torch.bfloat16)


def pruned(share: float) -> Change:
    """Set that share of each matrix, its smallest numbers, to zero."""

    def change(model: CausalQwenForCausalLM) -> None:
        for module in matrices(model):
            prune.l1_unstructured(module, "weight", share)
            prune.remove(module, "weight")

    return change


def shortened(every: int) -> Change:
    """Leave out one layer of so many, but never the last."""

    def change(model: CausalQwenForCausalLM) -> None:
        base = model.backbone.base_model
        last = len(base.layers) - 1
        base.layers = nn.ModuleList(
            layer for index, layer in enumerate(base.layers) if index % every != 1 or index == last
        )
        for index, layer in enumerate(base.layers):
            layer.self_attn.layer_idx = index
        base.config.num_hidden_layers = len(base.layers)

    return change


def distilled(teacher: CausalQwenForCausalLM, texts: list[str], steps: int, every: int) -> Change:
    """`shortened`, then trained: the mean squared distance of the features over their variance, and KL of the softmax."""

    def change(student: CausalQwenForCausalLM) -> None:
        shortened(every)(student)
        student.requires_grad_(False)
        for layer in student.backbone.base_model.layers:
            layer.requires_grad_(True)
        rows = encode_rows(rows_of(texts), student.processor)
        weights = [parameter for parameter in student.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(weights, lr=3e-4)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-4, total_steps=steps)
        lm_head, generator = teacher.get_output_embeddings(), torch.Generator().manual_seed(0)
        for _ in tqdm(range(steps), desc="distilling"):
            chosen = torch.randint(len(rows), (8,), generator=generator).tolist()
            batch = collate([rows[index] for index in chosen], student.processor.tokenizer.pad_token_id)
            batch = {name: batch[name][:, :96] for name in ("input_ids", "attention_mask", "numeric_values")}
            real = batch["attention_mask"].bool()
            with torch.no_grad():
                wanted = teacher.features(**batch).last_hidden_state[real]
                log_p = lm_head(wanted).log_softmax(-1)
            found = student.features(**batch).last_hidden_state[real]
            log_q = lm_head(found).log_softmax(-1)
            loss = (found - wanted).square().mean() / wanted.var() + (log_p.exp() * (log_p - log_q)).sum(-1).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            schedule.step()
        student.requires_grad_(True)

    return change


def size(model: CausalQwenForCausalLM) -> float:
    """MB of its weights; a quantized one counts by its parts."""

    def stored(tensor: Tensor) -> int:
        if hasattr(tensor, "__tensor_flatten__"):
            parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
            bits = 4 if getattr(tensor, "target_dtype", None) == torch.int4 else 8
            return sum(part.numel() * bits // 8 if part.dtype == torch.int8 else part.nbytes for part in parts)
        return tensor.nbytes

    return sum(stored(parameter.data) for parameter in model.parameters()) / 1e6


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


@torch.no_grad()
def copies(model: CausalQwenForCausalLM, variants: dict[str, Change], test: list[Row], rounds: int) -> None:
    """Prints size, speed, and scores of every changed copy."""
    speech = rows_of(speech_paragraphs(HELD_OUT_YEARS[0], numbers=False)[:30])
    parts = {"numbers": encode_rows(test, model.processor), "speech": encode_rows(speech, model.processor)}
    prompts = [text.rsplit(" is ", 1)[0] + " is" for text in (row.fields["text"] for row in test)]
    ids = torch.tensor([[token for example in parts["speech"] for token in example.input_ids][:512]])
    found, medians = {}, {}
    for name, change in variants.items():
        torch.manual_seed(0)
        other = copy.deepcopy(model)
        with torch.enable_grad():
            change(other)
        other.eval()
        scores = {
            part: score_tokens(other, (facts for _, facts in stream_facts(other, rows)))["metrics"]
            for part, rows in parts.items()
        }
        medians[name] = torch.tensor([prediction.median for prediction in other.predict_number(prompts)])
        found[name] = other, scores, other(ids).logits.argmax(-1)
    decided = found["float32"][2]
    times: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(rounds):
        for name, (other, _, _) in found.items():
            times[name].append(seconds(lambda other=other: other(ids)))
    base = statistics.median(times["float32"])
    print(
        f"{'copy':32}{'MB':>7}{'speed':>7}{'CRPS':>7}{'medians moved':>15}{'perplexity':>12}{'OvR':>8}{'same choices':>14}"
    )
    for name, (other, scores, choices) in found.items():
        moved = ((medians[name] - medians["float32"]).abs() / medians["float32"].abs()).median()
        numbers, words = scores["numbers"], scores["speech"]
        same = (choices == decided).double().mean()
        print(
            f"{name:32}{size(other):7.0f}{base / statistics.median(times[name]):7.2f}{numbers['crps']:7.1f}{moved:15.2%}"
            f"{words['perplexity']:12.2f}{words['ovr_perplexity']:8.2f}{same:14.1%}",
            flush=True,
        )


@torch.no_grad()
def savings(model: CausalQwenForCausalLM, rounds: int) -> None:
    """Prints what batches, caches and an early exit save."""
    ids = torch.randint(1000, 20_000, (8, 64), generator=torch.Generator().manual_seed(0))
    base = model.backbone.base_model

    def continued(rows: int, tokens: int) -> None:
        """Rows with a prefix of 256 tokens that was read before."""
        for row in range(rows):
            seen = copy.deepcopy(prefix)
            base(input_ids=ids[row : row + 1, :tokens], use_cache=True, **{CACHE: seen})

    head = ids[:4].reshape(1, 256)
    prefix = base(input_ids=head, use_cache=True)[CACHE]
    greedy = {"max_new_tokens": 32, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ways = {
        "8 texts in one batch": (lambda: model(ids), lambda: [model(row[None]) for row in ids]),
        "a cache of keys and values": (
            lambda: model.generate(input_ids=ids[:1], use_cache=True, **greedy),
            lambda: model.generate(input_ids=ids[:1], use_cache=False, **greedy),
        ),
        "a prefix of 256 tokens read once": (
            lambda: continued(8, 16),
            lambda: [base(input_ids=torch.cat([head, row[None, :16]], dim=1)) for row in ids],
        ),
    }
    for name, (fast, slow) in ways.items():
        pairs = [(seconds(slow), seconds(fast)) for _ in range(rounds + 1)][1:]
        print(f"{name:36}{statistics.median(one / other for one, other in pairs):6.1f} x faster", flush=True)
    saved, whole = model.action.value_head.in_features, sum(p.numel() for p in model.backbone.parameters())
    print(f"leaving before the value head where no number comes saves {saved} of {whole:,} multiplications")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--count", type=int, default=200, help="rows to score")
    parser.add_argument("--steps", type=int, default=300, help="of distilling")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", help="names of copies")
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = load_model(given.model, device="cpu").float()
    rows = read_rows(given.rows)
    test, others = rows[: given.count], rows[given.count :]
    texts = [row.fields["text"] for row in others]
    texts += [text for year in FITTED_YEARS for text in speech_paragraphs(year)]
    variants: dict[str, Change] = {
        "float32": lambda _: None,
        "bfloat16": halved_precision,
        "int8 weights": quantized("Int8WeightOnlyConfig"),
        "int8 weights and activations": quantized("Int8DynamicActivationInt8WeightConfig"),
        "int4 weights": int4,
        "30% pruned": pruned(0.3),
        "50% pruned": pruned(0.5),
        "half the layers": shortened(2),
        "half the layers, distilled": distilled(model, texts, given.steps, 2),
        "three layers of four": shortened(4),
        "three layers of four, distilled": distilled(model, texts, given.steps, 4),
    }
    chosen = ["float32", *(name for name in variants if name in (given.only or variants) and name != "float32")]
    copies(model, {name: variants[name] for name in chosen}, test, given.rounds)
    if not given.only:
        savings(model, given.rounds)


if __name__ == "__main__":
    main()
