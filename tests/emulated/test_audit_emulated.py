"""A run of four ranks on this machine's own CPU is audited by a program that runs, whole, on an emulated one."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from tests.emulated.emulation import PATIENCE, emulated, needs_emulator, output_of, start
from tests.emulated.test_training_emulated import words
from tests.support.commands import ROOT, trained
from tools.emulation import python_on

pytestmark = [pytest.mark.slow, needs_emulator, pytest.mark.timeout(3 * PATIENCE)]


def emulated_interpreter(folder: Path, cpu: str) -> dict[str, str]:
    """The variables with which each Python starts others on the emulated CPU, too; a file notes what was started.

    Else the audit would be emulated, but not the training that it starts.
    """
    folder.mkdir()
    python = folder / "python"
    command = shlex.join(python_on(cpu))
    python.write_text(f'#!/bin/sh\necho "$*" >> {shlex.quote(str(folder / "started"))}\nexec {command} "$@"\n')
    python.chmod(0o755)
    (folder / "sitecustomize.py").write_text(f"import sys\n\nsys.executable = {str(python)!r}\n")
    return {"PYTHONPATH": f"{folder}:{ROOT}"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four ranks on this machine's own CPU."""
    output = tmp_path_factory.mktemp("four")
    more = ("--layout", "ddp", "--nproc-per-node", "4", "--keep-for-audit", "2")
    output_of(start([sys.executable, *words(output, *more)]))
    return trained(output)[0].path


@pytest.mark.parametrize(
    "layout",
    [("--layout", "single"), ("--layout", "ddp", "--nproc-per-node", "2", "--shard", "parameters")],
    ids=["one rank", "two ranks with shards"],
)
def test_a_run_of_four_ranks_is_audited_on_an_emulated_cpu_of_another_maker(
    run: Path, layout: tuple[str, ...], tmp_path: Path
) -> None:
    cpu = "Haswell" if "AuthenticAMD" in Path("/proc/cpuinfo").read_text() else "EPYC-Rome-v2"
    variables = emulated_interpreter(tmp_path / "bin", cpu)
    audit = ("-m", "ddp_core", "audit", str(run), "--segments", "1", "--seed", "1", *layout)
    said = output_of(emulated(cpu, *audit, added=variables))
    assert said.endswith("passed: what was looked at is what the record says\n")
    started = (tmp_path / "bin" / "started").read_text()
    assert "train" in started, "the segment was trained on the emulated CPU, too"
