"""The input on a CUDA device: copied and finished ahead, on another stream; evaluation; snapshots for checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ddp_core.base.digests import optimizer_digest, weights_digest
from ddp_core.base.trees import StepIds
from ddp_core.checkpoint import Checkpointer, find_checkpoints, load
from ddp_core.config.experiment import Evaluation
from ddp_core.data import prefetching
from ddp_core.data.augment import Augmentation, crop_and_flip, shift_and_flip, turn_shift_scale
from ddp_core.data.loader import Loader
from ddp_core.data.splits import ByteImages
from ddp_core.distributed.process_group import Collectives
from ddp_core.distributed.world import World
from ddp_core.model.losses import class_hits, cross_entropy
from ddp_core.trainers.evaluation import evaluate
from ddp_core.trainers.own_metrics import OwnMetrics

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
SAMPLES, SIDE, MICRO_BATCH = 256, 16, 8
AUGMENTATIONS = [None, shift_and_flip(2, flip=True), crop_and_flip(11), turn_shift_scale()]


def pictures() -> ByteImages:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (SAMPLES, 3, SIDE, SIDE), dtype=torch.uint8, generator=generator)
    return ByteImages(pixels, torch.arange(SAMPLES) % 10, (0.5, 0.4, 0.3), (0.2, 0.25, 0.3))


def steps(count: int) -> Iterator[StepIds]:
    """Steps of four micro-batches."""
    for step in range(count):
        ids = np.random.default_rng(step).permutation(SAMPLES)[: 4 * MICRO_BATCH]
        yield step // 4, np.split(ids, 4)


def inputs_of(stream: Any) -> list[torch.Tensor]:
    with contextlib.closing(stream) as open_stream:
        return [inputs for step in open_stream for inputs, _ in step]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("augmentation", AUGMENTATIONS)
def test_what_is_brought_ahead_is_what_is_made_in_line(augmentation: Augmentation | None, workers: int) -> None:
    loader = Loader(pictures(), augmentation, seed=1, workers=workers, device=CUDA)
    held = list(loader.stream(steps(12)))  # all at once: nothing may be overwritten
    for step, (epoch, micro_batches) in zip(held, steps(12), strict=True):
        for (inputs, targets), ids in zip(step, micro_batches, strict=True):
            expected, labels = Loader(pictures(), augmentation, seed=1, device=CUDA).fetch(epoch, ids)
            assert inputs.device == CUDA
            assert torch.equal(inputs, expected)
            assert torch.equal(targets, labels)


@pytest.mark.parametrize("augmentation", AUGMENTATIONS)
def test_a_sample_has_the_same_bits_in_any_batch(augmentation: Augmentation | None) -> None:
    whole = Loader(pictures(), augmentation, seed=1, device=CUDA)
    for epoch, micro_batches in steps(2):
        together = whole.fetch(epoch, np.concatenate(micro_batches))[0]
        assert torch.equal(together, torch.cat([whole.fetch(epoch, ids)[0] for ids in micro_batches]))


def test_next_does_not_make_the_host_wait() -> None:
    with contextlib.closing(Loader(pictures(), shift_and_flip(2), device=CUDA).stream(steps(30))) as stream:
        for _ in range(5):  # the first steps upload what is constant
            next(stream)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(20):
                next(stream)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_memory_is_not_reused_while_the_training_stream_still_reads_it() -> None:
    """The host lets go of every batch at once, while the device is long busy before it reads that batch."""
    expected = [[inputs.double().sum().item() for inputs, _ in step] for step in Loader(pictures()).stream(steps(40))]
    busy, sums = torch.randn(4096, 4096, device=CUDA), []
    with contextlib.closing(Loader(pictures(), device=CUDA).stream(steps(40))) as stream:
        for step in stream:
            for _ in range(5):
                busy = (busy @ busy).tanh()
            sums.append([inputs.double().sum() for inputs, _ in step])
            del step
    found = torch.tensor([[number.item() for number in step] for step in sums])
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-6, atol=1e-3)


def test_a_step_too_large_to_lie_ahead_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = Loader(pictures(), shift_and_flip(2), seed=1, device=CUDA)
    ahead = inputs_of(loader.stream(steps(6)))
    monkeypatch.setattr(prefetching, "LARGEST_STEP", 0)
    assert all(map(torch.equal, ahead, inputs_of(loader.stream(steps(6)))))


def test_an_evaluation_has_the_figures_of_all_samples_at_once() -> None:
    """Those of metrics of one's own, too: no experiment that these tests train on a GPU has any."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE * SIDE, 10)).to(CUDA)

    def forward(inputs: Any, targets: Any) -> tuple[Any, Any, torch.Tensor]:
        outputs = model(inputs)
        return outputs, targets, cross_entropy(outputs, targets)

    metrics = OwnMetrics.of({"hits": lambda outputs, targets: (class_hits(outputs, targets), len(targets))})
    settings, alone = Evaluation(samples_per_batch=100), Collectives(World(), CUDA)
    found = evaluate(model, forward, class_hits, pictures(), settings, alone, metrics=metrics)
    with torch.no_grad():
        outputs, targets, loss = forward(*Loader(pictures(), device=CUDA).fetch(0, np.arange(SAMPLES)))
    assert found["test_accuracy"] == found["test_hits"] == class_hits(outputs, targets).item() / SAMPLES
    assert found["test_loss"] == pytest.approx(loss.item() / SAMPLES, rel=1e-5)


def digests_of(state: dict[str, Any]) -> tuple[str, str]:
    return weights_digest(state["model"]), optimizer_digest(state["optimizer"])


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_weights_change_while_a_checkpoint_of_them_is_written(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    layers = [part for _ in range(6) for part in (nn.Linear(1024, 1024), nn.BatchNorm1d(1024))]
    model = nn.Sequential(*layers).to(CUDA)
    parameters = model.parameters()
    optimizer: torch.optim.Optimizer = (
        torch.optim.SGD(parameters, 0.1, momentum=0.9) if name == "sgd" else torch.optim.AdamW(parameters)
    )
    inputs = torch.randn(64, 1024, device=CUDA)
    expected = []
    with Checkpointer(tmp_path, asynchronous=True, keep_last=99) as checkpointer:
        for step in range(1, 9):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            checkpointer.before_update()
            optimizer.step()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            expected.append(digests_of(state))
            checkpointer.save(state, step=step, epoch=0, changing=model.buffers())
    found = sorted(find_checkpoints(tmp_path), key=lambda checkpoint: checkpoint.step)
    assert len(found) == 8
    assert [digests_of(load(checkpoint)) for checkpoint in found] == expected


def test_a_copy_beside_the_training_holds_back_the_update_on_the_device(tmp_path: Path) -> None:
    """The device is kept busy, so that the copies begin long after the host has gone on to change the weights."""
    weights = torch.zeros(1 << 24, device=CUDA)
    busy = torch.randn(4096, 4096, device=CUDA)
    with Checkpointer(tmp_path, asynchronous=True, keep_last=99) as checkpointer:
        checkpointer.prepare({"weights": weights})
        for step in range(1, 6):
            for _ in range(20):
                busy = (busy @ busy).tanh()
            weights.fill_(step)
            checkpointer.save({"weights": weights}, step=step, epoch=0, changing=[])
            checkpointer.before_update()
            weights.fill_(-1)
    for checkpoint in find_checkpoints(tmp_path):
        assert load(checkpoint)["weights"].unique().tolist() == [float(checkpoint.step)]
