"""Images per second of a ResNet-18 on one GPU: the article's own loop, and `ddp train` in its precisions.

`make gpu-check` measures them. The article's script (224x224 random images made once on the device, 256 per step,
float32, SGD with Nesterov momentum, the loss read at every step) is the reference. Ours is the command, with data that
come from the host's memory, metrics, heartbeat and checks on. A figure is the median over the windows of steps within a
run. A run has a checkpoint every 50 steps: how long training stands still for it is in the record, too, and one trace
of three steps, which ui.perfetto.dev shows.
"""

from __future__ import annotations

import gzip
import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks.loops import CLASSES, SETTINGS
from ddp_core.model.builders import MODELS

ARTICLE = "the article's loop"
ANY = ", any kernel"
"""Ends the names of what the exact reduction is compared with: plain, with the fastest kernels there are."""
_FAST = ["precision=bf16", "memory_format=channels_last"]
_COMPILED = [*_FAST, "model.compiled=true"]
_WAYS = {"exact": ["--reduction", "exact"], "plain": ["--reduction", "plain", "--deterministic", "always"]}
"""Both take the same kernels, those that repeat their bits, so that the rest is the cost of the exact sum."""
TRACE = "gpu-trace.json.gz"
TRACED = "exact bf16 channels_last, micro-batches of 32, graph"
CASES: dict[str, tuple[list[str], list[str]]] = {
    "exact bf16 channels_last compiled, micro-batches of 64, graph": (
        [*_COMPILED, "micro_batch=64"],
        [*_WAYS["exact"], "--cuda-graph"],
    ),
    **{
        f"{way} bf16 channels_last, micro-batches of {size}, graph": (
            [*_FAST, f"micro_batch={size}"],
            [*_WAYS[way], "--cuda-graph"],
        )
        for size in (64, 32, 16)
        for way in _WAYS
    },
    f"plain bf16 channels_last{ANY}": (_FAST, ["--reduction", "plain"]),
    f"plain bf16 channels_last compiled{ANY}": (_COMPILED, ["--reduction", "plain"]),
    "exact bf16 channels_last, one micro-batch, graph": (
        [*_FAST, "micro_batch=256"],
        [*_WAYS["exact"], "--cuda-graph"],
    ),
    "exact bf16 channels_last compiled, one micro-batch, graph": (
        [*_COMPILED, "micro_batch=256"],
        [*_WAYS["exact"], "--cuda-graph"],
    ),
    **{
        f"{way} bf16 channels_last, micro-batches of {size}": ([*_FAST, f"micro_batch={size}"], _WAYS[way])
        for size in (64, 32)
        for way in _WAYS
    },
    f"plain tf32{ANY}": (["precision=tf32"], ["--reduction", "plain"]),
    "exact tf32, one micro-batch": (["precision=tf32", "micro_batch=256"], _WAYS["exact"]),
    f"plain fp32{ANY}": ([], ["--reduction", "plain"]),
}
"""Settings of the experiment, and options of the run; what says most comes first."""
QUICK = {
    **{"data.image_size": 32, "data.samples": 64, "data.pool": 16},
    **{"global_batch_size": 8, "micro_batch": 4, "max_steps": 6},
}


def article(steps: int, size: int, samples: int, device: str) -> float:
    """Images per second of the article's loop, without its first ten steps."""
    torch.manual_seed(0)
    model = MODELS["resnet18"]().to(device)
    inputs = torch.randn(samples, 3, size, size).to(device)
    targets = torch.randint(0, CLASSES, (samples,)).to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), **SETTINGS)
    model.train()
    began, skipped, train_loss, correct = 0.0, min(10, steps // 2), 0.0, 0.0
    for step in range(steps):
        if step == skipped:
            began = time.perf_counter()
        outputs = model(inputs)
        loss = criterion(outputs, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        train_loss += loss.item()
        correct += torch.eq(outputs.argmax(dim=1), targets).sum().item()
    return samples * (steps - skipped) / (time.perf_counter() - began)


def words_of(name: str, output: Path, quick: bool, *more: str) -> list[str]:
    """What the command is asked for in a turn of this case."""
    settings, options = CASES[name]
    wanted: dict[str, Any] = QUICK if quick else {"max_steps": 120}
    chosen = [each for each in settings if not (quick and each.startswith(("micro_batch=", "model.compiled=")))]
    chosen += [f"{setting}={value}" for setting, value in wanted.items()]
    words = [word for setting in chosen for word in ("--set", setting)]
    place = ["--output", str(output), "--device", "cuda", "--checkpoint-every", "3" if quick else "50"]
    return ["train", "resnet18_synthetic", *words, *place, *options, *more]


def figures(output: Path) -> dict[str, Any]:
    """Images per second, seconds per checkpoint, and the seconds of each part of a step, of the one run in `output`."""
    (file,) = output.rglob("metrics.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    result = json.loads((file.parent / "run.json").read_text())["result"]
    windows = [line["samples_per_second"] for line in lines if line["kind"] == "step"]
    saves = [line["seconds"] for line in lines if line["kind"] == "checkpoint"]
    return {
        # The first window holds the choice of kernels and, where there is one, the capture of the graph.
        "images_per_second": median(windows[1:] or windows),
        "checkpoint_seconds": median(saves) if saves else None,
        "time_split": result["time_split"],
    }


def article_arguments(quick: bool) -> tuple[int, int, int, str]:
    """The steps, side, images per step and device of the article's loop."""
    return (4, 32, 8, "cuda") if quick else (110, 224, 256, "cuda")


def keep_trace(output: Path, target: Path) -> None:
    """Pack the trace of the one run in `output`."""
    (found,) = output.rglob("trace/rank-0.json")
    target.parent.mkdir(parents=True, exist_ok=True)
    with found.open("rb") as plain, gzip.open(target, "wb") as packed:
        shutil.copyfileobj(plain, packed)


TRACING = {False: ("--profile", "60:62"), True: ("--profile", "4:5")}
"""The options for a trace of a whole turn, and of a quick one."""


def times_plain(case: str, speeds: Mapping[str, float]) -> float | None:
    """How many times as long as plain with any kernel, in the same precision and layout, compiled or not alike."""
    plain = speeds.get(_alike(case).replace("exact", "plain", 1) + ANY)
    return plain / speeds[case] if plain else None


def _alike(case: str) -> str:
    """The reduction and what changes the arithmetic, without the micro-batches and what only launches them."""
    return case.partition(",")[0]
