"""Completion in real shells: the script of `ddp completion SHELL`, and what the shell gets from it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_core.cli import main
from tests.support.commands import ROOT
from tests.support.processes import HANG

SHELLS = ("bash", "zsh", "fish")
# Each case: the words before the cursor, and what they are completed to.
CASES = [
    ("ddp tr", {"train"}),
    ("ddp cl", {"claims"}),
    ("ddp train dig", {"digits"}),
    ("ddp train digits --nproc", {"--nproc-per-node"}),
    ("ddp train digits --set optimizer.l", {"optimizer.lr="}),
    ("ddp train digits --layout d", {"dp", "ddp"}),
    ("ddp data fe", {"fetch"}),
]
# Each script defines the function by which the shell completes `ddp`, and prints what this shell makes of a line.
ASK = {
    "bash": """
eval "$(ddp completion bash)"
complete -p ddp >/dev/null || exit 3
while read -r line; do
    read -ra COMP_WORDS <<< "$line"; COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=()
    _ddp_completion ddp
    echo "${COMPREPLY[@]}"
done
""",
    "zsh": """
compdef() { :; }
compadd() { while [[ $1 != -a ]]; do shift; done; print -rn -- "${(P@)2} "; }
_describe() { print -rn -- "${${(P@)3}%%:*} "; }
eval "$(ddp completion zsh)"
while read -r line; do
    words=(${(z)line}); CURRENT=${#words}
    _ddp_completion
    print
done
""",
    "fish": """
ddp completion fish | source
while read line
    echo (complete --do-complete "$line" | string split --fields 1 \\t)
end
""",
}


@pytest.fixture
def with_ddp(tmp_path: Path) -> dict[str, str]:
    """An environment in which `ddp` is this checkout's."""
    program = tmp_path / "bin" / "ddp"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m ddp_core "$@"\n')
    program.chmod(0o755)
    return os.environ | {
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(tmp_path),
    }


@pytest.mark.slow
@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes_commands_options_experiments_and_settings(shell: str, with_ddp: dict[str, str]) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    asked = "".join(f"{line}\n" for line, _ in CASES)
    done = subprocess.run(
        [shell, "-c", ASK[shell]],
        input=asked,
        capture_output=True,
        text=True,
        env=with_ddp,
        cwd=ROOT,
        timeout=HANG,
        check=True,
    )
    assert [set(line.split()) for line in done.stdout.splitlines()] == [found for _, found in CASES], done.stderr


@pytest.mark.parametrize("shell", SHELLS)
def test_there_is_a_script_for_each_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert f"_DDP_COMPLETE={shell}_complete" in capsys.readouterr().out


def test_a_completion_waits_for_no_torch(with_ddp: dict[str, str]) -> None:
    code = "import sys; from ddp_core.cli import main; main(); print('torch' in sys.modules)"
    asked = {"_DDP_COMPLETE": "bash_complete", "COMP_WORDS": "ddp\ntrain\ndigits\n--set\nseed", "COMP_CWORD": "4"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=with_ddp | asked,
        cwd=ROOT,
        timeout=HANG,
        check=True,
    )
    assert done.stdout == "plain,seed=\nFalse\n"
