"""The value head reads U as the tokens do (overview 2.4)."""

from torch import Tensor

from causalqwen.distributions import StableFamily


class PlainReader:
    """What stands where there is no value branch."""

    def standardize(self, features: Tensor) -> Tensor:
        """z [..., H] as it is."""
        return features

    def start_anew(self) -> None:
        """Nothing to start."""

    def split(self, features: Tensor, scale: Tensor, noise: Tensor, law: StableFamily) -> tuple[Tensor, Tensor]:
        """scale_U [..., C] and |b_noise| [C] as they are."""
        return scale, noise

    def __call__(self, features: Tensor, loc: Tensor, scale: Tensor, *, each: bool = False) -> tuple[Tensor, Tensor]:
        """loc_U and scale_U [..., C] as they are; with `each`, of one reader, [1, ..., C]."""
        return (loc[None], scale[None]) if each else (loc, scale)
