"""What changes with the number of ranks: a run on one rank, beside the same run again, and beside runs on more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import dist, hypot, isfinite
from typing import Any

from ddp_core.base.errors import UserError
from ddp_lab.diagnose.checks import CLEAR
from ddp_lab.diagnose.differences import differing
from ddp_lab.diagnose.findings import Finding
from ddp_lab.diagnose.trace import Run, Step

_DRAW_AGAIN = ("WeightedRandomSampler",)
"""Samplers that draw samples more than once on purpose."""
_LARGE = 0.1
"""An element of a gradient is large from this part of the largest on; so much of an update is no rounding."""
_LEAST_STEPS = 8
"""A number of steps that is chosen freely is too often a multiple of the steps of a shorter epoch."""
_NOTHING = 1e-3
"""A difference is measured against this part of the largest gradient at least: smaller ones may be rounding alone."""


def with_ranks(one: Run, run: Run) -> Iterator[Finding]:
    """What a run on more ranks does otherwise than the run on one."""
    yield from _settings(one, run)
    yield from _schedule(one, run)
    yield from _batch(one, run)
    yield from _epoch(one, run)


def with_one_process(one: Run, run: Run, draws: bool) -> Finding:
    """What the ranks' steps have otherwise than those of one process with all of their samples; else what remains.

    `draws` says whether its forward passes draw random numbers, but for these two runs. Raises UserError where nothing
    is proved of the first step; later ones are looked at until nothing is proved of one.
    """
    proved: dict[str, float] = {}
    which, rest = f"one process with the same weights and the samples of all {run.world} ranks", ""
    last, is_same = 0, True
    for alone, at in zip(one.ranks[0].steps, run.by_step(), strict=False):
        try:
            rounding = _rounding(alone, at)
            found = _otherwise(alone, at, rounding, which)
        except UserError as error:
            if not proved:
                raise
            rest = f"; step {alone.number} is {error}"
            break
        if found is not None:
            return found
        last = alone.number
        is_same &= all(alone.gradients[name]["digest"] == at[0].gradients[name]["digest"] for name in rounding)
        proved = {name: max(off, proved.get(name, 0.0)) for name, off in {**proved, **rounding}.items()}
    how = "to the bit" if is_same else f"up to rounding, {max(proved.values()):.1g} of the ranks' own gradients"
    kept = "random-numbers" if draws else "samples" if is_same else "rounding"
    without = " without dropout" * draws
    if any(name.endswith("running_var") for name in one.ranks[0].steps[0].of("forward")[0]["buffers"]):
        without += ", with batch norm's running statistics,"
    when = "step 1" if last == 1 else f"steps 1 to {last}"
    evidence = f"{when}: the gradient{without} is that of {which} {how} ({len(proved)} parameters){rest}"
    return Finding(f"remains-{kept}", evidence, run.world)


def _otherwise(alone: Step, at: Sequence[Step], rounding: Mapping[str, float], which: str) -> Finding | None:
    """What ranks have otherwise in a step than one process, which `which` describes; None where it is only rounding.

    Raises UserError where it may be no bug.
    """
    where, when, world = at[0].event["site"], f"step {alone.number}", len(at)
    for name in rounding:
        if not isfinite(sum(at[0].reduced(name))):
            evidence = f"{when}: the gradient of {name} is not finite, and that of {which} is"
            return Finding("not-finite", evidence, world, where)
    factors = {
        name: multiple(alone.reduced(name), at[0].reduced(name)) for name, off in rounding.items() if off > CLEAR
    }
    others = {name: factor for name, factor in factors.items() if factor is None or abs(factor - 1) > CLEAR}
    if others and (doubt := _doubt(alone, at)):
        raise UserError(f"not proved: the gradient is another, and {doubt}")
    if others:
        unseen = next((each["site"] for step in at for each in step.of("unseen")), None)
        kind = "exchange-without-gradient" if unseen else _kind_of(others, len(rounding), world)
        name, factor = next(iter(others.items()))
        how = f"{factor:.3g} times" if factor else "no multiple of"
        of_all = f"({len(others)} of {len(rounding)} parameters)"
        evidence = f"{when}: the gradient of {name} is {how} that of {which} {of_all}"
        return Finding(kind, evidence, world, unseen or where)
    if moved := _moved_otherwise(alone, at[0], rounding):
        evidence = f"{when}: {moved} moves otherwise than in {which}, whose gradient is the same up to rounding"
        return Finding("other-update", evidence, world, where)
    return None


def _kind_of(factors: Mapping[str, float | None], parameters: int, ranks: int) -> str:
    """What it is that some of so many parameters have a gradient by these factors of that of one process."""
    times = [each and max(each, 1 / each) for each in factors.values()]
    if any(each is None or abs(each / ranks - 1) > CLEAR for each in times):
        return "other-gradient"
    return "step-grows-with-ranks" if len(factors) == parameters else "reduced-unlike"


def has_samples_of(one: Run, run: Run) -> bool:
    """Whether the first step on one rank has the samples of all ranks' first step anyway."""
    return sorted(_samples(next(one.by_step()))) == sorted(_samples(next(run.by_step())))


