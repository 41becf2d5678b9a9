"""What a k times larger batch does to training, and what a k times larger learning rate mends.

With a fixed number of epochs a k times larger batch takes k times fewer steps. With the same rate the weights then move
k times less far; with k times the rate they move about as far in total, as long as the gradient changes little over k
small steps (Goyal et al., "Accurate, Large Minibatch SGD", arXiv:1706.02677, section 2.1). Early in training the
gradient does change, so the rate is warmed up; for large k the rule no longer holds. Here the data set is small, so the
number of steps matters most.
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
from ddp_lab.claims.framework.claim import Claim, Judgement, Measurements
from ddp_lab.claims.framework.setting import Setting
from ddp_lab.claims.measuring.ranks import run_ranks
from ddp_lab.records import Axis, Figure, Line, Series

claim = Claim(
    id="C16",
    title="When the global batch grows by k, scaling the learning rate by k keeps the result",
    claim="When the total batch grows, the learning rate usually has to grow in proportion.",
    original="learning_rate=learning_rate * world_size  # 当总 batch size 增加时，通常需要按比例增加学习率\n"
    "值得注意的是，当我们增加总 batch size 时，通常需要按比例增加学习率。这是因为更大的 batch size 意味着每次参数更新"
    "基于更多的样本，梯度估计更稳定，可以使用更大的学习率。",
    sources=("001",),
    method="A CNN on digits, batch 32·k with k = 1, 2, 4, 8, a fixed number of epochs, SGD with momentum, the rate "
    "warmed up over the first epoch: with the rate of k = 1 and with k times it, several seeds. Test loss and accuracy "
    "at the end.",
    rule="Kept means: the median over seeds of the test accuracy is at most 1 percentage point below k = 1. Confirmed "
    "when it is kept at every k with scaling. Refuted when it is not kept at k = 2 already, or when at the largest k "
    "the scaled rate ends with a higher test loss than the unscaled one on every seed. Inconclusive in between: kept "
    "up to some k.",
    seconds=(25, 200),
)

FACTORS = (1, 2, 4, 8)
BATCH, RATE, MOMENTUM = 32, 0.02, 0.9
KEPT_POINTS = 1.0


def measure(setting: Setting) -> Measurements:
    """Test loss and accuracy of each factor, way and seed."""
    epochs, seeds, width = setting.choose((8, 4, 8), (20, 7, 24))
    cases = [
        {"factor": factor, "scaled": scaled, "seed": seed}
        for seed in range(seeds)
        for factor in FACTORS
        for scaled in ((True, False) if factor > 1 else (True,))
    ]
    # The ranks only share out the cases: each trains alone.
    parts = run_ranks(observe, max(1, min(setting.cores, 8)), cases, epochs, width, timeout=1800)
    return {"epochs": epochs, "batch": BATCH, "rate": RATE, "cases": [case for part in parts for case in part]}


def observe(rank: int, world_size: int, cases: list[dict[str, Any]], epochs: int, width: int) -> list[dict[str, Any]]:
    """This rank's share of the cases, trained."""
    return [case | _train(epochs=epochs, width=width, **case) for case in cases[rank::world_size]]


def _train(factor: int, scaled: bool, seed: int, epochs: int, width: int) -> dict[str, float]:
    torch.manual_seed(seed)
    splits = digits()
    model = small_cnn(width=width)
    loader, size = Loader(splits.train, splits.augmentation, seed), BATCH * factor
    order, steps = GlobalOrder(len(splits.train), seed), len(splits.train) // size
    rate = RATE * (factor if scaled else 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=MOMENTUM)
    for epoch in range(epochs):
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = rate * min(1.0, (epoch * steps + step + 1) / steps)
            inputs, targets = loader.fetch(epoch, order.ids(epoch, step * size, (step + 1) * size))
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    return _test(model, splits)


