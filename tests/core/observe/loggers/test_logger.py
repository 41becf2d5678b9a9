"""A logger works beside the training: it is told everything in turn, and its faults cost one warning."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from ddp_core.base import extras
from ddp_core.base.errors import UserError
from ddp_core.distributed.stop import Stopped
from ddp_core.observe.loggers import logger as logger_module
from ddp_core.observe.loggers.logged import Ending, Logger, loggable
from ddp_core.observe.loggers.logger import BackgroundLogger, check_loggers
from ddp_core.observe.metrics import MetricsWriter, read_metrics
from tests.support.processes import HANG


class Recording:
    """A logger that remembers what it was told; `at` is called before each call."""

    def __init__(self, at: Callable[[str], None] = lambda moment: None) -> None:
        self.told: list[tuple[object, ...]] = []
        self._at = at

    def record(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        self._at("record")
        self.told.append((kind, step, dict(values)))

    def finish(self, figures: Mapping[str, float], weights_sha256: str) -> None:
        self._at("finish")
        self.told.append(("finish", dict(figures), weights_sha256))

    def close(self, ending: Ending) -> None:
        self._at("close")
        self.told.append(("close", ending))


def raising(moment: str) -> Callable[[str], None]:
    def at(now: str) -> None:
        if now == moment:
            raise ConnectionError("no route\nto the server")

    return at


def test_a_logger_is_told_numbers_result_and_ending_in_turn(tmp_path: Path) -> None:
    logger, warnings = Recording(), list[str]()
    with MetricsWriter(tmp_path / "m", [BackgroundLogger("it", lambda: logger, warnings.append)]) as metrics:
        metrics.write("step", step=3, epoch=1, loss=0.5, lr=0.1)
        metrics.write("evaluation", step=3, epoch=1, test_loss=0.25, test_accuracy=None)
        metrics.finish({"test_loss": 0.25, "steps": 3, "time_split": {"forward": 1.0}}, "abc")
    assert logger.told == [
        ("step", 3, {"loss": 0.5, "lr": 0.1}),
        ("evaluation", 3, {"test_loss": 0.25}),
        ("finish", {"test_loss": 0.25, "steps": 3}, "abc"),
        ("close", "completed"),
    ]
    assert warnings == []


@pytest.mark.parametrize(("error", "ending"), [(Stopped("asked", 3), "stopped"), (ValueError("a bug"), "failed")])
def test_a_logger_is_told_how_the_run_ended(tmp_path: Path, error: Exception, ending: str) -> None:
    logger = Recording()
    with (
        pytest.raises(type(error)),
        MetricsWriter(tmp_path / "m", [BackgroundLogger("it", lambda: logger, pytest.fail)]),
    ):
        raise error
    assert logger.told == [("close", ending)]


@pytest.mark.parametrize("moment", ["make", "record", "finish", "close"])
def test_a_logger_that_fails_is_left_out_with_one_warning(tmp_path: Path, moment: str) -> None:
    other, warnings = Recording(), list[str]()

    def make() -> Logger:
        raising("make")(moment)
        return Recording(raising(moment))

    loggers = [
        BackgroundLogger("broken", make, warnings.append),
        BackgroundLogger("other", lambda: other, warnings.append),
    ]
    with MetricsWriter(tmp_path / "m", loggers) as metrics:
        for step in range(1, 50):
            metrics.write("step", step=step, loss=1.0)
        metrics.finish({"test_loss": 0.25}, "abc")
    assert warnings == [
        "broken is left out from here on: ConnectionError: no route to the server; metrics.jsonl has everything"
    ]
    assert len(other.told) == 51
    assert len(read_metrics(tmp_path / "m", "step")) == 49


def test_a_logger_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logger_module, "_WAITING_RECORDS", 5)
    free, warnings = threading.Event(), list[str]()

    def wait(moment: str) -> None:
        assert free.wait(HANG)

    slow = Recording(wait)
    with MetricsWriter(tmp_path / "m", [BackgroundLogger("slow", lambda: slow, warnings.append)]) as metrics:
        for step in range(1, 50):
            metrics.write("step", step=step, loss=1.0)
    assert warnings == ["slow is left out from here on: 5 records wait for it; metrics.jsonl has everything"]

    late = BackgroundLogger("late", lambda: Recording(wait), warnings.append, patience=0.01)
    late.close("completed")
    assert warnings[1:] == [
        "late is left out from here on: it has not ended within 0.01 s; metrics.jsonl has everything"
    ]
    free.set()


def test_settings_are_flat_and_have_no_gaps() -> None:
    nested = {"seed": 3, "model": {"name": "mlp", "options": {"widths": [1, 2], "bias": True}}, "clip": None}
    assert loggable(nested) == {"seed": 3, "model.name": "mlp", "model.bias": True}


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    line = r"^--log-to wandb needs wandb: pip install 'samebits\[wandb\]'$"
    with pytest.raises(UserError, match=line) as caught:
        check_loggers(["wandb"])
    assert caught.value.exit_code == 2
