"""What follows from parameters and is too dear to make at every step."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Kept:
    """A value made from tensors, and made anew once one of them is another one or has changed."""

    def __init__(self) -> None:
        self._key: tuple = ()
        self.value: Any = None

    @torch.compiler.disable  # a graph would keep it for ever
    def get(self, make: Callable[[], Any], *tensors: Tensor) -> Any:
        """make(), or what it gave before if `tensors`, from which it is made, are as they were."""
        key = tuple((t.data_ptr(), t._version, t.device, t.dtype) for t in tensors)
        if key != self._key:
            self._key, self.value = key, make()
        return self.value

    def forget(self) -> None:
        """Make it anew next time, whatever the tensors say."""
        self._key, self.value = (), None
