"""What a run's ranks do differently, or the same, that they should not: read from one trace alone.

What must be equal is compared by digests, so that rounding never counts. What is compared by its size, as the weight of
an element, differs by more than `CLEAR` where it is named.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from statistics import fmean

from ddp_lab.diagnose.differences import differences, differing
from ddp_lab.diagnose.findings import Finding
from ddp_lab.diagnose.trace import Event, Pass, Run, Step

CLEAR = 0.02
"""Rounding in float32 or bfloat16 moves the weight of an element by less: a part of 0.004 at most."""
_FEWEST_PLACES = 3
"""A number of so many decimal places at least is no figure by chance."""
_FEWEST_SAMPLES = 4
"""So many samples at least must repeat before it is said that they do: fewer may do so by chance."""


def of_run(run: Run) -> list[Finding]:
    """All findings of a run on two ranks or more."""
    found = [*samples_of(run), *evaluations(run), *figures(run), *same_numbers(run), *unlike_weights(run)]
    if run.is_sharded:
        return [*found, Finding("sharded", "parameters are DTensors: each rank holds its part", run.world)]
    return [*found, *replicas(run)]


def replicas(run: Run) -> Iterator[Finding]:
    """What is not the same on all ranks, though it should be; what follows from it is not named beside it."""
    steps = list(run.by_step())
    apart = {at[0].number: differences(at) for at in steps}

    def first(kind: str, name: str, among: Iterable[list[Step]] = steps) -> list[Finding]:
        for at in among:
            if kind in apart[at[0].number]:
                what, of_all, _ = apart[at[0].number][kind]
                evidence = f"step {at[0].number}: {what} differs between rank 0 and another ({of_all})"
                return [Finding(name, evidence, run.world, at[0].event["site"])]
        return []

    # Each optimizer has weights of its own, which nothing has moved before its first step.
    begins = {at[0].event["optimizer"]: at for at in reversed(steps)}.values()
    starts, buffers = first("weights", "weights-start-differently", begins), first("buffers", "buffers-drift")
    if starts:
        yield from [*starts, *buffers]
        return
    rates = first("rate", "rates-differ")
    yield from [*rates, *buffers]
    for at in steps:
        clipped = [step.of("clip")[-1]["gradients"] for step in at if step.of("clip")]
        if len(clipped) == len(at) and (names := differing(*clipped)) and "gradient" not in apart[at[0].number]:
            evidence = f"step {at[0].number}: the gradient of {names[0]} differs between ranks when clipped; later not"
            yield Finding("clipped-before-reduction", evidence, run.world, at[0].of("clip")[-1]["site"])
            break
    if gradients := first("gradient", "gradients-differ"):
        equal = ["update" not in each for each in apart.values()]
        if False in equal and True in equal[equal.index(False) :]:
            yield Finding("local-steps", f"{gradients[0].evidence}, and weights are equal again later", run.world)
        else:
            at = next(at for at in steps if "gradient" in apart[at[0].number])
            yield replace(gradients[0], evidence=gradients[0].evidence + _why(at[0]))
    elif not rates:  # weights drift then, too
        yield from first("update", "weights-drift")


def _why(step: Step) -> str:
    """What DDP's flag says of gradients that were not reduced."""
    flags = [forward["sync"] for forward in step.of("forward")]
    if flags and flags[-1] is False:
        return "; DDP decides in forward whether backward reduces, and in the last forward its sync was off"
    if flags and all(flag is None for flag in flags):
        return "; no model wrapped in DDP was called"
    return ""


def same_numbers(run: Run) -> Iterator[Finding]:
    """Ranks, or the processes that load for one, that draw the same random numbers for unlike samples."""
    # A generator that has been in one state before and after has made the same numbers.
    drawn: defaultdict[tuple[str, str, str], set[tuple[int, int]]] = defaultdict(set)
    for rank, each in enumerate(run.ranks):
        first = {batch["worker"]: batch for some in each.training_passes()[:1] for batch in reversed(some.of("batch"))}
        forwards = [(0, forward) for step in each.steps for forward in step.of("forward")]
        for worker, event in (*first.items(), *forwards):
            for name, states in event["draws"].items():
                drawn[name, *states].add((rank, worker))
    for (name, *_), places in drawn.items():
        workers = sorted(worker for rank, worker in places if rank == 0)
        if len(workers) > 1:
            evidence = f"rank 0: loader processes {workers[0]} and {workers[1]} draw the same numbers from {name}"
            yield Finding("workers-draw-alike", evidence, run.world, _loader_site(run))
            return
    if shared := sorted(
        {name for (name, *_), places in drawn.items() if len({rank for rank, _ in places}) == run.world}
    ):
        evidence = (
            f"in forward, or for their first batches, all ranks draw the same numbers from {' and '.join(shared)}"
        )
        yield Finding("same-random-numbers", evidence, run.world)


def samples_of(run: Run) -> Iterator[Finding]:
    """Ranks that train on the same samples, have unlike numbers of batches, or the same order twice."""
    steps = list(run.by_step())
    bags = [[sorted(step.samples) for step in at] for at in steps]
    for one, other in combinations(range(run.world), 2):
        seen = {sample for at in bags for sample in at[one]}
        if all(at[one] == at[other] for at in bags) and len(seen) >= min(_FEWEST_SAMPLES, len(steps)):
            count = len(bags[0][one])
            evidence = f"in all {len(steps)} steps ranks {one} and {other} have the same samples ({count} in the first)"
            yield Finding("same-samples", evidence, run.world, _loader_site(run))
            break
    passes = [rank.training_passes() for rank in run.ranks]
    if not all(passes):
        return
    lengths = [each[0].event["length"] for each in passes]
    if None not in lengths and len(set(lengths)) > 1:
        evidence = f"an epoch has {', '.join(map(str, lengths))} batches on ranks 0 to {run.world - 1}"
        yield Finding("unlike-batches", evidence, run.world, passes[0][0].event["site"])
    for first, second in zip(passes[0][:1], passes[0][1:], strict=False):
        orders = [each.ids or [] for each in (first, second)]
        count = min(map(len, orders))
        if first.event["shuffles"] and count >= _FEWEST_SAMPLES and orders[0][:count] == orders[1][:count]:
            listed = ", ".join(map(str, orders[0][:4]))
            evidence = f"rank 0: epochs 1 and 2 begin with the same {count} samples: {listed}, …"
            yield Finding("same-order-each-epoch", evidence, run.world, second.event["site"])


