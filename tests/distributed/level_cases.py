"""Trainings on ranks that are dealt to nodes, for worker processes, and sums there, for ranks of any kind."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_core.base.seeds import share_of
from ddp_core.reduction import OrderedSum
from ddp_core.reduction.tree import GradientTree
from tests.distributed import exact_cases as cases

Nodes = Sequence[Sequence[int]]

# Each a world and its ranks, node by node: alike, unlike, out of turn, each on its own, all on one.
WORLDS: dict[str, Nodes] = {
    "2 x 2": [[0, 1], [2, 3]],
    "3 x 2": [[0, 1], [2, 3], [4, 5]],
    "2 x 3": [[0, 1, 2], [3, 4, 5]],
    "1 + 2": [[0], [1, 2]],
    "3 + 1 + 2": [[0, 1, 2], [3], [4, 5]],
    "in turns": [[0, 2, 4], [1, 3, 5]],
    "1 + 5": [[0], [1, 2, 3, 4, 5]],
    "one each": [[0], [1], [2]],
    "one node": [[0, 1, 2, 3]],
}
TRAINED = ("3 + 1 + 2", "3 x 2", "2 x 3", "in turns")
FEW = ("adamw", "incomplete batches")
TRAINED_WAYS = ("contiguous in parts", "strided in parts")


def leaves_of(seed: int, micro_batches: int, elements: int, dtype: torch.dtype) -> Tensor:
    """Random gradients whose sum shows every change of the order."""
    generator = torch.Generator().manual_seed(seed)
    scale = 10.0 ** torch.randint(-3, 4, (micro_batches, 1), generator=generator)
    return (torch.randn(micro_batches, elements, generator=generator) * scale).to(dtype)


def subtrees(leaves: Tensor, first: int, stop: int) -> list[Tensor]:
    """The sums of the maximal nodes of the tree that make up these leaves."""
    tree = GradientTree(len(leaves), first, stop)
    for leaf in leaves[first:stop]:
        tree.push([leaf.clone()])
    return [tensor for subtree in tree.subtrees for tensor in subtree.tensors if tensor is not None]


def wrong_sums(group: dist.ProcessGroup, nodes: Nodes, counts: Sequence[int], name: str) -> Iterator[str]:
    """The sums on this group, in one level and in two, that differ from the tree's in one process."""
    generator = random.Random(name)
    rank, world_size = group.rank(), group.size()
    # In equal shares, and in unlike ones.
    ways = [OrderedSum(group, nodes, tuple(range(1, world_size + 1)) * is_unlike) for is_unlike in range(2)]
    for micro_batches in counts:
        elements = generator.choice([1, 2, 7, 100, 1023])
        dtype = generator.choice([torch.float32, torch.float64, torch.bfloat16])
        leaves = leaves_of(micro_batches, micro_batches, elements, dtype)
        (expected,) = subtrees(leaves, 0, micro_batches)
        for turn, ordered in enumerate(ways):
            share = share_of(micro_batches, rank, ordered.parts or world_size)
            own = subtrees(leaves, share.start, share.stop)
            out = own[-1] if own and turn else torch.full_like(expected, float("nan"))
            ordered(own, out, micro_batches)
            if not torch.equal(out, expected):
                yield f"{name}: M={micro_batches}, {elements} elements, {dtype}, out {'own' if turn else 'new'}"


def trainings(rank: int, world_size: int, thorough: bool) -> dict[tuple[str, str, str], str]:
    """The digests of all trainings of this rank, or of some, by world, case and way."""
    with cases.process_group():
        return {
            (name, case, way): cases.train(cases.TRAININGS[case], world_size, way, node_of(rank, name))
            for name in (TRAINED if thorough else TRAINED[:1])
            for case in (cases.TRAININGS if thorough else FEW)
            for way in TRAINED_WAYS
        }


def node_of(rank: int, world: str) -> int:
    """The rank's node."""
    return next(node for node, members in enumerate(WORLDS[world]) if rank in members)
