"""What it costs not to wait for slow workers.

With synchronous updates each step is as slow as the slowest worker. With asynchronous ones a worker sends its gradient
to a server, which applies it at once, and goes on with the weights it gets back; meanwhile others have changed them, so
every gradient was computed at weights that are some updates old (its staleness). Staleness is measured in two ways. One
process simulates it by the exact definition: the gradient of step t is taken at the weights of step t - s. And it
occurs for real in a parameter server: one process holds the weights, and workers over the same process group, one of
them slow, send it gradients. Source of the idea: Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012
(Downpour SGD); of the effect of staleness: Chen et al., "Revisiting Distributed Synchronous SGD", arXiv:1604.00981. The
optimizer is plain SGD, because staleness acts like momentum (Mitliagkas et al., "Asynchrony begets momentum",
arXiv:1605.09774), and would add to it.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from ddp_core.data.builders import digits
from ddp_core.data.loader import Loader
from ddp_core.model.builders import small_cnn
from ddp_core.sampler import GlobalOrder
from ddp_lab.claims.framework.claim import Claim, Judgement, Measurements
from ddp_lab.claims.framework.setting import Setting
from ddp_lab.claims.framework.statistics import median_interval, ratio_interval
from ddp_lab.claims.measuring.ranks import run_ranks
from ddp_lab.records import Axis, Figure, Line, Series

claim = Claim(
    id="C17",
    title="Asynchronous updates do not wait but make the loss jitter; synchronous ones do not",
    claim="Synchronous updates wait for the slowest GPU; asynchronous ones do not wait, but the loss then jitters "
    "abnormally.",
    original="同步更新有等待，速度取决于最慢的那个GPU；异步更新没有等待，但是会出现loss异常抖动等问题，"
    "实践中，一般使用的是同步更新。",
    sources=("002",),
    method="The same network, data and optimizer with gradients that are 0, 1, 2, 4 and 8 updates old: variance of the "
    "training loss about its trend over the last half of the steps, several seeds, against staleness 0 with the same "
    "seed. And a parameter server with three workers, one of them slow, synchronous and asynchronous: share of time "
    "that workers wait for weights, staleness, and jitter.",
    rule="Jitter is confirmed when the variance at the greatest staleness is larger than at 0 beyond noise (a run that "
    "diverges counts as infinitely large); waiting is when the fast workers wait a larger share in every synchronous "
    "run than in any asynchronous one. Confirmed when both are. Refuted when the variance is smaller beyond noise, or "
    "synchronous workers wait no more in any run. Otherwise inconclusive.",
    seconds=(25, 150),
)

STALENESS = (0, 1, 2, 4, 8)
BATCH, RATE = 64, 0.05
DIVERGED = 1e6
SLOW_SECONDS = 0.02
WORKERS = 3


def measure(setting: Setting) -> Measurements:
    """Loss by step for each staleness and seed, and what the parameter server saw."""
    epochs, seeds, width = setting.choose((4, 5, 4), (8, 9, 8))
    cases = [{"staleness": staleness, "seed": seed} for seed in range(seeds) for staleness in STALENESS]
    parts = run_ranks(delayed, max(1, min(setting.cores, 8)), cases, epochs, width, timeout=1200)
    updates = setting.choose(180, 600)
    server = [
        run_ranks(serve_and_work, 1 + WORKERS, way == "asynchronous", seed, updates, width)[0] | {"way": way}
        for seed in range(setting.choose(2, 5))
        for way in ("synchronous", "asynchronous")
    ]
    return {"delayed": [case for part in parts for case in part], "server": server, "workers": WORKERS}


def delayed(rank: int, world_size: int, cases: list[dict[str, Any]], epochs: int, width: int) -> list[dict[str, Any]]:
    """This rank's share of the cases, trained. Each case is trained by one rank alone."""
    return [case | {"losses": _train_delayed(epochs=epochs, width=width, **case)} for case in cases[rank::world_size]]


