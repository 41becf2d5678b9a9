"""Training state of which each rank keeps and updates a part; put together and cut where it leaves and enters.

`ShardedOptimizer` does so for the state of any optimizer that treats each element by itself (`elementwise`), on top of
an `ExactReduction` with shards. `FullySharded` (in `fully_sharded`, which takes a second to import) does so for the
parameters, too, of any module that torch's `fully_shard` can wrap. What goes in here knows modules and optimizers, but
no trainer and no file.
"""

from .blocks import refuse_unsuitable
from .elementwise import require_elementwise
from .optimizer import ShardedOptimizer

__all__ = ["ShardedOptimizer", "refuse_unsuitable", "require_elementwise"]
