"""What the command line says of itself, and whole commands: what was asked for reaches the run and its record."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from subprocess import run

import psutil
import pytest

from ddp_core.cli import main
from ddp_core.cli.click_kinds import _summary
from ddp_core.config.options import groups
from ddp_core.config.records import command_line, option_name
from tests.core.cli.asking import understood
from tests.support.commands import command, ddp, forked, train, trained, wait_until
from tests.support.processes import HANG

ROOT = Path(__file__).parents[3]

COMMANDS = (
    *("train", "rehearse", "list", "compare", "watch", "verify", "audit", "eval", "bundle", "export"),
    *("verify-layouts", "health", "data", "rendezvous"),
)
OFFERED = ("chaos", "claims", "diagnose", "launch-files", "probe", "report")
EXPERIMENTS = ("digits", "linear_regression", "counter_buffer", "toy_mlp", "resnet18_synthetic", "fashion_mnist")


def test_the_console_command_and_the_module_are_one() -> None:
    ended = command("--help")
    assert (ended.code, ended.errors) == (0, "")
    assert ended.output.startswith("Usage: ddp ")
    rows = re.findall(r"^  (\S+) +(\S.*)$", ended.output.partition("Commands:\n")[2], re.MULTILINE)
    assert [name for name, _ in rows] == [*COMMANDS, *OFFERED], "a line for each"
    assert [name for name, text in rows if not text.endswith(".")] == [], "a line that is cut off"


def test_the_list_shows_every_experiment_with_its_question(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = {line.split()[0]: line.partition(" ")[2].strip() for line in lines}
    assert set(EXPERIMENTS) <= found.keys()
    assert all(found[name].endswith("?") for name in EXPERIMENTS), found


@pytest.mark.parametrize(
    "words",
    [["train", "digitz"], ["rehearse", "digitz"], ["verify-layouts", "digitz"], ["train", "digitz.py"]],
    ids=" ".join,
)
def test_a_wrong_name_of_an_experiment_waits_for_no_torch(words: list[str]) -> None:
    code = "import sys; from ddp_core.cli import main; print(main(sys.argv[1:]), 'torch' in sys.modules)"
    ended = run(
        [sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, timeout=HANG, check=True
    )
    assert ended.stdout == "2 False\n"
    assert "digitz" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1, "one line"


def test_the_version_names_torch_and_the_commit() -> None:
    """`ddp --version` reads the version of torch from its metadata, without importing torch."""
    code = "import sys; from ddp_core.cli import main; main(['--version']); print('torch' in sys.modules)"
    ended = command(program=("-c", code))
    # An image that was built without `make` says itself that it does not know its commit.
    commit = (
        r" \(commit unknown\)"
        if os.environ.get("DDP_GIT_COMMIT") == "unknown"
        else r"( \(commit [0-9a-f]{12}(, changed since)?\))?"
    )
    assert re.fullmatch(rf"ddp \S+{commit}, torch 2\.\S+, Python 3\.\S+\nFalse\n", ended.output)


def test_a_command_of_another_package_says_what_it_is_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line of help is the first line of the command's file, which is read but not run."""
    (tmp_path / "theirs.py").write_text("raise SystemExit('run')\ndef main(words):\n    'Do it.\\n\\nMore.'\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert _summary(EntryPoint("theirs", "theirs:main", "ddp.commands")) == "Do it."
    assert "nowhere:main" in _summary(EntryPoint("theirs", "no.nowhere:main", "ddp.commands"))


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "Usage: ddp" in capsys.readouterr().out


def test_the_help_of_train_names_every_option_and_its_examples_are_understood(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "--help"]) == 0
    options, _, examples = capsys.readouterr().out.partition("Examples:\n")
    shown = {
        option_name(name, field)
        for _, fields in groups()
        for name, field in fields.items()
        if name != "experiment" and not command_line(field).hidden
    }
    assert {*re.findall(r"^  (--[a-z-]+)", options, re.MULTILINE)} - {"--help"} == shown
    assert len(examples.splitlines()) >= 3
    for line in examples.splitlines():
        understood(*shlex.split(line, comments=True)[2:])


def test_settings_reach_the_run_and_its_record(tmp_path: Path) -> None:
    words = ("--set", "optimizer.lr=0.125", "--set", "epochs=3", "--set", "model.sizes=[10, 7, 1]")
    record = train(tmp_path, "toy_mlp", *words, "--set", "model.name=mlp", "--keep-last", "1", "--log-every", "2")
    assert record["experiment"]["optimizer"]["lr"] == 0.125
    assert record["experiment"]["epochs"] == 3
    assert record["experiment"]["model"] == {"name": "mlp", "options": {"sizes": [10, 7, 1], "dropout": 0.0}}
    assert (record["options"]["keep_last"], record["options"]["log_every"]) == (1, 2)
    assert record["result"]["steps"] == 6
    assert record["result"]["parameters"] == 7 * 11 + 8
    assert "--set optimizer.lr=0.125" in record["command"]
    directory, _ = trained(tmp_path)
    assert (directory.path / "source" / "toy_mlp.py").read_text() == (ROOT / "experiments" / "toy_mlp.py").read_text()


def test_a_rendezvous_listens_at_one_address_alone_until_it_is_told_to_end() -> None:
    with forked("rendezvous", "--port", 0, "--bind", "localhost") as server:
        wait_until(lambda: server.said()[0].endswith("\n"), HANG, "it listens")
        # The store is also a client of its own.
        connections = psutil.Process(server.pid).net_connections("tcp")
        (found,) = (each for each in connections if each.status == psutil.CONN_LISTEN)
        assert server.said()[0] == f"rendezvous: listening on port {found.laddr.port} of {found.laddr.ip}\n"
        assert found.laddr.ip in ("127.0.0.1", "::1")
        second = ddp("rendezvous", "--port", found.laddr.port)
        assert second.code == 4
        assert f"port {found.laddr.port} is in use" in second.errors
        os.kill(server.pid, signal.SIGTERM)
        assert server.end().code == 0
    assert ddp("rendezvous", "--check", "nowhere").code == 2


@pytest.mark.parametrize(("name", "said"), [("192.0.2.77", "has the address 192.0.2.77"), ("nowhere.invalid", "name")])
def test_a_rendezvous_elsewhere_is_bad_input(name: str, said: str) -> None:
    ended = ddp("rendezvous", "--bind", name)
    assert (ended.code, said in ended.errors) == (2, True), ended.errors
    assert "Traceback" not in ended.errors
