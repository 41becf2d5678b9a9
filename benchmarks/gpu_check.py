"""Find out on a machine with a GPU what holds and how fast it is, in the order of worth, and stop in time.

    make gpu-check PYTHON=python3 MINUTES=9 [OUT=folder] [SLICE=2/6] [ONLY="words"] [WHEELS=folder]
    python -m benchmarks.gpu_check --merge OUT

Nothing is installed and nothing is fetched: it runs with the packages that PYTHON has, says which are missing, and
takes those in WHEELS (wheels, or what is in them). Each result is appended to OUT/gpu_check.jsonl as it comes, with
the commit (by git, or DDP_GIT_COMMIT) and GPU. What is recorded there or in benchmarks/results, for the same two,
is left out, so the same command goes on where the last one stopped. `--merge` takes the lines of OUT into
benchmarks/results and writes docs/evidence/machines.md.

The list: (a) digests of the plainest layouts, (b) images per second, (c) all other digests, (d) that no step waits for
the device, (e) all other tests of tests/gpu. SLICE=2/6 runs the second sixth of (e) alone.

Trainings are forks of this process, which has torch loaded and never starts CUDA. This module itself imports nothing
that might be missing.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODULES = {
    **{"scikit-learn": "sklearn", "nvidia-ml-py": "pynvml", "pillow": "PIL", "pytest-xdist": "xdist"},
    "typing-extensions": "typing_extensions",
}
"""What is imported of a package of another name."""
VARIABLES = {
    # Otherwise torch starts the driver to count the devices, and a process that has cannot fork trainings.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "OMP_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
RESOURCES = 4


def missing() -> list[str]:
    """The packages that the project or its tests ask for, and that are not here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    names = [each.partition(">=")[0] for each in asked]
    return [name for name in names if PathFinder.find_spec(MODULES.get(name, name.replace("-", "_"))) is None]


@contextlib.contextmanager
def packages_from(folder: Path | None) -> Iterator[None]:
    """Find the tree, and the packages in `folder`, here and in every interpreter that is started in the block."""
    with tempfile.TemporaryDirectory(prefix="ddp-wheels-") as unpacked:
        places = [str(ROOT)]
        if folder is not None:
            wheels = sorted(folder.glob("*.whl"))
            for wheel in wheels:
                with zipfile.ZipFile(wheel) as packed:
                    packed.extractall(unpacked)
            places.append(unpacked if wheels else str(folder.resolve()))
        sys.path[1:1] = places
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*places, os.environ.get("PYTHONPATH")]))
        yield


def main() -> int:
    """Run the list, or merge; returns the exit code: 1 where something failed, 2 for wrong words, 4 without a GPU."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--slice", type=_slice, metavar="I/N", help="every N-th of the other tests, from the I-th on")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="only items with one of these in their name or part")
    parser.add_argument("--again", action="store_true", help="also what is recorded already")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels, or of packages")
    parser.add_argument("--jobs", type=int, default=max(1, min(4, (os.cpu_count() or 1) // 4)), help="at a time")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="OUT", help="take these folders' lines, and end")
    arguments = parser.parse_args()
    os.environ.update(VARIABLES)
    with packages_from(arguments.wheels):
        if lacking := missing():
            print(f"gpu-check: missing here: {', '.join(lacking)}", flush=True)
        try:
            from benchmarks import gpu_running
        except ImportError as error:
            print(f"gpu-check: cannot run: {error}; name a folder that has it: WHEELS=folder", file=sys.stderr)
            return RESOURCES
        if arguments.merge:
            return gpu_running.merge(arguments.merge)
        wanted = gpu_running.Wanted(arguments.out, arguments.slice, arguments.only, arguments.again, arguments.jobs)
        return gpu_running.check(wanted, began + 60 * arguments.minutes)


def _slice(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text}: a slice is I/N, such as 2/6")
    return int(number), int(count)


if __name__ == "__main__":
    sys.exit(main())
