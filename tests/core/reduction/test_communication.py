"""Messages of which one may overtake another, the threads that exchange them, and how long a silent rank is awaited."""

from __future__ import annotations

import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ddp_core.base.torch_internals import timeout_of
from ddp_core.reduction.communication import Channel, CommunicationThreads, Transfer, own_group
from ddp_core.reduction.messages import PointToPoint
from ddp_core.reduction.one_level import plan_for, sum_in_one_level
from tests.support.processes import ask
from tests.support.thread_group import on_threads, use_threads

CPU = torch.device("cpu")
LATE, SUM = 2.0, 9.0


class SlowSender:
    """Rank 0's side of a group of two: what it sends leaves when it is waited for; what comes, comes at once."""

    def __init__(self) -> None:
        self.sent: list[list[float]] = []

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        return SimpleNamespace(wait=lambda: self.sent.append(tensors[0].tolist()))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        tensors[0].fill_(SUM)
        return SimpleNamespace(wait=lambda: None)


def test_a_sum_that_comes_early_does_not_overwrite_what_is_still_to_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    group: Any = SlowSender()
    flat = torch.full((4,), LATE)
    # As with a bucket of DDP: the sums arrive where the own tensor lies.
    exchange = PointToPoint(group)
    exchange.one_round_bytes = -1
    monkeypatch.setattr("ddp_core.reduction.exchange.LINE_BYTES", 8)
    sum_in_one_level(exchange, [flat], flat, plan_for(2, 2))
    assert group.sent == [[LATE, LATE], [LATE + SUM, LATE + SUM]]
    assert flat.tolist() == [LATE + SUM, LATE + SUM, SUM, SUM]


def in_phases(phases: int, seen: list[str], result: Tensor) -> Transfer:
    """A transfer that says which thread runs each of its phases."""
    for _ in range(phases):
        seen.append(threading.current_thread().name)
        yield
    return result


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_each_phase_of_a_transfer_has_its_thread_and_the_last_one_runs_the_rest(count: int) -> None:
    threads = CommunicationThreads("exact-reduction", count, CPU)
    for position, thread in enumerate(threads._threads):
        assert (thread.name, thread.daemon) == ("exact-reduction", True)
        thread.name = str(position)
    for phases in (0, 1, 3, 5):
        seen: list[str] = []
        result = torch.ones(phases + 1)
        assert threads.submit(in_phases(phases, seen, result), result).wait() is result
        assert seen == [str(min(phase, count - 1)) for phase in range(phases)]
    assert threads.error is None
    assert threads.close()
    assert not any(thread.is_alive() for thread in threads._threads)


def test_after_a_failed_transfer_every_later_one_fails_with_its_error() -> None:
    def failing() -> Transfer:
        yield
        raise OSError("on purpose")

    threads, seen = CommunicationThreads("exact-reduction", 2, CPU), list[str]()
    for transfer in (failing(), in_phases(1, seen, torch.ones(1)), in_phases(0, seen, torch.ones(1))):
        with pytest.raises(OSError, match="on purpose"):
            threads.submit(transfer, torch.ones(1)).wait()
    assert isinstance(threads.error, OSError)
    assert len(seen) <= 1
    assert threads.close()


def test_closing_does_not_wait_for_a_transfer_that_hangs() -> None:
    threads, goes_on = CommunicationThreads("exact-reduction", 2, CPU), threading.Event()

    def hanging() -> Transfer:
        goes_on.wait(60)
        yield from ()
        return torch.ones(1)

    future = threads.submit(hanging(), torch.ones(1))
    assert not threads.close(timeout=0.05)
    goes_on.set()
    future.wait()
    assert threads.close()


def test_a_rank_alone_runs_transfers_at_once() -> None:
    channel, seen = Channel(None, CPU, None), list[str]()
    assert channel.submit(in_phases(3, seen, torch.ones(2)), torch.ones(2)).wait().tolist() == [1, 1]
    assert seen == [threading.current_thread().name] * 3
    assert (channel.error, channel.group, channel.closed) == (None, None, False)
    own = torch.ones(3)
    channel.sum([own], own, 1)
    channel.close()
    assert channel.closed


