"""Weights that others' code changes, and memory that tensors share: kept with the bits of one process, or refused."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest

from ddp_core.record.directory import find_runs
from tests.core.run.test_repeat import BEGIN, TWO
from tests.support.commands import Ended, ddp

CALLBACK = """
class Changes(Callback):
    ranks = "all"

    @torch.no_grad()
    def on_epoch(self, moment):
        model = moment.model
        {}
        for each in model.parameters():
            each.mul_(0.5)

callbacks = [Changes()]
"""
HOLDS = """
HELD = []

def optimizer(model, lr: float = 0.05):
    HELD[:] = model.parameters()
    return torch.optim.SGD(HELD, lr=lr)
"""
CLAMPS = """
def optimizer(model, lr: float = 0.05):
    made = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    made.register_step_post_hook(lambda *_: after_step(model))
    return made

@torch.no_grad()
def after_step(model):
    for each in model.parameters():
        each.clamp_(-0.15, 0.15)
"""
MODEL = """
_model = model

def model():
    made = _model()
    {}
    {}
    return made
"""
FILES = {
    "a clamp after each step": CLAMPS,
    "a callback": CALLBACK.format("pass"),
    "frozen in a callback": CALLBACK.format("model[0].requires_grad_(False)"),
    "a list of parameters": CALLBACK.format("model = nn.ParameterList(HELD)") + HOLDS,
    "after a forward of its own": CALLBACK.format("model(torch.ones(2, 8))"),
    "two parameters, one memory": MODEL.format(
        "made.extend([nn.Linear(2, 2), nn.Linear(2, 2)])", "made[5].weight = nn.Parameter(made[4].weight.data)"
    ),
    "one number for a buffer": MODEL.format(
        "made[0].register_buffer('scale', torch.full((1,), 0.5).expand(7))",
        "made[0].register_forward_hook(lambda layer, _, found: found * layer.scale)",
    ),
    "one number for a parameter": MODEL.format("made[0].bias = nn.Parameter(torch.full((1,), 0.5).expand(7))", ""),
}
SHARED = "share memory, which --shard would part"
REFUSED = {
    ("frozen in a callback", "parameters"): "and --shard parameters has cut what was trained at first",
    ("a list of parameters", "parameters"): "was changed outside of forward where nothing keeps it",
    ("after a forward of its own", "parameters"): "was changed outside of forward where nothing keeps it",
    ("two parameters, one memory", "optimizer"): f"4.weight and 5.weight {SHARED}",
    ("two parameters, one memory", "parameters"): f"4.weight and 5.weight {SHARED}",
    ("one number for a parameter", "optimizer"): "0.bias: one number of a parameter stands for several elements",
    ("one number for a parameter", "none"): "0.bias: one number of a parameter stands for several elements",
}
FAST = {("a clamp after each step", "parameters"), ("a list of parameters", "parameters")}
CASES = [
    *REFUSED,
    *(("a clamp after each step", shard) for shard in ("optimizer", "parameters")),
    ("a callback", "parameters"),
    ("two parameters, one memory", "none"),
    *(("one number for a buffer", shard) for shard in ("none", "optimizer", "parameters")),
]


def train(name: str, folder: Path, *words: str) -> tuple[Ended, str | None]:
    """How it ended, and the digest of the weights."""
    (folder / "mine.py").write_text(BEGIN + FILES[name], encoding="utf-8")
    so = ("--device", "cpu", "--rehearsal", "off", "--guard", "off")
    ended = ddp("train", folder / "mine.py", *so, "--output", folder, *words)
    return ended, next((record.get("weights_sha256") for _, record in find_runs(folder)), None)


@functools.cache
def alone(name: str) -> str | None:
    with tempfile.TemporaryDirectory() as folder:
        return train(name, Path(folder))[1]


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "shard"), [pytest.param(*case, marks=() if case in FAST else pytest.mark.slow) for case in CASES]
)
def test_weights_under_shards_are_those_of_one_process_or_refused(name: str, shard: str, tmp_path: Path) -> None:
    ended, digest = train(name, tmp_path, *TWO, "--shard", shard)
    if (said := REFUSED.get((name, shard))) is None:
        assert (ended.code, digest) == (0, alone(name)), ended.errors
    else:
        assert ended.code == 2, ended.errors
        assert said in ended.errors
        assert "Traceback" not in ended.errors
