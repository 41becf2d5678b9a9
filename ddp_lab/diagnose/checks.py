"""What a run's ranks do differently, or the same, that they should not: read from one trace alone.

What must be equal is compared by digests, so that rounding never counts. What is compared by its size, as the weight of
an element, differs by more than `CLEAR` where it is named.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import fsum

from ddp_lab.diagnose.findings import Finding
from ddp_lab.diagnose.trace import Event, Pass, Run, Step, differing, first_difference

CLEAR = 0.02
"""Rounding in float32 or bfloat16 moves the weight of an element by less: a part of 0.004 at most."""
_FEWEST_PLACES = 3
"""A number of so many decimal places at least is no figure by chance."""
_FEWEST_SAMPLES = 4
"""So many samples at least must repeat before it is said that they do: fewer may do so by chance."""


def of_run(run: Run) -> list[Finding]:
    """All findings of a run on two ranks or more."""
    found = [*samples_of(run), *evaluations(run), *figures(run), *same_numbers(run), *unlike_weights(run), *rates(run)]
    if run.is_sharded:
        return [*found, Finding("sharded", "parameters are DTensors: each rank holds its part", run.world)]
    apart = list(weights_and_gradients(run))
    if any(each.name == "rates-differ" for each in found):  # weights drift then, too
        apart = [each for each in apart if each.name != "weights-drift"]
    return [*found, *apart, *buffers(run)]


def weights_and_gradients(run: Run) -> Iterator[Finding]:
    """The first of: weights differ at the start, gradients differ, weights drift. Each follows from the one before."""
    steps = list(run.by_step())
    begun: set[int] = set()
    for at in steps:
        # Each optimizer has weights of its own, before whose first step nothing has moved them.
        optimizer, before = at[0].event.get("optimizer", 0), [step.event["weights_before"] for step in at]
        if optimizer not in begun and differing(*before):
            yield Finding("weights-start-differently", _tensor(at, "weights_before", "before"), run.world)
            return
        begun.add(optimizer)
    for at in steps:
        clipped = [step.clips[-1]["gradients"] for step in at if step.clips]
        if len(clipped) == len(at) and (name := first_difference(*clipped)) and not _apart(at):
            evidence = f"step {at[0].number}: the gradient of {name} differs between ranks when clipped; later not"
            yield Finding("clipped-before-reduction", evidence, run.world, at[0].clips[-1]["site"])
            break
    for at in steps:
        if not (apart := _apart(at)):
            continue
        if _is_made_equal(steps, at[0].number):
            evidence = f"step {at[0].number}: {apart[0]} differs, and is equal again later"
            yield Finding("local-steps", evidence, run.world)
            return
        parts = f"{len(apart)} of {len(at[0].gradients)} parameters"
        yield Finding(
            "gradients-differ",
            f"step {at[0].number}: the gradient of {apart[0]} differs between rank 0 and another ({parts}){_why(at)}",
            run.world,
            at[0].event["site"],
        )
        return
    for at in steps:
        if differing(*(step.event["weights"] for step in at)):
            yield Finding("weights-drift", _tensor(at, "weights", "after"), run.world, at[0].event["site"])
            return


def _apart(at: Sequence[Step]) -> list[str]:
    """The parameters whose gradient is not the same on all ranks."""
    return differing(*(step.digests for step in at))


def _why(at: Sequence[Step]) -> str:
    """What DDP's flag says of gradients that were not reduced."""
    flags = [forward["sync"] for forward in at[0].forwards]
    if flags and flags[-1] is False:
        return "; DDP decides in forward whether backward reduces, and in the last forward its sync was off"
    if flags and all(flag is None for flag in flags):
        return "; no model wrapped in DDP was called"
    return ""


def _is_made_equal(steps: Sequence[list[Step]], number: int) -> bool:
    """Whether the weights were different after that step, and equal after a later one."""
    different = False
    for at in steps[number - 1 :]:
        equal = not differing(*(step.event["weights"] for step in at))
        if different and equal:
            return True
        different = different or not equal
    return False


def buffers(run: Run) -> Iterator[Finding]:
    """Buffers that differ at the beginning of a forward pass, after DDP has made them equal where it does."""
    for at in run.by_step():
        for forwards in zip(*(step.forwards for step in at), strict=False):
            if name := first_difference(*(forward["buffers"] for forward in forwards)):
                yield Finding("buffers-drift", f"step {at[0].number}: {name} differs when forward begins", run.world)
                return


def rates(run: Run) -> Iterator[Finding]:
    """Learning rates that differ between ranks in one step."""
    for at in run.by_step():
        seen = [step.event["rates"] for step in at]
        if any(each != seen[0] for each in seen):
            other = next(rank for rank, each in enumerate(seen) if each != seen[0])
            evidence = f"step {at[0].number}: {seen[0]} on rank 0, {seen[other]} on rank {other}"
            yield Finding("rates-differ", evidence, run.world, at[0].event["site"])
            return


