"""Makes the published digests of portable numerics, ddp_lab/probe/portable-digests-2.json: `make portable-digests`.

On a machine with AVX2 it computes the digest of every operation of `ddp probe`, of the weights after short
trainings, and of those after whole runs of the experiments whose own numerics are portable. `--confirm` then runs the
probe once on every emulated CPU, and writes down after each CPU which digests it reproduces. A CPU that has confirmed
the table with the same code is not asked again, so the command can be interrupted and given once more.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from ddp_core.base.ending import said_by
from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.fingerprint import cpu_model
from ddp_core.experiment.file import INSTALLED, list_experiments, load_experiment
from ddp_core.numerics.limits import RULES
from ddp_core.record.directory import find_runs
from ddp_lab.probe.command import measured
from ddp_lab.probe.operations import all_operations
from ddp_lab.probe.published import PLACE, Published, Steps, published, release
from tools.confirmation import confirm

ROOT = Path(__file__).parents[1]
STEPS = {
    "char_transformer": ["max_steps=2"],
    "counter_buffer": ["max_steps=2"],
    "digits": ["max_steps=2"],
    "linear_regression": ["max_steps=2"],
    "resnet18_synthetic": [
        *("data.image_size=64", "data.samples=16", "data.pool=16"),
        *("global_batch_size=8", "max_steps=2"),
    ],
    "toy_mlp": ["max_steps=2"],
}
"""The short trainings: settings by experiment, for all that need no download."""


@said_by("portable-digests")
def main() -> int:
    """Write the table. Raises UserError where a whole run or an operation fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--confirm", action="store_true", help="Also run the probe on emulated CPUs (minutes).")
    options = parser.parse_args()
    table = _made(published() if PLACE.exists() else None)
    _write(table)
    if options.confirm:
        confirm(table, _write)
    return ExitCode.DONE


def _made(before: Published | None) -> Published:
    """The table as this machine computes it; dates and confirmations are those `before` where no digest has changed."""
    blank = Published(
        rules=RULES,
        torch="",
        numpy="",
        made_on={"cpu": cpu_model(), "date": _today()},
        operations=dict.fromkeys(all_operations(), ""),
        training_steps={name: Steps(settings, "") for name, settings in STEPS.items()},
        runs={},
    )
    versions, found = measured(blank)
    for (_, name), answer in found.items():
        if "digest" not in answer:
            raise UserError(f"{name}: {answer['trouble']}")
    digests = {key: answer["digest"] for key, answer in found.items()}
    table = replace(
        blank,
        torch=release(versions["torch"]),
        numpy=versions["numpy"],
        operations={name: digests["operations", name] for name in blank.operations},
        training_steps={name: Steps(settings, digests["training_steps", name]) for name, settings in STEPS.items()},
        runs={name: _whole_run(name) for name in _portable_experiments()},
    )
    if before is None:
        return table
    if replace(table, made_on=before.made_on, confirmed_by=before.confirmed_by) == before:
        print("portable-digests: no digest has changed")
        return before
    _say_what_changed(before, table)
    probed = [(each.rules, each.torch, each.operations, each.training_steps) for each in (before, table)]
    if probed[0] == probed[1]:
        return replace(table, confirmed_by=before.confirmed_by)
    if before.confirmed_by:
        print("portable-digests: what emulated CPUs have confirmed was another table; confirm anew with CONFIRM=1")
    return table


def _say_what_changed(before: Published, after: Published) -> None:
    old, new = before.to_json(), after.to_json()
    for kind in ("operations", "training_steps", "runs"):
        names = [name for name in sorted(old[kind] | new[kind]) if old[kind].get(name) != new[kind].get(name)]
        if names:
            print(f"portable-digests: {kind}, changed: {', '.join(names)}")


def _portable_experiments() -> list[str]:
    """The experiments that come with the package and whose own numerics are portable."""
    names = [each.name for each in list_experiments([INSTALLED])]
    return [name for name in names if load_experiment(str(INSTALLED / f"{name}.py")).experiment.numerics == "portable"]


def _whole_run(name: str) -> str:
    """The digest of the weights after a whole run under portable numerics."""
    with tempfile.TemporaryDirectory(prefix="ddp-portable-") as scratch:
        words = ["train", name, "--device", "cpu", "--numerics", "portable", "--output", scratch]
        done = subprocess.run(
            [sys.executable, "-m", "ddp_core", *words], cwd=ROOT, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise UserError(f"`ddp {' '.join(words)}` ended with {done.returncode}: {done.stderr.strip()}")
        _, record = next(find_runs(Path(scratch)))
        print(f"portable-digests: {name} ends with {record['weights_sha256']}", flush=True)
        return str(record["weights_sha256"])


def _write(table: Published) -> None:
    PLACE.write_text(json.dumps(table.to_json(), indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


if __name__ == "__main__":
    sys.exit(main())
