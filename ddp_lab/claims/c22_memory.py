"""When data parallelism is enough: as long as one device holds a whole replica and all that its training needs.

The sentence leaves out sharded data parallelism (ZeRO, FSDP), which cuts weights, gradients and optimizer state, too.
The estimate of one watched micro-batch (`memory_estimate`) is compared with the peak of CUDA's allocator or, on CPU,
with the growth of a fresh process. Then the sentence itself is tried, on CPU: a device is a process whose memory the
kernel limits.
"""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddp_core.config.experiment import Optimizer
from ddp_core.model.builders import resnet18, small_cnn
from ddp_core.model.losses import cross_entropy
from ddp_core.model.optimizers import build_optimizer
from ddp_lab.claims.framework.claim import Claim, Judgement, Measurements, composed, holds, versions
from ddp_lab.claims.framework.setting import Setting
from ddp_lab.claims.measuring.memory_budget import M_MMAP_THRESHOLD, process_status, train_within
from ddp_lab.claims.measuring.memory_estimate import estimate_memory
from ddp_lab.claims.measuring.ranks import run_ranks
from ddp_lab.records import Axis, Figure, Line, Part, Series

QUICK = ("resnet18 64x64 batch 32 sgd", "resnet18 64x64 batch 8 adam", "small_cnn 32x32 batch 256 sgd")
FULL = (*QUICK, "resnet18 112x112 batch 32 sgd", "resnet18 224x224 batch 8 adam", "small_cnn 64x64 batch 256 adam")

claim = Claim(
    id="C22",
    title="A model that fits one GPU calls for data parallelism, one that does not for model parallelism",
    claim="Data parallelism is for a model that fits a single GPU; model parallelism is for one that does not.",
    original="模型并行：模型大到单个显卡放不下的地步，就把模型分为几个部分分别放于不同的显卡上单独运行，各显卡输入相同的数据；\n"
    "当模型本身能塞进单张 GPU,但数据量太大时,我们可以将模型复制到所有 GPU 上,将数据切分(Split),"
    "每个 GPU 并行处理一部分数据,在反向传播时同步梯度。\n"
    "当模型大到单张 GPU 放不下时使用。将模型切分成不同部分,分配给不同 GPU。",
    sources=("002", "004"),
    method="An estimate (weights, gradients, optimizer state, inputs, activations) is made from one watched "
    "micro-batch; the same training is then run for three steps in a fresh process and its peak measured: CUDA's "
    "allocator, or the growth of the resident size on CPU. Several models, batches and optimizers. And processes on "
    "CPU, each with a limit of memory set by the kernel (RLIMIT_DATA), as devices: linear layers with SGD and momentum "
    "are trained under DDP on two such processes, once so few that they fit and once too many; the latter in one such "
    "process, in one without a limit, cut in two halves over two such processes that send each other activations and "
    "gradients, and by sharded data parallelism (torch's FSDP2) on two such processes.",
    rule="Five parts. The estimate: confirmed when each is within the tolerance of the measured peak, else refuted. "
    "Data parallelism for a model that fits: confirmed when it trains (no process fails and the loss is no higher at "
    "the end), else refuted. Data parallelism for a model that does not fit: confirmed (it is no help) when one "
    "process and DDP both run out of memory, refuted when DDP trains it, inconclusive when it fails for another "
    "reason. Model parallelism for such a model: confirmed when the halves train it and their losses equal those of "
    "the process without a limit, else refuted. Nothing else trains such a model: refuted when sharded data "
    "parallelism does, with these losses, too; else inconclusive. Not measurable here where the system does not tell a "
    "process's peak memory, or does not keep to the limit.",
    in_short="Confirmed where estimates are within 15 % of the peak, and where trainings in limited memory end as the "
    "sentence says.",
    loads={
        "cases": (QUICK, FULL),
        "tolerance": (0.15, 0.15),
        "limit_mib": (320, 320),
        "layers_that_fit": (3, 3),
        "layers_that_do_not": (8, 8),
        "width": (2048, 2048),
        "steps": (5, 10),
        "relative_difference_of_loss": (1e-6, 1e-6),
        "rate": (0.0005, 0.0005),
    },
    history=versions(
        "2026-11-22 d7f68b654075631c The rule before judged the estimate of memory alone, and said nothing of model "
        "parallelism. Now both halves of the sentence are tried with processes whose memory is limited.",
        "2026-11-25 e2600320631b4965 The rate is one with which the layers can be trained, a fortieth of the one "
        "before, whose loss rose with the full steps (9.1 to 10.7) and gave no verdict on model parallelism, although "
        "the halves had the losses of the process without a limit.",
        "2026-11-29 0bda84f9a9c22578 That such a model calls for model parallelism says that nothing else would do: "
        "sharded data parallelism is tried beside it.",
    ),
    seconds=(30, 60),
)


