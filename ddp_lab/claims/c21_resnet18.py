"""Source 003's program: ResNet-18 on random 224x224 images under nn.DataParallel and under DDP.

The source's numbers are for GPUs: a batch of 256 such images needs more than 5 GB for its activations and, on CPU,
minutes for a step. With a small batch, a CPU can show that the program runs and learns; it cannot show how fast GPUs
are.
"""

from __future__ import annotations

import math
from typing import Any

from ddp_core.errors import UserError
from ddp_lab.claims.framework.claim import Claim, Judgement, Measurements
from ddp_lab.claims.framework.setting import Setting
from ddp_lab.claims.measuring.training import train
from ddp_lab.records import Figure

claim = Claim(
    id="C21",
    title="A ResNet-18 on 224x224 inputs, batch 256, runs under DP and DDP",
    claim="A ResNet-18 on 224x224 inputs with batch 256 and SGD (lr 0.02, momentum 0.9, nesterov, weight decay 1e-4) "
    "trains under nn.DataParallel and under DistributedDataParallel.",
    original="BATCH_SIZE = 256\nEPOCHS = 5\nNUM_CLASSES = 10\nINPUT_SHAPE = (3, 224, 224)  # ResNet-18 的输入尺寸\n"
    "optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9, weight_decay=0.0001, nesterov=True\n)",
    sources=("003",),
    method="`ddp train resnet18_synthetic` on two devices under dp and ddp: images per second, first and last loss, "
    "peak memory. With two CUDA devices at batch 256; on CPU at 224x224 with a smaller batch, which the verdict names, "
    "and few steps.",
    rule="Confirmed when both layouts complete with finite losses, naming the device and the batch where it is not 256 "
    "on CUDA. Refuted when one fails.",
    seconds=(25, 90),
)

ASKED_BATCH = 256


def measure(setting: Setting) -> Measurements:
    """What the run of each layout reports."""
    device = setting.device_type(2)
    if device == "cuda":
        batch, steps = ASKED_BATCH, setting.choose(30, 500)
        settings = [f"max_steps={steps}"]
    else:
        batch, steps = setting.choose((4, 4), (16, 8))
        settings = [f"max_steps={steps}", f"global_batch_size={batch}", "data.samples=64", "data.pool=16"]
    cases = {layout: _run(setting, layout, device, settings) for layout in ("dp", "ddp")}
    return {"device": device, "global_batch_size": batch, "image_size": 224, "count": 2, "cases": cases}


def _run(setting: Setting, layout: str, device: str, settings: list[str]) -> dict[str, Any]:
    try:
        run = train(
            setting, "C21", "resnet18_synthetic", layout, 2, settings, ("--log-every", "1"), device, timeout=600
        )
    except UserError as error:
        return {"completed": False, "said": str(error)}
    result = run.record["result"]
    # The end of an epoch writes its last step once more.
    losses = {line["step"]: line["loss"] for line in run.metrics("step")}
    return {
        "completed": run.record["status"] == "completed",
        "losses": [losses[step] for step in sorted(losses)],
        "images_per_second": result["samples_per_second"],
        "peak_memory_bytes": result["peak_memory_bytes"],
    }


def judge(measurements: Measurements) -> Judgement:
    """Apply the rule of the claim."""
    cases, figures, failed = measurements["cases"], [], []
    for layout, case in cases.items():
        losses = case.get("losses") or []
        finite = bool(losses) and all(loss is not None and math.isfinite(loss) for loss in losses)
        if not case["completed"] or not finite:
            failed.append(f"{layout}: {case.get('said') or 'the loss is not finite'}")
            continue
        memory = "a process" if measurements["device"] == "cpu" else "a device"
        figures += [
            Figure(f"{layout}: images per second", case["images_per_second"], "1/s"),
            Figure(f"{layout}: last loss", losses[-1]),
            Figure(f"{layout}: peak memory of {memory}", case["peak_memory_bytes"] / 2**20, "MiB"),
        ]
    if failed:
        return Judgement("refuted", "; ".join(failed), figures)
    batch, device, count = (measurements[name] for name in ("global_batch_size", "device", "count"))
    speeds = ", ".join(f"{layout} {case['images_per_second']:.3g} images/s" for layout, case in cases.items())
    smaller = "" if batch == ASKED_BATCH else f", with batch {batch} instead of {ASKED_BATCH}"
    where = f"{count} CUDA devices" if device == "cuda" else f"CPU, {count} ranks or replicas"
    return Judgement("confirmed", f"runs on {where} at 224x224{smaller}: {speeds}", figures)
