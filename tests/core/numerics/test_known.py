"""A portable run warns of operations of which nobody knows whether other CPUs have their bits, and of no others.

Tests observe/unknown_operations.py, too.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ddp_core.numerics.known import status_of, unknown_among
from tests.core.run.test_repeat import BEGIN
from tests.support.commands import ROOT, ddp

RARE = """
class Rare(nn.Linear):
    def forward(self, inputs):
        return super().forward(inputs) + torch.trace(self.weight)

def model():
    return Rare(8, 2)
"""


def test_an_unknown_operation_is_warned_of_once_and_native_runs_are_not_looked_at(tmp_path: Path) -> None:
    said, file = {}, tmp_path / "mine.py"
    file.write_text(BEGIN + RARE)
    for numerics in ("portable", "native"):
        ended = ddp("train", file, "--device", "cpu", "--numerics", numerics, "--output", tmp_path / numerics)
        assert ended.code == 0, ended.errors
        said[numerics] = ended.output + ended.errors
    assert said["portable"].count("not known to have the same bits on other CPUs") == 1
    assert "bits on other CPUs: aten::trace" in said["portable"]
    assert "(docs/reference/portable-numerics.md#operations)" in said["portable"]
    assert "not known" not in said["native"]


SHARDED = ("--layout", "ddp", "--nproc-per-node", "2", "--shard", "parameters")


@pytest.mark.full
@pytest.mark.parametrize(
    "words", [("digits",), ("toy_mlp",), ("digits", *SHARDED)], ids=["digits", "toy_mlp", "shards"]
)
def test_shipped_experiments_use_known_operations_alone(words: tuple[str, ...], tmp_path: Path) -> None:
    portable = ("--device", "cpu", "--numerics", "portable", "--set", "max_steps=2", "--output", tmp_path)
    ended = ddp("train", *words, *portable)
    assert ended.code == 0, ended.errors
    assert "not known" not in ended.output + ended.errors


def test_each_operation_has_one_status() -> None:
    assert [status_of(f"aten::{name}") for name in ("mm", "swapaxes", "linalg_lstsq")] == [
        *("proved", "by definition", "unknown")
    ]
    traced = ["aten::mm", "mine::layer", "AddmmBackward0", "autograd::engine::evaluate_function: X", "a label: b"]
    assert unknown_among([*traced, "quantized::linear"]) == ["mine::layer", "quantized::linear"]
    assert unknown_among(["Torch-Compiled Region: 0/0", "aten::mm"]) == ["torch.compile"]


@pytest.mark.slow
def test_the_list_is_what_the_published_operations_call() -> None:
    files = [ROOT / "ddp_core/numerics/proved.txt", ROOT / "docs/reference/portable-numerics.md"]
    before = [file.read_text() for file in files]
    subprocess.run([sys.executable, "-m", "tools.portable_operations"], cwd=ROOT, check=True)
    assert [file.read_text() for file in files] == before
