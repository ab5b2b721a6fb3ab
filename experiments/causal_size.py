"""What does an action law of fewer coordinates keep of the backbone's language, and what does it save? (10 minutes)

Grafts of causal size C, fitted to 6,144 tokens of three addresses (`narrow_head`), measured on 2,048 tokens of two others:
how often the decision is the backbone's, perplexity of the softmax over loc_S, KL(backbone || model), and the time of the head,
loc_U and all scores, for one position and for 64.

.venv/bin/python experiments/causal_size.py
"""

import time

import torch

from causalqwen import CausalQwenForCausalLM
from causalqwen.data.texts import FITTED_YEARS, HELD_OUT_YEARS, speeches
from causalqwen.modeling.chain import Chain
from causalqwen.training import text_chunks

SIZES = (16, 64, 128, 256, 576)
FITTED, MEASURED = 6144, 2048


@torch.no_grad()
def seconds(model: CausalQwenForCausalLM, z: torch.Tensor, repeats: int) -> float:
    """Median time of loc_U and all scores."""
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        _ = Chain(model, z).loc_S
        taken.append(time.perf_counter() - start)
    return sorted(taken)[repeats // 2]


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)
    plain = CausalQwenForCausalLM.from_backbone("smollm2-135m", dtype=torch.float32)
    tokenizer = plain.processor.tokenizer
    text = tokenizer.decode(tokenizer(speeches(FITTED_YEARS))["input_ids"][:FITTED])
    chunks = text_chunks(plain, speeches(HELD_OUT_YEARS))[::2][: MEASURED // 512]
    z = torch.cat([plain.features(ids[None]).last_hidden_state[0, :-1] for ids in chunks])
    targets = torch.cat([ids[1:] for ids in chunks])
    theirs = plain.backbone.get_output_embeddings()(z).log_softmax(-1)
    print(
        f"{len(z)} positions\n{'C':>5}{'new':>12}{'decisions':>11}{'perplexity':>12}{'KL':>8}{'1, ms':>8}{'64, ms':>8}"
    )
    for size in SIZES:
        model = plain
        if size < plain.config.hidden_size:
            model = CausalQwenForCausalLM.from_backbone(
                "smollm2-135m", dtype=torch.float32, causal_size=size, text=text
            )
        scores = Chain(model, z).loc_S
        ours = scores[:, : model.action.rows].log_softmax(-1)
        agreed = (scores.argmax(-1) == theirs.argmax(-1)).float().mean().item()
        perplexity = -ours.gather(-1, targets[:, None]).mean()
        divergence = (theirs.exp() * (theirs - ours)).sum(-1).mean().item()
        one, many = seconds(model, z[:1], 41), seconds(model, z[:64], 9)
        new = sum(p.numel() for p in model.score_head.parameters()) if model.score_head is not None else 0
        print(
            f"{size:5}{new:12,}{agreed:11.1%}{perplexity.exp().item():12.1f}{divergence:8.3f}"
            f"{1000 * one:8.1f}{1000 * many:8.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
