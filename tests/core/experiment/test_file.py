"""The names in an experiment file: what it may leave to them, and what is asked about a name that nothing uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddp_core.config.experiment import Component, Optimizer
from ddp_core.experiment.building import resolve
from ddp_core.experiment.file import LoadedExperiment, load_experiment, run_file
from tests.support.wording import refusing

HEAD = "from torch import nn\nfrom ddp_core.config.experiment import Component, Experiment, Optimizer\n"
OWN = "def model():\n    return nn.Linear(10, 1)\n\n\ndef data():\n    pass\n\n\n"
SHORTEST = 'experiment = Experiment(name="mine", global_batch_size=8{fields})\n'


def load(folder: Path, text: str, fields: str = "") -> LoadedExperiment:
    path = folder / "mine.py"
    path.write_text(HEAD + text + "\n\n" + SHORTEST.format(fields=fields))
    return load_experiment(str(path))


def test_the_shortest_file_names_nothing(tmp_path: Path) -> None:
    file = load(tmp_path, OWN + "def loss(outputs, targets):\n    pass\n")
    experiment = file.experiment
    assert (experiment.model, experiment.data) == (Component(name="model"), Component(name="data"))
    assert experiment.loss == "loss"
    assert experiment.optimizer == Optimizer()
    assert resolve(file, "loss", experiment.loss) is file.namespace["loss"]
    assert load(tmp_path, OWN).experiment.loss == "cross_entropy"


@pytest.mark.parametrize("kind", ["model", "data"])
@pytest.mark.parametrize("text", ["x = 1\n", "model = nn.Linear(3, 1)\ndata = [1, 2]\n"], ids=["missing", "built"])
def test_a_function_that_is_missing_or_already_called_is_named_with_its_fix(
    kind: Any, text: str, tmp_path: Path
) -> None:
    file = load(tmp_path, text)
    with refusing():
        resolve(file, kind, kind)


@pytest.mark.parametrize(
    "text",
    [
        "def optimiser(model):\n    pass",
        "callback = [1]",
        "def lr_scheduler(optimizer):\n    pass",
        "def collate_fn(samples):\n    pass",
        "def losses(outputs, targets):\n    pass",
        "criterion = nn.MSELoss()",
        "class Callbacks:\n    pass",
        "schedul = lambda optimizer: None",
        "optimizer = Optimizer(lr=0.5)",
        "loss = 'mean_squared_error'",
        "metrics = {}",
        "callbacks = 5",
    ],
)
def test_a_name_or_value_that_nothing_uses_is_asked_about(text: str, tmp_path: Path) -> None:
    with refusing():
        load(tmp_path, OWN + text)


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("def _optimiser(model):\n    pass", ""),
        ("def losses(x):\n    pass\n\n\ndef loss(outputs, targets):\n    return losses(outputs)", ""),
        ("def losses(outputs, targets):\n    pass", ', loss="losses"'),
        ("def optimiser(model):\n    pass", ', optimizer=Component(name="optimiser")'),
        ("def optimiser(model):\n    pass", ", optimizer=Optimizer()"),
        ("class Model(nn.Module):\n    pass", ""),
        ("class Callbacks:\n    pass\n\n\nthing = Callbacks()", ""),
        ("import functools as metric\nfrom functools import partial as criterion", ""),
        ("optimiser = 0.1\nlosses = 'a'", ""),
        ("@print\ndef scheduler(optimizer):\n    pass", ""),
        ("optimizer = Optimizer(lr=0.5)", ", optimizer=optimizer"),
        ("loss = 'mean_squared_error'", ", loss=loss"),
        ("metrics = [1]\nprint(metrics)", ""),
        ("def helper(x):\n    pass\n\n\nclass Net(nn.Module):\n    pass\n\n\nWIDTHS = [1, 2]", ""),
    ],
)
def test_what_has_a_use_or_another_meaning_is_not_asked_about(text: str, fields: str, tmp_path: Path) -> None:
    assert load(tmp_path, OWN + text, fields).experiment.name == "mine"


def test_a_file_that_imports_a_torchvision_of_another_torch_is_run_with_its_operators_declared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []
    monkeypatch.setattr("ddp_core.base.torchvision_import.import_torchvision", lambda: tried.append("declared"))
    monkeypatch.setattr("builtins.tried", tried, raising=False)
    file = tmp_path / "mine.py"
    file.write_text(
        "import builtins\n"
        "builtins.tried.append('run')\n"
        "if len(builtins.tried) == 1:\n"
        "    raise RuntimeError('operator torchvision::nms does not exist')\n"
        "done = True\n"
    )
    assert run_file(file, file.read_text()).done
    assert tried == ["run", "declared", "run"]
