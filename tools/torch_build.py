"""Which build of torch `make setup` installs: the one for CUDA, or the one for the CPU, a tenth of the download.

The package index has the CUDA build (`2.13.0`), PyTorch's own index the CPU build (`2.13.0+cpu`); the pin
`torch==2.13.0` accepts both. TORCH=cpu or TORCH=cuda in the environment chooses; otherwise the machine decides.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Literal, NamedTuple

Build = Literal["cpu", "cuda"]

# A mirror of the CPU wheels can be named in their place.
CPU_INDEX = os.environ.get("TORCH_CPU_INDEX") or "https://download.pytorch.org/whl/cpu"
PATIENCE = 20.0


class Choice(NamedTuple):
    """What `pip install` gets beside the project, and why."""

    words: list[str]
    reason: str


def asked_build() -> Build | None:
    """The build that the variable TORCH names; None where it is not set. Raises ValueError for anything else."""
    build = os.environ.get("TORCH") or None
    if build not in (None, "cpu", "cuda"):
        raise ValueError(f"TORCH={build}: use TORCH=cpu or TORCH=cuda, or leave it out and the machine decides")
    return build  # type: ignore[return-value]


def choose_build(python: str, pins: dict[str, str], build: Build | None, driver: str | None) -> Choice:
    """What to install with the pip of `python`; `pins` has the versions of torch and torchvision.

    `driver` says where this machine's NVIDIA driver was found, if it has one. Asks the CPU wheels' index only where the
    CPU build is wanted and pip has not been told where to look; waits `PATIENCE` seconds at most.
    """
    if build == "cuda":
        # pip prefers the CPU build wherever an index or a folder offers both, because 2.13.0+cpu is above 2.13.0.
        others = [f"{name}!={pins[name]}+cpu" for name in ("torch", "torchvision")]
        return Choice(others, "TORCH=cuda, so torch for CUDA")
    if build is None and driver is not None:
        return Choice([], f"NVIDIA driver found ({driver}), so torch for CUDA (TORCH=cpu takes the other)")
    version = f"{pins['torch']}+cpu"
    cause, words = "no NVIDIA driver found", []
    if build == "cpu":
        cause, words = "TORCH=cpu", [f"torch=={version}"]
    places = pip_settings(python) & {"find-links", "no-index"}
    if not places and offers(python, version):
        choice = "" if build else " (TORCH=cuda takes the other)"
        return Choice(
            ["--extra-index-url", CPU_INDEX, *words], f"{cause}, so torch for the CPU from {CPU_INDEX}{choice}"
        )
    problem = f"{CPU_INDEX} does not answer, or has no torch {version} for this Python"
    if places:
        problem = f"pip is told where to look ({', '.join(sorted(places))})"
    return Choice(words, f"{cause}, but {problem}: torch {version if build else 'as pip finds it'}")


def nvidia_driver(kernel_module: Path = Path("/proc/driver/nvidia")) -> str | None:
    """Where this machine's NVIDIA driver was found; None where there is none."""
    if kernel_module.exists():
        return str(kernel_module)
    program = shutil.which("nvidia-smi")
    if program is not None:
        return program
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return "libcuda.so.1"


def pip_settings(python: str) -> set[str]:
    """The names of pip's options that the environment or a configuration file sets to something."""
    done = subprocess.run([python, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    found = re.findall(r"^[\w:]*\.([\w-]+)='(.*)'$", done.stdout, re.MULTILINE)
    return {name for name, value in found if value not in ("", "0", "no", "false", "off")}


def offers(python: str, version: str) -> bool:
    """Whether the CPU wheels' index answers in time and has this version of torch for this Python and machine.

    pip itself asks, with the proxies and certificates that it will use for the installation.
    """
    command = [python, "-m", "pip", "index", "versions", "torch", "--index-url", CPU_INDEX]
    settings = {name: value for name, value in os.environ.items() if name != "PIP_EXTRA_INDEX_URL"}
    try:
        done = subprocess.run(
            [*command, "--disable-pip-version-check", "--timeout", "5", "--retries", "0"],
            env=settings,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    offered = re.search(r"^Available versions: (.*)$", done.stdout, re.MULTILINE)
    return offered is not None and version in offered[1].split(", ")


def installed_version(environment: Path) -> str | None:
    """The version of the torch that is installed in a virtual environment, such as 2.13.0+cpu."""
    found = environment.glob("lib/python3.*/site-packages/torch-*.dist-info")
    return next((folder.name.removeprefix("torch-").removesuffix(".dist-info") for folder in found), None)


def is_build(version: str | None, build: Build) -> bool:
    """Whether an installed version is of that build."""
    return version is not None and version.endswith("+cpu") == (build == "cpu")
