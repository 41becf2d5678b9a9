"""Trains each shipped experiment under portable numerics on unlike CPUs, and keeps how it ended: `make portable-runs`.

    python -m tools.portable_runs [--on here Haswell EPYC-Rome-v2] [--only digits] [--workers 2]

Trainings are cut to what an emulator computes in minutes. Each record has the CPU, the command, the commit and the
digest of the weights. They go to benchmarks/results/portable-runs.json, each as soon as its training has ended, and by
`python -m tools.machines_seen` to the page of machines seen. What this code has already recorded is not trained again,
so the command can be interrupted and given once more. The exit code is 1 where a training ends with other weights than
a record of the same command and torch.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Any

from ddp_core.base.ending import said_by
from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.fingerprint import cpu_model
from ddp_core.numerics.limits import RULES
from ddp_core.record.directory import find_runs
from ddp_lab.records import record_text
from tools.emulation import CPUS, emulator, python_on, version
from tools.same_code import code_here, is_same
from tools.side_by_side import Ended, ended

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "benchmarks" / "results" / "portable-runs.json"
FORMAT = 1
HERE = "here"
DIFFERENT = 1

TRAININGS: dict[str, tuple[str, ...]] = {
    # Plain SGD ends the emulator (tools.emulation.FAULTS).
    "toy_mlp": ("optimizer.momentum=0.9",),
    "counter_buffer": (),
    "linear_regression": (),
    "digits": ("max_steps=40",),
    "char_transformer": ("model.width=32", "max_steps=12"),
    "resnet18_synthetic": (
        *("data.image_size=32", "data.samples=32", "data.pool=32"),
        *("global_batch_size=8", "max_steps=4"),
    ),
}
"""The settings of each experiment's training, the shortest first; those without settings are whole."""

_PATIENCE = 4 * 3600.0
"""Seconds that a training may take, which are minutes on a quiet machine."""

Record = dict[str, Any]


@said_by("portable-runs")
def main() -> int:
    """Train what is not recorded yet, and keep what came out after each training."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--on", nargs="+", choices=(HERE, *CPUS), default=[HERE], help="this machine, or CPUs that qemu-user emulates"
    )
    parser.add_argument("--only", nargs="+", choices=TRAININGS, default=list(TRAININGS), help="which experiments")
    parser.add_argument("--workers", type=int, default=1, help="trainings at a time (%(default)s)")
    options = parser.parse_args()
    if set(options.on) != {HERE} and emulator() is None:
        raise UserError("an emulated CPU needs qemu-x86_64 (Debian: apt install qemu-user)")
    code = code_here()
    asked = [pair for pair in product(TRAININGS, options.on) if pair[0] in options.only]
    new = [pair for pair in asked if not is_recorded(*pair, code)]
    if len(new) < len(asked):
        print(f"{len(asked) - len(new)} of {len(asked)} trainings are recorded of this code", flush=True)
    failed = train(new, options.workers, code)
    others = differences(recorded())
    for line in others:
        print(line)
    if failed:
        raise UserError(f"{failed} of {len(new)} trainings failed, as said above; the others are recorded")
    return DIFFERENT if others else ExitCode.DONE


def train(trainings: Sequence[tuple[str, str]], at_a_time: int, code: Mapping[str, Any]) -> int:
    """Train each experiment on the CPU beside its name, and keep its record; returns how many failed."""
    failed = 0
    with tempfile.TemporaryDirectory(prefix="ddp-portable-") as scratch:
        outputs = {pair: Path(scratch, *pair) for pair in trainings}
        commands = {pair: _command(*pair, output) for pair, output in outputs.items()}
        with ended(commands, at_a_time, _PATIENCE) as results:
            for (name, cpu), how in results:
                said = f"{cpu}: {' '.join(words_of(name))}\n  "
                if how.code != 0:
                    failed += 1
                    ending = f"did not end within {_PATIENCE:.0f} s" if how.code is None else f"ended with {how.code}"
                    print(f"{said}{ending}: {how.last_line}", file=sys.stderr, flush=True)
                    continue
                record = _record(name, cpu, outputs[name, cpu], how, code)
                keep(record)
                print(f"{said}{record['weights_sha256']}, {how.processor_seconds:.0f} s", flush=True)
    return failed


def words_of(name: str) -> list[str]:
    """The command that trains an experiment."""
    settings = [word for each in TRAININGS[name] for word in ("--set", each)]
    return ["ddp", "train", name, "--device", "cpu", "--numerics", "portable", *settings]


def _command(name: str, cpu: str, output: Path) -> list[str]:
    interpreter = [sys.executable] if cpu == HERE else python_on(cpu)
    return [*interpreter, "-m", "ddp_core", *words_of(name)[1:], "--output", str(output)]


def _record(name: str, cpu: str, output: Path, how: Ended, code: Mapping[str, Any]) -> Record:
    _, run = next(find_runs(output))
    return {
        "format": FORMAT,
        "experiment": name,
        "rules": RULES,
        "weights_sha256": run["weights_sha256"],
        "processor_seconds": how.processor_seconds,
        "date": datetime.now(UTC).date().isoformat(),
        "code": dict(code),
        **_of_what(name, cpu),
    }


def _of_what(name: str, cpu: str) -> Record:
    """What a record is of: two records that agree in this are of the same training."""
    return {
        "command": " ".join(words_of(name)),
        "cpu": cpu_model() if cpu == HERE else cpu,
        "emulator": None if cpu == HERE else f"qemu-x86_64 {version()}",
        "versions": {each: metadata.version(each) for each in ("torch", "numpy")},
    }


def is_recorded(name: str, cpu: str, code: Mapping[str, Any]) -> bool:
    """Whether this training has been recorded of the same code."""
    wanted = _of_what(name, cpu)
    return any(
        all(each[field] == value for field, value in wanted.items()) and is_same(each["code"], code)
        for each in recorded()
    )


def recorded() -> list[Record]:
    """What has been kept."""
    records: list[Record] = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else []
    return records


def keep(record: Record) -> None:
    """Add a record, in the place of an older one of the same command, CPU and torch."""
    kept = [each for each in recorded() if _who(each) != _who(record)]
    KEPT.write_text(record_text([*kept, record]) + "\n", encoding="utf-8")


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
    """A row for each training and digest of one torch, below the CPUs that ended with it."""
    cpus: dict[tuple[str, str, str], list[str]] = {}
    for each in records:
        key = (each["versions"]["torch"].partition("+")[0], each["command"], each["weights_sha256"])
        cpus.setdefault(key, []).append(each["cpu"] + (" (emulated)" if each["emulator"] else ""))
    rows: dict[tuple[str, str], list[str]] = {}
    for (torch, command, digest), found in sorted(cpus.items()):
        short = command.replace(" --device cpu --numerics portable", "")
        rows.setdefault((torch, ", ".join(sorted(found))), []).append(f"- `{short}`: `{digest[:12]}…`")
    return "\n\n".join(
        f"With torch {torch} on {on}:\n\n" + "\n".join(trainings) for (torch, on), trainings in rows.items()
    )


if __name__ == "__main__":
    sys.exit(main())
