"""Fast paths, each beside its slow obvious reference. Stands on `losses`."""

from causalqwen.kernels.decisions import Array, Blocks, ScaleBounds, least_excess
from causalqwen.kernels.linear_ovr import IMPLEMENTATIONS, linear_ovr_loss
from causalqwen.kernels.negatives import Negatives, inclusion_probabilities, sample_negatives

__all__ = [
    "IMPLEMENTATIONS",
    "Array",
    "Blocks",
    "Negatives",
    "ScaleBounds",
    "inclusion_probabilities",
    "least_excess",
    "linear_ovr_loss",
    "sample_negatives",
]
