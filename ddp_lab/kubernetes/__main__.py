"""`python -m ddp_lab.kubernetes [--kind job|jobset|trainjob|reader] … EXPERIMENT …` prints the files of a training."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from ddp_core.base.ending import said_by
from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.process import make_patient
from ddp_core.cli.entry import asked_by
from ddp_lab.kubernetes.manifests import KINDS, Wanted, manifests
from ddp_lab.options import Parser


@said_by("kubernetes")
def main(arguments: Sequence[str] | None = None) -> int:
    """Print the files. A UserError becomes one line and its exit code."""
    make_patient()
    words = list(sys.argv[1:] if arguments is None else arguments)
    known, options = _parser().parse_known_args(words)
    if not options:
        raise UserError("say what to train, as after `ddp train`: an experiment, and further options")
    low, high = _nodes(known.nnodes)
    wanted = Wanted(
        kind=known.kind,
        name=known.name or _name_for(asked_by(options).experiment),
        train=(*(["--nnodes", known.nnodes] if low < high else []), *options),
        nnodes=high,
        nproc_per_node=known.nproc_per_node,
        device=known.device,
        image=known.image,
        cores=known.cores,
        memory=known.memory,
        claim=known.claim,
        storage=known.storage,
        storage_class=known.storage_class,
        data_claim=known.data_claim,
        user=known.user,
        grace_seconds=known.grace_seconds,
        printed_by=shlex.join(["python", "-m", "ddp_lab.kubernetes", *words]),
    )
    print(manifests(wanted), end="")
    return ExitCode.DONE


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m ddp_lab.kubernetes",
        usage="%(prog)s [OPTION]... EXPERIMENT [OPTION OF ddp train]...",
        description="Print what `kubectl apply -f -` reads. Words that are no options here go to `ddp train`.",
    )

    def option(name: str, default: object, meaning: str, kind: type = str) -> None:
        parser.add_argument(name, type=kind, default=default, help=meaning, metavar=kind.__name__.upper())

    parser.add_argument("--kind", choices=KINDS, default="job", help="default: job; the reader shows what was written")
    option("--name", None, "of the job and all its parts; default: the experiment's")
    option("--nnodes", "2", "pods, or MIN:MAX where pods may go and come; default: 2")
    option("--nproc-per-node", 2, "ranks in each pod, on CUDA with a GPU each; default: 2", int)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    option("--image", "samebits:latest", "default: samebits:latest; better REGISTRY/NAME@sha256:…")
    option("--cores", None, "of each pod; default: one for each rank, on CUDA four", int)
    option("--memory", None, "of each pod, /dev/shm included; default: 2Gi for each rank, on CUDA 16Gi")
    option("--claim", None, "an existing claim for /outputs; default: one is made")
    option("--storage", "10Gi", "of the claim that is made; default: 10Gi")
    option("--storage-class", None, "of the claim that is made; default: the cluster's default class")
    option("--data-claim", None, "an existing claim, mounted at /data, read-only; default: nothing is mounted there")
    option("--user", 10001, "id of the user and group that the pods run as; default: 10001", int)
    option("--grace-seconds", 120, "from SIGTERM to SIGKILL, longer than a save takes; default: 120", int)
    return parser


def _nodes(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    if not (low.isdigit() and (high or low).isdigit() and 1 <= int(low) <= int(high or low)):
        raise UserError(f"--nnodes {text}: expected a number of pods, or MIN:MAX")
    return int(low), int(high or low)


def _name_for(experiment: str) -> str:
    return Path(experiment).stem.lower().replace("_", "-").replace(".", "-")


if __name__ == "__main__":
    sys.exit(main())