@torch.no_grad()
def _test(model: torch.nn.Module, splits: Any) -> dict[str, float]:
    inputs, targets = splits.test.__getitems__(np.arange(len(splits.test)))
    outputs = model.eval()(inputs)
    accuracy = 100 * float((outputs.argmax(1) == targets).double().mean())
    return {"test_loss": float(functional.cross_entropy(outputs, targets)), "test_accuracy": accuracy}


def judge(measurements: Measurements) -> Judgement:
    """Apply the rule of the claim."""
    cases = measurements["cases"]
    factors = sorted({case["factor"] for case in cases})
    accuracy = {way: [_over_seeds(cases, k, way, "test_accuracy") for k in factors] for way in (True, False)}
    loss = {way: [_over_seeds(cases, k, way, "test_loss") for k in factors] for way in (True, False)}
    figures = []
    for index, k in enumerate(factors):
        for way in (True, False) if k > 1 else (True,):
            name = f"k = {k}, rate times {k}" if way else f"k = {k}, same rate"
            low, middle, high = accuracy[way][index]
            figures.append(Figure(f"test accuracy, {name}", middle, "%"))
            figures.append(Figure(f"test accuracy over seeds, {name}", f"{low:.4g} to {high:.4g}", "%"))
            figures.append(Figure(f"test loss, {name}", loss[way][index][1]))
    plots = [
        Series(
            f"{title} after {measurements['epochs']} epochs, median and range over seeds",
            Axis("global batch", "samples", [measurements["batch"] * k for k in factors]),
            Axis(title, unit, zero=unit != "%"),
            [
                Line(
                    "rate times k" if way else "same rate",
                    *[[values[part] for values in table[way]] for part in (1, 0, 2)],
                )
                for way in (True, False)
            ],
        )
        for title, unit, table in (("Test accuracy", "%", accuracy), ("Test loss", "", loss))
    ]
    base = accuracy[True][0][1]
    falls = [base - values[1] for values in accuracy[True]]
    kept = [k for k, fall in zip(factors, falls, strict=True) if fall <= KEPT_POINTS]
    scaled, same = accuracy[True][-1][1], accuracy[False][-1][1]
    text = (
        f"at k = {factors[-1]} accuracy is {scaled:.1f} % with the rate scaled and {same:.1f} % without, against "
        f"{base:.1f} % at k = 1 (test loss {loss[True][-1][1]:.2f}, "
        f"{loss[False][-1][1]:.2f} and {loss[True][0][1]:.2f})"
    )
    losses = {way: _by_seed(cases, factors[-1], way) for way in (True, False)}
    if len(factors) > 1 and all(losses[True][seed] > losses[False][seed] for seed in losses[True]):
        return Judgement("refuted", f"scaling makes it worse on every seed: {text}", figures, plots)
    if len(kept) == len(factors):
        return Judgement("confirmed", text, figures, plots)
    if len(factors) > 1 and factors[1] not in kept:
        return Judgement("refuted", f"lost at k = {factors[1]} already: {text}", figures, plots)
    first = next(k for k in factors if k not in kept)
    return Judgement("inconclusive", f"kept below k = {first} only: {text}", figures, plots)


def _by_seed(cases: list[dict[str, Any]], factor: int, scaled: bool) -> dict[int, float]:
    wanted = [case for case in cases if (case["factor"], case["scaled"]) == (factor, scaled)]
    return {case["seed"]: float("inf") if case["test_loss"] is None else case["test_loss"] for case in wanted}


def _over_seeds(cases: list[dict[str, Any]], factor: int, scaled: bool, name: str) -> tuple[float, float, float]:
    """Lowest, median, highest; k = 1 is the same either way. A loss that is not a number counts as infinite."""
    wanted = [case for case in cases if case["factor"] == factor and (case["scaled"] == scaled or factor == 1)]
    values = [float("inf") if case[name] is None else case[name] for case in wanted]
    return min(values), float(np.median(values)), max(values)