def _doubt(alone: Step, at: Sequence[Step]) -> str:
    """Why it may be no bug that one process has another gradient; empty where nothing speaks for that."""
    if any(each["generators"] != alone.event["generators"] for each in alone.of("forward")[-1:]):
        return "random numbers are drawn between forward and step"  # by the loss, or for a next batch
    # Batches were put together along the first dimension, which may be time.
    batches = [each for step in at for each in step.of("batch") if each["ids"] is not None]
    if any(len(each["ids"]) != len(each["rows"]) for each in batches):
        return "the batches of a loader have not one row for each sample"
    return ""


def _samples(at: Sequence[Step]) -> list[str]:
    return [sample for step in at for sample in step.samples]


def _rounding(alone: Step, at: Sequence[Step]) -> dict[str, float]:
    """By parameter, how far the ranks' gradient and one process's are apart, as a part of the ranks' own gradients.

    Sums of numbers that cancel each other are rounded as the numbers are; own gradients are taken as the optimizer
    gets them, such as without a scaler's factor. A gradient that is nothing beside the largest, as that of the bias of
    keys in attention, may be rounding alone. Parameters are left out whose gradients are unknown, zero, or not finite
    in one process. Raises UserError where the two steps do not prove anything.
    """
    if alone.event["weights_before"] != at[0].event["weights_before"]:
        raise UserError("not proved: one process begins with other weights")
    # A later step may have none, such as one whose model is called with what another one has made.
    is_given = not alone.of("outside") and (alone.samples or alone.number > 1)
    if not is_given or sorted(alone.samples) != sorted(_samples(at)):
        raise UserError("not proved: one process could not be given the samples of all ranks")
    if any(forward["draws"] for forward in alone.of("forward")):
        raise UserError("not proved: random numbers are drawn in forward")
    known: dict[str, tuple[float, float]] = {}
    for name in at[0].gradients:
        expected, seen = alone.reduced(name), at[0].reduced(name)
        owns = [own for step in at if (own := step.gradients.get(name, {}).get("own")) is not None]
        is_known = len(owns) == len(at) and len(expected) == len(seen) and isfinite(sum(expected))
        if is_known and (any(expected) or any(seen)):
            mean = hypot(*map(sum, zip(*owns, strict=True))) / len(owns)
            used = min(1.0, max(hypot(*expected), hypot(*seen)) / mean) if mean else 1.0
            known[name] = dist(expected, seen), used * max(hypot(*own) for own in owns)
    if not known:
        raise UserError("not proved: what its backward passes give is not known")
    least = _NOTHING * max(own for _, own in known.values())
    return {name: off / (max(own, least) or 1.0) for name, (off, own) in known.items()}


