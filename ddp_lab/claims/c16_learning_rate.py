"""What a k times larger batch does to training, and what a k times larger learning rate mends.

An experiment can only tell whether scaling keeps the result if not scaling loses it, and if the rate of k = 1 is the
best one: where it is too small, any larger rate is better. So the rate of k = 1 is searched for first, with other seeds
and on samples that are not judged by: a row of rates, each twice the one before, which grows at the end at which the
best one lies. The optimizer is SGD without momentum, as in the source: momentum averages over about ten steps, which
are a quarter of an epoch at k = 1 and two epochs at k = 8, and that alone would make a difference. BatchNorm sees 32
samples at a time at every k, as on k workers with 32 each. See Goyal et al., arXiv:1706.02677, section 2.1.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from ddp_core.data.builders import digits
from ddp_core.data.loader import Loader
from ddp_core.model.builders import small_cnn
from ddp_core.sampler import GlobalOrder
from ddp_lab.claims.framework.claim import Claim, Judgement, Measurements, composed, versions
from ddp_lab.claims.framework.setting import Setting
from ddp_lab.claims.framework.statistics import ROUNDS, Interval, line, median_interval, ratio_interval
from ddp_lab.claims.measuring.parameter_server import DIVERGED, bounded
from ddp_lab.claims.measuring.ranks import run_ranks
from ddp_lab.records import Axis, Figure, Part, Series

claim = Claim(
    id="C16",
    title="When the global batch grows by k, scaling the learning rate by k keeps the result",
    claim="When the total batch grows, the learning rate usually has to grow in proportion.",
    original="learning_rate=learning_rate * world_size  # 当总 batch size 增加时，通常需要按比例增加学习率\n"
    "值得注意的是，当我们增加总 batch size 时，通常需要按比例增加学习率。这是因为更大的 batch size 意味着每次参数更新"
    "基于更多的样本，梯度估计更稳定，可以使用更大的学习率。",
    sources=("001",),
    method="A CNN on digits, SGD without momentum, the rate warmed up over the first epoch, equally many samples and "
    "epochs at every k. A step of batch 32 k averages the gradients of k parts with 32 samples each, as k workers "
    "would. The rate of k = 1 is the one with the least median loss on the validation half of the held-out samples, "
    "over seeds of its own; the search begins with the stated rates and doubles or halves them where the best is at "
    "the edge. Each k is then trained with that rate times 1 (none), the square root of k, k (linear) and 2 k (twice "
    "linear). A seed stands for the same initial weights and the same order of samples in all of its runs, so the "
    "runs of a seed are compared in pairs. The one metric is the loss on the test half of the held-out samples at the "
    "end.",
    rule="One part for each k, by the medians of paired ratios of the test loss. Refuted when the linear rule loses "
    "the result (linear / k = 1 above the limit) or another rule is better (linear / that one above 1), beyond noise. "
    "Confirmed when linear keeps the result (linear / k = 1 below the limit) and is better than none and than the "
    "square root (linear / that one below 1), all beyond noise, and no other rule is better beyond noise. Otherwise "
    "inconclusive, as where the search for the rate of k = 1 ended at an edge.",
    in_short="Confirmed where, beyond noise, the loss is below that of the rules 'none' and 'square root' and below "
    "1.25 times that of k = 1; refuted where it exceeds 1.25 times, or another rule is better.",
    loads={
        "seeds": ROUNDS,
        "factors": ((2, 8), (2, 4, 8)),
        "epochs": (6, 6),
        "samples_per_epoch": (1280, 1280),
        "test_share": (0.28, 0.28),
        "batch": (32, 32),
        "first_rates": ((0.04, 0.08, 0.16, 0.32), (0.04, 0.08, 0.16, 0.32)),
        "search_seeds": (5, 5),
        "first_search_seed": (1000, 1000),
        "widest_search": (12, 12),
        "width": (8, 8),
        "kept_ratio": (1.25, 1.25),
    },
    history=versions(
        "2026-11-22 7721ffcca88d6c35 The rule before asked for a median within a point of k = 1, and not whether the "
        "unscaled rate loses anything; where it loses nothing, nothing was shown. Now runs are paired by seed, both "
        "halves need an interval, and the training is short enough to tell. Momentum is gone: what it averages over "
        "does not scale with k.",
        "2026-11-25 afb39af35eed1c15 The rate of k = 1 was eight times too small, so any larger rate was better. Now "
        "it is searched for first, and the linear rule is compared with no scaling, the square root and twice as much, "
        "by one metric. Beyond noise is the exact sign test with Holm's procedure over all intervals that bear "
        "verdicts, and the rounds follow from it.",
        "2026-11-29 843a1ed5be439f3f In proportion is shown only where the square root, which is less, is worse.",
    ),
    seconds=(70, 150),
    tests=12,
)


RULES: dict[str, Callable[[int], float]] = {
    "none": lambda factor: 1.0,
    "square root": lambda factor: factor**0.5,
    "linear": lambda factor: float(factor),
    "twice linear": lambda factor: 2.0 * factor,
}
BELOW_LINEAR = ("none", "square root")
BASE = "k = 1"


def measure(setting: Setting) -> Measurements:
    """The search for the rate of k = 1, and the test loss of each factor, rule and seed."""
    load = claim.load(setting)
    names = ("epochs", "samples_per_epoch", "test_share", "batch", "width")
    fixed = {name: getattr(load, name) for name in names}

    def trained(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
        # The ranks only share out the cases: each trains alone.
        parts = run_ranks(observe, max(1, min(setting.cores, 8)), cases, fixed, timeout=1800)
        return [case for part in parts for case in part]

    def validated(rate: float) -> list[dict[str, Any]]:
        setting.say(f"k = 1 with a rate of {rate:g}")
        case = {"factor": 1, "rule": BASE, "rate": rate, "half": "validation"}
        return trained([case | {"seed": load.first_search_seed + number} for number in range(load.search_seeds)])

    searched = [case for rate in load.first_rates for case in validated(rate)]
    while (rate := _beyond(searched)) is not None and len(_median_losses(searched)) < load.widest_search:
        searched += validated(rate)
    best = _best(searched)
    setting.say(f"k = 1 is best with {best:g}; {load.seeds} seeds with each k and rule")
    scaled = [(1, BASE, 1.0), *((factor, rule, RULES[rule](factor)) for factor in load.factors for rule in RULES)]
    cases = [
        {"factor": factor, "rule": rule, "rate": best * scale, "seed": seed, "half": "test"}
        for seed in range(load.seeds)
        for factor, rule, scale in scaled
    ]
    found = {"searched": searched, "rate": best, "edge": _beyond(searched) is not None, "cases": trained(cases)}
    return fixed | {"kept_ratio": load.kept_ratio} | found


def _median_losses(searched: list[dict[str, Any]]) -> dict[float, float]:
    """The median validation loss by rate, ascending."""
    rates = sorted({case["rate"] for case in searched})
    return {rate: median(case["loss"] for case in searched if case["rate"] == rate) for rate in rates}


def _best(searched: list[dict[str, Any]]) -> float:
    losses = _median_losses(searched)
    return min(losses, key=losses.__getitem__)


def _beyond(searched: list[dict[str, Any]]) -> float | None:
    """The rate to try next, where the best is the lowest or the highest so far; None where it lies between others."""
    rates, best = list(_median_losses(searched)), _best(searched)
    return best / 2 if best == rates[0] else best * 2 if best == rates[-1] else None


def observe(rank: int, world_size: int, cases: list[dict[str, Any]], fixed: dict[str, Any]) -> list[dict[str, Any]]:
    """This rank's share of the cases, trained."""
    return [case | {"loss": _train(case, **fixed)} for case in cases[rank::world_size]]


