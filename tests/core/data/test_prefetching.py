"""What works ahead of training: order, errors, an early end, memory; and the two parts of a micro-batch.

What only a CUDA device can show is in tests/gpu/test_input.py.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.trees import Batch, StepIds
from ddp_core.data import prefetching
from ddp_core.data.augment import Augmentation, shift_and_flip
from ddp_core.data.loader import Loader
from ddp_core.data.prefetching import AHEAD, OnDemand, made_ahead, made_by_workers
from ddp_core.data.splits import ByteImages
from tests.core.data.test_loader import assert_equal
from tests.support.commands import wait_until
from tests.support.processes import HANG
from tests.support.wording import refusing

IDS: list[StepIds] = [(step // 2, [np.arange(3) + step, np.arange(3) + 2 * step]) for step in range(6)]


def pictures(count: int = 40) -> ByteImages:
    pixels = torch.randint(0, 256, (count, 3, 6, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return ByteImages(pixels, torch.arange(count), (0.5, 0.4, 0.3), (0.2, 0.25, 0.3))


def test_loader_processes_leave_every_request_to_stop_to_the_training_process() -> None:
    def make(step: StepIds) -> int:
        if get_worker_info() is not None:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
                os.kill(os.getpid(), number)
        return step[0]

    assert list(made_by_workers(IDS, make, 1)) == [epoch for epoch, *_ in IDS]


def test_room_in_shared_memory_is_asked_for_each_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker makes two steps ahead, and one step is in use; each step has two micro-batches of a page."""

    def free(_: object) -> SimpleNamespace:
        return SimpleNamespace(free=(4 * 2 + 1) * 2 * 4096 + 2**18 - 1)

    monkeypatch.setattr(shutil, "disk_usage", free)
    made = made_by_workers(IDS, lambda _: torch.zeros(1024), 4)
    with pytest.raises(UserError, match=r"4 loader processes need about \d+\.\d kB: .*ipc: host") as refused:
        next(made)
    assert refused.value.exit_code == ExitCode.RESOURCES


class Marked(Tensor):
    """A subclass of a user's own."""


class Pair(NamedTuple):
    first: Any
    second: Any


def of_every_kind(_: StepIds) -> dict[str, Any]:
    square = torch.arange(16.0).reshape(4, 4)
    return {
        "sparse": [square.to_sparse(), square.to_sparse_csr(), torch.zeros(3).to_sparse()],
        "not coalesced": torch.sparse_coo_tensor([[0, 0], [1, 1]], [1.0, 2.0], (2, 2), check_invariants=True),
        "of other lengths": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "not contiguous": (square.t(), square[:, ::2], square[:1].expand(4, 4)),
        "one storage": Pair(square, square[1:]),
        "empty": [torch.empty(0, 3), torch.tensor(3.0), [], {}],
        "types": {kind: square.to(kind) for kind in (torch.bfloat16, torch.bool, torch.int8, torch.complex64)},
        "subclass": square.as_subclass(Marked),
        "with gradient": square.clone().requires_grad_(),
        "containers": [OrderedDict(b=square, a=1), defaultdict(list, a=[square]), Pair((), None)],
        "arrays": [np.arange(6).reshape(2, 3).T, np.array(["a", "bc"]), np.float32(0.5)],
        "words": ["é", b"\xff", bytearray(b"x"), 2**70, 1.5, {"a", "b"}, Path("a")],
    }


def described(value: Any) -> Any:
    """All that is to arrive as it was sent, in values that can be compared."""
    if isinstance(value, Tensor):
        facts = type(value), value.layout, value.dtype, value.requires_grad
        if value.is_nested:
            return facts, [described(part) for part in value.unbind()]
        if value.layout is torch.strided:
            return facts, value.shape, value.stride(), value.storage_offset(), value.tolist()
        return facts, value.is_sparse and value.is_coalesced(), value.to_dense().tolist()
    if isinstance(value, np.ndarray):
        return value.dtype, value.strides, value.tolist()
    if isinstance(value, dict):
        return type(value), [(key, described(part)) for key, part in value.items()]
    return (type(value), [described(part) for part in value]) if isinstance(value, list | tuple) else value


@pytest.mark.filterwarnings("ignore:(Sparse|The PyTorch API of nested)")
def test_what_a_loader_process_makes_arrives_as_it_is() -> None:
    (arrived,) = made_by_workers(IDS[:1], of_every_kind, 1)
    expected = of_every_kind(IDS[0])
    for name, value in expected.items():
        assert described(arrived[name]) == described(value), name


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda _: [lambda: 1], "[A-Za-z]+Error: Can't pickle"),
        (lambda _: [torch.ones(2, requires_grad=True) * 2], "RuntimeError: Cowardly refusing"),
        (lambda _: [torch.eye(3).to_mkldnn()], "NotImplementedError: Cannot access storage"),
        (lambda _: [threading.Lock()], "TypeError: cannot pickle"),
    ],
    ids=["function", "gradient's history", "opaque", "lock"],
)
def test_what_no_process_can_send_is_refused_by_name(make: Callable[[StepIds], Any], reason: str) -> None:
    with pytest.raises(UserError, match=rf"a loader process cannot send \({reason}.*--workers 0") as refused:
        list(made_by_workers(IDS, make, 1))
    assert refused.value.exit_code == ExitCode.BAD_INPUT


