"""The sum over micro-batches that come in rounds, one for each rank: round k brings the leaves k * W … k * W + W - 1.

1. Cut the N elements into W parts; rank r sums part r.
2. In each round every rank sends part r of its leaf to rank r: (W-1)/W * N elements.
3. The leaves of a round are neighbours. Rank r pushes part r of them in order onto a binary counter, the canonical tree
   for this part: N/W * (log2(M) + 1) elements at most, however the leaves lie.
4. After the last round every rank sends its part of the sum to all others: (W-1)/W * N elements.

Each element sees the same additions as in `ordered_sum`. Where each rank needs its own part alone, step 4 is left out.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .exchange import WholeExchange, cut
from .tree import GradientTree


class RoundSum:
    """One step's sum of flat tensors of `elements` elements over `leaves` micro-batches.

    Collective: every rank makes the same calls in the same order. `like` has the tensors' dtype and device. `cuts` are
    the ranks' parts of a flat tensor. Without them parts are about equal, or every rank sums the whole tensor where
    that costs no more: the same additions, and step 4 is saved.
    """

    def __init__(
        self,
        exchange: WholeExchange,
        elements: int,
        like: Tensor,
        leaves: int,
        cuts: Sequence[slice] | None = None,
    ) -> None:
        self._exchange, self._elements, self._like = exchange, elements, like
        if cuts is None:
            ranks = exchange.world_size
            rounds = -(-leaves // ranks)
            # Whole leaves are (W-1) * N elements a round in place of (W-1)/W * N, and save the (W-1)/W * N of step 4.
            extra_elements = (rounds * (ranks - 1) - 1) * elements
            sums_whole = extra_elements * like.element_size() <= exchange.one_round_bytes
            cuts = [slice(0, elements)] * ranks if sums_whole else cut(elements, ranks, like.dtype)
        self._cuts = cuts
        self._tree = GradientTree(leaves)

    def empty(self) -> Tensor:
        """Memory for one leaf: a flat tensor whose values are arbitrary."""
        return self._like.new_empty(self._elements)

    def push(self, flat: Tensor | None) -> None:
        """Exchange the leaves of the next round. This rank's leaf is `flat`, which it may not use any more.

        None on a rank without a leaf in the last round.
        """
        if not self._elements:
            return
        senders = min(self._exchange.world_size, self._tree.leaves - self._tree.next_leaf)
        for part in self._exchange.scatter(flat, self._cuts, self._like, senders):
            self._tree.push([part])

    def own_total(self) -> Tensor:
        """Return this rank's part of the sum over all leaves."""
        if not self._elements:
            return self._like.new_empty(0)
        (root,) = self._tree.subtrees
        (mine,) = root.tensors
        assert mine is not None
        return mine

    def total(self) -> Tensor:
        """Return the sum over all leaves, in one flat tensor."""
        mine = self.own_total()
        if self._cuts[0] == self._cuts[-1]:
            return mine
        whole = self.empty()
        whole[self._cuts[self._exchange.rank]] = mine
        self._exchange.gather([(whole, self._cuts)])
        return whole
