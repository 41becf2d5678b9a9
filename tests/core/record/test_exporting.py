"""`ddp export`: what each format writes, loaded again by somebody else's loader, with the outputs of the model."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from ddp_core import Run, load_model
from ddp_core.base import extras
from ddp_core.base.digests import weights_digest
from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.torchvision_import import import_torchvision
from ddp_core.cli.bundle import make_bundle
from ddp_core.record.exporting import FORMATS, export, formats
from ddp_core.record.places import place_named
from tests.support.commands import ROOT, ddp, train, trained

FILES = ROOT / "tests" / "support" / "experiment_files"
IMAGES = torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    output = tmp_path_factory.mktemp("out")
    train(output, FILES / "averaged.py", "--checkpoint-every", "3", "--keep-every", "3")
    return Run(trained(output)[0].path)


def written(run: Run, to: str, folder: Path, **choices: Any) -> Path:
    with place_named(run) as place:
        return export(place, to, folder / "export", weights="trained", **choices).folder


def plain() -> nn.Module:
    """The model as a user has it elsewhere, with fresh weights, not compiled."""
    namespace: dict[str, Any] = {"__name__": "elsewhere"}
    exec((FILES / "averaged.py").read_text(), namespace)
    model: nn.Module = namespace["Net"](16)
    return model.eval()


@torch.no_grad()
def outputs(model: nn.Module) -> Tensor:
    result: Tensor = model(IMAGES)
    return result


def same_outputs(run: Run, model: nn.Module) -> bool:
    return torch.equal(outputs(model), outputs(load_model(run, weights="trained")))


def test_safetensors_with_every_name_of_tied_weights(run: Run, tmp_path: Path) -> None:
    folder = written(run, "safetensors", tmp_path)
    model = plain()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    assert same_outputs(run, model)
    with safe_open(folder / "model.safetensors", "pt") as file:
        metadata = file.metadata()
    assert metadata["format"] == "pt"
    assert metadata["digest"] == weights_digest(model.state_dict())
    assert (metadata["experiment"], metadata["step"], metadata["weights"]) == ("averaged", "10", "trained")
    assert not [path for path in tmp_path.iterdir() if path != folder]


def test_above_a_size_there_are_shards_and_an_index(run: Run, tmp_path: Path) -> None:
    folder = written(run, "safetensors", tmp_path, shard_bytes=2000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len({*index["weight_map"].values()}) > 2
    state = {}
    for name, file in index["weight_map"].items():
        state[name] = load_file(folder / file)[name]
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in state.values())
    model = plain()
    model.load_state_dict(state)
    assert same_outputs(run, model)


def test_the_torch_format_keeps_tied_weights_tied(run: Run, tmp_path: Path) -> None:
    state = torch.load(written(run, "torch", tmp_path) / "model.pt", weights_only=True)
    assert state["middle.weight"].data_ptr() == state["again.weight"].data_ptr()
    model = plain()
    model.load_state_dict(state)
    assert same_outputs(run, model)


def test_torch_distributed_checkpoint(run: Run, tmp_path: Path) -> None:
    model = plain()
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=written(run, "dcp", tmp_path), no_dist=True)
    model.load_state_dict(state["model"])
    assert same_outputs(run, model)


@pytest.mark.slow
def test_torch_export_takes_any_batch(run: Run, tmp_path: Path) -> None:
    program = torch.export.load(written(run, "torch-export", tmp_path) / "model.pt2")
    assert torch.allclose(outputs(program.module()), outputs(load_model(run, weights="trained")), atol=1e-6)
    model = plain()
    model.load_state_dict(program.module().state_dict(), strict=False)
    assert same_outputs(run, model)


@pytest.mark.extras("onnx", "onnxscript", "onnxruntime")
def test_onnx_takes_any_batch(run: Run, tmp_path: Path) -> None:
    import onnxruntime

    folder = written(run, "onnx", tmp_path)
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    (name,) = (each.name for each in session.get_inputs())
    (found,) = session.run(None, {name: IMAGES.numpy()})
    np.testing.assert_allclose(found, outputs(load_model(run, weights="trained")).numpy(), atol=1e-5)
    assert session.get_modelmeta().custom_metadata_map["experiment"] == "averaged"


@pytest.mark.extras("transformers")
def test_from_pretrained_loads_a_transformers_model(tmp_path: Path) -> None:
    import_torchvision()
    from transformers import AutoModelForCausalLM

    train(tmp_path / "out", FILES / "tiny_language_model.py")
    run = Run(trained(tmp_path / "out")[0].path)
    folder = written(run, "hf", tmp_path)
    assert "from transformers import GPT2LMHeadModel" in (folder / "README.md").read_text()
    model, ours = AutoModelForCausalLM.from_pretrained(folder), load_model(run)
    tokens = torch.arange(8).view(1, 8)
    with torch.no_grad():
        assert torch.equal(model.eval()(tokens).logits.transpose(1, 2), ours(tokens))
    assert verified(folder, model.state_dict())
    shutil.rmtree(folder)
    sharded = AutoModelForCausalLM.from_pretrained(written(run, "hf", tmp_path, shard_bytes=2000))
    assert weights_digest(sharded.state_dict()) == weights_digest(model.state_dict())


def verified(folder: Path, state: dict[str, Tensor]) -> bool:
    """Whether the card's own code finds the digest that the card names."""
    text = (folder / "README.md").read_text()
    namespace: dict[str, Any] = {}
    exec(re.findall(r"```python\n(import hashlib.*?)```", text, re.DOTALL)[0], namespace)
    return bool(namespace["weights_digest"](state) == re.findall(r"weights: SHA-256 `(\w+)`", text)[0])