def _train(
    case: dict[str, Any], epochs: int, samples_per_epoch: int, test_share: float, batch: int, width: int
) -> float:
    """The loss on a half of the held-out samples after training with this rate."""
    factor, rate, seed = (case[name] for name in ("factor", "rate", "seed"))
    torch.manual_seed(seed)
    splits: Any = digits(augment=False, test_share=test_share)
    model = small_cnn(width=width, dropout=0.0)
    loader, order = Loader(splits.train, splits.augmentation, seed), GlobalOrder(len(splits.train), seed)
    steps = samples_per_epoch // (batch * factor)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for epoch in range(epochs):
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = rate * min(1.0, (epoch * steps + step + 1) / steps)
            optimizer.zero_grad()
            for part in range(step * factor, (step + 1) * factor):
                inputs, targets = loader.fetch(epoch, order.ids(epoch, part * batch, (part + 1) * batch))
                (functional.cross_entropy(model(inputs), targets) / factor).backward()
            optimizer.step()
    # Validation has every second held-out sample from the first on, the test the others.
    inputs, targets = splits.test.__getitems__(np.arange(int(case["half"] == "test"), len(splits.test), 2))
    with torch.no_grad():
        return bounded(float(functional.cross_entropy(model.eval()(inputs), targets)))


def judge(measurements: Measurements) -> Judgement:
    """Apply the rule of the claim."""
    cases, limit, parts = measurements["cases"], measurements["kept_ratio"], []
    factors = sorted({case["factor"] for case in cases} - {1})
    losses = {factor: {rule: _by_seed(cases, factor, rule) for rule in RULES} for factor in factors}
    base = _by_seed(cases, 1, BASE)
    figures = [Figure("rate of k = 1, searched for", measurements["rate"], bounds=(1e-6, 100))]
    for rate, loss in _median_losses(measurements["searched"]).items():
        figures.append(Figure(f"validation loss of k = 1, rate {rate:g}", loss, bounds=(0, DIVERGED)))
    figures.append(median_interval(base).figure("test loss, k = 1"))
    for factor, found in losses.items():
        name = f"k = {factor}"
        kept = ratio_interval(found["linear"], base)
        others = {rule: ratio_interval(found["linear"], found[rule]) for rule in RULES if rule != "linear"}
        figures.append(kept.figure("test loss, linear / k = 1", "x", name, against=limit))
        for rule, ratio in others.items():
            figures.append(ratio.figure(f"test loss, linear / {rule}", "x", name, against=1.0))
        figures += [median_interval(values).figure(f"test loss, {rule}", "", name) for rule, values in found.items()]
        parts.append(_part(name, kept, others, limit, measurements["edge"]))
    lines = [line(rule, map(median_interval, [base, *(losses[factor][rule] for factor in factors)])) for rule in RULES]
    axis = Axis("global batch", "samples", [float(measurements["batch"] * factor) for factor in (1, *factors)])
    title = f"Test loss after {measurements['epochs']} epochs, by how the rate grows with the batch"
    return composed(parts, figures, [Series(title, axis, Axis("test loss"), lines)])


