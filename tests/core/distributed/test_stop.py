"""A run that is asked to stop finishes its step, saves and exits with 75; resumed, it ends as if never stopped."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddp_core.checkpoint import newest_valid
from ddp_core.distributed.stop import Stopped, StopRequest, signal_named
from ddp_core.errors import UserError
from ddp_core.run.directory import find_runs
from tests.support.commands import Forked, ddp, forked, train, trained, wait_until
from tests.support.layout_cases import ADAMW_MLP
from tests.support.processes import HANG

WORDS = (ADAMW_MLP, "--set", "max_steps=40", "--log-every", "1", "--ledger")
DDP = ("--layout", "ddp", "--nproc-per-node", "2")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    record = train(tmp_path_factory.mktemp("undisturbed"), *WORDS)
    return record["weights_sha256"], record["optimizer_sha256"]


def has_begun(output: Path) -> bool:
    """Whether a run below `output` has recorded a step."""
    return any('"kind": "step"' in file.read_text() for file in output.glob("*/*/metrics.jsonl"))


def to_the_command(started: Forked, number: int) -> None:
    os.kill(started.pid, number)


def to_its_group(started: Forked, number: int) -> None:
    """Send the signal to the process group, as a terminal does on Ctrl-C."""
    os.killpg(started.pid, number)


def stop(output: Path, *words: str, number: int, send: Callable[[Forked, int], None]) -> dict[str, Any]:
    """Start a run, stop it after some steps, check what it leaves behind; return its record."""
    full = ["train", *WORDS, *words, "--device", "cpu", "--fault", "slow@1", "--output", output]
    with forked(*full) as started:
        wait_until(lambda: has_begun(output), HANG, "the first step")
        send(started, number)
        ended = started.end()
    assert ended.code == 75, ended.errors
    assert "Traceback" not in ended.errors
    directory, record = trained(output)
    assert (record["status"], record["exit_code"]) == ("stopped", 75)
    checkpoint = newest_valid(directory.checkpoints)
    assert checkpoint is not None
    assert f"stopped at step {checkpoint.step} ({signal.Signals(number).name})" in record["message"]
    assert 0 < checkpoint.step < 40
    (line,) = ended.errors.splitlines()
    assert line.startswith("ddp: stopped: at step "), ended.errors
    assert "--resume auto" in line
    return record


def check_the_end(output: Path, undisturbed: tuple[str, str], **details: Any) -> None:
    record = train(output, *WORDS, "--resume", "auto", **details)
    assert record["status"] == "completed"
    assert (record["weights_sha256"], record["optimizer_sha256"]) == undisturbed


@pytest.mark.parametrize(
    ("layout", "number", "send"),
    [
        pytest.param((), signal.SIGINT, to_its_group, id="single-SIGINT"),
        pytest.param(DDP, signal.SIGTERM, to_the_command, id="ddp-SIGTERM"),
        pytest.param((), signal.SIGTERM, to_the_command, id="single-SIGTERM", marks=pytest.mark.slow),
        pytest.param(DDP, signal.SIGINT, to_its_group, id="ddp-SIGINT", marks=pytest.mark.slow),
    ],
)
def test_a_stopped_run_ends_elsewhere_as_if_nothing_had_happened(
    tmp_path: Path,
    undisturbed: tuple[str, str],
    layout: tuple[str, ...],
    number: int,
    send: Callable[[Forked, int], None],
) -> None:
    stop(tmp_path, *layout, number=number, send=send)
    check_the_end(tmp_path, undisturbed, ranks=0 if layout else 2)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("layout", [("--layout", "dp"), (*DDP, "--launcher", "spawn")], ids=["dp", "spawn"])
def test_the_other_layouts_stop_alike(
    tmp_path: Path, undisturbed: tuple[str, str], layout: tuple[str, ...], number: int
) -> None:
    stop(tmp_path, *layout, number=number, send=to_the_command)
    check_the_end(tmp_path, undisturbed)


def test_a_schedulers_early_signal_and_a_time_limit_stop_alike(tmp_path: Path, undisturbed: tuple[str, str]) -> None:
    stop(tmp_path, "--stop-signal", "USR1", number=signal.SIGUSR1, send=to_the_command)
    words = [*WORDS, "--resume", "auto", "--fault", "slow@1", "--max-seconds", "0.5", "--fault", "slow@12"]
    ended = ddp("train", *words, "--device", "cpu", "--output", tmp_path)
    assert ended.code == 75
    assert "time limit" in trained(tmp_path)[1]["message"]
    check_the_end(tmp_path, undisturbed)


SLOW_MODEL = '''
"""Slow?"""
import time
from torch import nn
from ddp_core.spec.experiment import Component, Experiment

class Slow(nn.Linear):
    def forward(self, inputs):
        time.sleep(600)
        return super().forward(inputs)

def model():
    return Slow(10, 1)

experiment = Experiment(name="slow", model=Component(name="model"), data=Component(name="toy_data"),
                        loss="mean_squared_error", global_batch_size=16, micro_batch=4)
'''


def test_a_second_interrupt_leaves_at_once(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW_MODEL)
    output = tmp_path / "out"
    with forked("train", tmp_path / "slow.py", "--device", "cpu", "--output", output) as started:
        wait_until(lambda: any(record for _, record in find_runs(output)), HANG, "the run's record")

        def has_left() -> bool:
            # Two signals that come before the process handles the first count as one, so it may take more than two.
            with contextlib.suppress(ProcessLookupError):
                to_its_group(started, signal.SIGINT)
            return not started.lives

        wait_until(has_left, HANG, "it leaves")
        # The code 75 would come only after the step, which takes longer than a test may.
        assert started.end().code == 130


def test_the_flag_is_set_by_signals_while_it_is_watched() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest("SIGUSR2") as stop_request:
        assert not stop_request.requested
        os.kill(os.getpid(), signal.SIGUSR2)
        assert stop_request.requested
        assert stop_request.reason == "SIGUSR2"
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_unknown_signal_is_named() -> None:
    assert signal_named("usr1") == signal_named("SIGUSR1") == signal.SIGUSR1
    with pytest.raises(UserError, match="USR9"):
        StopRequest("USR9")


def test_stopped_can_be_sent_between_processes() -> None:
    import pickle

    again = pickle.loads(pickle.dumps(Stopped("SIGTERM", 7)))
    assert (again.step, again.reason, str(again)) == (7, "SIGTERM", str(Stopped("SIGTERM", 7)))