PEAK_FILE = Path("/proc/self/clear_refs")
FIT, NO_HELP, CUT, ONLY = (
    "data parallelism trains a model that fits",
    "DDP is no help for a model that does not fit",
    "model parallelism trains a model that does not fit",
    "only model parallelism trains a model that does not fit",
)
FITS, UNLIMITED, ALONE = "fits, DDP", "too many, no limit", "too many, one process"
REPLICAS, HALVES, SHARDED = "too many, DDP", "too many, halves", "too many, sharded"
LIMITED = {FITS: FIT, UNLIMITED: CUT, ALONE: NO_HELP, REPLICAS: NO_HELP, HALVES: CUT, SHARDED: ONLY}
"""The part that each way to train within the limit is a figure of."""


def measure(setting: Setting) -> Measurements:
    """Estimate and peak of each case, in bytes, and what trained within the limit; empty where neither can be told."""
    load, device, tells = claim.load(setting), setting.device_type(1), PEAK_FILE.exists()
    # A fresh process for each case: memory that an earlier case freed would hide what a later case takes.
    cases = [
        {"name": name} | run_ranks(observe, 1, name, device, device=device, timeout=600)[0]
        for name in (load.cases if device == "cuda" or tells else ())
    ]
    limits = {name: getattr(load, name) for name in ("tolerance", "limit_mib", "relative_difference_of_loss")}
    return limits | {"device": device, "cases": cases, "limited": _limited(setting) if tells else {}}


def _limited(setting: Setting) -> dict[str, Any]:
    """What was trained in processes with a limit; nothing where the limit is not kept."""
    load = claim.load(setting)
    fits, too_many, sizes = load.layers_that_fit, load.layers_that_do_not, (load.width, load.steps, load.rate)
    if train_within("probe", 1, 2 * load.limit_mib, load.limit_mib, *sizes)["trained"]:
        return {}
    return {
        FITS: train_within("whole", 2, fits, load.limit_mib, *sizes),
        UNLIMITED: train_within("whole", 1, too_many, None, *sizes),
        ALONE: train_within("whole", 1, too_many, load.limit_mib, *sizes),
        REPLICAS: train_within("whole", 2, too_many, load.limit_mib, *sizes),
        HALVES: train_within("halves", 2, too_many, load.limit_mib, *sizes),
        SHARDED: train_within("sharded", 2, too_many, load.limit_mib, *sizes),
    }


def observe(rank: int, world_size: int, name: str, device: str) -> dict[str, Any]:
    """One case: the peak first, in a process that has done nothing; then the estimate."""
    if device == "cpu":
        # malloc then gives freed memory back at once, so that the resident size holds only what is in use.
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 64 * 1024)
    _train(*_case("small_cnn 32x32 batch 2 adam", device), steps=1)  # loads libraries
    gc.collect()
    before = _reset(device)
    _train(*_case(name, device), steps=3)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else process_status("VmHWM")
    model, optimizer, inputs, targets = _case(name, device)
    return {"estimate": estimate_memory(model, cross_entropy, optimizer, inputs, targets), "peak": peak - before}


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
    return process_status("VmRSS")


def judge(measurements: Measurements) -> Judgement:
    """Apply the rule of the claim."""
    part, figures, plots = _judge_estimates(measurements)
    parts, more = _judge_limited(measurements)
    return composed([part, *parts], [*figures, *more], plots)


