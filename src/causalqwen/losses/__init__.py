"""Losses as functions of tensors. Stands on `distributions`."""

from causalqwen.losses.ovr import (
    IGNORE_INDEX,
    NO_TARGET,
    check_targets,
    graded_scale,
    ovr_log_probs,
    ovr_loss,
    reduce_losses,
)
from causalqwen.losses.total import (
    LossMasks,
    LossParts,
    cauchy_crps,
    cauchy_nll,
    gate,
    mean_over_batch,
    quantile_crps,
    quantile_loss,
    shift_targets,
    total_loss,
    value_nll,
)

__all__ = [
    "IGNORE_INDEX",
    "NO_TARGET",
    "LossMasks",
    "LossParts",
    "cauchy_crps",
    "cauchy_nll",
    "check_targets",
    "gate",
    "graded_scale",
    "mean_over_batch",
    "ovr_log_probs",
    "ovr_loss",
    "quantile_crps",
    "quantile_loss",
    "reduce_losses",
    "shift_targets",
    "total_loss",
    "value_nll",
]
