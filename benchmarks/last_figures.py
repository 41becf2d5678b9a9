"""What the table of benchmarks/README.md says of each benchmark, made from its recorded results.

A benchmark that is not here has no row: a test asks for a row for each module that records, and for the rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.compared import (
    best_loop,
    exact_digits,
    of_best_bare,
    of_fair,
    said,
    span,
    whole_run_of,
)
from benchmarks.gpu_lines import KEPT
from benchmarks.gpu_runs import what_was_timed
from benchmarks.record import NOT_YET, recorded
from benchmarks.whole_run import ACCUMULATING, SCRIPT

ROUNDS = 5
"""The page promises so many rounds, where a row does not say fewer."""
NO_GPU = "not run on a GPU yet"


def _listed(ratios: Iterable[float]) -> str:
    return ", ".join(f"{ratio:.2f}" for ratio in ratios)


def _sampler(found: Any) -> str:
    ours, theirs = (
        {row["length"]: row for row in found["samplers"] if row["sampler"] == name and "first_id_ms" in row}
        for name in ("ElasticSampler", "DistributedSampler")
    )
    longest = max(theirs)
    row, other = ours[longest], theirs[longest]
    return (
        f"of {longest:,} samples, `DistributedSampler` in brackets (one round): first index after "
        f"{row['first_id_ms']:.1f} ms ({other['first_id_ms'] / 1e3:.0f} s), {row['ns_per_id']:.0f} ns per index "
        f"({other['ns_per_id']:.0f}), {row['memory_mb']:.1f} MB ({other['memory_mb']:,.0f})"
    )


def _checkpoint(found: Any) -> str:
    stall, (alone, busy) = found["stall"], found["share"]
    return (
        f"ResNet-18 with momentum, {stall['plain_bytes'] / 1e6:.0f} MB: "
        f"{100 * stall['asynchronous_of_torch_save']:.1f} % of a `torch.save`; "
        f"{100 * alone['share_median']['asynchronous']:.1f} % of the step time at one save per 50 steps, "
        f"{100 * busy['share_median']['asynchronous']:.1f} % with all cores busy, where `torch.save` costs "
        f"{100 * busy['share_median']['torch.save']:.1f} %"
    )


def _durable(found: Any) -> str:
    start, save, end = (
        found[phase]["with (ms)"][0] - found[phase]["without (ms)"][0] for phase in ("start", "save", "end")
    )
    return (
        f"{start:.0f} ms at the start of a run, {save:.1f} ms for each save, {end:.0f} ms at its end with 47 MB of "
        f"weights (load average {found['load_average'][0]:.1f})"
    )


def _long_run(found: Any) -> str:
    ranks = found["ranks"].values()

    def more(what: str) -> str:
        return " and ".join(f"{rank['slopes'][what]:.1f}" for rank in ranks)

    own = " and ".join(f"{rank['last'][1]:.0f}" for rank in ranks)
    grown = sum(found["bytes_per_step"].values())
    return (
        f"{found['steps']:,} steps: in 100,000 of the second half {more('memory_mb')} MB more on the two ranks, which "
        f"then have {own} MB of their own, {more('descriptors')} open files and {more('threads')} threads more; "
        f"{grown:.0f} bytes a step, TensorBoard included"
    )


def _loader(found: Any) -> str:
    def times(size: str, way: str) -> tuple[float, ...]:
        return tuple(found[size][way][f"times_the_first_{of}"] for of in ("median", "min", "max"))

    large, low, high = times("224x224", "host part ahead, memory kept")
    small, lowest, highest = times("32x32", "host part ahead, memory kept")
    in_line, *_ = times("32x32", "host part in line, memory kept")
    return (
        f"the host's part, ahead in a thread, reaches {large:.1f} times the images/s of doing everything in line at "
        f"224x224 ({low:.1f} to {high:.1f} in single rounds), {small:.1f} times at 32x32 ({lowest:.1f} to "
        f"{highest:.1f}; without a thread {in_line:.1f} times)"
    )


def _recovery(found: Any) -> str:
    faults = found["faults"]
    told = ("worker killed", "worker killed, live", "worker joins, live", "node killed")
    return "; ".join(f"{fault} {faults[fault]['median']:.1f} s" for fault in told if fault in faults)


def _live_cost(found: Any) -> str:
    steps = found["steps"]
    return (
        f"the steps take {steps['ratio']:.3f} times as long (quartiles {steps['low']:.3f} to {steps['high']:.3f}); "
        f"what a rank does for it in each step, measured alone, is {100 * found['own_share']:.2f} % (goal: 0.5 %)"
    )


def _slow_link(found: Any) -> str:
    link = "100 Mbit/s"
    base = found["DDP"][link]["seconds"]
    ways = ", ".join(f"{way} {each[link]['seconds'] / base:.2f}" for way, each in found.items() if way != "DDP")
    return f"time for 64 samples at {link}, of DDP's: {ways}"


def _reduction(found: Any) -> str:
    sums = ", ".join(f"{row['ratio']:.2f} ({row['world_size']} ranks, pieces: {row['pieces']})" for row in found["sum"])
    return f"the ordered sum of all_reduce: {sums}; [more](../docs/reference/cost-of-exactness.md#one-sum)"


def _sharded(found: Any) -> str:
    steps = found["steps"]

    def ratios(way: str, base: str) -> str:
        return _listed(row["ways"][way][base] for row in steps)

    cases = ", ".join(f"{row['world_size']} x {row['micro_batches_per_rank']}" for row in steps)
    return (
        f"`--shard optimizer` {ratios('exact, optimizer', 'of_plain')} of plain DDP (ranks x micro-batches of each: "
        f"{cases}), {ratios('exact, optimizer', 'of_zero')} of plain DDP with ZeRO; `gradients` "
        f"{ratios('exact, gradients', 'of_plain')} of plain DDP"
    )


def _fully_sharded(found: Any) -> str:
    parts = []
    for model in dict.fromkeys(row["model"] for row in found):
        rows = [row for row in found if row["model"] == model]
        plain = span([row["ratios"]["parameters, exact"] for row in rows])
        parts.append(f"{model}: {span([*map(of_fair, rows)])} of FSDP2 with an all-to-all, {plain} of FSDP2 as it is")
    sent = next((row["sent_bytes"] for row in found if row["world_size"] == 4 and row.get("sent_bytes")), None)
    said_of = NOT_YET
    if sent and None not in sent.values():
        said_of = ", ".join(f"{way} {each / 1e6:.1f}" for way, each in sent.items())
    return f"exact, {'; '.join(parts)}. MB that one of four ranks sends for one micro-batch of each: {said_of}"


def _shard_memory(found: Any) -> str:
    ranks = dict.fromkeys(row["ranks"] for row in found)
    rows = {
        each: ", ".join(f"{row['measured_bytes'] / 1e6:.0f} `{row['shard']}`" for row in found if row["ranks"] == each)
        for each in ranks
    }
    return "; ".join(f"MB of a rank of {each}: {text}" for each, text in rows.items())


def _numerics(found: Any) -> str:
    return ", ".join(f"{row['what']} {row['ratio']:.2f}" for row in found)


def _nodes(found: Any) -> str:
    rates = dict.fromkeys(row["mbit_per_second"] for row in found)
    shapes = dict.fromkeys(f"{row['nodes']} x {row['ranks_per_node']}" for row in found)
    parts = []
    for rate in rates:
        ratios = (row["ratios"]["two levels"] for row in found if row["mbit_per_second"] == rate)
        parts.append(f"{_listed(ratios)} {f'at {rate} Mbit/s' if rate else 'unshaped'}")
    return f"two levels at {', '.join(shapes)}: {'; '.join(parts)}"


def _startup(found: Any) -> str:
    more = [row for row in found if row["a_rank_more"] is not None]
    each = ", ".join(f"{row['a_rank_more']:.2f} ({row['ranks']} ranks)" for row in more)
    last = found[-1]
    return (
        f"one more rank costs so many processor seconds: {each} (budget 1.0); {last['ranks']} ranks on two cores are "
        f"done with one step after {last['seconds']:.0f} s"
    )


def _trainer_step(found: Any) -> str:
    parts = []
    for case in found:
        if case["target"]:
            best = best_loop(case)
            name = f' ("{best}")' if best else ""
            peers = (each for each in case["turns"] if not each.startswith(("bare", "ours")))
            others = ", ".join(f"{peer} {case['wall'][peer]['ratio']:.2f}" for peer in peers)
            whole = said(whole_run_of(case, "ours", best))
            parts.append(
                f"{case['title']}: {said(of_best_bare(case, 'ours'))} of the best bare loop{name}, "
                f"{case['wall']['ours']['ratio']:.2f} of the bare loop as people write it"
                f"{f' ({others})' if others else ''}; a [whole run](#whole-runs) {whole} of the best one's step"
            )
    return f"{'. '.join(parts)}. [In parts](#a-step-in-parts)"


def _guard(found: Any) -> str:
    return (
        "; ".join(
            f"{name}: the first run {each['more_seconds_first']:.1f} s more, a later {each['whole_again']:.2f} times"
            + (f", its steps {each['steps_again']:.3f} times" if "steps_again" in each else "")
            for name, each in found["trainings"].items()
        )
        + " (goals: 2 s, toy_mlp 1.2 s; 1.00; 1.005)"
    )


def _whole_run(_: Any) -> str:
    return (
        f"exact {said(exact_digits(ACCUMULATING))} of a script that accumulates the same micro-batches, "
        f"{said(exact_digits(SCRIPT))} of one that takes each batch whole: [in phases](#whole-runs)"
    )


def _adapters(found: Any) -> str:
    peers = dict.fromkeys(row["peer"] for row in found)
    ratios = (f"{peer} {_listed(row['wall']['ratio'] for row in found if row['peer'] == peer)}" for peer in peers)
    processor = span([row["processor"]["ratio"] for row in found])
    return f"exact, of the peer's own, 4 micro-batches, W = 1 and 2: {', '.join(ratios)} (processor time {processor})"


def _exact_end_to_end(found: Any) -> str:
    (row,) = (row for row in found if row["world_size"] == 2)
    same, one = (row["exact_ratio"][f"plain, {way}"] for way in ("same micro-batches", "one batch per rank"))
    return (
        f"W = 2, four micro-batches of 16: {same['wall']['ratio']:.2f} of a step of plain with the same micro-batches "
        f"({same['processor']['ratio']:.2f} of its processor time), {one['wall']['ratio']:.2f} of plain with one batch "
        "of 32 per rank"
    )


SAYS: dict[str, Callable[[Any], str]] = {
    "sampler": _sampler,
    "checkpoint": _checkpoint,
    "durable": _durable,
    "long_run": _long_run,
    "gpu": lambda found: str(found["summary"]),
    "gpu_files": lambda found: f"{found['ratio of the fastest']:.2f} times the script",
    "loader": _loader,
    "recovery": _recovery,
    "live_cost": _live_cost,
    "slow_link": _slow_link,
    "reduction": _reduction,
    "sharded": _sharded,
    "fully_sharded": _fully_sharded,
    "shard_memory": _shard_memory,
    "numerics": _numerics,
    "nodes": _nodes,
    "startup": _startup,
    "trainer_step": _trainer_step,
    "guard": _guard,
    "whole_run": _whole_run,
    "adapters": _adapters,
    "exact_end_to_end": _exact_end_to_end,
}
GOALS = {"gpu_files": "goals: 2.5 times in the same precision, 5 times over all if decoding allows"}
UNMEASURED = {"gpu": NO_GPU, "gpu_files": f"{NO_GPU} ({GOALS['gpu_files']})"}


def last_figures(name: str) -> str:
    """The last cell of the benchmark's row: what its recorded results say, and how many rounds if they are few."""
    document = recorded(name)
    if document is None and (timed := what_was_timed().get(name)):
        return f"[results/{KEPT.name}](results/{KEPT.name}): {timed}{f' ({GOALS[name]})' if name in GOALS else ''}"
    if document is None:
        return UNMEASURED.get(name, NOT_YET)
    return f"[results/{name}.json](results/{name}.json): {SAYS[name](document['results'])}{_few(document['rounds'])}"


def _few(rounds: int | None) -> str:
    if rounds is None:
        return " (rounds not recorded)"
    return "" if rounds >= ROUNDS else " (one round)" if rounds == 1 else f" ({rounds} rounds)"
