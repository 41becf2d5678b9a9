"""The options of `ddp train`, each declared once, as a field of a record.

A field's name gives the option's name, its type and bounds say which values are accepted, its default is the option's
default, and its description is the help text. The class that declares a field is its group in `ddp train --help`; the
first line of that class's docstring is the title. `Asked` is all that can be asked for; `Options` is the part of it
that run.json records beside experiment and layout.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic.fields import FieldInfo

from ddp_core.config.layout import DeviceType, LayoutKind, ShardMode
from ddp_core.config.records import ByDefault, CommandLine, Frozen, Numerics, ReductionKind, is_repeated, option_name

Count = Annotated[int, Field(gt=0), CommandLine(metavar="N")]
Steps = Annotated[int, Field(gt=0), CommandLine(metavar="STEPS")]
Seconds = Annotated[float, Field(gt=0), CommandLine(metavar="SECONDS")]


class NodeRange(NamedTuple):
    """How many nodes a launch may have, from `low` to `high`; written N or LOW:HIGH."""

    low: Count = 1
    high: Count = 1

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


def _low_and_high(value: object) -> object:
    if isinstance(value, int):
        return (value, value)
    if not isinstance(value, str):
        return value
    low, colon, high = value.partition(":")
    return (low, high) if colon else (low, low)


def _numbers(value: str) -> str:
    if value != "auto" and not re.fullmatch(r"[1-9]\d{0,8}(,[1-9]\d{0,8})*", value):
        raise ValueError("give a number above 0 for each rank, such as 3,1; or auto")
    return value


def _in_order(nodes: NodeRange) -> NodeRange:
    if nodes.low > nodes.high:
        raise ValueError("the first number is the smaller one")
    return nodes


class ExperimentOptions(Frozen):
    """What is trained, and from where on."""

    experiment: str = Field(description="A name from `ddp list`, or the path of an experiment file of your own.")
    settings: Annotated[tuple[str, ...], CommandLine("--set", "NAME=VALUE")] = Field(
        default=(),
        description="Change a value of the experiment, for example optimizer.lr=0.05, epochs=3 or model.dropout=0.1. "
        "May be repeated.",
    )
    resume: Annotated[str, CommandLine(metavar="never|auto|RUN")] = Field(
        default="never",
        description="Continue a run that did not come to its end: the newest one of this experiment (auto), or the "
        "one in the directory RUN. The layout may be another one than before. A finished run is continued where more "
        "epochs or max_steps are set.",
    )
    accept_changed_code: bool = Field(
        default=False, description="Continue a run although the code of the experiment or its modules was edited since."
    )
    init_from: Annotated[
        str | None, CommandLine(metavar="RUN|FILE"), ByDefault("random weights, drawn from the seed")
    ] = Field(
        default=None,
        description="Start from the weights of a run (final, else of the newest checkpoint), or of a .safetensors or "
        "torch.save file.",
    )
    fork: Annotated[str | None, CommandLine(metavar="RUN"), ByDefault("none")] = Field(
        default=None,
        description="Begin a new run with the whole state of a checkpoint of RUN (weights, optimizer, position), and "
        "with the settings of this command. --resume auto continues it.",
    )
    at: Annotated[Steps | None, ByDefault("that of the newest checkpoint")] = Field(
        default=None, description="The step of the checkpoint that --fork begins with."
    )
    reduction: Annotated[ReductionKind | None, ByDefault("what the experiment says")] = Field(
        default=None,
        description="How gradients are added up. exact: in one fixed order, so that every layout ends with the same "
        "bits. plain: as torch does it, the fastest.",
    )
    numerics: Annotated[Numerics | None, ByDefault("what the experiment says")] = Field(
        default=None,
        description="How a CPU computes it. native: as fast as it can, with bits that belong to its kind. portable: "
        "designed to have the same bits on every x86-64 CPU with AVX2, all but large products in one thread.",
    )
    record: Annotated[str | None, CommandLine(metavar="RUN.JSON", hidden=True)] = Field(
        default=None, description="Train the experiment that this file records; its own file gives the functions only."
    )
    only_steps: Annotated[Steps | None, CommandLine(hidden=True)] = Field(
        default=None, description="Only try the run: end after so many steps, as if they were all."
    )
    miniature: Annotated[bool, CommandLine(hidden=True)] = Field(
        default=False, description="Train two epochs of a few steps in the place of the whole run."
    )
    clock_ahead: Annotated[bool, CommandLine(hidden=True)] = Field(
        default=False, description="Let `time.time` be a day ahead for the experiment's code."
    )
    noted_in: Annotated[str | None, CommandLine(metavar="FILE", hidden=True)] = Field(
        default=None, description="Note after each step, in this file, checksums of all that a checkpoint holds."
    )
    operations_at: Annotated[Steps | None, CommandLine(hidden=True)] = Field(
        default=None, description="Note beside it what each operation of this step has computed."
    )


class KernelOptions(Frozen):
    """How a GPU computes it."""

    deterministic: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="Use only kernels that repeat their bits. auto: not for the plain reduction on CUDA, where that is "
        "slower. The exact reduction needs it.",
    )
    cuda_graph: bool = Field(
        default=False,
        description="Record the work of a micro-batch once and replay it, with the same bits: faster where the model "
        "is so small that the GPU waits for the host. Needs more memory, and for ddp the exact reduction.",
    )


class LayoutOptions(Frozen):
    """Where it runs."""

    layout: LayoutKind = Field(
        default="single",
        description="single: one process on one device. dp: one process, with a replica of the model on each of its "
        "devices (nn.DataParallel). ddp: a process for each device (DistributedDataParallel).",
    )
    device: Literal["auto", DeviceType] = Field(
        default="auto",
        description="auto: CUDA where there is a GPU for each process or replica, else the CPU. cuda: where there are "
        "too few GPUs, they are shared.",
    )
    nproc_per_node: Annotated[
        Count | None, ByDefault("1 for single, else one for each GPU of this node, or 2 on the CPU")
    ] = Field(default=None, description="Processes (ddp) or replicas (dp) on each node.")
    nnodes: Annotated[
        NodeRange, BeforeValidator(_low_and_high), AfterValidator(_in_order), CommandLine(metavar="N|MIN:MAX")
    ] = Field(
        default=NodeRange(),
        description="Nodes (machines) that train together, each started with the same command. With MIN:MAX, nodes "
        "may leave and join while the others train.",
    )
    shard: ShardMode = Field(
        default="none",
        description="What each rank of ddp keeps only its own part of; the exact reduction has the same bits. "
        "optimizer: the optimizer's state. gradients: also gradients, which then travel after each micro-batch. "
        "parameters: also parameters (with the plain reduction, too).",
    )
    shares: Annotated[
        Annotated[str, AfterValidator(_numbers)] | None,
        CommandLine(metavar="N,N,...|auto"),
        ByDefault("equal shares"),
    ] = Field(
        default=None,
        description="How many parts of each step each rank of ddp computes, in their order, where devices are unlike: "
        "with 3,1 rank 0 computes three of four micro-batches. auto: by the speed of each rank, measured in its first "
        "20 steps. No bit changes by it.",
    )
    rdzv_endpoint: Annotated[
        str | None, CommandLine(metavar="HOST:PORT"), ByDefault("none; one node needs no such place")
    ] = Field(default=None, description="Where several nodes meet: the address at which `ddp rendezvous` was started.")
    rdzv_id: Annotated[str | None, CommandLine(metavar="ID"), ByDefault("a random one, for one node")] = Field(
        default=None, description="A word that names this launch: the same on all of its nodes, and never used before."
    )


class CommunicationOptions(Frozen):
    """How processes talk, and what is done when some are lost."""

    backend: Literal["auto", "gloo", "nccl"] = Field(
        default="auto", description="auto: nccl between GPUs, gloo on the CPU and where processes share a GPU."
    )
    timeout: Seconds = Field(default=60.0, description="A process that is silent for longer counts as lost.")
    max_restarts: Annotated[int, CommandLine(metavar="N")] = Field(
        default=3, ge=0, description="How many times the processes are started again after some were lost."
    )
    recovery: Literal["auto", "live", "restart"] = Field(
        default="auto",
        description="What a lost process of ddp means for the others. live: the others go on with the same global "
        "batch and repeat no step, and a new process or node joins them; a node that is asked to stop leaves them. "
        "restart: all start again from the newest checkpoint. auto: live on CPUs where the reduction is exact, and "
        "each rank has the whole state; else restart, also with callbacks.",
    )


class FileOptions(Frozen):
    """Where data are read and results are written."""

    output: Annotated[str, CommandLine(metavar="DIR", variable="DDP_OUTPUT")] = Field(
        default="outputs",
        description="The folder of all runs, or its address in a store (s3://bucket/runs); each run makes a directory "
        "of its own in it.",
    )
    data_dir: Annotated[str, CommandLine(metavar="DIR", variable="DDP_DATA")] = Field(
        default="data", description="The folder that data sets are fetched into and read from."
    )
    workers: Annotated[int, CommandLine(metavar="N")] = Field(
        default=0, ge=0, description="Processes that prepare data, for each rank. With 0 the rank does it itself."
    )


class SavingOptions(Frozen):
    """When checkpoints are saved, and which are kept."""

    checkpoint_every: Annotated[Steps | None, ByDefault("at the end of each epoch")] = Field(
        default=None, description="Save a checkpoint every so many steps."
    )
    keep_last: Count = Field(
        default=2, description="How many of the newest checkpoints are kept. The best one is always kept, too."
    )
    keep_every: Annotated[Steps | None, ByDefault("none of them")] = Field(
        default=None, description="Also keep the checkpoint of every so many steps, for good."
    )
    keep_for_audit: Annotated[Count | None, ByDefault("none of them")] = Field(
        default=None,
        description="Keep so many checkpoints evenly and note their digests, so that `ddp audit` can check the run in "
        "pieces. Needs the exact reduction.",
    )
    asynchronous_save: Annotated[bool, CommandLine("--synchronous-save")] = Field(
        default=True, description="Wait until a checkpoint is written before training goes on."
    )


class StoppingOptions(Frozen):
    """When it stops before its end."""

    max_seconds: Annotated[Seconds | None, ByDefault("no limit")] = Field(
        default=None, description="Save and stop after this time; --resume continues."
    )
    stop_signal: Annotated[
        str | None, CommandLine(metavar="NAME"), ByDefault("none but TERM, INT (Ctrl-C) and HUP (a closed terminal)")
    ] = Field(
        default=None,
        description="A signal that also asks to save and stop, for example USR1, which a scheduler can send before it "
        "ends a job.",
    )
    on_nan: Literal["stop", "skip"] = Field(
        default="stop", description="What to do when a loss is NaN or infinite: end the run, or skip the step."
    )


class WatchingOptions(Frozen):
    """What is written down on the way."""

    log_every: Steps = Field(
        default=10,
        description="Steps between two records of loss and speed in metrics.jsonl. On CUDA, losses are mostly read, "
        "and found to be NaN, in these steps only.",
    )
    digest_every: Annotated[Steps | None, ByDefault("one at the end of each epoch")] = Field(
        default=None, description="Steps between two digests of the weights."
    )
    log_to: tuple[Literal["tensorboard"], ...] = Field(
        default=(),
        description="Keep settings, records, evaluations and the result for TensorBoard, too.",
    )
    profile: Annotated[str | None, CommandLine(metavar="FIRST:LAST"), ByDefault("no trace")] = Field(
        default=None,
        description="Trace what happens in these steps on every rank, for example 20:25; ui.perfetto.dev shows it.",
    )


class GuardOptions(Frozen):
    """How it checks that the result does not depend on the layout."""

    guard: Literal["off", "normal", "strict"] = Field(
        default="normal",
        description="A run with the exact reduction checks its own promise. normal: ranks compare what they have alike "
        "before each save, and steps are trained again elsewhere (see --rehearsal). strict: such steps after each "
        "save, and what it would only warn of ends the run. off: nothing of that, and no rehearsal.",
    )
    rehearsal: Annotated[Literal["off", "on"], CommandLine(variable="DDP_REHEARSAL")] = Field(
        default="on",
        description="Repeat steps elsewhere and compare all bits: before the run, two epochs cut to five steps are "
        "trained in one process, and on the layout asked for, where they are killed and resumed, unless that was done "
        "before; and before the run is completed, the steps after one of its checkpoints are trained again.",
    )
    on_difference: Literal["stop", "warn"] = Field(
        default="stop",
        description="What to do where such a check finds other bits: end the run before its next save, or warn once "
        "and mark its record.",
    )


class FaultOptions(Frozen):
    """Faults on purpose, for tests and drills."""

    faults: Annotated[tuple[str, ...], CommandLine("--fault", "KIND@STEP[:RANK]")] = Field(
        default=(),
        description="Let something go wrong, for example kill@60:1 (rank 1 is killed after step 60) or nan@30 (rank 0 "
        "computes with NaN in step 30). May be repeated.",
    )


class Options(
    FaultOptions, GuardOptions, WatchingOptions, StoppingOptions, SavingOptions, FileOptions, CommunicationOptions
):
    """How a run is carried out, as run.json records it.

    Nothing here changes what is trained or where; only `reduction`, `numerics` and `deterministic` decide the last
    bits of the result.
    """

    reduction: ReductionKind = "exact"
    numerics: Numerics = "native"
    deterministic: bool = True
    cuda_graph: bool = False
    launcher: Literal["in-process", "external", "torchrun"] = "in-process"
    """What has started the processes. `external`: a launcher that is not ours, torchrun or a scheduler's."""


class Asked(
    ExperimentOptions,
    LayoutOptions,
    KernelOptions,
    CommunicationOptions,
    FileOptions,
    SavingOptions,
    StoppingOptions,
    WatchingOptions,
    GuardOptions,
    FaultOptions,
):
    """All that `ddp train` may be asked, as the user may write it."""

    def to_words(self) -> list[str]:
        """The words after `ddp train` that ask for this: one option for each field that was given."""
        given = [name for _, fields in groups() for name in fields if name in self.model_fields_set]
        return [word for name in given for word in self._words(name, getattr(self, name))]

    def _words(self, name: str, value: Any) -> Iterator[str]:
        field = type(self).model_fields[name]
        option = option_name(name, field)
        if field.is_required():
            yield str(value)
        elif isinstance(value, bool):
            yield from [option] if value != field.default else []
        else:
            for item in value if is_repeated(field) else [] if value is None else [value]:
                yield from (option, str(item))


def groups() -> Iterator[tuple[str, dict[str, FieldInfo]]]:
    """The groups of `Asked`: title, and fields by name."""
    for group in Asked.__bases__:
        if issubclass(group, Frozen):
            yield (group.__doc__ or "").partition("\n")[0].rstrip("."), group.model_fields
