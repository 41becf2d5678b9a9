"""The first evaluation says that batch norm's running statistics have hardly moved yet."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from ddp_core.trainers.young_statistics import young_statistics
from tests.support.commands import command

SAID = "batch norm's running statistics have moved "


def after(times: int, momentum: float | None, frozen: bool = False) -> str | None:
    young, old = nn.BatchNorm1d(2, momentum=momentum), nn.BatchNorm2d(2)
    for layer, count in ((young, times), (old, 1000)):
        layer.num_batches_tracked.fill_(count)
    return young_statistics(nn.Sequential(nn.Linear(2, 2), young.train(not frozen), old))


def test_half_of_the_first_values_is_the_limit() -> None:
    line = f"{SAID}20 times at momentum 0.01, so this evaluation still sees 82% of the initial ones"
    assert after(20, 0.01) == line
    assert after(68, 0.01) is not None
    assert after(69, 0.01) is None
    assert after(7, 0.1) is None


def test_layers_that_do_not_move_so_are_left_out() -> None:
    """A cumulative average holds nothing of its beginning; the others are meant to stay as they are."""
    assert [after(1, None), after(1, 0.0), after(0, 0.1), after(1, 0.1, frozen=True)] == [None] * 4


@pytest.mark.full
def test_a_run_says_it_once_at_its_first_evaluation(tmp_path: Path) -> None:
    for settings, said in ((("epochs=3",), ""), (("epochs=1", "max_steps=4"), f"{SAID}4 times at momentum 0.1")):
        words = [word for setting in settings for word in ("--set", setting)]
        ended = command("train", "digits", *words, "--output", str(tmp_path))
        assert ended.code == 0, ended.errors
        assert (ended.output.count(SAID), said in ended.output) == (bool(said), True)
