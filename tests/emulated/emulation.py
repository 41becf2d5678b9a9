"""Runs programs on emulated CPUs, for tests that are skipped, with the reason, where the emulator is missing."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

import pytest

from ddp_core.numerics.limits import LIMITS
from tests.support.commands import LAUNCHER_VARIABLES, ROOT
from tools.emulation import CPUS, emulator, python_on

PATIENCE = 900
"""Seconds after which an emulated program is taken to hang: it imports torch in half a minute of processor time."""

needs_emulator = pytest.mark.skipif(emulator() is None, reason="needs qemu-x86_64 (Debian: apt install qemu-user)")
on_each_cpu = pytest.mark.parametrize("cpu", CPUS)


def environment(added: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables of a program under portable numerics.

    The limits are set from outside: a program that starts itself anew, to set them, would leave the emulator.
    """
    others = (*LAUNCHER_VARIABLES, "DDP_OUTPUT", "DDP_DATA")
    plain = {name: value for name, value in os.environ.items() if name not in others}
    return plain | LIMITS | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | dict(added or {})


def start(words: list[str], added: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start a program that writes its output to pipes."""
    return subprocess.Popen(
        words, cwd=ROOT, env=environment(added), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def emulated(cpu: str, *words: object, added: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start `python WORDS` on an emulated CPU."""
    return start([*python_on(cpu), *map(str, words)], added)


def output_of(process: subprocess.Popen[str]) -> str:
    """The standard output of a program that must end well. Raises AssertionError if it does not, or hangs."""
    try:
        output, errors = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        output, errors = process.communicate()
        raise AssertionError(f"not done within {PATIENCE} s:\n{output}\n{errors}") from None
    assert process.returncode == 0, f"ended with {process.returncode}:\n{output}\n{errors}"
    return output
