"""`python -m ddp_lab.chaos [--drill NAME|FILE] …`: undisturbed run, drill, judgement, table, drill.json."""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ddp_core.base.ending import said_by
from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.files import LineFile, replace_file
from ddp_lab.chaos.drill import Drill, load, names
from ddp_lab.chaos.faults import Breakable
from ddp_lab.chaos.judge import DrillReport, judge, table
from ddp_lab.chaos.processes import BreakableProcesses
from ddp_lab.chaos.runner import Runner
from ddp_lab.cluster.__main__ import choose_backend, launch, plan
from ddp_lab.cluster.cluster import Backend, Spec
from ddp_lab.cluster.runs import Planned, find_baseline
from ddp_lab.options import Parser, end_as_by_interrupt


@said_by("chaos")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run a drill; 0 only where nothing was lost, 1 for other weights; a UserError becomes one line."""
    parser = Parser(
        prog="ddp chaos",
        description="Break a training cluster on purpose and judge whether anything was lost.",
    )
    known_drills = f"a file, or one of {', '.join(names())}"
    parser.add_argument("--drill", default="standard", metavar="NAME|FILE", help=known_drills)
    parser.add_argument("--seed", type=int, help="of the random nodes and times; a fresh one by default, printed")
    parser.add_argument("--nodes", type=int, help="default: the drill's own, 3")
    parser.add_argument("--recovery", choices=("restart", "live"), help="of `ddp train`; default: the drill's own")
    parser.add_argument("--backend", choices=("auto", "docker", "local"), default="auto")
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("DDP_OUTPUT", "outputs")))
    parser.add_argument("--data-dir", type=Path, default=Path(os.environ.get("DDP_DATA", "data")))
    parser.add_argument("--verbose", action="store_true", help="show every line of every node")
    known = parser.parse_args(arguments)
    end_as_by_interrupt()
    drill = load(known.drill)
    if known.nodes is not None:
        drill = drill.model_copy(update={"nodes": known.nodes})
        if known.nodes < 2:
            raise UserError("a drill needs two nodes or more")
    if known.recovery is not None:
        drill = drill.model_copy(update={"recovery": known.recovery})
    seed = secrets.randbelow(10**6) if known.seed is None else known.seed
    return carry_out(drill, seed, known.backend, known.output, known.data_dir, known.verbose)


def carry_out(drill: Drill, seed: int, wanted: str, output: Path, data: Path, verbose: bool = False) -> int:
    """Train the undisturbed run where there is none, then carry out the drill and judge it; returns the exit code."""
    settings = tuple(word for setting in drill.settings for word in ("--set", setting))
    planned = plan(drill.experiment, settings)
    backend = choose_backend(wanted)
    undisturbed = _undisturbed(drill, planned, backend, settings, output, data)
    cluster = _breakable(backend, drill)
    spec = Spec(drill.experiment, "ddp", drill.nodes, drill.nproc_per_node, drill.train_options(), output, data)
    say(f"drill {drill.name}, seed {seed}: {drill.experiment} on {drill.nodes} nodes x {drill.nproc_per_node}")
    runner = Runner(drill, seed, cluster, spec, say)
    started = time.monotonic()
    try:
        report = runner.run(_show if verbose else lambda *_: None)
    finally:
        cluster.stop()
        left_behind = cluster.left_behind()
    report.seconds = round(time.monotonic() - started, 1)
    report.left_behind = left_behind
    judge(report, runner.progress.path, undisturbed)
    _publish(report, runner.progress.path)
    return report.exit_code


def say(text: str) -> None:
    """Print one line of the drill's own."""
    print(f"chaos: {text}", flush=True)


def _show(node: str, line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {node} | {line}", flush=True)


def _undisturbed(
    drill: Drill, planned: Planned, backend: Backend, settings: tuple[str, ...], output: Path, data: Path
) -> Path | None:
    found = find_baseline(output, planned)
    if found is not None:
        return found
    say("training undisturbed, as one process, for the digest to compare with")
    options = (*settings, "--reduction", "exact")
    verdict = launch(Spec(drill.experiment, "single", options=options, output=output, data=data), type(backend)())
    if verdict.exit_code != ExitCode.DONE:
        raise UserError("the undisturbed run failed, so there is nothing to compare with", verdict.exit_code)
    return find_baseline(output, planned)


def _breakable(backend: Backend, drill: Drill) -> Breakable:
    if backend.name == "containers":
        from ddp_lab.chaos.containers import BreakableContainers

        return BreakableContainers(drill)
    return BreakableProcesses()


def _publish(report: DrillReport, run: Path | None) -> None:
    """Write the table to the terminal and the run's log, and drill.json into the run directory."""
    text = table(report)
    print(f"\n{text}", flush=True)
    if run is None:
        return
    try:
        replace_file(run / "drill.json", json.dumps(report.to_json(), indent=1) + "\n")
        log = LineFile(run / "log.txt")
        log.write(f"\n{text}")
        log.close()
    except OSError as error:
        raise UserError(f"cannot write into {run}: {error.strerror}", ExitCode.RESOURCES) from None
    say(f"{run / 'drill.json'}")


if __name__ == "__main__":
    sys.exit(main())
