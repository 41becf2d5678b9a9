"""Experiments: validation, JSON round trip, digest, settings from the command line, learning rates."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from ddp_core.base.errors import UserError
from ddp_core.config.experiment import (
    Component,
    Experiment,
    Optimizer,
    Schedule,
    called,
    nearest_multiples,
    setting_names,
)

MINIMAL: dict[str, Any] = {"name": "mine", "model": {"name": "mlp"}, "data": {"name": "digits"}, "global_batch_size": 8}


def experiment(**fields: Any) -> Experiment:
    return Experiment.model_validate(MINIMAL | fields)


OPTIONS = st.dictionaries(
    st.text("abcdefg_", min_size=1, max_size=5),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**53), 2**53)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(),
        lambda inner: st.lists(inner, max_size=3),
        max_leaves=4,
    ),
    max_size=3,
)


@st.composite
def experiments(draw: st.DrawFn) -> Experiment:
    return Experiment(
        name=draw(st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9_.-]{0,8}\Z")),
        seed=draw(st.integers(0, 2**63 - 1)),
        model=Component(name="model", options=draw(OPTIONS)),
        data=Component(name="data", options=draw(OPTIONS)),
        optimizer=Optimizer(lr=draw(st.floats(1e-8, 1e3)), betas=(draw(st.floats(0, 0.999)), 0.5)),
        global_batch_size=draw(st.integers(1, 64)),
        clip_norm=draw(st.none() | st.floats(1e-6, 1e6)),
    )


@settings(deadline=None)
@given(experiments())
def test_json_gives_an_equal_record_with_an_equal_digest_back(original: Experiment) -> None:
    again = Experiment.from_json(json.loads(json.dumps(original.to_json())))
    assert again == original
    assert again.digest() == original.digest()


@pytest.mark.parametrize(
    "change",
    [
        *("model.width=8", "optimizer.lr=0.2", "global_batch_size=16", "epochs=2", "precision=bf16", "precision=tf32"),
        *("memory_format=channels_last", "ddp.bucket_cap_mb=1"),
    ],
)
def test_every_change_gives_another_digest(change: str) -> None:
    original = experiment(model={"name": "small_cnn", "options": {"width": 16}})
    assert original.with_settings([change]).digest() != original.digest()


def test_how_ddp_looks_for_gradients_is_no_part_of_the_experiment() -> None:
    assert experiment().with_settings(["ddp.find_unused_parameters=true"]).digest() == experiment().digest()


def test_fields_that_came_later_leave_the_older_digests_as_they_were() -> None:
    record = experiment().to_json()
    later = ("ema_decay", "memory_format", "numerics", "best")
    older = {name: value for name, value in record.items() if name not in later}
    text = json.dumps(older, sort_keys=True, separators=(",", ":"))
    assert experiment().digest() == hashlib.sha256(text.encode()).hexdigest()


def test_a_function_that_has_no_name_of_its_own_is_not_named_twice() -> None:
    assert (called("loss", "loss"), called("loss", "mine")) == ("loss", "loss mine")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"global_batch_size": 0}, "global_batch_size: "),
        ({"epochs": "ten"}, "epochs: .*, not 'ten'$"),
        ({"seed": -1}, "seed: "),
        ({"seed": 2**63}, "seed: "),
        ({"name": "../elsewhere"}, "name: "),
        ({"optimizer": {"lr": 0}}, "optimizer.lr: "),
        ({"optimizer": {"lr": float("nan")}}, "optimizer.lr: "),
        ({"optimizer": {"name": "lion"}}, "optimizer.name: "),
        ({"epoch": 3}, "epoch: there is no such field; did you mean epochs?"),
        ({"lr": 0.1}, "lr: there is no such field; did you mean optimizer.lr?"),
        ({"optimizer": {"learning_rate": 0.1}}, "optimizer.learning_rate: there is no such field; did you mean lr?"),
        ({"evaluation": {"zzzz": 1}}, "evaluation.zzzz: there is no such field; known: every_epochs, samples_per_b"),
        ({"model": {"nam": "m"}}, "model.nam: there is no such field; did you mean name?"),
    ],
)
def test_a_wrong_field_is_named_in_one_line(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said.replace("?", r"\?")) as raised:
        Experiment.from_json(MINIMAL | fields)
    assert "\n" not in str(raised.value)
    assert raised.value.exit_code == 2


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 64))
def test_a_batch_that_is_no_multiple_names_the_nearest_that_are(size: int, micro_batch: int) -> None:
    if size % micro_batch == 0:
        assert experiment(global_batch_size=size, micro_batch=micro_batch).micro_batches == size // micro_batch
        return
    with pytest.raises(UserError) as raised:
        Experiment.from_json(MINIMAL | {"global_batch_size": size, "micro_batch": micro_batch})
    below, above = nearest_multiples(size, micro_batch)
    assert below < size < above
    assert above - below == micro_batch
    assert all(str(number) in str(raised.value) for number in (below, above) if number)
    for number in (below, above):
        if number:
            experiment(global_batch_size=number, micro_batch=micro_batch)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("optimizer.lr=0.1", 0.1),
        ("optimizer.lr=1", 1.0),
        ("optimizer.betas=[0.5, 0.9]", (0.5, 0.9)),
        ("optimizer.nesterov=true", True),
        ("optimizer.nesterov=False", False),
        ('precision="bf16"', "bf16"),
        ("clip_norm=none", None),
        ("clip_norm=null", None),
        ("max_steps = 7", 7),
        # Options take the type of their present value.
        ("model.options.width=8", 8),
        ("model.options.rate=1", 1.0),
        ("model.options.flag=true", True),
        ("model.options.word=hello", "hello"),
        ("model.options.sizes=[1, 2]", [1, 2]),
        ("model.options.nothing=5", 5),
        ("model.options.width=null", None),
    ],
)
def test_settings_are_typed(setting: str, value: Any) -> None:
    options = {"width": 4, "rate": 0.5, "flag": False, "word": "a", "sizes": [3], "nothing": None}
    original = experiment(clip_norm=1.0, model={"name": "mlp", "options": options})
    found: Any = original.with_settings([setting.replace(".options", "")])
    for part in setting.partition("=")[0].strip().split("."):
        found = found[part] if isinstance(found, dict) else getattr(found, part)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("optimizer.learning_rate=0.1", ["optimizer.learning_rate", "mine"]),
        ("optimzer.lr=0.1", ["did you mean optimizer.lr?"]),
        ("epoch=3", ["did you mean epochs?"]),
        ("model.widht=3", ["did you mean model.width?"]),
        ("zzz=3", ["known:", "epochs"]),
        ("epochs", ["name=value"]),
        ("epochs=three", ["epochs"]),
        ("optimizer.lr=fast", ["optimizer.lr"]),
        ("optimizer=sgd", ["optimizer"]),
        ("model.width=wide", ["model.width", "int"]),
        ("model.width=true", ["model.width", "int"]),
        ("model.width=1.5", ["model.width", "int"]),
        ("global_batch_size=9", ["micro_batch 4", "8", "12"]),
    ],
)
def test_a_wrong_setting_is_one_line_with_the_right_one(setting: str, words: list[str]) -> None:
    original = experiment(model={"name": "mlp", "options": {"width": 4}}, micro_batch=4)
    with pytest.raises(UserError) as raised:
        original.with_settings([setting])
    assert all(word in str(raised.value) for word in words), str(raised.value)
    assert "\n" not in str(raised.value)
    assert raised.value.exit_code == 2


def test_settings_are_checked_together() -> None:
    changed = experiment(micro_batch=4).with_settings(["global_batch_size=18", "micro_batch=6"])
    assert changed.micro_batches == 3


def test_every_name_that_is_known_can_be_set() -> None:
    original = experiment(model={"name": "mlp", "options": {"width": 4}})
    record = original.to_json()
    for name in setting_names(original):
        section, _, key = name.partition(".")
        value = record[section] if not key else record[section].get(key, record[section].get("options", {}).get(key))
        assert original.with_settings([f"{name}={json.dumps(value)}"]) == original


def rates(schedule: Schedule, steps: int, steps_per_epoch: int = 5, **fields: Any) -> list[float]:
    given = experiment(epochs=-(-steps // steps_per_epoch), **fields)
    total = given.total_steps(steps_per_epoch)
    return [schedule.rate(0.3, step, steps_per_epoch, total) for step in range(steps)]


def in_a_row(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    warm_up = lr_scheduler.LinearLR(optimizer, start_factor=1 / 8, total_iters=7)
    return lr_scheduler.SequentialLR(optimizer, [warm_up, lr_scheduler.CosineAnnealingLR(optimizer, 32)], [8])


@pytest.mark.parametrize(
    ("schedule", "make"),
    [
        (Schedule(name="step", step_epochs=2, gamma=0.5), lambda given: lr_scheduler.StepLR(given, 10, 0.5)),
        (Schedule(name="cosine"), lambda given: lr_scheduler.CosineAnnealingLR(given, 40)),
        (Schedule(name="cosine", final_factor=0.1), lambda given: lr_scheduler.CosineAnnealingLR(given, 40, 0.03)),
        (Schedule(name="cosine", warmup_steps=8), in_a_row),
    ],
)
def test_rates_are_those_of_torchs_schedules(schedule: Schedule, make: Any) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    scheduler, expected = make(optimizer), []
    for _ in range(40):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates(schedule, 40) == pytest.approx(expected, rel=1e-9)


def test_max_steps_shortens_the_cosine() -> None:
    assert rates(Schedule(name="cosine"), 20, max_steps=20) == pytest.approx(rates(Schedule(name="cosine"), 20))
    assert experiment(epochs=3, max_steps=7).total_steps(5) == 7
    assert experiment(epochs=1, max_steps=7).total_steps(5) == 5


def test_the_rate_grows_linearly_with_the_global_batch() -> None:
    for size in (64, 256, 8192):
        assert Optimizer(lr=0.1, reference_batch=256).base_rate(size) == pytest.approx(0.1 * size / 256)
    assert Optimizer(lr=0.1).base_rate(64) == 0.1
