"""What a run's ranks have written, put together: by rank, the optimizer steps and what each was made of."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_core.base.errors import UserError

Event = dict[str, Any]


@dataclass
class Part:
    """A part of what a rank has done: the event that names it, and by their kind those that belong to it."""

    event: Event = field(default_factory=dict)
    events: dict[str, list[Event]] = field(default_factory=dict)

    def of(self, kind: str) -> list[Event]:
        """Its events of a kind."""
        return self.events.get(kind, [])

    def add(self, event: Event) -> None:
        """Another event belongs to it."""
        self.events.setdefault(event["event"], []).append(event)


class Step(Part):
    """One optimizer step of a rank, and all since the one before it."""

    @property
    def number(self) -> int:
        """The step's number, from 1."""
        return int(self.event["step"])

    @property
    def samples(self) -> list[str]:
        """Digests of the samples that the model was trained on, in their order; none where its loss is of others."""
        if self.of("outside"):
            return []
        return [each for forward in self.of("forward") for each in forward["samples"]]

    @property
    def gradients(self) -> dict[str, dict[str, Any]]:
        """By parameter: `digest`, `own` and `reduced` elements."""
        return self.event["gradients"]  # type: ignore[no-any-return]

    def reduced(self, name: str) -> list[float]:
        """Elements of the gradient that the optimizer uses for a parameter, before clipping; empty where unknown."""
        return self.gradients.get(name, {}).get("reduced") or []


class Pass(Part):
    """A DataLoader of one rank, gone through once: its batches, its end, and the forward passes of models in training.

    Of an evaluation on it, also what was found, exchanged and printed until the next training.
    """

    @property
    def ids(self) -> list[int] | None:
        """The indices of its samples, in their order; None where they are unknown."""
        if any(each["ids"] is None for each in self.of("batch")):
            return None
        return [each for batch in self.of("batch") for each in batch["ids"]] or None

    @property
    def rows(self) -> list[str]:
        """Digests of its samples' content, in their order."""
        return [each for batch in self.of("batch") for each in batch["rows"]]


@dataclass
class Rank(Part):
    """What one rank has done since its start."""

    rank: int = 0
    steps: list[Step] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)

    @property
    def is_seeded(self) -> bool:
        """Whether the script has set the seed of torch's generator."""
        return bool(self.steps) and self.steps[0].event["seed"] != self.event["seed"]

    @property
    def schedule_ends(self) -> list[int]:
        """By schedule, after how many moves it ends; 0 where it does not."""
        return [end for each in self.of("stopped") for end in each["ends"]]

    def training_passes(self) -> list[Pass]:
        """The passes of the loader that a model was trained on most often, in their order."""
        trained = [each for each in self.passes if each.of("forward")]
        if not trained:
            return []
        most = max(trained, key=lambda each: len(each.of("batch"))).event["loader"]
        return [each for each in trained if each.event["loader"] == most]

    def evaluated_passes(self) -> list[Pass]:
        """The passes of loaders that no model was trained on, but called on, in their order."""
        trained = {each.event["loader"] for each in self.passes if each.of("forward")}
        return [each for each in self.passes if each.of("evaluation") and each.event["loader"] not in trained]


@dataclass
class Run:
    """What all ranks of one start of the script have done."""

    ranks: list[Rank]
    folder: Path | None = None
    """Where its processes have written their traces."""
    problem: str = ""
    """Why it has not come to its end, in one line; empty where it has."""
    fault: str = ""
    """The name of the finding that this is, if one rank can do what these cannot; empty where it is none."""

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def has_saved(self) -> bool:
        """Whether a rank has called torch.save."""
        return any(rank.of("saved") for rank in self.ranks)

    @property
    def is_connected(self) -> bool:
        """Whether the ranks have made a process group."""
        return all(rank.steps[-1].event["distributed"] for rank in self.ranks)

    @property
    def is_sharded(self) -> bool:
        """Whether ranks hold parts of the parameters, as with FSDP2: those are not compared."""
        return any(step.event["sharded"] for rank in self.ranks for step in rank.steps)

    def by_step(self) -> Iterator[list[Step]]:
        """The steps of all ranks side by side, as far as all have come."""
        for steps in zip(*(rank.steps for rank in self.ranks), strict=False):
            yield list(steps)


def read_run(folder: Path) -> Run:
    """The run whose processes have written their traces into `folder`: those with at least one step, by rank.

    Raises UserError where two processes have been the same rank.
    """
    ranks: dict[int, Rank] = {}
    for file in sorted(folder.glob("*.jsonl")):
        rank = _rank(_events(file))
        if rank.steps and rank.rank in ranks:
            raise UserError(
                f"two processes of the script were rank {rank.rank}: where it starts its own ranks, put {{ranks}} in "
                "the place of their number (`-- train.py --gpus {ranks}`)"
            )
        if rank.steps:
            ranks[rank.rank] = rank
    return Run([ranks[number] for number in sorted(ranks)], folder)


def _events(file: Path) -> Iterator[Event]:
    with file.open() as lines:
        for line in lines:
            if line.endswith("\n"):  # the process may have been killed in the middle of its last one
                yield json.loads(line)


def _rank(events: Iterator[Event]) -> Rank:
    rank, since = Rank(), Step()
    passes: dict[tuple[int, int], Pass] = {}
    latest: Pass | None = None
    evaluated: list[Pass] = []
    for event in events:
        kind = event["event"]
        since.add(event)
        if kind == "step":
            since.event = event
            rank.steps.append(since)
            rank.rank, since = int(event["rank"]), Step()
        elif kind == "start":
            rank.event = event
        elif kind == "pass":
            rank.passes.append(Pass(event))
            passes[event["loader"], event["pass"]] = rank.passes[-1]
        elif kind in ("batch", "end"):
            latest = passes[event["loader"], event["pass"]]
            latest.add(event)
        elif kind == "evaluation" and rank.steps:  # one before the first step only tries whether it runs
            evaluated.append(passes[event["loader"], event["pass"]])
            evaluated[-1].add(event)
        elif kind in ("figure", "printed", "exchange"):
            for each in evaluated[-1:] if kind == "figure" else evaluated:
                each.add(event)
        elif kind == "forward":
            evaluated.clear()
            if latest is not None:
                latest.add(event)
        else:
            rank.add(event)
    return rank
