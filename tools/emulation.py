"""CPUs that this machine is not, as the emulator qemu-x86_64 (Debian: qemu-user) shows them to a program.

Only the program itself is emulated: what it starts is started by this machine's kernel, and runs on the real CPU.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace

from ddp_lab.probe.published import Published

CPUS = ("Haswell", "Skylake-Client-v4", "EPYC-Rome-v2")
"""CPUs with AVX2 and without AVX-512 that qemu 7.2 can emulate: two of Intel's, one of AMD's."""

FAULTS = {
    "LSTM, backward": "qemu 7.2 gives wrong values, probably by its AVX2 gathers",
    "grid_sample bicubic, backward": "qemu 7.2 gives wrong values or ends, by its AVX2 gathers under a mask",
    "grid_sample bilinear, backward": "qemu 7.2 gives wrong values or ends, by its AVX2 gathers under a mask",
    "toy_mlp": "qemu 7.2 ends in fused SGD without momentum, probably by AVX2 loads under an empty mask",
}
"""What the emulator computes wrongly or not at all, with the reason; tests/emulated proves that the CPU is right."""


def emulator() -> str | None:
    """The path of the emulator; None where it is missing."""
    return shutil.which("qemu-x86_64")


def version() -> str:
    """The emulator's version, such as 7.2.22."""
    return subprocess.run(["qemu-x86_64", "--version"], capture_output=True, text=True, check=True).stdout.split()[2]


def python_on(cpu: str) -> list[str]:
    """The words that start this Python on an emulated CPU.

    numpy is told to do without AVX2: its sorting gathers under a mask, which qemu 7.2 carries out wrongly.
    """
    return ["qemu-x86_64", "-E", "NPY_DISABLE_CPU_FEATURES=X86_V3", "-cpu", cpu, sys.executable]


def without_faults(table: Published) -> Published:
    """The table without what the emulator cannot compute, some of which would end it."""
    return replace(
        table,
        operations={name: each for name, each in table.operations.items() if name not in FAULTS},
        training_steps={name: each for name, each in table.training_steps.items() if name not in FAULTS},
    )
