"""What is left of a run that came to its end: the line of figures, the weights' files, the slowest rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ddp_core.base.digests import weights_digest
from ddp_core.base.errors import ExitCode, UserError
from ddp_core.checkpoint import Fence, Superseded
from ddp_core.distributed.process_group import Collectives
from ddp_core.distributed.world import World
from ddp_core.record.result import gather_ends, result_of, save_weights, summary
from ddp_core.record.weights import exchanged_weights
from tests.core.trainers.test_trainers import CPU, experiment, finished
from tests.support.records import NO_USAGE


def test_the_last_line_has_loss_metrics_single_values_and_speed() -> None:
    result = {
        "train_loss": 0.25,
        "test_accuracy": 0.5,
        "ema_test_loss": 1.5,
        "seconds": 9.0,
        "values": {"weight": [2.0], "many": [3.0, 4.0]},
        "samples_per_second": 1234.4,
    }
    line = summary(result)
    assert [part.split()[0] for part in line.split(", ")] == ["train", "test", "ema", "weight", "1234"], line
    assert line.endswith("weight 2.0000, 1234 samples/s")
    assert summary({"samples_per_second": None}) == ""


def test_weights_are_written_to_the_file_that_was_named(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    fence = Fence.take(tmp_path)
    save_weights(model.state_dict(), tmp_path / "model.safetensors", fence)
    assert weights_digest(load_file(tmp_path / "model.safetensors")) == weights_digest(model.state_dict())
    with pytest.raises(UserError, match=f"cannot write {tmp_path}/no/folder") as caught:
        save_weights(model.state_dict(), tmp_path / "no" / "folder", fence)
    assert caught.value.exit_code == ExitCode.RESOURCES


def test_what_shares_memory_in_part_is_written_whole(tmp_path: Path) -> None:
    table, chunks = torch.arange(6.0).view(2, 3), torch.arange(4.0).chunk(2)
    state = {"table": table, "tied": table, "row": table[0], "turned": table.t(), "first": chunks[0], "last": chunks[1]}
    save_weights(state, tmp_path / "model.safetensors", Fence.take(tmp_path))
    (tmp_path / "other").touch()
    modes = {(tmp_path / name).stat().st_mode for name in ("model.safetensors", "other")}
    assert len(modes) == 1, "whoever may read the record may read the weights"
    assert load_file(tmp_path / "model.safetensors").keys() == state.keys() - {"tied"}
    assert exchanged_weights(tmp_path, {"weights_sha256": weights_digest(state)}) is None


def test_a_former_rank_0_leaves_the_weights_of_its_successor(tmp_path: Path) -> None:
    file, model, other = tmp_path / "model.safetensors", nn.Linear(2, 3), nn.Linear(2, 3)
    former = Fence.take(tmp_path)
    save_weights(model.state_dict(), file, Fence.take(tmp_path))
    with pytest.raises(Superseded):
        save_weights(other.state_dict(), file, former)
    assert weights_digest(load_file(file)) == weights_digest(model.state_dict())
    assert not list(tmp_path.glob("*.tmp"))


class Three(Collectives):
    """Rank 0 of three; rank 2 is ten times as slow as the others."""

    def gather(self, value: Any) -> list[Any]:
        if len(value) == 2:  # which methods its callbacks have
            return [value] * 3
        digests, _, usage = value
        speeds = [{"mean_seconds": seconds, "p95_seconds": 2 * seconds} for seconds in (0.01, 0.01, 0.1)]
        return [(digests, (rank, 0, speed), usage) for rank, speed in enumerate(speeds)]


def test_the_slowest_rank_is_named_at_the_end() -> None:
    trainer = finished(experiment(max_steps=1), collectives=Three(World(), CPU))
    ends = gather_ends(trainer, {}, NO_USAGE)
    assert ends.slowest is not None
    assert ends.slowest.startswith("slowest: rank 2 (node 0), p95 200 ms per step")


class OfComplexNumbers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5, dtype=torch.complex64))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.flatten(1)[:, :1] * torch.view_as_real(self.weight).reshape(1, -1)


def test_few_parameters_are_recorded_with_their_values_complex_ones_with_both_parts(tmp_path: Path) -> None:
    trainer = finished(experiment(max_steps=1), OfComplexNumbers)
    weights = trainer.state.model.state_dict()
    values = result_of(trainer, weights, tmp_path / "metrics.jsonl", 1.0)["values"]["weight"]
    assert values == torch.view_as_real(weights["weight"]).flatten().tolist()
