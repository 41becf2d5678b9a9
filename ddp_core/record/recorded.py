"""What a run is computed again from, read from its record: options, numerics, experiment, and the packages as pins.

Pins have the form that `pip install -r` takes. A package that did not come from an index (installed from a folder, a
file or a repository) stands in a comment: pip could not find it under its version.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from ddp_core.base.errors import UserError
from ddp_core.base.shown import shown
from ddp_core.config.experiment import Experiment
from ddp_core.numerics.limits import RULES

_NAMED = ("python", "torch", "numpy")
"""Where these differ from the pins, both versions are said; other packages are only counted."""
_PIN = re.compile(r"(?:# )?([A-Za-z0-9][\w.-]*)==(\S+)")
_TORCH_BUILDS = "https://download.pytorch.org/whl"


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