def _part(name: str, kept: Interval, others: dict[str, Interval], limit: float, edge: bool) -> Part:
    text = f"test loss with the linear rule is {kept} times that of k = 1 (limit {limit:g})"
    text += "".join(f"; / {rule}: {ratio}" for rule, ratio in others.items())
    if edge:
        return Part(name, "inconclusive", f"the search for the rate of k = 1 ended at an edge: {text}")
    if kept.above(limit):
        return Part(name, "refuted", f"the linear rule loses the result: {text}")
    if better := [rule for rule, ratio in others.items() if ratio.above()]:
        return Part(name, "refuted", f"{' and '.join(better)} is better than the linear rule: {text}")
    open_ends = [] if kept.below(limit) else [f"not shown to keep the result, {kept} times the loss of k = 1"]
    open_ends += [
        f"not shown to beat the rule {rule!r}: the loss is {others[rule]} times that rule's"
        for rule in BELOW_LINEAR
        if not others[rule].below()
    ]
    if not open_ends:
        return Part(name, "confirmed", text)
    return Part(name, "inconclusive", f"{' and '.join(open_ends)}; {text}")


def _by_seed(cases: list[dict[str, Any]], factor: int, rule: str) -> list[float]:
    """The losses by ascending seed, so that two lists pair the runs of each seed."""
    wanted = [case for case in cases if (case["factor"], case["rule"]) == (factor, rule)]
    return [case["loss"] for case in sorted(wanted, key=lambda case: int(case["seed"]))]
