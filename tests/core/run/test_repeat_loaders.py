"""What loader processes do not see, or keep for themselves, is found by the rehearsal."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_core.base.errors import ExitCode
from tests.core.run.test_repeat import TWO, trained

ITEMS = """
LEVEL = {{"level": 0.0}}

class Items(torch.utils.data.Dataset):
    def __init__(self, inputs, targets):
        self.inputs, self.targets, self.kept = inputs, targets, {{}}

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        {}

_data = data

def data():
    train = _data().train
    return Splits(Items(train.inputs, train.targets))
"""
CHANGED = ITEMS.format('return self.inputs[index] * (1 + LEVEL["level"]), self.targets[index]')
CALLBACK = """
class Harder(Callback):
    ranks = "all"

    def {}(self, moment):
        LEVEL["level"] += 0.25

    def state_dict(self):
        return dict(LEVEL)

    def load_state_dict(self, state):
        LEVEL.update(state)

callbacks = [Harder()]
"""
CASES = {
    "a draw that is kept": ITEMS.format(
        """
        if index not in self.kept:
            self.kept[index] = self.inputs[index] + 0.3 * torch.randn(8)
        return self.kept[index], self.targets[index]
        """
    ),
    "changed after a step": CHANGED + CALLBACK.format("on_step"),
    "changed after an epoch": CHANGED + CALLBACK.format("on_epoch"),
}


@pytest.mark.parametrize("case", [pytest.param(name, marks=pytest.mark.slow) for name in CASES])
def test_what_loader_processes_do_not_share_refuses_the_run(case: str, tmp_path: Path) -> None:
    ended = trained(tmp_path, CASES[case], *TWO, "--workers", "2")
    assert ended.code == ExitCode.BAD_INPUT, ended.errors
    assert "first in step " in ended.errors
    assert ("With --workers 0 all steps are the same" in ended.errors) == case.startswith("changed")