def _train_delayed(staleness: int, seed: int, epochs: int, width: int) -> list[float]:
    """SGD in which the gradient applied to the weights of step t was taken at the weights of step t - s."""
    source, model = _Source(seed, BATCH), _network(seed, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    current = _weights(model)
    past: deque[Tensor] = deque([current.clone()], maxlen=staleness + 1)
    losses = []
    for step in range(epochs * source.steps):
        gradient, loss = _gradient(model, past[0], *source.batch(step))
        losses.append(min(loss, DIVERGED) if loss == loss else DIVERGED)
        if losses[-1] >= DIVERGED:
            break
        _set(model, current, gradient)
        optimizer.step()
        current = _weights(model)
        past.append(current.clone())
    return losses


def serve_and_work(
    rank: int, world_size: int, asynchronous: bool, seed: int, updates: int, width: int
) -> dict[str, Any]:
    """Rank 0 serves; the others work until `updates` gradients were used. The last one is slow."""
    model = _network(seed, width)
    size = sum(parameter.numel() for parameter in model.parameters())
    if rank == 0:
        return _serve(model, size, world_size, asynchronous, updates)
    _work(model, size, rank, world_size, seed)
    return {}


def _serve(model: nn.Module, size: int, world_size: int, asynchronous: bool, updates: int) -> dict[str, Any]:
    """Hold the weights and answer each gradient with new weights, until `updates` gradients were used.

    A worker sends [gradient, loss, version of the weights it was taken at, seconds waited, seconds in all]. It gets
    [weights, version]; version -1 is the end. A synchronous step averages the workers' gradients; an asynchronous one
    applies each gradient with its share of the rate.
    """
    workers = world_size - 1
    weights, version = _weights(model), 0
    losses: list[float] = []
    staleness: list[float] = []
    clocks: dict[int, tuple[float, float]] = {}
    began = time.perf_counter()
    message = torch.zeros(size + 4)
    while len(losses) < updates:
        group = []
        for turn in range(1 if asynchronous else workers):
            sender = dist.recv(message, src=None if asynchronous else turn + 1)
            loss, taken_at, waited, lasted = message[size:].tolist()
            losses.append(min(loss, DIVERGED) if loss == loss else DIVERGED)
            staleness.append(version - taken_at)
            clocks[sender] = (waited, lasted)
            group.append((sender, message[:size].clone()))
        mean = torch.stack([gradient for _, gradient in group]).mean(0)
        weights = weights - RATE / (workers if asynchronous else 1) * mean
        version += 1
        if len(losses) < updates:
            for sender, _ in group:
                dist.send(torch.cat([weights, torch.tensor([float(version)])]), sender)
    seconds = time.perf_counter() - began
    pending = [number for number in range(1, world_size) if number not in {sender for sender, _ in group}]
    for sender in pending:
        dist.recv(message, src=sender)
    for number in range(1, world_size):
        dist.send(torch.cat([weights, torch.tensor([-1.0])]), number)
    fast = [clocks[number] for number in range(1, workers) if number in clocks]
    return {
        "losses": losses,
        "staleness": sum(staleness) / len(staleness),
        "gradients_per_second": len(losses) / seconds,
        "wait_percent": 100 * sum(waited / lasted for waited, lasted in fast) / max(1, len(fast)),
    }


def _work(model: nn.Module, size: int, rank: int, world_size: int, seed: int) -> None:
    source, workers = _Source(seed, BATCH // 2), world_size - 1
    weights, version, waited, step = _weights(model), 0.0, 0.0, 0
    message = torch.zeros(size + 1)
    began = time.perf_counter()
    while version >= 0:
        gradient, loss = _gradient(model, weights, *source.batch(step * workers + rank - 1))
        if rank == workers:
            time.sleep(SLOW_SECONDS)
        lasted = time.perf_counter() - began
        dist.send(torch.cat([gradient, torch.tensor([loss, version, waited, lasted])]), 0)
        before = time.perf_counter()
        dist.recv(message, src=0)
        waited += time.perf_counter() - before
        weights, version, step = message[:size].clone(), float(message[size]), step + 1


class _Source:
    """Batches of digits by step."""

    def __init__(self, seed: int, size: int) -> None:
        splits = digits()
        self.loader, self.order = Loader(splits.train, splits.augmentation, seed), GlobalOrder(len(splits.train), seed)
        self.size, self.steps = size, len(splits.train) // size

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        epoch, position = divmod(step, self.steps)
        return self.loader.fetch(epoch, self.order.ids(epoch, position * self.size, (position + 1) * self.size))


def _network(seed: int, width: int) -> nn.Module:
    torch.manual_seed(seed)
    return small_cnn(width=width, dropout=0.0)


def _weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def _gradient(model: nn.Module, weights: Tensor, inputs: Tensor, targets: Tensor) -> tuple[Tensor, float]:
    _set(model, weights)
    model.zero_grad()
    loss = functional.cross_entropy(model(inputs), targets)
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return torch.cat([gradient.flatten() for gradient in gradients]), float(loss.detach())


@torch.no_grad()
def _set(model: nn.Module, weights: Tensor, gradient: Tensor | None = None) -> None:
    start = 0
    for parameter in model.parameters():
        part = slice(start, start + parameter.numel())
        parameter.copy_(weights[part].view_as(parameter))
        if gradient is not None:
            parameter.grad = gradient[part].view_as(parameter).clone()
        start = part.stop


def jitter(losses: list[float]) -> float:
    """Variance of the loss about a straight line, over the last half of the steps; DIVERGED if the loss diverged."""
    if max(losses) >= DIVERGED:
        return DIVERGED
    window = np.asarray(losses[len(losses) // 2 :])
    steps = np.arange(len(window))
    slope, start = np.polyfit(steps, window, 1)
    return float(np.var(window - slope * steps - start))


def _end(losses: list[float]) -> float:
    return float(np.mean(losses[-10:]))


def judge(measurements: Measurements) -> Judgement:
    """Apply the rule of the claim."""
    delays = measurements["delayed"]
    found = {
        staleness: [jitter(case["losses"]) for case in delays if case["staleness"] == staleness]
        for staleness in sorted({case["staleness"] for case in delays})
    }
    most = max(found)
    ratio = ratio_interval(found[most], found[0])
    figures = [
        Figure(f"jitter with gradients {most} updates old, against 0", ratio.value, "times", ratio.low, ratio.high)
    ]
    figures += [Figure(f"jitter, staleness {age}", median_interval(values).value) for age, values in found.items()]
    diverged = sum(value >= DIVERGED for value in found[most])
    ends = {age: [_end(case["losses"]) for case in delays if case["staleness"] == age] for age in found}
    figures += [Figure(f"loss at the end, staleness {age}", float(np.median(values))) for age, values in ends.items()]
    figures.append(Figure(f"runs that diverged, staleness {most}", diverged, f"of {len(found[most])}"))
    runs = {
        way: [run for run in measurements["server"] if run["way"] == way] for way in ("synchronous", "asynchronous")
    }
    middle = {
        way: {name: float(np.median([run[name] for run in group])) for name in _SERVER_FIGURES}
        | {"jitter": float(np.median([jitter(run["losses"]) for run in group]))}
        for way, group in runs.items()
    }
    for way, values in middle.items():
        figures += [
            Figure(f"parameter server, {way}: {_SERVER_FIGURES[name][0]}", values[name], unit)
            for name, (_, unit) in _SERVER_FIGURES.items()
        ]
        figures.append(Figure(f"parameter server, {way}: jitter", values["jitter"]))
    waits = {way: [run["wait_percent"] for run in group] for way, group in runs.items()}
    waiting = min(waits["synchronous"]) > max(waits["asynchronous"])
    plots = [_jitter_plot(found), _loss_plot(delays, most)]
    text = (
        f"with gradients {most} updates old the loss varies {ratio} times as much as with fresh ones"
        + (f" ({diverged} of {len(found[most])} runs diverged)" if diverged else "")
        + f" and ends at {np.median(ends[most]):.2f} instead of {np.median(ends[0]):.2f}"
        + f"; beside a slow worker the others wait {middle['synchronous']['wait_percent']:.0f} % of the time with "
        f"synchronous updates, {middle['asynchronous']['wait_percent']:.0f} % with asynchronous ones"
    )
    if ratio.above_one and waiting:
        return Judgement("confirmed", text, figures, plots)
    if ratio.below_one or max(waits["synchronous"]) <= min(waits["asynchronous"]):
        return Judgement("refuted", text, figures, plots)
    return Judgement("inconclusive", text, figures, plots)


_SERVER_FIGURES = {
    "wait_percent": ("time that the fast workers wait for weights", "%"),
    "gradients_per_second": ("gradients used per second", "1/s"),
    "staleness": ("mean staleness of a gradient", "updates"),
}


def _jitter_plot(found: dict[int, list[float]]) -> Series:
    intervals = [median_interval(values) for values in found.values()]
    lines = [[getattr(interval, part) for interval in intervals] for part in ("value", "low", "high")]
    return Series(
        "Variance of the loss about its trend",
        Axis("staleness", "updates", list(found)),
        Axis("variance"),
        [Line("median over seeds", *[[value if value < DIVERGED else None for value in line] for line in lines])],
    )


def _loss_plot(delays: list[dict[str, Any]], most: int) -> Series:
    curves = {case["staleness"]: case["losses"] for case in delays if case["seed"] == delays[0]["seed"]}
    steps = max(len(losses) for losses in curves.values())
    return Series(
        f"Training loss, seed {delays[0]['seed']}",
        Axis("step", "", list(range(1, steps + 1))),
        Axis("loss"),
        [
            Line(f"staleness {age}", [min(loss, 10.0) for loss in curves[age]] + [None] * (steps - len(curves[age])))
            for age in (0, most)
            if age in curves
        ],
    )
