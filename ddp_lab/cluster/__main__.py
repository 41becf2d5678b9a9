"""`python -m ddp_lab.cluster up …` trains baseline and cluster and compares them; `check SERVICE` looks for GPUs."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from ddp_core.base.ending import said_by
from ddp_core.base.errors import DIFFERENT, ExitCode, UserError
from ddp_core.base.extras import require
from ddp_core.cli.entry import asked_by
from ddp_core.cli.prepare import load_with_settings
from ddp_core.numerics.limits import portable_refused_by, rules_of
from ddp_core.record.directory import RunDirectory
from ddp_lab.cluster.cluster import Backend, Spec, wait_for
from ddp_lab.cluster.local import LocalBackend
from ddp_lab.cluster.published_run import beside_published
from ddp_lab.cluster.runs import Planned, find_baseline, find_launched, settings_of
from ddp_lab.cluster.verdict import Verdict, judge
from ddp_lab.options import Parser, end_as_by_interrupt
from ddp_lab.probe.published import published

# The options that say what is trained: the baseline gets them, too.
_SHARED = ("--set", "--reduction", "--numerics")

_printing = threading.Lock()


def say(text: str) -> None:
    """Print a line of this command itself, in one write, so that no node's output lands inside the line."""
    with _printing:
        print(f"cluster: {text}", flush=True)


@said_by("cluster")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; a UserError becomes one line and its exit code."""
    parser = Parser(prog="python -m ddp_lab.cluster")
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="train on a cluster; further options go to `ddp train`")
    up.add_argument("--nodes", type=int, default=2)
    up.add_argument("--nproc", type=int, default=2, help="processes per node")
    up.add_argument("--experiment", default="digits")
    up.add_argument("--backend", choices=("auto", "docker", "local"), default="auto")
    up.add_argument("--output", type=Path, default=Path(os.environ.get("DDP_OUTPUT", "outputs")))
    up.add_argument("--data-dir", type=Path, default=Path(os.environ.get("DDP_DATA", "data")))
    up.add_argument("--no-check", dest="checks", action="store_false", help="end with 0 whatever the weights are")
    check = commands.add_parser("check", help="say what is missing for a service of compose.yaml")
    check.add_argument("service")
    known, options = parser.parse_known_args(arguments)
    if known.command == "check" and options:
        parser.error(f"unrecognized arguments: {' '.join(options)}")
    end_as_by_interrupt()
    if known.command == "check":
        from ddp_lab.cluster.gpus import check_service

        check_service(known.service)
        return ExitCode.DONE
    return train(known, tuple(options))


def train(known: argparse.Namespace, options: tuple[str, ...]) -> int:
    """Train the baseline where there is none, then the cluster, and set both in one table; returns the exit code.

    That is the cluster's; but 1 where it ended well with other weights than the baseline, or than the published ones.
    """
    if known.nodes < 1 or known.nproc < 1:
        raise UserError(f"a cluster has at least one node and one process per node, not {known.nodes} x {known.nproc}")
    planned = plan(known.experiment, options)
    backend = choose_backend(known.backend)
    spec = Spec(
        known.experiment,
        nnodes=known.nodes,
        nproc_per_node=known.nproc,
        options=options,
        output=known.output,
        data=known.data_dir,
    )
    baseline = find_baseline(known.output, planned)
    if baseline is None:
        say("no completed single-process run of this experiment: training the baseline first")
        single = Spec(
            known.experiment, "single", options=settings_of(options, _SHARED), output=known.output, data=known.data_dir
        )
        verdict = launch(single, backend)
        if verdict.exit_code != ExitCode.DONE:
            return verdict.exit_code
        baseline = find_baseline(known.output, planned)
        backend = type(backend)()
    say(f"{known.experiment} on {known.nodes} nodes x {known.nproc} processes as {backend.name}")
    verdict = launch(spec, backend)
    run = find_launched(known.output, spec.launch_id)
    if run is None:
        if verdict.exit_code == ExitCode.DONE:
            raise UserError(f"every node ended with 0, but no run of this launch is in {known.output}: look there")
        return verdict.exit_code
    compared = _compare([path for path in (baseline, run) if path is not None], known.checks)
    if verdict.exit_code != ExitCode.DONE:
        return verdict.exit_code
    record = RunDirectory(run).read()
    beside = beside_published(record, published())
    if beside is not None:
        say(beside.line)
    return DIFFERENT if known.checks and beside is not None and not beside.is_same else compared


def plan(experiment: str, options: Sequence[str]) -> Planned:
    """What `ddp train` will train. Raises UserError for an unknown experiment, setting or option."""
    asked = asked_by([experiment, *options])
    loaded = load_with_settings(experiment, asked.settings).experiment
    rules = rules_of(asked.numerics or loaded.numerics) if portable_refused_by() is None else None
    return Planned(loaded.digest(), rules)


def choose_backend(wanted: str) -> Backend:
    """The backend for `wanted` (auto, docker or local); says why it is this one, and builds its image."""
    reason = "asked for"
    if wanted != "local":
        try:
            require("a cluster of containers", "cluster")
            from ddp_lab.cluster.containers import ContainerBackend, engine_version

            reason = f"Docker Engine {engine_version()} answers"
        except UserError as error:
            if wanted == "docker":
                raise
            wanted, reason = "local", str(error)
    if wanted == "local":
        say(f"local processes ({reason})")
        return LocalBackend()
    say(f"containers ({reason}); building the image where it is not up to date")
    backend = ContainerBackend()
    backend.build()
    return backend


def launch(spec: Spec, backend: Backend) -> Verdict:
    """Start, follow, wait, judge, stop. The first Ctrl-C asks the nodes to save and leave, the second ends them."""

    def write(node: str, line: str) -> None:
        with _printing:
            print(f"{node} | {line}", flush=True)

    try:
        try:
            backend.start(spec)
            backend.follow(write)
            results = wait_for(backend)
        except KeyboardInterrupt:
            say("stopping: the nodes finish their step and save (again Ctrl-C ends them at once)")
            backend.terminate()
            results = wait_for(backend)
    finally:
        backend.stop()
    verdict = judge(results)
    for line in verdict.lines:
        say(line)
    return verdict


def _compare(runs: Sequence[Path], checks: bool) -> int:
    """Print the table of `ddp compare`; returns its exit code."""
    words = ["compare", *map(str, runs), *([] if checks else ["--no-check"])]
    with _printing:
        print(flush=True)
        return subprocess.run([sys.executable, "-m", "ddp_core", *words], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
