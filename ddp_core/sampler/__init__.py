"""Which samples come when, and who takes them: the same global order on every layout, resumable inside an epoch.

`GlobalOrder` (`order`) is that order, `ElasticSampler` (`elastic`) the position in it, in DistributedSampler's place;
`MicroBatches` (`micro_batches`) cuts it into the steps of an exact reduction and loads this rank's part.
"""

from typing import TYPE_CHECKING, Any

from .order import BLOCK, GlobalOrder, Ids, Permutation

if TYPE_CHECKING:
    from .elastic import ElasticSampler
    from .micro_batches import MicroBatches, Step

__all__ = [
    "BLOCK",
    "ElasticSampler",
    "GlobalOrder",
    "Ids",
    "MicroBatches",
    "Permutation",
    "Step",
]


def __getattr__(name: str) -> Any:
    """The names for loops of other people's, loaded when they are asked for: `ddp train` needs the order alone."""
    if name in __all__:
        from . import elastic, micro_batches

        return getattr(elastic if name == "ElasticSampler" else micro_batches, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
