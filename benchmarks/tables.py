"""Tables of the docs that are made from recorded results; `python -m benchmarks.pages` puts them into their pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from statistics import median
from typing import Any

from benchmarks.compared import best_loop, of_best_bare, of_fair, said, span, whole_run_of, whole_time_of
from benchmarks.numerics import RECORDED
from benchmarks.record import NOT_YET, recorded, results_of
from benchmarks.whole_run import ACCUMULATING, EXACT, SCRIPT

TIMES = "\N{MULTIPLICATION SIGN}"
_ACROSS = "docs/evidence/costs.md#across-nodes"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]).replace("|  |", "| |")


def steps_in_parts() -> str:
    """Steps of trainer_step's contenders, of the bare loop's, and the trainer's of the best bare loop's."""
    cases = results_of("trainer_step")
    names = list(dict.fromkeys(name for case in cases for name in case["turns"]))
    names.sort(key=lambda name: (not name.startswith("bare"), not name.startswith("ours")))

    def cell(case: Any, name: str) -> str:
        if name not in case["turns"]:
            return "-"
        figure = said(case["wall"][name]["ratio"])
        return f"**{figure}**" if name == best_loop(case) else figure

    def of_best(case: Any, name: str) -> str:
        return said(of_best_bare(case, name)) if name in case["turns"] else "-"

    rows = [[name, *(cell(case, name) for case in cases)] for name in names]
    own = (name for name in names if name.startswith("ours"))
    rows += [[f"{name}: of the best bare loop", *(of_best(case, name) for case in cases)] for name in own]
    return _table(["step, of the bare loop's", *(case["title"] for case in cases)], rows)


def portable_speeds() -> str:
    """Speeds in one thread with native and portable numerics."""
    others = [
        {row["what"]: said(row["ratio"]) for row in results_of(f"numerics_{maker}")} for maker in ("amd", "intel")
    ]
    rows = [
        [
            row["what"].replace(" x ", f" {TIMES} "),
            *(_speed(row[way], row["unit"]) for way in RECORDED),
            said(row["ratio"]),
            *(other.get(row["what"], "-") for other in others),
        ]
        for row in results_of("numerics")
    ]
    head = ("in one thread", "native", "portable", "portable / native", "AMD's with AVX-512", "Intel's with AVX-512")
    return _table(head, rows)


def _speed(speed: float, unit: str) -> str:
    return f"{speed:,.0f} {unit}" if speed >= 1000 else f"{speed:.1f} {unit}"


def whole_runs() -> str:
    """Whole runs beside the bare loop's step, and the best one's."""
    rows = [
        [
            case["title"],
            said(case["wall"][name]["ratio"]),
            said(whole_run_of(case, name, "bare loop")),
            said(of_best_bare(case, name)),
            said(whole_run_of(case, name, best_loop(case))),
        ]
        for case in results_of("trainer_step")
        for name in ("ours", "ours, exact")
        if name in case["turns"]
    ]
    head = ("case", "step", "whole run, per step", "step, of the best bare loop's", "whole run, per step, of that")
    return _table(head, rows)


def saving() -> str:
    """What saves cost at one per 50 steps."""
    rows = (
        ["all cores busy" if row["neighbours"] else "one core free"]
        + [f"{100 * row['share_median'][way]:.1f} %" for way in ("asynchronous", "torch.save")]
        for row in results_of("checkpoint")["share"]
    )
    return _table(["", "asynchronous save", "`torch.save`"], rows)


def commands() -> str:
    """Seconds of whole runs, from the command to its end, by phase."""
    ways = results_of("whole_run")["ways"]
    phases = list(ways[SCRIPT]["medians"])
    rows = (
        [way, *(f"{row['medians'][phase]:.2f}" for phase in phases)]
        + [said(whole_time_of(ways, way, base)) for base in (SCRIPT, ACCUMULATING)]
        for way, row in ways.items()
    )
    return _table(["seconds", *phases, "of the bare script", "of the one that accumulates"], rows)


def one_sum() -> str:
    """The ordered sum beside gloo's all_reduce."""
    rows = (
        [
            *(str(row[name]) for name in ("world_size", "pieces")),
            *(f"{row[name]:.1f} ms" for name in ("all_reduce_ms", "ordered_ms")),
            said(row["ratio"]),
            f"≤ {row['target']:.2f}{', missed' if row['ratio'] > row['target'] else ''}",
        ]
        for row in results_of("reduction")["sum"]
    )
    return _table(["ranks", "buckets", "gloo's all_reduce", "exact sum", "ratio", "target"], rows)


