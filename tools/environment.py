"""Make `.venv` and `.env`: what `make setup` does. Standard library only: it runs before anything is installed.

`.venv` gets everything that constraints.txt pins and pyproject.toml asks for. It is made anew when either list changes,
or when TORCH asks for another build of torch than it has (torch_build.py), and left alone otherwise. `.env` tells
Docker Compose which user the containers run as, so that a later, bare `docker compose up` knows it.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

from torch_build import Build, asked_build, choose_build, installed_version, is_build, nvidia_driver

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".venv"
STAMP = ENVIRONMENT / ".installed"
EXTRAS = "cluster,test,lint"


def fingerprint() -> str:
    """A digest over all that decides what is installed: pins, dependency lists, Python's version, this directory."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    names = ("dependencies", "optional-dependencies", "scripts", "entry-points")
    lists = {name: project["project"].get(name) for name in names}
    packages = [project["build-system"], project["tool"]["hatch"]]
    pins = (ROOT / "constraints.txt").read_text()
    record = [pins, lists, packages, sys.version_info[:2], str(ROOT)]
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def pins() -> dict[str, str]:
    """The versions in constraints.txt, by package."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {name: version for name, equals, version in (line.partition("==") for line in lines) if equals}


def make_environment(build: Build | None) -> None:
    """Install into a fresh `.venv`; the stamp comes last, so that an interrupted installation is begun again."""
    wanted = fingerprint()
    as_asked = build is None or is_build(installed_version(ENVIRONMENT), build)
    if STAMP.is_file() and STAMP.read_text() == wanted and as_asked:
        return
    version = sys.version.split()[0]
    print(f"setup: installing the pinned packages into .venv, Python {version} (minutes, the first time)", flush=True)
    venv.create(ENVIRONMENT, clear=True, with_pip=True)
    python = str(ENVIRONMENT / "bin" / "python")
    install = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "-c", "constraints.txt"]
    subprocess.run([*install, "pip", "hatchling"], cwd=ROOT, check=True)
    choice = choose_build(python, pins(), build, nvidia_driver())
    print(f"setup: {choice.reason}", flush=True)
    # Without build isolation the pinned hatchling builds the project, not whatever is newest today.
    subprocess.run([*install, "--no-build-isolation", "-e", f".[{EXTRAS}]", *choice.words], cwd=ROOT, check=True)
    STAMP.write_text(wanted)
    print(f"setup: done, with torch {installed_version(ENVIRONMENT)}", flush=True)


def engine_is_rootless() -> bool:
    """Whether the engine maps this user to the container's root, so that only that root writes this user's files."""
    try:
        answer = subprocess.run(
            ["docker", "info", "--format", "{{.SecurityOptions}}"],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return "rootless" in answer.stdout


def make_dotenv() -> None:
    """Write who runs the containers into `.env`; every other line of that file is the user's and stays."""
    path = ROOT / ".env"
    before = path.read_text().splitlines() if path.exists() else []
    identity = {"DDP_UID": str(os.getuid()), "DDP_GID": str(os.getgid())}
    if all(f"{name}={value}" in before for name, value in identity.items()):
        return
    identity["DDP_IDENTITY"] = "detected" if engine_is_rootless() else "known"
    kept = [line for line in before if line.partition("=")[0] not in identity]
    path.write_text("\n".join([*kept, *(f"{name}={value}" for name, value in identity.items())]) + "\n")


def main() -> int:
    """Make both; 1 with pip's own message where the installation fails, 2 for a TORCH that is no build."""
    try:
        build = asked_build()
    except ValueError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 2
    make_dotenv()
    try:
        make_environment(build)
    except subprocess.CalledProcessError as failure:
        print(
            f"setup: {' '.join(failure.cmd[1:4])} ended with {failure.returncode}; see its message above",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