def _moved_otherwise(alone: Step, step: Step, names: Iterable[str]) -> str | None:
    """The first parameter that moves otherwise though its gradient is the same; None if there is none.

    Where rates or other settings of the optimizer differ, other moves are by design, and None is returned, too.

    An optimizer may make a full move of a gradient that is rounding alone, so small or unlike elements do not count.
    """
    if alone.event["rates"] != step.event["rates"] or alone.event["settings"] != step.event["settings"]:
        return None
    for name in names:
        gradient, moves = alone.reduced(name), (alone.event["updates"][name], step.event["updates"][name])
        least, pairs = _LARGE * max(map(abs, gradient)), zip(gradient, step.reduced(name), strict=True)
        large = [at for at, (each, seen) in enumerate(pairs) if abs(each) > max(least, abs(each - seen) / CLEAR)]
        one, other = ([each[index] for index in large] for each in moves)
        if dist(one, other) > _LARGE * max(hypot(*one), hypot(*other)):
            return name
    return None


def multiple(one: Sequence[float], other: Sequence[float]) -> float | None:
    """The factor that turns the first gradient into the other one; None where there is no such factor."""
    if not (square := sum(each * each for each in one)):
        return None
    factor = sum(each * beside for each, beside in zip(one, other, strict=True)) / square
    rest = sum((factor * each - beside) ** 2 for each, beside in zip(one, other, strict=True))
    return factor if rest <= (CLEAR / 2) ** 2 * factor * factor * square else None


def _settings(one: Run, run: Run) -> Iterator[Finding]:
    """Parameters whose optimizer has other settings for them than on one rank, such as another weight decay."""
    alone, together = (
        {name: each for step in reversed(some.ranks[0].steps) for name, each in step.event["settings"].items()}
        for some in (one, run)
    )
    others = [name for name in differing(alone, together) if name in alone and name in together]
    if not others or one.is_sharded or run.is_sharded:
        return
    name = others[0]
    key = differing(alone[name], together[name])[0]
    values = [f"{key} {each[name].get(key, 'not at all')}" for each in (together, alone)]
    evidence = (
        f"{name} has {values[0]} on {run.world} ranks, {values[1]} on one ({len(others)} of {len(alone)} parameters, "
        f"{sum(alone[each]['elements'] for each in others)} numbers)"
    )
    yield Finding("settings-depend-on-ranks", evidence, run.world, run.ranks[0].steps[0].event["site"])


def _schedule(one: Run, run: Run) -> Iterator[Finding]:
    """How a schedule depends on the number of ranks: by its moves in a step, by its rates, or by where it ends."""
    steps = [each.ranks[0].steps for each in (one, run)]
    # Before the second step a schedule may have made its first move when it was built, so count from there on.
    moves = [{len(step.of("schedule")) for step in each[1:]} for each in steps]
    event = next((each for step in steps[1][1:] for each in step.of("schedule")), {})
    alone, together = ([step.event["rates"] for step in each] for each in steps)
    if moves == [{1}, {run.world}]:
        # The rate may be a function of the samples: a step of W ranks is one of W steps on one rank.
        counts = [len(_samples(next(each.by_step()))) for each in (one, run)]
        pairs = list(zip(alone[:: run.world], together, strict=False))[1:]
        follows = counts[1] == run.world * counts[0] and pairs and all(_alike(*each) for each in pairs)
        evidence = f"between steps 1 and 2 {event['kind']} moves {run.world} times on {run.world} ranks, once on one"
        name = "schedule-counts-samples" if follows else "schedule-steps-with-ranks"
        yield Finding(name, evidence, run.world, event["site"])
        return
    for step, here, there in zip(steps[1], alone, together, strict=False):
        if len(here) == len(there) and not _alike(here, there):
            evidence = f"step {step.number}: {here} on one rank, {there} on {run.world}"
            yield Finding("rate-depends-on-ranks", evidence, run.world, step.event["site"])
            break
    passes = [each.ranks[0].training_passes() for each in (one, run)]
    if moves != [{1}, {1}] or not all(passes):
        return
    epochs = [
        (each[0].event["length"] or 0) // len(some[0].of("forward")) for each, some in zip(passes, steps, strict=True)
    ]
    for end, other_end in zip(one.ranks[0].schedule_ends, run.ranks[0].schedule_ends, strict=False):
        if end == other_end and end and 0 < epochs[1] < epochs[0] >= _LEAST_STEPS and end % epochs[0] == 0:
            evidence = (
                f"it ends after {end} steps on any number of ranks: {end // epochs[0]} epochs of {epochs[0]} steps on "
                f"one, {end / epochs[1]:.3g} of {epochs[1]} on {run.world}"
            )
            yield Finding("schedule-too-long", evidence, run.world, event["site"])
            return


