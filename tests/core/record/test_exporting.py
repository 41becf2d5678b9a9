"""`ddp export`: what each format writes, loaded again by somebody else's loader, with the outputs of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from ddp_core import Run, load_model
from ddp_core.base.digests import weights_digest
from ddp_core.base.errors import UserError
from ddp_core.cli.bundle import make_bundle
from ddp_core.record.exporting import FILES, export, save
from ddp_core.record.places import place_named
from tests.support.commands import ROOT, ddp, train, trained
from tests.support.wording import refusing

EXPERIMENTS = ROOT / "tests" / "support" / "experiment_files"
IMAGES = torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    output = tmp_path_factory.mktemp("out")
    train(output, EXPERIMENTS / "averaged.py", "--checkpoint-every", "3", "--keep-every", "3")
    return Run(trained(output)[0].path)


def written(run: Run, to: str, folder: Path) -> Path:
    with place_named(run) as place:
        return export(place, to, folder / "export", weights="trained").file


def plain() -> nn.Module:
    """The model as a user has it elsewhere, with fresh weights, not compiled."""
    namespace: dict[str, Any] = {"__name__": "elsewhere"}
    exec((EXPERIMENTS / "averaged.py").read_text(), namespace)
    model: nn.Module = namespace["Net"](16)
    return model.eval()


@torch.no_grad()
def outputs(model: nn.Module) -> Tensor:
    result: Tensor = model(IMAGES)
    return result


def same_outputs(run: Run, model: nn.Module) -> bool:
    return torch.equal(outputs(model), outputs(load_model(run, weights="trained")))


@pytest.mark.full
def test_safetensors_with_every_name_of_tied_weights(run: Run, tmp_path: Path) -> None:
    file = written(run, "safetensors", tmp_path)
    assert file == tmp_path / "export" / "model.safetensors"
    model = plain()
    model.load_state_dict(load_file(file))
    assert same_outputs(run, model)
    with safe_open(file, "pt") as content:
        metadata = content.metadata()
    assert metadata["format"] == "pt"
    assert metadata["digest"] == weights_digest(model.state_dict())
    assert (metadata["experiment"], metadata["step"], metadata["weights"]) == ("averaged", "10", "trained")
    assert [*tmp_path.iterdir()] == [file.parent]
    assert [*file.parent.iterdir()] == [file]
    assert file.stat().st_mode & 0o777 == file.parent.stat().st_mode & 0o666, "others may read what they may list"


def test_the_torch_format_keeps_tied_weights_tied(run: Run, tmp_path: Path) -> None:
    state = torch.load(written(run, "torch", tmp_path), weights_only=True)
    assert state["middle.weight"].data_ptr() == state["again.weight"].data_ptr()
    model = plain()
    model.load_state_dict(state)
    assert same_outputs(run, model)


def test_a_checkpoint_and_a_bundle(run: Run, tmp_path: Path) -> None:
    with place_named(run.path / "checkpoints" / "step-000000006.pt") as place:
        done = export(place, "torch", tmp_path / "six", weights="averaged")
    model = load_model(run, at=6, weights="averaged")
    assert done.digest == weights_digest(torch.load(done.file)) == weights_digest(model.state_dict())
    make_bundle(run.path, tmp_path / "handed.zip")
    ended = ddp("export", tmp_path / "handed.zip", "--to", "safetensors", "--out", tmp_path / "bundled")
    assert ended.code == 0, ended.errors
    with safe_open(tmp_path / "bundled" / "model.safetensors", "pt") as content:
        assert content.metadata()["run"] == "handed"
        assert content.metadata()["digest"] in ended.output


def test_nothing_is_written_over_and_a_failure_leaves_nothing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "export").mkdir()
    with refusing():
        written(run, "torch", tmp_path)
    with refusing():
        written(run, "torch", run.path)
    (tmp_path / "export").rmdir()
    monkeypatch.setattr(torch, "save", _full)
    with refusing():
        written(run, "torch", tmp_path)
    assert [*tmp_path.iterdir()] == []


def _full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_weights_that_a_format_has_no_type_for_are_refused_by_name(tmp_path: Path) -> None:
    state = nn.Linear(2, 2).to(torch.complex128).state_dict()
    with pytest.raises(UserError, match=r"--to safetensors cannot hold these weights \(.*; --to torch holds any"):
        save(tmp_path / "file", "safetensors", state, {})
    save(tmp_path / "file", "torch", state, {})


def test_the_command_knows_every_format(run: Run) -> None:
    ended = ddp("export", run.path, "--to", "pickle")
    assert ended.code == 2
    assert all(f"'{name}'" in ended.errors for name in FILES)
