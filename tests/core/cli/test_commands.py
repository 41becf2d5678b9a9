"""What the command line says of itself: its commands, their options, its version."""

from __future__ import annotations

import os
import re
import shlex
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from subprocess import run

import pytest

from ddp_core.cli import main
from ddp_core.cli.click_kinds import _summary
from ddp_core.config.options import groups
from ddp_core.config.records import command_line, option_name
from tests.core.cli.asking import understood
from tests.support.commands import command
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
