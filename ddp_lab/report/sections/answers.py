"""Answers: for each experiment one sentence on the fastest layout and on its weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ddp_core.record.own_figures import in_words, own_figures
from ddp_lab.report.reading.families import Family, Group
from ddp_lab.report.values import TIMES, Spread, exact, measured, number

_ALIKE = 1.1
"""Times of single runs, whose noise is not known, that are nearer to each other than this tell nothing apart."""


def answer(family: Family) -> str:
    """Return what the runs of an experiment say, in one sentence."""
    timed = [group for group in family.groups if group.spread("samples_per_second")]
    if not timed:
        return "no run has come to its end yet."
    said = (
        [_fastest(family, timed), *_weights(family)] if len(timed) > 1 else [f"run as {_name(family, timed[0])} only"]
    )
    sentence = "; ".join([", ".join(said), *_quality(family)])
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


def _options(group: Group) -> list[str]:
    return group.label.split(" · ")[1:]


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
