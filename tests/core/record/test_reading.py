"""A run read from Python: also while it runs, after it failed, and when its code has changed since."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ddp_core.record.reading import Run
from tests.support.commands import train, trained
from tests.support.own_project import edit, write_project
from tests.support.records import a_record
from tests.support.wording import refusing


def written(folder: Path, **fields: Any) -> Path:
    (folder / "run.json").write_text(json.dumps(a_record(**fields)))
    return folder


def test_a_run_is_followed_while_it_runs(tmp_path: Path) -> None:
    run = Run(written(tmp_path))
    assert (run.status, run.digest, run.figures, run.metrics, run.promise_broken) == ("running", None, {}, [], None)
    (tmp_path / "metrics.jsonl").write_text('{"kind": "step", "step": 1, "loss": 0.5}\n{"kind": "st')
    assert run.metrics == [{"kind": "step", "step": 1, "loss": 0.5}]
    with refusing():
        run.load_model()
    written(tmp_path, status="failed", exit_code=5, message="the loss is NaN")
    assert (run.status, run.record["message"]) == ("failed", "the loss is NaN")
    assert repr(run) == f"Run({str(tmp_path)!r}: failed)"
    with refusing():
        run.load_model()
    broken = {"step": 3, "what": "other bits", "attempt": 0}
    written(tmp_path, promise_broken=broken)
    assert run.promise_broken == broken
    assert repr(run).endswith(", promise broken in step 3)")


def test_a_relative_path_survives_a_change_of_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one").mkdir()
    written(tmp_path / "one")
    monkeypatch.chdir(tmp_path)
    run = Run("one")
    monkeypatch.chdir("/")
    assert run.status == "running"
    assert Path(run) == tmp_path / "one"


def test_the_model_is_that_of_the_kept_code(tmp_path: Path) -> None:
    file = write_project(tmp_path / "project")
    record = train(tmp_path / "out", file)
    run = Run(trained(tmp_path / "out")[0].path)
    edit(file.parent / "nets" / "big.py", "nn.Sigmoid()", "nn.Tanh()")
    others = {"nets": object(), "beside": object()}
    sys.modules.update(others)  # type: ignore[arg-type]
    state, path, drawn = torch.get_rng_state(), list(sys.path), random.getstate()
    try:
        model = run.load_model()
        assert {name: sys.modules[name] for name in others} == others
    finally:
        for name in others:
            del sys.modules[name]
    assert "nets.big" not in sys.modules
    assert (list(sys.path), random.getstate()) == (path, drawn)
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.training
    assert isinstance(model, torch.nn.Sequential)
    assert isinstance(model[1], torch.nn.Sigmoid)
    weights = load_file(run.path / "model.safetensors")
    inputs = torch.randn(3, 10)
    hidden = torch.sigmoid(inputs @ weights["0.weight"].T + weights["0.bias"])
    assert torch.allclose(model(inputs), hidden @ weights["2.weight"].T + weights["2.bias"])
    assert run.digest == record["weights_sha256"]

    save_file({name: tensor + 1 for name, tensor in weights.items()}, run.path / "model.safetensors")
    with refusing():
        run.load_model()
    edit(run.path / "source" / "nets" / "big.py", "nn.Sigmoid()", "nn.Tanh()")
    with refusing():
        run.load_model()
