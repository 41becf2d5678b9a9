"""What it costs not to wait for slow workers.

With synchronous updates each step is as slow as the slowest worker. With asynchronous ones a worker sends its gradient
to a server, which applies it at once, and goes on with the weights it gets back; meanwhile others have changed them, so
every gradient was computed at weights that are some updates old (its staleness). Staleness is measured in two ways. One
process simulates it by the exact definition: the gradient of step t is taken at the weights of step t - s. And it
occurs for real in a parameter server (`ddp_lab/claims/measuring/parameter_server.py`), whose mean staleness is about
the number of workers less one. The server alone gives a verdict: simulated staleness is a stand-in for it.

Jitter is the variance of the training loss about a cubic curve over the last half of the steps. The curve takes out how
the loss falls, which bends more where training is slower; a straight line would count that bend as jitter. Sources:
Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012 (Downpour SGD); Chen et al., "Revisiting Distributed
Synchronous SGD", arXiv:1604.00981 (the effect of staleness). The optimizer is plain SGD, because staleness acts like
momentum (Mitliagkas et al., "Asynchrony begets momentum", arXiv:1605.09774), and would add to it.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from torch import Tensor

from ddp_lab.claims.framework.claim import Claim, Judgement, Measurements, composed, versions
from ddp_lab.claims.framework.setting import Setting
from ddp_lab.claims.framework.statistics import ROUNDS, Interval, median_interval, ratio_interval
from ddp_lab.claims.measuring.parameter_server import (
    DIVERGED,
    Source,
    Work,
    bounded,
    flat_weights,
    gradient_at,
    network,
    serve_and_work,
    work_alone,
)
from ddp_lab.claims.measuring.ranks import run_ranks
from ddp_lab.records import COUNT, EITHER_SIGN, Axis, Figure, Line, Part, Series

claim = Claim(
    id="C17",
    title="Asynchronous updates do not wait but make the loss jitter; synchronous ones do not",
    claim="Synchronous updates wait for the slowest GPU; asynchronous ones do not wait, but the loss then jitters "
    "abnormally.",
    original="同步更新有等待，速度取决于最慢的那个GPU；异步更新没有等待，但是会出现loss异常抖动等问题，"
    "实践中，一般使用的是同步更新。",
    sources=("002",),
    method="A parameter server with three workers, synchronous and asynchronous, with the last worker slowed down by "
    "a pause at each gradient and without: how much longer the other workers wait for an answer because of that "
    "pause. The same server's jitter beside the slow worker, asynchronous against synchronous with the same seed, of "
    "the loss averaged over as many gradients as there are workers; and the same with more workers, none of them "
    "slow. The synchronous server's jitter against that of one process that trains on the same batches without any "
    "server. And, as a stand-in, one process that trains with gradients which are a number of updates old: jitter at "
    "the greatest staleness against staleness 0 with the same seed, batches and initial weights.",
    rule="Five parts. Synchronous waiting: confirmed when the interval of the added wait, as a share of the pause, "
    "lies above the share called waiting, refuted when below it. Asynchronous waiting: confirmed (it does not wait) "
    "when that interval lies below the share called none, refuted when above it. Asynchronous jitter, with "
    "three workers and with more: each confirmed when the interval of the ratio lies above 1, refuted when below 1 (a "
    "run that diverges counts as 1,000,000). Synchronous updates do not jitter: confirmed when the interval of their "
    "jitter against one process's lies below the limit, refuted when above. An interval on neither side: inconclusive. "
    "Simulated staleness is reported and decides nothing.",
    loads={
        "seeds": ROUNDS,
        "staleness": ((0, 2, 8), (0, 1, 2, 4, 8)),
        "epochs": (5, 8),
        "batch": (64, 64),
        "server_gradients": (180, 300),
        "server_gradients_without_pause": (90, 90),
        "server_batch": (32, 32),
        "workers": (3, 3),
        "more_workers": (8, 8),
        "gradients_of_more_workers": (320, 480),
        "jitter_called_none": (1.1, 1.1),
        "pause_seconds": (0.02, 0.02),
        "share_called_waiting": (0.5, 0.5),
        "share_called_none": (0.1, 0.1),
        "rate": (0.05, 0.05),
        "width": (4, 8),
    },
    history=versions(
        "2026-11-22 29eb08aa94f94228 Jitter was judged by simulated staleness alone, although the parameter server's "
        "own was measured and was lower; now each is a part. Waiting is judged by what the slow worker adds, so that "
        "what an answer takes anyway does not count. The curve that is taken out of the loss is cubic instead of "
        "straight.",
        "2026-11-25 2da6cf31612eae70 Jitter is judged by the parameter server alone, also with more workers; simulated "
        "staleness is a stand-in. That synchronous updates do not jitter is a part, judged against one process. Beyond "
        "noise is the exact sign test with Holm's procedure over all intervals that bear verdicts, and the rounds "
        "follow from it.",
    ),
    seconds=(85, 260),
    tests=5,
    headline="added wait per gradient",
)

SYNCHRONOUS, ASYNCHRONOUS = "synchronous", "asynchronous"
STAND_IN = "staleness simulated in one process"


def measure(setting: Setting) -> Measurements:
    """Loss by step for each staleness and seed, and what the parameter server saw."""
    load = claim.load(setting)
    cases = [{"staleness": age, "seed": seed} for seed in range(load.seeds) for age in load.staleness]
    parts = run_ranks(
        delayed,
        max(1, min(setting.cores, 8)),
        cases,
        *(load.epochs, load.batch, load.rate, load.width),
        timeout=1200,
    )
    ways = [(way, pause) for pause in (load.pause_seconds, 0.0) for way in (SYNCHRONOUS, ASYNCHRONOUS)]
    turns = [(seed, *way) for seed in range(load.seeds) for way in (ways if seed % 2 == 0 else reversed(ways))]
    works = [
        Work(
            asynchronous=way == ASYNCHRONOUS,
            seed=seed,
            gradients=load.server_gradients if pause else load.server_gradients_without_pause,
            slow_seconds=pause,
            batch=load.server_batch,
            rate=load.rate,
            width=load.width,
        )
        for seed, way, pause in turns
    ]
    server = run_ranks(serve_and_work, 1 + load.workers, works, timeout=1200)[0]
    more = [
        Work(asynchronous, seed, load.gradients_of_more_workers, 0.0, load.server_batch, load.rate, load.width)
        for seed in range(load.seeds)
        for asynchronous in ((False, True) if seed % 2 == 0 else (True, False))
    ]
    setting.say(f"parameter server with {load.more_workers} workers")
    found_more = run_ranks(serve_and_work, 1 + load.more_workers, more, timeout=1200)[0]
    waited_for = [work for work in works if work.slow_seconds and not work.asynchronous]
    alone = run_ranks(work_alone, 1, waited_for, load.workers, timeout=600)[0]
    return {
        "delayed": [case for part in parts for case in part],
        "server": [
            {"seed": seed, "way": way, "pause": pause} | found
            for (seed, way, pause), found in zip(turns, server, strict=True)
        ],
        "more": [
            {"seed": work.seed, "way": ASYNCHRONOUS if work.asynchronous else SYNCHRONOUS, "pause": 0.0} | found
            for work, found in zip(more, found_more, strict=True)
        ],
        "alone": [{"seed": work.seed, "losses": losses} for work, losses in zip(waited_for, alone, strict=True)],
        "workers": load.workers,
        "more_workers": load.more_workers,
        "share_called_waiting": load.share_called_waiting,
        "share_called_none": load.share_called_none,
        "jitter_called_none": load.jitter_called_none,
    }


def delayed(
    rank: int, world_size: int, cases: list[dict[str, Any]], epochs: int, batch: int, rate: float, width: int
) -> list[dict[str, Any]]:
    """This rank's share of the cases, trained. Each case is trained by one rank alone."""
    return [
        case | {"losses": _train_delayed(case["staleness"], case["seed"], epochs, batch, rate, width)}
        for case in cases[rank::world_size]
    ]


