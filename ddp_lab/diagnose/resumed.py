"""What a script's own resume does not bring back: a run that was stopped and continued, beside one that went on."""

from __future__ import annotations

from collections.abc import Iterator

from ddp_lab.diagnose.across import first_difference
from ddp_lab.diagnose.findings import Finding
from ddp_lab.diagnose.trace import Event, Run


def not_restored(straight: Run, stopped: Run, resumed: Run) -> Iterator[Finding]:
    """What the first step after the resume has otherwise; then the first step whose samples are others.

    `straight` has gone on; `stopped` has ended after a checkpoint; `resumed` has begun from it.
    """
    done = len(stopped.ranks[0].steps)
    after = straight.ranks[0].steps[done:]
    pairs = list(zip(after, resumed.ranks[0].steps, strict=False))
    if not pairs:
        return
    world = straight.world
    expected, found = pairs[0]
    at = f"after {done} steps and a resume, the first step"
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
            evidence = f"step {expected.number}: {rates[1]} after the resume, {rates[0]} without a stop"
            yield Finding("resume-rate", evidence, world, found.event["site"])
            break
    for expected, found in pairs:
        if expected.samples != found.samples:
            seen = [step for step in straight.ranks[0].steps if sorted(step.samples) == sorted(found.samples)]
            which = f"has the samples of step {seen[0].number}" if seen else "has other samples than without a stop"
            yield Finding("resume-samples", f"step {expected.number} after the resume {which}", world)
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
