"""Where the seconds of a step are counted: by the host's clock, and by events of a CUDA device that stands in here."""

from __future__ import annotations

import time

import pytest
import torch

from ddp_core.observe.step import StepBatch
from ddp_core.trainers.clock import StepClock


def batch(wait_seconds: float = 0.0) -> StepBatch:
    return StepBatch(0, 0, 4, 4, [], [], [], wait_seconds)


def test_time_put_aside_is_no_training() -> None:
    began, clock = time.perf_counter(), StepClock(None)
    with clock.aside():
        time.sleep(0.02)
    with clock.aside("checkpoint"):
        time.sleep(0.02)
    assert clock.seconds["checkpoint"] >= 0.02
    assert clock.seconds_aside >= 0.04
    assert sum(clock.seconds.values()) <= time.perf_counter() - began - 0.02, "without a part it counts nowhere"


def test_exposed_communication_begins_with_the_last_gradient() -> None:
    model = torch.nn.Linear(2, 2)
    clock = StepClock(model)
    model(torch.ones(1, 2)).sum().backward()
    time.sleep(0.02)
    clock.lap_backward()
    assert clock.seconds["exposed_communication"] >= 0.02
    assert clock.seconds["backward"] > 0
    exposed = clock.seconds["exposed_communication"]
    clock.lap_backward()
    assert clock.seconds["exposed_communication"] == exposed, "without a gradient since, it is all backward"


class Event:
    """An event of a device that has come to number `done` of those that were recorded; each takes a second more."""

    recorded = done = waits = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: object) -> None:
        Event.recorded += 1
        self.number = Event.recorded

    def query(self) -> bool:
        return self.number <= Event.done

    def synchronize(self) -> None:
        Event.waits += 1
        Event.done = Event.recorded

    def elapsed_time(self, end: Event) -> float:
        assert self.query(), "torch raises where the first event is not over"
        assert end.query(), "torch raises where the last event is not over"
        return 1000.0 * (end.number - self.number)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    Event.recorded = Event.done = Event.waits = 0
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)


def test_on_cuda_laps_are_read_when_the_device_is_done_with_them() -> None:
    clock = StepClock(None, torch.device("cuda"))
    clock.before_step(batch())
    clock.lap("forward")
    clock.lap_backward()
    clock.gradients_done(batch(), [])
    clock.after_step(batch())
    assert sum(clock.seconds.values()) == 0, "the device has not begun"
    Event.done = 3
    clock.after_step(batch())
    assert (clock.seconds["other"], clock.seconds["forward"], clock.seconds["backward"]) == (1, 1, 0)
    assert Event.waits == 0, "a step must not wait for the device"
    assert clock.per_step() == clock.per_step()
    assert Event.waits == 1
    assert sum(clock.seconds.values()) == Event.recorded - 1


def test_on_cuda_only_a_wait_in_which_the_device_stood_still_is_one_for_data() -> None:
    clock = StepClock(None, torch.device("cuda"))
    clock.before_step(batch(wait_seconds=0.25))
    clock.before_step(batch(wait_seconds=7.0))
    clock.after_step(batch())
    Event.done = Event.recorded
    clock.after_step(batch())
    assert (clock.seconds["data"], clock.seconds["other"]) == (1.25, 0.75)
