"""What keeps a backbone's language while numbers, or language itself, are trained? (about 25 minutes per seed)

All recipes start at the same model whose stage 1 is trained, make as many updates on the same sentences with
boiling points and the same chunks of speeches, and are scored on sentences and on a speech that none has seen. The losses
that did not earn a place in the library are written out here.

    .venv/bin/python experiments/recipes.py --seed 0 --output runs/recipes
"""

import argparse
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor
from torch.nn import functional as F
from tqdm.auto import tqdm

from causalqwen import CausalQwenForCausalLM
from causalqwen.data import collate, encode_rows, read_rows
from causalqwen.data.boiling_points import boiling_points, write_sentences
from causalqwen.data.splits import split_by_entity
from causalqwen.data.texts import FITTED_YEARS, speeches
from causalqwen.evaluation.language import score_language
from causalqwen.modeling.chain import Chain
from causalqwen.training import TrainSettings, score_tokens, train
from causalqwen.training.anchor import TextAnchor
from causalqwen.training.features import stream_facts
from causalqwen.training.settings import ValueStage
from causalqwen.training.trainer import TrainedForCausalLM

SIZES = {"train": 960, "validation": 160, "test": 300}
UPDATES, ROWS, TOKENS, RATE, LIMIT = 40, 8, 128, 2e-3, 0.005  # the rate is ten times that of stage 2, on purpose


@dataclass(frozen=True)
class Recipe:
    """What is trained ("lora" or "heads"), whether the rows' words count beside their numbers, what a chunk of text adds."""

    name: str
    trained: str = "lora"
    words: bool = False
    text: str = ""
    limit: bool = False


RECIPES = [
    Recipe("stage 1 alone (frozen backbone)", trained=""),
    Recipe("LoRA, numbers alone"),
    Recipe("LoRA, numbers and OvR on the rows' words", words=True),
    Recipe("LoRA, numbers; KL to the backbone's softmax on text", text="kl"),
    Recipe("LoRA, numbers and words; KL on text", words=True, text="kl"),
    Recipe("LoRA, numbers; soft OvR targets on text", text="soft"),
    Recipe("LoRA, numbers; D(U, U_base) on text", text="individual"),
    Recipe("LoRA, numbers; scaled back to KL <= 0.005 on text", limit=True),
    Recipe("LoRA, numbers; OvR of text", text="ovr"),
    Recipe("heads, OvR of text (the documents')", trained="heads", text="ovr"),
]


class Text(TextAnchor):
    """The library's anchor, and what else was tried on the same chunks."""

    def other_loss(self, model: CausalQwenForCausalLM, kind: str, index: int) -> Tensor:
        """Mean over the positions of one chunk."""
        if kind == "kl":
            return self.loss(model, index)
        ids, base = self.ids[index : index + 1], self.features[index : index + 1]
        chain = Chain(model, model.features(ids).last_hidden_state[:, :-1])
        if kind == "individual":
            return model.action.law.kl(chain.loc_U, chain.scale_U, base, chain.scale_U.detach()).mean()
        if kind == "ovr":
            return chain.rest_loss(ids[:, 1:]).mean()
        wanted = F.linear(base, chain.words.weight).softmax(-1).detach()
        log_p, log_q = chain.word_scores.log_p()
        return -(wanted * log_p + (1 - wanted) * log_q).sum(-1).mean()

    @torch.no_grad()
    def divergence(self, model: CausalQwenForCausalLM) -> float:
        """KL(backbone || model) in nats per token, on some of the chunks."""
        return float(torch.stack([self.loss(model, i) for i in range(0, len(self), 10)]).mean())


