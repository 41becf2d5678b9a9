"""Ranks that keep a part each: of the optimizer's state, also of gradients, also of parameters, in one interface.

A `Sharding` is made once from a layout: it refuses, cuts and foretells memory. What it cuts, an `Ownership` (`OwnsAll`,
`OwnsPieces`; `OwnsRows` in `rows`) puts together and cuts again where state leaves and enters. What goes in here knows
modules and optimizers, but no trainer and no file.
"""

from .ownership import Ownership, OwnsAll, OwnsPart
from .pieces import OwnsPieces
from .sharding import Sharding

__all__ = ["Ownership", "OwnsAll", "OwnsPart", "OwnsPieces", "Sharding"]
