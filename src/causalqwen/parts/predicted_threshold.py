"""The threshold shift "predicted": C + c(z), read off the features (theory 3.5)."""

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from causalqwen.core import Chain


class PredictedThreshold:
    """A constant, a linear map of z, and where it was calibrated a `PartitionEstimate`."""

    def threshold(self, chain: "Chain") -> Tensor:
        """[..., 1]."""
        return chain.action.thresholds(chain.features, chain.loc_U, chain.words)
