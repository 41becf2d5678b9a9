"""What a run was made with, for its record: packages, code version, machine, container image.

Also the installed packages as pins, in the form that `pip install -r` takes. A package that did not come from an index
(installed from a folder, a file or a repository) stands in a comment: pip could not find it under its version.
"""

from __future__ import annotations

import os
import platform
import re
import socket
import subprocess
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_core.base.errors import UserError
from ddp_core.base.fingerprint import cpu_model, driver, installed
from ddp_core.base.refusals import is_lack, refused
from ddp_core.base.shown import shown
from ddp_core.config.experiment import Experiment
from ddp_core.numerics.limits import RULES

if TYPE_CHECKING:
    from ddp_core.experiment.request import Request

_NAMED = ("python", "torch", "numpy")
"""Where these differ from the pins, both versions are said; other packages are only counted."""
_PIN = re.compile(r"(?:# )?([A-Za-z0-9][\w.-]*)==(\S+)")
_TORCH_BUILDS = "https://download.pytorch.org/whl"
_PACKAGES = ("torch", "torchvision", "numpy", "pillow", "scikit-learn", "pydantic", "safetensors")


def portable_cpu(record: Mapping[str, Any]) -> str | None:
    """The CPU of a run with portable numerics, whose fingerprint does not name the CPU; None for any other run.

    `record` is the content of run.json.
    """
    if record["fingerprint"].get("numerics") != "portable":
        return None
    cpu: str | None = (record.get("environment") or {}).get("cpu")
    return cpu


def recorded_numerics(record: Mapping[str, Any]) -> str:
    """The numerics that repeat a run.

    `record` is the content of run.json. Raises UserError where this version does not compute by the run's rules.
    """
    rules = (record.get("fingerprint") or {}).get("numerics_rules")
    if rules is None:
        return "native"
    if rules != RULES:
        does = "no longer computes" if isinstance(rules, int) and rules < RULES else "does not know"
        raise UserError(
            f"the run has portable numerics version {shown(str(rules))}, which this version {does}: its weights can be "
            f"loaded, and training it anew gives those of version {RULES}"
        )
    return "portable"


def require_source(path: Path, record: Mapping[str, Any]) -> None:
    """Raises UserError for a run at `path` that has not kept its code."""
    if "source" not in record:
        raise UserError(f"{path} was recorded by an earlier version of ddp, which did not keep the code: train it anew")


def as_recorded(path: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `ddp train` by which the run at `path` is computed again. Raises UserError where it cannot be."""
    require_source(path, record)
    options, source = record["options"], record["source"]
    return {
        "experiment": str(path / source["folder"] / source["experiment"]),
        "record": str(path / "run.json"),
        "reduction": options["reduction"],
        "numerics": recorded_numerics(record),
        # Runs were always deterministic before there was a choice.
        "deterministic": "always" if options.get("deterministic", True) else "never",
        "data_dir": options["data_dir"],
    }


def recorded_experiment(record: Mapping[str, Any]) -> Experiment:
    """The experiment of a run. Raises UserError, which names each wrong field.

    Earlier versions could name a version of portable numerics in it; the fingerprint says which one the run has.
    """
    experiment = record["experiment"]
    if str(experiment.get("numerics")).startswith("portable-"):
        experiment = {**experiment, "numerics": "portable"}
    return Experiment.from_json(experiment)


def facts_of(request: Request) -> dict[str, str]:
    """What all ranks and nodes of a launch must have in common, by the name that an error message gives it."""
    code = describe_code()
    return {
        "experiment": request.loaded.experiment.digest(),
        "code version": f"{code['version']} {code['commit']}",
        "setting of ddp.find_unused_parameters": str(request.loaded.experiment.ddp.find_unused_parameters),
        "layout": request.layout.label,
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
    """Version, git commit, and whether the tree was dirty (None: not known); in a container, the image's own.

    As they were at the first call: the process goes on with the code that it has loaded.
    """
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


def version_line() -> str:
    """The versions of this program, torch and Python in one line, read without importing torch."""
    code = describe_code()
    changed = ", changed since" if code["dirty"] else ""
    commit = f" (commit {code['commit'][:12]}{changed})" if code["commit"] else ""
    return f"ddp {code['version']}{commit}, torch {installed('torch')}, Python {platform.python_version()}"


def pins(environment: Mapping[str, Any]) -> str:
    """What is installed here, as a requirements file; versions in `environment`, that of a run's record, come first."""
    versions, local = _installed()
    versions |= {_normal(name): version for name, version in environment["packages"].items() if version is not None}
    _, _, build = versions.get("torch", "").partition("+")
    lines = [f"{'# ' if name in local else ''}{name}=={version}" for name, version in sorted(versions.items())]
    return "\n".join(
        [
            f"# Python {environment['python']}: python -m pip install -r pins.txt"
            + (f" --extra-index-url {_TORCH_BUILDS}/{build}" if build else ""),
            "# A line that begins with # is a package from a folder, a file or a repository.",
            *lines,
            "",
        ]
    )


def package_differences(text: str, environment: Mapping[str, Any]) -> str:
    """How the packages here differ from the pins in `text`, in one line."""
    there = {_normal(match[1]): match[2] for line in text.splitlines() if (match := _PIN.fullmatch(line))}
    there["python"] = environment["python"]
    here = _installed()[0] | {"python": platform.python_version()}
    other = [name for name in there if there[name] != here.get(name)]
    if not other:
        return f"all {len(there) - 1} packages and Python are those of the pins"
    said = [f"{name} {shown(there[name])} there, {here.get(name, 'none')} here" for name in _NAMED if name in other]
    rest = len(other) - len(said)
    if rest:
        said.append(f"{rest} {'other ' if said else ''}packages of {len(there) - 1} differ or are missing here")
    return "; ".join(said)


def _installed() -> tuple[dict[str, str], set[str]]:
    """The version of every package by its name, and the names of those that did not come from an index."""
    versions: dict[str, str] = {}
    local = set()
    for distribution in metadata.distributions():
        name = _normal(distribution.metadata["Name"] or "")
        if not name or name in versions:  # of two with one name, Python imports the first
            continue
        versions[name] = distribution.version
        if distribution.read_text("direct_url.json") is not None:
            local.add(name)
    return versions, local


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


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
        if is_lack(error):
            raise refused(error) from None
        return None
    return done.stdout.strip() if done.returncode == 0 else None
