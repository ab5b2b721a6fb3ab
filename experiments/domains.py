"""What does a domain's abduction network learn within a limit, and does the limit hold on other text? (10 minutes)

.venv/bin/python experiments/domains.py --model DIR    # a graft of the default backbone

Boiling points as sentences; the abduction network of their domain is trained on 400 of them, everything else stands still.
Accuracy of words, normalised one-vs-rest NLL and divergence on 100 other sentences and on a speech, per limit.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch

from causalqwen import CausalQwenForCausalLM
from causalqwen.data import encode_rows, parse_row
from causalqwen.data.boiling_points import boiling_points, sentence
from causalqwen.data.splits import split_by_entity
from causalqwen.data.texts import HELD_OUT_YEARS, speech_paragraphs
from causalqwen.training import FactStore, HeadStage, TrainSettings, score_tokens, train

LIMITS = ("0.01", "0.1", "1.0", "none")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--limits", nargs="+", default=list(LIMITS), help="of D; none for no limit")
    given = parser.parse_args()
    parts = split_by_entity(boiling_points(), {"train": 400, "test": 100})
    speech = speech_paragraphs(HELD_OUT_YEARS[0], numbers=False)[:40]
    texts = {name: [sentence(record) for record in records] for name, records in parts.items()} | {"speech": speech}
    print(f"{'limit':>8}{'on':>8}{'accuracy':>10}{'OvR NLL':>9}{'mean D':>9}{'largest D':>11}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for index, limit in enumerate(("base", *given.limits)):
            torch.manual_seed(0)
            model = CausalQwenForCausalLM.from_pretrained(given.model)
            rows = {
                name: encode_rows([parse_row(json.dumps({"text": text}), name) for text in of_part], model.processor)
                for name, of_part in texts.items()
            }
            if limit != "base":
                bound = None if limit == "none" else float(limit)
                stage = HeadStage(
                    epochs=3, batch_size=16, learning_rate=given.rate, domain="boiling", domain_limit=bound
                )
                train(model, rows["train"], [], root / str(index), TrainSettings(values=None, heads=stage))
            for name in ("test", "speech"):
                found = score_tokens(model, FactStore.build(model, rows[name], root).blocks())["metrics"]
                away = [found.get(key, 0.0) for key in ("domain_divergence", "domain_divergence_max")]
                print(
                    f"{limit:>8}{name:>8}{found['accuracy']:10.3f}{found['ovr_nll']:9.3f}{away[0]:9.4f}{away[1]:11.4f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
