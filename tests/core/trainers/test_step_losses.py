"""What is sent and waited for of a step's losses, on a device: here the meta device, which computes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ddp_core.distributed.process_group import Collectives
from ddp_core.distributed.world import World
from ddp_core.observe.step import StepBatch
from ddp_core.trainers.step_losses import StepLosses

META = torch.device("meta")
BATCH = StepBatch(0, 0, 12, [], [], [])


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
            begun[0] += self.theirs


class Gone(TwoRanks):
    """The other rank is gone, which gloo alone notices."""

    def finish_sum(self, begun: Any) -> None:
        super().finish_sum(begun)
        raise RuntimeError("Connection closed by peer")


def sent(collectives: Collectives, stop: bool = False) -> StepLosses:
    losses = StepLosses(collectives, 3, lambda _: False, read_every=10)
    losses.put(1, torch.zeros((), device=META))
    losses.send(BATCH, stop)
    return losses


@pytest.mark.parametrize(("ours", "theirs"), [(False, 0.0), (True, 0.0), (False, 1.0), (True, 1.0)])
def test_a_request_to_stop_is_known_without_reading_the_device(
    ours: bool, theirs: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    collectives = TwoRanks(theirs)
    losses = sent(collectives, ours)
    monkeypatch.setattr(losses, "read", list)
    assert losses.receive(BATCH) == (ours or theirs > 0, [])
    assert collectives.finished == ["cpu", "meta"]
    ((*_, unread),) = losses._unread
    assert unread.device == META
    assert unread.shape[0] == 3


def test_a_lost_peer_is_met_before_the_device_is_waited_for() -> None:
    collectives = Gone()
    losses = sent(collectives)
    with pytest.raises(RuntimeError, match="closed by peer"):
        losses.receive(BATCH)
    assert collectives.finished == ["cpu"]