def _judge_estimates(measurements: Measurements) -> tuple[Part, list[Figure], list[Series]]:
    name, cases = "whether a model fits can be told beforehand", measurements["cases"]
    if not cases:
        return Part(name, "not measurable here", "needs a system that tells a process's peak memory"), [], []
    figures, errors = [], {case["name"]: case["estimate"] / case["peak"] - 1 for case in cases}
    estimates, peaks = ([case[key] / 2**20 for case in cases] for key in ("estimate", "peak"))
    for case, estimate, peak in zip(errors, estimates, peaks, strict=True):
        figures.append(Figure(f"{case}: estimate", estimate, "MiB", part=name))
        figures.append(Figure(f"{case}: measured peak", peak, "MiB", part=name))
        figures.append(Figure(f"{case}: error", 100 * errors[case], "%", part=name, bounds=(-100, 100)))
    lines = [Line("estimated", estimates), Line("measured", peaks)]
    title = f"Memory, estimated and measured ({measurements['device']})"
    worst = max(errors, key=lambda case: abs(errors[case]))
    text = f"the worst of {len(cases)} estimates is {100 * errors[worst]:+.1f} % off ({worst})"
    part = holds(name, abs(errors[worst]) <= measurements["tolerance"], text)
    return part, figures, [Series(title, Axis("case", "", list(errors)), Axis("peak", "MiB"), lines)]


def _judge_limited(measurements: Measurements) -> tuple[list[Part], list[Figure]]:
    found, limit = measurements["limited"], f"{measurements['limit_mib']} MiB for each process"
    if not found:
        needs = "needs a system that limits a process's memory (Linux, RLIMIT_DATA)"
        return [Part(name, "not measurable here", needs) for name in (FIT, NO_HELP, CUT, ONLY)], []
    figures = []
    for way, part in LIMITED.items():
        each = found[way]
        ended = "trained" if each["trained"] else "out of memory" if each["out_of_memory"] else "failed"
        figures.append(Figure(way, ended, part=part))
    free, one, ddp, halves = (found[way] for way in (UNLIMITED, ALONE, REPLICAS, HALVES))
    if ddp["trained"]:
        no_help = Part(NO_HELP, "refuted", f"two replicas trained it within {limit}")
    elif one["out_of_memory"] and ddp["out_of_memory"]:
        no_help = Part(NO_HELP, "confirmed", f"one process and two replicas ran out of memory, {limit}")
    else:
        said = one["said"] or ddp["said"] or "one process trained it, two replicas did not"
        no_help = Part(NO_HELP, "inconclusive", f"not all failed for want of memory: {said}")
    apart = _apart(halves, free)
    if not free["trained"]:
        losses = [f"{loss:.3g}" for loss in (*free["losses"][:1], *free["losses"][-1:])]
        said = free["said"] or f"its loss went from {' to '.join(losses)}"
        cut = Part(CUT, "inconclusive", f"without a limit it was not trained either: {said}")
    elif halves["trained"] and apart > measurements["relative_difference_of_loss"]:
        cut = Part(CUT, "refuted", f"the losses of the halves differ by {apart:.2g}")
    else:
        cut = _trained(CUT, halves, f"{limit}, losses {apart:.1g} from those without a limit")
    figures.append(Figure("largest relative difference of the halves' losses", apart, part=CUT, bounds=(0, 1)))
    sharded = found[SHARDED]
    if free["trained"] and sharded["trained"] and _apart(sharded, free) <= measurements["relative_difference_of_loss"]:
        only = Part(ONLY, "refuted", f"sharded data parallelism trained it with {limit}, with the same losses")
    else:
        why = sharded["said"] or ("other losses" if free["trained"] else "without a limit it was not trained either")
        only = Part(ONLY, "inconclusive", f"sharded data parallelism did not: {why}")
    return [_trained(FIT, found[FITS], limit), no_help, cut, only], figures


def _apart(found: dict[str, Any], free: dict[str, Any]) -> float:
    """The largest relative difference of the losses from those without a limit."""
    pairs = zip(found["losses"], free["losses"], strict=False)
    return max((abs(ours - theirs) / abs(theirs) for ours, theirs in pairs), default=0.0)


def _trained(name: str, found: dict[str, Any], where: str) -> Part:
    return holds(name, found["trained"], f"trained with {where}", f"not trained: {found['said'] or 'the loss rose'}")
