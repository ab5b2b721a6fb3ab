"""transformers' Trainer for a grafted model: two counts in the loss, the documents' metrics, small checkpoints."""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback
from transformers.integrations import MLflowCallback, TensorBoardCallback, TrackioCallback, WandbCallback
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from transformers.trainer_callback import ProgressCallback

from causalqwen.files import check_sums, write_sums, write_text, writing, writing_tensors
from causalqwen.kernels import sample_negatives
from causalqwen.losses import IGNORE_INDEX, shift_targets
from causalqwen.modeling import CausalQwenForCausalLM
from causalqwen.modeling.chain import Chain
from causalqwen.parts.copying import Candidates
from causalqwen.training import ranks
from causalqwen.training.anchor import TextAnchor
from causalqwen.training.features import known_of_number

WEIGHTS = "model.safetensors"
_WINDOW = ("cls_loss", "reg_loss_effective", "right", "counted")  # what is summed between two records


class TrainedForCausalLM(nn.Module):
    """What a stage trains, as the model that a Trainer sees. Shares the modules of `model`.

    Rows come as tokens, or as kept facts, and then nothing of the backbone runs; the losses are the same.

    whole_vocabulary: take the rest of the vocabulary into L_cls; else `<NUM>`'s own term alone.
    anchor, anchor_weight: beside the losses of the rows, in training, `anchor_weight` times that of one chunk of text.
    heads: train the heads that kept facts depend on: of the facts, the features alone are read then. Without, the rest
        of the vocabulary stands still, and no decision is made of kept facts.
    negatives: [V], by what a training step samples wrong tokens (`inclusion_probabilities`); None for all of them.
    """

    accepts_loss_kwargs = True

    def __init__(
        self,
        model: CausalQwenForCausalLM,
        whole_vocabulary: bool = True,
        anchor: TextAnchor | None = None,
        anchor_weight: float = 1.0,
        *,
        heads: bool = False,
        negatives: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.model, self.config = model, model.config
        self.whole_vocabulary, self.heads, self.negatives = whole_vocabulary, heads, negatives
        self.anchor, self.anchor_weight = anchor, anchor_weight

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of what moves; torch's own asks every module of the backbone, at every step."""
        for parameter in self.moving:
            parameter.grad = None

    @cached_property
    def moving(self) -> list[nn.Parameter]:
        """The parameters that are trained."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def forward(
        self,
        labels: Tensor,
        facts: dict[str, Tensor] | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        numeric_values: Tensor | None = None,
        numeric_labels: Tensor | None = None,
        also_right: Tensor | None = None,
        group: Tensor | None = None,
        candidates: dict[str, Tensor] | None = None,
        classes: Tensor | None = None,
        anchor_chunk: int = 0,
        num_items_in_batch: Tensor | int | None = None,
        num_numbers_in_batch: Tensor | int | None = None,
    ) -> dict[str, Any]:
        """Losses of rows [B, S], and the decisions [B, S-1] under `standard`: none of facts, nor where wrong ones are sampled.

        facts: the columns of `TokenFacts` by name, [B, S-1] (features [B, S-1, H]); else give the tokens.
        labels, numeric_labels, input_ids, attention_mask, numeric_values: [B, S]. also_right: [B, S, R], see the model's
            `forward`.
        group: int64 [B, S-1], which positions share an individual (-1: none); values of one are taken together.
        classes: int64 [B, S-1], where classes have axes of their own: see `value_losses`.
        candidates: of kept facts, where the model copies: the fields of `Candidates`, rows and at [1, N].
        anchor_chunk: which of the anchor's chunks to take, counted round.
        """
        model, num_id = self.model, self.config.num_token_id
        masks = shift_targets(labels, numeric_labels, attention_mask, num_id)
        masks.also_right = None if also_right is None else also_right[:, 1:]
        masks.num_items, masks.num_numbers = num_items_in_batch, num_numbers_in_batch
        offered = None if candidates is None else Candidates(**candidates)
        if facts is None:
            hidden = model.features(input_ids, attention_mask, numeric_values).last_hidden_state
            numbers = model.candidates(hidden, input_ids, numeric_values, attention_mask)
            features, offered = hidden[:, :-1], None if numbers is None else numbers[:, :-1]
        else:
            features = facts["features"]
        chain = Chain(model, features)
        rest_loss = torch.zeros(masks.targets.shape, device=features.device)
        decisions: Tensor | None = None
        if facts is not None and not self.heads:
            known_of_number(chain, facts["num_scale"], facts.get("threshold"))
        else:
            chain.situated()
            sample = sample_negatives(self.negatives) if self.negatives is not None and self.training else None
            if self.whole_vocabulary:
                rest_loss = chain.rest_loss(masks.targets, masks.also_right, negatives=sample, impl=model.ovr_impl)
            # Decisions cost a product of their own: where wrong tokens are sampled to save one, none are made.
            decisions = chain.decide() if sample is None else None
        taken: Any = features, masks.values, group, offered, classes
        value_losses = model.value_losses(*[None if one is None else one[masks.num_mask] for one in taken])
        values_alone = facts is not None and not self.heads and "threshold" not in facts
        log_p = (rest_loss, rest_loss) if values_alone else chain.number.log_p()
        parts = model.losses(masks, rest_loss, log_p, value_losses)
        loss = parts.total
        if self.anchor is not None and self.training:
            share = 1.0 if num_items_in_batch is None else masks.cls_mask.sum() / num_items_in_batch
            loss = loss + self.anchor_weight * share * self.anchor.loss(model, anchor_chunk % len(self.anchor))
        return {"loss": loss, "loss_cls": parts.cls, "loss_reg": parts.reg, "decisions": decisions}

    def train(self, mode: bool = True) -> "TrainedForCausalLM":
        """Set the mode as torch does, where that changes anything: a Trainer calls it at every step."""
        return self if self.training == mode == self.model.training else super().train(mode)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """function(model, *args), as a forward of this module's: with whole weights where they are sharded."""
        return function(self.model, *args)


class QuietProgress(ProgressCallback):
    """transformers' progress bar on stderr, with the loss beside it instead of records printed between."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict | None = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and self.training_bar is not None and logs and "loss" in logs:
            self.training_bar.set_postfix(loss=f"{logs['loss']:.4g}")


class MetricsFile(TrainerCallback):
    """One JSON object per record in `metrics.jsonl`: step, epoch, and train/*, eval/*, dist/* (overview 5). Rank 0 writes."""

    def __init__(self, path: Path, stage: str) -> None:
        self.path, self.stage = path, stage

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Drop records of this stage after the step where it resumes."""
        if ranks.rank() > 0 or not self.path.exists():
            return
        kept = []
        for line in self.path.read_bytes().splitlines():
            with suppress(ValueError, KeyError, TypeError):  # what a killed run left of its last line
                record = json.loads(line.decode())
                if record["stage"] != self.stage or record["step"] <= state.global_step:
                    kept.append(record)
        write_text(self.path, "".join(json.dumps(record) + "\n" for record in kept))

    def record(self, step: int, epoch: float | None, metrics: dict[str, float]) -> None:
        if ranks.rank() == 0:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"stage": self.stage, "step": step, "epoch": epoch, **metrics}) + "\n")


class CausalTrainer(Trainer):
    """Trainer whose loss is divided by tokens and by numbers of the whole accumulated batch, over all ranks.

    scorer: returns the metrics and dist of `score_tokens` for the evaluation rows. metrics_file: where records go beside the
    trackers. rates: learning rates of single parameters, by name.
    """

    def __init__(
        self,
        *args: Any,
        scorer: Callable[[], dict[str, Any]],
        metrics_file: MetricsFile,
        rates: dict[str, float] | None = None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self.remove_callback(ProgressCallback)
        self.add_callback(QuietProgress())
        self.add_callback(metrics_file)
        self.trained: Any = self.model
        self.scorer, self.metrics_file, self.rates = scorer, metrics_file, rates or {}
        self._window = torch.zeros(len(_WINDOW), dtype=torch.float64, device=self.args.device)
        self._updates = 0

    def get_train_dataloader(self) -> torch.utils.data.DataLoader:
        """transformers', with whole batches on every rank: the collators take this rank's rows of each."""
        loader = super().get_train_dataloader()
        if ranks.world_size() > 1:
            shard: Any = loader.batch_sampler
            shard.num_processes, shard.process_index, shard.even_batches = 1, 0, False
        return loader

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list, Tensor | int | None]:
        """transformers' accumulated batch, and the number of its numbers, over all ranks, in each part of it."""
        samples, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._updates += 1
        num_id = self.trained.config.num_token_id
        learned = (((one["labels"] == num_id) & one["numeric_labels"].isfinite())[:, 1:].sum() for one in samples)
        count = ranks.summed(
            sum((one.to(device) for one in learned), torch.zeros((), dtype=torch.int64, device=device))
        )
        for sample in samples:
            sample["num_numbers_in_batch"] = count
        return samples, num_items

    def compute_loss(
        self, model: nn.Module, inputs: dict, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        right = counted = torch.zeros(())
        if outputs["decisions"] is not None:
            targets = inputs["labels"][:, 1:]
            counted, hit = targets != IGNORE_INDEX, outputs["decisions"] == targets
            if "also_right" in inputs:
                hit |= (outputs["decisions"].unsqueeze(-1) == inputs["also_right"][:, 1:]).any(-1)
            right = hit & counted
        made = [outputs["loss_cls"].detach(), outputs["loss_reg"].detach(), right.sum(), counted.sum()]
        self._window += torch.stack([one.to(self._window) for one in made])
        return (loss, outputs) if return_outputs else loss

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._tr_loss = ranks.summed(self._tr_loss) / ranks.world_size()  # steps that were not logged
        return super()._finalize_training(*args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the documents' names to a training record, and keep every record in the JSONL file."""
        if "loss" in logs:
            steps, self._updates = self._updates, 0
            window = dict(zip(_WINDOW, ranks.summed(self._window).tolist(), strict=True))
            self._window.zero_()
            logs = logs | {
                "total_loss": logs["loss"],
                "reg_loss_effective": window["reg_loss_effective"] / steps,
            }
            if self.trained.whole_vocabulary:
                logs["cls_loss_mean"] = window["cls_loss"] / steps
            elif window["cls_loss"]:  # `<NUM>`'s own term, and no more; nothing where its row has a fit of its own
                logs["num_cls_loss_mean"] = window["cls_loss"] / steps
            if window["counted"]:
                logs["accuracy"] = window["right"] / window["counted"]
        super().log(logs, start_time)
        named = {
            f"eval/{key[5:]}" if key.startswith("eval_") else f"train/{key}": value
            for key, value in logs.items()
            if isinstance(value, int | float) and key != "epoch"
        }
        self.metrics_file.record(self.state.global_step, self.state.epoch, named)

    def log_dist(self, dist: dict[str, float]) -> None:
        """dist/* to the file and to every tracker, whose own callbacks know only train/ and eval/."""
        named = {f"dist/{key}": value for key, value in dist.items()}
        step = self.state.global_step
        self.metrics_file.record(step, self.state.epoch, named)
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, TensorBoardCallback) and callback.tb_writer is not None:
                for key, value in named.items():
                    callback.tb_writer.add_scalar(key, value, step)
            elif isinstance(callback, WandbCallback) and callback._initialized:
                callback._wandb.log({**named, "train/global_step": step})
            elif isinstance(callback, TrackioCallback) and callback._initialized:
                callback._trackio.log(named, step=step)
            elif isinstance(callback, MLflowCallback) and callback._initialized:
                callback._ml_flow.log_metrics(named, step=step)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """eval/* under the standard decision, and dist/*, on the evaluation rows."""
        scores, metrics = self.scorer(), dict[str, float]()
        for key, value in scores["metrics"].items():
            if key == "classes":
                continue  # theirs are reported when the run ends
            of_levels = value.items() if isinstance(value, dict) else [("", value)]
            name = {"mae": "reg_mae", "median_error": "reg_mdae"}.get(key, key)
            metrics |= {f"eval_{name}_{level}".removesuffix("_"): one for level, one in of_levels}
        self.log(metrics)
        self.log_dist(scores["dist"])
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        if not ranks.is_sharded(self.trained.model):  # as transformers', without asking all modules at every step
            grads = [parameter.grad for parameter in self.trained.moving if parameter.grad is not None]
            norm = nn.utils.get_total_norm(grads)
            if not norm <= self.args.max_grad_norm:  # else nothing is to be done; NaN is passed on, as by torch
                nn.utils.clip_grads_with_norm_(self.trained.moving, self.args.max_grad_norm, norm)
            return norm
        ranks.average_numbers(model)
        return super()._clip_grad_norm(model)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Weight decay is for the matrices of the value branch and of adapters, not for rows, heads and biases."""
        decayed = (".residual.", ".lora_")
        return [n for n, p in model.named_parameters() if p.dim() > 1 and any(part in n for part in decayed)]

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """transformers' optimizer, with groups of their own for single numbers and for parameters of another rate.

        Under FSDP2 numbers are not spread, and one step takes no parts beside wholes: the groups are always the same, so that
        a checkpoint can be taken up either way.
        """
        if self.optimizer is None:
            decayed, groups = self.get_decay_parameter_names(self.trained), dict[tuple[float, float, bool], list]()
            for name, parameter in self.trained.named_parameters():
                rate = self.rates.get(name, self.args.learning_rate)
                decay = self.args.weight_decay if name in decayed and name not in self.rates else 0.0
                if parameter.requires_grad:
                    groups.setdefault((rate, decay, parameter.dim() == 0), []).append(parameter)
            kind, settings = self.get_optimizer_cls_and_kwargs(self.args, self.trained)
            # The first group's rate is the one that is recorded.
            order = sorted(groups, key=lambda group: group[0] != self.args.learning_rate)
            parts = [{"params": groups[group], "lr": group[0], "weight_decay": group[1]} for group in order]
            self.optimizer = kind(parts, **settings)
        return self.optimizer

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The trained parameters alone: everything else is in the model that the run started from."""
        trained = {n: ranks.whole(p.detach()) for n, p in self.model.named_parameters() if p.requires_grad}
        if ranks.rank() > 0:
            return
        file = Path(output_dir or self.args.output_dir) / WEIGHTS
        with writing(file) as part, writing_tensors(file):
            save_file({n: tensor.cpu().contiguous() for n, tensor in trained.items()}, part, metadata={"format": "pt"})

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """transformers', and checksums: `last_checkpoint` passes over one that is damaged."""
        super()._save_checkpoint(*args, **kwargs)
        if ranks.world_size() == 1:  # others may still be writing
            write_sums(Path(self._get_output_dir(trial=None)) / f"checkpoint-{self.state.global_step}")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not ranks.is_sharded(self.trained.model):
            super()._save_optimizer_and_scheduler(output_dir)
            return
        state = ranks.whole_state(self.optimizer)
        if ranks.rank() == 0:
            torch.save(state, Path(output_dir) / OPTIMIZER_NAME)
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        ranks.spread_state(self.optimizer)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self._load_trained(Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        ranks.barrier()
        # By its name: the run's folder may have been moved since.
        self._load_trained(Path(self.args.output_dir) / Path(self.state.best_model_checkpoint).name)

    def _load_trained(self, folder: Path) -> None:
        check_sums(folder)
        parameters = dict(self.model.named_parameters())
        kept = load_file(folder / WEIGHTS)
        expected = {name for name, parameter in parameters.items() if parameter.requires_grad}
        if kept.keys() != expected:
            raise ValueError(f"{folder} was written by another stage or configuration: its parameters do not fit")
        with torch.no_grad():
            for name, tensor in kept.items():
                parameters[name].copy_(ranks.spread_like(tensor, parameters[name]))


class BriefTrainer(CausalTrainer):
    """A trainer of what takes seconds: it writes no checkpoints, and has the best parameters in memory."""

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        if self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = "in memory"
            self._best = [parameter.detach().clone() for parameter in self.trained.moving]

    def _load_best_model(self) -> None:
        with torch.no_grad():
            for parameter, best in zip(self.trained.moving, self._best, strict=True):
                parameter.copy_(best)


def last_checkpoint(folder: Path) -> Path | None:
    """The latest checkpoint in `folder` that was written to its end and is what was written, or None."""
    checkpoints = []
    for candidate in folder.glob("checkpoint-*"):
        try:
            json.loads((candidate / "trainer_state.json").read_text(encoding="utf-8"))
            check_sums(candidate)
        except (OSError, ValueError):
            continue
        checkpoints.append(candidate)
    return max(checkpoints, key=lambda path: int(path.name.rsplit("-", 1)[1]), default=None)
