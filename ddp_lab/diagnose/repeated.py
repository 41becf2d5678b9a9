"""What a run has otherwise than the same run: one that is started again, or one that was stopped and continued."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ddp_lab.diagnose.findings import KINDS, Finding
from ddp_lab.diagnose.trace import Event, Run, Step, first_difference


def not_repeatable(one: Run, again: Run) -> Iterator[Finding]:
    """What differs first between two runs that should be equal."""
    for at, (step, other) in enumerate(zip(one.ranks[0].steps, again.ranks[0].steps, strict=False), start=1):
        for _, what in _differences(step, other):
            name = "not-repeatable" if one.ranks[0].is_seeded else "no-seed"
            yield Finding(name, f"step {at}: {what}", one.world, step.event["site"])
            return


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
            for kind, what in _differences(step, other):
                name = f"resume-{kind}"
                # What else a later step has otherwise follows from the first.
                if name not in KINDS or name in found or (number and kind not in ("rate", "samples")):
                    continue
                found.add(name)
                if kind == "samples":
                    seen = [each for each in expected.steps if sorted(each.samples) == sorted(other.samples)]
                    what = f"step {step.number} has " + (f"the samples of step {seen[0].number}" if seen else what)
                yield Finding(name, f"{at}: {what}", straight.world, other.event["site"])


def _differences(step: Step, other: Step) -> Iterator[tuple[str, str]]:
    """In what two steps differ that should be equal, in the order in which a step makes it: kind and sentence."""
    one, two = step.event, other.event
    if name := first_difference(step.event["weights_before"], other.event["weights_before"]):
        yield "weights", f"the weights differ from the start, the first of them {name}"
    if "unknown" not in (one["state"], two["state"]) and one["state"] != two["state"]:
        yield "optimizer", "the optimizer's state is another"
    if one.get("scaler") != two.get("scaler"):
        yield "scaler", f"{_scaler(two.get('scaler'))}, and otherwise {_scaler(one.get('scaler'))}"
    if one["rates"] != two["rates"]:
        yield "rate", f"step {step.number} has the rate {two['rates']}, and otherwise {one['rates']}"
    if step.samples != other.samples:
        yield "samples", "other samples, or the same ones otherwise augmented"
    for forward, beside in zip(step.of("forward"), other.of("forward"), strict=False):
        for name, (state, _) in forward["draws"].items():
            if state != beside["generators"].get(name):
                yield "generators", f"forward draws from {name}, which stands elsewhere"
    if name := first_difference(step.named("gradients"), other.named("gradients")):
        yield "gradient", f"the same weights and samples give another gradient of {name}"
    if name := first_difference(step.event["weights"], other.event["weights"]):
        yield "update", f"the same gradients give other weights of {name}"


def _scaler(state: Event | None) -> str:
    if state is None:
        return "no scaler has made it"
    return f"the scale is {state['scale']:g}, {state['_growth_tracker']} steps after its last change"
