"""What the exact reduction costs a training step in Lightning, Fabric, Accelerate and the Hugging Face Trainer.

    python -m benchmarks.adapters [--worlds 1 2] [--rounds 15] [--batch 64] [--micro-batch 16] [--json PATH]

Each peer trains ResNet-18 on 32x32 images on W ranks over gloo, one thread each, in two ways that take turns within
the same processes: as it does by itself (with DistributedDataParallel where W > 1), and with this project's adapter.
Both accumulate the same micro-batches. The time per step leaves out the first step of a turn. Each figure is the ratio
of exact's time to the peer's own in the same round, as the median over the rounds. For a machine that others disturb
there are also the ratio of the fastest turns, and that of rank 0's processor time. The peers are measured where they
are installed: pip install -e '.[peers]'.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.metadata
import importlib.util
import logging
import multiprocessing
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.loops import SETTINGS, Case, Clock
from benchmarks.record import record
from benchmarks.turns import Seconds, summary
from ddp_core.base.torchvision_import import import_torchvision
from ddp_core.distributed.world import free_port

Way = Callable[[Case, int, int, bool], Seconds]
"""One turn of a peer: case, micro-batches per step, ranks, and whether exact."""
DDP = {"broadcast_buffers": False}


class Network(nn.Module):
    """The case's model with its loss, as the Hugging Face Trainer wants it."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.model = case.build_model()

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The mean loss of a micro-batch, under its name."""
        return {"loss": nn.functional.cross_entropy(self.model(inputs), labels)}


def _loader(case: Case) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*case.tensors()), batch_size=case.micro_batch, shuffle=True)


def lightning(case: Case, micro_batches: int, ranks: int, exact: bool) -> Seconds:
    """Lightning's Trainer at its leanest."""
    from lightning import LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy

    from ddp_core.adapters.lightning import ExactStrategy

    clock = Clock(case.steps)

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.network = Network(case)

        def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
            loss: Tensor = self.network(*batch)["loss"]
            return loss

        def on_train_batch_end(self, _: object, __: object, number: int) -> None:
            if (number + 1) % (micro_batches // ranks) == 0:
                clock.tick()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), **SETTINGS)

    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=ExactStrategy(micro_batches) if exact else DDPStrategy(**DDP) if ranks > 1 else "auto",
        accumulate_grad_batches=micro_batches // ranks,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), _loader(case))
    return clock.seconds()


def fabric(case: Case, micro_batches: int, ranks: int, exact: bool) -> Seconds:
    """A loop with Lightning Fabric."""
    from lightning import Fabric
    from lightning.fabric.strategies import DDPStrategy

    from ddp_core.adapters.fabric import ExactFabricStrategy

    strategy: Any = ExactFabricStrategy(micro_batches) if exact else DDPStrategy(**DDP) if ranks > 1 else "auto"
    peer = Fabric(accelerator="cpu", devices=ranks, strategy=strategy)
    peer.launch()
    network, accumulation_steps, clock = Network(case), micro_batches // ranks, Clock(case.steps)
    model, optimizer = peer.setup(network, torch.optim.SGD(network.parameters(), **SETTINGS))
    for number, batch in enumerate(peer.setup_dataloaders(_loader(case)), start=1):
        last = number % accumulation_steps == 0
        with peer.no_backward_sync(model, enabled=not last):
            loss = model(*batch)["loss"]
            peer.backward(loss if exact else loss / accumulation_steps)
        if last:
            optimizer.step()
            optimizer.zero_grad()
            clock.tick()
    if exact:
        strategy.steps.close()
    return clock.seconds()


