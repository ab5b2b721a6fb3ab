"""Sampled negatives: bias, variance, and what they do to training (about ten minutes per seed on two cores).

The heads of SmolLM2 on features of three speeches, with all wrong tokens or with a sample of them; L_cls of all
tokens on two speeches that were not seen.

    .venv/bin/python experiments/negatives.py --seed 0
"""

import argparse
import copy

import torch
from torch import Tensor
from tqdm.auto import tqdm

from causalqwen import CausalQwenForCausalLM
from causalqwen.data.texts import FITTED_YEARS, HELD_OUT_YEARS, speeches
from causalqwen.kernels import Negatives, inclusion_probabilities, sample_negatives
from causalqwen.modeling.chain import Chain
from causalqwen.training import text_chunks
from causalqwen.training.stages import token_importance

BATCH, UPDATES, RATE, HELD_OUT = 128, 150, 1e-4, 4096


@torch.no_grad()
def positions(model: CausalQwenForCausalLM, text: str) -> tuple[Tensor, Tensor]:
    """Features [N, H] and the tokens that came [N]."""
    chunks = text_chunks(model, text)
    features = [model.features(ids[None]).last_hidden_state[0, :-1] for ids in tqdm(chunks, leave=False)]
    return torch.cat(features), torch.cat([ids[1:] for ids in chunks])


def loss(model: CausalQwenForCausalLM, z: Tensor, targets: Tensor, negatives: Negatives | None = None) -> Tensor:
    """Mean of what every token but `<NUM>` adds to L_cls."""
    z = z.unsqueeze(0)
    return Chain(model, z).rest_loss(targets[None], negatives=negatives).mean()


def trained(model: CausalQwenForCausalLM) -> list[torch.nn.Parameter]:
    action = model.action
    return [*model.abduction.parameters(), action.b_noise, action.threshold]


@torch.no_grad()
def held_out(model: CausalQwenForCausalLM, z: Tensor, targets: Tensor) -> float:
    parts = zip(z.split(512), targets.split(512), strict=True)
    return sum(loss(model, *part).item() * len(part[0]) for part in parts) / len(z)


def gradient(model: CausalQwenForCausalLM, z: Tensor, targets: Tensor, negatives: Negatives | None = None) -> Tensor:
    made = torch.autograd.grad(loss(model, z, targets, negatives), trained(model))
    return torch.cat([g.flatten() for g in made])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    torch.manual_seed(seed)
    start = CausalQwenForCausalLM.from_backbone("smollm2-135m")
    start.requires_grad_(False)
    for parameter in trained(start):
        parameter.requires_grad_(True)
    z, targets = positions(start, speeches(FITTED_YEARS))
    test_z, test_targets = (t[:HELD_OUT] for t in positions(start, speeches(HELD_OUT_YEARS)))
    importance = token_importance(start, z[torch.randperm(len(z))[:512]])
    generator = torch.Generator().manual_seed(seed)
    order = torch.randint(len(z), (UPDATES, BATCH), generator=generator)
    print(f"seed {seed}: held-out L_cls at the start {held_out(start, test_z, test_targets):.4f}")

    batch = z[order[0]], targets[order[0]]
    whole = gradient(start, *batch)
    others = torch.stack([gradient(start, z[o], targets[o]) for o in order[1:9]])
    between = ((others - others.mean(0)).pow(2).sum(-1).mean() / whole.pow(2).sum()).item()
    vocabulary = len(importance)
    for share in (4, 16, 64):
        pi = inclusion_probabilities(importance, vocabulary // share)
        samples = [sample_negatives(pi, generator) for _ in range(200)]
        values = torch.stack([loss(start, *batch, sample).detach() for sample in samples])
        error = torch.stack([gradient(start, *batch, sample) for sample in samples[:40]]) - whole
        exact = loss(start, *batch).item()
        print(
            f"1/{share}: mean loss {values.mean():.5f} +- {values.std() / len(values) ** 0.5:.5f} (all: {exact:.5f}); "
            f"gradient: mean error {error.mean(0).norm() / whole.norm():.3f} of its length (chance alone "
            f"{(error.pow(2).sum(-1).mean() / len(error)).sqrt() / whole.norm():.3f}), variance "
            f"{error.pow(2).sum(-1).mean() / whole.pow(2).sum():.4f}; between batches {between:.4f}",
            flush=True,
        )
    for share in (1, 4, 16, 64):
        model = copy.deepcopy(start)
        pi = inclusion_probabilities(importance, vocabulary // share) if share > 1 else None
        optimizer = torch.optim.Adam(trained(model), lr=RATE)
        for index in tqdm(order, desc=f"1/{share}", leave=False):
            sample = sample_negatives(pi, generator) if share > 1 else None
            optimizer.zero_grad()
            loss(model, z[index], targets[index], sample).backward()
            optimizer.step()
        print(
            f"1/{share}: held-out L_cls after {UPDATES} updates {held_out(model, test_z, test_targets):.4f}", flush=True
        )


if __name__ == "__main__":
    main()
