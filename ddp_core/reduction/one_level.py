"""The ordered sum between members that are all alike: each adds up one chunk, and sends it to the others."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from .exchange import LINE_BYTES, Exchange
from .plan import Plan

_PIECE_ELEMENTS = 1024 * 1024
"""A piece stays in a core's cache between its arrival and its addition, and is large enough for few messages."""


def sum_in_one_level(exchange: Exchange, own: Sequence[Tensor], out: Tensor, plan: Plan) -> None:
    """Sum the members' flat subtrees `own` into `out`, which may be one of them; `own` is overwritten.

    Small tensors, and all of them between two members with one subtree each (where it is no more to send), take one
    round: every member sends its subtrees to all others and adds up everything itself, one piece while the next ones
    arrive. Raises RuntimeError when a peer is gone or silent for the group's timeout.
    """
    members, elements = exchange.world_size, out.numel()
    counts = [len(spans) for spans in plan.spans]
    # A member with c subtrees sends c * (W-1) * N elements in one round, (c + 1) * (W-1)/W * N in two.
    more = (members - 1) * (max(counts) - (max(counts) + 1) / members) * elements * out.element_size()
    if more <= exchange.one_round_bytes:
        pieces = cut(out, -(-elements // _PIECE_ELEMENTS))
        on_their_way = [exchange.collect(own, out, counts, [piece] * members) for piece in pieces]
        for collected in on_their_way:
            collected.sent()
            plan.add_(collected.arrivals, collected.mine)
            collected.end()
    else:
        collected = exchange.collect(own, out, counts, cut(out, members))
        collected.expect()
        plan.add_(collected.arrivals, collected.mine)
        collected.spread()
        collected.end()


def sum_parts(
    exchange: Exchange, own: Sequence[Tensor], like: Tensor, plan: Plan, cuts: Sequence[slice]
) -> Generator[None, None, Tensor]:
    """Sum the members' flat subtrees `own`, each member its own part (`cuts`, one for each) alone; return this one's.

    In two phases: the second waits. `like` is as large as a subtree, and is overwritten; it may be one of them. Raises
    as `sum_in_one_level` does.
    """
    collected = exchange.collect(own, like, [len(spans) for spans in plan.spans], cuts)
    yield
    # Only what no other member is sent is overwritten here.
    total = torch.empty_like(collected.mine)
    plan.add_(collected.arrivals, total)
    collected.sent()
    collected.end()
    return total.to(like.device)


def cut(flat: Tensor, parts: int) -> list[slice]:
    """Cut a flat tensor at multiples of `LINE_BYTES` into neighbouring parts of about one size; some may be empty."""
    elements, line = flat.numel(), LINE_BYTES // flat.element_size()
    lines = -(-elements // line)
    borders = [min(elements, lines * part // parts * line) for part in range(parts + 1)]
    return [slice(*pair) for pair in itertools.pairwise(borders)]
