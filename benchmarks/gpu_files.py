"""Images per second of a ResNet-18 that trains on JPEG files: a script as people write it, and `ddp train`.

`make gpu-check` measures them. The files are noise of low frequency, 500 x 375, some 40 kB each, and are in the page
cache. The script: ImageFolder, RandomResizedCrop, flip, ToTensor, Normalize, a shuffling DataLoader with pinned memory,
the loss read at every step; in float32 as torch has it (convolutions in TF32), and under bf16 autocast with
channels_last. The number of its workers is the one with which its loader alone was the fastest before. Ours is the
command on the same files, in as many workers. Each turn is a process of its own. Decoding is the ceiling: the script's
loader alone is measured, too.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.gpu import figures
from benchmarks.loops import CLASSES, SETTINGS
from ddp_core.base.errors import ExitCode
from ddp_core.base.torchvision_import import import_torchvision
from ddp_core.model.builders import MODELS
from tests.support.processes import Main, ddp, launch

LOADER = "the script's loader alone"
_LONGEST_TURN = 300.0
PRECISIONS = {"fp32": [], "bf16": ["precision=bf16", "memory_format=channels_last"]}
EXPERIMENT = """
from ddp_core import Component, Experiment, Optimizer

experiment = Experiment(
    name="resnet18_files",
    model=Component(name="resnet18", options={{"classes": {classes}, "small_input": False}}),
    data=Component(name="image_folder", options={{"folder": "photos", "image_size": {size}, "test_share": 0.0}}),
    loss="cross_entropy",
    optimizer=Optimizer(name="sgd", lr=0.02, momentum=0.9, nesterov=True, weight_decay=1e-4),
    global_batch_size={batch},
    epochs=99,
    max_steps={steps},
    reduction="plain",
)
"""


def make_photos(folder: Path, images: int) -> None:
    """Write so many JPEG files, in a folder for each class."""
    for number in range(CLASSES):
        (folder / str(number)).mkdir(parents=True)
    with multiprocessing.Pool() as pool:
        pool.starmap(_make_photo, ((folder, number) for number in range(images)), chunksize=64)


def _make_photo(folder: Path, number: int) -> None:
    small = Image.fromarray(np.random.default_rng(number).integers(0, 256, (24, 32, 3), dtype=np.uint8))
    photo = small.resize((500, 375), Image.Resampling.BICUBIC)
    photo.save(folder / str(number % CLASSES) / f"{number}.jpg", quality=90)


def batches(folder: Path, workers: int, size: int, batch: int) -> Iterator[list[torch.Tensor]]:
    """What the script's loader gives, epoch after epoch."""
    import_torchvision()
    from torchvision import datasets, transforms

    steps = [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    steps.append(transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    loader: DataLoader[Any] = DataLoader(
        datasets.ImageFolder(str(folder), transforms.Compose(steps)),
        batch,
        shuffle=True,
        num_workers=workers,
        pin_memory=torch.cuda.is_available(),
        persistent_workers=workers > 0,
        drop_last=True,
    )
    while True:
        yield from loader


def script(folder: str, workers: int, precision: str, size: int, batch: int, steps: int, device: str) -> float:
    """Images per second of the script, without its first tenth; of its loader alone where `precision` is empty."""
    model = MODELS["resnet18"]().to(device)
    if precision == "bf16":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    criterion, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), **SETTINGS)
    skipped, began = max(1, steps // 10), 0.0
    for step, (inputs, targets) in enumerate(batches(Path(folder), workers, size, batch)):
        if step == skipped:
            began = time.perf_counter()
        if step == steps:
            break
        if not precision:
            continue
        inputs, targets = inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        if precision == "bf16":
            inputs = inputs.to(memory_format=torch.channels_last)
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
            loss = criterion(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()
    return batch * (steps - skipped) / (time.perf_counter() - began)


def _script(words: Sequence[str]) -> int:
    found, *arguments = json.loads(words[0])
    Path(found).write_text(json.dumps(script(*arguments)))
    return ExitCode.DONE


def script_alone(*arguments: Any) -> float:
    """`script` in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="ddp-gpu-files-") as output:
        found = Path(output, "found.json")
        _run([json.dumps([str(found), *arguments])], Path(output), _script)
        return float(found.read_text())


def ours(folder: Path, workers: int, precision: str, device: str) -> float:
    """Images per second of the command."""
    settings = [word for setting in PRECISIONS[precision] for word in ("--set", setting)]
    with tempfile.TemporaryDirectory(prefix="ddp-gpu-files-") as output:
        place = ["--output", output, "--data-dir", str(folder), "--device", device, "--workers", str(workers)]
        _run(["train", str(folder / "resnet18_files.py"), *place, *settings], Path(output), ddp)
        return float(figures(Path(output))["images_per_second"])


def _run(words: Sequence[str], output: Path, main: Main) -> None:
    ended = launch(words, 0, output / "said", _LONGEST_TURN, main)
    if ended.code != ExitCode.DONE:
        raise RuntimeError(f"{' '.join(words)}: ended with {ended.code}: {ended.said.strip()[-500:]}")


@dataclass(frozen=True)
class Size:
    """How much a turn computes."""

    device: str = "cuda"
    image: int = 224
    batch: int = 256
    steps: int = 100
    photos: int = 8192


QUICK = Size("cpu", 32, 8, 6, 64)


def fastest_loader(folder: Path, size: Size) -> tuple[int, dict[int, float]]:
    """The number of workers with which the script's loader alone is the fastest, and its images per second by number.

    The photographs are made in `folder` first. Turns are forks of this process, in which CUDA must not have started.
    """
    cores = len(os.sched_getaffinity(0))
    on_gpu = size.device == "cuda"
    counts = sorted({max(1, cores // 2), max(1, cores - 2), cores, cores + cores // 2}) if on_gpu else [1]
    make_photos(folder / "photos", size.photos)
    text = EXPERIMENT.format(classes=CLASSES, size=size.image, batch=size.batch, steps=size.steps)
    (folder / "resnet18_files.py").write_text(text)
    few = max(2, size.steps // 2)
    tried = {
        count: round(script_alone(str(folder / "photos"), count, "", size.image, size.batch, few, size.device), 1)
        for count in counts
    }
    return max(tried, key=lambda count: tried[count]), tried


def contenders(folder: Path, workers: int, size: Size) -> dict[str, Callable[[], float]]:
    """A turn of each, by its name: images per second."""
    photos = str(folder / "photos")

    def of_script(precision: str) -> Callable[[], float]:
        return lambda: script_alone(photos, workers, precision, size.image, size.batch, size.steps, size.device)

    def of_ours(precision: str) -> Callable[[], float]:
        return lambda: ours(folder, workers, precision, size.device)

    found = {LOADER: of_script("")}
    for precision in PRECISIONS:
        found[f"script, {precision}"] = of_script(precision)
        found[f"ddp train, {precision}, pillow"] = of_ours(precision)
    return found
