"""What is checked before sums are made: DDP's options, what ranks must have in common, and who chose the threads."""

from __future__ import annotations

import os
import socket
import struct
import warnings
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_core.base.digests import fast_digest, first_difference
from ddp_core.base.errors import UserError

from .communication import Channel
from .flat import Gradients

Given = TypeVar("Given")


class OtherWeights(UserError, ValueError):
    """Ranks that should train one model have other weights."""


def refuse_unfit_shares(shares: object, micro_batches: int, world_size: int) -> None:
    """Raise ValueError for what is no way of dealing so many micro-batches to so many ranks, none of which is idle."""
    if not 1 <= world_size <= micro_batches:
        raise ValueError(f"{micro_batches} micro-batches cannot be shared by {world_size} ranks: some would be idle")
    is_given = isinstance(shares, tuple) and len(shares) == world_size and min(shares) > 0
    if not is_given and shares not in ("contiguous", "strided"):
        raise ValueError(
            f'shares are "contiguous", "strided", or a number above 0 for each of {world_size} ranks, not {shares!r}'
        )


def refuse_inexact(ddp: DistributedDataParallel) -> None:
    """Raise ValueError for options of DDP that no reduction can make exact."""
    if ddp.broadcast_buffers and any(True for _ in ddp.buffers()):
        raise ValueError(
            "construct DistributedDataParallel with broadcast_buffers=False: it overwrites micro-batch statistics"
        )
    if ddp.mixed_precision is not None:
        raise ValueError("DistributedDataParallel's mixed_precision is not exact: use torch.autocast")
    if ddp.parameters_to_ignore:
        raise ValueError(
            f"DistributedDataParallel ignores {sorted(ddp.parameters_to_ignore)[0]}: its gradient would differ"
        )


def require_agreement(
    group: dist.ProcessGroup,
    micro_batches: int,
    shares: str,
    gradients: Gradients,
    node: str | int | None,
) -> list[list[int]]:
    """Compare with the other ranks of `group` what the bits of a sum depend on; return its ranks, node by node.

    A collective. `node` names this rank's node: the same on all its ranks, another on other nodes (None: by the name of
    its host). Raises ValueError on all ranks, naming the first rank that differs from rank 0 and in what, or the first
    complex parameter. Without this, ranks that do not fit together wait for each other, or end with bits that no other
    layout has.
    """
    facts: dict[str, object] = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "micro_batches": micro_batches,
        "shares": shares,
        "parameters": len(gradients.parameters),
    }
    for position, (name, parameter) in enumerate(zip(gradients.names, gradients.parameters, strict=True)):
        memory = "" if parameter.is_contiguous() else f", strides {parameter.stride()}"
        facts[f"parameter {position}"] = f"{name}, {parameter.dtype} {tuple(parameter.shape)}{memory}"
    everyones = gathered((socket.gethostname() if node is None else node, facts), group)
    for rank, (_, found) in enumerate(everyones):
        for fact, first in everyones[0][1].items():
            if (other := found.get(fact)) != first:
                raise ValueError(
                    "the ranks do not agree, so their sums would not: "
                    f"{fact} is {first} on rank 0, but {other} on rank {rank}"
                )
    for name, parameter in zip(gradients.names, gradients.parameters, strict=True):
        if parameter.is_complex():
            raise ValueError(
                f"{name} is complex, and ranks exchange real gradients alone: keep its two parts in a real parameter "
                "of shape [..., 2] and call torch.view_as_complex in forward, or train in one process"
            )
    nodes: dict[str | int, list[int]] = {}
    for rank, (theirs, _) in enumerate(everyones):
        nodes.setdefault(theirs, []).append(rank)
    return list(nodes.values())


def require_equal_weights(group: dist.ProcessGroup, module: nn.Module, when: str) -> None:
    """Compare the module's weights and buffers with those of the other ranks of `group`; a collective.

    Raises OtherWeights on all ranks, naming the first tensor that differs; `when` begins the message.
    """
    gather = partial(gathered, group=group)
    tensors = [*module.named_parameters(), *module.named_buffers()]
    if len(set(gather(fast_digest(tensors)))) > 1 and (found := first_difference(gather, tensors)):
        raise OtherWeights(
            f"{when} {found}: seed all ranks alike before the model is made or load the same weights on all of them, "
            "and change them by what is the same on every rank: scale, optimizer, callbacks and hooks. Else a machine "
            "computes wrongly"
        )


def require_equal_scale(channel: Channel, scale: float, step: int) -> None:
    """Raise OtherWeights on all ranks where one finishes a step with another scale; a collective."""
    bits = struct.pack("d", scale)
    # The largest 255 - byte is 255 - the smallest byte: both are ours only where all ranks have our byte.
    both = [*bits, *(255 - each for each in bits)]
    if channel.largest(both) != both:
        raise OtherWeights(
            f"step {step} of this start: `finish` has another scale on another rank, {float(scale)} on this one: give "
            "all ranks the same, such as 1 / the samples of all of them"
        )


def gathered(own: Given, group: dist.ProcessGroup | None) -> list[Given]:
    """What each rank of the group gives, by rank, on every rank; without a group, what this one gives."""
    if group is None:
        return [own]
    everyones = [own] * group.size()
    dist.all_gather_object(everyones, own, group=group)
    return everyones


def warn_of_threads() -> None:
    """Warn where this process computes with several threads only because nobody has said how many."""
    threads = torch.get_num_threads()
    if threads > 1 and "OMP_NUM_THREADS" not in os.environ:
        warnings.warn(
            f"this process computes with {threads} threads, since OMP_NUM_THREADS is not set; torchrun sets it to 1 "
            "where it starts several processes, and other numbers of threads end with other bits: set OMP_NUM_THREADS, "
            "or call torch.set_num_threads(1)",
            stacklevel=3,
        )
