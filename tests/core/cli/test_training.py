"""`ddp_core.train`: what it starts, what it returns, how it ends; and the words that its arguments become."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from ddp_core import train
from ddp_core.base.digests import weights_digest
from ddp_core.base.errors import UserError
from ddp_core.cli import training
from tests.support import commands
from tests.support.commands import ROOT
from tests.support.processes import HANG
from tests.support.wording import refusing

SHORT: dict[str, Any] = {"device": "cpu", "settings": {"max_steps": 2, "optimizer.lr": 0.05}}


def words(*arguments: Any, **options: Any) -> list[str]:
    layout, settings = options.pop("layout", None), options.pop("settings", ())
    return training.asked_for(*arguments, layout, settings, options).to_words()


def pretend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str) -> None:
    """Put a shell script in the place of the interpreter that runs `ddp train`; `$*` are the words given to it."""
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\n{textwrap.dedent(program)}")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))


@pytest.mark.full
def test_it_trains_with_the_bits_of_the_command_and_returns_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    ddp = train("toy_mlp", layout="ddp", nproc_per_node=2, output=tmp_path, **SHORT)
    assert f"run directory {ddp.path}\n" in capsys.readouterr().out
    assert (ddp.status, ddp.record["layout"]["label"]) == ("completed", "ddp-1x2-cpu")
    assert ddp.record["experiment"]["optimizer"]["lr"] == 0.05
    alone = commands.train(tmp_path / "alone", "toy_mlp", "--set", "max_steps=2", "--set", "optimizer.lr=0.05")
    assert ddp.digest == alone["weights_sha256"] == weights_digest(ddp.load_model().state_dict())
    assert ddp.figures["steps"] == 2
    assert {record["kind"] for record in ddp.metrics} >= {"step", "digest"}


def test_arguments_become_the_words_of_the_command() -> None:
    assert words("digits") == ["digits"]
    assert words(Path("mine.py"), layout="ddp", nproc_per_node=2, output=Path("out")) == [
        *("mine.py", "--layout", "ddp", "--nproc-per-node", "2", "--output", "out")
    ]
    settings = {"epochs": 3, "optimizer.lr": 0.05, "max_steps": None, "model.name": "mlp", "model.word": "3"}
    assert words("digits", settings=settings) == [
        *("digits", "--set", "epochs=3", "--set", "optimizer.lr=0.05", "--set", "max_steps=null"),
        *("--set", "model.name=mlp", "--set", 'model.word="3"'),
    ]
    assert words("digits", settings=["epochs=3"]) == words("digits", settings="epochs=3")
    assert words("digits", cuda_graph=True, asynchronous_save=False, numerics=None, log_to="tensorboard", nnodes=2) == [
        *("digits", "--nnodes", "2", "--cuda-graph", "--synchronous-save", "--log-to", "tensorboard")
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"nproc": 2}, "train has no option nproc; did you mean nproc_per_node?"),
        ({"experiment": "digits"}, "train has no option experiment; "),
        ({"layout": "dpp"}, "layout: Input should be 'single', 'dp' or 'ddp'"),
        ({"keep_last": 0}, "keep_last: Input should be greater than 0"),
        ({"settings": {"model.width": {1}}}, "settings: Object of type set is not JSON serializable"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match="train") as failure:
        train("digits", **options)
    assert said in str(failure.value)


def test_a_failure_has_the_last_line_and_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, tmp_path, "echo one; echo two >&2; echo 'ddp: error: no room'; echo; exit 4")
    with refusing():
        train("digits", cuda_graph=True)
    assert capsys.readouterr().out == "one\ntwo\nddp: error: no room\n\n"


@pytest.mark.parametrize("program", ["kill -KILL $$", "exit 0"], ids=["killed", "names no run directory"])
def test_a_command_that_was_killed_or_names_no_run_directory_is_an_error_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    pretend(monkeypatch, tmp_path, program)
    with refusing():
        train("digits")


def test_an_interrupt_is_passed_on_and_waits_for_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The command hears the signal only from its caller: it is in another group of processes than the caller.
    program = """
        trap 'echo saved; exit 75' INT
        read _ _ _ _ group _ </proc/$$/stat
        [ $group = $$ ] && echo alone
        kill -INT $DDP_CALLER
        while true; do sleep 0.01; done
        """
    pretend(monkeypatch, tmp_path, program)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train("digits")
    assert capsys.readouterr().out == "alone\nsaved\n"
    assert signal.getsignal(signal.SIGINT) is before


def test_training_is_asked_to_stop_when_its_caller_dies() -> None:
    command = """
        import signal, sys
        from ddp_core.distributed.reports import stop_with_caller
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        stop_with_caller()
        sys.stderr.write("r")
        print(signal.sigwait([signal.SIGTERM]).name)
        """
    caller = """
        import os, pathlib, subprocess, sys
        from ddp_core.distributed.reports import caller_variables
        variables = os.environ | caller_variables(pathlib.Path("unused"))
        child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stderr=subprocess.PIPE, env=variables)
        os.read(child.stderr.fileno(), 1)
        """
    program = [sys.executable, "-c", textwrap.dedent(caller), textwrap.dedent(command)]
    settings = os.environ | {"PYTHONPATH": str(ROOT)}
    # What the caller leaves behind holds the pipe: it has ended when this returns.
    assert subprocess.run(program, env=settings, capture_output=True, text=True, timeout=HANG).stdout == "SIGTERM\n"
