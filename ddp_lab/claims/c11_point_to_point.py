"""What a collective saves over sending to each node in turn.

In a loop of sends one rank does all the work: it pushes the whole message through its own link once per receiver, so
the time grows linearly with the receivers. In a tree the receivers pass the message on: after k rounds 2^k ranks have
it, so W ranks need log2 W rounds. A ring passes the message on in pieces, as large all-reduces do: each link carries
the message about once or twice, whatever W is. All this needs links and processors that work at the same time.
Processes that share two cores make every copy with the same two cores; the time of a copy per receiver then grows
linearly again, with a tree as without one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ddp_lab.claims.framework.claim import Claim, Judgement, Measurements, missing
from ddp_lab.claims.framework.setting import Setting
from ddp_lab.claims.framework.statistics import fit_line, median_interval, ratio_interval
from ddp_lab.claims.measuring.measure import timed_rounds
from ddp_lab.claims.measuring.ranks import own_device, run_ranks
from ddp_lab.claims.measuring.wire import bytes_moved, can_count
from ddp_lab.records import Axis, Figure, Line, Series

claim = Claim(
    id="C11",
    title="Sending to each node in turn is linear in the nodes, a collective is not",
    claim="Sending 5 MB of parameters to 5 nodes one after the other costs time linear in the nodes; a collective "
    "broadcast, in parallel over a tree or ring, does not.",
    original="分布式训练中,点对点(Point-to-Point)通信效率太低。"
    "假设要把 5MB 参数发给 5 个节点,逐个发送会导致耗时线性增长。"
    "集合通信(Collective Communication) 利用拓扑结构(如树状、环状)并行传输,是高性能计算的基石。",
    sources=("004",),
    method="Seconds of a loop of sends from rank 0, of a broadcast and of an all-reduce among the first n of the same "
    "processes, n = 2 ... 8, several sizes, interleaved rounds; slopes over the number of receivers (Theil-Sen) in "
    "each round. Over gloo also how often the message leaves rank 0, by the kernel's count of bytes.",
    rule="At 5 MB: confirmed when a line explains 90 % of the send loop's medians (R^2) and the broadcast's slope is "
    "below half of the send loop's beyond noise (a tree's is a third). If not: not measurable where there are fewer "
    "cores or devices than processes; inconclusive where there is no line; refuted where the slope is above half "
    "beyond noise; else inconclusive.",
    seconds=(8, 60),
)

JUDGED = "5"
SMALLER_THAN, STRAIGHT = 0.5, 0.9
WAYS = ("send loop", "broadcast", "all-reduce")


def measure(setting: Setting) -> Measurements:
    """Seconds per round, by size, way and number of processes."""
    processes = 8
    device = setting.device_type(processes)
    setting.say(f"{processes} processes on {device}")
    sizes = setting.choose((0.5, 5.0), (0.05, 0.5, 5.0, 50.0))
    arguments = (device, sizes, setting.choose(7, 21))
    ranks = run_ranks(time_ways, processes, *arguments, device=device, timeout=400)
    devices = setting.cuda_devices if device == "cuda" else setting.cores
    return {"processes": processes, "devices": devices, "device": device, **ranks[0]}


def time_ways(rank: int, world_size: int, device: str, sizes: tuple[float, ...], rounds: int) -> dict[str, Any]:
    """Time every size and way among the first n ranks; and count what leaves this rank at the size that is judged."""
    place = own_device(rank, device)
    counts = range(2, world_size + 1)
    groups = {count: dist.new_group(range(count), backend="nccl" if device == "cuda" else "gloo") for count in counts}
    found: dict[str, Any] = {}
    leaving: dict[str, Any] = {}
    for size in sizes:
        message = torch.ones(int(size * 1e6) // 4, device=place)
        ways: dict[str, Any] = {}
        for count in counts:
            for way in WAYS:
                ways[f"{way} {count}"] = _way(way, rank, count, groups[count], message)
        if f"{size:g}" == JUDGED and device == "cpu" and can_count():
            length = message.numel() * message.element_size()
            leaving = {way: {str(n): _sent(ways[f"{way} {n}"]) / length for n in counts} for way in WAYS}
        seconds = timed_rounds(ways, rounds, warm_up=2)
        found[f"{size:g}"] = {way: {str(count): seconds[f"{way} {count}"] for count in counts} for way in WAYS}
    return {"sizes": found, "leaving": leaving}


def _sent(action: Callable[[], Any]) -> int:
    """Bytes that this rank sends during `action`, and a few more for the all-reduces before and after it."""
    dist.all_reduce(torch.zeros(1))
    before, _ = bytes_moved()
    action()
    dist.all_reduce(torch.zeros(1))
    return bytes_moved()[0] - before


def _way(way: str, rank: int, count: int, group: Any, message: torch.Tensor) -> Any:
    """What this rank does among the first `count`: nothing if it is not one of them."""

    def send_loop() -> None:
        if rank == 0:
            for receiver in range(1, count):
                dist.send(message, receiver, group=group)
        else:
            dist.recv(message, 0, group=group)

    actions = {
        "send loop": send_loop,
        "broadcast": lambda: dist.broadcast(message, 0, group=group),
        "all-reduce": lambda: dist.all_reduce(message, op=dist.ReduceOp.MAX, group=group),
    }
    return actions[way] if rank < count else lambda: None


def judge(measurements: Measurements) -> Judgement:
    """Apply the rule of the claim."""
    figures, series = [], []
    for size, ways in measurements["sizes"].items():
        slopes = {way: _slopes(by_count) for way, by_count in ways.items()}
        for way, values in slopes.items():
            slope = median_interval([1000 * value for value in values])
            figures.append(Figure(f"{size} MB: {way}, per further receiver", slope.value, "ms", slope.low, slope.high))
        series.append(_plot(size, ways))
    leaving, processes, devices = (measurements[name] for name in ("leaving", "processes", "devices"))
    if leaving:
        series.append(_leaving_plot(leaving))
        most = list(leaving["broadcast"])[-1]
        figures += [
            Figure(f"times that the message leaves rank 0, {way}, {most} processes", leaving[way][most])
            for way in ("send loop", "broadcast")
        ]
    ways = measurements["sizes"][JUDGED]
    slopes = {way: _slopes(by_count) for way, by_count in ways.items()}
    straight = _straightness(ways["send loop"])
    figures.append(Figure(f"{JUDGED} MB: send loop, share explained by a line", straight, ""))
    said, ratio = f"a line explains only {100 * straight:.0f} % of the send loop's times at {JUDGED} MB", None
    if straight >= STRAIGHT and min(slopes["send loop"]) > 0:
        ratio = ratio_interval(slopes["broadcast"], slopes["send loop"])
        figures.append(Figure(f"{JUDGED} MB: slope of broadcast / send loop", ratio.value, "x", ratio.low, ratio.high))
        said = f"at {JUDGED} MB the broadcast grows {ratio} times as fast with the receivers as the send loop"
    if leaving:
        loop, broadcast = (round(leaving[way][most]) for way in ("send loop", "broadcast"))
        said += f"; of {processes} processes, rank 0 sends {loop} messages in the loop and {broadcast} in the broadcast"
    decided = ratio is not None and ratio.leaves_out(SMALLER_THAN)
    if ratio is not None and decided and ratio.value < SMALLER_THAN:
        return Judgement("confirmed", said, figures, series)
    if devices < processes:
        needed = f"{processes} cores or CUDA devices, found {devices}: processes that share cores share the copying"
        return missing(f"{needed}; {said}", figures, series)
    return Judgement("refuted" if decided else "inconclusive", said, figures, series)


def _leaving_plot(leaving: dict[str, dict[str, float]]) -> Series:
    receivers = [int(count) - 1 for count in leaving["send loop"]]
    return Series(
        "How often the message leaves rank 0",
        Axis("receivers", "", receivers),
        Axis("messages"),
        [Line(way, list(by_count.values())) for way, by_count in leaving.items()],
    )


def _slopes(by_count: dict[str, list[float]]) -> list[float]:
    """Seconds per further receiver, round by round."""
    receivers = [int(count) - 1 for count in by_count]
    return [fit_line(receivers, moment)[1] for moment in zip(*by_count.values(), strict=True)]


def _straightness(by_count: dict[str, list[float]]) -> float:
    """R squared of a least-squares line through the medians."""
    x = np.array([int(count) - 1 for count in by_count], dtype=float)
    y = np.array([float(np.median(values)) for values in by_count.values()])
    return float(np.corrcoef(x, y)[0, 1] ** 2) if y.std() > 0 else 0.0


def _plot(size: str, ways: dict[str, dict[str, list[float]]]) -> Series:
    lines = []
    for way, by_count in ways.items():
        each = [median_interval([1000 * value for value in values]) for values in by_count.values()]
        lines.append(Line(way, [one.value for one in each], [one.low for one in each], [one.high for one in each]))
    receivers = [int(count) - 1 for count in ways["send loop"]]
    return Series(
        f"Time to give {size} MB to every process", Axis("receivers", "", receivers), Axis("time", "ms"), lines
    )
