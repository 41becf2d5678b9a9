"""Every goal of a benchmark beside what was reached, and other tables of the docs, from the recorded results.

    python -m benchmarks.goals

The tables stand in benchmarks/README.md, the last one in docs/reference/cost-of-exactness.md; a test holds pages and
results together. Goals are those that the benchmarks print as `target`, `goal` or `budget`; the figures are medians,
and a goal that is missed by a hair is missed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.numerics import DEFAULT_GOAL
from benchmarks.record import RESULTS
from ddp_lab.probe.published import published

# The text of the result file says "at least 4 times".
LOADER_GOAL = 4.0


@dataclass(frozen=True)
class Goal:
    """One figure of a benchmark; `most` says that it is to be at most the goal, else at least."""

    benchmark: str
    what: str
    goal: float
    reached: float
    most: bool = True

    @property
    def met(self) -> bool:
        """Whether the goal is reached."""
        return self.reached <= self.goal if self.most else self.reached >= self.goal

    def row(self) -> str:
        """The line of the table."""
        sign, verdict = "≤" if self.most else "≥", "met" if self.met else "**missed**"
        return f"| {self.benchmark} | {self.what} | {sign} {self.goal:.2f} | {self.reached:.3f} | {verdict} |"


def goals() -> list[Goal]:
    """All goals of the recorded results."""
    return [
        *(*_trainer_step(), *_scaling(), *_loader(), *_nodes(), *_reduction()),
        *(*_sharded(), *_fully_sharded()),
        *(*_exact_end_to_end(), *_startup(), *_numerics()),
    ]


def table() -> str:
    """All goals as a table."""
    return "\n".join(
        ["| benchmark | figure | goal | reached | |", "|---|---|---|---|---|", *(goal.row() for goal in goals())]
    )


def whole_runs() -> str:
    """Whole runs beside the bare loop's step, and what saving costs, as sentences."""
    lines = []
    for case in _results("trainer_step"):
        turns = case["turns"]
        for name, ours in turns.items():
            if "run" in ours[0] and name in ("ours", "ours, exact"):
                ratio = median(mine["run"] / bare["step"] for mine, bare in zip(ours, turns["bare loop"], strict=True))
                step = case["wall"][name]["ratio"]
                lines.append(f"| {case['title']} | {step:.2f} | {ratio:.2f} |")
    return "\n".join(["| case | step | whole run, per step |", "|---|---|---|", *lines])


def saving() -> str:
    """What saves cost at one per 50 steps."""
    shares = _results("checkpoint")["share"]
    lines = [
        f"| {'one core free' if not row['neighbours'] else 'all cores busy'} | "
        f"{100 * row['share_median']['asynchronous']:.1f} % | {100 * row['share_median']['torch.save']:.1f} % |"
        for row in shares
    ]
    return "\n".join(["| | asynchronous save | `torch.save` |", "|---|---|---|", *lines])


def commands() -> str:
    """Seconds of whole runs, from the command to its end, by phase; a sentence where none is recorded."""
    if not (RESULTS / "whole_run.json").exists():
        return "No whole run is recorded yet."
    found = _results("whole_run")["ways"]
    phases = list(next(iter(found.values()))["medians"])
    lines = []
    for way, row in found.items():
        cells = " | ".join(f"{row['medians'][phase]:.2f}" for phase in phases)
        lines.append(f"| {way} | {cells} | {row['ratio']:.2f} |")
    head = f"| seconds | {' | '.join(phases)} | of the bare script |"
    return "\n".join([head, "|---" * (len(phases) + 2) + "|", *lines])


def sums() -> str:
    """Sums that need no order, beside the ordered one and gloo's."""
    found = _results("order_invariant")
    lines = [
        f"| {row['way']} | {row['bytes_per_rank'] / 1e6:.0f} MB | {1e3 * median(row['seconds']):.0f} ms | "
        f"{row['ratio']:.1f} |"
        for row in found["sums"]
    ]
    package = found["bitrep"]
    if package:
        seconds, size = (package[name] * found["elements"] for name in ("seconds_per_element", "bytes_per_element"))
        lines.append(
            f"| bitrep {package['version']} `SumF32`, one accumulator per element, called from Python, unsent | "
            f"{size / 1e6:.0f} MB in all | {1e3 * seconds:.0f} ms (of {package['elements']:,} elements) | - |"
        )
    return "\n".join(["| sum | sent per rank | time | of all_reduce |", "|---|---|---|---|", *lines])


