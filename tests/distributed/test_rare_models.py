"""Models that few people write: the ranks end with the bits of one process, or the run is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.core.run.test_repeat import BEGIN
from tests.support.commands import Ended, ddp, trained

RARE = """
import dataclasses
import numpy as np
from ddp_core.data.augment import Augmentation

class NoGradient(torch.autograd.Function):  # keeps the gradient of `scale` to itself
    @staticmethod
    def forward(ctx, inputs, scale):
        ctx.save_for_backward(scale)
        return inputs * scale

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0], None

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(8, 2), nn.Parameter(torch.full((1,), 2.0))
        {init}

    def forward(self, inputs):
        outputs = self.layer(inputs.to(self.layer.weight.dtype))
        return {outputs}

def model():
    made = Net()
    {change}
    return made

def shifted(inputs, uniforms):  # in memory that begins where torch's own never does
    moved = np.concatenate([np.zeros((1, 8), np.float32), inputs.numpy() + uniforms.astype(np.float32)])
    return torch.from_numpy(moved[1:])

_data = data

def data():
    return dataclasses.replace(_data(), augmentation=Augmentation(1, shifted))
"""
SCALED = "outputs * self.scale.abs()"
OTHER = {"init": "self.other = nn.Linear(2, 2)"}
# What is drawn follows from step and micro-batch: the other layer is left out from the first step on, or later.
OR_OTHER = "outputs * self.scale if torch.rand(()) {} else self.other(outputs) * self.scale"
KINDS: dict[str, dict[str, str]] = {
    "float64": {"change": "made.double()"},
    "complex": {"init": "self.scale = nn.Parameter(torch.ones(1, dtype=torch.complex64))"},
    "no gradient": {"outputs": "NoGradient.apply(outputs, self.scale)"},
    "sometimes": {**OTHER, "outputs": OR_OTHER.format("< 0.3")},
    "later": {**OTHER, "outputs": OR_OTHER.format("> 0.9")},
    "compiled": {"change": "made.compile()"},
    "layer compiled": {"change": "made.layer.compile(backend='eager')"},
    "layer replaced": {"change": "made.layer = torch.compile(made.layer, backend='eager')"},
}
RANKS = ("--layout", "ddp", "--nproc-per-node", "2")
UNUSED = ("--set", "ddp.find_unused_parameters=true")


def run(output: Path, kind: str, *words: str) -> Ended:
    file, parts = output.parent / "mine.py", {"init": "pass", "outputs": SCALED, "change": "pass", **KINDS[kind]}
    text = RARE
    for name, part in parts.items():
        text = text.replace(f"{{{name}}}", part)
    file.write_text(BEGIN + text)
    return ddp("train", file, "--device", "cpu", "--output", output, *words)


def ends(output: Path, kind: str, *words: str) -> tuple[str, list[Any]]:
    """The digest of the weights, and the losses of all steps."""
    ended = run(output, kind, *words)
    assert ended.code == 0, ended.errors
    directory, record = trained(output)
    steps = map(json.loads, directory.metrics.read_text().splitlines())
    return record["weights_sha256"], [each["loss"] for each in steps if each["kind"] == "step"]


@pytest.mark.full
@pytest.mark.parametrize("words", [RANKS, ("--workers", "1")])
def test_float64_and_memory_of_numpys_end_alike(tmp_path: Path, words: tuple[str, ...]) -> None:
    every = ("--log-every", "1")
    alone = ends(tmp_path / "alone", "float64", *every)
    assert alone[1]
    assert ends(tmp_path / "other", "float64", *every, *words) == alone


def test_a_complex_parameter_is_refused_on_several_ranks_and_where_losses_are_scaled(tmp_path: Path) -> None:
    assert run(tmp_path / "alone", "complex").code == 0
    ended = run(tmp_path / "ranks", "complex", *RANKS)
    assert ended.code == 2, ended.errors
    assert "scale is complex, and ranks exchange real gradients alone" in ended.errors
    ended = run(tmp_path / "scaled", "complex", "--set", "precision=fp16")
    assert (ended.code, "Traceback" in ended.errors) == (2, False), ended.errors
    assert "precision fp16: scale is complex" in ended.errors


@pytest.mark.full
def test_a_parameter_that_a_function_gives_no_gradient_is_left_alone(tmp_path: Path) -> None:
    alone = ends(tmp_path / "alone", "no gradient")
    assert ends(tmp_path / "ranks", "no gradient", *RANKS) == alone
    assert ends(tmp_path / "set", "no gradient", *RANKS, *UNUSED) == alone


@pytest.mark.full
def test_a_parameter_that_some_micro_batches_leave_out_needs_no_setting_or_is_named(tmp_path: Path) -> None:
    alone = ends(tmp_path / "alone", "sometimes")
    assert ends(tmp_path / "ranks", "sometimes", *RANKS) == alone
    ends_late = ends(tmp_path / "late", "later")
    ended = run(tmp_path / "lost", "later", *RANKS, "--checkpoint-every", "1")
    assert ended.code == 2, ended.errors
    assert "no gradient for other.weight (2 parameters)" in ended.errors
    ended = run(tmp_path / "lost", "later", *RANKS, *UNUSED, "--resume", "auto")
    assert ended.code == 0, ended.errors
    assert trained(tmp_path / "lost")[1]["weights_sha256"] == ends_late[0]


@pytest.mark.slow
@pytest.mark.timeout(900)  # every process compiles for itself
def test_a_compiled_model_ends_alike(tmp_path: Path) -> None:
    assert ends(tmp_path / "ranks", "compiled", *RANKS) == ends(tmp_path / "alone", "compiled")


@pytest.mark.parametrize("kind", ["layer compiled", "layer replaced"])
def test_replicas_of_a_compiled_model_are_refused(kind: str, tmp_path: Path) -> None:
    ended = run(tmp_path / "dp", kind, "--layout", "dp", "--nproc-per-node", "2")
    assert (ended.code, "torch.compile under --layout dp" in ended.errors) == (2, True), ended.errors
