"""What makes a GPU fast changes no bit that it should not, and lets the host wait for nothing within a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from ddp_core.base.determinism import choose_kernels
from ddp_core.data.splits import InMemory
from ddp_core.observe.step import StepBatch, StepObserver
from tests.core.trainers.builders import experiment, trainer_of
from tests.support.commands import command, ddp, trained

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

# Shipped experiments that need no download.
BUNDLED = ["digits", "toy_mlp", "linear_regression", "counter_buffer", "resnet18_synthetic"]
ON_ONE_GPU = ["--layout", "ddp", "--nproc-per-node", "2", "--backend", "gloo"]


def digest(output: Path, *words: str, env: dict[str, str] | None = None) -> str:
    """The digest of the weights after twelve steps of a convolutional network with batch norm and dropout."""
    settings = ["--set", "max_steps=12", "--device", "cuda", "--output", str(output)]
    # What torch reads of its environment as it is loaded, a fork does not.
    ended = (command if env else ddp)("train", "digits", *settings, *words, timeout=300, env=env)
    assert ended.code == 0, ended.output + ended.errors
    found: str = trained(output)[1]["weights_sha256"]
    return found


@pytest.mark.parametrize("reduction", ["exact", "plain"])
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_a_graph_changes_no_bit(precision: str, reduction: str, tmp_path: Path) -> None:
    words = ["--set", f"precision={precision}", "--reduction", reduction, "--deterministic", "always"]
    wanted = digest(tmp_path / "without", *words)
    found = [digest(tmp_path / f"graph-{turn}", *words, "--cuda-graph") for turn in range(3)]
    assert found == [wanted] * 3


def test_a_graph_leaves_the_smaller_last_micro_batch_alone(tmp_path: Path) -> None:
    """23 steps of 64 samples pass the end of the first epoch."""
    words = ["--set", "last_batch=keep", "--set", "max_steps=25"]
    wanted = digest(tmp_path / "without", *words)
    assert digest(tmp_path / "graph", *words, "--cuda-graph") == wanted


@pytest.mark.parametrize("words", [[], ["--cuda-graph"]], ids=["eager", "graph"])
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("memory_format", ["contiguous", "channels_last"])
def test_two_ranks_on_one_device_end_as_one_process(
    memory_format: str, precision: str, words: list[str], tmp_path: Path
) -> None:
    settings = ["--set", f"precision={precision}", "--set", f"memory_format={memory_format}", *words]
    wanted = digest(tmp_path / "single", *settings)
    assert digest(tmp_path / "ddp", *settings, *ON_ONE_GPU) == wanted


@pytest.mark.parametrize("name", BUNDLED)
def test_no_shipped_experiment_needs_a_kernel_that_does_not_repeat_its_bits(name: str, tmp_path: Path) -> None:
    """torch raises where an operation has no deterministic kernel."""
    words = ["--set", "max_steps=2", "--device", "cuda", "--deterministic", "always", "--output", str(tmp_path)]
    ended = command("train", name, *words, timeout=300)
    assert ended.code == 0, ended.output + ended.errors


def test_the_hook_uses_no_memory_before_it_is_written(tmp_path: Path) -> None:
    """torch's sanitizer raises where streams use the same memory without waiting for each other."""
    everywhere = str(Path(__file__).parent / "sanitized")
    digest(tmp_path, *ON_ONE_GPU, env={"TORCH_CUDA_SANITIZER": "1", "PYTHONPATH": everywhere})


@pytest.fixture
def cuda() -> Iterator[torch.device]:
    choose_kernels()
    yield torch.device("cuda", 0)
    torch.cuda.set_sync_debug_mode("default")


def images(count: int) -> InMemory:
    generator = torch.Generator().manual_seed(0)
    return InMemory(
        torch.randn(count, 3, 32, 32, generator=generator), torch.randint(0, 5, (count,), generator=generator)
    )


def network() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.Dropout(0.2)),
        *(nn.AvgPool2d(7), nn.Flatten(), nn.Linear(1024, 5)),
    )


class RaisesWhereTheHostWaits(StepObserver):
    """Makes torch raise where the host waits, in steps 6 and 7: after 4 and 8 steps, values are compared."""

    def after_step(self, batch: StepBatch) -> None:
        if batch.step in (4, 6):
            torch.cuda.set_sync_debug_mode("error" if batch.step == 4 else "default")


@pytest.mark.parametrize("cuda_graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("reduction", ["exact", "plain"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_no_step_waits_for_the_device(cuda: torch.device, optimizer: str, reduction: str, cuda_graph: bool) -> None:
    record = experiment(
        reduction=reduction,
        optimizer={"name": optimizer, "lr": 0.01, "momentum": 0.9} if optimizer == "sgd" else {"name": optimizer},
        clip_norm=1.0,
        ema_decay=0.9,
        memory_format="channels_last",
        schedule={"name": "cosine"},
    )
    with trainer_of(
        record,
        network,
        train=images(16 * 8),
        device=cuda,
        log_every=1000,
        cuda_graph=cuda_graph,
        observers=[RaisesWhereTheHostWaits()],
    ) as trainer:
        trainer.train()


@pytest.mark.parametrize("cuda_graph", [False, True], ids=["eager", "graph"])
def test_the_parts_of_a_step_add_up_to_its_time(cuda: torch.device, cuda_graph: bool) -> None:
    with trainer_of(
        experiment(epochs=40), network, train=images(16 * 8), device=cuda, log_every=1000, cuda_graph=cuda_graph
    ) as trainer:
        torch.cuda.synchronize()
        began = time.perf_counter()
        trainer.train()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        parts = trainer.clock.per_step()
    assert sum(parts.values()) * trainer.steps.total == pytest.approx(seconds, rel=0.1)
    assert min(parts["forward"], parts["backward"], parts["optimizer"]) > 0
