"""Where differences between layouts come from.

Floating-point addition is not associative: a gradient summed over two ranks, or by nn.DataParallel on its first device,
is added in another order than on one device and differs in its last bits; training lets that difference grow. Nothing
else need differ. When the order is fixed for all layouts (exact reduction) and the micro-batches are the same, the
weights are identical, to the last bit. BatchNorm's running statistics are another matter under plain DDP: each rank
computes its own, and those of rank 0 count.
"""

from __future__ import annotations

from typing import Any

import torch

from ddp_lab.claims.framework.claim import Claim, Judgement, Measurements
from ddp_lab.claims.framework.setting import Setting
from ddp_lab.claims.measuring.training import TrainedRun, train
from ddp_lab.records import Figure

claim = Claim(
    id="C19",
    title="DP and DDP results may differ from single-device results",
    claim="Under DP precision may be lost or results be inconsistent, since the main device updates the weights; DDP's "
    "processes update in step and are more consistent.",
    original="由于参数更新在主 GPU 上进行,可能存在精度损失或不一致的情况。"
    "各进程的模型参数同步更新,训练结果一致性更好。",
    sources=("003",),
    method="One experiment on single, dp and ddp layouts with the same micro-batches, with plain and with exact "
    "reduction: SHA-256 over the final weights, and the largest difference from single's parameters and buffers.",
    rule="Confirmed when plain reduction gives other bits than single on some layout and exact reduction gives the "
    "same on all: results may differ, and the order of addition is the cause. Refuted when plain reduction gives the "
    "same bits everywhere. Inconclusive when exact differs, too: then something else is the cause.",
    seconds=(22, 60),
)

SETTINGS = ("model.width=8", "epochs=1")


def measure(setting: Setting) -> Measurements:
    """Digest and differences by reduction and layout; all on the same type of device."""
    layouts = [("single", 1), ("dp", 2), ("ddp", 2), *setting.choose((), (("dp", 4), ("ddp", 4), ("ddp", 3)))]
    device = setting.device_type(max(count for _, count in layouts))
    runs: dict[str, list[dict[str, Any]]] = {}
    for reduction in ("plain", "exact"):
        reference: TrainedRun | None = None
        for layout, count in layouts:
            if reduction == "exact" and layout == "dp" and device == "cuda":
                continue  # nn.DataParallel on CUDA adds inside autograd, in an order of its own
            setting.say(f"{reduction}, {layout} x{count}")
            run = train(
                setting, "C19", "digits", layout, count, SETTINGS, ("--reduction", reduction), device, timeout=120
            )
            reference = reference or run
            entry = {"layout": layout, "count": count, "weights_sha256": run.record["weights_sha256"]}
            runs.setdefault(reduction, []).append(entry | _differences(run, reference))
    return {"device": device, "runs": runs}


def _differences(run: TrainedRun, reference: TrainedRun) -> dict[str, float]:
    ours, theirs = run.weights(), reference.weights()
    apart = {"parameters": 0.0, "buffers": 0.0}
    for name, tensor in theirs.items():
        if name.endswith("num_batches_tracked"):
            continue  # counts this rank's own forwards
        kind = "buffers" if "running_" in name else "parameters"
        apart[kind] = max(apart[kind], float((ours[name].double() - tensor.to(torch.float64)).abs().max()))
    return {f"difference_{kind}": value for kind, value in apart.items()}


def judge(measurements: Measurements) -> Judgement:
    """Apply the rule of the claim."""
    runs = measurements["runs"]
    figures, other = [], {}
    for reduction in ("plain", "exact"):
        reference = runs[reduction][0]["weights_sha256"]
        other[reduction] = [run for run in runs[reduction] if run["weights_sha256"] != reference]
        figures.append(
            Figure(f"layouts with single's bits, {reduction}", len(runs[reduction]) - 1 - len(other[reduction]))
        )
        for run in runs[reduction][1:]:
            name = f"{reduction}, {run['layout']} x{run['count']}: largest difference of"
            figures.append(Figure(f"{name} a parameter", run["difference_parameters"]))
            figures.append(Figure(f"{name} a buffer", run["difference_buffers"]))
    names = {kind: ", ".join(f"{run['layout']} x{run['count']}" for run in found) for kind, found in other.items()}
    if other["exact"]:
        return Judgement(
            "inconclusive", f"exact reduction differs, too ({names['exact']}): not the order of addition alone", figures
        )
    if not other["plain"]:
        return Judgement("refuted", "plain reduction gave single's bits on every layout", figures)
    largest = max(run["difference_parameters"] for run in other["plain"])
    return Judgement(
        "confirmed",
        f"with plain reduction {names['plain']} differ from single (parameters by up to {largest:.1g}); with exact "
        f"reduction all {len(runs['exact'])} layouts have the same bits",
        figures,
    )
