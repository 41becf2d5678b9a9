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
from ddp_core.reduction.exchange import PointToPoint
from ddp_core.reduction.ordered_sum import sum_parts
from ddp_core.reduction.parts import PartsInOneLevel
from ddp_core.reduction.tree import plan_for
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
    exchange = PointToPoint(group, range(2))
    exchange.one_round_bytes = -1
    monkeypatch.setattr("ddp_core.reduction.exchange.LINE_BYTES", 8)
    for _ in sum_parts(PartsInOneLevel(exchange), [flat], flat, plan_for(2, 2)):
        pass
    assert group.sent == [[LATE, LATE], [LATE + SUM, LATE + SUM]]
    assert flat.tolist() == [LATE + SUM, LATE + SUM, SUM, SUM]


def in_phases(phases: int, seen: list[str], result: Tensor) -> Transfer:
    """A transfer that says which thread runs each of its phases."""
    for _ in range(phases):
        seen.append(threading.current_thread().name)
        yield
    return result


def failing() -> Transfer:
    yield
    raise OSError("on purpose")


def test_after_a_failed_transfer_every_later_one_fails_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, seen = CommunicationThreads("exact-reduction", 2, CPU), list[str]()
    for transfer in (failing(), in_phases(1, seen, torch.ones(1)), in_phases(0, seen, torch.ones(1))):
        with pytest.raises(OSError, match="on purpose"):
            threads.submit(transfer, torch.ones(1)).wait()
    assert isinstance(threads.error, OSError)
    assert len(seen) <= 1
    assert threads.close()
    use_threads(monkeypatch)

    def errors(group: Any) -> str:
        channel = Channel(group, CPU, None)
        with pytest.raises(OSError, match="on purpose"):
            channel.submit(failing(), torch.ones(1)).wait()
        channel.close()
        return str(channel.error)

    assert on_threads(2, errors) == ["on purpose"] * 2


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


def test_who_waits_for_a_transfer_that_hangs_is_told_when_it_is_given_up() -> None:
    threads, hangs, goes_on = CommunicationThreads("exact-reduction", 1, CPU), threading.Event(), threading.Event()

    def collective() -> None:
        hangs.set()
        goes_on.wait(60)

    threading.Thread(target=lambda: (hangs.wait(60), threads.give_up(OSError("given up")))).start()
    for _ in range(2):
        with pytest.raises(OSError, match="given up"):
            threads.call(collective)
    assert not threads.close(timeout=60), "nobody waits for what was given up"
    goes_on.set()


def test_an_exchange_after_the_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    use_threads(monkeypatch)

    def messages(group: Any) -> list[str]:
        channel, tensor = Channel(group, CPU, None), torch.ones(2)
        channel.close()
        found = []
        for exchange in (lambda: channel.sum([tensor], tensor, 2), lambda: channel.largest([1])):
            with pytest.raises(RuntimeError) as caught:
                exchange()
            found.append(str(caught.value))
        return found

    for found in on_threads(2, messages):
        assert found == ["this reduction was closed: make another one to train on"] * 2


def timeouts() -> list[timedelta]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=7))
    whole = dist.group.WORLD
    return [timeout_of(own_group(whole, CPU, timeout), CPU) for timeout in (None, timedelta(seconds=3))]


def test_the_reduction_waits_as_long_as_the_rest_of_the_program_or_as_it_is_told() -> None:
    assert ask(timeouts) == [timedelta(seconds=7), timedelta(seconds=3)]
