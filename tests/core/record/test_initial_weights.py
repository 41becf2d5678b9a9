"""Weights to start from: which files are read, and what fits a model."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file, save_model
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata

from ddp_core.base.digests import weights_digest
from ddp_core.base.errors import UserError
from ddp_core.record.initial_weights import InitialWeights, find_weights, put_weights
from ddp_core.record.weights import read_weights


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
    if form == "safetensors":
        save_file(state, file)
    else:
        named = {f"module.{name}": value for name, value in state.items()}
        forms = {
            "plain": state,
            "model": {"model": state, "step": 3},
            "state_dict": {"state_dict": state},
            "nested": {"model": {"state_dict": state}},
            "wrapped in DDP": named,
        }
        torch.save(forms[form], file)
    found = find_weights(str(file))
    assert (found.given, found.file) == (str(file), str(file.resolve()))
    assert not same(trained, fresh)
    put_weights(fresh, found)
    assert same(trained, fresh)
    if form != "wrapped in DDP":
        assert found.sha256 == weights_digest(state)


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
    with pytest.raises(
        UserError, match=r"another model: missing in it: 1\.running_mean; unexpected in it: extra;"
    ) as no:
        put_weights(model(), find_weights(str(tmp_path / "other.safetensors")))
    assert "0.weight is torch.float32 [5, 2] there, torch.float32 [3, 2] here" in str(no.value)


def test_weights_that_have_changed_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    save_file(model().state_dict(), file)
    found = find_weights(str(file))
    save_file(model().state_dict(), file)
    with pytest.raises(UserError, match="has changed since the run began"):
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


def test_a_record_gives_them_back() -> None:
    weights = InitialWeights("run", "/run/model.safetensors", "0")
    assert InitialWeights(**weights.to_json()) == weights


@pytest.mark.parametrize("form", ["flat", "model", "nested"])
def test_a_folder_of_torch_distributed_checkpoint(tmp_path: Path, form: str) -> None:
    trained, fresh = model(), model()
    state = trained.state_dict()
    others = {"optimizer": {"state": {0: {"step": torch.ones(1)}}}, "step": 3}
    forms = {"flat": state, "model": {"model": state, **others}, "nested": {"model": {"state_dict": state}, **others}}
    dcp.save(forms[form], storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    found = find_weights(str(tmp_path))
    assert (found.file, found.sha256) == (str(tmp_path), weights_digest(state))
    put_weights(fresh, found)
    assert same(trained, fresh)


class _AsksForMore:
    """A pickle that asks a permitted class for something else than a member of an enumeration."""

    def __reduce__(self) -> Any:
        return getattr, (Metadata, "__init__")


class _Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("it-was-run"),))


def test_a_folder_whose_metadata_names_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    dcp.save({"a": torch.ones(1)}, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    content = pickle.loads((tmp_path / ".metadata").read_bytes())
    content.planner_data = _Runs()
    (tmp_path / ".metadata").write_bytes(pickle.dumps(content))
    with pytest.raises(UserError, match=r"holds no weights .*, which is no part of a checkpoint"):
        find_weights(str(tmp_path))
    assert not Path("it-was-run").exists()
    content.planner_data = _AsksForMore()
    (tmp_path / ".metadata").write_bytes(pickle.dumps(content))
    with pytest.raises(UserError, match=r"holds no weights .* asks .*Metadata.* for __init__"):
        find_weights(str(tmp_path))
    content.planner_data = {}
    for each in content.storage_data.values():
        each.relative_path = "../elsewhere.distcp"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(content))
    with pytest.raises(UserError, match="names a file outside of its folder"):
        find_weights(str(tmp_path))
    (tmp_path / ".metadata").write_bytes(b"damaged")
    with pytest.raises(UserError, match="holds no weights"):
        find_weights(str(tmp_path))
