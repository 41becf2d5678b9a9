"""What a run's ranks do differently, or the same, that they should not: read from one trace alone.

What must be equal is compared by digests, so that rounding never counts. What is compared by its size, as the weight of
an element, differs by more than `CLEAR` where it is named.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from ddp_lab.diagnose.findings import Finding
from ddp_lab.diagnose.trace import Event, Pass, Rank, Run, Step

CLEAR = 0.02
"""Rounding in float32 or bfloat16 moves the weight of an element by less: a part of 0.004 at most."""
_FEWEST_SAMPLES = 4
"""So many samples at least must repeat before it is said that they do: fewer may do so by chance."""


def of_run(run: Run) -> list[Finding]:
    """All findings of a run on two ranks or more."""
    found = [*samples_of(run), *evaluations(run), *same_dropout(run), *unlike_weights(run), *rates(run)]
    if run.is_sharded:
        return [*found, Finding("sharded", "parameters are DTensors: each rank holds its part", run.world)]
    differing = list(weights_and_gradients(run))
    if any(each.name == "rates-differ" for each in found):  # weights drift then, too
        differing = [each for each in differing if each.name != "weights-drift"]
    return [*found, *differing, *buffers(run)]


def weights_and_gradients(run: Run) -> Iterator[Finding]:
    """The first of: weights differ at the start, gradients differ, weights drift. Each follows from the one before."""
    steps = list(run.by_step())
    first = steps[0]
    if name := _first_difference([step.event["weights_before"] for step in first]):
        yield Finding("weights-start-differently", _tensor(first, name, "weights_before"), run.world)
        return
    clipped = _clipped_before(run, steps)
    if clipped is not None:
        yield clipped
    for at in steps:
        digests = [{name: each["digest"] for name, each in step.gradients.items()} for step in at]
        if (name := _first_difference(digests)) is None:
            continue
        if _is_made_equal(steps, at[0].number):
            yield Finding("local-steps", f"step {at[0].number}: {name} differs, and is equal again later", run.world)
            return
        differing = _differing(digests)
        parts = f"{len(differing)} of {len(digests[0])} parameters"
        yield Finding(
            "gradients-differ",
            f"step {at[0].number}: the gradient of {name} differs between rank 0 and another ({parts}){_why(at)}",
            run.world,
            at[0].event["site"],
        )
        return
    for at in steps:
        if name := _first_difference([step.event["weights"] for step in at]):
            yield Finding("weights-drift", _tensor(at, name, "weights"), run.world, at[0].event["site"])
            return


def _clipped_before(run: Run, steps: Sequence[list[Step]]) -> Finding | None:
    for at in steps:
        if not all(step.clips for step in at):
            continue
        clipped = [step.clips[-1]["gradients"] for step in at]
        stepped = [{name: each["digest"] for name, each in step.gradients.items()} for step in at]
        name = _first_difference(clipped)
        if name is not None and _first_difference(stepped) is None:
            evidence = f"step {at[0].number}: the gradient of {name} differs between ranks when clipped; later not"
            return Finding("clipped-before-reduction", evidence, run.world, at[0].clips[-1]["site"])
    return None


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
        equal = _first_difference([step.event["weights"] for step in at]) is None
        if different and equal:
            return True
        different = different or not equal
    return False


def buffers(run: Run) -> Iterator[Finding]:
    """Buffers that differ at the beginning of a forward pass, after DDP has made them equal where it does."""
    for at in run.by_step():
        for forwards in zip(*(step.forwards for step in at), strict=False):
            if name := _first_difference([forward["buffers"] for forward in forwards]):
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


def same_dropout(run: Run) -> Iterator[Finding]:
    """A generator that moves in forward, from one state on all ranks, in every step."""
    moved: set[str] = set()
    for at in run.by_step():
        for forwards in zip(*(step.forwards for step in at), strict=False):
            for name in forwards[0]["moved"]:
                if any(forward["generators"][name] != forwards[0]["generators"][name] for forward in forwards):
                    return
                moved.add(name)
    if moved:
        evidence = f"in each step forward draws from {' and '.join(sorted(moved))}, in one state on all ranks"
        yield Finding("same-dropout", evidence, run.world)


def samples_of(run: Run) -> Iterator[Finding]:
    """Ranks that train on the same samples, have unlike numbers of batches, or the same order twice."""
    steps = list(run.by_step())
    same = [_common_ranks([step.samples for step in at]) for at in steps]
    pairs = set.intersection(*same) if same else set()
    if pairs and len({sample for at in steps for sample in at[0].samples}) >= min(_FEWEST_SAMPLES, len(steps)):
        one, other = min(pairs)
        count = len(steps[0][one].samples)
        evidence = f"in all {len(steps)} steps ranks {one} and {other} have the same samples ({count} in the first)"
        yield Finding("same-samples", evidence, run.world, _loader_site(run.ranks[0]))
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
    """An evaluation of which each rank has a share: nobody puts these together, or samples are counted twice."""
    for passes in zip(*(rank.evaluated_passes() for rank in run.ranks), strict=False):
        if not all(each.is_complete for each in passes):
            continue
        ids = [each.ids for each in passes]
        where = (passes[0].evaluation or {}).get("site")
        if any(each.is_put_together for each in passes):
            # Where each rank counts its own part from 0, the content tells apart samples of one number.
            known = [sorted(zip(each.ids or (), each.rows, strict=False)) for each in passes if each.ids and each.rows]
            counted = [each for some in known for each in some]
            again = len(counted) - len(set(counted))
            is_shared = len(known) == len(passes) and any(each != known[0] for each in known)
            if is_shared and again and not any(each.is_trimmed for each in passes):
                evidence = f"ranks evaluate {len(counted)} samples together, {again} of them a second time"
                yield Finding("evaluates-twice", evidence, run.world, where)
                return
            continue
        seen = [sorted(each.rows) for each in passes] if None in ids else [sorted(each) for each in ids if each]
        if all(seen) and any(each != seen[0] for each in seen):
            counts = ", ".join(str(len(each)) for each in seen)
            evidence = f"ranks evaluate {counts} samples, not the same ones, and then exchange no figure"
            yield Finding("evaluates-a-share", evidence, run.world, where)
            return


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


def _first_difference(ranks: Sequence[Mapping[str, str]]) -> str | None:
    """The first name whose digest is not the same on all ranks."""
    return next(iter(_differing(ranks)), None)


def _differing(ranks: Sequence[Mapping[str, str]]) -> list[str]:
    names = dict.fromkeys(name for each in ranks for name in each)
    return [name for name in names if len({each.get(name) for each in ranks}) > 1]


def _tensor(at: Sequence[Step], name: str, what: str) -> str:
    first = at[0].event[what].get(name)
    other = next(rank for rank, step in enumerate(at) if step.event[what].get(name) != first)
    when = f"before step {at[0].number}" if what == "weights_before" else f"after step {at[0].number}"
    return (
        f"{when}: {name} differs between ranks 0 and {other} ({len(_differing([s.event[what] for s in at]))} tensors)"
    )


def _loader_site(rank: Rank) -> str | None:
    passes = rank.training_passes()
    return passes[0].begin["site"] if passes else None
