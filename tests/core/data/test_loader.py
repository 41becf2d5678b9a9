"""The loader: what it fetches, and that worker processes change nothing but the time it takes."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor
from torch.utils.data import Subset, get_worker_info

from ddp_core.base.errors import UserError
from ddp_core.base.files import replace_file
from ddp_core.base.seeds import sample_uniforms
from ddp_core.base.trees import Batch, StepIds
from ddp_core.data.augment import Augmentation, shift_and_flip
from ddp_core.data.loader import Loader
from ddp_core.data.splits import ByteImages, InMemory
from tests.support.commands import wait_until
from tests.support.processes import CONTEXT, HANG
from tests.support.wording import refusing


class OneByOne:
    """A user's data set with only the two methods that torch requires."""

    def __init__(self, size: int = 40) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Any, int]:
        assert isinstance(index, int)
        return np.full(3, index, dtype=np.float32), index % 7


class ListOfSamples(OneByOne):
    """A data set whose `__getitems__` returns a list of samples, as torch defines it."""

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Any, int]]:
        return [self[index] for index in indices]


class WholeBatch(OneByOne):
    """A data set whose `__getitems__` returns a tuple of batch tensors, as this project defines it."""

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        ids = torch.tensor(indices)
        return ids[:, None].expand(-1, 3).float(), ids % 7


