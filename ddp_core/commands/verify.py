"""Train a run again from its record and judge; train one experiment on every layout and set the digests side by
side.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ddp_core.determinism.fingerprint import differences
from ddp_core.errors import ExitCode, UserError
from ddp_core.observe.metrics import read_metrics
from ddp_core.run.directory import RunDirectory, find_runs

DIFFERENT = 1
"""Exit code of `ddp verify` where the same fingerprint gave other weights."""


def verify(path: Path, layout: str | None, device: str | None, nproc_per_node: int | None) -> int:
    """Repeat the run at `path`, on its own layout or another; 0 when the weights are the same bits.

    Raises UserError for a run that was not completed or whose repetition fails.
    """
    directory = RunDirectory(path)
    record = directory.read()
    if record["status"] != "completed":
        raise UserError(
            f"{path} is {record['status']}, so it has no weights to verify; finish it with `--resume {path}`"
        )
    if record["options"]["reduction"] != "exact" and layout not in (None, record["layout"]["kind"]):
        raise UserError(f"{path} used the plain reduction, whose bits depend on the layout; verify it without --layout")
    with tempfile.TemporaryDirectory(prefix="ddp-verify-") as scratch:
        again = _train_again(directory, record, Path(scratch), layout, device, nproc_per_node)
        return _judge(directory, record, again)


def _train_again(
    directory: RunDirectory,
    record: dict[str, Any],
    scratch: Path,
    kind: str | None,
    device: str | None,
    nproc: int | None,
) -> RunDirectory:
    before = record["layout"]
    kind = kind or before["kind"]
    count = nproc or (
        1
        if kind == "single"
        else max(2, before["nnodes"] * before["nproc_per_node"])
        if kind != before["kind"]
        else before["nnodes"] * before["nproc_per_node"]
    )
    options = record["options"]
    command = [
        "train", str(directory.path / "experiment.py"), "--record", str(directory.path / "run.json"),
        "--layout", kind, "--device", device or before["device"], "--nproc-per-node", str(count),
        "--reduction", options["reduction"], "--output", str(scratch), "--data-dir", options["data_dir"],
    ]  # fmt: skip
    if options["digest_every"]:
        command += ["--digest-every", str(options["digest_every"])]
    print(
        f"training {record['experiment']['name']} again on {kind}, {count} process{'es' if count > 1 else ''} …",
        flush=True,
    )
    _run(command)
    return next(run for run, _ in find_runs(scratch))


def _judge(directory: RunDirectory, record: dict[str, Any], again: RunDirectory) -> int:
    repeated = again.read()
    print(f"recorded  {record['weights_sha256']}  {record['layout']['label']}")
    print(f"repeated  {repeated['weights_sha256']}  {repeated['layout']['label']}")
    other = differences(repeated["fingerprint"], record["fingerprint"])
    if record["weights_sha256"] == repeated["weights_sha256"]:
        print("identical" + (f" (although the fingerprint differs: {other[0]})" if other else ""))
        return ExitCode.DONE
    if record["data_sha256"] != repeated["data_sha256"]:
        print("different: the data set is not the one that was recorded")
    elif other:
        print(f"different, under another fingerprint, which the promise does not cover: {'; '.join(other)}")
    else:
        print(f"different under the same fingerprint: {_first_difference(directory, again)}")
    return DIFFERENT


def _first_difference(ours: RunDirectory, theirs: RunDirectory) -> str:
    """Where the digests in the metrics part, and by how much the losses do."""
    here, there = ({entry["step"]: entry for entry in read_metrics(run.metrics, "digest")} for run in (ours, theirs))
    for step in sorted(here.keys() & there.keys()):
        if here[step]["weights_sha256"] != there[step]["weights_sha256"]:
            losses = [
                {entry["step"]: entry["loss"] for entry in read_metrics(run.metrics, "step")}.get(step)
                for run in (ours, theirs)
            ]
            gap = f", loss {losses[0]:.9g} against {losses[1]:.9g}" if None not in losses else ""
            return f"the weights part at or before step {step}{gap}{_weight_gap(ours, theirs)}"
    return f"the digests of all steps recorded agree{_weight_gap(ours, theirs)}"


def _weight_gap(ours: RunDirectory, theirs: RunDirectory) -> str:
    from safetensors.torch import load_file

    here, there = (load_file(run.path / "model.safetensors") for run in (ours, theirs))
    gaps = {
        name: (here[name].double() - there[name].double()).abs().max().item() for name in here.keys() & there.keys()
    }
    worst = max(gaps, key=lambda name: gaps[name])
    return f"; at the end {worst} differs by up to {gaps[worst]:.3g}"


def verify_layouts(experiment: str, output: Path, settings: Sequence[str]) -> int:
    """Train on every layout that runs here and print the table; 0 when there is one digest.

    Includes a run that is killed and resumed on other layouts.
    """
    rows: list[tuple[str, float, dict[str, Any]]] = []
    with tempfile.TemporaryDirectory(prefix="ddp-layouts-") as scratch:
        common = [
            "--device",
            "cpu",
            "--reduction",
            "exact",
            *[word for setting in settings for word in ("--set", setting)],
        ]
        for title, attempts in _layouts():
            place = Path(scratch) / str(len(rows))
            started = time.monotonic()
            for words, kill_after in attempts:
                _run(["train", experiment, *common, *words, "--output", str(place)], kill_after)
            _, record = next(iter(find_runs(place)))
            rows.append((title, time.monotonic() - started, record))
            print(f"{title:38}  {record['weights_sha256']}  {rows[-1][1]:5.1f} s", flush=True)
    digests = {record["weights_sha256"] for _, _, record in rows}
    state = {record["optimizer_sha256"] for _, _, record in rows}
    if len(digests) == len(state) == 1:
        print(f"{len(rows)} layouts, one digest of weights and buffers, one of the optimizer's state: identical")
        return ExitCode.DONE
    print(f"{len(rows)} layouts, {len(digests)} digests: NOT identical")
    return DIFFERENT


_Attempt = tuple[list[str], int | None]


def _layouts() -> Iterator[tuple[str, list[_Attempt]]]:
    """Title, and the attempts: a command's words, and the step after which rank 0 is killed (None: it runs to its
    end).
    """

    def ddp(count: int, *more: str) -> list[str]:
        return ["--layout", "ddp", "--nproc-per-node", str(count), *more]

    yield "single", [([], None)]
    for count in (2, 3, 4):
        yield f"dp x {count} (threads)", [(["--layout", "dp", "--nproc-per-node", str(count)], None)]
    for count in (2, 3, 4, 5, 8):
        yield f"ddp x {count}", [(ddp(count), None)]
    yield "ddp x 2, mp.spawn", [(ddp(2, "--launcher", "spawn"), None)]
    resumed = ["--resume", "auto", "--checkpoint-every", "7"]
    yield (
        "killed on 4, 1, 3, ended on 2",
        [
            (ddp(4, *resumed, "--max-restarts", "0"), 60),
            (resumed, 180),
            (ddp(3, *resumed, "--max-restarts", "0"), 300),
            (ddp(2, *resumed), None),
        ],
    )


def _run(words: Sequence[str], kill_after: int | None = None) -> None:
    """Run `ddp` in a process of its own; with `kill_after`, SIGKILL rank 0 once that step was trained."""
    fault = [] if kill_after is None else ["--fault", f"kill@{kill_after}"]
    done = subprocess.run(
        [sys.executable, "-m", "ddp_core", *words, *fault], capture_output=True, text=True, check=False
    )
    if done.returncode != 0 and kill_after is None:
        lines = done.stderr.strip().splitlines()
        raise UserError(
            f"`ddp {' '.join(words)}` ended with {done.returncode}: {lines[-1] if lines else 'no message'}",
            done.returncode,
        )
