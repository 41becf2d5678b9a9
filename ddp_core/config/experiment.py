"""What is trained: one frozen, validated record that knows nothing of hardware, with a JSON round trip and a digest."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue, ValidationError, model_validator

from ddp_core.base.errors import UserError, nearest_name
from ddp_core.config.records import Frozen, MemoryFormat, Numerics, ReductionKind, explain


class Component(Frozen):
    """A model, data set, optimizer or schedule: the name of the function that builds it, and its keyword arguments.

    The name is looked up in the experiment's own file first, then among the functions that `ddp_core` brings.
    """

    name: str
    options: dict[str, JsonValue] = Field(default_factory=dict)


class Optimizer(Frozen):
    """A built-in optimizer and its hyper-parameters.

    `implementation` belongs to the experiment because each choice gives other bits: `fused` is one kernel per update,
    `foreach` one kernel per operation over all tensors (on CPU the same as the loop), `loop` one kernel per operation
    and tensor. A fused kernel needs real parameters whose elements fill their memory without gaps; a model that has
    other parameters is updated by the loop.
    """

    name: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: float = Field(default=0.1, gt=0)
    reference_batch: int | None = Field(default=None, gt=0)
    """The global batch that `lr` is meant for (linear scaling rule).

    The rate used is lr * global_batch_size / reference_batch.
    """
    momentum: float = Field(default=0.0, ge=0)
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    implementation: Literal["fused", "foreach", "loop"] = "fused"

    def base_rate(self, global_batch_size: int) -> float:
        """The rate that the schedule starts from, scaled to the global batch."""
        scale = 1.0 if self.reference_batch is None else global_batch_size / self.reference_batch
        return self.lr * scale


class Schedule(Frozen):
    """The learning rate as a function of a base rate and of the step alone, so that it needs no saving.

    With an optimizer of the experiment's own, the base rate of a parameter group is the rate that it was made with.
    """

    name: Literal["constant", "step", "cosine"] = "constant"
    """constant: the base rate. step: the base rate times `gamma` after every `step_epochs` epochs. cosine: half a wave
    from the base rate to `final_factor` times it, at the last step."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps in which the rate rises to the base rate in a straight line."""
    step_epochs: int = Field(default=30, gt=0)
    gamma: float = Field(default=0.1, gt=0)
    final_factor: float = Field(default=0.0, ge=0)

    def rate(self, base: float, step: int, steps_per_epoch: int, total_steps: int) -> float:
        """The rate used by optimizer step `step` (counted from 0 over the whole run)."""
        if step < self.warmup_steps:
            return base * (step + 1) / self.warmup_steps
        if self.name == "step":
            return float(base * self.gamma ** (step // (self.step_epochs * steps_per_epoch)))
        if self.name == "cosine":
            from math import cos, pi

            progress = min(1.0, (step - self.warmup_steps) / max(1, total_steps - self.warmup_steps))
            return base * (self.final_factor + (1 - self.final_factor) * 0.5 * (1 + cos(pi * progress)))
        return base


class Evaluation(Frozen):
    """When and where the held-out samples are evaluated; fixed batches, so the result does not depend on the layout."""

    every_epochs: int = Field(default=1, gt=0)
    samples_per_batch: int = Field(default=256, gt=0)
    where: Literal["all_ranks", "rank0"] = "all_ranks"


class DdpOptions(Frozen):
    """DistributedDataParallel's own settings and communication hooks; they say how gradients travel."""

    bucket_cap_mb: float = Field(default=25.0, gt=0)
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    find_unused_parameters: bool = False
    """For models of which some micro-batches leave parameters out. The exact reduction sees that in its first step; it
    needs this where it begins later."""
    broadcast_buffers: bool = True
    communication_hook: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    powersgd_rank: int = Field(default=1, gt=0)


UNTRAINED = "ddp.find_unused_parameters"
"""The setting that changes nothing of what is trained: experiments that differ in it alone are the same."""
_ADDED_LATER = ("ema_decay", "memory_format", "numerics", "best")
"""Fields added after experiments had been digested. A digest leaves out such a field at its default, so that the older
digests stay the same."""


def _check_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
        raise ValueError(
            f"{name!r} is also the name of the runs' folder, on every machine: it begins with a letter from A to Z or "
            "a digit, and goes on with these, _, . and -"
        )
    return name


def _check_best(best: str | None) -> str | None:
    if best is not None and not re.fullmatch(r"(max|min) \S+", best):
        raise ValueError(f"{best!r} does not say which figure, and whether more of it is better: 'max f1' or 'min cer'")
    return best


def _own_or(built_in: type[Frozen]) -> BeforeValidator:
    """Reads a record that has `options` as a Component and any other as `built_in`, so that errors name one type."""

    def read(value: object) -> object:
        if isinstance(value, built_in | Component):
            return value
        return (Component if isinstance(value, Mapping) and "options" in value else built_in).model_validate(value)

    return BeforeValidator(read)


class Experiment(Frozen):
    """What is trained: model, data, loss, optimizer, schedule, batch, length and seed. Hardware never appears here.

    `global_batch_size` is the number of samples per step. It is always cut into micro-batches of `micro_batch` samples,
    each with its own forward and backward; a layout only decides which rank computes which micro-batch. With
    `micro_batch=None` every rank computes its share of the global batch at once. That share changes with the layout,
    and therefore the exact reduction cannot be had.

    Where the experiment's file defines a function `loss`, `optimizer` or `schedule` and the experiment does not set the
    field of that name, the function is used.
    """

    name: Annotated[str, AfterValidator(_check_name)]
    """Also the name of the folder of its runs."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """The seed of all random numbers: initial weights, the order of the samples, dropout, augmentation."""
    model: Component = Component(name="model")
    data: Component = Component(name="data")
    loss: str = "cross_entropy"
    """The name of a function of outputs and targets that returns a sum over the samples of a micro-batch."""
    optimizer: Annotated[Optimizer | Component, _own_or(Optimizer)] = Optimizer()
    schedule: Annotated[Schedule | Component, _own_or(Schedule)] = Schedule()
    global_batch_size: int = Field(gt=0)
    micro_batch: int | None = Field(default=None, gt=0)
    epochs: int = Field(default=1, gt=0)
    max_steps: int | None = Field(default=None, gt=0)
    """The run ends after so many steps, even within an epoch."""
    last_batch: Literal["drop", "keep"] = "drop"
    """What is done with the samples at the end of an epoch that fill no whole global batch: left out, or trained as a
    smaller step."""
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    """tf32: all numbers are float32, but on a GPU that can (compute capability 8.0 or higher) matrix products and
    convolutions round their factors to 10 bits of mantissa. Elsewhere it is fp32."""
    memory_format: MemoryFormat = "contiguous"
    """channels_last: weights and inputs of images lie in memory with their channels innermost."""
    clip_norm: float | None = Field(default=None, gt=0)
    """Gradients with a larger Euclidean norm, over all parameters, are scaled down to it."""
    ema_decay: float | None = Field(default=None, gt=0, lt=1)
    """Also keep an exponential moving average of the weights: after each step, ema_decay * average + (1 - ema_decay) *
    weights."""
    reduction: ReductionKind = "exact"
    """exact: gradients are added in one fixed order, so that every layout ends with the same bits. plain: as torch does
    it, the fastest."""
    numerics: Numerics = "native"
    """portable: on the CPU, designed to have the same bits with every kind that has AVX2. Where that cannot be had, it
    is native."""
    sync_batch_norm: bool = False
    evaluation: Evaluation = Evaluation()
    ddp: DdpOptions = DdpOptions()
    best: Annotated[str | None, AfterValidator(_check_best)] = None
    """By which figure of the evaluation a checkpoint is kept as the best: "max f1" or "min cer". Without it by
    accuracy, or else by loss."""

    @model_validator(mode="after")
    def _check_cut(self) -> Experiment:
        if self.micro_batch is not None and self.global_batch_size % self.micro_batch:
            below, above = nearest_multiples(self.global_batch_size, self.micro_batch)
            choice = f"{below} or {above}" if below else f"{above}"
            raise ValueError(
                f"global_batch_size {self.global_batch_size} is not a multiple of micro_batch {self.micro_batch}; "
                f"the nearest sizes that are: {choice}"
            )
        return self

    @property
    def micro_batches(self) -> int | None:
        """M, the number of micro-batches of a whole global batch; None where the layout decides."""
        return None if self.micro_batch is None else self.global_batch_size // self.micro_batch

    def steps_per_epoch(self, samples: int) -> int:
        """Optimizer steps of one epoch over so many training samples."""
        whole, rest = divmod(samples, self.global_batch_size)
        return whole + (1 if rest and self.last_batch == "keep" else 0)

    def total_steps(self, steps_per_epoch: int) -> int:
        """Optimizer steps of the whole run."""
        whole = self.epochs * steps_per_epoch
        return whole if self.max_steps is None else min(whole, self.max_steps)

    def in_miniature(self) -> Experiment:
        """The experiment for a rehearsal: two epochs at most, each with an evaluation."""
        evaluation = self.evaluation.model_copy(update={"every_epochs": 1})
        return self.model_copy(update={"epochs": min(2, self.epochs), "evaluation": evaluation})

    def samples_in_miniature(self, samples: int) -> int:
        """How many of `samples` an epoch then has: five global batches, the last one short where the run has such."""
        size = self.global_batch_size
        rest = samples % size if self.last_batch == "keep" else 0
        return min(samples, 4 * size + (rest or size))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; `Experiment.from_json` gives an equal record back."""
        return self.model_dump(mode="json")

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Experiment:
        """The experiment that `to_json` wrote. Raises UserError, which names each wrong field."""
        try:
            return cls.model_validate(record)
        except ValidationError as error:
            raise UserError(f"experiment {record.get('name', '?')}: {explain(error)}") from None

    def digest(self) -> str:
        """SHA-256 over the canonical JSON: equal exactly when what is trained is equal."""
        record = self.to_json()
        record["ddp"]["find_unused_parameters"] = False
        for name in _ADDED_LATER:
            if getattr(self, name) == type(self).model_fields[name].default:
                del record[name]
        text = json.dumps(record, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def with_settings(self, settings: Iterable[str]) -> Experiment:
        """The experiment with `dotted.name=value` settings applied, typed and checked.

        Raises UserError for an unknown name (with the nearest known name), a value of the wrong type, or values that do
        not fit together.
        """
        record, known = self.to_json(), setting_names(self)
        for setting in settings:
            name, separator, text = setting.partition("=")
            name = name.strip()
            if not separator:
                raise UserError(f"--set {setting}: expected name=value, for example --set optimizer.lr=0.1")
            if name not in known:
                hint = nearest_name(name, known)
                raise UserError(f"--set {name}: experiment {self.name} has no such setting; {hint}")
            try:
                value = json.loads(text)
            except (ValueError, RecursionError):  # no JSON, or a number or depth that Python refuses
                value = None if text.lower() == "none" else {"true": True, "false": False}.get(text.lower(), text)
            section, _, key = name.partition(".")
            if not key:
                record[section] = value
            elif isinstance(getattr(self, section), Component) and key != "name":
                options = record[section]["options"]
                options[key] = _typed_like(options[key], value, name)
            else:
                record[section][key] = value
        return Experiment.from_json(record)


def called(kind: str, name: str) -> str:
    """How a message names a function of the experiment: "loss my_loss", and "loss" where it has no name of its own."""
    return kind if name == kind else f"{kind} {name}"


def nearest_multiples(number: int, divisor: int) -> tuple[int, int]:
    """The two multiples of `divisor` nearest to `number`: at or below it (0 if there is none), and above it."""
    below = number // divisor * divisor
    return below, below + divisor


def common_settings() -> list[str]:
    """Every dotted name that `--set` knows for any experiment with built-in optimizer and schedule.

    The options of model and data are not among them, because each experiment has its own.
    """
    # Made without being checked: `ddp train --help` builds no validators.
    return setting_names(Experiment.model_construct(name="any", global_batch_size=1))


def setting_names(experiment: Experiment) -> list[str]:
    """Every dotted name that `--set` knows for this experiment."""
    names = []
    for field in type(experiment).model_fields:
        value = getattr(experiment, field)
        if isinstance(value, Component):
            names += [f"{field}.name", *(f"{field}.{option}" for option in value.options)]
        elif isinstance(value, Frozen):
            names += [f"{field}.{inner}" for inner in type(value).model_fields]
        else:
            names.append(field)
    return names


def _typed_like(old: Any, new: Any, name: str) -> Any:
    """`new` in the type of the option's present value `old`, because options of components have no schema."""
    if isinstance(old, float) and type(new) is int:
        new = float(new)
    if old is None or new is None or type(new) is type(old):
        return new
    raise UserError(f"--set {name}={new}: expected {type(old).__name__}, as in {name}={json.dumps(old)}")
