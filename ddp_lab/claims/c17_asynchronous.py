"""What it costs not to wait for slow workers.

With asynchronous updates every gradient was computed at weights that are some updates old (its staleness). One process
simulates it by the exact definition, the gradient of step t taken at the weights of step t - s; it occurs for real in a
parameter server (`ddp_lab/claims/measuring/parameter_server.py`), which alone gives a verdict.

Jitter is the variance of the training loss about a cubic curve over the last half of the steps: a straight line would
count how the loss bends as jitter. The optimizer is plain SGD, because staleness acts like momentum (Mitliagkas et al.,
arXiv:1605.09774). See also Dean et al., NIPS 2012, and Chen et al., arXiv:1604.00981.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from torch import Tensor

from ddp_lab.claims.framework.claim import Claim, Judgement, Measurements, composed, versions
from ddp_lab.claims.framework.setting import Setting
from ddp_lab.claims.framework.statistics import ROUNDS, line, median_interval, ratio_interval
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
    title="Synchronous updates wait; asynchronous ones do not, but make the loss jitter",
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
    "run that diverges counts as 1,000,000). Synchronous updates do not jitter: confirmed when every seed has just the "
    "jitter of one process, or when the interval of the ratio of the two lies below the limit; refuted when above. An "
    "interval on neither side: inconclusive. Simulated staleness is reported and decides nothing.",
    in_short="Confirmed where the added wait is above 0.5 of a worker's pause with synchronous updates, and below 0.1 "
    "with asynchronous ones; and where asynchronous losses vary more; all beyond noise.",
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
        "2026-11-29 dc412d2c26ed9334 Jitter that is that of one process to the bit is no chance, so it has no p.",
    ),
    seconds=(85, 260),
    tests=5,
)


SYNCHRONOUS, ASYNCHRONOUS = "synchronous", "asynchronous"
STAND_IN = "staleness simulated in one process"


def measure(setting: Setting) -> Measurements:
    """Loss by step for each staleness and seed, and what the parameter server saw."""
    load = claim.load(setting)
    seeds, pause = range(load.seeds), load.pause_seconds
    cases = [{"staleness": age, "seed": seed} for seed in seeds for age in load.staleness]
    how = (load.epochs, load.batch, load.rate, load.width)
    parts = run_ranks(delayed, max(1, min(setting.cores, 8)), cases, *how, timeout=1200)

    def works(ways: list[tuple[bool, float]], gradients: dict[float, int]) -> list[Work]:
        fixed = {"batch": load.server_batch, "rate": load.rate, "width": load.width}
        return [
            Work(asynchronous, seed, gradients[slow], slow, **fixed)
            for seed in seeds
            for asynchronous, slow in (ways if seed % 2 == 0 else reversed(ways))
        ]

    def served(workers: int, works: list[Work]) -> list[dict[str, Any]]:
        setting.say(f"parameter server with {workers} workers")
        found = run_ranks(serve_and_work, 1 + workers, works, timeout=1200)[0]
        return [
            {"seed": work.seed, "way": ASYNCHRONOUS if work.asynchronous else SYNCHRONOUS, "pause": work.slow_seconds}
            | seen
            for work, seen in zip(works, found, strict=True)
        ]

    few = works(
        [(False, pause), (True, pause), (False, 0.0), (True, 0.0)],
        {pause: load.server_gradients, 0.0: load.server_gradients_without_pause},
    )
    many = works([(False, 0.0), (True, 0.0)], {0.0: load.gradients_of_more_workers})
    waited_for = [work for work in few if work.slow_seconds and not work.asynchronous]
    alone = run_ranks(work_alone, 1, waited_for, load.workers, timeout=600)[0]
    names = ("workers", "more_workers", "share_called_waiting", "share_called_none", "jitter_called_none")
    return {
        "delayed": [case for part in parts for case in part],
        "server": served(load.workers, few),
        "more": served(load.more_workers, many),
        "alone": [{"seed": work.seed, "losses": losses} for work, losses in zip(waited_for, alone, strict=True)],
        **{name: getattr(load, name) for name in names},
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
    found = [
        _judge_waiting(measurements, SYNCHRONOUS, measurements["share_called_waiting"]),
        _judge_waiting(measurements, ASYNCHRONOUS, measurements["share_called_none"]),
        _judge_jitter(measurements["server"], True, measurements["workers"]),
        _judge_jitter(measurements["more"], False, measurements["more_workers"]),
        _judge_synchronous(measurements),
    ]
    stand_ins, plots = _delayed_figures(measurements["delayed"])
    figures = [figure for _, figures in found for figure in figures]
    return composed([part for part, _ in found], [*figures, *stand_ins], plots)


def _judge_waiting(measurements: Measurements, way: str, limit: float) -> tuple[Part, list[Figure]]:
    """What the slow worker's pause adds to the others' wait."""
    name, above, below = f"{way} updates do not wait", "refuted", "confirmed"
    if way == SYNCHRONOUS:
        name, above, below = f"{way} updates wait", "confirmed", "refuted"
    beside, without = (_by_seed(measurements["server"], way, slow) for slow in (True, False))
    pairs = zip(beside, without, strict=True)
    added = median_interval([(slow["wait_seconds"] - even["wait_seconds"]) / slow["pause"] for slow, even in pairs])
    title = "added wait per gradient, as a share of the slow worker's pause"
    figures = [added.figure(title, "", name, against=limit, bounds=EITHER_SIGN)]
    for key, said, unit, bounds in (
        ("wait_percent", "share of time that the fast workers wait", "%", None),
        ("gradients_per_second", "gradients used per second", "1/s", None),
        ("staleness", "mean staleness of a gradient", "updates", COUNT),
    ):
        figures.append(median_interval([run[key] for run in beside]).figure(said, unit, name, bounds=bounds))
    text = f"a pause of one worker makes the others wait {added} times its length (the rule's limit: {limit:g})"
    return Part(name, added.side(limit, above, below), text), figures  # type: ignore[arg-type]


def _judge_jitter(runs: list[dict[str, Any]], beside: bool, workers: int) -> tuple[Part, list[Figure]]:
    """The asynchronous server's jitter against the synchronous one's; `beside` a slow worker or not."""
    by_way = {way: _by_seed(runs, way, beside) for way in (SYNCHRONOUS, ASYNCHRONOUS)}
    found = {way: _jitters(runs, workers) for way, runs in by_way.items()}
    name = f"the loss jitters, parameter server with {workers} workers"
    ratio = ratio_interval(found[ASYNCHRONOUS], found[SYNCHRONOUS])
    figures = [ratio.figure("jitter, asynchronous against synchronous", "times", name, against=1.0)]
    figures += [median_interval(values).figure(f"jitter, {way}", "", name) for way, values in found.items()]
    ages = median_interval([run["staleness"] for run in by_way[ASYNCHRONOUS]])
    figures.append(ages.figure("mean staleness of a gradient, asynchronous", "updates", name))
    text = f"asynchronous updates make the loss vary {ratio} times as much as synchronous ones"
    return Part(name, ratio.side(), text), figures


def _judge_synchronous(measurements: Measurements) -> tuple[Part, list[Figure]]:
    """The synchronous server's jitter against that of one process on the same batches."""
    name, limit = "synchronous updates jitter no more than one process", measurements["jitter_called_none"]
    alone = sorted(measurements["alone"], key=lambda run: int(run["seed"]))
    server = _by_seed(measurements["server"], SYNCHRONOUS, True)
    ratio = ratio_interval(*(_jitters(runs, measurements["workers"]) for runs in (server, alone)))
    title = "jitter, synchronous against one process"
    if set(ratio.values) == {1.0}:  # no chance is at work, so no test and no p
        same = f"the synchronous server's loss varies just as that of one process with each of {ratio.count} seeds"
        return Part(name, "confirmed", same), [ratio.figure(title, "times", name)]
    figure = ratio.figure(title, "times", name, against=limit)
    text = f"the synchronous server's loss varies {ratio} times as much as that of one process (limit {limit:g})"
    return Part(name, ratio.side(limit, "refuted", "confirmed"), text), [figure]


