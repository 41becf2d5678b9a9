"""What a worker of `ddp eval` does: evaluates weights of a run as the run itself does, and says what came out.

The trainer of the layout does it, so the figures have the bits that training gave them, on this layout or another.
"""

from __future__ import annotations

import json
import sys
from contextlib import closing, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from ddp_core.base.digests import weights_digest
from ddp_core.base.documents import json_text
from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.fingerprint import fingerprint_differences
from ddp_core.checkpoint import read_checkpoint, whole_tensors
from ddp_core.data.data_digest import changed_at
from ddp_core.distributed.stop import StopRequest
from ddp_core.distributed.world import World
from ddp_core.experiment.request import Evaluated, Request
from ddp_core.observe.metrics import MetricsWriter, read_metrics, readable
from ddp_core.record.data import recorded_digest
from ddp_core.record.directory import RunDirectory
from ddp_core.record.trained import TrainedWeights
from ddp_core.run.beginning import Beginning, begun
from ddp_core.run.starting import load_together
from ddp_core.trainers import Job, Trainer, build_trainer

_NOT_FIGURES = ("kind", "time", "step", "epoch")
"""What an evaluation in metrics.jsonl holds beside its figures."""


def evaluate_run(request: Request, world: World) -> None:
    """Evaluate as one worker of `world`; rank 0 prints the figures, which is an error where the run recorded others."""
    evaluated = request.evaluated
    assert evaluated is not None
    output = sys.stdout
    # Beside a document nothing else may stand.
    with redirect_stdout(sys.stderr if evaluated.as_json else output), begun(request, world) as beginning:
        if beginning.parts.splits.test is None:
            name = request.loaded.experiment.data.name
            raise UserError(f"data {name} holds nothing out to evaluate on: give Splits a `test`, or name other --data")
        with closing(build_trainer(_job(request, beginning))) as trainer:
            run = RunDirectory(Path(evaluated.run))
            checkpoint = None if evaluated.manifest is None else read_checkpoint(evaluated.manifest)
            weights = TrainedWeights(run, run.read(), evaluated.step, checkpoint)
            digests = _load(trainer, weights)
            figures = trainer.evaluator.evaluate()
            problem = None
            if world.is_first:
                told = _told(request, evaluated, weights, beginning, digests, figures)
                _print(told, evaluated.as_json, output)
                if told["identical"] is False and not told["other_fingerprint"]:
                    problem = f"{_difference(told)}; `ddp verify {evaluated.named}` tells more"
            if (problem := beginning.collectives.broadcast(problem)) is not None:
                raise UserError(problem)


def _job(request: Request, beginning: Beginning) -> Job:
    return Job(
        experiment=request.loaded.experiment,
        layout=request.layout,
        options=request.options.model_copy(update={"guard": "off", "cuda_graph": False}),
        parts=replace(beginning.parts, callbacks=()),
        collectives=beginning.collectives,
        console=beginning.console,
        metrics=MetricsWriter(None),
        stop=StopRequest(),
    )


def _load(trainer: Trainer, weights: TrainedWeights) -> dict[str, str | None]:
    """Put the weights into the trainer, if they are the run's; returns their digests by their names in run.json."""
    state, average = trainer.state, trainer.state.average
    if weights.checkpoint is None:
        kept = weights.read().by_kind
        state.ownership.load_weights(kept["trained"])
        if average is not None:
            average.module.load_state_dict(kept["averaged"])
    else:
        found = load_together(trainer, weights.checkpoint)
        state.ownership.load_weights(found["model"])
        if average is not None:
            average.load_state_dict(whole_tensors(found["average"]))
    state.step = weights.step
    collectives = trainer.job.collectives
    whole, digest = state.ownership.whole_weights(), None
    if collectives.world.is_first and whole is not None:
        digest = weights_digest(whole)
    problem = weights.refusal(digest) if digest is not None else None
    if (problem := collectives.broadcast(problem)) is not None:
        raise UserError(problem, ExitCode.NO_CHECKPOINT)
    averaged = None if average is None else weights_digest(average.module.state_dict())
    return {"weights_sha256": digest, "ema_sha256": averaged}


def _told(
    request: Request,
    evaluated: Evaluated,
    weights: TrainedWeights,
    beginning: Beginning,
    digests: dict[str, str | None],
    figures: dict[str, Any],
) -> dict[str, Any]:
    """What the command tells, in plain JSON types."""
    run, record = weights.run, weights.record
    entries = read_metrics(run.metrics, "evaluation")
    recorded = next((entry for entry in reversed(entries) if entry["step"] == evaluated.step), None)
    before = recorded_digest(run.path, record)
    is_same = None if None in (before.sha256, beginning.data.sha256) else changed_at(before, beginning.data) is None
    told: dict[str, Any] = json.loads(
        json_text(
            {
                "run": evaluated.named,
                "experiment": request.loaded.experiment.name,
                "step": evaluated.step,
                "checkpoint": None if evaluated.manifest is None else Path(evaluated.manifest).name,
                **digests,
                "layout": request.layout.label,
                "settings": list(request.asked.settings),
                "data_sha256": beginning.data.sha256,
                "same_data": is_same,
                "other_fingerprint": fingerprint_differences(beginning.fingerprint, record["fingerprint"]),
                "figures": figures,
                "recorded": recorded and {name: recorded[name] for name in recorded if name not in _NOT_FIGURES},
            }
        )
    )
    is_comparable = told["recorded"] and is_same and not told["settings"]
    told["identical"] = told["figures"] == told["recorded"] if is_comparable else None
    return told


def _difference(told: dict[str, Any]) -> str:
    recorded, figures = told["recorded"], told["figures"]
    name = next(name for name in {**recorded, **figures} if recorded.get(name) != figures.get(name))
    under = "; ".join(told["other_fingerprint"]) or "the same"
    return (
        f"{name} is {figures.get(name)}, and the run recorded {recorded.get(name)} at step {told['step']} "
        f"(fingerprint: {under})"
    )


def _print(told: dict[str, Any], as_json: bool, output: TextIO) -> None:
    if as_json:
        print(json_text(told), file=output, flush=True)
        return
    print(f"{told['experiment']} after step {told['step']} of {told['run']}, on {told['layout']}")
    print(f"weights sha256 {told['weights_sha256']}")
    print("\n".join(readable(told["figures"])))
    if told["identical"]:
        verdict = "identical: the run recorded the same figures at this step, bit for bit"
    elif told["identical"] is False:
        verdict = f"different: {_difference(told)}"
    elif told["settings"] or told["same_data"] is False:
        verdict = "other data or settings than the run's, so there is nothing to compare"
    else:
        verdict = "the run recorded no figures at this step, so there is nothing to compare"
    print(verdict, flush=True)
