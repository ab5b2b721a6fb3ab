"""Fast paths, each beside its slow obvious reference. Stands on `losses`."""

from causalqwen.kernels.linear_ovr import linear_ovr_loss

__all__ = ["linear_ovr_loss"]
