"""Trainings on ranks that are dealt to nodes, for worker processes, and sums there, for ranks of any kind."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_core.base.seeds import share_of
from ddp_core.reduction import ExactReduction, OrderedSum
from ddp_core.reduction.messages import PointToPoint
from ddp_core.reduction.tree import GradientTree
from ddp_core.sharding import OwnsPieces
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
SHARES: tuple[Literal["contiguous", "strided"], ...] = ("contiguous", "strided")
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
    ordered = OrderedSum(group, nodes)
    for micro_batches in counts:
        elements = generator.choice([1, 2, 7, 100, 1023])
        dtype = generator.choice([torch.float32, torch.float64, torch.bfloat16])
        leaves = leaves_of(micro_batches, micro_batches, elements, dtype)
        (expected,) = subtrees(leaves, 0, micro_batches)
        share = share_of(micro_batches, rank, world_size)
        for turn in range(2):
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


def bytes_sent(rank: int, world_size: int, nodes: Nodes, elements: int) -> dict[str, dict[str, int]]:
    """Bytes of float32 that this rank sends to its own node and to others, and its messages, in each of these works.

    One sum; steps of two micro-batches per rank with strided shares, and with a piece of the parameters on each rank.
    """
    found: dict[str, dict[str, int]] = {}
    here = next(members for members in nodes if rank in members)
    node, send = nodes.index(here), PointToPoint.send

    @contextlib.contextmanager
    def counting(work: str) -> Iterator[None]:
        sent = found[work] = {"inside": 0, "outside": 0, "messages": 0}

        def counted(exchange: PointToPoint, tensor: Tensor, peer: int, tag: int = 0) -> dist.Work:
            sent["inside" if exchange._members[peer] in here else "outside"] += tensor.nbytes
            sent["messages"] += 1
            return send(exchange, tensor, peer, tag)

        with mock.patch.object(PointToPoint, "send", counted):
            yield

    def step(exact: ExactReduction, weight: nn.Module) -> None:
        for index in exact.share:
            with exact.micro_batch(index):
                (weight(torch.ones(1, 1)).sum() * (index + 1)).backward()
        exact.finish()

    with cases.process_group():
        group = dist.group.WORLD
        ordered, leaf = OrderedSum(group, nodes), torch.ones(elements)
        ordered([leaf], leaf, world_size)  # the first sum also connects all ranks
        with counting("sum"):
            ordered([leaf], leaf, world_size)
        assert leaf[0] == world_size**2
        count = 2 * world_size
        expected = count * (count + 1) / 2
        torch.manual_seed(0)
        net = nn.Linear(1, elements, bias=False)
        with ExactReduction(net, count, process_group=group, shares="strided", node=node) as exact:
            step(exact, net)
            with counting("strided"):
                step(exact, net)
            assert net.weight.grad is not None
            assert net.weight.grad.unique().tolist() == [expected]
        for way in SHARES:
            net = nn.Linear(1, elements, bias=False)
            nn.init.zeros_(net.weight)
            optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
            owned = OwnsPieces(net, optimizer, count, process_group=group, shares=way, node=node)
            with owned.reduction as exact, counting(f"pieces, {way}"):
                step(exact, net)
                optimizer.step()
            assert net.weight.unique().tolist() == [-expected]
            owned.close()
    return found
