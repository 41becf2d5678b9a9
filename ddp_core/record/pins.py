"""The installed packages by version, in the form that `pip install -r` takes, and how another list differs from here.

A package that did not come from an index (installed from a folder, a file or a repository) stands in a comment: pip
could not find it under its version.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from importlib.metadata import distributions
from typing import Any

_NAMED = ("python", "torch", "numpy")
"""Where these differ, both versions are said; other packages are only counted."""
_PIN = re.compile(r"(?:# )?([A-Za-z0-9][\w.-]*)==(\S+)")
_TORCH_BUILDS = "https://download.pytorch.org/whl"


def pins(environment: Mapping[str, Any]) -> str:
    """What is installed here as a requirements file; versions in `environment`, a run's record of it, come first."""
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


def differences(text: str, environment: Mapping[str, Any]) -> str:
    """How the packages here differ from the pins in `text`, in one line."""
    there = {_normal(match[1]): match[2] for line in text.splitlines() if (match := _PIN.fullmatch(line))}
    there["python"] = environment["python"]
    here = _installed()[0] | {"python": platform.python_version()}
    other = [name for name in there if there[name] != here.get(name)]
    if not other:
        return f"all {len(there) - 1} packages and Python are those of the pins"
    said = [f"{name} {there[name]} there, {here.get(name, 'none')} here" for name in _NAMED if name in other]
    rest = len(other) - len(said)
    if rest:
        said.append(f"{rest} {'other ' if said else ''}packages of {len(there) - 1} differ or are missing here")
    return "; ".join(said)


def _installed() -> tuple[dict[str, str], set[str]]:
    """The version of every package by its name, and the names of those that did not come from an index."""
    versions: dict[str, str] = {}
    local = set()
    for distribution in distributions():
        name = _normal(distribution.metadata["Name"] or "")
        if not name or name in versions:  # of two with one name, Python imports the first
            continue
        versions[name] = distribution.version
        if distribution.read_text("direct_url.json") is not None:
            local.add(name)
    return versions, local


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