def samplers() -> str:
    """What the two samplers cost; where torch's was not run, by its figures at the length before."""
    named = ("DistributedSampler", "ElasticSampler")
    found = {(row["sampler"], row["length"]): row for row in results_of("sampler")["samplers"]}
    rows = []
    for length in sorted({length for _, length in found}):
        told = (
            f"not run: {each['not_run']}"
            if "not_run" in each
            else f"{each['first_id_ms']:,.2f} ms, {each['ns_per_id']:.0f} ns, {each['memory_mb']:,.1f} MB"
            for each in (found[sampler, length] for sampler in named)
        )
        rows.append([f"{length:,}", *told])
    return _table(["samples", *(f"{sampler}: first id, per id, memory" for sampler in named)], rows)


def copies_of_gradients() -> str:
    """Memory of a rank above plain accumulation, in gradients."""
    found = results_of("reduction")["memory"]
    return _table(
        ["micro-batches per rank", *(f"{row['micro_batches_per_rank']}" for row in found)],
        [
            ["measured", *(f"{row['extra_copies']:.1f}" for row in found)],
            ["log₂(M/W)", *(f"{row['expected']:.0f}" for row in found)],
        ],
    )


def strided_shares() -> str:
    """Processor time of one of two ranks above that of accumulation alone."""
    ways = ("contiguous, DDP", "contiguous", "strided")

    def above(row: Any, way: str) -> str:
        spent, alone = (median(row["ways"][each]["processor"]) for each in (way, "accumulation"))
        return f"{1e3 * (spent - alone):.0f} ms"

    rows = (
        [f"{row['micro_batches_per_rank']}", *(above(row, way) for way in ways)]
        for row in results_of("reduction")["shares"]
        if row["world_size"] == 2
    )
    return _table(
        ["micro-batches per rank", *(way if "DDP" in way else f"{way}, plain module" for way in ways)],
        rows,
    )


def across_nodes() -> str:
    """Bytes out of a node, and times of gloo's all_reduce, of the ordered sum in one level and two, and of its parts.

    Parts are sums of which each rank gets its own, and the way back: strided shares and shards.
    """
    found = results_of("nodes")
    shapes = list(dict.fromkeys((row["nodes"], row["ranks_per_node"]) for row in found))
    rates = list(dict.fromkeys(row["mbit_per_second"] for row in found))
    rows = []
    for kind, shape in product(("", "parts, "), shapes):
        levels = [f"{kind}{level}" for level in ("one level", "two levels")]
        by_rate = {row["mbit_per_second"]: row for row in found if (row["nodes"], row["ranks_per_node"]) == shape}
        name, ways = kind + f" {TIMES} ".join(map(str, shape)), by_rate[rates[0]]["ways"]
        if levels[0] not in ways:
            rows.append([name, NOT_YET, *("-" for _ in rates)])
            continue
        sent = ", ".join(f"{median(ways[way]['bytes']) / 1e6:.1f}" for way in ("all_reduce", *levels))
        ratios = ([by_rate[rate]["ratios"][level] for level in levels] for rate in rates)
        rows.append([name, f"{sent} MB", *(f"{one:.2f}, **{two:.2f}**" for one, two in ratios)])
    return _table([f"nodes {TIMES} ranks", "out of a node", *map(_link, rates)], rows)


def _link(rate: int | None) -> str:
    if not rate:
        return "unshaped"
    return f"{rate} Mbit/s" if rate < 1000 else f"{rate // 1000} Gbit/s"


def steps_of_shards() -> str:
    """Steps with shards, of torch's."""
    optimizer, gradients = (
        [row["ways"][f"exact, {mode}"] for row in results_of("sharded")["steps"]] for mode in ("optimizer", "gradients")
    )
    fully_sharded = results_of("fully_sharded")
    as_it_is = [row["ratios"]["parameters, exact"] for row in fully_sharded]
    rows = [
        ("optimizer", "plain DDP", [row["of_plain"] for row in optimizer]),
        ("optimizer", "plain DDP and torch's ZeroRedundancyOptimizer", [row["of_zero"] for row in optimizer]),
        ("gradients", "plain DDP", [row["of_plain"] for row in gradients]),
        ("parameters", "torch's FSDP2 as it is over gloo, which sends 4/3 as much", as_it_is),
        ("parameters", "torch's FSDP2 with an all-to-all, which sends as much", [*map(of_fair, fully_sharded)]),
    ]
    return _table(
        ("`--shard`", "its step ÷ one with", "ratio"), ([f"`{mode}`", of, span(each)] for mode, of, each in rows)
    )


def memory_of_shards() -> str:
    """What a rank needs in each shard mode."""
    found = results_of("shard_memory")
    modes = list(dict.fromkeys(row["shard"] for row in found))
    return _table(
        ["ranks", *(f"`{mode}`" for mode in modes)],
        (
            [f"{ranks}", *(f"{row['measured_bytes'] / 1e6:.0f} MB" for row in found if row["ranks"] == ranks)]
            for ranks in dict.fromkeys(row["ranks"] for row in found)
        ),
    )


