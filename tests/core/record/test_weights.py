"""Whether the files of a run's final weights hold what its record says."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import nn

from ddp_core.base.digests import weights_digest
from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.files import sha256_of
from ddp_core.checkpoint import Checkpointer, load, read_checkpoint
from ddp_core.record.directory import RunDirectory
from ddp_core.record.initial_weights import find_weights
from ddp_core.record.weights import WEIGHTS, exchanged_weights, read_weights, require_recorded_weights
from tests.support.records import a_record
from tests.support.wording import refusing


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    return model


def finished(folder: Path, model: nn.Module) -> RunDirectory:
    """A completed run of four steps, with two checkpoints, the last of which has the final weights."""
    run, state = RunDirectory(folder), model.state_dict()
    with Checkpointer(run.checkpoints) as checkpointer:
        for step in (2, 4):
            checkpointer.save({"model": state}, step=step, epoch=0)
    save_model(SimpleNamespace(state_dict=lambda: dict(state)), str(folder / WEIGHTS))  # type: ignore[arg-type]
    done = {"status": "completed", "weights_sha256": weights_digest(state), "result": {"steps": 4}}
    run.write(a_record(**done))
    return run


@pytest.mark.parametrize("model", [nn.Linear(2, 2), tied()], ids=["a layer", "tied weights"])
def test_what_was_saved_is_what_was_recorded(tmp_path: Path, model: nn.Module) -> None:
    run = finished(tmp_path, model)
    record = run.read()
    assert exchanged_weights(tmp_path, record) is None
    file = tmp_path / WEIGHTS
    save_file({name: torch.zeros_like(value) for name, value in load_file(file).items()}, file)
    assert exchanged_weights(tmp_path, record) == WEIGHTS
    with refusing():
        require_recorded_weights(tmp_path, record)


def test_the_average_is_looked_at_where_it_is_recorded(tmp_path: Path) -> None:
    run = finished(tmp_path, nn.Linear(2, 2))
    run.update(ema_sha256="0" * 64)
    with refusing():
        exchanged_weights(tmp_path, run.read())
    (tmp_path / "model_ema.safetensors").write_bytes((tmp_path / WEIGHTS).read_bytes())
    assert exchanged_weights(tmp_path, run.read()) == "model_ema.safetensors"


def test_a_pipe_in_the_place_of_weights_keeps_nobody_waiting(tmp_path: Path) -> None:
    run = finished(tmp_path, nn.Linear(2, 2))
    (tmp_path / WEIGHTS).unlink()
    os.mkfifo(tmp_path / WEIGHTS)
    with refusing():
        exchanged_weights(tmp_path, run.read())


def test_a_run_starts_another_with_the_weights_of_its_record_alone(tmp_path: Path) -> None:
    run = finished(tmp_path, nn.Linear(2, 2))
    file, digest = tmp_path / WEIGHTS, run.read()["weights_sha256"]
    assert find_weights(str(tmp_path)).sha256 == digest
    whole = file.read_bytes()
    save_file({name: torch.zeros_like(value) for name, value in load_file(file).items()}, file)
    with pytest.raises(UserError, match="holds other weights") as refused:
        find_weights(str(tmp_path))
    assert refused.value.exit_code == ExitCode.NO_CHECKPOINT
    for content in (bytes(len(whole)), whole[:-3], b""):
        file.write_bytes(content)
        with pytest.raises(UserError, match="holds no weights"):
            find_weights(str(tmp_path))
    file.unlink()
    found = find_weights(str(tmp_path))
    assert (Path(found.file).name, found.sha256) == ("step-000000004.pt", digest), "the checkpoint of the last step"
    (run.checkpoints / "step-000000004.pt").unlink()
    with pytest.raises(UserError, match=r"model\.safetensors is gone") as refused:
        find_weights(str(tmp_path))
    assert refused.value.exit_code == ExitCode.NO_CHECKPOINT


def test_a_tensor_that_was_expanded_is_refused_before_it_takes_memory(tmp_path: Path) -> None:
    state = {"model": {"large\x1b": torch.ones(1).expand(400_000_000_000)}}
    torch.save(state, file := tmp_path / "weights.pt")
    for read in (read_weights, lambda path: find_weights(str(path))):
        with refusing():
            read(file)
    with Checkpointer(tmp_path / "checkpoints") as checkpointer:
        checkpointer.save({"model": {"large": torch.ones(1)}}, step=1, epoch=0)
        assert checkpointer.last is not None
    whole = read_checkpoint(checkpointer.last.path)
    torch.save(state, whole.path)
    forged = replace(whole, bytes=whole.path.stat().st_size, sha256=sha256_of(whole.path))
    with refusing():
        load(forged)
