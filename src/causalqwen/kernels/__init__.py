"""Fast paths, each beside its slow obvious reference. Stands on `losses`."""

from causalqwen.kernels.decisions import ScaleBounds
from causalqwen.kernels.linear_ovr import IMPLEMENTATIONS, linear_ovr_loss
from causalqwen.kernels.negatives import Negatives, inclusion_probabilities, sample_negatives
from causalqwen.kernels.race import Race

__all__ = [
    "IMPLEMENTATIONS",
    "Negatives",
    "Race",
    "ScaleBounds",
    "inclusion_probabilities",
    "linear_ovr_loss",
    "sample_negatives",
]
