"""Weights to start from, and whether the files of final weights hold what the record says.

Tests record/weights.py, too.
"""

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
from ddp_core.base.errors import UserError
from ddp_core.base.files import sha256_of
from ddp_core.checkpoint import Checkpointer, load, read_checkpoint
from ddp_core.record.directory import RunDirectory
from ddp_core.record.weights import WEIGHTS, exchanged_weights, find_weights, put_weights, read_weights
from tests.support.records import a_record
from tests.support.wording import refusing


def model(width: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width))


class Tied(nn.Module):
    """Two layers that share one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight


def same(one: nn.Module, other: nn.Module) -> bool:
    return weights_digest(one.state_dict()) == weights_digest(other.state_dict())


@pytest.mark.parametrize("form", ["safetensors", "plain", "model", "state_dict", "nested", "wrapped in DDP"])
def test_state_dicts_are_read_in_every_usual_form(tmp_path: Path, form: str) -> None:
    trained, fresh = model(), model()
    state = trained.state_dict()
    file = tmp_path / ("weights.safetensors" if form == "safetensors" else "weights.pt")
    forms = {
        "plain": state,
        "model": {"model": state, "step": 3},
        "state_dict": {"state_dict": state},
        "nested": {"model": {"state_dict": state}},
        "wrapped in DDP": {f"module.{name}": value for name, value in state.items()},
    }
    if form == "safetensors":
        save_file(state, file)
    else:
        torch.save(forms[form], file)
    found = find_weights(str(file))
    assert (found["given"], found["file"]) == (str(file), str(file.resolve()))
    assert not same(trained, fresh)
    put_weights(fresh, found)
    assert same(trained, fresh)
    assert form == "wrapped in DDP" or found["sha256"] == weights_digest(state)


def test_tied_weights_come_back_tied(tmp_path: Path) -> None:
    trained, fresh = Tied(), Tied()
    save_model(trained, str(tmp_path / "tied.safetensors"))
    assert len(read_weights(tmp_path / "tied.safetensors")) == 3
    put_weights(fresh, find_weights(str(tmp_path / "tied.safetensors")))
    assert same(trained, fresh)
    assert fresh.first.weight is fresh.second.weight


def test_weights_of_a_compiled_model_fit_the_plain_one_and_the_other_way_round(tmp_path: Path) -> None:
    trained, fresh = model(), model()
    fresh[0] = torch.compile(fresh[0], backend="eager")
    compiled = torch.compile(trained, backend="eager")
    torch.save(compiled.state_dict(), tmp_path / "compiled.pt")
    torch.save(fresh.state_dict(), tmp_path / "partly.pt")
    put_weights(fresh, find_weights(str(tmp_path / "compiled.pt")))
    assert all(map(torch.equal, fresh.state_dict().values(), trained.state_dict().values()))
    put_weights(compiled, find_weights(str(tmp_path / "partly.pt")))
    plain = model()
    put_weights(plain, find_weights(str(tmp_path / "partly.pt")))
    assert same(plain, trained)


def test_another_precision_is_converted(tmp_path: Path) -> None:
    half, fresh = model().half(), model()
    save_file(half.state_dict(), tmp_path / "half.safetensors")
    put_weights(fresh, find_weights(str(tmp_path / "half.safetensors")))
    assert same(half.float(), fresh)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    state = model(5).state_dict()
    state["extra"] = torch.zeros(1)
    del state["1.running_mean"]
    save_file(state, tmp_path / "other.safetensors")
    with refusing() as no:
        put_weights(model(), find_weights(str(tmp_path / "other.safetensors")))
    assert "0.weight is torch.float32 [5, 2] there, torch.float32 [3, 2] here" in str(no.value)


def test_weights_that_have_changed_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    save_file(model().state_dict(), file)
    found = find_weights(str(file))
    save_file(model().state_dict(), file)
    with refusing():
        put_weights(model(), found)


@pytest.mark.parametrize("content", ["nothing", "text", "a list", "code", "a model"])
def test_what_holds_no_weights_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "weights.pt"
    if content == "text":
        file.write_text("hello")
    elif content != "nothing":
        torch.save({"a list": [1, 2], "code": {"a": Path.unlink}, "a model": model()}[content], file)
    expected = {"nothing": "cannot be read", "a list": "no state dict"}.get(content, "holds no weights")
    with pytest.raises(UserError, match=expected) as refused:
        find_weights(str(file))
    assert "\n" not in str(refused.value)


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
    assert find_weights(str(tmp_path))["sha256"] == digest
    whole = file.read_bytes()
    save_file({name: torch.zeros_like(value) for name, value in load_file(file).items()}, file)
    with refusing():
        find_weights(str(tmp_path))
    for content in (bytes(len(whole)), whole[:-3], b""):
        file.write_bytes(content)
        with pytest.raises(UserError, match="holds no weights"):
            find_weights(str(tmp_path))
    file.unlink()
    found = find_weights(str(tmp_path))
    assert (Path(found["file"]).name, found["sha256"]) == ("step-000000004.pt", digest), "the last step's checkpoint"
    (run.checkpoints / "step-000000004.pt").unlink()
    with refusing():
        find_weights(str(tmp_path))


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
