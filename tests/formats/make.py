"""Make fixture files of every document that is read back, as this version writes them: `python -m tests.formats.make`.

They go into a new folder, named after the version of samebits. A folder that is there is never written again.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu_lines import append
from ddp_core import __version__
from ddp_core.base.errors import ExitCode
from ddp_core.checkpoint.manifest import MANIFEST_FORMAT
from ddp_core.record.bundles import BUNDLE_FORMAT
from ddp_core.record.directory import RECORD_FORMAT, find_runs
from ddp_lab.chaos.judge import DrillReport, FaultReport, judge
from ddp_lab.records import CLAIM_FORMAT, DRILL_FORMAT
from tests.lab.report.files import write_claim
from tests.support.commands import command

FOLDER = Path(__file__).parent
FORMATS = {
    "run": RECORD_FORMAT,
    "checkpoint": MANIFEST_FORMAT,
    "bundle": BUNDLE_FORMAT,
    "drill": DRILL_FORMAT,
    "claim": CLAIM_FORMAT,
}
"""What today's code writes and reads back."""
TOLD = "told.json"
"""The file that says of which formats the fixtures beside it are, and what must be read from them."""


def make(folder: Path) -> None:
    """Write the fixtures into a new folder. Ends the program where a training does not end as it should."""
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        shutil.copy(FOLDER / "tiny.py", place)
        often = ("--checkpoint-every", "2", "--digest-every", "1")
        finished = _train(place, "finished", ExitCode.DONE, *often, "--keep-for-audit", "2")
        shards = ("--layout", "ddp", "--nproc-per-node", "2", "--shard", "optimizer", "--max-restarts", "0")
        # A slow step leaves the save of the step before it the time to end.
        faults = ("--fault", "slow@3:1", "--fault", "kill@3:1")
        killed = _train(place, "killed", ExitCode.PEERS_LOST, *often, *shards, *faults)
        _ddp(place, ExitCode.DONE, "bundle", str(finished.relative_to(place)), "-o", "bundle.zip")
        _write_drill(finished)
        folder.mkdir()
        shutil.copytree(finished, folder / "finished")
        shutil.copytree(killed, folder / "killed")
        shutil.copy(place / "bundle.zip", folder)
    write_claim(folder, id="C01")
    device = {"device": "none", "devices": 1, "multiprocessors": 1, "driver": "0", "torch": "2.13.0"}
    head: dict[str, Any] = {"commit": "0" * 40, "dirty": False, "on": device, "stand_in": False}
    append(folder / "gpu_check.jsonl", head, {"item": "tests/gpu/one", "outcome": "passed", "said": [], "seconds": 1.0})
    record = json.loads((folder / "finished" / "run.json").read_text())
    told = {name: record[name] for name in ("weights_sha256", "ema_sha256", "data_sha256")}
    told |= {"steps": record["result"]["steps"], "killed_after": 2, "killed_files": 2}
    (folder / TOLD).write_text(json.dumps({"formats": FORMATS} | told, indent=1) + "\n")


def _train(place: Path, output: str, code: ExitCode, *words: str) -> Path:
    """Train below `place`, whose path no file shall hold; return the run directory."""
    _ddp(place, code, "train", "tiny.py", "--device", "cpu", "--output", output, *words)
    ((directory, _),) = find_runs(place / output)
    return directory.path


def _ddp(place: Path, code: ExitCode, *words: str) -> None:
    ended = command(*words, cwd=place)
    if ended.code != code:
        sys.exit(f"ddp {' '.join(words)} has ended with {ended.code}:\n{ended.output}{ended.errors}")


def _write_drill(run: Path) -> None:
    """Write drill.json as after a drill in which one node was killed."""
    faults = [FaultReport("kill node 1", 2, 0.5, 2.5, 1, "recovered", {"1": 137})]
    report = DrillReport("one fault", "local", 1, faults, seconds=9.5)
    judge(report, run, run)
    report.run = run.name
    (run / "drill.json").write_text(json.dumps(report.to_json(), indent=1) + "\n")


if __name__ == "__main__":
    target = FOLDER / __version__
    if target.exists():
        sys.exit(f"{target} is there: what a version has written is never written again")
    make(target)
    print(f"{target}: {sum(file.stat().st_size for file in target.rglob('*') if file.is_file()):,} bytes")
