"""Values read from the whole backbone in closed form: the rows that allow it, the fit, and what it leaves in a model."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from causalqwen.data import Example, number_classes
from causalqwen.data.encoding import class_names
from causalqwen.distributions import get_family
from causalqwen.modeling import CausalQwenForCausalLM
from causalqwen.modeling.grafting import renew_values
from causalqwen.modeling.outputs import CACHE
from causalqwen.modeling.reader import NUMBERS, read_backbone
from causalqwen.numbers import ValueTransform
from causalqwen.numbers.law import rows_of_classes
from causalqwen.parts.copying import Candidates
from causalqwen.training import ranks
from causalqwen.training.axes import LearnedNumbers, fit_axes, fit_levels, set_levels
from causalqwen.training.candidates import KeptNumbers
from causalqwen.training.closed_form import INTERCEPT, BlockKernel, Maps, Shape
from causalqwen.training.copies import fit_copying
from causalqwen.training.features import FactStore
from causalqwen.training.held_out import left_out_together
from causalqwen.training.scores import score_values
from causalqwen.training.settings import ChosenStage, TrainSettings

FEWEST_NUMBERS = 8
_FAMILIES = ("gaussian", "cauchy")
_OF_BRANCH = ("value_crossing", "value_loss")


def reads_whole(
    model: CausalQwenForCausalLM, settings: TrainSettings, numbers: LearnedNumbers, rows: Sequence[Example]
) -> bool:
    """Whether values are fitted in closed form: those of a graft that says nothing of a branch, alone, of one process, in rows
    that name nobody."""
    config = model.config
    anew = config.value_range is None and config.start == "faithful"
    of_branch = any(name.startswith("value_branch") or name in _OF_BRANCH for name in config.given or ())
    alone = not (settings.heads or settings.lora or settings.backbone) and ranks.world_size() == 1
    return (
        isinstance(settings.values, ChosenStage)
        and settings.value_transform != "keep"
        and alone
        and (config.value_kernel is not None or (anew and not of_branch))
        and len(numbers.values) >= FEWEST_NUMBERS
        and all(example.individual is None for example in rows)
    )


@torch.no_grad()
def blocks_of(model: CausalQwenForCausalLM) -> list[int]:
    """The widths of what the whole backbone of a model tells. ValueError where it keeps no values for all of a text."""
    ids = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    out = model.backbone.base_model(input_ids=ids, output_hidden_states=True, use_cache=True, return_dict=True)
    values = [layer.values for layer in out[CACHE].layers]
    blocks = read_backbone(out.hidden_states[1:], values, torch.ones(1, 1, 1, dtype=torch.bool, device=model.device))
    return [*(block.shape[-1] for block in blocks), *[2] * NUMBERS]


def _unit(family: str, ratios: torch.Tensor) -> tuple[float, float]:
    """The nats that a family gives residuals [n] over their scales, and the multiple of these scales that gives the fewest."""
    law, least = get_family(family), ratios.abs().median().clamp(min=1e-12)
    units = (least * torch.logspace(-1, 1, 101, dtype=torch.float64)).unsqueeze(-1)
    nats = units.log()[:, 0] - law.log_prob(ratios / units, torch.zeros(()), torch.ones(())).mean(-1)
    return nats.min().item(), units[nats.argmin()].item()


class WholeBackbone:
    """A fit of the values of rows. known: rows and their facts, with what the whole backbone tells; certain: those of
    `certain_contexts`. shape: the kernel, where it is known."""

    def __init__(
        self,
        model: CausalQwenForCausalLM,
        known: Sequence[tuple[Sequence[Example], FactStore]],
        certain: set[tuple[int, ...]],
        settings: TrainSettings,
        shape: Shape | None = None,
    ) -> None:
        self.model, self.settings = model, settings
        self.examples = [example for examples, _ in known for example in examples]
        self.numbers = LearnedNumbers.of(self.examples, model.config.num_token_id, certain)
        whose = np.empty(len(self.examples), dtype=np.int64)
        for group, rows in enumerate(left_out_together(self.examples)):
            whose[rows] = group
        facts = [store.facts for _, store in known]
        at, lengths = [one.learned for one in facts], np.concatenate([np.diff(store.offsets) for _, store in known])
        at_all, blocks, values = np.concatenate(at), facts[0].reads.blocks, self.numbers.values.numpy()
        features = [one.reads.array[one.reads.at[of]] for one, of in zip(facts, at, strict=True)]
        every = features[0] if len(features) == 1 else np.concatenate(features)
        self.z = torch.cat([one.tensor("features")[of] for one, of in zip(facts, at, strict=True)])
        self.groups = np.repeat(whose, lengths)[at_all]
        self.classes = rows_of_classes(self.numbers.classes if settings.class_transforms else [""] * len(values))
        units = np.ones(len(values))
        for of in self.classes.values():
            units[of] = np.median(np.abs(values[of])) or 1.0
        self.candidates, self.is_new = None, np.ones(len(values), dtype=bool)
        if model.copies:
            numbers = KeptNumbers.stacked([one.numbers for one in facts])
            self.candidates = Candidates(**numbers.candidates())[torch.from_numpy(at_all)]
            self.is_new = ~self.candidates.hold(self.numbers.values).numpy()
        counted = ~self.numbers.certain.numpy() & self.is_new
        counted |= not counted.any()
        assert model.reads_backbone is not None, "its rows were read"
        tied = len(model.reads_backbone) - NUMBERS
        self.kernel = BlockKernel(every, blocks, values, self.groups, self._axes, counted, units, tied, shape)
        self.axis, ridge = self.kernel.ridge.axis, self.kernel.ridge
        ratios = torch.from_numpy(ridge.residuals / np.exp(ridge.log_scale.left_out))
        named = (model.config.value_family,) if "value_family" in (model.config.given or ()) else _FAMILIES
        found = {name: _unit(name, ratios[torch.from_numpy(counted)]) for name in named}
        self.family, (_, self.unit) = min(found.items(), key=lambda of: of[1])

    def _axes(self, rows: np.ndarray) -> dict[str, Maps]:
        """The axes to choose from, for some of the rows: of classes that have axes of their own, each row on its class's."""
        settings, named, numbers = self.settings, self.settings.value_transform, self.numbers
        positive = (settings.support_of(numbers.values).low or 0.0) > 0
        kinds = ("affine", *(("log",) if positive else ()), "symlog") if named == "auto" else (named,)
        places = {name: np.flatnonzero(np.isin(rows, of)) for name, of in self.classes.items()}

        def maps(kind: str) -> Maps:
            axes = numbers.class_axes(kind, settings) if "" not in places else {"": numbers.axis(kind, settings)}
            transforms = {name: ValueTransform(**axis["value_transform"]) for name, axis in axes.items()}

            def mapped(method: str, given: np.ndarray) -> np.ndarray:
                made = np.empty(given.shape)
                for name, of in places.items():
                    made[of] = getattr(transforms[name], method)(torch.from_numpy(given[of])).numpy()
                return made

            return partial(mapped, "forward"), partial(mapped, "inverse")

        return {kind: maps(kind) for kind in kinds}

    @torch.no_grad()
    def install(self) -> None:
        """Leave the fit in the model: axis, law, reader, and the levels of intervals by leave-one-out."""
        model, kernel, ridge = self.model, self.kernel, self.kernel.ridge
        set_levels(model, None)
        fit_axes(model.config, self.numbers, self.axis, self.settings)
        shape = {name: np.asarray(part).tolist() for name, part in kernel.shape._asdict().items()}
        about = {"blocks": list(map(int, kernel.blocks)), "rows": len(kernel.support), "shape": shape}
        renew_values(model, value_branch=False, value_family=self.family, value_kernel=about)
        reader, law = model.value_kernel, model.action.value_law
        both = np.stack([ridge.location.coefficients, ridge.log_scale.coefficients])
        weights = both / ridge.unit
        bias = INTERCEPT * both.sum(1) + [0.0, np.log(self.unit)] + kernel.constant * weights.sum(1)
        log_scale = ridge.log_scale.left_out + np.log(self.unit)
        bounds = np.stack([[ridge.reach[0], log_scale.min()], [ridge.reach[1], log_scale.max()]])
        weight, shift = model.action.value_linear
        filled = {
            "mean": kernel.mean,
            "inverse": kernel.inverse,
            "weights": weights,
            "bias": bias,
            "bounds": bounds,
            "along": weight[0] / weight.square().sum(),
            "shift": shift,
            "unit": 1 / law.linear_scale(torch.ones_like(weight[0]), weight),
        }
        for name, made in filled.items():
            getattr(reader, name).copy_(torch.as_tensor(made))
        kept = kernel.support[:, np.repeat(reader.used, kernel.blocks)]
        reader.support.copy_(torch.from_numpy(kept).view(torch.int16))
        of_rows = *self.left_out, self.numbers.values
        classes = number_classes(self.examples, model.config.num_token_id)
        if self.settings.recalibrate and self.is_new.any():
            is_new = torch.from_numpy(self.is_new)
            of_new = [name for name, new in zip(classes, self.is_new.tolist(), strict=True) if new]
            fit_levels(model, [column[is_new] for column in of_rows], of_new, class_names(self.examples))
        candidates = self.candidates
        if candidates is not None and not fit_copying(model, self.z, candidates, of_rows, self.groups, classes):
            model.config.copy_numbers, model.copy_head = False, None

    @property
    def left_out(self) -> tuple[torch.Tensor, torch.Tensor]:
        """loc and scale [n] on the axis, of each number by a fit without its group."""
        ridge = self.kernel.ridge
        scale = np.exp(ridge.log_scale.left_out + np.log(self.unit))
        return torch.from_numpy(ridge.location.left_out.clip(*ridge.reach)), torch.from_numpy(scale)

    def scores(self) -> dict[str, Any]:
        """Scores of the numbers as they are `left_out`, under the law that was installed."""
        return score_values(self.model.value_law, *self.left_out, self.numbers.values)

    @property
    def chosen(self) -> dict[str, Any]:
        return {"axis": self.axis, "family": self.family, "ridge": self.kernel.ridge.location.ridge}

    def tell(self, say: Callable[[str], None], seconds: float) -> None:
        """Say what was chosen."""
        numbers, ridge = len(self.numbers.values), self.chosen["ridge"]
        say(
            f"values are read from the whole backbone in closed form: {self.axis} axis, {self.family} law, ridge {ridge:.2g}, "
            f"by leave-one-out over {numbers:,} numbers ({seconds:.0f} s)"
        )
