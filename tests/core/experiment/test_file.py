"""The names in an experiment file: what it may leave to them, and what is asked about a name that nothing uses."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_core.base.errors import ExitCode, UserError
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


@pytest.mark.parametrize(("kind", "signature"), [("model", "def model(): …"), ("data", "def data(): …")])
def test_a_missing_function_is_named_with_its_fix(kind: str, signature: str, tmp_path: Path) -> None:
    file = load(tmp_path, "x = 1\n")
    with refusing() as failure:
        resolve(file, kind, kind)  # type: ignore[arg-type]
    assert signature in str(failure.value)
    assert {"model": "small_cnn", "data": "digits"}[kind] in str(failure.value)


def test_what_is_already_built_is_refused_with_its_fix(tmp_path: Path) -> None:
    file = load(tmp_path, "model = nn.Linear(3, 1)\ndata = [1, 2]\n")
    for kind, found in (("model", "a Linear"), ("data", "a list")):
        with refusing() as failure:
            resolve(file, kind, kind)  # type: ignore[arg-type]
        assert found in str(failure.value)
        assert f"def {kind}(): …" in str(failure.value)


@pytest.mark.parametrize(
    ("text", "name", "meant"),
    [
        ("def optimiser(model):\n    pass", "optimiser", "optimizer"),
        ("def metric(outputs, targets):\n    pass", "metric", "metrics"),
        ("callback = [1]", "callback", "callbacks"),
        ("def scheduler(optimizer):\n    pass", "scheduler", "schedule"),
        ("def lr_scheduler(optimizer):\n    pass", "lr_scheduler", "schedule"),
        ("def collate_fn(samples):\n    pass", "collate_fn", "collate"),
        ("def losses(outputs, targets):\n    pass", "losses", "loss"),
        ("criterion = nn.MSELoss()", "criterion", "loss"),
        ("class Callbacks:\n    pass", "Callbacks", "callbacks"),
        ("schedul = lambda optimizer: None", "schedul", "schedule"),
    ],
)
def test_a_name_that_nothing_uses_is_asked_about(text: str, name: str, meant: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as failure:
        load(tmp_path, OWN + text)
    assert failure.value.exit_code == ExitCode.BAD_INPUT
    assert str(failure.value).endswith(f"mine.py defines `{name}`, which nothing uses; did you mean `{meant}`?")


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
    load(tmp_path, OWN + text, fields)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("optimizer = Optimizer(lr=0.5)", ["`optimizer` as a Optimizer", "`Experiment(optimizer=optimizer)`"]),
        ("loss = 'mean_squared_error'", ["`loss` as a str", "`Experiment(loss=loss)`", "def loss(outputs, targets)"]),
        ("metrics = {}", ["`metrics` as a dict", "def metrics(outputs, targets): …"]),
        ("callbacks = 5", ["`callbacks` as a int"]),
    ],
)
def test_a_value_with_a_functions_name_is_not_left_unused(text: str, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(UserError) as failure:
        load(tmp_path, OWN + text)
    assert all(word in str(failure.value) for word in [*words, "which nothing uses"]), str(failure.value)


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