def _train_delayed(staleness: int, seed: int, epochs: int, batch: int, rate: float, width: int) -> list[float]:
    """SGD in which the gradient applied to the weights of step t was taken at the weights of step t - s."""
    source, model = Source(seed, batch), network(seed, width)
    past: deque[Tensor] = deque([flat_weights(model)], maxlen=staleness + 1)
    losses: list[float] = []
    for step in range(epochs * source.steps):
        gradient, loss = gradient_at(model, past[0], *source.batch(step))
        losses.append(bounded(loss))
        if losses[-1] >= DIVERGED:
            break
        past.append(past[-1] - rate * gradient)
    return losses


def jitter(losses: list[float]) -> float:
    """Variance of the loss about a cubic curve, over the last half of the steps; DIVERGED if the loss diverged."""
    if max(losses) >= DIVERGED:
        return DIVERGED
    window = np.asarray(losses[len(losses) // 2 :])
    steps = np.linspace(-1, 1, len(window))
    return float(np.var(window - np.polyval(np.polyfit(steps, window, 3), steps)))


def judge(measurements: Measurements) -> Judgement:
    """Apply the rule of the claim."""
    parts, figures = _judge_waiting(measurements)
    runs = {
        measurements["workers"]: (measurements["server"], True),
        measurements["more_workers"]: (measurements["more"], False),
    }
    for workers, (found, beside) in runs.items():
        part, more = _judge_jitter(found, beside, workers)
        parts.append(part)
        figures += more
    part, more = _judge_synchronous(measurements)
    stand_ins, plots = _delayed_figures(measurements["delayed"])
    return composed([*parts, part], [*figures, *more, *stand_ins], plots)


def _judge_waiting(measurements: Measurements) -> tuple[list[Part], list[Figure]]:
    runs = measurements["server"]
    names = {SYNCHRONOUS: "synchronous updates wait", ASYNCHRONOUS: "asynchronous updates do not wait"}
    limits = {SYNCHRONOUS: measurements["share_called_waiting"], ASYNCHRONOUS: measurements["share_called_none"]}
    parts, figures = [], []
    for way, name in names.items():
        beside, without = (_by_seed(runs, way, slow) for slow in (True, False))
        added = [
            (slow["wait_seconds"] - even["wait_seconds"]) / slow["pause"]
            for slow, even in zip(beside, without, strict=True)
        ]
        interval, limit = median_interval(added), limits[way]
        title = "added wait per gradient, as a share of the slow worker's pause"
        figures.append(interval.figure(title, "", name, against=limit, bounds=EITHER_SIGN))
        for key, (said, unit) in _SERVER_FIGURES.items():
            bounds = COUNT if key == "staleness" else None
            figures.append(median_interval([run[key] for run in beside]).figure(said, unit, name, bounds=bounds))
        verdict = _side(interval, limit) if way == SYNCHRONOUS else _side(interval, limit, above="refuted")
        text = f"a pause of one worker makes the others wait {interval} times as long as the pause (limit {limit:g})"
        parts.append(Part(name, verdict, text))
    return parts, figures


def _judge_jitter(runs: list[dict[str, Any]], beside: bool, workers: int) -> tuple[Part, list[Figure]]:
    """The asynchronous server's jitter against the synchronous one's; `beside` a slow worker or not."""
    found = {
        way: [jitter(_per_step(run["losses"], workers)) for run in _by_seed(runs, way, beside)]
        for way in (SYNCHRONOUS, ASYNCHRONOUS)
    }
    name = f"the loss jitters, parameter server with {workers} workers"
    ratio = ratio_interval(found[ASYNCHRONOUS], found[SYNCHRONOUS])
    figures = [ratio.figure("jitter, asynchronous against synchronous", "times", name, against=1.0)]
    figures += [median_interval(values).figure(f"jitter, {way}", "", name) for way, values in found.items()]
    ages = median_interval([run["staleness"] for run in _by_seed(runs, ASYNCHRONOUS, beside)])
    figures.append(ages.figure("mean staleness of a gradient, asynchronous", "updates", name))
    text = f"asynchronous updates make the loss vary {ratio} times as much as synchronous ones"
    return Part(name, _side(ratio, 1.0), text), figures


def _judge_synchronous(measurements: Measurements) -> tuple[Part, list[Figure]]:
    """The synchronous server's jitter against that of one process on the same batches."""
    name, workers, limit = (
        "synchronous updates do not jitter",
        measurements["workers"],
        measurements["jitter_called_none"],
    )
    alone = sorted(measurements["alone"], key=lambda run: int(run["seed"]))
    server = _by_seed(measurements["server"], SYNCHRONOUS, True)
    ratio = ratio_interval(*([jitter(_per_step(run["losses"], workers)) for run in runs] for runs in (server, alone)))
    figure = ratio.figure("jitter, synchronous against one process", "times", name, against=limit)
    text = f"the synchronous server's loss varies {ratio} times as much as that of one process (limit {limit:g})"
    return Part(name, _side(ratio, limit, above="refuted"), text), [figure]


def _delayed_figures(delays: list[dict[str, Any]]) -> tuple[list[Figure], list[Series]]:
    ages = sorted({case["staleness"] for case in delays})
    losses = {
        age: [case["losses"] for case in sorted(delays, key=lambda case: int(case["seed"])) if case["staleness"] == age]
        for age in ages
    }
    found = {age: [jitter(values) for values in runs] for age, runs in losses.items()}
    most = ages[-1]
    ratio = ratio_interval(found[most], found[0])
    figures = [ratio.figure(f"jitter with gradients {most} updates old, against 0", "times", stand_in=STAND_IN)]
    for age in ages:
        ends = median_interval([float(np.mean(values[-10:])) for values in losses[age]])
        figures.append(median_interval(found[age]).figure(f"jitter, staleness {age}", stand_in=STAND_IN))
        figures.append(ends.figure(f"loss at the end, staleness {age}", stand_in=STAND_IN, bounds=EITHER_SIGN))
    diverged, count = sum(value >= DIVERGED for value in found[most]), len(found[most])
    name = f"runs that diverged, staleness {most}"
    figures.append(Figure(name, diverged, f"of {count}", stand_in=STAND_IN, bounds=(0, count)))
    return figures, [_jitter_plot(found), _loss_plot({age: losses[age][0] for age in (0, most)})]


_SERVER_FIGURES = {
    "wait_percent": ("share of time that the fast workers wait", "%"),
    "gradients_per_second": ("gradients used per second", "1/s"),
    "staleness": ("mean staleness of a gradient", "updates"),
}


def _side(interval: Interval, limit: float, above: Any = "confirmed") -> Any:
    """The verdict for an interval above or below a limit, inconclusive where it is on neither side."""
    if interval.above(limit):
        return above
    if interval.below(limit):
        return "refuted" if above == "confirmed" else "confirmed"
    return "inconclusive"


def _by_seed(runs: list[dict[str, Any]], way: str, slow: bool) -> list[dict[str, Any]]:
    wanted = [run for run in runs if run["way"] == way and bool(run["pause"]) == slow]
    return sorted(wanted, key=lambda run: int(run["seed"]))


def _per_step(losses: list[float], workers: int) -> list[float]:
    """Losses averaged over as many gradients as there are workers, in either way of updating."""
    return [float(np.mean(losses[start : start + workers])) for start in range(0, len(losses) - workers + 1, workers)]


def _jitter_plot(found: dict[int, list[float]]) -> Series:
    intervals = [median_interval(values) for values in found.values()]
    lines = [[getattr(interval, end) for interval in intervals] for end in ("value", "low", "high")]
    return Series(
        "Variance of the loss about its trend",
        Axis("staleness", "updates", list(found)),
        Axis("variance"),
        [Line("median over seeds", *[[value if value < DIVERGED else None for value in line] for line in lines])],
    )


def _loss_plot(curves: dict[int, list[float]]) -> Series:
    steps = max(len(losses) for losses in curves.values())
    return Series(
        "Training loss of the first seed",
        Axis("step", "", list(range(1, steps + 1))),
        Axis("loss"),
        [
            Line(f"staleness {age}", [min(loss, 10.0) for loss in losses] + [None] * (steps - len(losses)))
            for age, losses in curves.items()
        ],
    )
