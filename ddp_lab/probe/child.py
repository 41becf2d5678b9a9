"""The process that `ddp probe` starts: it computes digests under portable numerics, and prints them.

Standard input has a JSON list of what to compute: objects with `kind`
(`operations` or `training_steps`), `name` and, of an experiment, `settings`. Standard output gets a JSON object per
line: first the versions of what computes, then in the same order `kind`, `name` and either `digest` or `trouble`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from ddp_core.base.determinism import choose_kernels
from ddp_core.base.digests import tree_digest, weights_digest
from ddp_core.cli.prepare import load_with_settings
from ddp_core.config.layout import Layout
from ddp_core.config.options import Options
from ddp_core.distributed.process_group import Collectives
from ddp_core.distributed.stop import StopRequest
from ddp_core.distributed.world import World
from ddp_core.experiment.file import INSTALLED
from ddp_core.experiment.request import build_parts
from ddp_core.numerics.kernels import portable_kernels
from ddp_core.observe.metrics import Console, MetricsWriter
from ddp_core.trainers import Job, build_trainer
from ddp_lab.probe.operations import Operations, all_operations


def main() -> None:
    """Compute what standard input asks for."""
    wanted = json.load(sys.stdin)
    # What experiments and libraries print must not come between the lines.
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    choose_kernels()
    print(json.dumps({"torch": torch.__version__, "numpy": np.__version__}), file=lines)
    operations = all_operations()
    with portable_kernels():
        _compute(wanted, operations, lines)


def _compute(wanted: Sequence[Mapping[str, Any]], operations: Operations, lines: IO[str]) -> None:
    for asked in wanted:
        kind, name = asked["kind"], asked["name"]
        try:
            is_operation = kind == "operations"
            file = INSTALLED / f"{name}.py"
            digest = tree_digest(operations[name]()) if is_operation else trained(file, asked["settings"])
            found = {"digest": digest}
        except Exception as error:
            found = {"trouble": " ".join(f"{type(error).__name__}: {error}".split())}
        print(json.dumps({"kind": kind, "name": name, **found}), file=lines)


def trained(file: Path, settings: Sequence[str], data: Path = Path("data")) -> str:
    """The digest of an experiment's weights after training it in this process, without a run directory.

    `data`: where data sets lie that are not in memory.
    """
    loaded = load_with_settings(str(file), settings)
    parts = build_parts(loaded, data)
    job = Job(
        experiment=loaded.experiment,
        layout=Layout(),
        options=Options(reduction=loaded.experiment.reduction),
        parts=replace(parts, splits=replace(parts.splits, test=None), hits=None, callbacks=()),
        collectives=Collectives(World(), torch.device("cpu")),
        console=Console(),
        metrics=MetricsWriter(None),
        stop=StopRequest(),
    )
    trainer = build_trainer(job)
    try:
        trainer.train()
        return weights_digest(trainer.state.model.state_dict())
    finally:
        trainer.close()


if __name__ == "__main__":
    main()