def _alike(rates: Sequence[float], others: Sequence[float]) -> bool:
    pairs = zip(rates, others, strict=False)
    return len(rates) == len(others) and all(abs(a - b) <= CLEAR * abs(a) for a, b in pairs)


def _batch(one: Run, run: Run) -> Iterator[Finding]:
    """How many samples the first step has, and which."""
    alone, together = _samples(next(one.by_step())), _samples(next(run.by_step()))
    if not alone or not together:
        return
    if len(together) != len(alone):
        evidence = f"step 1: {len(together)} samples on {run.world} ranks, {len(alone)} on one"
        yield Finding("batch-grows", evidence, run.world)
    elif sorted(together) != sorted(alone):
        common = sum((Counter(together) & Counter(alone)).values())
        evidence = f"step 1: {common} of {len(alone)} samples are those that one rank trains on"
        yield Finding("order-depends-on-ranks", evidence, run.world)


def _epoch(one: Run, run: Run) -> Iterator[Finding]:
    """Samples that an epoch has twice or never, where one rank has each once."""
    passes = [each.training_passes()[:1] for each in (*one.ranks, *run.ranks)]
    if not all(each and each[0].of("end") and each[0].of("batch") for each in passes):
        return
    alone, *ranks = (each[0] for each in passes)
    if alone.event["sampler"] in _DRAW_AGAIN:
        return
    # The samples' content tells what is trained twice, also where each rank counts its own part from 0; random
    # augmentation hides it. What no rank trains on is told by the indices alone.
    twice, _ = _counted(alone.rows, [each.rows for each in ranks])
    padding, where = -len(alone.rows) % run.world, ranks[0].event["site"]
    never: list[Any] = []
    if len(twice) <= padding:
        is_one_data_set = len({each.event["samples"] for each in (alone, *ranks)}) == 1
        ids = [each.ids or [] for each in (alone, *ranks)]
        twice, never = _counted(ids[0], ids[1:]) if all(ids) and is_one_data_set else ([], [])
    global_batch = sum(len(each.of("batch")[0]["rows"]) for each in ranks)
    if len(twice) > padding or len(never) >= max(global_batch, run.world):
        evidence = f"of {len(alone.rows)} samples {len(twice)} are trained by two ranks or twice, {len(never)} by none"
        yield Finding("samples-twice-or-never", evidence, run.world, where)
    elif twice:
        yield Finding("padding", f"samples {_some(twice)} come twice in the first epoch", run.world, where)
    elif never:
        yield Finding("left-out", f"samples {_some(never)} are not in the first epoch", run.world, where)


def _counted(alone: Sequence[Any], ranks: Sequence[Sequence[Any]]) -> tuple[list[Any], list[Any]]:
    """What ranks have more than once, and what they never have, if one rank has all of it once."""
    counts = Counter(each for some in ranks for each in some)
    if len(set(alone)) < len(alone):
        return [], []
    return sorted(each for each in counts if counts[each] > 1), sorted(set(alone) - set(counts))


def _some(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:3])) + (", …" if len(numbers) > 3 else "")
