"""What does each part contribute? One part left out or exchanged at a time, at equal budget. (40 minutes)

    python experiments/ablations.py --model DIR    # a graft of the default backbone

The backbone stands still; abduction, noise, threshold, value branch and value head are trained by equally many updates on
kept features: of sentences with boiling points, and of made-up questions whose context holds the answer. Medians over seeds
0 to 2 on other sentences; least and greatest CRPS in brackets.
"""

import argparse
import math
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm.auto import tqdm

from causalqwen import CausalQwenForCausalLM
from causalqwen.data import Example, encode_rows
from causalqwen.data.boiling_points import boiling_points, sentence
from causalqwen.data.rows import check_row
from causalqwen.data.splits import split_by_entity
from causalqwen.data.synthetic import questions
from causalqwen.kernels import Negatives, sample_negatives
from causalqwen.losses import shift_targets
from causalqwen.modeling.chain import Chain
from causalqwen.numbers import ValueTransform
from causalqwen.parts.perceptron import ResidualPerceptron
from causalqwen.training import FactStore, score_tokens
from causalqwen.training.stages import sampling_of_negatives

TRAIN, TEST, BATCH, EPOCHS, NEGATIVES = 800, 200, 16, 4, 1024


class SeparateHead(nn.Module):
    """A perceptron from the features to loc and scale of a value, as wide as the value branch; no U."""

    def __init__(self, model: CausalQwenForCausalLM) -> None:
        super().__init__()
        config = model.config
        self.branch = model.value_branch
        self.perceptron = ResidualPerceptron(config.hidden_size, config.value_branch_hidden_size, 2, layers=1)

    def forward(self, features: Tensor, *, each: bool = False) -> tuple[Tensor, Tensor]:
        loc, log_scale = self.perceptron(self.branch.standardize(features)).unbind(-1)
        loc, scale = loc, log_scale.clamp(-10, 10).exp()
        return (loc[None], scale[None]) if each else (loc, scale)


def plain(model: CausalQwenForCausalLM) -> None:
    """The whole."""


def without_phi(model: CausalQwenForCausalLM) -> None:
    """A number in the context is `<NUM>`, whatever its value."""
    nn.init.zeros_(model.numeric_embedding.direction)


def without_abduction(model: CausalQwenForCausalLM) -> None:
    """The same individual everywhere: U is the features, its scale one vector for all contexts, and no branch moves it."""
    nn.init.zeros_(model.abduction.scale_net.weight)
    model.abduction.loc_net.requires_grad_(False)
    model.abduction.scale_net.weight.requires_grad_(False)
    model.value_branch = None
    model.config.value_branch = False


def without_noise(model: CausalQwenForCausalLM) -> None:
    """|b_noise| = 0."""
    nn.init.zeros_(model.action.b_noise)
    model.action.b_noise.requires_grad_(False)


def gated(detach: bool) -> Callable[[CausalQwenForCausalLM], None]:
    """The documents' gate: a number's likelihood counts P_NUM times."""

    def change(model: CausalQwenForCausalLM) -> None:
        model.config.gate_alpha, model.config.gate_detach = 0.0, detach

    return change


def separate(model: CausalQwenForCausalLM) -> None:
    """Words by the softmax of the backbone's head, values by a perceptron of their own; nothing is shared."""
    model.separate_head = SeparateHead(model)
    of_chain = Chain.value

    def value(chain: Chain, **settings: Any) -> tuple[Tensor, Tensor]:
        if chain.model is not model:
            return of_chain(chain, **settings)
        return model.separate_head(chain.features, **settings)

    Chain.value = value  # type: ignore[method-assign]
    model.abduction.requires_grad_(False)


VARIANTS: dict[str, tuple[Callable[[CausalQwenForCausalLM], None], dict[str, Any]]] = {
    "the whole": (plain, {}),
    "without phi": (without_phi, {}),
    "without abduction": (without_abduction, {}),
    "without noise": (without_noise, {}),
    "the documents' gate": (gated(detach=True), {}),
    "… its gradient too": (gated(detach=False), {}),
    "softmax for one-vs-rest": (plain, {}),
    "Gaussian for Cauchy, values": (plain, {"value_family": "gaussian"}),
    "Cauchy for Gaussian, tokens": (plain, {"vocabulary_family": "cauchy"}),
    "heads without U": (separate, {}),
    "deep abduction": (plain, {"deep_abduction": True}),
    "scale by exp": (plain, {"scale_activation": "exp"}),
    "scale at most 0.001": (plain, {"max_scale": 1e-3}),
    "quantile values": (plain, {"value_transform": "quantile"}),
    "symlog values": (plain, {"value_transform": "symlog"}),
    "identity values": (plain, {"value_transform": "identity"}),
}
OF_SOFTMAX = ("softmax for one-vs-rest", "heads without U")


def parameters(model: CausalQwenForCausalLM) -> list[dict[str, Any]]:
    """What is trained: what numbers read at a rate of 1e-3, what words read too at 1e-5."""
    open_ = {id(p) for p in model.parameters() if p.requires_grad}
    action = model.action
    numbers = [model.value_branch, action.value_head, getattr(model, "separate_head", None)]
    fast = [p for part in numbers if part is not None for p in part.parameters()] + [action.num_row, action.num_bias]
    slow = [*model.abduction.parameters(), action.b_noise, action.threshold]
    unique = {id(p): (p, rate) for group, rate in ((fast, 1e-3), (slow, 1e-5)) for p in group if id(p) in open_}
    return [{"params": [p], "lr": rate} for p, rate in unique.values()]


