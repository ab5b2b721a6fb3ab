"""Whether a value is one of its context's numbers again: a copy head beside values in closed form (theory 3.8)."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from causalqwen.data import Example
from causalqwen.modeling import CausalQwenForCausalLM
from causalqwen.numbers.law import ClassLaws, ValueLaw
from causalqwen.parts.copying import Candidates, CopyLaw
from causalqwen.training.candidates import numbers_of

_ERRORS = 3
"""By so many standard errors more values have to stand in their own contexts than in others before copying is tried."""

_STEPS, _PENALTY, _FOLDS = 200, 1e-3, 5


def values_repeat_context(examples: Sequence[Example], num_token_id: int) -> bool:
    """Whether values stand in their contexts more often than by chance, which is how often they stand in those of other rows
    with as many numbers: repeated - by_chance > 3 sqrt(repeated + by_chance)."""
    places = [numbers_of(example, num_token_id) for example in examples]
    standing = [[example.numeric_values[at] for at in of] for example, of in zip(examples, places, strict=True)]
    order = sorted(np.random.default_rng(0).permutation(len(examples)).tolist(), key=lambda row: len(standing[row]))
    repeated = by_chance = 0
    for row, another in zip(order, [*order[-1:], *order[:-1]], strict=True):
        other = standing[another][:-1]
        for count, at in enumerate(places[row]):
            value = examples[row].numeric_labels[at]
            repeated += value in standing[row][:count]
            by_chance += value in other[:count]
    return repeated - by_chance > _ERRORS * math.sqrt(repeated + by_chance)


def fit_copying(
    model: CausalQwenForCausalLM,
    z: Tensor,
    candidates: Candidates,
    of_new: tuple[Tensor, Tensor, Tensor],
    groups: np.ndarray,
    classes: Sequence[str | None],
) -> bool:
    """Fit a model's copy head to what comes after features z [n, H] with these candidates, and say whether it is worth it:
    whether the graft asks for it, or on a fifth of the groups that it was not fitted to the CRPS of copies and new numbers
    together is lower than that of new numbers by a standard error of the difference.

    of_new: loc and scale of a new number and the value [n], on the axis and in units. groups: int [n]. classes: of each.
    Which of the context's numbers comes, or a new one, is a classification: -log pi does not depend on loc and scale.
    """
    loc, scale, values = of_new
    if "copy_numbers" in (model.config.given or ()):
        _fit(model, z, candidates, values)
        return True
    held = torch.from_numpy(np.isin(groups, np.unique(groups)[::_FOLDS]))
    _fit(model, z[~held], candidates[~held], values[~held])
    new = model.value_axes.laws([name for name, is_held in zip(classes, held.tolist(), strict=True) if is_held])
    law, asked = _law(model, z[held], candidates[held], new), (loc[held], scale[held], values[held])
    gain = new.crps(*asked) - law.crps(*asked)
    if not gain.mean() > gain.std() / math.sqrt(len(gain)):
        return False
    _fit(model, z, candidates, values)
    return True


def _law(model: CausalQwenForCausalLM, z: Tensor, candidates: Candidates, of_new: ValueLaw | ClassLaws) -> CopyLaw:
    law: CopyLaw = model.copy_law(z.to(model.device), candidates.to(model.device), of_new).to("cpu")
    return law


def _fit(model: CausalQwenForCausalLM, z: Tensor, candidates: Candidates, values: Tensor) -> None:
    """Minimise the mean of -log pi of what comes + 1e-3 |W|^2 / H, by L-BFGS from the start."""
    head = model.copy_head
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        head.reset_parameters()
    head.requires_grad_(True)
    parameters = list(head.parameters())
    optimizer = torch.optim.LBFGS(parameters, max_iter=_STEPS, history_size=20, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        law = _law(model, z, candidates, ValueLaw())
        right = torch.where(law.stands(values), law.log_copied(values), law.log_weights[..., 0])
        penalty = sum(each.square().sum() for each in parameters) / z.shape[-1]
        loss = _PENALTY * penalty - right.mean()
        for each, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            each.grad = gradient
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    for each in parameters:
        each.grad = None
    head.requires_grad_(False)
