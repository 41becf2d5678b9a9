"""A model or data that are built otherwise in another process are found by the rehearsal; seeded draws are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_core.base.errors import ExitCode
from ddp_core.record.directory import find_runs
from tests.core.run.test_repeat import TWO, trained

MODEL = """
import os, random, time
import numpy as np

_model = model

def model():
    {}
    return _model()
"""
CONSTANT = MODEL.format("layer = _model(); nn.init.constant_(layer[0].weight, {}); return layer")
DATA = """
import time
import numpy as np

def data():
    inputs = torch.from_numpy({}.standard_normal((80, 8)).astype("float32"))
    return Splits(InMemory(inputs, (inputs.sum(1) > 0).long()))
"""
# The first of each kind is fast enough to be tried each time.
OTHERWISE = {
    "the clock, in seconds": (MODEL.format("torch.manual_seed(int(time.time()))"), ()),
    "data of the clock, in days": (DATA.format("np.random.default_rng(int(time.time()) // 86400)"), ()),
    "the clock, on two ranks": (MODEL.format("torch.manual_seed(int(time.time()))"), TWO),
    "nanoseconds": (MODEL.format("torch.manual_seed(time.time_ns())"), ()),
    "a seed of torch's own": (MODEL.format("torch.seed()"), ()),
    "the kernel's random bytes": (MODEL.format("torch.manual_seed(int.from_bytes(os.urandom(4)))"), ()),
    "SystemRandom": (CONSTANT.format("random.SystemRandom().random()"), ()),
    "a generator of numpy's without a seed": (CONSTANT.format("np.random.default_rng().random()"), ()),
    "data without a seed": (DATA.format("np.random.default_rng()"), ()),
}


@pytest.mark.full
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(name, marks=[] if number < 2 else [pytest.mark.slow], id=name)
        for number, name in enumerate(OTHERWISE)
    ],
)
def test_what_is_built_otherwise_in_another_process_refuses_the_run(case: str, tmp_path: Path) -> None:
    text, words = OTHERWISE[case]
    ended = trained(tmp_path, text, *words)
    assert ended.code == ExitCode.BAD_INPUT, ended.errors
    assert "One process trained twice has other bits, too" in ended.errors
    assert list(find_runs(tmp_path / "out")) == []