def fit(model: CausalQwenForCausalLM, recipe: Recipe, rows: list, text: Text, seed: int) -> None:
    """The recipe's updates, in place."""
    if not recipe.trained:
        return
    torch.manual_seed(seed)
    model.requires_grad_(False)
    parts: list[Any] = [model.value_branch, model.action.value_head, model.action.num_row, model.action.num_bias]
    if recipe.trained == "heads":
        parts += [model.abduction, model.action.b_noise, model.action.threshold]
    else:
        names = ["q_proj", "k_proj", "v_proj", "o_proj"]
        inject_adapter_in_model(LoraConfig(r=8, lora_alpha=16, target_modules=names), model.backbone)
        parts.append(model.numeric_embedding)
    for part in parts:
        part.requires_grad_(True)
    trained = TrainedForCausalLM(model, whole_vocabulary=recipe.words)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, UPDATES, pct_start=0.1)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(rows), generator=generator)
    chunks = torch.randperm(len(text), generator=generator)
    pad = model.processor.tokenizer.pad_token_id
    for step in tqdm(range(UPDATES), desc=recipe.name, leave=False):
        batch = collate([rows[i] for i in order[step * ROWS % len(rows) :][:ROWS]], pad)
        loss = trained(**batch).loss
        if recipe.text:
            loss = loss + text.other_loss(model, recipe.text, int(chunks[step % len(chunks)]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    if recipe.limit:
        scale_back(model, lambda: text.divergence(model))


def scale_back(model: CausalQwenForCausalLM, divergence: Callable[[], float]) -> None:
    """Multiply the adapters by about the largest factor, found by halving, at which the divergence stays within LIMIT."""
    layers = [m for m in model.backbone.modules() if isinstance(m, LoraLayer)]
    full = [layer.scaling["default"] for layer in layers]

    def divergence_at(factor: float) -> float:
        for layer, scaling in zip(layers, full, strict=True):
            layer.scaling["default"] = factor * scaling
        return divergence()

    low, high = 0.0, 1.0
    if divergence_at(high) > LIMIT:
        for _ in range(6):
            middle = (low + high) / 2
            low, high = (middle, high) if divergence_at(middle) <= LIMIT else (low, middle)
        divergence_at(low)


def prepare(folder: Path, seed: int) -> tuple[Path, list, list]:
    """The model that all recipes start at, the training rows and the test rows."""
    torch.manual_seed(seed)
    model = CausalQwenForCausalLM.from_backbone("smollm2-135m", number_context="value")
    examples = {}
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in split_by_entity(boiling_points(), SIZES).items():
        write_sentences(folder / f"{name}.jsonl", part)
        examples[name] = encode_rows(read_rows(folder / f"{name}.jsonl"), model.processor)
    start = folder / f"start-{seed}"
    if not (start / "config.json").exists():
        shutil.rmtree(start, ignore_errors=True)
        stage = TrainSettings(seed=seed, values=ValueStage(epochs=20), evaluations=4)
        train(model, examples["train"], examples["validation"], start, stage)
    return start, examples["train"], examples["test"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/recipes"))
    parser.add_argument("--only", type=int, nargs="*", help="Numbers of recipes, from 0; the first is always made.")
    arguments = parser.parse_args()
    start, rows, test_rows = prepare(arguments.output, arguments.seed)
    held_out = speeches((2016,))
    text = Text(CausalQwenForCausalLM.from_pretrained(start).eval(), speeches(FITTED_YEARS), TOKENS, 2 * UPDATES)
    base = None
    chosen = RECIPES if arguments.only is None else [RECIPES[i] for i in sorted({0, *arguments.only})]
    for recipe in chosen:
        model = CausalQwenForCausalLM.from_pretrained(start).eval()
        fit(model, recipe, rows, text, arguments.seed)
        language = score_language(model, held_out)
        numbers = score_tokens(model, (facts for _, facts in stream_facts(model, test_rows)))["metrics"]
        base = base or language
        made = {
            "seed": arguments.seed,
            **asdict(recipe),
            "accuracy": language["accuracy"],
            "accuracy_change": language["accuracy"] - base["backbone_accuracy"],
            "nll_change": language["softmax_nll"] - base["backbone_nll"],
            "ovr_nll_change": language["ovr_nll"] - base["backbone_nll"],
            "ece": language["ece"],
            "median_error": numbers["median_error"],
            "crps": numbers["crps"],
        }
        with (arguments.output / "recipes.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(made) + "\n")
        print(
            f"{recipe.name:52} accuracy {100 * made['accuracy_change']:+6.2f} points  NLL {made['nll_change']:+7.4f}  "
            f"OvR {made['ovr_nll_change']:+7.4f}  ece {made['ece']:.3f}  median error {made['median_error']:5.1f}  "
            f"CRPS {made['crps']:5.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
