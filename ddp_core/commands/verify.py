"""Train a run again from its record and compare; train one experiment on every layout and compare the digests."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ddp_core.determinism.fingerprint import differences
from ddp_core.errors import ExitCode, UserError
from ddp_core.observe.metrics import read_metrics
from ddp_core.run.directory import RunDirectory, find_runs
from ddp_core.spec.layout import LayoutKind
from ddp_core.spec.options import Asked

DIFFERENT = 1
"""Exit code of `ddp verify` where the same fingerprint gave other weights."""


def verify(path: Path, layout: LayoutKind | None, device: str | None, nproc_per_node: int | None) -> int:
    """Repeat the run at `path`, on its own layout or another; 0 when the weights are the same bits.

    Raises UserError for a run that was not completed or whose repetition fails.
    """
    directory = RunDirectory(path)
    record = directory.read()
    if record["status"] != "completed":
        raise UserError(
            f"{path} is {record['status']}, so it has no weights to verify; finish it with `--resume {path}`"
        )
    recorded = record["layout"]
    kind = layout or recorded["kind"]
    if record["options"]["reduction"] != "exact" and kind != recorded["kind"]:
        raise UserError(f"{path} used the plain reduction, whose bits depend on the layout; verify it without --layout")
    count = nproc_per_node or _count_for(kind, recorded)
    processes = "1 process" if count == 1 else f"{count} processes"
    print(f"training {record['experiment']['name']} again on {kind}, {processes} …", flush=True)
    with TemporaryDirectory(prefix="ddp-verify-") as scratch:
        _train(
            Asked(
                experiment=str(path / "experiment.py"),
                record=str(path / "run.json"),
                layout=kind,
                device=device or recorded["device"],
                nproc_per_node=count,
                reduction=record["options"]["reduction"],
                output=scratch,
                data_dir=record["options"]["data_dir"],
                digest_every=record["options"]["digest_every"],
            )
        )
        again, _ = next(find_runs(Path(scratch)))
        return _judge(directory, record, again)


def _count_for(kind: LayoutKind, recorded: dict[str, Any]) -> int:
    """The recorded number of processes or replicas; at least two where the kind of layout is another, 1 for single."""
    if kind == "single":
        return 1
    count: int = recorded["nnodes"] * recorded["nproc_per_node"]
    return count if kind == recorded["kind"] else max(2, count)


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
    """The first step at which the recorded digests differ, with the losses there and the gap of the final weights."""
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


def verify_layouts(experiment: str, settings: Sequence[str], data_dir: str) -> int:
    """Train on every layout that runs here and print the table; 0 when there is one digest.

    Includes a run that is killed and resumed on other layouts.
    """
    digests, states = set(), set()
    with TemporaryDirectory(prefix="ddp-layouts-") as scratch:
        for number, (title, attempts) in enumerate(_LAYOUTS.items()):
            output, started = Path(scratch) / str(number), time.monotonic()
            for attempt in attempts:
                _train(
                    Asked(
                        experiment=experiment,
                        settings=tuple(settings),
                        data_dir=data_dir,
                        output=str(output),
                        device="cpu",
                        reduction="exact",
                        **attempt,
                    )
                )
            _, record = next(find_runs(output))
            digests.add(record["weights_sha256"])
            states.add((record["optimizer_sha256"], record["ema_sha256"]))
            seconds = time.monotonic() - started
            print(f"{title:38}  {record['weights_sha256']}  {seconds:5.1f} s", flush=True)
    if len(digests) == len(states) == 1:
        print(f"{len(_LAYOUTS)} layouts, one digest of weights and buffers, one of the optimizer's state: identical")
        return ExitCode.DONE
    print(f"{len(_LAYOUTS)} layouts, {len(digests)} digests: NOT identical")
    return DIFFERENT


_RESUMED: dict[str, Any] = {"resume": "auto", "checkpoint_every": 7, "max_restarts": 0}
_LAYOUTS: dict[str, list[dict[str, Any]]] = {
    "single": [{}],
    **{f"dp x {count} (threads)": [{"layout": "dp", "nproc_per_node": count}] for count in (2, 3, 4)},
    **{f"ddp x {count}": [{"layout": "ddp", "nproc_per_node": count}] for count in (2, 3, 4, 5, 8)},
    "ddp x 2, mp.spawn": [{"layout": "ddp", "nproc_per_node": 2, "launcher": "spawn"}],
    "killed on 4, 1, 3, ended on 2": [
        _RESUMED | {"layout": "ddp", "nproc_per_node": 4, "faults": ("kill@60",)},
        _RESUMED | {"faults": ("kill@180",)},
        _RESUMED | {"layout": "ddp", "nproc_per_node": 3, "faults": ("kill@300",)},
        _RESUMED | {"layout": "ddp", "nproc_per_node": 2},
    ],
}
"""What is asked for on each layout, by title: the attempts, of which all but the last end with a kill."""


def _train(asked: Asked) -> None:
    """Run `ddp train` in a process of its own. Raises UserError where it fails and no fault was asked for."""
    words = ["train", *asked.to_words()]
    done = subprocess.run([sys.executable, "-m", "ddp_core", *words], capture_output=True, text=True, check=False)
    if done.returncode != 0 and not asked.faults:
        lines = done.stderr.strip().splitlines()
        raise UserError(
            f"`ddp {' '.join(words)}` ended with {done.returncode}: {lines[-1] if lines else 'no message'}",
            done.returncode,
        )
