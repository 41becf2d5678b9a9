"""A sampler in the place of DistributedSampler, with a position that any number of ranks can continue from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from itertools import chain
from operator import length_hint
from typing import Any, cast

from torch.utils.data import Sampler

from .order import BLOCK, ORDER_FORMAT, GlobalOrder

# A Python integer in a list takes 40 bytes: a quarter of a block at a time keeps them to 160 KiB.
_IDS_AT_A_TIME = BLOCK // 4


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

    torchdata's StatefulDataLoader counts by itself what it has handed out: save and load the loader's state then, and
    `advance` is not needed. What it loads counts for the iteration that follows; the next one is a whole epoch again.

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
        # The epoch that set_epoch has chosen and no iteration has begun.
        self._chosen: int | None = None
        # Whether samples_trained came from a loader's state, for one iteration, and advance has not been called since.
        self._for_one_iteration = False
        self.order = GlobalOrder(len(dataset), seed, shuffle)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch; if it is not the present one, it starts at its first sample."""
        self._chosen = epoch
        if epoch != self.epoch:
            self._stand_at(epoch, 0)

    def advance(self, global_samples: int) -> None:
        """Count samples of all ranks together as trained; an incomplete last batch may be counted as whole.

        Raises ValueError for a negative number.
        """
        if global_samples < 0:
            raise ValueError(f"samples trained cannot become fewer: {global_samples}")
        self.samples_trained = min(self.samples_trained + global_samples, self.order.length)
        self._for_one_iteration = False

    def state_dict(self) -> dict[str, Any]:
        """The position and its order, the same on all ranks: plain values for a checkpoint or JSON."""
        return self._state(self.epoch, self.samples_trained)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position, with any number of ranks; the next `iter()` starts there.

        Raises ValueError where the saved order is another one: another length, seed, shuffle or format.
        """
        self._stand_at(*self._position_in(state))

    def __len__(self) -> int:
        """Ids of this rank in the iteration begun last, or else in the next; `advance` does not change the number."""
        return len(self._positions(self._start))

    def __iter__(self) -> Iterator[int]:
        self._start = self._next_start()
        iteration = _Iteration(self)
        ids = cast(_StatefulIds, _StatefulIds.from_iterable(iteration.blocks()))
        ids.state_dict, ids.load_state_dict = iteration.state_dict, iteration.load_state_dict
        return ids

    def _state(self, epoch: int, samples_trained: int) -> dict[str, Any]:
        return {
            "format": ORDER_FORMAT,
            "length": self.order.length,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "epoch": epoch,
            "samples_trained": samples_trained,
        }

    def _position_in(self, state: dict[str, Any]) -> tuple[int, int]:
        """The epoch and the samples trained of a saved state. Raises ValueError where its order is another one."""
        for name, own in self.state_dict().items():
            if name not in ("epoch", "samples_trained") and state.get(name) != own:
                raise ValueError(
                    f"saved position is of another order: {name} was {state.get(name)!r}, here it is {own!r}"
                )
        return int(state["epoch"]), int(state["samples_trained"])

    def _stand_at(self, epoch: int, samples_trained: int) -> None:
        self.epoch, self.samples_trained, self._start = epoch, samples_trained, samples_trained
        self._for_one_iteration = False

    def _next_start(self) -> int:
        """The global position at which an iteration would begin now."""
        return 0 if self._for_one_iteration else self.samples_trained

    def _positions(self, start: int) -> range:
        """The global positions that this rank takes, from `start` to the end of the epoch."""
        return range(start + self.rank, self._stop(start), self.num_replicas)

    def _stop(self, start: int) -> int:
        """The end of an iteration that begins at the global position `start`."""
        remaining = self.order.length - start
        return start + remaining // self.num_replicas * self.num_replicas if self.drop_last else self.order.length


class _Iteration:
    """One pass through an epoch, or through what is left of it: the ids of one rank, and the position reached.

    It begins when the first id is asked for, as torch's BatchSampler does: a StatefulDataLoader makes its iterator as
    soon as its state is asked for, which may be before set_epoch.
    """

    def __init__(self, sampler: ElasticSampler) -> None:
        self._sampler = sampler
        self._loaded: tuple[int, int] | None = None
        self._begun: tuple[int, int] | None = None
        self._before = 0  # ids of this rank before the present block
        self._block: tuple[int, Iterator[int]] = (0, iter(()))  # its length, and what is left of it
        self._ended = False

    def blocks(self) -> Iterator[Iterator[int]]:
        """The ids, some thousands at a time."""
        sampler = self._sampler
        if self._loaded is not None and self._loaded[0] == sampler.epoch:
            self._begun = self._loaded
        else:
            sampler._stand_at(sampler.epoch, sampler._next_start())
            self._begun = sampler.epoch, sampler._start
        sampler._chosen = None
        epoch, start = self._begun
        positions = sampler._positions(start)
        permutation = sampler.order.permutation(epoch) if sampler.shuffle and positions else None
        for begin in range(0, len(positions), _IDS_AT_A_TIME):
            block = positions[begin : begin + _IDS_AT_A_TIME]
            self._before = begin
            self._block = len(block), iter(block if permutation is None else permutation(block).tolist())
            yield self._block[1]
        self._ended = True

    def state_dict(self) -> dict[str, Any]:
        """The sampler's state at the position up to which ids were handed out, if all ranks took equally many.

        A rank that was asked for more than there is has taken its part of the last global batch, so all is handed out.
        """
        sampler = self._sampler
        if self._begun is None:
            return sampler._state(*(self._loaded or (sampler.epoch, sampler._next_start())))
        epoch, start = self._begun
        stop = sampler._stop(start)
        if self._ended:
            return sampler._state(epoch, stop)
        length, left = self._block
        taken = self._before + length - length_hint(left)
        return sampler._state(epoch, min(start + taken * sampler.num_replicas, stop))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position that an iteration has reached, on any number of ranks.

        A loader loads its state only when it is iterated, after the loop has chosen an epoch. A later epoch begins at
        its first sample, as always with set_epoch. Raises ValueError for an earlier one, as nobody resumes to go back,
        and for another order.
        """
        sampler, loaded = self._sampler, self._sampler._position_in(state)
        epoch, chosen = loaded[0], sampler._chosen
        if chosen is not None and chosen < epoch:
            raise ValueError(
                f"the loader's saved position is in epoch {epoch}, but set_epoch({chosen}) was called: call "
                f"set_epoch({epoch}) before iterating (with Accelerate, on the prepared loader), or start epoch "
                f"{chosen} without loading a position"
            )
        if chosen is not None and chosen > epoch:
            sampler._stand_at(chosen, 0)
        else:
            sampler._stand_at(*loaded)
            sampler._for_one_iteration = True
        self._loaded = loaded


class _StatefulIds(chain[int]):
    """An iterator over ids that knows its position, for torchdata's StatefulDataLoader.

    The loader asks for the position after each batch that it draws, so its state tells what was handed out, whatever
    its workers have fetched beyond that. Ids are chained in C: counting each of them in Python would take longer than
    computing it.
    """

    state_dict: Callable[[], dict[str, Any]]
    load_state_dict: Callable[[dict[str, Any]], None]
