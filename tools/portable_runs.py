"""Trains each shipped experiment under portable numerics on unlike CPUs, and keeps how it ended: `make portable-runs`.

    python -m tools.portable_runs [--on here Haswell EPYC-Rome-v2] [--only digits] [--workers 2]

Trainings are cut to what an emulator computes in minutes. Each record has the CPU, the command, the commit and the
digest of the weights. They go to docs/reference/portable-runs.json, and by `python -m tools.machines_seen` to the page
of machines seen. The exit code is 1 where a training ends with other weights than a record of the same command and
torch.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

from ddp_core.base.ending import said_by
from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.fingerprint import cpu_model
from ddp_core.numerics.limits import LIMITS
from ddp_core.record.directory import find_runs
from ddp_core.record.environment import describe_code
from tools.emulation import CPUS, emulator, python_on, version

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "docs" / "reference" / "portable-runs.json"
FORMAT = 1
RULES = 2
HERE = "here"
DIFFERENT = 1

TRAININGS: dict[str, tuple[str, ...]] = {
    "digits": ("max_steps=40",),
    "linear_regression": (),
    # Plain SGD ends the emulator (tools.emulation.FAULTS).
    "toy_mlp": ("optimizer.momentum=0.9",),
    "counter_buffer": (),
    "char_transformer": ("model.width=32", "max_steps=12"),
    "resnet18_synthetic": (
        *("data.image_size=32", "data.samples=32", "data.pool=32"),
        *("global_batch_size=8", "max_steps=4"),
    ),
}
"""The settings of each experiment's training; those without are whole."""

_PATIENCE = 7200.0
"""Seconds that an emulated training may take."""

Record = dict[str, Any]


@said_by("portable-runs")
def main() -> int:
    """Train, and keep what came out after each training."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--on", nargs="+", choices=(HERE, *CPUS), default=[HERE], help="this machine, or CPUs that qemu-user emulates"
    )
    parser.add_argument("--only", nargs="+", choices=TRAININGS, default=list(TRAININGS), help="which experiments")
    parser.add_argument("--workers", type=int, default=1, help="trainings at a time (%(default)s)")
    options = parser.parse_args()
    if set(options.on) != {HERE} and emulator() is None:
        raise UserError("an emulated CPU needs qemu-x86_64 (Debian: apt install qemu-user)")
    code = describe_code()  # before the records themselves change the checkout
    with ThreadPoolExecutor(options.workers) as pool:
        for record in pool.map(lambda each: trained(*each, code), product(options.only, options.on)):
            print(f"{record['cpu']}: {record['command']}\n  {record['weights_sha256']}", flush=True)
            keep(record)
    others = differences(json.loads(KEPT.read_text(encoding="utf-8")))
    for line in others:
        print(line)
    return DIFFERENT if others else ExitCode.DONE


def words_of(name: str) -> list[str]:
    """The command's words after `ddp`."""
    settings = [word for each in TRAININGS[name] for word in ("--set", each)]
    return ["train", name, "--device", "cpu", "--numerics", f"portable-{RULES}", *settings]


def trained(name: str, cpu: str, code: Mapping[str, Any]) -> Record:
    """Train on this machine's own CPU or an emulated one: the record. Raises UserError where that fails."""
    interpreter = [sys.executable] if cpu == HERE else python_on(cpu)
    words = words_of(name)
    with tempfile.TemporaryDirectory(prefix="ddp-portable-") as output:
        # The limits are set from outside: a program that starts itself anew, to set them, would leave the emulator.
        try:
            done = subprocess.run(
                [*interpreter, "-m", "ddp_core", *words, "--output", output],
                cwd=ROOT,
                env=os.environ | dict(LIMITS) | {"OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                timeout=_PATIENCE,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise UserError(f"{cpu}: `ddp {' '.join(words)}` did not end within {_PATIENCE:.0f} s") from None
        if done.returncode != 0:
            said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
            raise UserError(f"{cpu}: `ddp {' '.join(words)}` ended with {done.returncode}: {said}")
        _, run = next(find_runs(Path(output)))
    return {
        "format": FORMAT,
        "command": " ".join(["ddp", *words]),
        "experiment": name,
        "rules": RULES,
        "weights_sha256": run["weights_sha256"],
        "cpu": cpu_model() if cpu == HERE else cpu,
        "emulator": None if cpu == HERE else f"qemu-x86_64 {version()}",
        "date": datetime.now(UTC).date().isoformat(),
        "code": dict(code),
        "versions": {each: run["environment"]["packages"][each] for each in ("torch", "numpy")},
    }


def keep(record: Record) -> None:
    """Add a record, in the place of an older one of the same command, CPU and torch."""
    records: list[Record] = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else []
    kept = [each for each in records if _who(each) != _who(record)]
    KEPT.write_text(json.dumps([*kept, record], indent=1) + "\n", encoding="utf-8")


def _who(record: Record) -> list[Any]:
    return [record[name] for name in ("command", "cpu", "emulator")] + [record["versions"]["torch"]]


def differences(records: Sequence[Record]) -> list[str]:
    """A line for each command whose records of one torch have several digests."""
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for each in records:
        release = each["versions"]["torch"].partition("+")[0]
        found.setdefault((each["command"], release), {}).setdefault(each["weights_sha256"], []).append(each["cpu"])
    return [
        f"{command} (torch {release}) differs: "
        + "; ".join(f"{digest[:12]} on {', '.join(cpus)}" for digest, cpus in by_digest.items())
        for (command, release), by_digest in found.items()
        if len(by_digest) > 1
    ]


def table(records: Sequence[Record]) -> str:
    """A row for each command and digest, with the CPUs that ended with it."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for each in records:
        commit = (each["code"].get("commit") or each["code"].get("version") or "not told")[:8]
        cpu = each["cpu"] + (", emulated" if each["emulator"] else "")
        key = (each["command"], each["versions"]["torch"].partition("+")[0], each["weights_sha256"])
        rows.setdefault(key, []).append(f"{cpu} ({each['date']}, {commit})")
    head = "| command | torch | weights | on |\n|---|---|---|---|\n"
    return head + "\n".join(
        f"| `{command}` | {torch} | `{digest[:12]}…` | {'; '.join(cpus)} |"
        for (command, torch, digest), cpus in sorted(rows.items())
    )


if __name__ == "__main__":
    sys.exit(main())