def test_a_channel_has_as_many_threads_as_its_sums_have_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    use_threads(monkeypatch)

    def counts(group: Any) -> list[int]:
        found = []
        for nodes, phases, device in (
            (None, None, CPU),
            ([[0], [1, 2]], None, CPU),
            (None, 2, CPU),
            ([[0], [1, 2]], 2, torch.device("meta")),
        ):
            channel = Channel(group, device, None, nodes, phases)
            assert channel._threads is not None
            assert {thread.name for thread in channel._threads._threads} == {"exact-reduction"}
            assert channel.group is not group
            assert channel.error is None
            found.append(len(channel._threads._threads))
            channel.close()
        return found

    assert on_threads(3, counts) == [[1, 3, 2, 1]] * 3


def test_an_exchange_after_the_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    use_threads(monkeypatch)

    def messages(group: Any) -> list[str]:
        channel, tensor = Channel(group, CPU, None), torch.ones(2)
        channel.close()
        found = []
        for exchange in (lambda: channel.sum([tensor], tensor, 2), lambda: channel.on_any([True])):
            with pytest.raises(RuntimeError) as caught:
                exchange()
            found.append(str(caught.value))
        return found

    for found in on_threads(2, messages):
        assert found == ["this reduction was closed: make another one to train on"] * 2


def test_a_channel_has_a_group_of_its_own_and_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    use_threads(monkeypatch)
    destroyed: list[Any] = []
    torch_distributed = SimpleNamespace(is_initialized=lambda: True, destroy_process_group=destroyed.append)
    monkeypatch.setattr("ddp_core.reduction.communication.dist", torch_distributed)

    def closed(group: Any) -> bool:
        channel = Channel(group, CPU, timedelta(seconds=5))
        own: Any = channel.group
        assert own.asked == (CPU, timedelta(seconds=5))
        assert (channel.closed, channel.ordered_sum.world_size) == (False, 2)
        channel.close()
        assert (channel.closed, channel.group, channel.ordered_sum.world_size) == (True, None, 1)
        return own in destroyed

    assert on_threads(2, closed) == [True, True]
    assert len(destroyed) == 2

    def alone(group: Any) -> None:
        channel = Channel(group, CPU, None)
        assert channel.group is None
        assert channel._threads is None
        channel.close()

    on_threads(1, alone)
    torch_distributed.is_initialized = lambda: False
    on_threads(2, lambda group: Channel(group, CPU, None).close())
    assert len(destroyed) == 2


def test_the_first_error_of_a_channel_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    use_threads(monkeypatch)

    def failing() -> Transfer:
        yield from ()
        raise OSError("on purpose")

    def errors(group: Any) -> str:
        channel = Channel(group, CPU, None)
        with pytest.raises(OSError, match="on purpose"):
            channel.submit(failing(), torch.ones(1)).wait()
        channel.close()
        return str(channel.error)

    assert on_threads(2, errors) == ["on purpose"] * 2


def timeouts() -> list[timedelta]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=7))
    whole = dist.group.WORLD
    assert whole is not None
    return [timeout_of(own_group(whole, CPU, timeout), CPU) for timeout in (None, timedelta(seconds=3))]


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_group_of_its_own_has_the_same_ranks_and_backend(monkeypatch: pytest.MonkeyPatch, world_size: int) -> None:
    given: list[Any] = []
    fake = SimpleNamespace(
        ProcessGroup=str,
        get_process_group_ranks={"the group": [0, 2]}.get,
        get_backend={"the group": "its backend"}.get,
        get_world_size=lambda: world_size,
        new_group=lambda ranks, **options: given.append((ranks, options)) or "a new group",
    )
    monkeypatch.setattr("ddp_core.reduction.communication.dist", fake)
    whole: Any = "the group"
    assert own_group(whole, CPU, timedelta(seconds=3)) == "a new group"
    expected = {"timeout": timedelta(seconds=3), "backend": "its backend", "group_desc": "exact reduction"}
    assert given == [([0, 2], {**expected, "use_local_synchronization": world_size == 3})]


def test_the_reduction_waits_as_long_as_the_rest_of_the_program_or_as_it_is_told() -> None:
    assert ask(timeouts) == [timedelta(seconds=7), timedelta(seconds=3)]