def test_the_card_tells_how_to_load_and_verify(run: Run, tmp_path: Path) -> None:
    folder = written(run, "safetensors", tmp_path, shard_bytes=2000)
    text = (folder / "README.md").read_text()
    assert f"| test_accuracy | {run.figures['test_accuracy']:.6g} |" in text
    assert run.record["data_sha256"] in text
    assert f"over other names, is `{run.digest}`" in text
    assert str(tmp_path) not in text
    checked = subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=folder, check=False)
    assert checked.returncode == 0
    model = plain()
    loading = re.findall(r"## Load them\n\n```python\n(.*?)```", text, re.DOTALL)[0]
    exec(loading.replace("Path()", f"Path({str(folder)!r})"), {"model": model})
    assert verified(folder, model.state_dict())
    assert {path.stat().st_mode for path in folder.iterdir()} == {(folder / "README.md").stat().st_mode}


def test_a_checkpoint_and_a_bundle(run: Run, tmp_path: Path) -> None:
    with place_named(run.path / "checkpoints" / "step-000000006.pt") as place:
        done = export(place, "torch", tmp_path / "six", weights="averaged")
    model = load_model(run, at=6, weights="averaged")
    assert (
        done.digest == weights_digest(torch.load(tmp_path / "six" / "model.pt")) == weights_digest(model.state_dict())
    )
    make_bundle(run.path, tmp_path / "handed.zip")
    ended = ddp("export", tmp_path / "handed.zip", "--to", "torch", "--out", tmp_path / "bundled")
    assert ended.code == 0, ended.errors
    assert "of the run `handed`" in (tmp_path / "bundled" / "README.md").read_text()


def test_nothing_is_written_over_and_a_failure_leaves_nothing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "export").mkdir()
    with pytest.raises(UserError, match="exists, and nothing is written over"):
        written(run, "torch", tmp_path)
    with pytest.raises(UserError, match="lies in the run's own directory"):
        written(run, "torch", run.path)
    (tmp_path / "export").rmdir()
    monkeypatch.setattr(torch, "save", _full)
    with pytest.raises(UserError, match=r"no room for .*export") as no:
        written(run, "torch", tmp_path)
    assert no.value.exit_code == ExitCode.RESOURCES
    monkeypatch.undo()
    monkeypatch.setattr(extras, "find_spec", lambda name: name)
    with pytest.raises(UserError, match=r"Net is no transformers\.PreTrainedModel"):
        written(run, "hf", tmp_path)
    assert [*tmp_path.iterdir()] == []


def _full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_what_is_missing_for_a_format_is_named(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"--to onnx needs onnx and onnxscript: pip install 'samebits\[export\]'"):
        written(run, "onnx", tmp_path)


def test_a_graph_that_cannot_be_traced_is_refused_by_name(run: Run) -> None:
    class Asks(nn.Module):
        def forward(self, values: Tensor) -> Tensor:
            return values if values.sum() > 0 else -values

    subject = formats.Subject(Asks(), lambda: torch.ones(2, 3), {}, 1)
    with pytest.raises(UserError, match=r"--to torch-export: torch\.export cannot trace Asks"):
        formats.write("torch-export", subject, Path())


def test_weights_that_a_format_has_no_type_for_are_refused_by_name(tmp_path: Path) -> None:
    model = nn.Linear(2, 2).to(torch.complex128)
    subject = formats.Subject(model, lambda: None, {}, 1000)
    with pytest.raises(UserError, match=r"--to safetensors cannot hold Linear \(.*; --to torch holds the"):
        formats.write("safetensors", subject, tmp_path)
    assert formats.write("torch", subject, tmp_path) == []


def test_the_command_knows_every_format(run: Run) -> None:
    ended = ddp("export", run.path, "--to", "pickle")
    assert ended.code == 2
    assert all(f"'{name}'" in ended.errors for name in FORMATS)
