"""What a k times larger batch does to training, and what a k times larger learning rate mends.

With a fixed number of epochs a k times larger batch takes k times fewer steps. With the same rate the weights then move
k times less far: about as far as k = 1 moves them in a k-th of the epochs. With k times the rate they move about as far
in total, as long as the gradient changes little over k small steps (Goyal et al., "Accurate, Large Minibatch SGD",
arXiv:1706.02677, section 2.1). Early in training the gradient does change, so the rate is warmed up; for large k the
rule no longer holds.

An experiment can only tell whether scaling keeps the result if not scaling loses it. So the training is short: k = 1
needs all of its epochs, and a k-th of them is too few. The rate of k = 1 is small, so that eight times as much is still
a rate with which the network can be trained. The optimizer is SGD without momentum, as in the source: momentum averages
over about ten steps, which are a quarter of an epoch at k = 1 and two epochs at k = 8, and that alone would make a
difference. BatchNorm sees 32 samples at a time at every k, as on k workers with 32 each.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn import functional

from ddp_core.data.builders import digits
from ddp_core.data.loader import Loader
from ddp_core.model.builders import small_cnn
from ddp_core.sampler import GlobalOrder
from ddp_lab.claims.framework.claim import Claim, Judgement, Measurements, RuleVersion, composed
from ddp_lab.claims.framework.setting import Setting
from ddp_lab.claims.framework.statistics import Interval, difference_interval, median_interval
from ddp_lab.claims.measuring.ranks import run_ranks
from ddp_lab.records import Axis, Line, Part, Series

claim = Claim(
    id="C16",
    title="When the global batch grows by k, scaling the learning rate by k keeps the result",
    claim="When the total batch grows, the learning rate usually has to grow in proportion.",
    original="learning_rate=learning_rate * world_size  # 当总 batch size 增加时，通常需要按比例增加学习率\n"
    "值得注意的是，当我们增加总 batch size 时，通常需要按比例增加学习率。这是因为更大的 batch size 意味着每次参数更新"
    "基于更多的样本，梯度估计更稳定，可以使用更大的学习率。",
    sources=("001",),
    method="A CNN on digits, SGD without momentum, the rate warmed up over the first epoch, equally many samples and "
    "epochs at every k. A step of batch 32·k averages the gradients of k parts with 32 samples each, as k workers "
    "would. Each k is trained with the rate of k = 1 and with k times that rate. A seed stands for the same initial "
    "weights and the same order of samples in all of its runs, so the runs of a seed are compared in pairs. Compared: "
    "accuracy and loss on held-out samples at the end.",
    rule="One part for each k. Confirmed when scaling keeps the result (the interval of the paired difference of "
    "accuracy, scaled minus k = 1, lies above -1 percentage point) and not scaling is worse (the interval of the "
    "paired difference of test loss, scaled minus not scaled, lies below 0). Refuted when the first interval lies "
    "below -1 point, or the second above 0. Otherwise inconclusive: where not scaling is no worse, this training "
    "cannot tell what scaling is good for.",
    loads={
        "seeds": (8, 15),
        "factors": ((2, 8), (2, 4, 8)),
        "epochs": (6, 6),
        "samples_per_epoch": (1280, 1280),
        "test_share": (0.28, 0.28),
        "batch": (32, 32),
        "rate": (0.02, 0.02),
        "width": (8, 8),
        "kept_points": (1.0, 1.0),
    },
    history=(
        RuleVersion(
            "2026-11-22",
            "The rule before asked for a median within a point of k = 1, and not whether the unscaled rate loses "
            "anything; where it loses nothing, nothing was shown. Now runs are paired by seed, both halves need an "
            "interval, and the training is short enough to tell. Momentum is gone: what it averages over does not "
            "scale with k.",
            "7721ffcca88d6c35",
        ),
    ),
    seconds=(35, 50),
    headline="accuracy, rate times k minus",
)

DIVERGED = 1e6
"""Stands for a test loss that is not a number, or larger than this."""


def measure(setting: Setting) -> Measurements:
    """Test loss and accuracy of each factor, way and seed."""
    load = claim.load(setting)
    cases = [
        {"factor": factor, "scaled": scaled, "seed": seed}
        for seed in range(load.seeds)
        for factor in (1, *load.factors)
        for scaled in ((True, False) if factor > 1 else (True,))
    ]
    fixed = {name: getattr(load, name) for name in ("epochs", "samples_per_epoch", "test_share", "batch", "rate")}
    # The ranks only share out the cases: each trains alone.
    parts = run_ranks(observe, max(1, min(setting.cores, 8)), cases, fixed | {"width": load.width}, timeout=1800)
    return fixed | {"kept_points": load.kept_points, "cases": [case for part in parts for case in part]}


def observe(rank: int, world_size: int, cases: list[dict[str, Any]], fixed: dict[str, Any]) -> list[dict[str, Any]]:
    """This rank's share of the cases, trained."""
    return [case | _train(**case, **fixed) for case in cases[rank::world_size]]


