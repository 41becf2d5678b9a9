"""What a run was made with, for its record: packages, code version, machine, container image."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_core.base.fingerprint import cpu_model, driver, installed
from ddp_core.base.refusals import is_lack, refused

if TYPE_CHECKING:
    from ddp_core.experiment.request import Request

_PACKAGES = ("torch", "torchvision", "numpy", "pillow", "scikit-learn", "pydantic", "safetensors")


def facts_of(request: Request) -> dict[str, str]:
    """What all ranks and nodes of a launch must have in common, by the name that an error message gives it."""
    code = describe_code()
    return {
        "experiment": request.loaded.experiment.digest(),
        "code version": f"{code['version']} {code['commit']}",
        "setting of ddp.find_unused_parameters": str(request.loaded.experiment.ddp.find_unused_parameters),
        "layout": request.layout.label,
        "setting of --shares": str(request.layout.dealt),
        "reduction": request.options.reduction,
        "numerics": request.options.numerics,
        "step to evaluate": "none" if request.evaluated is None else str(request.evaluated.step),
    }


def describe_environment() -> dict[str, Any]:
    """The `environment` of run.json, in plain JSON types; an entry is None where the tool that tells it is missing."""
    # Imported here, because `ddp --version` needs `version_line` alone.
    import psutil
    import torch

    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cpu": cpu_model(),
        "cores": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "packages": {name: installed(name) for name in _PACKAGES},
        "code": describe_code(),
        "image": os.environ.get("DDP_IMAGE_VERSION"),
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("OMP_", "MKL_", "GLOO_", "NCCL_"))
        },
    }
    if torch.cuda.is_available():
        facts["cuda"] = {
            "runtime": torch.version.cuda,
            "driver": driver(),
            "devices": [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())],
        }
    return facts


@cache
def describe_code() -> dict[str, Any]:
    """Version, git commit, and whether the tree was dirty (None: not known); in a container, the image's own."""
    # As they were at the first call: the process goes on with the code that it has loaded.
    facts: dict[str, Any] = {"version": installed("samebits")}
    if "DDP_GIT_COMMIT" in os.environ:
        said = os.environ.get("DDP_GIT_DIRTY")
        return facts | {
            "commit": os.environ["DDP_GIT_COMMIT"],
            "dirty": {"true": True, "false": False}.get(said) if said else None,
        }
    git = ("git", "-C", str(Path(__file__).parents[2]))
    commit = _output_of(*git, "rev-parse", "HEAD")
    changes = _output_of(*git, "status", "--porcelain") if commit else None
    return facts | {"commit": commit, "dirty": None if changes is None else changes != ""}


def tell_children_of_code() -> None:
    """Let the processes that this one starts describe their code as it does, whatever is committed meanwhile."""
    code = describe_code()
    if code["commit"] is not None:
        os.environ.update(DDP_GIT_COMMIT=code["commit"], DDP_GIT_DIRTY=str(code["dirty"]).lower())


def version_line() -> str:
    """The versions of this program, torch and Python in one line, read without importing torch."""
    code = describe_code()
    changed = ", changed since" if code["dirty"] else ""
    commit = f" (commit {code['commit'][:12]}{changed})" if code["commit"] else ""
    return f"ddp {code['version']}{commit}, torch {installed('torch')}, Python {platform.python_version()}"


def _output_of(*command: str) -> str | None:
    """What the command printed, stripped; None where the command is missing, failed, or took longer than 5 s.

    Raises UserError (4) where it could not be started because something is lacking, such as processes: this rank would
    seem to have other code than its peers.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except subprocess.TimeoutExpired:
        return None
    except OSError as error:
        if is_lack(error):  # else this rank would seem to have other code than its peers
            raise refused(error) from None
        return None
    return done.stdout.strip() if done.returncode == 0 else None
