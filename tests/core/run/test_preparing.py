"""What a new worker of a live recovery does before it joins the others."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ddp_core.config.layout import Layout
from ddp_core.config.options import Options
from ddp_core.experiment.file import load_experiment
from ddp_core.experiment.request import Request
from ddp_core.run.beginning import Prepared

FILE = """
import torch
from ddp_core.config.experiment import Component, Experiment
from ddp_core.data.splits import InMemory, Splits

def data():
    samples = InMemory(torch.ones(8, 2), torch.zeros(8, dtype=torch.int64))
    return Splits(samples, samples, classes=2)

def model():
    return torch.nn.Linear(2, 2)

def metrics(outputs, targets):
    import asked_late
    {body}

experiment = Experiment(
    name="mine", model=Component(name="model"), data=Component(name="data"), global_batch_size=4, epochs=1
)
"""


@pytest.mark.parametrize(("body", "is_done"), [('return {"right": 1.0}', True), ("raise OSError", False)])
def test_it_tries_the_metrics_and_looks_for_the_code_unless_they_fail_without_a_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, is_done: bool
) -> None:
    (tmp_path / "mine.py").write_text(FILE.format(body=body))
    (tmp_path / "asked_late.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "asked_late", raising=False)
    prepared = Prepared()
    prepared.prepare(Request(load_experiment(str(tmp_path / "mine.py")), Layout(device="cpu"), Options()))
    assert prepared.splits is not None
    assert prepared.digest is not None
    assert prepared.usage is not None
    assert (prepared.source is not None) == is_done
    assert prepared.source is None or set(prepared.source.texts) == {"mine.py", "asked_late.py"}