def test_the_caller_draws_the_items_and_only_a_few_ahead() -> None:
    drawn: list[int] = []

    def items() -> Iterator[int]:
        for item in range(10):
            drawn.append(threading.get_ident())
            yield item

    with contextlib.closing(made_ahead(items(), abs)) as made:
        assert drawn == []
        for asked in range(1, 5):
            next(made)
            assert drawn == [threading.get_ident()] * (asked + AHEAD)


def test_the_thread_computes_with_as_many_threads_as_its_caller() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        assert list(made_ahead([0], lambda _: torch.get_num_threads())) == [before + 1]
    finally:
        torch.set_num_threads(before)


def test_an_error_is_raised_when_its_item_is_asked_for() -> None:
    def make(item: int) -> int:
        if item == 3:
            raise KeyError("no such sample")
        return item

    found = []
    with refusing(KeyError) as raised:
        found.extend(made_ahead(range(9), make))  # keeps what came before the error
    assert found == [0, 1, 2]
    assert raised.traceback[-1].name == "make"


def test_an_early_end_waits_for_the_running_item_and_makes_no_other() -> None:
    begun: list[int] = []
    ended: list[int] = []
    go_on = threading.Event()

    def make(item: int) -> int:
        begun.append(item)
        if item:
            go_on.wait(HANG)
        ended.append(item)
        return item

    made = made_ahead(range(9), make)
    next(made)
    wait_until(lambda: len(begun) == 2, HANG, "the second item")
    threading.Timer(0.05, go_on.set).start()
    made.close()
    assert begun == ended == [0, 1]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("loader")]


def test_batches_in_use_are_not_overwritten() -> None:
    loader = Loader(pictures(), shift_and_flip(1), seed=3)
    held = list(made_ahead(IDS, loader._host_part))
    for step, (epoch, micro_batches) in zip(held, IDS, strict=True):
        assert_equal(step, [loader.fetch(epoch, ids) for ids in micro_batches])


def test_a_data_set_with_getitems_of_its_own_is_asked_there() -> None:
    class Brighter(ByteImages):
        def __getitems__(self, ids: Any) -> tuple[Tensor, Tensor]:
            inputs, targets = super().__getitems__(ids)
            return inputs + 1, targets

    dark = pictures()
    bright = Brighter(dark.inputs, dark.targets, (0.5, 0.4, 0.3), (0.2, 0.25, 0.3))
    ids = np.array([7, 3])
    assert torch.equal(Loader(bright).fetch(0, ids)[0], Loader(dark).fetch(0, ids)[0] + 1)


@pytest.mark.parametrize("on_device", [False, True])
def test_an_augmentation_runs_on_the_host_unless_it_says_that_it_need_not(on_device: bool) -> None:
    seen: list[tuple[type, torch.dtype]] = []

    def apply(inputs: Tensor, uniforms: Any) -> Tensor:
        seen.append((type(uniforms), inputs.dtype))
        return inputs + 1

    loader = Loader(pictures(), Augmentation(2, apply, on_device))
    gathered = loader.gather(0, np.array([3]))
    assert len(seen) == (0 if on_device else 1)
    assert gathered[0].dtype == (torch.uint8 if on_device else torch.float32)
    assert torch.equal(loader.finish(gathered)[0], pictures()[3][0][None] + 1)
    assert seen == [(Tensor if on_device else np.ndarray, torch.float32)]


def test_a_large_step_comes_micro_batch_by_micro_batch() -> None:
    made: list[int] = []

    def make(number: int) -> Batch:
        made.append(number)
        return torch.full((1,), number), torch.zeros(1)

    step = OnDemand([1, 2, 3], make)
    assert (len(step), made) == (3, [])
    assert [int(inputs) for inputs, _ in step] == made == [1, 2, 3]
    made.clear()
    assert [int(inputs) for inputs, _ in step[1:]] == made == [2, 3]


def test_what_loader_processes_make_for_a_gpu_are_the_batches_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def beside(items: Any, gather: Callable[[Any], Any], finish: Callable[[Any], Batch], _: object) -> Any:
        """What `brought_ahead` does, without a device."""
        return made_ahead(items, lambda item: [finish(gathered) for gathered in gather(item)])

    monkeypatch.setattr(prefetching, "brought_ahead", beside)
    loader = Loader(pictures(), shift_and_flip(1), 1, workers=2, device=torch.device("cuda", 0))
    with contextlib.closing(loader.stream(IDS)) as stream:
        for step, expected in zip(stream, Loader(pictures(), shift_and_flip(1), 1).stream(IDS), strict=True):
            assert_equal(step, expected)
