"""ElasticSampler under torchdata's StatefulDataLoader, alone and in Accelerate: saved anywhere, continued anywhere."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from ddp_core.sampler import ElasticSampler
from tests.adapters.tutorials import run

pytestmark = [
    pytest.mark.extras("torchdata"),
    # torchdata calls it in every constructor.
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]

SEED = 7


def numbers(loader: Any, batches: int | None = None) -> list[int]:
    """The ids in the next batches of a loader; what it started ends with the call."""
    return [number for batch in islice(loader, batches) for number in batch.tolist()]


class Rank:
    """One rank of a loop: its sampler, and a StatefulDataLoader on it."""

    def __init__(
        self, length: int, world_size: int = 1, rank: int = 0, *, workers: int = 0, batch: int = 16, **options: Any
    ) -> None:
        from torchdata.stateful_dataloader import StatefulDataLoader

        shuffle = options.pop("shuffle", True)
        self.sampler = ElasticSampler(range(length), world_size, rank, shuffle=shuffle, seed=SEED)
        if workers:
            options |= {"num_workers": workers, "multiprocessing_context": "fork"}
        self.loader = StatefulDataLoader(range(length), batch, sampler=self.sampler, **options)
        self.global_batch_size = batch * world_size

    def train(self, steps: int, *, advance: bool = False) -> tuple[list[int], dict[str, Any]]:
        """Take steps, stop there, and say which ids came and what the loader saves then."""
        trained: list[int] = []
        batches = iter(self.loader)
        for _ in range(steps):
            trained += next(batches).tolist()
            if advance:
                self.sampler.advance(self.global_batch_size)
        state = self.loader.state_dict()
        self.loader._iterator = None  # ends the workers
        return trained, state


@pytest.mark.parametrize("workers", [0, 2])
def test_the_epoch_after_a_resumed_one_is_whole(workers: int) -> None:
    _, state = Rank(64, workers=workers).train(3)
    resumed = Rank(64, workers=workers)
    resumed.loader.load_state_dict(state)
    assert len(numbers(resumed.loader)) == 16
    whole = numbers(resumed.loader)  # without set_epoch the same epoch again, as DistributedSampler has it
    assert whole == list(ElasticSampler(range(64), 1, 0, seed=SEED))
    resumed.sampler.set_epoch(1)
    assert sorted(other := numbers(resumed.loader)) == list(range(64))
    assert other != whole


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_saved_at_the_end_begins_the_epoch_that_is_chosen(workers: int, drop_last: bool) -> None:
    """With the loader's `drop_last`, samples are left when its epoch ends."""
    first = Rank(70, workers=workers, drop_last=drop_last)
    assert len(numbers(first.loader)) == (64 if drop_last else 70)
    state = first.loader.state_dict()

    resumed = Rank(70, workers=workers)
    resumed.loader.load_state_dict(state)
    resumed.sampler.set_epoch(1)
    order = ElasticSampler(range(70), 1, 0, seed=SEED)
    order.set_epoch(1)
    assert numbers(resumed.loader) == list(order)


def test_a_state_taken_before_the_first_batch_binds_no_epoch() -> None:
    """Accelerate's `prepare` asks for one."""
    loop = Rank(64)
    loop.loader.state_dict()
    loop.sampler.set_epoch(2)
    order = ElasticSampler(range(64), 1, 0, seed=SEED)
    order.set_epoch(2)
    assert numbers(loop.loader) == list(order)


STAYS = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(0, 6)), min_size=1, max_size=4)
"""World size, batch of a rank, and steps, of each stay of a training that is interrupted again and again."""


def interrupted(data: st.DataObject, workers: int) -> None:
    """Train an epoch in stays; each goes on from the state that any one rank of the stay before has saved."""
    length, shuffle = data.draw(st.integers(0, 150)), data.draw(st.booleans())
    advance, every = data.draw(st.booleans()), data.draw(st.integers(1, 3))
    options: dict[str, Any] = {"workers": workers, "shuffle": shuffle, "snapshot_every_n_steps": every}
    stays, state, seen = data.draw(STAYS), None, list[int]()
    if every > 1:  # the loader repeats batches since its last snapshot, which must be batches of the same samples
        stays = [(*stays[0][:2], steps) for _, _, steps in stays]
    for number, (world_size, batch, steps) in enumerate(stays):
        ranks = [Rank(length, world_size, rank, batch=batch, **options) for rank in range(world_size)]
        for rank in ranks:
            rank.sampler.set_epoch(3)
            if state is not None:
                rank.loader.load_state_dict(state)
        if number == len(stays) - 1:
            for rank in ranks:
                seen += numbers(rank.loader)
            break
        left = length - len(seen)  # ranks that take steps together take as many as the shortest one can
        steps = min(steps, *(-(-len(range(rank, left, world_size)) // batch) for rank in range(world_size)))
        results = [rank.train(steps, advance=advance) for rank in ranks]
        seen += [trained for ids, _ in results for trained in ids]
        state = results[data.draw(st.integers(0, world_size - 1))][1]
        if advance and steps and every == 1:
            assert {rank.sampler.samples_trained for rank in ranks} == {len(seen)}
    assert sorted(seen) == list(range(length))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_sample_is_trained_once_wherever_it_stops(data: st.DataObject) -> None:
    interrupted(data, workers=0)


@pytest.mark.parametrize("workers", [1, 3])
@settings(max_examples=6, deadline=None, phases=[Phase.generate])  # making a failure small would take minutes
@given(data=st.data())
def test_every_sample_is_trained_once_with_workers(data: st.DataObject, workers: int) -> None:
    interrupted(data, workers)


SCRIPT = """
import json, os, sys
from pathlib import Path
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader
from ddp_core.sampler import ElasticSampler

workers, epoch = int(sys.argv[1]), int(sys.argv[2])
configuration = DataLoaderConfiguration(use_stateful_dataloader=True, even_batches=False)
accelerator = Accelerator(cpu=True, dataloader_config=configuration)
sampler = ElasticSampler(range(96), num_replicas=1, rank=0, seed=7)  # Accelerate deals its batches to the ranks
options = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
loader = accelerator.prepare(DataLoader(range(96), 16 // accelerator.num_processes, sampler=sampler, **options))
resumed = Path("saved").exists()
if resumed:
    accelerator.load_state("saved")
loader.set_epoch(epoch)
seen = []
for step, batch in enumerate(loader):
    seen += batch.tolist()
    if step == 1 and not resumed:
        break
accelerator.wait_for_everyone()
if not resumed:
    accelerator.save_state("saved")
Path(f"seen-{resumed}-{accelerator.process_index}.json").write_text(json.dumps(seen))
accelerator.end_training()
"""


@pytest.mark.extras("accelerate")
@pytest.mark.parametrize(("workers", "ranks", "epoch"), [(0, (1, 2), 3), (2, (1, 1), 0)])
def test_accelerate_goes_on_in_its_stateful_loader(
    workers: int, ranks: tuple[int, int], epoch: int, tmp_path: Path
) -> None:
    for world_size in ranks:
        ended = run(SCRIPT, world_size, tmp_path, str(workers), str(epoch))
        assert ended.code == 0, ended.errors
    parts = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("seen-*.json")}
    assert len(parts) == sum(ranks)
    assert sum(len(ids) for name, ids in parts.items() if "False" in name) == 32
    order = ElasticSampler(range(96), 1, 0, seed=7)
    order.set_epoch(epoch)
    assert {number for name, ids in parts.items() if "False" in name for number in ids} == set(islice(order, 32))
    assert sorted(number for ids in parts.values() for number in ids) == list(range(96))
