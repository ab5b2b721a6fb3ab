"""Rows read on many machines: Ray hands blocks of them to workers that each hold the model (pip install 'causalqwen[ray]')."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from causalqwen.modeling import CausalQwenForCausalLM
from causalqwen.training.kept_rows import Block, KeptRows


@dataclass(frozen=True)
class RayReaders:
    """Reads blocks of rows for `KeptRows` into its folder, which all machines see.

    make: the model that reads, made anew in each worker. workers: how many at once. gpus: of each, a share where several
    read on one.
    """

    make: Callable[[], CausalQwenForCausalLM]
    workers: int
    gpus: float = 0.0

    def __post_init__(self) -> None:
        import ray.data  # noqa: F401  # a missing library stops the run here

        if self.workers < 1:
            raise ValueError(f"workers must be at least 1, got {self.workers}")

    def __call__(self, kept: KeptRows, blocks: list[Block]) -> None:
        import ray

        if not ray.is_initialized():
            ray.init(log_to_driver=False)
        given = [self.make, kept.root.absolute(), ray.put(blocks)]
        places = ray.data.from_items(
            [{"block": place} for place in range(len(blocks))], override_num_blocks=len(blocks)
        )
        ray.data.DataContext.get_current().enable_progress_bars = True
        read = places.map_batches(
            _Worker, fn_constructor_args=given, batch_size=1, concurrency=self.workers, num_cpus=1, num_gpus=self.gpus
        )
        read.materialize()


class _Worker:
    def __init__(self, make: Callable[[], CausalQwenForCausalLM], root: Path, blocks: Any) -> None:
        import ray

        self.kept, self.blocks = KeptRows(root, make()), ray.get(blocks)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        for place in batch["block"].tolist():
            self.kept.read_block(self.blocks[place])
        return batch
