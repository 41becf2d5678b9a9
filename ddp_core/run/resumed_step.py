"""The next step, made by a fresh process from a checkpoint, and compared with what the run has made in that step.

The process builds the job anew from the request, in one process, reads the checkpoint as a resume does, makes the
update from the gradient that the run has left, and writes what differs. ddp_core/trainers/rehearsal.py says why.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ddp_core.base.determinism import choose_kernels
from ddp_core.base.errors import UserError
from ddp_core.base.files import replace_file
from ddp_core.base.keyed_draws import without_key
from ddp_core.base.user_code import no_way_out
from ddp_core.checkpoint import Checkpoint, find_checkpoints
from ddp_core.config.layout import Layout
from ddp_core.distributed.process_group import Collectives
from ddp_core.distributed.stop import StopRequest
from ddp_core.distributed.world import World
from ddp_core.experiment.request import Request, build_parts
from ddp_core.numerics.kernels import portable_kernels
from ddp_core.numerics.limits import rules_of
from ddp_core.observe.metrics import Console, MetricsWriter
from ddp_core.record.directory import RunDirectory
from ddp_core.run.rehearsing import FACTS, GRADIENTS, REQUEST, VERDICT
from ddp_core.run.resuming import resume
from ddp_core.trainers import Job, Trainer, build_trainer
from ddp_core.trainers.attributes import attributes_of
from ddp_core.trainers.next_step import Verdict, micro_batch_digest, sums_after_update

_POLL_SECONDS = 0.1
_NICENESS = 10
"""Of a rehearsal beside which the run goes on."""


def rehearse(folder: Path, facts: dict[str, Any]) -> Verdict:
    """What a resume from the checkpoint gives in its first step."""
    torch.set_num_threads(facts["threads"])
    directory = RunDirectory(Path(facts["directory"]))
    with ExitStack() as stack:
        try:
            with no_way_out("your code"):
                request = Request.from_json((folder / REQUEST).read_text(encoding="utf-8"))
                choose_kernels(request.options.deterministic, tf32=request.loaded.experiment.precision == "tf32")
                if (rules := rules_of(request.options.numerics)) is not None:
                    stack.enter_context(portable_kernels(rules))
                trainer = stack.enter_context(closing(_build(request, torch.device(facts["device"]))))
        except Exception as error:
            return Verdict(failed=f"a new process cannot build the job ({_in_words(error)})")
        start = _await(directory, facts["step"])
        try:
            with no_way_out("your code"):
                resume(trainer, start, directory, ())
        except (MemoryError, torch.OutOfMemoryError, OSError) as error:
            return Verdict(failed=_in_words(error))
        except Exception as error:
            return Verdict(unread=_in_words(error))
        attributes = attributes_of(trainer.state)
        try:
            with no_way_out("your code"):
                return replace(_compare(trainer, facts, folder / GRADIENTS), attributes=attributes)
        except (MemoryError, torch.OutOfMemoryError) as error:
            return Verdict(failed=_in_words(error))
        except Exception as error:
            return Verdict(differs=f"the update, which fails: {_in_words(error)}", attributes=attributes)


def _build(request: Request, device: torch.device) -> Trainer:
    """The job of one process."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    parts = build_parts(request.loaded, Path(request.options.data_dir), device)
    quiet = {"guard": "off", "workers": 0, "cuda_graph": False, "faults": (), "log_to": ()}
    job = Job(
        experiment=request.loaded.experiment,
        layout=Layout(kind="single", device=request.layout.device),
        options=request.options.model_copy(update=quiet),
        model=parts.model,
        loss=parts.loss,
        splits=parts.splits,
        optimizer=parts.optimizer,
        schedule=parts.schedule,
        callbacks=parts.callbacks,
        collectives=Collectives(World(), device),
        device=device,
        console=Console(),
        metrics=MetricsWriter(None),
        stop=StopRequest(),
    )
    return build_trainer(job)


def _await(directory: RunDirectory, step: int) -> Checkpoint:
    """The checkpoint of the step, which the run may be writing still; the run ends this process if it never comes."""
    while True:
        for checkpoint in find_checkpoints(directory.checkpoints):
            if checkpoint.step == step:
                return checkpoint
        time.sleep(_POLL_SECONDS)


def _compare(trainer: Trainer, facts: dict[str, Any], gradients: Path) -> Verdict:
    """Compute a micro-batch of the next step, and make its update, as the run did."""
    step: int = facts["step"]
    digest = micro_batch_digest(trainer, step, 0) if facts["micro_batch"] is not None else None
    theirs = load_file(gradients)
    for name, parameter in trainer.model.named_parameters():
        # With the strides of the parameter, as reductions leave them.
        parameter.grad = torch.empty_like(parameter).copy_(theirs[name]) if name in theirs else None
    with without_key():
        trainer.seed_micro_batch.update(step)
        trainer.update.make(step)
    ours = sums_after_update(trainer.state) or {}
    differs = next((name for name, checksum in facts["after"].items() if ours.get(name) != checksum), None)
    return Verdict(micro_batch_differs=digest != facts["micro_batch"], differs=differs)


def _in_words(error: BaseException) -> str:
    words = " ".join(str(error).split())
    return words if isinstance(error, UserError) else f"{type(error).__name__}: {words}"


def main(folder: Path) -> int:
    """Rehearse what `folder` tells of, and leave the verdict there; returns the exit code."""
    facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    if facts["in_background"]:
        os.nice(_NICENESS)
    try:
        verdict = rehearse(folder, facts)
    except Exception as error:
        verdict = Verdict(failed=f"its process failed ({_in_words(error)})")
    seconds = round(time.monotonic() - facts["started"], 3)  # one clock for all processes of a machine
    replace_file(folder / VERDICT, json.dumps(asdict(replace(verdict, seconds=seconds))))
    return 0