def _delayed_figures(delays: list[dict[str, Any]]) -> tuple[list[Figure], list[Series]]:
    losses: dict[int, list[list[float]]] = {}
    for case in sorted(delays, key=lambda case: (case["staleness"], case["seed"])):
        losses.setdefault(case["staleness"], []).append(case["losses"])
    found = {age: [jitter(values) for values in runs] for age, runs in losses.items()}
    most = max(losses)
    ratio = ratio_interval(found[most], found[0])
    figures = [ratio.figure(f"jitter with gradients {most} updates old, against 0", "times", stand_in=STAND_IN)]
    for age, runs in losses.items():
        ends = median_interval([float(np.mean(values[-10:])) for values in runs])
        figures.append(median_interval(found[age]).figure(f"jitter, staleness {age}", stand_in=STAND_IN))
        figures.append(ends.figure(f"loss at the end, staleness {age}", stand_in=STAND_IN, bounds=EITHER_SIGN))
    diverged, count = sum(value >= DIVERGED for value in found[most]), len(found[most])
    name = f"runs that diverged, staleness {most}"
    figures.append(Figure(name, diverged, f"of {count}", stand_in=STAND_IN, bounds=(0, count)))
    return figures, [_jitter_plot(found), _loss_plot({age: losses[age][0] for age in (0, most)})]


def _by_seed(runs: list[dict[str, Any]], way: str, slow: bool) -> list[dict[str, Any]]:
    wanted = [run for run in runs if run["way"] == way and bool(run["pause"]) == slow]
    return sorted(wanted, key=lambda run: int(run["seed"]))


def _jitters(runs: list[dict[str, Any]], workers: int) -> list[float]:
    """The jitter of each run, of losses averaged over as many gradients as there are workers."""
    starts = [range(0, len(run["losses"]) - workers + 1, workers) for run in runs]
    return [
        jitter([float(np.mean(run["losses"][start : start + workers])) for start in of_run])
        for run, of_run in zip(runs, starts, strict=True)
    ]


def _jitter_plot(found: dict[int, list[float]]) -> Series:
    drawn = line("median over seeds", map(median_interval, found.values()))
    ends = [[None if each == DIVERGED else each for each in end or ()] for end in (drawn.values, drawn.low, drawn.high)]
    axis = Axis("staleness", "updates", list(found))
    return Series("Variance of the loss about its trend", axis, Axis("variance"), [Line(drawn.name, *ends)])


def _loss_plot(curves: dict[int, list[float]]) -> Series:
    steps = max(len(losses) for losses in curves.values())
    lines = [
        Line(f"staleness {age}", [min(loss, 10.0) for loss in losses] + [None] * (steps - len(losses)))
        for age, losses in curves.items()
    ]
    return Series("Training loss of the first seed", Axis("step", "", list(range(1, steps + 1))), Axis("loss"), lines)