def evaluations(run: Run) -> Iterator[Finding]:
    """An evaluation whose samples count twice or never, or whose ranks keep the figures of their shares apart."""
    for passes in _evaluated(run):
        if not all(each.of("end") for each in passes):
            continue
        ids, where = [each.ids for each in passes], passes[0].of("evaluation")[0]["site"]
        for rank, (each, counted) in enumerate(zip(passes, ids, strict=True)):
            if counted is not None and len(counted) < (offered := each.event["offered"] or 0):
                evidence = f"rank {rank} evaluates {len(counted)} of the {offered} samples of its loader"
                yield Finding("evaluates-not-all", evidence, run.world, each.event["site"])
                return
        if exchanges := [event for each in passes for event in each.of("exchange")]:
            # Where each rank counts its own part from 0, the content tells apart samples of one number.
            ranks = [sorted(zip(each.ids or (), each.rows, strict=False)) for each in passes]
            again = len(every := [each for some in ranks for each in some]) - len(set(every))
            is_shared = None not in ids and any(each != ranks[0] for each in ranks)
            if again and is_shared and not any(event["trims"] for event in exchanges):
                evidence = f"ranks evaluate {len(every)} samples together, {again} of them a second time"
                yield Finding("evaluates-twice", evidence, run.world, where)
                return
            continue
        # What is drawn for a sample does not make it another, so content counts only where the numbers are unknown.
        seen = [sorted(each.rows) for each in passes] if None in ids else [sorted(each or ()) for each in ids]
        if any(each != seen[0] for each in seen):
            counts = ", ".join(str(len(each)) for each in seen)
            evidence = f"ranks evaluate {counts} samples, not the same ones, and then exchange no figure"
            yield Finding("evaluates-a-share", evidence, run.world, where)
            return


def figures(run: Run) -> Iterator[Finding]:
    """A figure that an evaluation prints, and that is a mean of means over unlike numbers of elements."""
    for passes in _evaluated(run):
        printed = {number for each in passes for event in each.of("printed") for number in event["numbers"]}
        for where in dict.fromkeys(each["site"] for each in passes[0].of("figure")):
            ranks = [[each for each in some.of("figure") if each["site"] == where] for some in passes]
            if not all(ranks):
                continue
            every = [each for some in ranks for each in some]
            rights = [_mean(each) for each in (every, *ranks)]
            of_batches = [fmean(each["value"] for each in some) for some in ranks]
            wrongs = [*of_batches, fmean(of_batches), fmean(rights[1:])]
            for number in printed:
                if not _prints(number, rights) and _prints(number, wrongs):
                    counts = ", ".join(sorted({str(each["elements"]) for each in every}))
                    evidence = (
                        f"{number} is printed, a mean of means of {counts} elements; the mean of all elements is "
                        f"{rights[0]:.6g}"
                    )
                    yield Finding("mean-of-means", evidence, run.world, where)
                    return


def _evaluated(run: Run) -> Iterator[tuple[Pass, ...]]:
    """The evaluations of all ranks side by side."""
    return zip(*(rank.evaluated_passes() for rank in run.ranks), strict=False)


def _mean(found: Sequence[Event]) -> float:
    return fmean([each["value"] for each in found], [each["elements"] for each in found])


def _prints(number: str, figures: Sequence[float]) -> bool:
    """Whether a number is one of the figures as it is printed, such as in percent."""
    places = len(number.partition(".")[2])
    return any(
        places + more >= _FEWEST_PLACES and abs(float(number) - each * 10**more) <= 0.51 * 10.0**-places
        for each in figures
        for more in (0, 2)
    )


def unlike_weights(run: Run) -> Iterator[Finding]:
    """Elements of one loss that weigh more on one rank, or in one micro-batch, than in another of the same step."""
    for at in run.by_step():
        seen: dict[tuple[str, int], list[tuple[int, Event]]] = defaultdict(list)
        for rank, step in enumerate(at):
            # Means of whole tensors, such as an auxiliary part, are the losses only where no loss function is called.
            every = step.of("loss")
            for loss in [each for each in every if each["function"] != "mean"] or every:
                seen[loss["site"], loss["call"]].append((rank, loss))
        for (where, _), losses in seen.items():
            light = min(losses, key=lambda pair: pair[1]["weight"])
            heavy = max(losses, key=lambda pair: pair[1]["weight"])
            if heavy[1]["weight"] - light[1]["weight"] > CLEAR * abs(heavy[1]["weight"]):
                evidence = f"step {at[0].number}: an element of the loss weighs {_weighs(heavy)}, and {_weighs(light)}"
                yield Finding("unlike-weights", evidence, run.world, where if where != "?" else None)
                return


def _weighs(found: tuple[int, Event]) -> str:
    rank, loss = found
    where = f"micro-batch {loss['micro'] + 1} of rank {rank}"
    return f"{loss['weight']:.4g} in {where} ({loss['elements']} elements)"


def _loader_site(run: Run) -> str | None:
    passes = run.ranks[0].training_passes()
    return passes[0].event["site"] if passes else None
