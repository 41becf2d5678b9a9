"""Which of torch's operations do other people's models call, and what is known of their bits: a list.

    python -m tests.foreign.operations [--only timm transformers.bert] [--workers 2] [--again]

Trains each model of the fleet for one step under portable numerics with a profiler, and keeps the names in
benchmarks/results/foreign-operations.json, from which `python -m tools.portable_operations --page` writes the page. It
goes on where it was ended; --again traces all anew.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from ddp_core.base.determinism import choose_kernels
from ddp_core.base.errors import UserError
from ddp_core.numerics.kernels import portable_kernels
from ddp_core.numerics.known import NAME, NOT_OURS
from ddp_core.numerics.limits import LIMITS, limits_hold
from ddp_lab.probe.child import trained
from ddp_lab.records import record_text
from tests.foreign import driver
from tests.foreign.fleet import EXPERIMENTS, Case, fleet
from tests.support.pool import in_processes

KEPT = Path(__file__).parents[2] / "benchmarks" / "results" / "foreign-operations.json"
GROUPS = ("torchvision", "timm", "transformers")


def main() -> int:
    """Trace the models that are asked for, and keep what they call; starts itself anew without the limits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="cases that begin so: timm")
    parser.add_argument("--workers", type=int, default=1, help="cases at a time (%(default)s)")
    parser.add_argument("--again", action="store_true", help="also what has been traced")
    options = parser.parse_args()
    if not limits_hold():
        words = [sys.executable, "-m", "tests.foreign.operations", *sys.argv[1:]]
        os.execve(sys.executable, words, {**os.environ, **LIMITS, "OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99"})
    driver.load(GROUPS)
    kept: dict[str, Any] = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
    cases = [case for case in fleet(options.only) if case.group in GROUPS and (options.again or case.key not in kept)]
    for case, found in in_processes(cases, called, options.workers, is_alone=lambda case: case.is_large):
        kept[case.key] = found or {"trouble": "its process has died"}
        print(f"{case.key}: {kept[case.key].get('trouble') or len(kept[case.key]['operations'])}", flush=True)
        KEPT.write_text(record_text(dict(sorted(kept.items()))) + "\n", encoding="utf-8")
    return 0


def called(case: Case) -> dict[str, Any]:
    """The names of all operations of one step, or what prevents the step."""
    choose_kernels()
    try:
        with portable_kernels(), tempfile.TemporaryDirectory() as data, torch.autograd.profiler.profile() as profiler:
            trained(EXPERIMENTS / case.file, [*case.settings, "max_steps=1"], Path(data))
    except UserError as error:
        return {"trouble": str(error)}
    names = {event.name() for event in profiler.kineto_results.events()}
    return {"operations": sorted(name for name in names if NAME.fullmatch(name) and not name.startswith(NOT_OURS))}


if __name__ == "__main__":
    sys.exit(main())
