"""Images per second of a ResNet-18 on one GPU: the article's own loop, and `ddp train` in its precisions.

    python -m benchmarks.gpu [--rounds 1] [--case NAME ...] [--quick] [--json PATH]

The article's script (224x224 random images made once on the device, 256 per step, float32, SGD with Nesterov momentum,
the loss read at every step) is the reference. Ours is the command, with data that come from the host's memory, metrics,
heartbeat and checks on. Every turn is a process of its own; contenders take turns, and each figure is the median over
the rounds, of the median over the windows of steps within a run. What is measured is recorded after each turn. A run
has a checkpoint every 50 steps: how long training stands still for it is in the record, too, and one trace of three
steps, which ui.perfetto.dev shows. `--quick` takes a tiny model through it on the CPU, to see that it runs.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks.loops import CLASSES, SETTINGS
from benchmarks.record import RESULTS, record
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


def words_of(name: str, output: Path, device: str, quick: bool, *more: str) -> list[str]:
    """What the command is asked for in a turn of this case."""
    settings, options = CASES[name]
    wanted: dict[str, Any] = QUICK if quick else {"max_steps": 120}
    chosen = [each for each in settings if not (quick and each.startswith(("micro_batch=", "model.compiled=")))]
    chosen += [f"{setting}={value}" for setting, value in wanted.items()]
    words = [word for setting in chosen for word in ("--set", setting)]
    place = ["--output", str(output), "--device", device, "--checkpoint-every", "3" if quick else "50"]
    options = [option for option in options if device != "cpu" or option != "--cuda-graph"]
    return ["train", "resnet18_synthetic", *words, *place, *options, *more]


def figures(output: Path) -> dict[str, Any]:
    """Of the one run in `output`: images per second, seconds per checkpoint, and the seconds of each part of a step."""
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


def article_arguments(device: str, quick: bool) -> tuple[int, int, int, str]:
    """The steps, side, images per step and device of the article's loop."""
    return (4, 32, 8, device) if quick else (110, 224, 256, device)


def keep_trace(output: Path, target: Path) -> None:
    """Pack the trace of the one run in `output`."""
    (found,) = output.rglob("trace/rank-0.json")
    target.parent.mkdir(parents=True, exist_ok=True)
    with found.open("rb") as plain, gzip.open(target, "wb") as packed:
        shutil.copyfileobj(plain, packed)


TRACING = {False: ("--profile", "60:62"), True: ("--profile", "4:5")}
"""The options for a trace of a whole turn, and of a quick one."""


def _ours(name: str, output: Path, quick: bool, *more: str) -> dict[str, Any]:
    """One turn of a case, in a process of its own."""
    _run(["-m", "ddp_core", *words_of(name, output, "cpu" if quick else "cuda", quick, *more)])
    return figures(output)


def _article_alone(quick: bool) -> float:
    """The article's loop in a process of its own."""
    arguments = article_arguments("cpu" if quick else "cuda", quick)
    return float(_run(["-c", f"from benchmarks.gpu import article; print(article{arguments})"]))


def _run(words: Sequence[str]) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "4"}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"ended with {done.returncode}: {done.stderr.strip().splitlines()[-1:]}")
    return done.stdout


def measure(names: Sequence[str], rounds: int, quick: bool) -> Iterator[dict[str, Any]]:
    """The results so far, after each turn: every contender's turns by name; one that fails has its reason instead."""
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in (ARTICLE, *names)}
    failed: dict[str, str] = {}
    for number in range(rounds):
        for name in turns:
            with tempfile.TemporaryDirectory(prefix="ddp-gpu-") as folder:
                try:
                    found = (
                        {"images_per_second": _article_alone(quick)}
                        if name == ARTICLE
                        else _ours(name, Path(folder), quick)
                    )
                except RuntimeError as error:
                    failed[name] = str(error)
                    print(f"{name}: {error}", file=sys.stderr)
                else:
                    turns[name].append(found)
                    print(f"round {number + 1}: {name:58} {found['images_per_second']:9.0f} images/s", flush=True)
            yield {"turns": turns, "failed": failed} | _summary(turns)


def times_plain(case: str, speeds: Mapping[str, float]) -> float | None:
    """How many times as long as plain with any kernel, in the same precision and layout, compiled or not alike."""
    plain = speeds.get(_alike(case).replace("exact", "plain", 1) + ANY)
    return plain / speeds[case] if plain else None


def _alike(case: str) -> str:
    """The reduction and what changes the arithmetic, without the micro-batches and what only launches them."""
    return case.partition(",")[0]


def summary_of(speeds: Mapping[str, float]) -> str:
    """How much longer the exact reduction takes than plain in the same precision and layout, from images per second."""
    said: dict[str, list[str]] = {}
    for case in sorted((case for case in speeds if case.startswith("exact")), key=lambda case: -speeds[case]):
        if (times := times_plain(case, speeds)) is not None:
            said.setdefault(_alike(case), []).append(f"{times:.2f} ({case.partition(', ')[2]})")
    if not said:
        return "no figure"
    rows = "; ".join(f"{alike} {', '.join(times)}" for alike, times in said.items())
    return f"times as long as plain with any kernel in the same precision and layout: {rows}"


def _summary(turns: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    speeds = {name: median(turn["images_per_second"] for turn in each) for name, each in turns.items() if each}
    base = speeds.get(ARTICLE)
    table = {
        name: {"images_per_second": round(speed), "ratio": speed / base if base else None}
        for name, speed in speeds.items()
    }
    tf32 = {"convolutions": torch.backends.cudnn.allow_tf32, "products": torch.backends.cuda.matmul.allow_tf32}
    return {"table": table, "summary": summary_of(speeds), "tf32 of the article's loop": tf32}


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--quick", action="store_true", help="one round of a tiny model on the CPU")
    parser.add_argument("--json", type=Path, help="where to record the results (default: benchmarks/results)")
    arguments = parser.parse_args()
    if not arguments.quick and not torch.cuda.is_available():
        print("benchmarks.gpu: torch finds no CUDA device here; --quick shows on the CPU that it runs", file=sys.stderr)
        raise SystemExit(4)
    cases = [f"plain fp32{ANY}", TRACED] if arguments.quick else arguments.case
    target = arguments.json or RESULTS / "gpu.json"
    results: dict[str, Any] = {}
    rounds = 1 if arguments.quick else arguments.rounds
    for results in measure(cases, rounds, arguments.quick):
        record("gpu", "python -m benchmarks.gpu", results, target, rounds)
    for name, row in results["table"].items():
        print(f"{name:58} {row['images_per_second']:9} images/s   {row['ratio'] or 0:6.2f}x")
    print(results["summary"])
    with tempfile.TemporaryDirectory(prefix="ddp-gpu-") as folder:
        _ours(TRACED, Path(folder), arguments.quick, *TRACING[arguments.quick])
        keep_trace(Path(folder), target.with_name(f"{target.stem}-trace.json.gz"))
    print(target)


if __name__ == "__main__":
    main()
