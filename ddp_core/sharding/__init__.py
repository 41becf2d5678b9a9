"""Optimizers of which each rank keeps and makes a part: updates of pieces, and their state put together and cut.

`ShardedOptimizer` does so for any optimizer that treats each element by itself (`elementwise`), on top of an
`ExactReduction` with shards. What goes in here knows optimizers, but no trainer and no file.
"""

from .elementwise import require_elementwise
from .optimizer import ShardedOptimizer

__all__ = ["ShardedOptimizer", "require_elementwise"]
