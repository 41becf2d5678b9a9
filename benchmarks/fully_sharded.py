"""What the exact reduction costs where parameters are sharded: steps of torch's FSDP2 and of `--shard parameters`.

    python -m benchmarks.fully_sharded [--worlds 2 4] [--rounds 7] [--quick] [--json PATH]

Two models of 25 million parameters, the linear layers of benchmarks.sharded and the transformer of char_transformer,
with AdamW (fused) and micro-batches so small that hardly anything but gradients, updates and parameters takes time.
"FSDP2, plain" is torch's `fully_shard` with its own reduce-scatter and its optimizer over the DTensors, in the same
blocks, gathered and freed alike. Gloo has no reduce-scatter: torch makes an all-reduce of it, which sends twice as
much. So "FSDP2, all-to-all" is the same with a reduce-scatter that sends each rank its part alone (`AllToAll`), as the
exact sum does, and the target is for the ratio to that. MB are those that a rank sends in a step, the mean over the
ranks, as the kernel counts them.

Processes return large blocks to the system as soon as they are freed, as those of `ddp train --shard parameters` do, to
be small. The ways take turns in one run, each with a model of its own; the slowest rank counts; ratios are medians over
the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from benchmarks.record import record
from benchmarks.reduction import on_ranks
from benchmarks.sharded import LAYERS, ROWS, WARM_UP, WIDTH
from benchmarks.turns import rotated
from ddp_core.base.process import return_large_blocks
from ddp_core.model.builders import MODELS
from ddp_core.sharding.blocks import blocks_of
from ddp_core.sharding.rows import OwnsRows
from ddp_lab.claims.measuring import wire

PLAIN, ALL_TO_ALL, EXACT = "FSDP2, plain", "FSDP2, all-to-all", "parameters, exact"
WAYS = (PLAIN, ALL_TO_ALL, EXACT)
TARGET = 1.10
"""The ratio of exact to FSDP2 with an all-to-all."""
SAMPLES, LENGTH = 2, 16


def linear_layers(quick: bool) -> tuple[nn.Module, Tensor]:
    """The network of benchmarks.sharded and a micro-batch for it."""
    layers = (part for _ in range(2 if quick else LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    return nn.Sequential(*layers), torch.randn(ROWS, WIDTH)


def transformer(quick: bool) -> tuple[nn.Module, Tensor]:
    """The model of char_transformer and a micro-batch for it."""
    net = MODELS["transformer"](width=512, depth=1 if quick else 8, dropout=0.05)
    return net, torch.randint(0, 128, (SAMPLES, LENGTH))


NETS: dict[str, Callable[[bool], tuple[nn.Module, Tensor]]] = {
    "linear layers": linear_layers,
    "transformer": transformer,
}


class AllToAll:
    """A reduce-scatter for `FSDPModule.set_custom_reduce_scatter` that sends each rank its part alone."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what is reduced, and for the sum."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Sum this rank's part of all ranks' `input_tensor` into `output_tensor`."""
        assert op == dist.ReduceOp.SUM, op
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        torch.sum(parts.view(group.size(), -1), dim=0, out=output_tensor)


class Contender:
    """A network, sharded in one of the ways, and its optimizer; `own` micro-batches in a step of each rank."""

    def __init__(self, way: str, net: str, own: int, quick: bool) -> None:
        torch.manual_seed(0)
        self.net, self.inputs = NETS[net](quick)
        self.own = own
        self.close: list[Callable[[], None]] = []
        group = dist.group.WORLD
        assert group is not None
        self.micro_batches = own * group.size()
        if way.startswith("FSDP2"):
            for block in blocks_of(self.net):
                fully_shard(block, reshard_after_forward=True)
            fully_shard(self.net, reshard_after_forward=False)
            for part in self.net.modules():
                if isinstance(part, FSDPModule):
                    # Sums, not means: gloo has nothing else.
                    part.set_gradient_divide_factor(1)
                    part.set_force_sum_reduction_for_comms(True)
                    if way == ALL_TO_ALL:
                        # Its base class has a private name alone.
                        part.set_custom_reduce_scatter(AllToAll())  # type: ignore[arg-type]
            self.optimizer = torch.optim.AdamW(self.net.parameters(), fused=True)
            self.step: Callable[[], None] = self._fsdp_step
            return
        self.optimizer = torch.optim.AdamW(self.net.parameters(), fused=True)
        owned = OwnsRows(self.net, self.optimizer, self.micro_batches, process_group=group)
        self.reduction = owned.reduction
        self.step = self._own_step
        self.close += [self.reduction.close, owned.close]

    def _backward(self) -> None:
        self.net(self.inputs).sum().backward()

    def _fsdp_step(self) -> None:
        self.optimizer.zero_grad()
        for _ in range(self.own):
            self._backward()
        self.optimizer.step()

    def _own_step(self) -> None:
        self.reduction.begin(self.micro_batches)
        for index in self.reduction.share:
            with self.reduction.micro_batch(index):
                self._backward()
        self.reduction.finish()
        self.optimizer.step()


def time_steps(rank: int, world_size: int, rounds: int, net: str, own: int, quick: bool) -> dict[str, dict[str, Any]]:
    """By way: seconds of the slowest rank in each round, and the bytes that a rank sends in a step."""
    return_large_blocks()
    contenders = {way: Contender(way, net, own, quick) for way in WAYS}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(rounds + WARM_UP):
        for way in rotated(WAYS, turn):
            dist.barrier()
            start = time.perf_counter()
            contenders[way].step()
            slowest = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            if turn >= WARM_UP:
                seconds[way].append(slowest.item())
    found = {way: {"seconds": seconds[way], "sent_bytes": sent_bytes(contenders[way].step)} for way in WAYS}
    for contender in contenders.values():
        for close in contender.close:
            close()
    return found


def sent_bytes(step: Callable[[], None]) -> float | None:
    """Bytes that a rank sends in a step, the mean over the ranks; None where the kernel does not count them."""
    if not wire.can_count():
        return None
    dist.barrier()
    before, _ = wire.bytes_moved()
    step()
    dist.barrier()
    sent = torch.tensor(wire.bytes_moved()[0] - before, dtype=torch.float64)
    dist.all_reduce(sent)
    return sent.item() / dist.get_world_size()


def measure(worlds: list[int], rounds: int, shares: tuple[int, ...], quick: bool) -> list[dict[str, Any]]:
    """All figures, printed as they come."""
    rows = []
    print(f"AdamW, medians of {rounds} rounds in turns")
    print(
        "model          parameters  ranks  micro-batches per rank  way                ms a step"
        "  / FSDP2, plain  / all-to-all  MB sent"
    )
    for net, build in NETS.items():
        parameters = sum(each.numel() for each in build(quick)[0].parameters())
        for world_size in worlds:
            for own in shares:
                found = on_ranks(time_steps, world_size, rounds, net, own, quick)
                seconds = {way: figures["seconds"] for way, figures in found.items()}
                sent = {way: figures["sent_bytes"] for way, figures in found.items()}
                of_plain, of_fair = (
                    {way: _ratio(values, seconds[base]) for way, values in seconds.items()}
                    for base in (PLAIN, ALL_TO_ALL)
                )
                for way in WAYS:
                    print(
                        f"{net:<13} {parameters:11,} {world_size:6} {own:23}  {way:<18} "
                        f"{1e3 * statistics.median(seconds[way]):9.1f} {of_plain[way]:15.2f} {of_fair[way]:13.2f} "
                        f"{'?' if sent[way] is None else f'{sent[way] / 1e6:.1f}':>8}",
                        flush=True,
                    )
                row = {"model": net, "parameters": parameters, "world_size": world_size, "micro_batches_per_rank": own}
                row |= {"target": TARGET, "ratios": of_plain, "ratios_to_all_to_all": of_fair}
                rows.append(row | {"sent_bytes": sent, "seconds": seconds})
    return rows


def _ratio(seconds: list[float], base: list[float]) -> float:
    return statistics.median(ours / theirs for ours, theirs in zip(seconds, base, strict=True))


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="small networks on two ranks, three rounds")
    parser.add_argument("--json", type=Path, help="where to record the results (default: benchmarks/results)")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.worlds, arguments.rounds = [2], 3
    shares: tuple[int, ...] = (1,) if arguments.quick else (1, 2)
    found = measure(arguments.worlds, arguments.rounds, shares, arguments.quick)
    worlds = " ".join(map(str, arguments.worlds))
    command = f"python -m benchmarks.fully_sharded --worlds {worlds} --rounds {arguments.rounds}"
    print(record("fully_sharded", command, found, arguments.json, arguments.rounds))


if __name__ == "__main__":
    main()
