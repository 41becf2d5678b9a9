"""Make an environment beside `.venv`, with another torch or another Python: for `make test-oldest`, `test-newest` …

    .venv/bin/python tools/other_environment.py .venv-oldest --torch oldest
    .venv/bin/python tools/other_environment.py .venv-newest --torch newest
    .venv/bin/python tools/other_environment.py .venv-3.12 --python python3.12

It gets what `.venv` has, in the same versions, but for torch and what torch pins itself. `oldest` is the torch with
which pyproject.toml begins; `newest` is the one that pip finds. Which build that is, for CUDA or the CPU, is left to
pip.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_TORCHS = re.compile(r"(torch|torchvision|setuptools|triton|cuda-.*|nvidia-.*)(==| @ )")
"""What belongs to one release of torch; of NVIDIA's packages nvidia-ml-py alone does not."""
_EDITABLE = ("list", "--editable", "--format", "json")


def torch_packages(release: str | None, project: str) -> list[str]:
    """What pip is asked for; nothing where torch is to be the one of `.venv`. `project`: pyproject.toml's text."""
    match release:
        case None:
            return []
        case "newest":
            return ["torch"]
        case "oldest":
            return [f"{name}=={first}" for name, first in re.findall(r'"(torch|torchvision)>=([\d.]+)', project)]
    return [f"torch=={release}"]


def split_pins(pins: list[str]) -> tuple[list[str], list[str]]:
    """The pins that have nothing to do with torch, and the others."""
    of_torch = [pin for pin in pins if _TORCHS.match(pin) and not pin.startswith("nvidia-ml-py==")]
    return [pin for pin in pins if pin not in of_torch], of_torch


def pip(python: Path | str, *words: str) -> str:
    """What pip prints. Raises CalledProcessError; its error messages have been shown by then."""
    full = [str(python), "-m", "pip", "--disable-pip-version-check", *words]
    return subprocess.run(full, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout


def make(folder: Path, python: str, release: str | None) -> None:
    """Install into the folder, unless it has been made from the same lists; the stamp comes last."""
    pins, of_torch = split_pins(pip(sys.executable, "freeze", "--exclude-editable").splitlines())
    ours = [each["editable_project_location"] for each in json.loads(pip(sys.executable, *_EDITABLE))]
    wanted = torch_packages(release, (ROOT / "pyproject.toml").read_text()) or of_torch
    stamp, record = folder / ".installed", "\n".join([python, *wanted, *pins, *ours])
    if stamp.is_file() and stamp.read_text() == record:
        return
    shutil.rmtree(folder, ignore_errors=True)
    print(f"{folder.name}: installing {' '.join(wanted[:2])} and the packages of .venv (minutes)", flush=True)
    subprocess.run([python, "-m", "venv", str(folder)], cwd=ROOT, check=True)
    own, kept = folder / "bin" / "python", folder / "pins.txt"
    kept.write_text("\n".join(pins) + "\n")
    pip(own, "install", "-qq", "-c", str(kept), "pip", "hatchling")
    pip(own, "install", "-qq", "-c", str(kept), *wanted)
    if "torchvision" not in " ".join(wanted):  # for the newest torch there may be none yet
        pip(own, "install", "-qq", "--no-deps", "torchvision")
    # Not asked again what fits: this torch may not be admitted by others, and that is what is to be tried.
    pip(own, "install", "-qq", "--no-deps", "-r", str(kept))
    for place in ours:
        pip(own, "install", "-qq", "--no-deps", "--no-build-isolation", "-e", place)
    stamp.write_text(record)
    found = [pin for pin in pip(own, "freeze").splitlines() if pin.startswith(("torch==", "torch @"))]
    print(f"{folder.name}: done, with {''.join(found)}; remove the folder to have it made anew", flush=True)


def main(words: list[str] | None = None) -> int:
    """Make the environment; 1 where pip cannot, with pip's message."""
    parser = argparse.ArgumentParser(prog="other_environment")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--torch", help="oldest, newest, or a release")
    parser.add_argument("--python", default=sys.executable)
    options = parser.parse_args(words)
    try:
        make(ROOT / options.folder, options.python, options.torch)
    except subprocess.CalledProcessError as failure:
        print(f"{options.folder}: {' '.join(failure.cmd[:6])} … ended with {failure.returncode}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
