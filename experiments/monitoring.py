"""What the documents watch in training: the OvR sum of everybody and of one individual, noise beside scale_U. (10 minutes)

200 steps of the heads on 64 tokens each (L_cls, 4,096 sampled wrong tokens; 1,536 tokens of an address), from three
starts, every token with a threshold of its own; `dist/*` on 384 tokens of another on the way. At the end, in the
state that was best there: thresholds of tokens that were learned from beside the others', and the rank correlation with how
often they came; and the rank correlation of each held-out position's nats with what is watched of its U.

    .venv/bin/python experiments/monitoring.py [--starts faithful]
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch

from causalqwen import CausalQwenForCausalLM
from causalqwen.data.encoding import Example
from causalqwen.data.texts import FITTED_YEARS, HELD_OUT_YEARS, speeches
from causalqwen.training import HeadStage, TrainSettings, score_tokens, stream_facts, text_chunks, train

STARTS = [("ordinary", 1e-3), ("architecture", 1e-3), ("faithful", 1e-4)]
COLUMNS = {
    "L_cls": "eval/cls_loss",
    "accuracy": "eval/accuracy",
    "sum": "dist/ovr_prob_sum_median",
    "one's sum": "dist/ovr_prob_sum_individual_median",
    "|b_noise|": "dist/noise_median",
    "scale_U": "dist/U_scale_median",
}


def examples(model: CausalQwenForCausalLM, years: tuple[int, ...], tokens: int) -> list[Example]:
    """The text's first tokens in rows of 32."""
    chunks = text_chunks(model, speeches(years), 33)[: tokens // 32]
    return [Example(ids.tolist(), [0.0] * len(ids)) for ids in chunks if len(ids) == 33]


def named(scores: dict) -> dict[str, float]:
    """What a record of the run would hold."""
    return {f"eval/{k}": v for k, v in scores["metrics"].items()} | {f"dist/{k}": v for k, v in scores["dist"].items()}


def rank_correlation(x: torch.Tensor, y: torch.Tensor) -> float:
    return torch.corrcoef(torch.stack([one.argsort().argsort().float() for one in (x, y)]))[0, 1].item()


@torch.no_grad()
def of_uncertainty(model: CausalQwenForCausalLM, rows: list[Example]) -> dict[str, float]:
    """Correlations with the softmax's nats: of centre and spread of loc_U and scale_U over a position's coordinates."""
    found: dict[str, list[torch.Tensor]] = {}
    quartiles = torch.tensor([0.25, 0.5, 0.75])
    for _, facts in stream_facts(model, rows):
        of_U = model.abduction(facts.tensor("features"))
        for name, column in zip(("loc_U", "scale_U"), of_U, strict=True):
            low, median, high = column.quantile(quartiles, dim=-1)
            parts = {"mean": column.mean(-1), "std": column.std(-1), "median": median, "iqr": high - low}
            for key, part in parts.items():
                found.setdefault(f"{name} {key}", []).append(part)
        found.setdefault("nats", []).append(facts.tensor("rest_log_partition") - facts.tensor("target_logit"))
    columns = {name: torch.cat(parts) for name, parts in found.items()}
    nats = columns.pop("nats")
    return {name: rank_correlation(column, nats) for name, column in columns.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--starts", nargs="+", choices=[name for name, _ in STARTS], default=[name for name, _ in STARTS]
    )
    chosen = parser.parse_args().starts
    torch.set_num_threads(1)
    for start, rate in [(name, rate) for name, rate in STARTS if name in chosen]:
        torch.manual_seed(0)
        model = CausalQwenForCausalLM.from_backbone(
            "smollm2-135m", dtype=torch.float32, start=start, token_thresholds=0.01, number_context="value"
        )
        rows, held_out = examples(model, FITTED_YEARS, 1536), examples(model, HELD_OUT_YEARS, 384)
        first = model.action.token_thresholds.detach().clone()
        epochs = -(-200 * 2 // len(rows))
        stage = HeadStage(epochs=epochs, batch_size=2, learning_rate=rate, negatives=4096)
        settings = TrainSettings(values=None, heads=stage, evaluations=4, logging_steps=50)
        facts = (facts for _, facts in stream_facts(model, held_out))
        before = score_tokens(model, facts)
        lines = [json.dumps({"step": 0, **named(before)})]
        with tempfile.TemporaryDirectory() as folder:
            train(model, rows, held_out, Path(folder) / "run", settings)
            lines += (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
        print(f"\nstart {start}, learning rate {rate:g}, {epochs * len(rows) // 2} steps")
        print(f"{'step':>6}" + "".join(f"{name:>12}" for name in COLUMNS) + f"{'ratio':>9}")
        records: dict[int, dict[str, float]] = {}
        for line in map(json.loads, lines):
            records.setdefault(line["step"], {}).update(line)
        for step, record in sorted(records.items()):
            if all(key in record for key in COLUMNS.values()):
                shown = "".join(f"{record[key]:12.4g}" for key in COLUMNS.values())
                print(f"{step:6}{shown}{record['dist/noise_median'] / record['dist/U_scale_median']:9.3f}", flush=True)
        counts = torch.zeros(model.action.rows)
        for row in rows:
            counts += torch.bincount(torch.tensor(row.input_ids[1:]), minlength=len(counts))
        moved = (model.action.token_thresholds.detach() - first)[model.action.rest_mask]
        counts = counts[model.action.rest_mask]
        seen = counts > 0
        correlation = rank_correlation(moved[seen], counts[seen])
        print(
            f"thresholds moved by {moved[seen].mean():+.4f} ({int(seen.sum())} tokens that came) and "
            f"{moved[~seen].mean():+.4f} (the others); rank correlation with the count {correlation:+.2f}",
            flush=True,
        )
        told = ", ".join(f"{name} {value:+.2f}" for name, value in of_uncertainty(model, held_out).items())
        print(f"correlations with the nats: {told}", flush=True)


if __name__ == "__main__":
    main()
