"""`ddp rehearse`: what it tries, what it tells of the whole run, and when it says that a long run may be submitted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ddp_core.cli.preflight_layouts import layouts_to_try
from ddp_core.cli.prepare import prepare
from ddp_core.config.layout import SHARD_MODES
from ddp_core.config.options import Asked, NodeRange
from tests.support.commands import Ended, ddp

FILE = '''"""Is {what} found before a long run?"""

import torch

from ddp_core import Experiment, InMemory, Optimizer, Splits

DRAWN = torch.Generator().manual_seed(0)


def data():
    inputs, targets = torch.ones(64, 4), torch.zeros(64, dtype=torch.int64)
    {drawn}
    return Splits(InMemory(inputs, targets), InMemory(inputs[:8], targets[:8] + {label}))


def model(width: int = 4):
    return torch.nn.Linear(4, 2)


experiment = Experiment(
    name="mine", optimizer=Optimizer(lr=0.01), global_batch_size=8, micro_batch={micro_batch}, epochs=1000
)
'''


def written(folder: Path, what: str, label: int = 0, drawn: str = "pass", micro_batch: int = 8) -> Path:
    file = folder / "mine.py"
    file.write_text(FILE.format(what=what, label=label, drawn=drawn, micro_batch=micro_batch))
    return file


def rehearsed(file: Path | str, *words: object) -> Ended:
    return ddp("rehearse", file, "--device", "cpu", *words, module="tests.support.quick")


def tried(ended: Ended) -> dict[str, list[str]]:
    """The cells of the table's rows by what was tried."""
    rows = [re.split(r"\s{2,}", line) for line in ended.output.splitlines()]
    return {row[0]: row[1:] for row in rows if len(row) == 6 and row[0] != "tried" and not row[0].startswith("-")}


def test_a_run_that_works_may_be_submitted_and_is_told_of(tmp_path: Path) -> None:
    outputs = tmp_path / "outputs"
    ended = rehearsed(written(tmp_path, "nothing"), "--output", outputs, "--max-seconds", "0.5")
    assert ended.code == 0, ended.output + ended.errors
    rows = tried(ended)
    assert list(rows) == ["single-cpu", "single-cpu, killed, then single-cpu", "weights exported and loaded"]
    assert {cells[0] for cells in rows.values()} == {"done"}
    assert len({cells[1] for cells in rows.values()}) == 1
    lines = dict(line.split(maxsplit=1) for line in ended.output.splitlines() if not line.startswith(" "))
    assert lines["whole"].startswith("run  8000 steps, 8 per epoch")
    assert lines["time"].startswith("about ")
    assert "checkpoints of" in lines["disk"]
    assert "activations come on top" in lines["memory"]
    assert "measured" in lines["memory"]
    assert lines["warnings"] == "1"
    assert "--max-seconds 0.5 will stop it" in ended.output
    assert ended.output.splitlines()[-1].startswith("ready: ")
    assert not outputs.exists()


def test_what_only_an_evaluation_meets_is_found(tmp_path: Path) -> None:
    ended = rehearsed(written(tmp_path, "a label without a class", label=7), "--output", tmp_path / "outputs")
    assert ended.code == 2, ended.output + ended.errors
    assert tried(ended)["single-cpu"][0] == "failed (2)"
    assert ended.output.splitlines()[-1].startswith("NOT ready: single-cpu: ")


def test_data_that_are_other_ones_each_time_are_refused(tmp_path: Path) -> None:
    file = written(tmp_path, "a draw", drawn="inputs.normal_(generator=DRAWN)")
    ended = rehearsed(file, "--output", tmp_path / "outputs")
    assert ended.code == 2
    assert "when they are built a second time" in ended.errors
    assert tried(ended) == {}


def test_each_layout_that_fits_is_tried_and_the_asked_one_first(tmp_path: Path) -> None:
    def titles(places: int, **asked: object) -> list[str]:
        request = prepare(Asked(experiment="digits", device="cpu", **asked), "ddp")
        return list(layouts_to_try(request, SHARD_MODES, places, 2)[1])

    sharded = [f"ddp-1x2-cpu-shard-{mode}" for mode in SHARD_MODES]
    killed = "ddp-1x2-cpu, killed, then single-cpu"
    assert titles(2) == ["single-cpu", "dp-2-cpu", "ddp-1x2-cpu", *sharded, killed]
    assert titles(1) == ["single-cpu", "single-cpu, killed, then single-cpu"]
    assert titles(2, layout="ddp", nproc_per_node=2)[:2] == ["ddp-1x2-cpu", "single-cpu"]
    nodes = {"nnodes": NodeRange(4, 4), "rdzv_endpoint": "here:1", "rdzv_id": "new"}
    assert titles(3, layout="ddp", nproc_per_node=2, **nodes)[0] == "ddp-1x3-cpu"
    plain = titles(2, layout="ddp", nproc_per_node=2, reduction="plain")
    assert plain == ["ddp-1x2-cpu", "ddp-1x2-cpu, killed, then ddp-1x2-cpu"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("reduction", ["exact", "plain"])
def test_a_shipped_experiment_is_ready_on_every_layout(reduction: str, tmp_path: Path) -> None:
    words = ("--layout", "ddp", "--nproc-per-node", "2", "--reduction", reduction)
    ended = ddp("rehearse", "digits", *words, "--device", "cpu", timeout=800, env={"DDP_OUTPUT": str(tmp_path / "out")})
    assert ended.code == 0, ended.output + ended.errors
    rows = tried(ended)
    assert len(rows) == (8 if reduction == "exact" else 3)
    assert {cells[0] for cells in rows.values()} == {"done"}
    assert len({cells[1] for cells in rows.values()}) == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_a_resume_would_lose_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOSES", "attribute")
    file = Path(__file__).parents[2] / "support" / "experiment_files" / "loses.py"
    ended = rehearsed(file)
    assert ended.code in (1, 2), ended.output + ended.errors
    assert "NOT ready: " in ended.output.splitlines()[-1]
