"""Exact reduction: gradient sums in one fixed order, so that a result does not depend on the layout.

Sums of floating-point numbers depend on the order of the additions. Here that order is one binary tree over the
micro-batches of a step (`tree`), whichever ranks compute them. Ranks that compute neighbouring micro-batches exchange
partial sums at the end of a step (`contiguous`, `ordered_sum`). Ranks that take micro-batches in turns exchange after
each (`strided`), each the part that it keeps (`parts`). Both do so in the background (`communication`), in
the way that the backend carries best (`exchange`). Batch-norm statistics are exchanged in the same way
(`batch_statistics`). Clipping uses a norm of the same kind (`norm`). `ExactReduction` (`exact`) puts all of it together
for a training loop.

What fails in the background is raised where its result is waited for, and by every later exchange of this rank
(`communication`). The other ranks meet a closed connection once this rank closes its reduction or ends, else the
timeout of the group. What a step would make depend on the layout is refused on the rank that sees it (`watching`).
"""

from .batch_statistics import BatchStatistics
from .exact import ExactReduction
from .flat import take_gradients
from .norm import clip_gradients_, gradient_norm
from .ordered_sum import OrderedSum
from .tree import GradientTree, Span, Subtree, canonical_subtrees, fold, fold_replicas

__all__ = [
    "BatchStatistics",
    "ExactReduction",
    "GradientTree",
    "OrderedSum",
    "Span",
    "Subtree",
    "canonical_subtrees",
    "clip_gradients_",
    "fold",
    "fold_replicas",
    "gradient_norm",
    "take_gradients",
]