def losses(model: CausalQwenForCausalLM, facts: list[Any], negatives: Tensor, of_softmax: bool) -> Tensor:
    """L of rows that are packed end to end."""
    features = torch.cat([row.tensor("features") for row in facts])[None].float()
    labels = F.pad(torch.cat([row.tensor("targets") for row in facts]).long(), (1, 0), value=-100)[None]
    values = F.pad(torch.cat([row.tensor("values") for row in facts]), (1, 0), value=math.nan)[None]
    masks = shift_targets(labels, values, None, model.config.num_token_id)
    chain = Chain(model, features)
    rest = torch.zeros(masks.targets.shape, device=features.device)
    sample = sample_negatives(negatives)
    if not of_softmax:
        rest = chain.rest_loss(masks.targets, negatives=sample)
    of_values = model.value_losses(features[masks.num_mask], masks.values[masks.num_mask])
    parts = model.losses(masks, rest, chain.number.log_p(), of_values)
    if not of_softmax:
        return parts.total
    return sampled_softmax(model, chain.loc[0], masks.targets[0], sample) + model.config.value_loss_weight * parts.reg


def sampled_softmax(model: CausalQwenForCausalLM, loc: Tensor, targets: Tensor, sample: Negatives) -> Tensor:
    """Cross-entropy over the target, `<NUM>`, and the sampled tokens, each of which stands for as many as its weight."""
    action, lm_head = model.action, model.vocabulary()
    is_num = targets == model.config.num_token_id
    num_score = action.num_loc(loc, lm_head)
    words = lm_head.weight[targets.masked_fill(is_num, 0)]
    score = torch.where(is_num, num_score, (loc * words).sum(-1))
    others = loc @ lm_head.weight[sample.ids].T + sample.weights.log()
    others = others.masked_fill(sample.ids == targets.unsqueeze(-1), -torch.inf)
    of_num = num_score.masked_fill(is_num, -torch.inf)
    return (torch.cat([score[:, None], of_num[:, None], others], dim=1).logsumexp(-1) - score).mean()


def measure(folder: Path, given: Path, name: str, rows: dict[str, list[dict]], seed: int) -> dict[str, float]:
    """Train one variant, and score it on the test rows."""
    change, settings = VARIANTS[name]
    model = CausalQwenForCausalLM.from_pretrained(given)
    examples: dict[str, list[Example]] = {
        part: encode_rows([check_row(row, part) for row in of_part], model.processor) for part, of_part in rows.items()
    }
    if change is without_phi:
        change(model)
    stores = {part: FactStore.build(model, found, folder, title=part) for part, found in examples.items()}
    torch.manual_seed(seed)
    transform, settings = (
        settings.get("value_transform", "affine"),
        {k: settings[k] for k in settings if k != "value_transform"},
    )
    if "vocabulary_family" in settings:  # it has start values of its own; the features are the same
        model = CausalQwenForCausalLM.from_backbone("smollm2-135m", **settings, number_context="value")
    elif settings:
        model = CausalQwenForCausalLM.from_pretrained(given, **settings)
    model.requires_grad_(True)
    change(model)
    known = torch.from_numpy(stores["train"].facts.values).double()
    known = known[known.isfinite()]
    model.config.value_transform = ValueTransform.fit(transform, known).to_dict()
    model.config.value_range = [known.min().item(), known.max().item()]
    if model.value_branch is not None:
        facts = stores["train"].facts
        at_numbers = torch.from_numpy(facts.features[np.isfinite(facts.values)])
        std, mean = torch.std_mean(at_numbers.float(), dim=0)
        model.value_branch.feature_mean.copy_(mean)
        model.value_branch.feature_std.copy_(std.clamp(min=1e-6))
    negatives = sampling_of_negatives(model, stores["train"].facts, NEGATIVES)
    optimizer = torch.optim.AdamW(parameters(model), weight_decay=0.1)
    steps = EPOCHS * (TRAIN // BATCH)
    rates = [group["lr"] for group in optimizer.param_groups]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=steps, pct_start=0.1)
    order = torch.cat([torch.randperm(TRAIN) for _ in range(EPOCHS)]).split(BATCH)
    model.train()
    for batch in tqdm(order[:steps], desc=f"{name}, seed {seed}", leave=False):
        loss = losses(model, [stores["train"][row] for row in batch.tolist()], negatives, name in OF_SOFTMAX)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
        optimizer.step()
        schedule.step()
    model.eval()
    found = score_tokens(model, stores["test"].renewed(model))["metrics"]
    return found | {"covered": found["coverage_raw"]["0.9"]}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--tasks", nargs="+", default=["boiling points", "questions"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--work", type=Path, help="a folder that keeps the features")
    given = parser.parse_args()
    parts = split_by_entity(boiling_points(), {"train": TRAIN, "test": TEST})
    asked = questions(TRAIN + TEST)
    tasks = {
        "boiling points": {part: [{"text": sentence(record)} for record in of_part] for part, of_part in parts.items()},
        "questions": {"train": asked[:TRAIN], "test": asked[TRAIN:]},
    }
    columns = ("crps", "covered", "num_f1", "accuracy", "softmax_nll", "ovr_nll")
    with tempfile.TemporaryDirectory() as folder:  # one for all: most variants read the same features
        folder = given.work or folder
        for task in given.tasks:
            rows = tasks[task]
            print(f"{task:30}{'CRPS':>20}" + "".join(f"{column:>13}" for column in columns[1:]), flush=True)
            for name in given.variants:
                found = [measure(Path(folder), given.model, name, rows, seed) for seed in range(given.seeds)]
                middle = [statistics.median(one[column] for one in found) for column in columns]
                spread = sorted(one["crps"] for one in found)
                crps = f"{middle[0]:.1f} ({spread[0]:.1f} to {spread[-1]:.1f})"
                print(f"{name:30}{crps:>20}" + "".join(f"{value:13.3f}" for value in middle[1:]), flush=True)


if __name__ == "__main__":
    main()
