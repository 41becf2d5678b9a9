"""`ddp launch-files`: what SLURM, Docker Swarm and Kubernetes are given, copied to where it is submitted."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from ddp_core.base.ending import said_by
from ddp_core.base.errors import ExitCode, UserError
from ddp_lab.options import Parser

_HERE = Path(__file__).parent
FILES = next(folder for folder in (_HERE / "launch", _HERE.parent / "launch") if folder.is_dir())
"""Where they are: in an installed package beside this module, in a checkout at the top."""
SCHEDULERS = ("slurm", "swarm", "kubernetes")


@said_by("ddp")
def main(arguments: Sequence[str] | None = None) -> int:
    """Copy the files for SLURM, Swarm and Kubernetes to here."""
    parser = Parser(
        prog="ddp launch-files",
        description="Copy the files that schedulers are given, as the how-to pages use them. Nothing is overwritten.",
    )
    parser.add_argument("schedulers", nargs="*", metavar="SCHEDULER", help=f"{', '.join(SCHEDULERS)}; default: all")
    parser.add_argument("--to", type=Path, default=Path("launch"), metavar="DIR", help="default: launch")
    known = parser.parse_args(arguments)
    for scheduler in known.schedulers or SCHEDULERS:
        if scheduler not in SCHEDULERS:
            raise UserError(f"no files for {scheduler}; there are some for {', '.join(SCHEDULERS)}")
        if (target := known.to / scheduler).exists():
            raise UserError(f"{target} is there already: move it away, or name another folder with --to DIR")
        shutil.copytree(FILES / scheduler, target)
        for file in sorted(target.iterdir()):
            print(file)
    return ExitCode.DONE
