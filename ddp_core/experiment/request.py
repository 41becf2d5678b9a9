"""The request, which says what to run, where and how; and the experiment that is built from it."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from ddp_core.base.errors import UserError
from ddp_core.base.keyed_draws import seed_draws
from ddp_core.base.seeds import mix
from ddp_core.base.user_code import no_way_out, user_code
from ddp_core.config.cut import BatchCut
from ddp_core.config.experiment import Experiment
from ddp_core.config.layout import Layout
from ddp_core.config.options import Asked, Options
from ddp_core.data.splits import Dataset, Splits, as_splits, weights_of
from ddp_core.distributed.world import missing_nodes
from ddp_core.experiment.building import (
    BuiltExperiment,
    build,
    callbacks_of,
    optimizer_of,
    resolve,
    schedule_of,
)
from ddp_core.experiment.file import LoadedExperiment, Served, in_one_line, place_of, run_file
from ddp_core.experiment.fresh_model import fill_tables, make_real, own_memory
from ddp_core.model.builders import lay_out
from ddp_core.model.losses import HITS


class Evaluated(NamedTuple):
    """The weights that a request evaluates, and trains no further."""

    named: str
    """What the user has named: a run, a checkpoint or a bundle."""
    run: str
    """The run directory, an absolute path."""
    step: int
    manifest: str | None
    """The manifest file of the checkpoint; None for the weights that the run ended with."""
    as_json: bool
    """How the figures are printed."""


@dataclass(frozen=True)
class Request:
    """The experiment with its file, layout, options, how to resume, and the command that started it."""

    loaded: LoadedExperiment
    layout: Layout
    options: Options
    resume: str = "never"
    """`auto`, `never`, or a run directory."""
    command: str = ""
    asked: Asked = field(default_factory=lambda: Asked(experiment=""))
    """What the user asked for on the command line."""
    evaluated: Evaluated | None = None
    """None for a request that trains."""
    rehearsed: tuple[str, bool] | None = None
    """What a rehearsal has found, in words, and whether that was other bits; None where there was none."""

    @property
    def source_sha256(self) -> str:
        """SHA-256 of the text of the experiment's file."""
        return hashlib.sha256(self.loaded.source.encode()).hexdigest()

    @property
    def noted_in(self) -> Path | None:
        """The file in which rank 0 notes what each step makes of the state; None for no notes."""
        return None if self.asked.noted_in is None else Path(self.asked.noted_in)

    @property
    def is_witness(self) -> bool:
        """Whether steps of a run are trained again from a checkpoint of it, with the very same data."""
        return self.noted_in is not None and not self.asked.miniature

    @property
    def is_tried(self) -> bool:
        """Whether this is no run for its own sake: a trial, a rehearsal or a witness."""
        return self.asked.only_steps is not None or self.asked.miniature

    def to_json(self) -> str:
        """The whole request as a JSON text, which a worker begins with; functions go along as the file's text."""
        loaded = self.loaded
        return json.dumps(
            {
                "experiment": loaded.experiment.to_json(),
                "file": str(loaded.path),
                "source": loaded.source,
                "source_sha256": self.source_sha256,
                "question": loaded.question,
                "served": loaded.served,
                "layout": self.layout.model_dump(mode="json"),
                "options": self.options.model_dump(mode="json"),
                "resume": self.resume,
                "command": self.command,
                "asked": self.asked.model_dump(mode="json", exclude_unset=True),
                "evaluated": self.evaluated,
                "rehearsed": self.rehearsed,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Request:
        """The request of another process; the experiment's file is run again, from that process's text of it.

        Raises UserError where the file raises, or the text is not the one that was sent.
        """
        told = json.loads(text)
        path, source = Path(told["file"]), told["source"]
        if hashlib.sha256(source.encode()).hexdigest() != told["source_sha256"]:
            raise UserError(f"the request's copy of {path} was changed on its way; start again")
        served = None if told["served"] is None else Served(*told["served"])
        asked = Asked(**told["asked"])
        if asked.clock_ahead:
            _put_clock_ahead()
        if served is not None:
            from ddp_core.experiment.kept_source import serve_modules

            serve_modules(served)
        experiment = Experiment.from_json(told["experiment"])
        # What counts is the request's experiment, not the one that the file assigns here.
        namespace = run_file(path, source).__dict__
        loaded = LoadedExperiment(experiment, namespace, path, source, told["question"], served)
        return cls(
            loaded=loaded,
            layout=Layout(**told["layout"]),
            options=Options(**told["options"]),
            resume=told["resume"],
            command=told["command"],
            asked=asked,
            evaluated=None if told["evaluated"] is None else Evaluated(*told["evaluated"]),
            rehearsed=None if told["rehearsed"] is None else tuple(told["rehearsed"]),
        )

    def for_nodes(self, nnodes: int) -> Request:
        """The request for the number of nodes that have come.

        Raises UserError (6) where the user has asked for another number, rather than for a range.
        """
        if self.asked.nnodes.low == self.layout.nnodes != nnodes:
            raise missing_nodes(self.layout.nnodes, nnodes)
        return replace(self, layout=self.layout.model_copy(update={"nnodes": nnodes}))

    def for_ranks(self, nnodes: int, nproc_per_node: int) -> Request:
        """The request for so many ranks, which go on after others were lost."""
        counts = {"nnodes": nnodes, "nproc_per_node": nproc_per_node}
        return replace(self, layout=self.layout.model_copy(update=counts))


def _put_clock_ahead() -> None:
    """Let `time.time` and `time.time_ns` of this process be ahead, from here on: one of two trainings asks for it.

    By a day and a bit, so that a seed made of whole seconds, minutes or days is another one, too.
    """
    ahead, now, now_ns = 86_461.25, time.time, time.time_ns
    time.time = lambda: now() + ahead
    time.time_ns = lambda: now_ns() + round(ahead * 1e9)


def build_parts(
    loaded: LoadedExperiment,
    data_dir: Path,
    device: torch.device | str = "cpu",
    splits: Splits | None = None,
) -> BuiltExperiment:
    """Everything that the experiment's functions build, the model with its initial weights (from the seed) on `device`.

    `splits`: the data, where they are there already. Raises UserError.
    """
    if splits is None:
        splits = build_splits(loaded, data_dir)
    model = build_model(loaded, device, splits)
    _require_storable(model)
    optimizer = optimizer_of(loaded, model)
    callbacks, observers = callbacks_of(loaded)
    loss = resolve(loaded, "loss", loaded.experiment.loss)
    hits, metrics = loaded.namespace.get("hits"), loaded.namespace.get("metrics")
    return BuiltExperiment(
        model=model,
        loss=loss,
        hits=hits if callable(hits) else HITS.get(loss),
        splits=splits,
        optimizer=optimizer,
        schedule=schedule_of(loaded, optimizer, splits.trained),
        metrics=metrics if callable(metrics) or isinstance(metrics, Mapping) else None,
        callbacks=callbacks,
        observers=observers,
    )


def _require_storable(model: nn.Module) -> None:
    """Raises UserError for a parameter or buffer of a type that a file of weights cannot hold."""
    from safetensors.torch import save

    seen: set[torch.dtype] = set()
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, torch.Tensor) and tensor.dtype not in seen:
            seen.add(tensor.dtype)
            try:
                save({"": torch.empty(0, dtype=tensor.dtype)})
            except (KeyError, ValueError, TypeError):
                raise UserError(
                    f"your model: {name} is of type {tensor.dtype}, which a file of weights (safetensors) cannot hold: "
                    "use another type"
                ) from None


def build_model(loaded: LoadedExperiment, device: torch.device | str, splits: Splits | None = None) -> nn.Module:
    """The model with its initial weights, which follow from the seed, on `device`.

    With `splits`, its lazy layers and the tables in its buffers are made from the first samples; else they are left.
    Raises UserError.
    """
    experiment = loaded.experiment
    torch.manual_seed(experiment.seed)
    seed_draws(mix(experiment.seed, 8))
    model = build(resolve(loaded, "model", experiment.model.name), experiment.model.options, {})
    if not isinstance(model, nn.Module):
        raise UserError(
            f"model {experiment.model.name} returned a {type(model).__name__}; "
            "a model builder returns a torch.nn.Module"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(f"model {experiment.model.name} has no parameter that requires a gradient: nothing to train")
    if splits is not None:
        make_real(model, experiment, splits)
    own_memory(model)
    with user_code("your model"):
        model = lay_out(model.to(device), experiment.memory_format)
    if splits is not None:
        fill_tables(model, experiment, splits)
    return model


def build_splits(loaded: LoadedExperiment, data_dir: Path) -> Splits:
    """The experiment's data sets, the same in every run and for every seed: their builder's draws are seeded.

    Raises UserError, also where there are too few samples for one step.
    """
    experiment = loaded.experiment
    torch.manual_seed(0)
    seed_draws(mix(0, 10))
    built = build(resolve(loaded, "data", experiment.data.name), experiment.data.options, {"root": data_dir})
    splits = as_splits(built, f"data {experiment.data.name}")
    collate = loaded.namespace.get("collate")
    if collate is not None and not callable(collate):
        raise UserError(
            f"experiment file {loaded.path}: collate is {collate!r}; let it be a function of a list of samples "
            "that returns (inputs, targets)"
        )
    splits = replace(splits, collate=collate or splits.collate)
    samples, size = _count(splits.train, f"data {experiment.data.name}"), experiment.global_batch_size
    if splits.test is not None and _count(splits.test, f"data {experiment.data.name}") == 0:
        raise UserError(
            f"data {experiment.data.name} has a held-out set without samples: give it some, or return "
            "Splits(train=...) without test"
        )
    if samples == 0:
        raise UserError(f"data {experiment.data.name} has no training samples")
    if samples < size and experiment.last_batch == "drop":
        raise UserError(
            f"data {experiment.data.name} has {samples} training samples, fewer than one global batch of {size}: "
            f"use --set global_batch_size={samples} or less, or --set last_batch=keep"
        )
    weights = weights_of(splits.weights, samples, f"data {experiment.data.name}: weights")
    held_out = 0 if splits.test is None else len(splits.test)
    test_weights = weights_of(splits.test_weights, held_out, f"data {experiment.data.name}: test_weights")
    return replace(splits, weights=weights, test_weights=test_weights)


def _count(dataset: Dataset, whose: str) -> int:
    """The number of samples. Raises UserError where the data set, which is the user's code, does not know it."""
    try:
        with no_way_out(whose):
            return len(dataset)
    except Exception as error:
        raise UserError(f"{place_of(error, None)}: {whose} has no length: {in_one_line(error)}") from error


def promise_broken_by(experiment: Experiment) -> str | None:
    """Why the exact reduction cannot be had for this experiment; None where it can."""
    if experiment.micro_batch is None:
        return "without micro_batch every layout cuts the global batch its own way"
    if experiment.sync_batch_norm:
        return "SyncBatchNorm normalises over whatever the ranks hold"
    if experiment.ddp.communication_hook != "none":
        return f"the {experiment.ddp.communication_hook} communication hook rounds what each rank sends"
    return None


def check_promise(request: Request) -> None:
    """Raises UserError, with the reason, where the reduction that is asked for cannot be had."""
    experiment, exact = request.loaded.experiment, request.options.reduction == "exact"
    reason = promise_broken_by(experiment)
    if exact and reason:
        raise UserError(f"the exact reduction cannot be had here: {reason}; use --reduction plain")
    if request.layout.dealt and not exact:
        raise UserError("--shares is for the exact reduction, with which it changes no bit: leave it out")
    if exact or request.layout.kind != "ddp":
        return
    if experiment.sync_batch_norm and request.layout.device == "cpu":
        raise UserError("sync_batch_norm needs CUDA devices; use --set sync_batch_norm=false")
    if experiment.ddp.communication_hook == "bf16" and request.layout.device == "cpu":
        raise UserError(
            "ddp.communication_hook=bf16 needs CUDA with NCCL; use --set ddp.communication_hook=fp16, or none"
        )
    if experiment.ddp.static_graph:
        count = BatchCut.of(experiment, request.layout).accumulation_steps
        if count > 1:
            # https://github.com/pytorch/pytorch/pull/187732
            raise UserError(
                f"ddp.static_graph with {count} micro-batches per rank and step: torch's DistributedDataParallel "
                "miscounts them; use --set micro_batch=null, --set ddp.static_graph=false, or --reduction exact"
            )
