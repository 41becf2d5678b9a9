"""What a script's own resume does not bring back: a run that was stopped and continued, beside one that went on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ddp_lab.diagnose.across import first_difference
from ddp_lab.diagnose.findings import Finding
from ddp_lab.diagnose.trace import Event, Run, Step


def not_restored(straight: Run, before: Sequence[Run], resumed: Run) -> Iterator[Finding]:
    """What each rank has otherwise in the first step after a resume; then the first step whose samples are others.

    `straight` has gone on; each run of `before` has ended after a checkpoint, from which the next one has begun.
    """
    done = sum(len(run.ranks[0].steps) for run in before)
    which = "a resume" if len(before) == 1 else f"{len(before)} resumes"
    found: set[str] = set()
    for rank, (expected, others) in enumerate(zip(straight.ranks, resumed.ranks, strict=False)):
        at = f"after {done} steps and {which}" + (f", on rank {rank}" if rank else "")
        for each in _of_rank(expected.steps, done, others.steps, at, straight.world):
            if each.name not in found:
                found.add(each.name)
                yield each


def _of_rank(straight: Sequence[Step], done: int, resumed: Sequence[Step], at: str, world: int) -> Iterator[Finding]:
    pairs = list(zip(straight[done:], resumed, strict=False))
    if not pairs:
        return
    expected, found = pairs[0]
    if name := first_difference(expected.event["weights_before"], found.event["weights_before"]):
        yield Finding("resume-weights", f"{at}: {name} is another", world, found.event["site"])
    if "unknown" not in (states := (expected.event["state"], found.event["state"])) and states[0] != states[1]:
        yield Finding("resume-optimizer", f"{at}: the optimizer's state is another", world, found.event["site"])
    scalers = expected.event.get("scaler"), found.event.get("scaler")
    if scalers[0] != scalers[1]:
        evidence = f"{at}: {_scaler(scalers[1])}; without a stop {_scaler(scalers[0])}"
        yield Finding("resume-scaler", evidence, world, found.event["site"])
    for expected, found in pairs:
        rates = expected.event["rates"], found.event["rates"]
        if rates[0] != rates[1]:
            evidence = f"{at}: step {expected.number} has the rate {rates[1]}, {rates[0]} without a stop"
            yield Finding("resume-rate", evidence, world, found.event["site"])
            break
    for expected, found in pairs:
        if expected.samples != found.samples:
            seen = [step for step in straight if sorted(step.samples) == sorted(found.samples)]
            what = f"the samples of step {seen[0].number}" if seen else "other samples than without a stop"
            yield Finding("resume-samples", f"{at}: step {expected.number} has {what}", world)
            break
    expected, found = pairs[0]
    for forward, other in zip(expected.forwards, found.forwards, strict=False):
        for name in forward["moved"]:
            if forward["generators"][name] != other["generators"].get(name):
                yield Finding("resume-generators", f"{at}: forward draws from {name}, which stands elsewhere", world)
                return


def _scaler(state: Event | None) -> str:
    if state is None:
        return "no scaler has made it"
    return f"the scale is {state['scale']:g}, {state['_growth_tracker']} steps after its last change"
