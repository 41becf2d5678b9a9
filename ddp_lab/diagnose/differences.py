"""What steps have otherwise that should be equal: those of ranks side by side, or those of two equal runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ddp_core.observe.operations import differing as differing_operations
from ddp_lab.diagnose.findings import KINDS, Finding
from ddp_lab.diagnose.trace import Run, Step


def differences(steps: Sequence[Step]) -> dict[str, tuple[str, str, list[Any]]]:
    """By kind, in the order in which a step makes it: what differs first, of how many that is true, and its values.

    What one of the steps has not, is not compared.
    """
    found = {}
    facts = [_facts(step) for step in steps]
    for kind, (words, unit, _) in facts[0].items():
        values = [each[kind][2] for each in facts]
        if all(values) and (names := differing(*values)):
            of_all = f"{len(names)} of {len(values[0])} {unit}"
            found[kind] = words.format(names[0]), of_all, [each.get(names[0]) for each in values]
    return found


def _facts(step: Step) -> dict[str, tuple[str, str, Mapping[Any, Any]]]:
    event, forwards = step.event, step.of("forward")
    # When forward has begun, after DDP has made them equal where it does.
    buffers: dict[str, str] = next((each["buffers"] for each in forwards), {})
    state = {} if event["state"] == "unknown" else {"the optimizer's state": event["state"]}
    drawn = {name: [each["generators"].get(name) for each in forwards] for each in forwards for name in each["draws"]}
    gradients = {name: each["digest"] for name, each in step.gradients.items()}
    return {
        "weights": ("{} before it", "weights", event["weights_before"]),
        "buffers": ("{} when forward begins", "buffers", buffers),
        "optimizer": ("{}", "states", state),
        "scaler": ("the gradient scaler's {}", "figures", event.get("scaler") or {"scale": None}),
        "rate": ("the learning rate of group {}", "rates", dict(enumerate(event["rates"]))),
        "samples": ("{}", "lists", {"which samples it has, or their augmentation,": step.samples}),
        "generators": ("the state in which forward draws from {}", "generators", drawn),
        "gradient": ("the gradient of {}", "parameters", gradients),
        "update": ("{} after it", "weights", event["weights"]),
    }


def differing(*mappings: Mapping[Any, Any]) -> list[Any]:
    """The names of what is not the same in all of them."""
    names = dict.fromkeys(name for each in mappings for name in each)
    return [name for name in names if any(each.get(name) != mappings[0].get(name) for each in mappings)]


def not_repeatable(one: Run, again: Run) -> Iterator[Finding]:
    """What differs first between two runs that should be equal."""
    for at, (step, other) in enumerate(zip(one.ranks[0].steps, again.ranks[0].steps, strict=False), start=1):
        if first := next(iter(differences([step, other]).values()), None):
            name = "not-repeatable" if one.ranks[0].is_seeded else "no-seed"
            yield Finding(name, f"step {at}: {_words(*first)}", one.world, step.event["site"])
            return


def other_operation(one: Run, again: Run) -> str:
    """The first operation that has another result in the second of two runs in which they are noted, in words."""
    for step, other in zip(one.ranks[0].steps, again.ranks[0].steps, strict=False):
        for noted, beside in zip(step.of("operations"), other.of("operations"), strict=False):
            for what in differing_operations(noted["noted"], beside["noted"]):
                return f"; step {step.number}: first of all, {what}"
    return ""


def not_restored(straight: Run, before: Sequence[Run], resumed: Run) -> Iterator[Finding]:
    """What each rank has otherwise in the first step after a resume; then the first step whose samples are others.

    `straight` has gone on; each run of `before` has ended after a checkpoint, from which the next one has begun.
    """
    done = sum(len(run.ranks[0].steps) for run in before)
    which = "a resume" if len(before) == 1 else f"{len(before)} resumes"
    found: set[str] = set()
    for rank, (expected, others) in enumerate(zip(straight.ranks, resumed.ranks, strict=False)):
        at = f"after {done} steps and {which}" + (f", on rank {rank}" if rank else "")
        for number, (step, other) in enumerate(zip(expected.steps[done:], others.steps, strict=False)):
            for kind, difference in differences([step, other]).items():
                name, what = f"resume-{kind}", _words(*difference)
                # What else a later step has otherwise follows from the first.
                if name not in KINDS or name in found or (number and kind not in ("rate", "samples")):
                    continue
                found.add(name)
                if kind == "samples":
                    seen = [each for each in expected.steps if sorted(each.samples) == sorted(other.samples)]
                    what = f"step {step.number} has the samples of step {seen[0].number}" if seen else what
                yield Finding(name, f"{at}: {what}", straight.world, other.event["site"])


def _words(what: str, _: str, values: Sequence[Any]) -> str:
    one, other = values
    return f"{what} is another" + ("" if isinstance(one, str | list) else f" ({other}, and otherwise {one})")
