"""Fast paths, each beside its slow obvious reference. Stands on `losses`."""

from causalqwen.kernels.linear_ovr import (
    IMPLEMENTATIONS,
    Negatives,
    inclusion_probabilities,
    linear_ovr_loss,
    sample_negatives,
)
from causalqwen.kernels.race import Race

__all__ = ["IMPLEMENTATIONS", "Negatives", "Race", "inclusion_probabilities", "linear_ovr_loss", "sample_negatives"]
