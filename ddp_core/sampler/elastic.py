"""A sampler in the place of DistributedSampler, with a position that any number of ranks can continue from."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from .order import BLOCK, ORDER_FORMAT, GlobalOrder


class ElasticSampler(Sampler[int]):
    """A drop-in for `torch.utils.data.DistributedSampler` that resumes inside an epoch, on any number of ranks.

    Of W ranks, rank r takes the global positions r, r + W, r + 2W, ..., counted from the start of the epoch or from the
    position where it was resumed. So the k-th batches of all ranks together are the k-th global batch on every layout.
    Nothing is padded: without `drop_last` the ranks' lengths differ by at most one (right for evaluation); with
    `drop_last` all are equal (right for training under DistributedDataParallel, whose ranks must take equally many
    steps).

    The position is counted in global samples *trained*, which only the training loop knows, because a DataLoader
    fetches ahead: call `advance(global_batch_size)` after each step, `set_epoch` before each epoch, and save
    `state_dict()`. A loop that never calls `advance` gets DistributedSampler's behaviour.

    `dataset`: anything with a length. `num_replicas`, `rank`: torch.distributed's when None. Raises ValueError for a
    rank outside [0, num_replicas), and torch.distributed's error where it is needed but has no process group. Source of
    the interface: torch/utils/data/distributed.py.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if num_replicas is None or rank is None:
            import torch.distributed as dist

            num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
            rank = dist.get_rank() if rank is None else rank
        if not 0 <= rank < num_replicas:
            raise ValueError(f"rank must be in [0, {num_replicas}), not {rank}")
        self.dataset = dataset
        self.num_replicas = num_replicas
        self.rank = rank
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self.samples_trained = 0
        self._start = 0
        self.order = GlobalOrder(len(dataset), seed, shuffle)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch; if it is not the present one, it starts at its first sample."""
        if epoch != self.epoch:
            self.epoch, self.samples_trained, self._start = epoch, 0, 0

    def advance(self, global_samples: int) -> None:
        """Count samples of all ranks together as trained; an incomplete last batch may be counted as whole.

        Raises ValueError for a negative number.
        """
        if global_samples < 0:
            raise ValueError(f"samples trained cannot become fewer: {global_samples}")
        self.samples_trained = min(self.samples_trained + global_samples, self.order.length)

    def state_dict(self) -> dict[str, Any]:
        """The position and its order, the same on all ranks: plain values for a checkpoint or JSON."""
        return {
            "format": ORDER_FORMAT,
            "length": self.order.length,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "epoch": self.epoch,
            "samples_trained": self.samples_trained,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position, with any number of ranks; the next `iter()` starts there.

        Raises ValueError where the saved order is another one: another length, seed, shuffle or format.
        """
        for name, own in self.state_dict().items():
            if name not in ("epoch", "samples_trained") and state.get(name) != own:
                raise ValueError(
                    f"saved position is of another order: {name} was {state.get(name)!r}, here it is {own!r}"
                )
        self.epoch = int(state["epoch"])
        self.samples_trained = self._start = int(state["samples_trained"])

    def __len__(self) -> int:
        """Ids of this rank in the iteration begun last, or else in the next; `advance` does not change the number."""
        return len(self._positions(self._start))

    def __iter__(self) -> Iterator[int]:
        self._start = self.samples_trained
        return self._ids(self.epoch, self._positions(self._start))

    def _positions(self, start: int) -> range:
        """The global positions that this rank takes, from `start` to the end of the epoch."""
        remaining = self.order.length - start
        stop = start + remaining // self.num_replicas * self.num_replicas if self.drop_last else self.order.length
        return range(start + self.rank, stop, self.num_replicas)

    def _ids(self, epoch: int, positions: range) -> Iterator[int]:
        if not self.shuffle:
            yield from positions
            return
        permutation = self.order.permutation(epoch)
        # A Python integer in a list takes 40 bytes: a quarter of a block at a time keeps them to 160 KiB.
        for begin in range(0, len(positions), BLOCK // 4):
            yield from permutation(positions[begin : begin + BLOCK // 4]).tolist()
