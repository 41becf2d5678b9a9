"""Whether data-parallel training learns what single-process training does.

The noise in the points moves w and b by about 0.1 / sqrt(10,000) = 0.001; the loss cannot fall below its variance,
0.01. With W workers there are W times fewer steps; a learning rate that is W times larger makes up for that.
"""

from __future__ import annotations

from ddp_lab.claims.framework.claim import Claim, Judgement, Measurements, versions
from ddp_lab.claims.framework.setting import Setting
from ddp_lab.claims.measuring.training import train
from ddp_lab.records import Bounds, Figure

claim = Claim(
    id="C01",
    title="Single-process and DDP training find the same line",
    claim="Single-process and DDP training of y = 2x + 3 + 0.1 noise both end near w = 2 and b = 3, with the loss near "
    "the noise floor of 0.01.",
    original="单卡训练最终参数接近真实值（weight≈2，bias≈3），损失稳定在 0.01 左右"
    "（对应数据集的噪声水平 0.1²=0.01，符合预期）。\n"
    "单卡训练和 DDP 训练最终都能学到接近真实值（w=2, b=3）的参数",
    sources=("001",),
    method="`ddp train linear_regression` on single, dp and ddp: 10,000 points, 32 per worker, SGD with 0.01 x "
    "world_size, 10 epochs, plain reduction; for each seed the same points everywhere. dp is on CPU this project's own "
    "threads; the sentence speaks of single and ddp.",
    rule="Confirmed when in every run w is within the tolerance of 2, b within the tolerance of 3, and the last "
    "epoch's mean loss is at most the limit. Refuted when a run that ended well misses one of these.",
    in_short="Confirmed where every run ends within 0.02 of w = 2 and b = 3, with a loss of at most 0.0115.",
    loads={
        "layouts": (
            (("single", 1), ("dp", 2), ("ddp", 2)),
            (("single", 1), ("dp", 2), ("ddp", 2), ("ddp", 4)),
        ),
        "seeds": ((0,), (0, 1, 2)),
        "tolerance": (0.02, 0.02),
        "limit_of_loss": (0.0115, 0.0115),
    },
    history=versions(
        "2026-11-22 a5f10f092f5456d4 The rule is the one before with its limits among the loads; several seeds of "
        "points are new."
    ),
    seconds=(15, 140),
)


W, B = 2.0, 3.0
BOUNDS: dict[str, Bounds] = {"w": (1.0, 3.0), "b": (2.0, 4.0), "loss": (0.0095, 1.0)}
"""What a trained line can have: 0.0095 is the variance of the noise in 10,000 points less three standard errors."""


def measure(setting: Setting) -> Measurements:
    """Train on each layout; returns the weights and the loss of each run."""
    load, runs = claim.load(setting), []
    for seed in load.seeds:
        for kind, count in load.layouts:
            setting.say(f"training on {kind} x {count}, seed {seed}")
            settings = [f"global_batch_size={32 * count}", "micro_batch=32", f"seed={seed}", f"data.seed={seed}"]
            run = train(setting, "C01", "linear_regression", kind, count, settings, ["--reduction", "plain"])
            w, b = (float(run.weights()[name]) for name in ("weight", "bias"))
            found = {"w": w, "b": b, "loss": run.record["result"]["train_loss"]}
            runs.append({"layout": f"{kind} x {count}", "seed": seed} | found)
    return {"runs": runs, "tolerance": load.tolerance, "limit_of_loss": load.limit_of_loss}


def judge(measurements: Measurements) -> Judgement:
    """Apply the rule of the claim."""
    figures, misses, runs = [], [], measurements["runs"]
    tolerance, limit = measurements["tolerance"], measurements["limit_of_loss"]
    for run in runs:
        where = f"{run['layout']}, seed {run['seed']}"
        figures += [Figure(f"{name}, {where}", run[name], bounds=bounds) for name, bounds in BOUNDS.items()]
        reached = (abs(run["w"] - W) <= tolerance, abs(run["b"] - B) <= tolerance, run["loss"] <= limit)
        checks = zip(BOUNDS, reached, strict=True)
        misses += [f"{name} = {run[name]:.4g} on {where}" for name, well in checks if not well]
    if misses:
        return Judgement("refuted", "; ".join(misses), figures)
    layouts = ", ".join(dict.fromkeys(run["layout"] for run in runs))
    worst = max(max(abs(run["w"] - W), abs(run["b"] - B)) for run in runs)
    said = f"on {layouts} ({len(runs)} runs) w and b are within {worst:.4f} of 2 and 3, and the loss is at most "
    return Judgement("confirmed", f"{said}{max(run['loss'] for run in runs):.4f}", figures)