def same_numbers(run: Run) -> Iterator[Finding]:
    """Ranks, or the processes that load for one, that draw the same random numbers for unlike samples."""
    moved: set[str] = set()
    forwards = [each for at in run.by_step() for each in zip(*(step.forwards for step in at), strict=False)]
    for ranks in forwards:
        moved.update(ranks[0]["moved"])
    if moved and not any(len({each["generators"][name] for each in ranks}) > 1 for ranks in forwards for name in moved):
        evidence = f"in each step forward draws from {' and '.join(sorted(moved))}, in one state on all ranks"
        yield Finding("same-random-numbers", evidence, run.world)
    # A generator that has been in one state before and after what was drawn for a batch has made the same numbers.
    alike: dict[tuple[str, str, str], set[tuple[int, int]]] = defaultdict(set)
    for rank, each in enumerate(run.ranks):
        for first in each.training_passes()[:1]:
            begun = {batch["worker"]: batch for batch in reversed(first.batches)}
            for worker, batch in begun.items():
                for name, states in batch["draws"].items():
                    alike[name, *states].add((rank, worker))
    where = _loader_site(run)
    for (name, *_), places in alike.items():
        workers = sorted(worker for rank, worker in places if rank == 0)
        if len(workers) > 1:
            evidence = f"rank 0: loader processes {workers[0]} and {workers[1]} draw the same numbers from {name}"
            yield Finding("workers-draw-alike", evidence, run.world, where)
            return
    if shared := sorted(
        {name for (name, *_), places in alike.items() if len({rank for rank, _ in places}) == run.world}
    ):
        evidence = f"for their first batches all ranks draw the same numbers from {' and '.join(shared)}"
        yield Finding("same-random-numbers", evidence, run.world, where)


def samples_of(run: Run) -> Iterator[Finding]:
    """Ranks that train on the same samples, have unlike numbers of batches, or the same order twice."""
    steps = list(run.by_step())
    same = [_common_ranks([step.samples for step in at]) for at in steps]
    pairs = set.intersection(*same) if same else set()
    if pairs and len({sample for at in steps for sample in at[0].samples}) >= min(_FEWEST_SAMPLES, len(steps)):
        one, other = min(pairs)
        count = len(steps[0][one].samples)
        evidence = f"in all {len(steps)} steps ranks {one} and {other} have the same samples ({count} in the first)"
        yield Finding("same-samples", evidence, run.world, _loader_site(run))
    passes = [rank.training_passes() for rank in run.ranks]
    if not all(passes):
        return
    lengths = [each[0].begin["length"] for each in passes]
    if None not in lengths and len(set(lengths)) > 1:
        evidence = f"an epoch has {', '.join(map(str, lengths))} batches on ranks 0 to {run.world - 1}"
        yield Finding("unlike-batches", evidence, run.world, passes[0][0].begin["site"])
    yield from _same_order(run, passes[0])


def _same_order(run: Run, passes: Sequence[Pass]) -> Iterator[Finding]:
    if len(passes) < 2 or not passes[0].begin["shuffles"]:
        return
    first, second = (passes[0].ids, passes[1].ids)
    if first is None or second is None:
        return
    seen = min(len(first), len(second))
    if seen >= _FEWEST_SAMPLES and first[:seen] == second[:seen]:
        evidence = f"rank 0: epochs 1 and 2 begin with the same {seen} samples: {', '.join(map(str, first[:4]))}, …"
        yield Finding("same-order-each-epoch", evidence, run.world, passes[1].begin["site"])


def evaluations(run: Run) -> Iterator[Finding]:
    """An evaluation of which each rank has a share: nobody puts these together, or samples count twice or never."""
    for passes in zip(*(rank.evaluated_passes() for rank in run.ranks), strict=False):
        if not all(each.is_complete for each in passes):
            continue
        ids = [each.ids for each in passes]
        where = (passes[0].evaluation or {}).get("site")
        for rank, (each, counted) in enumerate(zip(passes, ids, strict=True)):
            offered = each.begin["offered"]
            if counted is not None and offered is not None and len(counted) < offered:
                evidence = f"rank {rank} evaluates {len(counted)} of the {offered} samples of its loader"
                yield Finding("evaluates-not-all", evidence, run.world, each.begin["site"])
                return
        if any(each.is_put_together for each in passes):
            # Where each rank counts its own part from 0, the content tells apart samples of one number.
            known = [sorted(zip(each.ids or (), each.rows, strict=False)) for each in passes if each.ids and each.rows]
            counted_by_all = [each for some in known for each in some]
            again = len(counted_by_all) - len(set(counted_by_all))
            is_shared = len(known) == len(passes) and any(each != known[0] for each in known)
            if is_shared and again and not any(each.is_trimmed for each in passes):
                evidence = f"ranks evaluate {len(counted_by_all)} samples together, {again} of them a second time"
                yield Finding("evaluates-twice", evidence, run.world, where)
                return
            continue
        seen = [sorted(each.rows) for each in passes] if None in ids else [sorted(each) for each in ids if each]
        if all(seen) and any(each != seen[0] for each in seen):
            counts = ", ".join(str(len(each)) for each in seen)
            evidence = f"ranks evaluate {counts} samples, not the same ones, and then exchange no figure"
            yield Finding("evaluates-a-share", evidence, run.world, where)
            return