class Made(OneByOne):
    """A data set whose samples a function makes."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        super().__init__()
        self.make = make

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def tree(index: int, strange: int = -1) -> Any:
    """A structured sample; `strange` is one that is built differently."""
    inputs = {"image": np.full((2, 2), index, dtype=np.float32), "place": (index, torch.tensor(index / 2))}
    return (inputs | {"more": 1} if index == strange else inputs), [index % 7, {"weight": 1.0}]


class Lengths(OneByOne):
    """A data set whose samples have `index % 5 + 1` tokens, and are no pairs."""

    def __getitem__(self, index: int) -> Any:
        return {"tokens": np.full(index % 5 + 1, index), "label": index % 7}


class ManyLengths(Lengths):
    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [self[index] for index in indices]


def images(count: int = 40) -> InMemory:
    return InMemory(torch.rand(count, 1, 6, 6, generator=torch.Generator().manual_seed(0)), torch.arange(count))


def requests(steps: int = 5) -> list[StepIds]:
    generator = np.random.default_rng(0)
    return [(step // 2, [generator.permutation(40)[:4] for _ in range(3)]) for step in range(steps)] + [(9, [])]


def assert_equal(ours: Sequence[Batch], theirs: Sequence[Batch]) -> None:
    assert len(ours) == len(theirs)
    for (inputs, targets), (other_inputs, other_targets) in zip(ours, theirs, strict=True):
        assert torch.equal(inputs, other_inputs)
        assert torch.equal(targets, other_targets)


@pytest.mark.parametrize("dataset", [OneByOne(), ListOfSamples(), WholeBatch(), Subset(WholeBatch(), range(40))])
def test_any_map_style_data_set_works(dataset: Any) -> None:
    inputs, targets = Loader(dataset).fetch(0, np.array([5, 8, 39]))
    assert torch.equal(inputs, torch.tensor([[5.0] * 3, [8.0] * 3, [39.0] * 3]))
    assert torch.equal(targets, torch.tensor([5, 1, 4]))
    assert targets.dtype == torch.int64


def test_a_subset_of_ours_and_bytes_work_too() -> None:
    whole = images()
    inputs, targets = Loader(Subset(whole, [3, 2, 1])).fetch(0, np.array([0, 2]))
    assert torch.equal(inputs, whole.inputs[[3, 1]])
    assert targets.tolist() == [3, 1]
    stored = ByteImages(torch.full((4, 1, 2, 2), 255, dtype=torch.uint8), torch.arange(4), (0.5,), (0.25,))
    torch.testing.assert_close(Loader(stored).fetch(0, np.array([1]))[0], torch.full((1, 1, 2, 2), 2.0))


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_of_the_wrong_form_are_explained_in_one_line(workers: int) -> None:
    for dataset, expected in (
        (Made(lambda index: np.zeros(3)), r"Made: sample 2 is a ndarray.*\(inputs, targets\).*collate\(samples\)"),
        (Made(lambda index: (np.zeros(index), index)), r"Made: samples \[2, 3\] cannot be put together.*collate"),
        (
            Made(partial(tree, strange=3)),
            r"samples 2 and 3 are built differently: \(inputs, targets\)\[0\] is a dict with the keys",
        ),
    ):
        with pytest.raises(UserError, match=expected) as failure:
            list(Loader(dataset, workers=workers).stream([(0, [np.array([2, 3])])]))
        assert "\n" not in str(failure.value)
    assert not multiprocessing.active_children()


def padded(samples: list[Any]) -> tuple[Any, Any]:
    """Tokens padded to the longest sample, in an array that begins at an odd address, and labels."""
    longest = max(len(sample["tokens"]) for sample in samples)
    tokens = np.frombuffer(bytearray(8 * longest * len(samples) + 8), np.uint8)[8:].view(np.int64)
    tokens = tokens.reshape(len(samples), longest)
    for row, sample in zip(tokens, samples, strict=True):
        row[: len(sample["tokens"])] = sample["tokens"]
    return {"tokens": torch.from_numpy(tokens)}, torch.tensor([sample["label"] for sample in samples])


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_may_be_trees(workers: int) -> None:
    ((batch,),) = Loader(Made(tree), workers=workers).stream([(0, [np.array([4, 9])])])
    inputs, (labels, more) = batch
    assert torch.equal(inputs["image"], torch.tensor([4.0, 9.0]).view(2, 1, 1).expand(2, 2, 2))
    assert [part.tolist() for part in inputs["place"]] == [[4, 9], [2.0, 4.5]]
    assert (labels.tolist(), more["weight"].tolist()) == ([4, 2], [1.0, 1.0])


@pytest.mark.parametrize("dataset", [Lengths(), ManyLengths()], ids=["one by one", "all at once"])
@pytest.mark.parametrize("workers", [0, 2])
def test_an_own_collate_puts_the_samples_of_a_micro_batch_together(workers: int, dataset: Any) -> None:
    steps = list(Loader(dataset, workers=workers, collate=padded).stream(requests()))
    for step, (_, micro_batches) in zip(steps, requests(), strict=True):
        for (inputs, targets), ids in zip(step, micro_batches, strict=True):
            assert inputs["tokens"].shape == (4, max(ids % 5 + 1))
            assert inputs["tokens"].data_ptr() % 64 == 0
            assert inputs["tokens"].max(1).values.tolist() == ids.tolist()
            assert targets.tolist() == (ids % 7).tolist()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_wrong_collate_is_explained_in_one_line(workers: int) -> None:
    cases: list[tuple[Any, Any]] = [(Lengths(), lambda samples: samples[0]), (WholeBatch(), padded), (images(), padded)]
    for dataset, collate in cases:
        with refusing():
            list(Loader(dataset, workers=workers, collate=collate).stream([(0, [np.array([2, 3])])]))
    assert not multiprocessing.active_children()


def test_augmentation_depends_on_seed_epoch_and_id_alone() -> None:
    seen = []

    def apply(inputs: Tensor, uniforms: np.ndarray) -> Tensor:
        seen.append(uniforms)
        return inputs + 1

    loader = Loader(images(), Augmentation(3, apply), seed=4)
    ids = np.array([7, 30, 2])
    inputs, _ = loader.fetch(2, ids)
    np.testing.assert_array_equal(seen[0], sample_uniforms(4, 2, ids, 3))
    assert torch.equal(inputs, images().inputs[ids] + 1)
    loader.fetch(2, ids[::-1].copy())
    np.testing.assert_array_equal(seen[1], seen[0][::-1])


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_workers_change_neither_order_nor_content_nor_random_state(workers: int) -> None:
    augmentation = shift_and_flip(1, flip=True)
    loader = Loader(images(), augmentation, seed=1, workers=workers)
    before = torch.random.get_rng_state()
    steps = list(loader.stream(iter(requests())))
    assert torch.equal(torch.random.get_rng_state(), before)
    plain = Loader(images(), augmentation, seed=1)
    expected = [[plain.fetch(epoch, ids) for ids in micro_batches] for epoch, micro_batches in requests()]
    assert len(steps) == len(expected)
    for step, wanted in zip(steps, expected, strict=True):
        assert_equal(step, wanted)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_conjugate_is_computed_before_a_process_sends_it(workers: int) -> None:
    def conjugated(samples: list[Any]) -> tuple[Tensor, Tensor]:
        numbers = torch.tensor([number for _, number in samples]) * (1 + 2j)
        return numbers.conj(), numbers.conj().imag

    (((inputs, targets),),) = Loader(OneByOne(), workers=workers, collate=conjugated).stream([(0, [np.array([2, 3])])])
    assert (inputs.tolist(), targets.tolist()) == ([2 - 4j, 3 - 6j], [-4, -6])
    assert (inputs.is_conj(), targets.is_neg()) == (False, False)


@pytest.mark.parametrize("workers", [0, 2])
def test_every_micro_batch_is_its_own_aligned_memory(workers: int) -> None:
    loader = Loader(images(), shift_and_flip(1), workers=workers)
    for step in loader.stream(requests()):
        tensors = [tensor for batch in step for tensor in batch]
        assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)
        for tensor in tensors:
            assert tensor.storage_offset() == 0
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
            assert tensor.data_ptr() % 64 == 0
            assert tensor.is_contiguous()


def test_workers_do_the_work_and_end_when_the_stream_is_closed_early() -> None:
    stream = Loader(Made(lambda index: (index, os.getpid())), workers=2).stream(requests(20))
    [_, makers], *_ = next(stream)
    assert os.getpid() not in makers.tolist()
    assert len(multiprocessing.active_children()) == 2
    stream.close()
    assert not multiprocessing.active_children()


class Hanging(OneByOne):
    """Hangs in a loader process, after it has written the process id."""

    def __init__(self, place: Path) -> None:
        super().__init__()
        self.place = place

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if get_worker_info() is not None:
            replace_file(self.place, str(os.getpid()))
            threading.Event().wait()
        return super().__getitem__(index)


def train_from(dataset: OneByOne) -> None:
    # A child of the fork server would start its own children from a server, too. A real training process forks them.
    multiprocessing.set_start_method("fork", force=True)
    list(Loader(dataset, workers=1).stream(requests()))


def test_a_worker_that_hangs_ends_with_its_parent(tmp_path: Path) -> None:
    place = tmp_path / "pid"
    parent = CONTEXT.Process(target=train_from, args=(Hanging(place),))
    parent.start()
    try:
        wait_until(place.exists, HANG, "a worker that hangs")
        worker = psutil.Process(int(place.read_text()))
    finally:
        parent.kill()
        parent.join()
    worker.wait(timeout=HANG)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterator_at_its_end_does_not_end_the_samples(workers: int) -> None:
    """This process reads the first step, also with workers, to learn its size; the second is too long for `items`."""
    wanted, items = [(0, [np.arange(2)]), (0, [np.arange(2, 8)])], iter(range(6))
    with refusing() as failure:
        list(Loader(Made(lambda index: (next(items), index)), workers=workers).stream(wanted))
    assert "\n" not in str(failure.value)
