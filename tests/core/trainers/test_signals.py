"""What a step's signals send and wait for on a device: here the meta device, which computes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ddp_core.distributed.process_group import Collectives
from ddp_core.distributed.world import World
from ddp_core.observe.step import StepBatch
from ddp_core.trainers.signals import StepSignals

META = torch.device("meta")


class TwoRanks(Collectives):
    """The sums of two ranks, of which the other one gives `theirs` to each tensor on the CPU."""

    def __init__(self, theirs: float = 0.0) -> None:
        super().__init__(World(0, 2), META)
        self.theirs = theirs
        self.finished: list[str] = []

    def start_sum(self, tensor: Tensor) -> Any:
        return tensor

    def finish_sum(self, begun: Any) -> None:
        self.finished.append(begun.device.type)
        if begun.device.type == "cpu":
            begun += self.theirs


class Gone(TwoRanks):
    """The other rank is gone, which gloo alone notices."""

    def finish_sum(self, begun: Any) -> None:
        super().finish_sum(begun)
        raise RuntimeError("Connection closed by peer")


def sent(collectives: Collectives, stop: bool = False) -> StepSignals:
    signals = StepSignals(collectives, 3)
    signals.begin(StepBatch(0, 0, 12, [], [], []))
    signals.put_loss(1, torch.zeros((), device=META))
    signals.send(stop)
    return signals


@pytest.mark.parametrize(("ours", "theirs"), [(False, 0.0), (True, 0.0), (False, 1.0), (True, 1.0)])
def test_a_request_to_stop_is_known_without_reading_the_device(ours: bool, theirs: float) -> None:
    collectives = TwoRanks(theirs)
    signals = sent(collectives, ours)
    assert signals.receive() == (ours or theirs > 0)
    assert collectives.finished == ["cpu", "meta"]
    assert signals.losses.device == META
    assert signals.losses.shape[0] == 3


def test_a_lost_peer_is_met_before_the_device_is_waited_for() -> None:
    collectives = Gone()
    signals = sent(collectives)
    with pytest.raises(RuntimeError, match="closed by peer"):
        signals.receive()
    assert collectives.finished == ["cpu"]