def figures(run: Run) -> Iterator[Finding]:
    """A figure that an evaluation prints, and that is a mean of means over unlike numbers of elements."""
    for passes in zip(*(rank.evaluated_passes() for rank in run.ranks), strict=False):
        printed = {number for each in passes for number in each.printed}
        for where in dict.fromkeys(each["site"] for each in passes[0].figures):
            ranks = [[each for each in some.figures if each["site"] == where] for some in passes]
            if not all(ranks):
                continue
            rights = [_mean([each for some in ranks for each in some], True), *(_mean(some, True) for some in ranks)]
            ranks_means = [{"value": right, "elements": 1} for right in rights[1:]]
            batches_means = [{"value": _mean(some, False), "elements": 1} for some in ranks]
            for wrong in [
                *(each["value"] for each in batches_means),
                _mean(batches_means, True),
                _mean(ranks_means, True),
            ]:
                if number := next((each for each in printed if _prints(each, wrong, rights)), None):
                    counts = ", ".join(dict.fromkeys(str(each["elements"]) for some in ranks for each in some))
                    evidence = (
                        f"{number} is printed, the mean of the means of batches of {counts} elements; the mean of all "
                        f"elements is {rights[0]:.6g}"
                    )
                    yield Finding("mean-of-means", evidence, run.world, where)
                    return


def _mean(found: Sequence[Event], weighted: bool) -> float:
    weights = [each["elements"] if weighted else 1 for each in found]
    return fsum(each["value"] * weight for each, weight in zip(found, weights, strict=True)) / sum(weights)


def _prints(number: str, wrong: float, rights: Sequence[float]) -> bool:
    """Whether a number is a figure as it is printed, such as in percent, and none of the right ones."""
    places = len(number.partition(".")[2])
    for percent in (1, 100):
        least = 0.51 * 10.0**-places
        off = [abs(float(number) - percent * each) for each in (wrong, *rights)]
        if places + (percent == 100) * 2 >= _FEWEST_PLACES and off[0] <= least and min(off[1:]) > least:
            return True
    return False


def unlike_weights(run: Run) -> Iterator[Finding]:
    """Elements of one loss that weigh more on one rank, or in one micro-batch, than in another of the same step."""
    for at in run.by_step():
        seen: dict[tuple[str, int], list[tuple[int, Event]]] = defaultdict(list)
        for rank, step in enumerate(at):
            for loss in losses_of(step):
                seen[loss["site"], loss["call"]].append((rank, loss))
        for (where, _), losses in seen.items():
            light = min(losses, key=lambda pair: pair[1]["weight"])
            heavy = max(losses, key=lambda pair: pair[1]["weight"])
            if heavy[1]["weight"] - light[1]["weight"] > CLEAR * abs(heavy[1]["weight"]):
                evidence = f"step {at[0].number}: an element of the loss weighs {_weighs(heavy)}, and {_weighs(light)}"
                yield Finding("unlike-weights", evidence, run.world, where if where != "?" else None)
                return


def losses_of(step: Step) -> list[Event]:
    """The step's losses: calls of loss functions, or where there are none, means of whole tensors."""
    functions = [loss for loss in step.losses if loss["function"] != "mean"]
    return functions or step.losses


def _weighs(found: tuple[int, Event]) -> str:
    rank, loss = found
    where = f"micro-batch {loss['micro'] + 1} of rank {rank}"
    return f"{loss['weight']:.4g} in {where} ({loss['elements']} elements)"


def _common_ranks(samples: Sequence[Sequence[str]]) -> set[tuple[int, int]]:
    """The pairs of ranks that have the same samples, in any order."""
    bags = [sorted(each) for each in samples]
    count = len(bags)
    return {(i, j) for i in range(count) for j in range(i + 1, count) if bags[i] and bags[i] == bags[j]}


def _tensor(at: Sequence[Step], what: str, when: str) -> str:
    """The first tensor that is not the same, and where."""
    apart = differing(*(step.event[what] for step in at))
    first = at[0].event[what].get(apart[0])
    other = next(rank for rank, step in enumerate(at) if step.event[what].get(apart[0]) != first)
    return f"{when} step {at[0].number}: {apart[0]} differs between ranks 0 and {other} ({len(apart)} tensors)"


def _loader_site(run: Run) -> str | None:
    passes = run.ranks[0].training_passes()
    return passes[0].begin["site"] if passes else None
