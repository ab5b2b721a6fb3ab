"""What does training beyond stage 1 give, and what does mixing kinds of rows cost? (40 minutes on one core)

    python experiments/stages.py --model DIR    # a graft of the default backbone
    python experiments/stages.py --words        # the documents' whole first stage on words (20 minutes)

Boiling points as sentences, made-up questions whose context holds the answer, made-up statements whose value nothing tells,
and paragraphs of speeches: each kind trained alone, and all of them at once, by stage 1; then boiling points again, with
the second stage's adapters and with the backbone's last layers beside it, by the default settings. CRPS on rows that none has
seen, and the softmax's nats per word of a speech less the untouched backbone's.

With `--words`, the stage `heads` on a speech, the matrix of the scores kept, an own one, or the backbone's: 32 updates of 4
paragraphs. On another speech, against the untouched backbone.
"""

import argparse
import copy
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from causalqwen import CausalQwenForCausalLM
from causalqwen.data import encode_rows
from causalqwen.data.boiling_points import boiling_points, sentence
from causalqwen.data.rows import check_row
from causalqwen.data.splits import split_by_entity
from causalqwen.data.synthetic import questions, statements
from causalqwen.data.texts import FITTED_YEARS, HELD_OUT_YEARS, speech_paragraphs
from causalqwen.training import TrainSettings, score_tokens, stream_facts, train
from causalqwen.training.run import learn

SIZES = {"train": 400, "validation": 100, "test": 150}


def tables() -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Kind -> part -> rows."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    compounds = split_by_entity(boiling_points(), SIZES)
    found["boiling points"] = {
        part: [{"text": sentence(one)} for one in of_part] for part, of_part in compounds.items()
    }
    for name, make in (("questions", questions), ("statements", statements)):
        rows = iter(make(sum(SIZES.values()), 0))
        found[name] = {part: [next(rows) for _ in range(size)] for part, size in SIZES.items()}
    return found


def of_words(rate: float) -> None:
    """The stage `heads` on words alone, by what becomes of W_cls."""
    years = (FITTED_YEARS[0], 16), (HELD_OUT_YEARS[0], 12)
    train_rows, test_rows = (
        [{"text": text[:300]} for text in speech_paragraphs(year, numbers=False)[:count]] for year, count in years
    )
    start = CausalQwenForCausalLM.from_backbone("smollm2-135m", dtype=torch.float32)
    untouched = None
    names = ("accuracy", "agreement", "softmax NLL", "OvR NLL", "sum", "L_cls")
    print(f"{'score_matrix':14}" + "".join(f"{name:>13}" for name in names), flush=True)
    for matrix in ("untrained", "kept", "own", "shared"):
        model = copy.deepcopy(start)
        encoded, test = (
            encode_rows([check_row(row, "speech") for row in rows], model.processor) for rows in (train_rows, test_rows)
        )
        if matrix != "untrained":
            stage = {"score_matrix": matrix, "epochs": 8, "batch_size": 4, "learning_rate": rate}
            settings = TrainSettings.from_dict({"values": False, "heads": stage, "evaluations": 1})
            with tempfile.TemporaryDirectory() as output:
                learn(model, encoded, [], Path(output) / "run", settings)
        blocks = [facts for _, facts in stream_facts(model, test)]
        untouched = untouched or blocks
        base = {
            name: np.concatenate([getattr(one, name) for one in untouched])
            for name in ("targets", "backbone_id", "backbone_nll")
        }
        decided = np.concatenate([one.rival_id for one in blocks])
        found, nll = score_tokens(model, blocks)["metrics"], base["backbone_nll"].mean()
        right = (decided == base["targets"]).mean() - (base["backbone_id"] == base["targets"]).mean()
        columns = f"{100 * right:+13.2f}{100 * (decided == base['backbone_id']).mean():12.1f}%"
        columns += f"{found['softmax_nll'] - nll:+13.4f}{found['ovr_nll'] - nll:+13.4f}"
        columns += f"{found['ovr_sum_median']:13.2f}{found['cls_loss']:13.3f}"
        print(f"{matrix:14}{columns}", flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--only", nargs="+", help="names of runs")
    parser.add_argument("--words", action="store_true", help="the stage `heads` on words, by what becomes of W_cls")
    parser.add_argument("--rate", type=float, default=1e-4, help="with --words: the learning rate")
    given = parser.parse_args()
    if given.words:
        of_words(given.rate)
        return
    if given.model is None:
        parser.error("give --model, or --words")
    rows = tables()
    words = {"train": [{"text": text} for text in speech_paragraphs(FITTED_YEARS[0], numbers=False)[:40]]}
    speech = [{"text": text} for text in speech_paragraphs(HELD_OUT_YEARS[0], numbers=False)[:20]]
    plans: dict[str, tuple[list[str], dict[str, Any]]] = {f"{name} alone": ([name], {}) for name in rows}
    plans |= {
        "all kinds at once": (list(rows), {}),
        "boiling points, then LoRA": (["boiling points"], {"lora": {"epochs": 2}}),
        "boiling points, then 2 layers": (["boiling points"], {"backbone": {"epochs": 2, "layers": 2}}),
    }
    print(f"{'trained on':34}" + "".join(f"{name:>16}" for name in rows) + f"{'language, nats':>16}", flush=True)
    base = None
    with tempfile.TemporaryDirectory() as folder:
        for name, (kinds, stages) in plans.items():
            if given.only and name not in given.only:
                continue
            model = CausalQwenForCausalLM.from_pretrained(given.model)

            def encoded(found: list[dict[str, Any]], place: str, model=model) -> list[Any]:
                return encode_rows([check_row(row, place) for row in found], model.processor)

            parts = {
                part: [example for kind in kinds for example in encoded(rows[kind][part], kind)]
                for part in ("train", "validation")
            }
            if len(kinds) > 1:
                parts["train"] += encoded(words["train"], "speech")
            torch.manual_seed(0)
            settings = TrainSettings.from_dict({"evaluations": 4, **stages})
            if base is None:
                scored = score_tokens(model, (facts for _, facts in stream_facts(model, encoded(speech, "speech"))))
                base = scored["metrics"]["softmax_nll"]
            train(model, parts["train"], parts["validation"], Path(folder) / name, settings)
            line = f"{name:34}"
            for kind in rows:
                test = encoded(rows[kind]["test"], kind)
                line += (
                    f"{score_tokens(model, (facts for _, facts in stream_facts(model, test)))['metrics']['crps']:16.2f}"
                )
            scored = score_tokens(model, (facts for _, facts in stream_facts(model, encoded(speech, "speech"))))
            print(line + f"{scored['metrics']['softmax_nll'] - base:+16.4f}", flush=True)


if __name__ == "__main__":
    main()