def _train(
    factor: int,
    scaled: bool,
    seed: int,
    epochs: int,
    samples_per_epoch: int,
    test_share: float,
    batch: int,
    rate: float,
    width: int,
) -> dict[str, float]:
    torch.manual_seed(seed)
    splits = digits(augment=False, test_share=test_share)
    model = small_cnn(width=width, dropout=0.0)
    loader, order = Loader(splits.train, splits.augmentation, seed), GlobalOrder(len(splits.train), seed)
    highest, steps = rate * (factor if scaled else 1), samples_per_epoch // (batch * factor)
    optimizer = torch.optim.SGD(model.parameters(), lr=highest)
    for epoch in range(epochs):
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = highest * min(1.0, (epoch * steps + step + 1) / steps)
            optimizer.zero_grad()
            for part in range(step * factor, (step + 1) * factor):
                inputs, targets = loader.fetch(epoch, order.ids(epoch, part * batch, (part + 1) * batch))
                (functional.cross_entropy(model(inputs), targets) / factor).backward()
            optimizer.step()
    return _test(model, splits)


@torch.no_grad()
def _test(model: torch.nn.Module, splits: Any) -> dict[str, float]:
    inputs, targets = splits.test.__getitems__(np.arange(len(splits.test)))
    outputs = model.eval()(inputs)
    accuracy = 100 * float((outputs.argmax(1) == targets).double().mean())
    loss = float(functional.cross_entropy(outputs, targets))
    return {"test_loss": min(loss, DIVERGED) if loss == loss else DIVERGED, "test_accuracy": accuracy}


def judge(measurements: Measurements) -> Judgement:
    """Apply the rule of the claim."""
    cases, points = measurements["cases"], measurements["kept_points"]
    base = _by_seed(cases, 1, True, "test_accuracy")
    factors = sorted({case["factor"] for case in cases} - {1})
    parts = []
    figures = [
        median_interval(base).figure("test accuracy, k = 1", "%"),
        median_interval(_by_seed(cases, 1, True, "test_loss")).figure("test loss, k = 1"),
    ]
    for factor in factors:
        name = f"k = {factor}"
        accuracy, loss = (
            {way: _by_seed(cases, factor, way, kind) for way in (True, False)}
            for kind in ("test_accuracy", "test_loss")
        )
        kept = difference_interval(accuracy[True], base)
        lost_without = difference_interval(accuracy[False], base)
        worse = difference_interval(loss[True], loss[False])
        figures += [
            kept.figure("accuracy, rate times k minus k = 1", "points", name),
            lost_without.figure("accuracy, same rate minus k = 1", "points", name),
            worse.figure("test loss, rate times k minus same rate", "", name),
        ]
        for way, said in ((True, "rate times k"), (False, "same rate")):
            figures.append(median_interval(accuracy[way]).figure(f"test accuracy, {said}", "%", name))
            figures.append(median_interval(loss[way]).figure(f"test loss, {said}", "", name))
        parts.append(_part(name, kept, worse, points))
    return composed(parts, figures, _plots(measurements, factors))


def _part(name: str, kept: Interval, worse: Interval, points: float) -> Part:
    text = (
        f"accuracy with k times the rate minus k = 1: {kept} points; test loss with k times the rate minus with the "
        f"same rate: {worse}"
    )
    if kept.above(-points) and worse.below(0):
        return Part(name, "confirmed", text)
    if kept.below(-points):
        return Part(name, "refuted", f"scaling loses the result: {text}")
    if worse.above(0):
        return Part(name, "refuted", f"scaling is worse than not scaling: {text}")
    open_ends = [] if kept.above(-points) else ["that scaling keeps the result was not shown"]
    open_ends += [] if worse.below(0) else ["that not scaling is worse was not shown"]
    return Part(name, "inconclusive", f"{' and '.join(open_ends)}: {text}")


def _by_seed(cases: list[dict[str, Any]], factor: int, scaled: bool, name: str) -> list[float]:
    """The values by ascending seed, so that two lists pair the runs of each seed."""
    wanted = [case for case in cases if (case["factor"], case["scaled"]) == (factor, scaled)]
    return [case[name] for case in sorted(wanted, key=lambda case: int(case["seed"]))]


def _plots(measurements: Measurements, factors: list[int]) -> list[Series]:
    cases, plots = measurements["cases"], []
    for title, unit, name in (("Test accuracy", "%", "test_accuracy"), ("Test loss", "", "test_loss")):
        lines = []
        for said, way in (("rate times k", True), ("same rate", False)):
            found = [_by_seed(cases, factor, way or factor == 1, name) for factor in (1, *factors)]
            intervals = [median_interval(values) for values in found]
            lines.append(Line(said, *[[getattr(each, end) for each in intervals] for end in ("value", "low", "high")]))
        batches: list[float | str | None] = [float(measurements["batch"] * factor) for factor in (1, *factors)]
        axis = Axis("global batch", "samples", batches)
        plots.append(
            Series(f"{title} after {measurements['epochs']} epochs", axis, Axis(title, unit, zero=unit != "%"), lines)
        )
    return plots
