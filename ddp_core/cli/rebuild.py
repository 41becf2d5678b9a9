"""`ddp verify BUNDLE --rebuild`: verify in a new environment, made by uv from the bundle's pins and removed again.

What is installed must be what was there: each package in its version, with the files of its wheel. The package samebits
itself, where the run had it from no index, is lent by the environment that this is called in.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.extras import needs
from ddp_core.base.files import is_file
from ddp_core.base.shown import shown
from ddp_core.distributed.children import Children, error_of
from ddp_core.record.bundles import unpack_bundle
from ddp_core.record.environment import tell_children_of_code
from ddp_core.record.pins import Pin, installed, read_pins, torch_build

_OWN = {"samebits": "ddp_core", "samebits-lab": "ddp_lab"}
"""The two distributions of this project, each with its package."""


def verify_rebuilt(bundle: Path, where: Mapping[str, Any]) -> int:
    """Verify the bundle in an environment of its own; returns what `ddp verify` ended with there."""
    uv = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if uv is None:
        raise UserError(needs("--rebuild", "uv", "uv"))
    if not is_file(bundle):
        raise UserError(f"{bundle} is no bundle, and --rebuild needs its pins; `ddp bundle RUN` makes one")
    with Children("ddp-rebuild-") as children:
        unpacked = unpack_bundle(bundle, children.folder / "bundle")
        wanted = read_pins(unpacked.pins)
        named = [line for line in unpacked.pins.splitlines() if line and line[0] not in "#-"]
        if "samebits" not in wanted or len(named) != sum(not pin.is_local for pin in wanted.values()):
            raise UserError(f"{bundle}: its pins do not name samebits, or not each package in one version")
        # Of a stranger's record, a version alone: uv also takes a path.
        if (version := re.match(r"\d+\.\d+", unpacked.record["environment"]["python"])) is None:
            raise UserError(f"{bundle} does not say which Python its run had")
        print(f"making Python {version[0]} with the {len(wanted)} packages of the bundle …", flush=True)
        python = _make(children, uv, version[0], wanted)
        words = [word for name, value in where.items() if value for word in (f"--{name.replace('_', '-')}", str(value))]
        command = [python, "-m", "ddp_core", "verify", str(bundle.absolute()), *words]
        return _verify(children, command, _lend(children, wanted))


def _make(children: Children, uv: str, version: str, wanted: Mapping[str, Pin]) -> str:
    """Make the environment of the pins, no more and no less; returns its Python. Raises UserError (4)."""
    venv = children.folder / "venv"
    python = str(venv / "bin" / "python")
    _uv(children, uv, f"Python {version}", "venv", "--quiet", "--python", version, str(venv))
    if lost := [f"{name} {pin.version}" for name, pin in wanted.items() if pin.is_local and name not in _OWN]:
        raise _cannot_have(f"{', '.join(lost)}, which the run had from a folder, a file or a repository")
    pins = children.folder / "wanted.txt"
    pins.write_text("".join(f"{name}=={pin.version}\n" for name, pin in wanted.items() if not pin.is_local))
    # A folder that the user names holds torch, too; else it comes from its own index, and nothing else does.
    build = None if "UV_FIND_LINKS" in os.environ else torch_build(wanted)
    words = [*(["--torch-backend", build] if build else []), "--no-deps", "--no-build", "--requirement", str(pins)]
    _uv(children, uv, "the packages", "pip", "install", "--quiet", "--python", python, *words)
    (site,) = (venv / "lib").glob("python*/site-packages")
    found = {name: pin for name, pin in installed([str(site)]).items() if name in wanted}
    for name, pin in found.items():
        if wanted[name].files not in (None, pin.files):
            raise _cannot_have(f"{name} {pin.version} as it was: another build of it has other files")
    if unknown := sum(wanted[name].files is None for name in found):
        print(f"of {unknown} packages the pins do not say which files they had", flush=True)
    return python


def _uv(children: Children, uv: str, what: str, *words: str) -> None:
    # In its own folder, because the settings of a project that lies around this one are not the run's.
    process = children.start([uv, *words], cwd=children.folder, stderr=subprocess.PIPE, text=True, errors="replace")
    said = process.communicate()[1]
    children.end(process)
    if process.returncode != 0:
        lines = [line.strip().removeprefix("error: ") for line in said.splitlines() if line.strip()]
        raise _cannot_have(f"{what}: {shown('; '.join(lines[:2]))}")


def _cannot_have(what: str) -> UserError:
    return UserError(f"--rebuild cannot have {what}", ExitCode.RESOURCES)


def _lend(children: Children, wanted: Mapping[str, Pin]) -> Path:
    """A folder with this project's packages and their metadata, and nothing that lies beside them."""
    lent = children.folder / "lent"
    lent.mkdir()
    for name, package in _OWN.items():
        spec = find_spec(package)
        if name in wanted and wanted[name].is_local and spec is not None and spec.origin is not None:
            (lent / package).symlink_to(Path(spec.origin).parent)
            for told in metadata.distribution(name).files or []:
                if told.name == "METADATA":
                    (lent / Path(told).parent.name).symlink_to(Path(str(told.locate())).parent)
    if any(lent.iterdir()):
        tell_children_of_code()
    return lent


def _verify(children: Children, command: list[str], path: Path) -> int:
    """Run the command, whose Python finds what is lent at `path`; print each of its lines at once, return its code."""
    # The folder that this is called in may have a ddp_core, too, as a clone has.
    ours = {"PYTHONPATH": str(path), "PYTHONSAFEPATH": "1", "TMPDIR": str(children.folder)}
    process = children.start(command, env={**os.environ, **ours}, stdout=subprocess.PIPE, text=True, errors="replace")
    assert process.stdout is not None
    has_verdict = False
    for line in process.stdout:
        has_verdict |= line.startswith("different")
        print(line, end="", flush=True)
    code = process.wait()
    children.end(process)
    if code < 0 or (code == 1 and not has_verdict):  # Python itself ends with 1 where it cannot begin
        raise error_of(code if code < 0 else ExitCode.INTERNAL, (), command[2:])
    return code
