"""Answers: for each experiment one sentence on the fastest layout, on its weights, and on what sharding saves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ddp_core.record.own_figures import in_words, own_figures
from ddp_lab.report.reading.families import Family, Group
from ddp_lab.report.values import TIMES, Spread, exact, measured, number

_ALIKE = 1.1
"""Times of single runs, whose noise is not known, that are nearer to each other than this tell nothing apart."""
_SAVING = 0.05
"""The least share of memory that is worth a word."""


def answer(family: Family) -> str:
    """Return what the runs of an experiment say, in one sentence."""
    timed = [group for group in family.groups if group.spread("samples_per_second")]
    if not timed:
        return "no run has come to its end yet."
    said = (
        [_fastest(family, timed), *_weights(family)] if len(timed) > 1 else [f"run as {_name(family, timed[0])} only"]
    )
    sentence = "; ".join([", ".join(said), *_sharding(family, timed), *_quality(family)])
    busy = any(run.disturbance for group in timed for run in group.completed)
    sentence += " (timed on a busy machine)" if busy and len(timed) > 1 else ""
    return f"{sentence}.".replace(" %", "\N{NO-BREAK SPACE}%")


def _fastest(family: Family, timed: Sequence[Group]) -> str:
    best = max(timed, key=lambda group: _speed(group).median)
    base = family.reference_for(best) or timed[0]
    others = [group for group in timed if group is not best]
    other = base if best is not base else max(others, key=lambda group: _speed(group).median)
    if not _is_apart(_speed(other), _speed(best)):
        return f"{_name(family, best)} and {_name(family, other)} are about as fast here"
    found = f"{_name(family, best)} is fastest here: "
    ratio = _ratio(_speed(best), _speed(other))
    if best is base:
        return f"{found}{_name(family, other)} takes {ratio} times as long"
    return f"{found}{ratio} times {_name(family, other)}"


def _weights(family: Family) -> list[str]:
    tone = family.verdict.tone
    if tone == "quiet":
        return []
    return ["same weights"] if tone == "good" else [f"but {family.verdict.text}"]


def _sharding(family: Family, timed: Sequence[Group]) -> list[str]:
    """What the sharded layout that needs least memory saves, against the same ranks without shards."""
    found = []
    for group in timed:
        whole = next((other for other in timed if _is_whole(other, group)), None)
        memory = None if whole is None else _memories(whole, group)
        if whole is not None and memory is not None:
            found.append((1 - memory[1].median / memory[0].median, whole, group, memory))
    if not found:
        return []
    saved, whole, group, (before, after) = max(found, key=lambda each: each[0])
    if saved < _SAVING or after.high >= before.low:
        return ["sharding saves no memory at this size"]
    layout = group.runs[0].layout
    what = f"{'the ' if layout.shard == 'optimizer' else ''}{layout.shard}"
    gain = f"sharding {what} on {layout.shares} saves {100 * saved:.0f} % memory"
    if not _is_apart(_speed(group), _speed(whole)):
        return [f"{gain} in about the same time"]
    return [f"{gain} for {_ratio(_speed(whole), _speed(group))} times the time"]


def _is_whole(group: Group, sharded: Group) -> bool:
    one, other = group.runs[0], sharded.runs[0]
    same = one.layout.model_copy(update={"shard": other.layout.shard}) == other.layout
    return same and one.layout.shard == "none" != other.layout.shard and _options(group) == _options(sharded)


def _options(group: Group) -> list[str]:
    return group.label.split(" · ")[1:]


def _memories(whole: Group, sharded: Group) -> tuple[Spread, Spread] | None:
    """The memory of both, in steps where that is known."""
    for name in ("step_memory_bytes", "peak_memory_bytes"):
        one, other = whole.spread(name), sharded.spread(name)
        if one and other and one.median:
            return one, other
    return None


def _quality(family: Family) -> list[str]:
    """The first figure of the held-out samples, or the loss, over the completed runs."""
    done = [run for group in family.groups for run in group.completed]
    name = next(iter(own_figures(run.record["result"] for run in done)), "test_loss")
    spread = Spread.of(run.result(name) for run in done)
    if spread is None:
        return []
    scale, unit = (100, " %") if name == "test_accuracy" else (1, "")
    if spread.low == spread.high:
        return [f"{in_words(name)} {exact(spread.median * scale)}{unit}"]
    seeds = len({run.seed for run in done})
    return [f"{in_words(name)} {exact(spread.low * scale)} to {exact(spread.high * scale)}{unit} over {seeds} seeds"]


def _speed(group: Group) -> Spread:
    spread = group.spread("samples_per_second")
    assert spread is not None
    return spread


def _is_apart(slow: Spread, fast: Spread) -> bool:
    """Whether one is faster by more than the noise: no run of the other was as fast, or so by far with one run each."""
    return slow.high < fast.low and (max(slow.count, fast.count) > 1 or fast.median > _ALIKE * slow.median)


def _ratio(over: Spread, under: Spread) -> str:
    """How many times one is the other, in the digits that both allow."""
    ratio = Spread(
        over.median / under.median, over.low / under.high, over.high / under.low, min(over.count, under.count)
    )
    return measured(ratio)


def _name(family: Family, group: Group) -> str:
    """The layout in few words: ddp x 2, ddp x 4 on 2 nodes, ddp x 2 with shards of parameters."""
    layout = group.runs[0].layout
    name = "single" if layout.kind == "single" else f"{layout.kind} {TIMES} {layout.shares}"
    nodes = f" on {number(layout.nnodes)} nodes" if layout.nnodes > 1 else ""
    shards = "" if layout.shard == "none" else f" with {layout.shard} sharded"
    device = f" ({layout.device})" if len(_devices(family.groups)) > 1 else ""
    return f"{name}{nodes}{shards}{device}{''.join(f', {each}' for each in _options(group))}"


def _devices(groups: Iterable[Group]) -> set[str]:
    return {group.runs[0].layout.device for group in groups}
