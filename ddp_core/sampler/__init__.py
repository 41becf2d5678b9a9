"""Which samples come when, and who takes them: the same global order on every layout, resumable inside an epoch.

`GlobalOrder` (`order`) is that order, `ElasticSampler` (`elastic`) the position in it, in DistributedSampler's place;
`MicroBatches` (`micro_batches`) cuts it into the steps of an exact reduction and loads this rank's part.
"""

from .elastic import ElasticSampler
from .micro_batches import MicroBatches, Step
from .order import BLOCK, GlobalOrder, Ids, Permutation

__all__ = [
    "BLOCK",
    "ElasticSampler",
    "GlobalOrder",
    "Ids",
    "MicroBatches",
    "Permutation",
    "Step",
]
