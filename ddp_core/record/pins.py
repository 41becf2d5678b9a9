"""The packages of a run as pins, in the form that `pip install -r` takes, and how those here differ from them.

A package that did not come from an index (installed from a folder, a file or a repository) stands in a comment: pip
could not find it under its version. Behind the others stands which files their wheel holds: a version may have several.
"""

from __future__ import annotations

import csv
import hashlib
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any, NamedTuple

from ddp_core.base.shown import shown

_NAMED = ("python", "torch", "numpy")
"""Where these differ from the pins, both versions are said; other packages are only counted."""
_PIN = re.compile(r"(# )?([A-Za-z0-9][\w.-]*)==([\w.!+-]+)(?:  # files ([0-9a-f]{64}))?")
_BY_INSTALLER = re.compile(r"^\.\./|^/|\.dist-info/(?:INSTALLER|REQUESTED|direct_url\.json|uv_\w+\.json)$|\.pyc$")
"""Scripts, which name the interpreter's place, and what pip and uv add."""
_TORCH_BUILDS = "https://download.pytorch.org/whl"


class Pin(NamedTuple):
    """One installed package."""

    version: str
    is_local: bool
    files: str | None
    """The SHA-256 over names and digests of its wheel's files; None where it came from no wheel, or none is told."""


def pins(environment: Mapping[str, Any]) -> str:
    """What is installed here, as a requirements file; versions in `environment`, that of a run's record, come first."""
    found = installed()
    for name, version in ((_normal(name), version) for name, version in environment["packages"].items() if version):
        here = found.get(name, Pin(version, False, None))
        found[name] = here if here.version == version else Pin(version, here.is_local, None)
    build = torch_build(found)
    lines = [
        f"{'# ' if pin.is_local else ''}{name}=={pin.version}{f'  # files {pin.files}' if pin.files else ''}"
        for name, pin in sorted(found.items())
    ]
    return "\n".join(
        [
            f"# Python {environment['python']}: python -m pip install -r pins.txt"
            + (f" --extra-index-url {_TORCH_BUILDS}/{build}" if build else ""),
            "# A line that begins with # is a package from a folder, a file or a repository.",
            *lines,
            "",
        ]
    )


def read_pins(text: str) -> dict[str, Pin]:
    """The pins of a requirements file, by package; lines that are none, such as options of pip, are passed over."""
    matches = filter(None, map(_PIN.fullmatch, text.splitlines()))
    return {_normal(match[2]): Pin(match[3], match[1] is not None, match[4]) for match in matches}


def torch_build(found: Mapping[str, Pin]) -> str:
    """For what torch is built, such as cpu or cu130; empty where its version does not say so."""
    return found["torch"].version.partition("+")[2] if "torch" in found else ""


def package_differences(text: str, environment: Mapping[str, Any]) -> str:
    """How the packages here differ from the pins in `text`, in one line."""
    there = {name: pin.version for name, pin in read_pins(text).items()} | {"python": environment["python"]}
    here = {name: pin.version for name, pin in installed().items()} | {"python": platform.python_version()}
    other = [name for name in there if there[name] != here.get(name)]
    if not other:
        return f"all {len(there) - 1} packages and Python are those of the pins"
    said = [f"{name} {shown(there[name])} there, {here.get(name, 'none')} here" for name in _NAMED if name in other]
    rest = len(other) - len(said)
    if rest:
        said.append(f"{rest} {'other ' if said else ''}packages of {len(there) - 1} differ or are missing here")
    return "; ".join(said)


def installed(path: Sequence[str] | None = None) -> dict[str, Pin]:
    """Every installed package by its name, here or in the folders of `path`."""
    found: dict[str, Pin] = {}
    for distribution in metadata.distributions(path=sys.path if path is None else list(path)):
        name = _normal(distribution.metadata["Name"] or "")
        if not name or name in found:  # of two with one name, Python imports the first
            continue
        is_local = distribution.read_text("direct_url.json") is not None
        found[name] = Pin(
            distribution.version, is_local, None if is_local else _files(distribution.read_text("RECORD"))
        )
    return found


def _files(record: str | None) -> str | None:
    """The digest of a wheel's files, by the list that it brings, without what whoever installs it writes itself."""
    rows = [row for row in csv.reader((record or "").splitlines()) if len(row) == 3 and row[1]]
    kept = sorted(f"{name},{digest}" for name, digest, _ in rows if not _BY_INSTALLER.search(name))
    return hashlib.sha256("\n".join(kept).encode()).hexdigest() if kept else None


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
