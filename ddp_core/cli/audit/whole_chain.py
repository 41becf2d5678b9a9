"""What is checked of a whole chain without training: that it is whole, and that it says what the record says."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from ddp_core.base.errors import UserError
from ddp_core.base.fingerprint import fingerprint_differences
from ddp_core.cli.repeating import Different
from ddp_core.config.experiment import Experiment, Optimizer, Schedule
from ddp_core.model.optimizers import build_optimizer
from ddp_core.observe.chain import CHAIN, DIGITS, BrokenChain, Link, each_link, numbers
from ddp_core.observe.metrics import read_metrics
from ddp_core.record.directory import RunDirectory
from ddp_core.run.chaining import code_digest, steps_between
from ddp_core.sampler import GlobalOrder
from ddp_core.trainers.batches import ids_digest

Key = tuple[str, int]
"""Kind and step of a line."""


@dataclass
class WholeChain:
    """A chain that was read from its first line to its last."""

    begin: Mapping[str, Any]
    head: str = ""
    wanted: dict[Key, Mapping[str, Any]] = field(default_factory=dict)
    """The lines of the steps that are trained again."""
    kept: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """The lines of kept checkpoints, by step."""
    figures: Mapping[str, Any] | None = None
    """Of the last evaluation."""
    evaluated: int | None = None
    """The step after which that was."""


def check_begin(path: Path, record: Mapping[str, Any]) -> Mapping[str, Any]:
    """The first line, if it says what the record says. Raises Different, and UserError for a run without a chain."""
    try:
        begin = next(each_link(path / CHAIN)).line
    except FileNotFoundError:
        raise UserError(
            f"{path} has no chain ({CHAIN}), so it can only be checked whole: ddp verify {path}. To audit the next one "
            "in pieces, train it with --keep-for-audit N"
        ) from None
    except (OSError, StopIteration) as error:
        raise Different(f"different chain: {CHAIN} cannot be read ({error or 'it is empty'})") from None
    except BrokenChain as error:
        raise Different(f"different chain: {error}") from None
    if begin["from_step"]:
        raise UserError(
            f"the chain of {path} begins at step {begin['from_step']}, so nothing tells of the steps before (a fork, "
            "or a run that was trained without --keep-for-audit at first): use ddp verify"
        )
    if any("extended_from" in attempt for attempt in record["attempts"]):
        raise UserError(f"{path} was made longer after its end, so its segments are not of one length: use ddp verify")
    said = {
        "experiment": (begin["experiment_sha256"], Experiment.from_json(record["experiment"]).digest()),
        "code": (begin["code_sha256"], code_digest(record["source"]["files"])),
        "data": (begin["data_sha256"], record["data_sha256"]),
        "fingerprint": (fingerprint_differences(begin["fingerprint"], record["fingerprint"]), []),
        "length": (begin["every"], steps_between(begin["total_steps"], max(begin["keep"], 1))),
    }
    for what, (there, here) in said.items():
        if there != here:
            raise Different(f"different chain: its {what} is not that of run.json")
    return begin


def check_chain(directory: RunDirectory, record: Mapping[str, Any], samples: int, wanted: set[int]) -> WholeChain:
    """Read the chain, and check all that follows without training; `samples`: of the training data.

    Each line's head, every step once and in sequence, the ids of each step's samples, the rates of a built-in schedule,
    and that the last lines and run.json tell the same end. Lines of the steps `wanted` are kept. Raises Different.
    """
    experiment = Experiment.from_json(record["experiment"])
    links = each_link(directory.path / CHAIN)
    chain = WholeChain(next(links).line)
    steps_per_epoch, order = experiment.steps_per_epoch(samples), GlobalOrder(samples, experiment.seed)
    rates = _Rates(experiment, steps_per_epoch)
    reached = 0
    try:
        for link in links:
            kind, step = link.line["kind"], link.step
            if step != reached + (kind == "step"):
                raise Different(f"different chain: after step {reached} it tells of step {step}")
            reached = step
            if kind == "step":
                epoch, position = divmod(step - 1, steps_per_epoch)
                start = position * experiment.global_batch_size
                ids = ids_digest(order, epoch, start, min(start + experiment.global_batch_size, samples))
                if (link.line["epoch"], link.line["ids"]) != (epoch, ids):
                    raise Different(f"different samples: step {step} has trained others than seed and step say")
                if (rate := rates.wrong(step, link.line["lr"])) is not None:
                    raise Different(f"different rate: step {step} was trained with {rate}")
            _keep(chain, link, wanted)
    except BrokenChain as error:
        raise Different(f"different chain: {error}") from None
    total = experiment.total_steps(steps_per_epoch)
    if reached != total and not record.get("ended_early"):
        raise Different(f"different chain: it ends with step {reached}, and the experiment has {total} steps")
    _check_end(chain, directory, record, reached)
    return chain


def _keep(chain: WholeChain, link: Link, wanted: set[int]) -> None:
    kind, step = link.line["kind"], link.step
    chain.head = link.head
    if kind == "kept":
        chain.kept[step] = link.line
    elif kind == "evaluation":
        chain.figures, chain.evaluated = link.line["figures"], step
    if step in wanted:
        chain.wanted[kind, step] = link.line


def _check_end(chain: WholeChain, directory: RunDirectory, record: Mapping[str, Any], reached: int) -> None:
    told = record.get("chain") or {"head": None, "step": None}
    if chain.head != told["head"]:
        raise Different(
            f"different chain: run.json holds the head {told['head']}, and the chain ends with {chain.head}"
        )
    steps, every = record["result"]["steps"], chain.begin["every"]
    if reached != steps:
        raise Different(f"different chain: it ends with step {reached}, and the run with step {steps}")
    missing = [step for step in (*range(every, steps, every), steps) if step not in chain.kept]
    if missing:
        raise Different(f"different chain: it does not tell of the checkpoint that was kept after step {missing[0]}")
    if chain.kept[steps]["weights_sha256"] != record["weights_sha256"]:
        raise Different("different weights: those of run.json are not those with which the chain ends")
    _check_figures(chain, directory, record)


def _check_figures(chain: WholeChain, directory: RunDirectory, record: Mapping[str, Any]) -> None:
    """Raises Different where run.json or metrics.jsonl tell other figures of the end than the chain."""
    told = {name: value for name, value in record["result"].items() if name.startswith(("test_", "ema_test_"))}
    known = dict(chain.figures or {})
    entries = reversed(read_metrics(directory.metrics, "evaluation"))
    last: Mapping[str, Any] = next((entry for entry in entries if entry["step"] == chain.evaluated), {})
    written = {name: last.get(name) for name in known}
    for where, figures in (("run.json", told), ("metrics.jsonl", written)):
        for name in {**known, **figures}:
            if known.get(name) != figures.get(name):
                raise Different(
                    f"different figures: {name} is {figures.get(name)} in {where}, and {known.get(name)} in the chain"
                )


class _Rates:
    """The rates that a built-in schedule of a built-in optimizer gives."""

    def __init__(self, experiment: Experiment, steps_per_epoch: int) -> None:
        self._rule = None
        if isinstance(experiment.schedule, Schedule) and isinstance(experiment.optimizer, Optimizer):
            self._rule = experiment.schedule
            groups = build_optimizer(experiment.optimizer, nn.Linear(1, 1), experiment.global_batch_size).param_groups
            self._base = float(groups[0]["lr"])
        self._steps = (steps_per_epoch, experiment.total_steps(steps_per_epoch))

    def wrong(self, step: int, text: str) -> str | None:
        """What the chain tells of the rates of a step, where that is not what the schedule gives; None where it is."""
        if self._rule is None:
            return None
        rate = self._rule.rate(self._base, step - 1, *self._steps)
        if not text or len(text) % DIGITS:
            return "no rates"
        told = [struct.unpack(">d", bytes.fromhex(each))[0] for each in numbers(text)]
        if all(each == rate for each in told):
            return None
        return f"the rates {told}, where the schedule says {rate}"