def accelerate(case: Case, micro_batches: int, ranks: int, exact: bool) -> Seconds:
    """A loop with Accelerate."""
    from accelerate import Accelerator, DistributedDataParallelKwargs

    from ddp_core.adapters.accelerate import ExactAccelerator

    accumulation_steps, handlers = micro_batches // ranks, [DistributedDataParallelKwargs(**DDP)]
    peer = (
        ExactAccelerator(micro_batches, cpu=True)
        if exact
        else Accelerator(cpu=True, gradient_accumulation_steps=accumulation_steps, kwargs_handlers=handlers)
    )
    network, clock = Network(case), Clock(case.steps)
    raw_optimizer = torch.optim.SGD(network.parameters(), **SETTINGS)
    model, optimizer, loader = peer.prepare(network, raw_optimizer, _loader(case))
    for batch in loader:
        with peer.accumulate(model):
            peer.backward(model(*batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
        if peer.sync_gradients:
            clock.tick()
    if exact:
        peer.steps.close()
    return clock.seconds()


def transformers(case: Case, micro_batches: int, ranks: int, exact: bool) -> Seconds:
    """The Hugging Face Trainer without log and checkpoints."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from ddp_core.adapters.transformers import ExactTrainer

    clock, network = Clock(case.steps), Network(case)

    class Tick(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: object, **__: object) -> None:
            clock.tick()

    with tempfile.TemporaryDirectory() as place:
        arguments = TrainingArguments(
            output_dir=place,
            per_device_train_batch_size=case.micro_batch,
            gradient_accumulation_steps=micro_batches // ranks,
            ddp_broadcast_buffers=False,
            ddp_find_unused_parameters=False,
            num_train_epochs=1,
            max_grad_norm=0.0,
            use_cpu=True,
            disable_tqdm=True,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
        )
        named = {
            "model": network,
            "args": arguments,
            "train_dataset": [
                {"inputs": inputs, "labels": label} for inputs, label in zip(*case.tensors(), strict=True)
            ],
            "optimizers": (torch.optim.SGD(network.parameters(), **SETTINGS), None),
            "callbacks": [Tick()],
        }
        (ExactTrainer(micro_batches=micro_batches, **named) if exact else Trainer(**named)).train()
    return clock.seconds()


PEERS: dict[str, tuple[str, Way]] = {
    "Lightning": ("lightning", lightning),
    "Fabric": ("lightning", fabric),
    "Accelerate": ("accelerate", accelerate),
    "Hugging Face Trainer": ("transformers", transformers),
}
"""Name, the package that must be there, one turn."""


def _rank(rank: int, ranks: int, port: int, peer: str, case: Case, rounds: int, results: Any) -> None:
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": 0}
    if ranks > 1:
        os.environ.update({name: str(value) for name, value in places.items()}, TORCHELASTIC_RUN_ID="benchmark")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo", HF_HUB_OFFLINE="1")
    torch.set_num_threads(1)
    import_torchvision()  # the peers do
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if ranks > 1:
        dist.init_process_group("gloo")
    assert case.micro_batch is not None
    micro_batches, turn = case.global_batch_size // case.micro_batch, PEERS[peer][1]
    seconds: dict[str, list[Seconds]] = {"its own": [], "exact": []}
    with (
        open(os.devnull, "w") as nowhere,  # noqa: PTH123
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        for number in range(rounds + 1):
            for way in sorted(seconds, reverse=number % 2 == 1):
                answer = turn(case, micro_batches, ranks, way == "exact")
                gc.collect()
                if number:  # the first round warms up
                    seconds[way].append(answer)
    if rank == 0:
        results.put(seconds)
    if dist.is_initialized():
        dist.destroy_process_group()


def measure(peer: str, case: Case, ranks: int, rounds: int) -> dict[str, Any]:
    """Seconds per step of both ways, and exact's ratio; printed. Raises RuntimeError where a rank fails."""
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    results, port = context.SimpleQueue(), free_port()
    processes = [
        context.Process(target=_rank, args=(rank, ranks, port, peer, case, rounds, results), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise RuntimeError(f"{peer}: a rank failed: exit codes {[process.exitcode for process in processes]}")
    seconds: dict[str, list[Seconds]] = results.get()
    own, wall = summary(seconds)["its own"], summary(seconds)["exact"]
    processor = summary(seconds, "cpu")["exact"]
    version = importlib.metadata.version(PEERS[peer][0])
    own_ms, exact_ms = 1e-3 * own["microseconds"], 1e-3 * wall["microseconds"]
    print(
        f"{f'{peer} {version}':28} {ranks:5}   {own_ms:9.1f} ms {exact_ms:9.1f} ms {wall['ratio']:6.3f} "
        f"({wall['low']:.3f} to {wall['high']:.3f})   {wall['fastest']:7.3f}   {processor['ratio']:9.3f}"
    )
    return {"peer": peer, "version": version, "ranks": ranks, "wall": wall, "processor": processor, "turns": seconds}


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--peer", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="one round of one step; recorded with --json only")
    parser.add_argument("--json", type=Path, help="where to record the results (default: benchmarks/results)")
    arguments = parser.parse_args()
    batch, micro_batch = (4, 2) if arguments.quick else (arguments.batch, arguments.micro_batch)
    steps, rounds = (1, 1) if arguments.quick else (arguments.steps, arguments.rounds)
    case = Case("ResNet-18, 32x32", "resnet18", (3, 32, 32), batch, steps, True, micro_batch)
    print(f"ResNet-18, 32x32, batch {batch} in micro-batches of {micro_batch}; medians of {rounds} rounds in turns")
    print(f"{'':28} ranks   {'its own':>12} {'exact':>12} {'ratio (quartiles)':>23}   fastest   processor")
    results = []
    for peer in arguments.peer:
        if importlib.util.find_spec(PEERS[peer][0]) is None:
            print(f"{peer}: not installed: pip install {PEERS[peer][0]}")
            continue
        results += [measure(peer, case, ranks, rounds) for ranks in arguments.worlds]
    if results and (arguments.json or not arguments.quick):
        command = f"python -m benchmarks.adapters --rounds {rounds} --batch {batch} --micro-batch {micro_batch}"
        print(record("adapters", command, results, arguments.json, rounds))


if __name__ == "__main__":
    main()
