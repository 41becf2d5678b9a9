"""What a collective saves over sending to each node in turn.

In a loop of sends one link carries the message once per receiver. A tree needs log2 W rounds, rounded up: from 2 nodes
to 6 it grows half as fast. In a ring each link carries the message about once or twice, whatever W is. gloo's broadcast
is a tree on paper (gloo/broadcast.cc), but its root starts all of its sends at once, and they share its link.

All this needs links that work at the same time, so each process gets a network namespace with a link of a stated rate,
at which the cores have little to do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ddp_lab.claims.framework.claim import Claim, Judgement, Measurements, composed, missing, versions
from ddp_lab.claims.framework.setting import Setting
from ddp_lab.claims.framework.statistics import (
    ROUNDS,
    Interval,
    fit_line,
    line,
    median_interval,
    milliseconds,
    ratio_interval,
)
from ddp_lab.claims.measuring import namespaces
from ddp_lab.claims.measuring.links import on_links
from ddp_lab.claims.measuring.measure import timed_rounds
from ddp_lab.claims.measuring.ranks import own_device
from ddp_lab.claims.measuring.wire import bytes_moved, can_count
from ddp_lab.records import EITHER_SIGN, Axis, Figure, Part, Series, Verdict

claim = Claim(
    id="C11",
    title="Sending to each node in turn is linear in the nodes, a collective is not",
    claim="Sending 5 MB of parameters to 5 nodes one after the other costs time linear in the nodes; a collective "
    "broadcast, in parallel over a tree or ring, does not.",
    original="分布式训练中,点对点(Point-to-Point)通信效率太低。"
    "假设要把 5MB 参数发给 5 个节点,逐个发送会导致耗时线性增长。"
    "集合通信(Collective Communication) 利用拓扑结构(如树状、环状)并行传输,是高性能计算的基石。",
    sources=("004",),
    method="Seconds until the first n of 6 nodes have a message of 5 MB: a loop of sends from node 0; a tree made of "
    "sends, in which a node passes the message on once it has all of it; a ring (an all-reduce in which only node 0 "
    "has something to add); and dist.broadcast. In interleaved rounds; slopes over the number of receivers "
    "(Theil-Sen) in each round, and for the loop two models of each round by least squares: a + b n and a + b n² for n "
    "receivers. On CPU each node is a network namespace with a link of its own rate; the same over "
    "the loopback interface shows how long the cores need for the copying. Over loopback also how often the message "
    "leaves node 0, by the kernel's count of bytes.",
    rule="Four parts. The loop: confirmed when its slope is above 0 and the line leaves smaller squared residuals "
    "than the square, both beyond noise; refuted when the square leaves smaller ones; else inconclusive. The tree, "
    "the ring and dist.broadcast, each: confirmed when its slope is below 0.75 times the loop's beyond noise, refuted "
    "when it is above beyond noise, else inconclusive, as where the loop does not grow in every round. 0.75 is midway "
    "between the slopes of a perfect tree (0.5) and of the loop. Not measurable without six CUDA devices or "
    "namespaces with links of their own, nor for a way whose copying alone (over loopback, to all receivers) takes 20 "
    "% of its time or more: then the cores are the limit, not the links.",
    in_short="Confirmed where the loop's time grows with n, not with n²; and where a collective's slope is below "
    "0.75 of the loop's beyond noise.",
    loads={
        "megabytes": (5, 5),
        "processes": ((2, 4, 6), (2, 3, 4, 5, 6)),
        "link_mbit_per_second": (200, 200),
        "rounds": ROUNDS,
        "rounds_on_loopback": (8, 8),
        "slope_at_most": (0.75, 0.75),
        "copying_share": (0.2, 0.2),
    },
    history=versions(
        "2026-11-22 f82abcc8035d0aef Measured on links of their own, so that bytes take longer to travel than to be "
        "copied, and with the sentence's number of nodes; before, eight processes shared the cores and gave no "
        "verdict. The tree and the ring that the sentence names are judged beside the library's broadcast. The limit "
        "of the slope is midway between a perfect tree and the loop; before it was 0.5, which a perfect tree of six "
        "nodes only just reaches.",
        "2026-11-25 ec554b4075f032b0 Whether the loop is linear is judged by comparing a line with a square: that a "
        "line explains 90 % of the times, the rule before, is also true of times that grow with the square. Beyond "
        "noise is the exact sign test with Holm's procedure over all intervals that bear verdicts, and the rounds "
        "follow from it.",
    ),
    seconds=(75, 205),
    tests=5,
)


LOOP, TREE, RING, BROADCAST = "send loop", "tree", "ring", "dist.broadcast"
WAYS = (LOOP, TREE, RING, BROADCAST)


def measure(setting: Setting) -> Measurements:
    """Seconds per round by way and number of processes, over links and over loopback."""
    load = claim.load(setting)
    ranks = max(load.processes)
    rounds = (load.rounds, load.rounds_on_loopback)
    found = on_links(setting, time_ways, ranks, *rounds, load.link_mbit_per_second, load.megabytes, load.processes)
    limits = {name: getattr(load, name) for name in ("slope_at_most", "copying_share")}
    return found | {"megabytes": load.megabytes, "limits": limits}


def time_ways(
    rank: int, world_size: int, device: str, rounds: int, megabytes: float, counts: tuple[int, ...]
) -> dict[str, Any]:
    """Time every way among the first n ranks; on CPU also count what leaves this rank."""
    place = own_device(rank, device)
    backend = "nccl" if device == "cuda" else "gloo"
    message = torch.full((int(megabytes * 1e6) // 4,), float(rank == 0), device=place)
    ways: dict[str, Callable[[], Any]] = {}
    for count in counts:
        group = dist.new_group(range(count), backend=backend)
        ways |= {f"{way} {count}": _way(way, rank, count, group, message) for way in WAYS}
    seconds = timed_rounds(ways, rounds)
    assert bool(message.eq(1).all()), "the message has not arrived"
    leaving = {}
    if device == "cpu" and can_count():
        leaving = {way: _sent(ways[f"{way} {world_size}"]) / (message.numel() * 4) for way in WAYS}
    return {
        "seconds": {way: {str(count): seconds[f"{way} {count}"] for count in counts} for way in WAYS},
        "leaving": leaving,
    }


def _sent(action: Callable[[], Any]) -> int:
    """Bytes that this rank sends during `action`, and a few more for the all-reduces before and after it."""
    dist.all_reduce(torch.zeros(1))
    before, _ = bytes_moved()
    action()
    dist.all_reduce(torch.zeros(1))
    return bytes_moved()[0] - before


def _way(way: str, rank: int, count: int, group: Any, message: Tensor) -> Callable[[], Any]:
    """What this rank does among the first `count`: nothing if it is not one of them."""

    def send_loop() -> None:
        if rank == 0:
            for receiver in range(1, count):
                dist.send(message, receiver, group=group)
        else:
            dist.recv(message, 0, group=group)

    def tree() -> None:
        # In the round with this distance, ranks below the distance have the message and pass it on.
        distance = 1
        while distance < count:
            if rank < distance and rank + distance < count:
                dist.send(message, rank + distance, group=group)
            elif distance <= rank < 2 * distance:
                dist.recv(message, rank - distance, group=group)
            distance *= 2

    actions = {
        LOOP: send_loop,
        TREE: tree,
        RING: lambda: dist.all_reduce(message, op=dist.ReduceOp.MAX, group=group),
        BROADCAST: lambda: dist.broadcast(message, 0, group=group),
    }
    return actions[way] if rank < count else lambda: None


def judge(measurements: Measurements) -> Judgement:
    """Apply the rule of the claim."""
    judged, unshaped, limits = (measurements[name] for name in ("judged", "unshaped", "limits"))
    ranks, megabytes, figures, series = measurements["ranks"], measurements["megabytes"], [], []
    if unshaped:
        for way in WAYS:
            name = f"{way} to {ranks - 1} receivers over loopback"
            figures.append(milliseconds(times(unshaped, way)[-1]).figure(name, "ms"))
        for way, sent in unshaped["leaving"].items():
            figures.append(Figure(f"times that the message leaves node 0, {way}", sent, bounds=(0.9, 1.1 * ranks)))
        series.append(_plot(f"{megabytes} MB to every process over loopback", unshaped))
    if judged is None:
        return missing(f"{ranks} CUDA devices; or {namespaces.WANTED}", figures, series)
    link = "" if measurements["device"] == "cuda" else f", links of {measurements['megabits']} Mbit/s"
    series.append(_plot(f"{megabytes} MB to every node{link}", judged))
    for way in WAYS:
        against = 0.0 if way == LOOP else None
        each = milliseconds(slopes(judged, way))
        figures.append(each.figure("per further receiver", "ms", way, against=against, bounds=EITHER_SIGN))
    figures.append(_residuals(judged).figure("residuals of a line / of a square", "x", LOOP, against=1.0))
    parts, limit = [_loop(judged)], limits["slope_at_most"]
    for way in WAYS[1:]:
        if min(slopes(judged, LOOP)) <= 0:
            text = "the loop does not grow in every round, so nothing compares with it"
            parts.append(Part(way, "inconclusive", text))
            continue
        ratio = ratio_interval(slopes(judged, way), slopes(judged, LOOP))
        figures.append(ratio.figure("slope / the loop's", "x", way, against=limit, bounds=EITHER_SIGN))
        text = f"grows {ratio} times as fast with the receivers as the loop"
        parts.append(Part(way, ratio.side(limit, "refuted", "confirmed"), text))
    if unshaped:
        parts = [_copying(part, judged, unshaped, limits) for part in parts]
    return composed(parts, figures, series)


def _loop(judged: dict[str, Any]) -> Part:
    residuals, slope = _residuals(judged), median_interval(slopes(judged, LOOP))
    said = f"a fit by n leaves {residuals} times the squared residuals of one by n²"
    verdict: Verdict = "refuted" if residuals.above() else "inconclusive"
    if slope.above(0) and residuals.below():
        verdict = "confirmed"
    return Part(LOOP, verdict, f"{1000 * slope.value:.0f} ms per receiver, and {said}")


def _copying(part: Part, judged: dict[str, Any], unshaped: dict[str, Any], limits: dict[str, float]) -> Part:
    """The part, but not measurable where the cores were the limit."""
    share = float(np.median(times(unshaped, part.name)[-1]) / np.median(times(judged, part.name)[-1]))
    said = f"{part.reason}; copying alone takes {100 * share:.0f} % of the time"
    if share < limits["copying_share"]:
        return Part(part.name, part.verdict, said)
    return Part(part.name, "not measurable here", f"needs more or faster cores: {said}")


def times(found: dict[str, Any], way: str) -> list[list[float]]:
    """Seconds by number of processes and round."""
    return list(found["seconds"][way].values())


def slopes(found: dict[str, Any], way: str) -> list[float]:
    """Seconds per further receiver, round by round."""
    receivers = [int(count) - 1 for count in found["seconds"][way]]
    return [fit_line(receivers, moment)[1] for moment in zip(*times(found, way), strict=True)]


def _residuals(found: dict[str, Any]) -> Interval:
    """The squared residuals of a line through the send loop's times over those of a square, round by round."""
    receivers = np.array([int(count) - 1 for count in found["seconds"][LOOP]], dtype=float)
    rounds = [np.array(moment) for moment in zip(*times(found, LOOP), strict=True)]
    line, square = ([_left_over(receivers**power, moment) for moment in rounds] for power in (1, 2))
    return ratio_interval(line, square)


def _left_over(x: Any, y: Any) -> float:
    """The sum of squares that a least-squares fit of a + b x leaves, and a little against a division by 0.

    Less than a nanosecond squared is rounding, which differs between CPUs, and counts as nothing.
    """
    design = np.stack([np.ones_like(x), x], axis=1)
    return round(float(((y - design @ np.linalg.lstsq(design, y, rcond=None)[0]) ** 2).sum()), 18) + 1e-18


def _plot(title: str, found: dict[str, Any]) -> Series:
    lines = [line(way, map(milliseconds, times(found, way))) for way in WAYS]
    receivers = [int(count) - 1 for count in found["seconds"][LOOP]]
    return Series(f"Time to give {title}", Axis("receivers", "", receivers), Axis("time", "ms"), lines)
