"""When data parallelism is enough: as long as one device holds a whole replica and all that its training needs.

Data parallelism copies the model to every device, so it saves no memory for weights, gradients and optimizer state;
only the batch is divided. Whether a replica fits can be told beforehand (`ddp_core.commands.memory`; `ddp doctor
EXPERIMENT` prints it). Here that estimate is compared with the peak of CUDA's allocator or, on CPU, with the growth of
a fresh process. The error is what the estimate leaves out: workspaces of libraries, and fragmentation.
"""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddp_core.commands.memory import estimate_memory
from ddp_core.model.builders import resnet18, small_cnn
from ddp_core.model.losses import cross_entropy
from ddp_core.model.optimizers import build_optimizer
from ddp_core.spec.experiment import Optimizer
from ddp_lab.claims.framework.claim import Claim, Judgement, Measurements
from ddp_lab.claims.framework.setting import Setting
from ddp_lab.claims.measuring.ranks import run_ranks
from ddp_lab.records import Axis, Figure, Line, Series

claim = Claim(
    id="C22",
    title="A model that fits one device calls for data parallelism, one that does not for model parallelism",
    claim="Data parallelism is for a model that fits a single device; model parallelism is for one that does not.",
    original="模型并行：模型大到单个显卡放不下的地步，就把模型分为几个部分分别放于不同的显卡上单独运行，各显卡输入相同的数据；\n"
    "当模型本身能塞进单张 GPU,但数据量太大时,我们可以将模型复制到所有 GPU 上,将数据切分(Split),"
    "每个 GPU 并行处理一部分数据,在反向传播时同步梯度。\n"
    "当模型大到单张 GPU 放不下时使用。将模型切分成不同部分,分配给不同 GPU。",
    sources=("002", "004"),
    method="Whether a model fits is told by an estimate (weights, gradients, optimizer state, inputs, activations) "
    "from one watched micro-batch; the same training is then run for three steps in a fresh process and its peak "
    "measured: CUDA's allocator, or the growth of the resident size on CPU. Several models, batches and optimizers.",
    rule="Confirmed when every estimate is within 15 % of the measured peak: then the question can be decided "
    "beforehand. Refuted when one is not. Not measurable here where the system does not tell a process's peak memory.",
    seconds=(15, 60),
)

TOLERANCE = 0.15
M_MMAP_THRESHOLD = -3
PEAK_FILE = Path("/proc/self/clear_refs")
QUICK = ("resnet18 64x64 batch 32 sgd", "resnet18 64x64 batch 8 adam", "small_cnn 32x32 batch 256 sgd")
FULL = (*QUICK, "resnet18 112x112 batch 32 sgd", "resnet18 224x224 batch 8 adam", "small_cnn 64x64 batch 256 adam")


def measure(setting: Setting) -> Measurements:
    """Estimate and peak of each case, in bytes; no cases where the peak cannot be measured."""
    device = setting.device_type(1)
    if device == "cpu" and not PEAK_FILE.exists():
        return {"device": device, "cases": []}
    # A fresh process for each case: memory that an earlier case freed would hide what a later case takes.
    cases = [
        {"name": name} | run_ranks(observe, 1, name, device, device=device)[0] for name in setting.choose(QUICK, FULL)
    ]
    return {"device": device, "cases": cases}


def observe(rank: int, world_size: int, name: str, device: str) -> dict[str, Any]:
    """One case: the peak first, in a process that has done nothing; then the estimate."""
    if device == "cpu":
        # malloc then gives freed memory back at once, so that the resident size holds only what is in use.
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 64 * 1024)
    _train(*_case("small_cnn 32x32 batch 2 adam", device), steps=1)  # loads libraries
    gc.collect()
    before = _reset(device)
    peak = _peak(_case(name, device), device) - before
    model, optimizer, inputs, targets = _case(name, device)
    estimate = estimate_memory(model, cross_entropy, optimizer, inputs, targets)
    return {"estimate": estimate.peak, "parts": dict(estimate.table()), "peak": peak}


def _peak(case: tuple[nn.Module, Optimizer, Tensor, Tensor], device: str) -> int:
    _train(*case, steps=3)
    return _highest(device)


def _case(name: str, device: str) -> tuple[nn.Module, Optimizer, Tensor, Tensor]:
    kind, size, _, batch, optimizer = name.split(" ")
    side = int(size.partition("x")[0])
    torch.manual_seed(0)
    model = resnet18() if kind == "resnet18" else small_cnn(width=16, image_size=side, channels=3)
    inputs, targets = torch.randn(int(batch), 3, side, side), torch.randint(0, 10, (int(batch),))
    settings = Optimizer.model_validate({"name": optimizer, "lr": 0.01, "momentum": 0.9 if optimizer == "sgd" else 0.0})
    return model.to(device), settings, inputs.to(device), targets.to(device)


def _train(model: nn.Module, settings: Optimizer, inputs: Tensor, targets: Tensor, steps: int) -> None:
    optimizer = build_optimizer(settings, model)
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()


def _reset(device: str) -> int:
    """Forget the peak so far; returns the bytes in use now."""
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    ctypes.CDLL(None).malloc_trim(0)
    PEAK_FILE.write_text("5")  # Linux: the peak resident size starts again from the present one (proc(5))
    return _status("VmRSS")


def _highest(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device == "cuda" else _status("VmHWM")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (kibibytes,) = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return int(kibibytes) * 1024


def judge(measurements: Measurements) -> Judgement:
    """Apply the rule of the claim."""
    cases = measurements["cases"]
    if not cases:
        return Judgement("not measurable here", "needs a system that tells a process's peak memory (Linux, or CUDA)")
    errors = {case["name"]: case["estimate"] / case["peak"] - 1 for case in cases}
    figures = []
    for case in cases:
        figures.append(Figure(f"{case['name']}: estimate", case["estimate"] / 2**20, "MiB"))
        figures.append(Figure(f"{case['name']}: measured peak", case["peak"] / 2**20, "MiB"))
        figures.append(Figure(f"{case['name']}: error", 100 * errors[case["name"]], "%"))
    plot = Series(
        f"Memory, estimated and measured ({measurements['device']})",
        Axis("case", "", [case["name"] for case in cases]),
        Axis("peak", "MiB"),
        [
            Line("estimated", [case["estimate"] / 2**20 for case in cases]),
            Line("measured", [case["peak"] / 2**20 for case in cases]),
        ],
    )
    worst = max(errors, key=lambda name: abs(errors[name]))
    text = f"the worst of {len(cases)} estimates is {100 * errors[worst]:+.1f} % off ({worst})"
    if abs(errors[worst]) <= TOLERANCE:
        return Judgement("confirmed", f"{text}: whether a replica fits can be told beforehand", figures, [plot])
    return Judgement("refuted", text, figures, [plot])
