"""`ddp verify-layouts`: which layouts it takes, on every shipped experiment. Tests cli/layouts.py, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_core.cli.layouts import layouts_for
from ddp_core.experiment.file import INSTALLED
from tests.support.commands import ddp

SHORT = {
    "char_transformer": ["max_steps=3"],
    "cifar10_resnet18": ["max_steps=2"],
    "counter_buffer": ["max_steps=4"],
    "digits": ["max_steps=4"],
    "fashion_mnist": ["max_steps=2"],
    "linear_regression": ["max_steps=6"],
    "resnet18_synthetic": [
        *("data.image_size=32", "data.samples=32", "data.pool=32", "global_batch_size=16", "max_steps=2")
    ],
    "toy_mlp": [],
}
"""Settings with which each shipped experiment takes a few steps."""
NEEDS_DATA = {"cifar10_resnet18", "fashion_mnist"}
NOT_EXACT = {"counter_buffer"}


def verified(*words: object, code: int = 0) -> str:
    """What `ddp verify-layouts WORDS` says, which ends with this code."""
    ended = ddp("verify-layouts", *words, timeout=850, module="tests.support.quick")
    assert ended.code == code, ended.output + ended.errors
    return ended.output + ended.errors


def test_layouts_have_no_more_ranks_than_a_step_has_micro_batches() -> None:
    layouts, left_out = layouts_for(micro_batches=4, steps=4)
    assert left_out == ["ddp x 5", "ddp x 8"]
    assert list(layouts)[:3] == ["single", "dp x 2 (threads)", "dp x 3 (threads)"]
    assert layouts_for(micro_batches=8, steps=550)[1] == []
    alone, left_out = layouts_for(micro_batches=1, steps=10)
    assert list(alone) == ["single", "killed on 1, 1, 1, ended on 1"]
    assert len(left_out) == 14
    on_gpus, _ = layouts_for(micro_batches=4, steps=4, device="cuda")
    assert list(on_gpus)[:3] == ["single", "dp x 2", "dp x 3"], "no threads of the CPU"


def test_missing_gpu_is_said_before_anything_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA device" in verified("toy_mlp", "--device", "cuda", code=4)


@pytest.mark.parametrize(("steps", "kills"), [(1, []), (2, [1]), (3, [1, 2]), (4, [1, 2, 3]), (550, [137, 275, 412])])
def test_kills_are_within_the_run(steps: int, kills: list[int]) -> None:
    layouts, _ = layouts_for(micro_batches=3, steps=steps)
    killed = [attempts for title, attempts in layouts.items() if title.startswith("killed")]
    faults = [attempt.get("faults") for attempts in killed for attempt in attempts]
    assert faults == [*((f"kill@{step}",) for step in kills), *([None] if kills else [])]
    assert all(attempt.get("nproc_per_node", 1) <= 3 for attempts in killed for attempt in attempts)


@pytest.mark.full
def test_a_run_that_is_killed_three_times_has_the_digest_of_one_that_is_not() -> None:
    lines = verified("toy_mlp", "--set", "global_batch_size=4", "--set", "epochs=1").splitlines()
    assert lines[0].startswith("left out, as a step has only 1 micro-batch to share: dp x 2 (threads), dp x 3")
    assert lines[-1] == "2 layouts, one digest of weights and buffers, one of the optimizer's state: identical"
    assert lines[-2].startswith("killed on 1, 1, 1, ended on 1 ")


def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    assert "cannot be had here: SyncBatchNorm" in verified("digits", "--set", "sync_batch_norm=true", code=2)
    said = verified("counter_buffer", "--set", "max_steps=1", code=2)
    assert "forward changes the buffer cnt, which depends on the layout" in said
    assert "ddp data fetch fashion_mnist --data-dir" in verified("fashion_mnist", "--data-dir", tmp_path, code=2)


def test_every_shipped_experiment_has_a_case() -> None:
    assert SHORT.keys() == {file.stem for file in INSTALLED.glob("*.py")}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sorted(SHORT.keys() - NEEDS_DATA - NOT_EXACT))
def test_every_shipped_experiment_has_one_digest(name: str) -> None:
    settings = [word for setting in SHORT[name] for word in ("--set", setting)]
    assert verified(name, *settings).endswith(": identical\n")