def costs() -> str:
    """What exactness costs, for the README: ratios to torch's own way."""
    steps = {row["world_size"]: row["exact_ratio"] for row in results_of("exact_end_to_end")}

    def of_plain(kind: str) -> str:
        alone, together = (f"{said(steps[ranks][kind]['wall']['ratio'])} {TIMES}" for ranks in (1, 2))
        return f"{alone}; {together}"

    def of_ddp(way: str) -> str:
        return f"{span([row['ways'][way]['of_plain'] for row in sharded])} {TIMES}"

    run, sharded = results_of("whole_run")["ways"][EXACT], results_of("sharded")["steps"]
    guarded = results_of("guard")["trainings"].values()
    portable = {row["what"]: row["ratio"] for row in results_of("numerics_intel")}
    rows = {
        f"exact ÷ plain step with the same micro-batches, ResNet-18 at 32 {TIMES} 32: one process; DDP on 2 ranks": (
            of_plain("plain, same micro-batches")
        ),
        "the same ratio with hardly any computing: 25 M parameters, 2 and 4 ranks": of_ddp("exact"),
        "as above, `--shard optimizer` ÷ plain DDP": of_ddp("exact, optimizer"),
        "as above, `--shard gradients` ÷ plain DDP": of_ddp("exact, gradients"),
        "exact ÷ plain step with one batch per rank, ResNet-18 as above: one process; DDP on 2 ranks": of_plain(
            "plain, one batch per rank"
        ),
        "`digits`, no augmentation, native numerics: epochs, eight micro-batches a step ÷ plain loop with one batch": (
            f"{said(run['steps_ratio'])} {TIMES}"
        ),
        "the same epochs ÷ plain loop that accumulates the same eight": (
            f"{said(run['steps_ratio_to_accumulating'])} {TIMES}"
        ),
        "exact sum ÷ gloo's all-reduce, one machine, 2 and 4 ranks": (
            f"{span([row['ratio'] for row in results_of('reduction')['sum']])} {TIMES}"
        ),
        f"exact all-reduce [across nodes]({_ACROSS}) ÷ gloo's ring, 200 Mbit/s and more; in parts, as by `--shard`": (
            f"{span(_across('two levels'))} {TIMES}; {span(_across('parts, two levels'))} {TIMES}"
        ),
        "exact all-reduce across nodes ÷ gloo's own in two levels": (
            f"{span([row['of_two_levels'] for row in results_of('nodes')])} {TIMES}"
        ),
        "`--shard parameters` ÷ FSDP2 over gloo, FSDP2's reduce-scatter made by an all-to-all": (
            f"{span([*map(of_fair, results_of('fully_sharded'))])} {TIMES}"
        ),
        "rehearsal and witness, short runs: time added to the first run; later runs, with ÷ without": (
            f"{span([each['more_seconds_first'] for each in guarded], 1)} s more; "
            f"{span([each['whole_again'] for each in guarded])} {TIMES}"
        ),
        "speed (more is better) with portable numerics ÷ native, `digits` and a transformer of 25 M parameters": (
            f"{said(portable['digits'])} {TIMES} and {said(portable['char_transformer of 25 M parameters'])} {TIMES}"
        ),
    }
    return _table(["", "ratio"], rows.items())


def _across(level: str) -> list[float | None]:
    return [row["ratios"].get(level) for row in results_of("nodes")]


_FAULTS = {
    "worker killed": "worker killed",
    "worker killed, live": "worker killed, `live`",
    "rank 0 killed": "worker of rank 0 killed",
    "rank 0 killed, live": "worker of rank 0 killed, `live`",
    "worker joins, live": "a new worker joins, `live`: pause of the others",
    "worker stopped": "worker stopped, `--timeout 5`",
    "node killed": "all processes of a node killed, one of three",
    "node of rank 0 killed": "those of the node of rank 0",
    "node killed, live": "all processes of a node killed, one of three, `live`",
    "node of rank 0 killed, live": "those of the node of rank 0, `live`",
    "node joins, live": "a new node joins, `live`: pause of the others",
    "node leaves with notice, live": "a node is asked to leave, `live`: pause of the others",
    "node stopped, live": "node stopped, `--timeout 5`, `live`",
    "node of rank 0 stopped": "node of rank 0 stopped, `--timeout 5`",
    "rendezvous killed, started again when noticed": "rendezvous killed, and started again once that was noticed",
}
"""The faults of benchmarks.recovery, as its table names them."""


def recoveries() -> str:
    """From each fault to the first new step."""
    document = recorded("recovery")
    assert document is not None
    faults, rows = document["results"]["faults"], []
    for fault, words in _FAULTS.items():
        found = faults[fault]
        low, high = min(found["steps_lost"]), max(found["steps_lost"])
        again = str(low) if low == high else f"{low} to {high}"
        rows.append([words, f"{found['median']:.1f} s", f"{found['worst']:.1f} s", again])
    return _table(["with `restart`, or `live`", "median", f"worst of {document['rounds']}", "steps done again"], rows)
