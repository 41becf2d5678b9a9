"""Make `.venv` and `.env`: what `make setup` does. Standard library only: it runs before anything is installed.

`.venv` gets everything that constraints.txt pins and pyproject.toml asks for. It is made anew when either list changes,
or when TORCH asks for another build of torch than it has (torch_build.py), and left alone otherwise. With INSTALLER=uv
all but torch comes from uv.lock, in seconds. What was installed is imported before "done" is said. `.env` tells Docker
Compose which user the containers run as, so that a later, bare `docker compose up` knows it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator
from pathlib import Path

from torch_build import Build, asked_build, choose_build, installed_version, is_build, nvidia_driver

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".venv"
STAMP = ENVIRONMENT / ".installed"
EXTRAS = ("report", "cluster", "vision", "tensorboard", "test", "lint")
LABORATORY = Path("packages") / "lab"
HOOK = ROOT / "tools" / "torchvision_hook.py"


def fingerprint() -> str:
    """A digest over all that decides what is installed: pins, dependency lists, Python's version, this directory."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    names = ("dependencies", "optional-dependencies", "scripts")
    lists = {name: project["project"].get(name) for name in names}
    packages = [project["build-system"], project["tool"]["hatch"]]
    texts = [file.read_text() for file in (ROOT / "constraints.txt", HOOK, ROOT / LABORATORY / "pyproject.toml")]
    record = [texts, lists, packages, sys.version_info[:2], str(ROOT)]
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def pins() -> dict[str, str]:
    """The versions in constraints.txt, by package."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {name: version for name, equals, version in (line.partition("==") for line in lines) if equals}


def asked_uv() -> str | None:
    """The program uv where INSTALLER=uv asks for it. Raises ValueError where it is missing, and for other words."""
    installer = os.environ.get("INSTALLER") or "pip"
    if installer not in ("pip", "uv"):
        raise ValueError(f"INSTALLER={installer}: use INSTALLER=uv, or leave it out and pip installs")
    program = shutil.which("uv") if installer == "uv" else None
    if installer == "uv" and program is None:
        raise ValueError("INSTALLER=uv: there is no uv on PATH; install it (`pipx install uv`), or leave INSTALLER out")
    return program


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """A block in which no other setup of this directory installs; waits for one that does."""
    directory = os.open(ROOT, os.O_RDONLY)
    try:
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("setup: waiting for another setup of this directory", flush=True)
            fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)


def make_environment(build: Build | None, uv: str | None = None) -> None:
    """Install into a fresh `.venv`; the stamp comes last, so that an interrupted installation is begun again."""
    wanted, installed = fingerprint(), installed_version(ENVIRONMENT)
    # `uv sync` takes torch away, which uv.lock does not name.
    as_asked = installed is not None if build is None else is_build(installed, build)
    if STAMP.is_file() and STAMP.read_text() == wanted and as_asked:
        return
    version = sys.version.split()[0]
    print(f"setup: installing the pinned packages into .venv, Python {version} (minutes, the first time)", flush=True)
    if ENVIRONMENT.is_symlink():
        ENVIRONMENT.unlink()  # where it leads may be another project's, and would be cleared
    venv.create(ENVIRONMENT, clear=True, with_pip=True)
    python = str(ENVIRONMENT / "bin" / "python")
    install = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "-c", "constraints.txt"]
    subprocess.run([*install, "pip", "hatchling"], cwd=ROOT, check=True)
    choice = choose_build(python, pins(), build, nvidia_driver())
    print(f"setup: {choice.reason}", flush=True)
    if uv is not None:
        sync = [uv, "sync", "--quiet", "--frozen", "--inexact", "--no-build-isolation"]
        extras = [word for extra in EXTRAS for word in ("--extra", extra)]
        settings = os.environ | {"UV_PROJECT_ENVIRONMENT": str(ENVIRONMENT)}
        subprocess.run([*sync, *extras, "--python", python], cwd=ROOT, env=settings, check=True)
    # Without build isolation the pinned hatchling builds the project, not whatever is newest today.
    project = ["--no-build-isolation", "-e", f".[{','.join(EXTRAS)}]", "-e", str(LABORATORY)]
    subprocess.run([*install, *project, *choice.words], cwd=ROOT, check=True)
    require_imports(python)
    STAMP.write_text(wanted)
    print(f"setup: done, with torch {installed_version(ENVIRONMENT)}", flush=True)


def require_imports(python: str) -> None:
    """Import what was installed, and mend a torchvision of another build than torch. Raises ImportError."""
    failed = failed_imports(python)
    if "torchvision" in failed and "torchvision::nms" in failed["torchvision"]:
        (packages,) = ENVIRONMENT.glob("lib/python3*/site-packages")
        shutil.copy(HOOK, packages)
        (packages / f"{HOOK.stem}.pth").write_text(f"import {HOOK.stem}\n")
        failed = failed_imports(python)
        if "torchvision" not in failed:
            print(
                "setup: this torchvision was built for another torch; `import torchvision` works, but its compiled "
                "operators (torchvision.ops.nms, roi_align …) do not",
                flush=True,
            )
    if failed:
        raise ImportError("; ".join(f"import {module}: {error}" for module, error in failed.items()))


def failed_imports(python: str) -> dict[str, str]:
    """What of the installed packages cannot be imported, with the error of each."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"]
    words = [python, "-W", "ignore", "tools/installed_imports.py", project]
    done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    failed: dict[str, str] = json.loads(done.stdout)
    return failed


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
    """Make both; 1 where installing fails (with pip's message) or importing does, 2 for a wrong TORCH or INSTALLER."""
    try:
        build, uv = asked_build(), asked_uv()
    except ValueError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 2
    try:
        with alone():
            make_dotenv()
            make_environment(build, uv)
    except subprocess.CalledProcessError as failure:
        print(
            f"setup: {' '.join(failure.cmd[:4])} ended with {failure.returncode}; see its message above",
            file=sys.stderr,
        )
        return 1
    except ImportError as failure:
        print(f"setup: installed, but not usable: {failure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
