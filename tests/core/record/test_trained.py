"""The trained model of a run, a checkpoint or a bundle: which weights, that they are the run's own, and as a file.

Tests record/bundles.py, too.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from ddp_core import Run, load_model
from ddp_core.base.digests import same_bits, weights_digest
from ddp_core.base.errors import UserError
from ddp_core.base.torch_internals import plain_name
from ddp_core.checkpoint import find_checkpoints, load
from ddp_core.cli.bundle import make_bundle
from ddp_core.record.bundles import place_named
from ddp_core.record.trained import States, export, save
from tests.support.commands import ROOT, ddp, train, trained
from tests.support.wording import refusing

AVERAGED = ROOT / "tests" / "core" / "record" / "experiment_files" / "averaged.py"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    output = tmp_path_factory.mktemp("out")
    train(output, AVERAGED, "--checkpoint-every", "3", "--keep-every", "3")
    return Run(trained(output)[0].path)


@pytest.fixture
def copied(run: Run, tmp_path: Path) -> Run:
    return Run(shutil.copytree(run.path, tmp_path / "copy"))


def same(model: nn.Module, file: Path) -> bool:
    weights = {plain_name(name): tensor for name, tensor in load_file(file).items()}
    state = model.state_dict()
    return all(same_bits(state[name], weights[name]) for name in weights) and state.keys() - weights.keys() < {
        "middle.weight",
        "again.weight",
    }


@pytest.mark.full
def test_the_model_is_the_plain_one_of_a_compiled_one_and_its_weights_stay_tied(run: Run) -> None:
    model = load_model(run, weights="trained")
    assert type(model).__name__ == "Net"
    assert not model.training
    assert model.again.weight is model.middle.weight
    assert same(model, run.path / "model.safetensors")
    assert same(run.load_model(weights="averaged"), run.path / "model_ema.safetensors")


def test_a_checkpoint_of_a_step_and_the_best_one(run: Run) -> None:
    (checkpoint,) = (each for each in find_checkpoints(run.path / "checkpoints") if each.step == 6)
    state = {plain_name(name): value for name, value in load(checkpoint)["model"].items()}
    for place, at in ((run, 6), (checkpoint.path, "final"), (checkpoint.manifest, "final")):
        assert weights_digest(load_model(place, at=at, weights="trained").state_dict()) == weights_digest(state)  # type: ignore[arg-type]
    assert same(load_model(run, at="newest", weights="trained"), run.path / "model.safetensors")
    assert same(load_model(run, at="best", weights="trained"), run.path / "model.safetensors")
    with refusing():
        load_model(run, at=4)
    with refusing():
        load_model(checkpoint.path, at=3)


def test_a_bundle_gives_the_same_model(run: Run, tmp_path: Path) -> None:
    make_bundle(run.path, tmp_path / "run.zip")
    assert same(load_model(tmp_path / "run.zip", weights="averaged"), run.path / "model_ema.safetensors")
    with (tmp_path / "run.zip").open("r+b") as file:
        file.seek(1500)
        file.write(b"X")
    with refusing():
        load_model(tmp_path / "run.zip")


def test_which_weights_are_better_is_chosen_by_the_evaluation_and_said(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = run.figures
    kind, better = ("trained", "") if figures["test_accuracy"] > figures["ema_test_accuracy"] else ("averaged", "_ema")
    assert same(load_model(run), run.path / f"model{better}.safetensors")
    assert f"{kind} weights of step 10: test_accuracy " in capsys.readouterr().err
    both = States({"trained": {}, "averaged": {}}, {"test_loss": 2.0, "ema_test_loss": 1.0})
    assert both.choose("auto", "here")[0] == "averaged"
    assert States(both.by_kind, {}).choose("auto", "here")[0] == "averaged"
    alone = States({"trained": {}}, {})
    assert alone.choose("auto", "here") == ("trained", None)
    with refusing():
        alone.choose("averaged", "here")


def test_what_is_no_run_and_what_was_changed_is_refused(copied: Run, tmp_path: Path) -> None:
    with refusing():
        load_model(tmp_path / "nothing")
    checkpoint = find_checkpoints(copied.path / "checkpoints")[0]
    shutil.copytree(checkpoint.directory, tmp_path / "alone" / "checkpoints")
    with refusing():
        load_model(tmp_path / "alone" / "checkpoints" / checkpoint.file)
    text = copied.path / "metrics.jsonl"
    text.write_text(text.read_text().replace(str(copied.digest), "0" * 64))
    with refusing():
        load_model(checkpoint.path)
    file = copied.path / "model_ema.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(file).items()}, file)
    with refusing():
        load_model(copied)
    with checkpoint.path.open("r+b") as data:
        data.seek(900)
        data.write(b"X")
    with refusing():
        load_model(checkpoint.path)
    torch.save({}, tmp_path / "alone" / "weights.pt")
    with refusing():
        load_model(tmp_path / "alone" / "weights.pt")


def written(run: Run, to: str, folder: Path) -> Path:
    with place_named(run) as place:
        return export(place, to, folder / "export", weights="trained")


def plain() -> nn.Module:
    """The model as a user has it elsewhere, with fresh weights, not compiled."""
    namespace: dict[str, Any] = {"__name__": "elsewhere"}
    exec(AVERAGED.read_text(), namespace)
    model: nn.Module = namespace["Net"](16)
    return model.eval()


@pytest.mark.full
def test_safetensors_with_every_name_of_tied_weights(run: Run, tmp_path: Path) -> None:
    file = written(run, "safetensors", tmp_path)
    assert file == tmp_path / "export" / "model.safetensors"
    model = plain()
    model.load_state_dict(load_file(file))
    assert weights_digest(model.state_dict()) == weights_digest(load_model(run, weights="trained").state_dict())
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
    plain().load_state_dict(state)
    assert weights_digest(state) == weights_digest(load_model(run, weights="trained").state_dict())


def test_a_checkpoint_and_a_bundle(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with place_named(run.path / "checkpoints" / "step-000000006.pt") as place:
        file = export(place, "torch", tmp_path / "six", weights="averaged")
    digest = weights_digest(load_model(run, at=6, weights="averaged").state_dict())
    assert digest == weights_digest(torch.load(file))
    assert capsys.readouterr().out.endswith(f"bytes\nweights sha256 {digest}\n")
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
