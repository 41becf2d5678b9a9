"""What an experiment file brings along: optimizer, schedule, metrics and callbacks, and each way to get them wrong."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

from ddp_core.base.errors import UserError
from ddp_core.cli.prepare import load_with_settings
from ddp_core.config.experiment import Component, Experiment, Optimizer, Schedule, setting_names
from ddp_core.experiment.building import callbacks_of, optimizer_of, schedule_of
from ddp_core.experiment.file import LoadedExperiment
from ddp_core.experiment.request import build_parts
from ddp_core.observe.step import StepObserver
from tests.support.wording import refusing

HEAD = """
import torch
from torch import nn
from torch.optim import lr_scheduler
from ddp_core.observe.callback import Callback
from ddp_core.observe.step import StepObserver
from ddp_core.config.experiment import Component, Experiment, Optimizer, Schedule


def model():
    net = nn.Sequential(nn.Linear(10, 4), nn.Linear(4, 1))
    net[0].bias.requires_grad_(False)
    return net


"""
TAIL = (
    '\n\nexperiment = Experiment(name="mine", data=Component(name="toy_data"), loss="mean_squared_error", '
    "global_batch_size=8, micro_batch=4, epochs=3{fields})\n"
)


def loaded(folder: Path, text: str, *settings: str, fields: str = "") -> LoadedExperiment:
    path = folder / "mine.py"
    path.write_text(HEAD + text + TAIL.format(fields=fields))
    return load_with_settings(str(path), settings)


def test_a_file_without_hooks_has_the_built_in_ones(tmp_path: Path) -> None:
    parts = build_parts(loaded(tmp_path, "", fields=", optimizer=Optimizer(lr=0.1, reference_batch=2)"), Path("data"))
    assert type(parts.optimizer) is torch.optim.SGD
    assert parts.optimizer.param_groups[0]["lr"] == 0.1 * 8 / 2
    assert parts.schedule is parts.metrics is None
    assert list(parts.callbacks) == list(parts.observers) == []


def test_an_optimizer_of_the_files_own_is_used_and_its_options_can_be_set(tmp_path: Path) -> None:
    text = (
        "def optimizer(model, lr: float = 0.01, slow: float = 0.1):\n"
        '    return torch.optim.Adagrad([{"params": model[0].weight}, {"params": model[1].parameters(), '
        '"lr": slow * lr}], lr=lr)\n'
    )
    file = loaded(tmp_path, text, "optimizer.lr=0.5")
    assert file.experiment.optimizer == Component(name="optimizer", options={"lr": 0.5, "slow": 0.1})
    assert {"optimizer.lr", "optimizer.slow", "optimizer.name"} <= set(setting_names(file.experiment))
    again = Experiment.from_json(file.experiment.to_json())
    assert again == file.experiment
    assert again.digest() == file.experiment.digest()
    parts = build_parts(file, Path("data"))
    assert type(parts.optimizer) is torch.optim.Adagrad
    assert [group["lr"] for group in parts.optimizer.param_groups] == [0.5, 0.05]
    with refusing():
        loaded(tmp_path, text, "optimizer.learning_rate=1")


@pytest.mark.parametrize("schedule", ["", 'Schedule(name="cosine")', "Schedule(warmup_steps=2)"])
def test_an_optimizer_without_a_rate_needs_a_schedule_that_changes_none(tmp_path: Path, schedule: str) -> None:
    text = (
        "class Own(torch.optim.Optimizer):\n    def step(self, closure=None):\n        pass\n\n\n"
        "def optimizer(model):\n    return Own(model.parameters(), {})\n"
    )
    file = loaded(tmp_path, text, fields=f", schedule={schedule}" if schedule else "")
    with refusing() if schedule else nullcontext():
        parts = build_parts(file, Path("data"))
        assert [group["lr"] for group in parts.optimizer.param_groups] == [1.0]


def test_any_function_of_the_file_can_be_named(tmp_path: Path) -> None:
    text = (
        "def lamb(model, lr):\n    return torch.optim.RAdam(model.parameters(), lr=lr)\n\n\n"
        "def wave(optimizer, steps_per_epoch, total_steps, low=0.5):\n"
        "    assert (steps_per_epoch, total_steps) == (4, 12)\n"
        "    return lr_scheduler.CyclicLR(optimizer, low, 1.0, cycle_momentum=False)\n"
    )
    fields = ', optimizer=Component(name="lamb", options={"lr": 0.25}), schedule=Component(name="wave")'
    file = loaded(tmp_path, text, fields=fields)
    parts = build_parts(file, Path("data"))
    assert type(parts.optimizer) is torch.optim.RAdam
    assert isinstance(parts.schedule, torch.optim.lr_scheduler.CyclicLR)
    assert file.experiment.schedule == Component(name="wave", options={"low": 0.5})
    renamed = loaded(
        tmp_path, text + "\n\ndef other(model, decay=2.0):\n    pass\n", "optimizer.name=other", fields=fields
    )
    assert renamed.experiment.optimizer == Component(name="other", options={"decay": 2.0})


def test_what_the_experiment_sets_comes_before_the_files_functions(tmp_path: Path) -> None:
    names = {"optimizer": "model", "schedule": "optimizer", "loss": "outputs, targets"}
    text = "\n\n".join(f"def {name}({parameters}):\n    pass\n" for name, parameters in names.items())
    file = loaded(tmp_path, text, fields=', optimizer=Optimizer(name="adam"), schedule=Schedule(name="cosine")')
    assert file.experiment.optimizer == Optimizer(name="adam")
    assert file.experiment.schedule == Schedule(name="cosine")
    assert file.experiment.loss == "mean_squared_error"


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@pytest.mark.parametrize(
    "text",
    [
        "def optimizer(model):\n    return 7",
        "def optimizer(net):\n    pass",
        "optimizer = torch.optim.SGD",
        "def optimizer(model, lr):\n    pass",
        "def optimizer(model):\n    return torch.optim.LBFGS(model.parameters())",
        "def optimizer(model):\n    return torch.optim.SGD(model[1].parameters(), lr=1)",
        "def optimizer(model):\n    return torch.optim.SGD(model[0].parameters(), lr=1)",
        "def optimizer(model):\n    return torch.optim.SGD([*model.parameters(), torch.zeros(3, 2)], lr=1)",
        "def optimizer(model):\n    return torch.optim.SGD([*model.parameters(), model[1].bias], lr=1)",
        "def optimizer(model):\n    return torch.optim.SGD([dict(params=model.parameters(), f=len)], lr=1)",
        "def optimizer(model):\n    return 1 / 0",
        "def schedule(optimizer):\n    return 7",
        "def schedule(opt):\n    pass",
        "def schedule(optimizer):\n    return lr_scheduler.ReduceLROnPlateau(optimizer)",
        "def schedule(optimizer):\n    return lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)], lr=1), 3)",
        "class Own(lr_scheduler.LRScheduler):\n    f = None\n\n"
        "    def get_lr(self):\n        self.f = len\n        return [1.0]\n\n\n"
        "def schedule(optimizer):\n    return Own(optimizer)",
        "callbacks = [7]",
        "callbacks = [Callback]",
        "def callbacks():\n    pass",
        "def callbacks():\n    return [Callback(), open('nowhere')]",
        "class C(Callback):\n    ranks = 'some'\n\n\ncallbacks = [C()]",
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(text: str, tmp_path: Path) -> None:
    with refusing():
        build_parts(loaded(tmp_path, text), Path("data"))


@pytest.mark.parametrize(
    "text",
    [
        "def optimizer(model):\n    return torch.optim.SGD([dict(params=model[1].parameters()),"
        " dict(params=model.parameters())], lr=1)",
        "def schedule(optimizer):\n    return lr_scheduler.LinearLR(optimizer, -1)",
    ],
    ids=["optimizer", "schedule"],
)
def test_what_torch_refuses_is_told_with_the_line_of_the_file(text: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"mine\.py:\d+: (optimizer|schedule) raised ValueError: [^\n]+$"):
        build_parts(loaded(tmp_path, text), Path("data"))


@pytest.mark.parametrize("kind", ["optimizer", "schedule"])
def test_an_unknown_function_is_refused_with_the_way_out(tmp_path: Path, kind: str) -> None:
    with refusing():
        build_parts(loaded(tmp_path, "", fields=f', {kind}=Component(name="lamb")'), Path("data"))


def test_callbacks_and_observers_are_told_apart_and_modules_are_left_alone(tmp_path: Path) -> None:
    text = "class Sees(StepObserver):\n    pass\n\n\ndef callbacks():\n    return (Sees(), Callback())\n"
    callbacks, observers = callbacks_of(loaded(tmp_path, text))
    assert [type(each).__name__ for each in callbacks] == ["Callback"]
    assert len(observers) == 1
    assert isinstance(observers[0], StepObserver)
    modules = loaded(tmp_path, "import json as metrics\nimport json as callbacks\nimport json as schedule\n")
    assert build_parts(modules, Path("data")).metrics is None
    assert callbacks_of(modules) == ([], [])
    assert modules.experiment.schedule == Schedule()


def test_the_steps_of_a_schedule_are_those_of_the_run(tmp_path: Path) -> None:
    text = (
        "def schedule(optimizer, total_steps):\n"
        "    return lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=total_steps, cycle_momentum=False)\n"
    )
    file = loaded(tmp_path, text)
    optimizer = optimizer_of(file, nn.Linear(2, 1))
    schedule = schedule_of(file, optimizer, samples=33)
    assert isinstance(schedule, torch.optim.lr_scheduler.OneCycleLR)
    assert schedule.total_steps == 12
    short = load_with_settings(str(file.path), ["max_steps=5", "last_batch=keep"])
    found = schedule_of(short, optimizer, samples=33)
    assert isinstance(found, torch.optim.lr_scheduler.OneCycleLR)
    assert found.total_steps == 5