def _results(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())["results"]


def _trainer_step() -> Iterator[Goal]:
    for case in _results("trainer_step"):
        if case["target"]:
            reached = case["wall"]["ours"]["ratio"]
            yield Goal("trainer_step", f"{case['title']}: step, of the bare loop's", case["target"], reached)


def _scaling() -> Iterator[Goal]:
    for row in _results("scaling"):
        what = f"two ranks of one, global batch {row['global_batch_size']}, torchvision's stem"
        what += f" (two unconnected processes: {row['two_alone']:.2f})"
        yield Goal("scaling", what, row["target"], row["speed_up"], most=False)


def _loader() -> Iterator[Goal]:
    found = _results("loader")
    for size in ("224x224", "32x32"):
        reached = found[size]["host part ahead, memory kept"]["times_the_first_median"]
        yield Goal("loader", f"host's part ahead, {size}, of in line", LOADER_GOAL, reached, most=False)


def _nodes() -> Iterator[Goal]:
    for row in _results("nodes"):
        link = f"{row['mbit_per_second']} Mbit/s" if row["mbit_per_second"] else "unshaped"
        what = f"two levels, {row['nodes']}x{row['ranks_per_node']}, {link}, of all_reduce"
        yield Goal("nodes", what, row["target"], row["ratios"]["two levels"])


def _reduction() -> Iterator[Goal]:
    for row in _results("reduction")["sum"]:
        what = f"ordered sum of all_reduce, {row['world_size']} ranks, pieces: {row['pieces']}"
        yield Goal("reduction", what, row["target"], row["ratio"])


def _sharded() -> Iterator[Goal]:
    for row in _results("sharded")["steps"]:
        ranks, found = row["world_size"], row["ways"]
        each = f"{ranks} ranks, {row['micro_batches_per_rank']} micro-batches each"
        ours, plain = found["exact, optimizer"], found["plain DDP"]
        yield Goal("sharded", f"exact step, --shard optimizer, of plain DDP's, {each}", 1.00, ours["of_plain"])
        yield Goal("sharded", f"the same of plain DDP's with ZeRO, {each}", 0.95, ours["of_zero"])
        state = ours["state_bytes"] / plain["state_bytes"]
        yield Goal("sharded", f"fullest rank's part of the optimizer's state, {each}", 1 / ranks + 0.02, state)


def _fully_sharded() -> Iterator[Goal]:
    for row in _results("fully_sharded"):
        each = f"{row['world_size']} ranks, {row['micro_batches_per_rank']} micro-batches each"
        what = f"exact step of FSDP2, plain, {row['model']}, {each}"
        yield Goal("fully_sharded", what, row["target"], row["ratios"]["parameters, exact"])


def _numerics() -> Iterator[Goal]:
    """Of the experiments that are portable by default: they must keep nine tenths of their native speed."""
    portable = published().runs
    for row in _results("numerics"):
        if row["what"] in portable:
            yield Goal("numerics", f"{row['what']}: portable speed of native", DEFAULT_GOAL, row["ratio"], most=False)


def _exact_end_to_end() -> Iterator[Goal]:
    for row in _results("exact_end_to_end"):
        for way, found in row["exact_ratio"].items():
            if found["target"]:
                what = f"exact step of {way}, {row['world_size']} ranks"
                yield Goal("exact_end_to_end", what, found["target"], found["wall"]["ratio"])


def _startup() -> Iterator[Goal]:
    for row in _results("startup"):
        if row["a_rank_more"] is not None:
            yield Goal("startup", f"processor seconds of one more rank, {row['ranks']}", 1.0, row["a_rank_more"])


if __name__ == "__main__":
    print("\n\n".join([table(), whole_runs(), saving(), commands(), sums()]))
