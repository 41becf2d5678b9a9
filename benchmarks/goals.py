"""Every goal of a benchmark beside what was reached, from the recorded results.

Goals are those that the benchmarks print as `target`, `goal` or `budget`; the figures are medians, and a goal that is
missed by a hair is missed. `python -m benchmarks.pages` puts the table into benchmarks/README.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.compared import BEST_LOOP_TARGET, exact_digits, of_best_bare, of_fair
from benchmarks.live_cost import GOAL as LIVE_COST_GOAL
from benchmarks.record import NOT_YET, recorded, results_of
from benchmarks.whole_run import ACCUMULATING
from benchmarks.whole_run import TARGET as WHOLE_RUN_TARGET

# The text of the result file says "at least 4 times".
LOADER_GOAL = 4.0
# Shards must not cost more than plain DDP's sum.
PARTS_GOAL = 1.0
PORTABLE_GOALS = {
    "digits": 0.95,
    "linear_regression": 0.95,
    "toy_mlp": 0.95,
    "counter_buffer": 0.95,
    "char_transformer": 0.9,
    "char_transformer of 25 M parameters": 0.9,
    "resnet18_synthetic": 0.95,
    "resnet18_synthetic, 224 x 224": 0.95,
    "product of 1024 x 1024 matrices": 0.95,
}
"""The speed of portable numerics, of the native one, by what is computed."""
LIVE_GOALS = {
    "worker killed, live": 0.3,
    "rank 0 killed, live": 0.3,
    "worker joins, live": 0.3,
    "node killed, live": 0.6,
    "node of rank 0 killed, live": 0.8,
    "node joins, live": 0.3,
    "node leaves with notice, live": 0.2,
    "node stopped, live": 5.6,  # --timeout is 5 s
}
"""Seconds without a new step, by the fault."""


@dataclass(frozen=True)
class Goal:
    """One figure of a benchmark; `most` says that it is to be at most the goal, else at least."""

    benchmark: str
    what: str
    goal: float
    reached: float | None
    """None: not measured yet."""
    most: bool = True

    @property
    def met(self) -> bool:
        """Whether the goal is reached."""
        if self.reached is None:
            return False
        return self.reached <= self.goal if self.most else self.reached >= self.goal

    def row(self) -> str:
        """The line of the table."""
        sign, verdict = "≤" if self.most else "≥", "met" if self.met else "**missed**"
        last = f"{self.reached:.3f} | {verdict}" if self.reached is not None else f"{NOT_YET} | -"
        goal = f"{self.goal:.2f}" if round(self.goal, 2) == self.goal else f"{self.goal:g}"
        return f"| {self.benchmark} | {self.what} | {sign} {goal} | {last} |"


def goals() -> list[Goal]:
    """All goals of the recorded results."""
    return [
        *(*_trainer_step(), *_whole_run(), *_scaling(), *_loader(), *_nodes(), *_reduction()),
        *(*_sharded(), *_fully_sharded()),
        *(*_exact_end_to_end(), *_startup(), *_numerics(), *_recovery(), *_live_cost()),
    ]


def table() -> str:
    """All goals as a table."""
    return "\n".join(
        ["| benchmark | figure | goal | reached | |", "|---|---|---|---|---|", *(goal.row() for goal in goals())]
    )


def _trainer_step() -> Iterator[Goal]:
    for case in results_of("trainer_step"):
        if case["target"]:
            what = f"{case['title']}: step, of the best bare loop's"
            yield Goal("trainer_step", what, BEST_LOOP_TARGET, of_best_bare(case, "ours"))


def _whole_run() -> Iterator[Goal]:
    what = "digits, exact, from the command to its end, of a bare script that accumulates the same eight micro-batches"
    yield Goal("whole_run", what, WHOLE_RUN_TARGET, exact_digits(ACCUMULATING))


def _scaling() -> Iterator[Goal]:
    for row in results_of("scaling"):
        what = f"two ranks of one, global batch {row['global_batch_size']}, torchvision's stem"
        what += f" (two unconnected processes: {row['two_alone']:.2f})"
        yield Goal("scaling", what, row["target"], row["speed_up"], most=False)


def _loader() -> Iterator[Goal]:
    found = results_of("loader")
    for size in ("224x224", "32x32"):
        reached = found[size]["host part ahead, memory kept"]["times_the_first_median"]
        yield Goal("loader", f"host's part ahead, {size}, of in line", LOADER_GOAL, reached, most=False)


def _nodes() -> Iterator[Goal]:
    for row in results_of("nodes"):
        link = f"{row['mbit_per_second']} Mbit/s" if row["mbit_per_second"] else "unshaped"
        what = f"two levels, {row['nodes']}x{row['ranks_per_node']}, {link}, of all_reduce"
        yield Goal("nodes", what, row["target"], row["ratios"]["two levels"])
        if "parts, two levels" in row["ratios"]:
            what = what.replace("two levels", "two levels, strided shares and shards")
            yield Goal("nodes", what, PARTS_GOAL, row["ratios"]["parts, two levels"])


def _reduction() -> Iterator[Goal]:
    for row in results_of("reduction")["sum"]:
        what = f"ordered sum of all_reduce, {row['world_size']} ranks, pieces: {row['pieces']}"
        yield Goal("reduction", what, row["target"], row["ratio"])


def _sharded() -> Iterator[Goal]:
    for row in results_of("sharded")["steps"]:
        ranks, found = row["world_size"], row["ways"]
        each = f"{ranks} ranks, {row['micro_batches_per_rank']} micro-batches each"
        ours, plain = found["exact, optimizer"], found["plain DDP"]
        yield Goal("sharded", f"exact step, --shard optimizer, of plain DDP's, {each}", 1.00, ours["of_plain"])
        yield Goal("sharded", f"the same of plain DDP's with ZeRO, {each}", 0.95, ours["of_zero"])
        state = ours["state_bytes"] / plain["state_bytes"]
        yield Goal("sharded", f"fullest rank's part of the optimizer's state, {each}", 1 / ranks + 0.02, state)


def _fully_sharded() -> Iterator[Goal]:
    for row in results_of("fully_sharded"):
        each = f"{row['world_size']} ranks, {row['micro_batches_per_rank']} micro-batches each"
        what = f"exact step of FSDP2 with an all-to-all, {row['model']}, {each}"
        yield Goal("fully_sharded", what, row["target"], of_fair(row))


def _numerics() -> Iterator[Goal]:
    reached = {row["what"]: row["ratio"] for row in results_of("numerics")}
    for what, goal in PORTABLE_GOALS.items():
        yield Goal("numerics", f"{what}: portable speed of native", goal, reached[what], most=False)


def _exact_end_to_end() -> Iterator[Goal]:
    for row in results_of("exact_end_to_end"):
        for way, found in row["exact_ratio"].items():
            if found["target"]:
                what = f"exact step of {way}, {row['world_size']} ranks"
                yield Goal("exact_end_to_end", what, found["target"], found["wall"]["ratio"])


def _startup() -> Iterator[Goal]:
    for row in results_of("startup"):
        if row["a_rank_more"] is not None:
            yield Goal("startup", f"processor seconds of one more rank, {row['ranks']}", 1.0, row["a_rank_more"])


def _recovery() -> Iterator[Goal]:
    for fault, goal in LIVE_GOALS.items():
        found = results_of("recovery")["faults"].get(fault)
        what = f"{fault}: seconds without a new step"
        yield Goal("recovery", what, goal, None if found is None else found["median"])


def _live_cost() -> Iterator[Goal]:
    found = recorded("live_cost")
    what = "steps of digits with --recovery live, of those with restart"
    yield Goal("live_cost", what, LIVE_COST_GOAL, None if found is None else found["results"]["steps"]["ratio"])
