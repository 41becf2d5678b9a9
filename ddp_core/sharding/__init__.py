"""Ranks that keep a part each: of the optimizer's state, also of gradients, also of parameters, in one interface.

A `Sharding` is made once from a layout: it refuses and cuts. What it cuts, an `Ownership` (`OwnsAll`,
`OwnsPieces`; `OwnsRows` in `rows`) puts together and cuts again where state leaves and enters. What goes in here knows
modules and optimizers, but no trainer and no file.
"""

from typing import TYPE_CHECKING, Any

from .ownership import Ownership, OwnsAll
from .sharding import Sharding

if TYPE_CHECKING:
    from .owns_part import OwnsPart
    from .pieces import OwnsPieces

__all__ = ["Ownership", "OwnsAll", "OwnsPart", "OwnsPieces", "Sharding"]


def __getattr__(name: str) -> Any:
    """The names for ranks that own a part; loaded when they are asked for, since most runs cut nothing."""
    if name == "OwnsPart":
        from .owns_part import OwnsPart

        return OwnsPart
    if name == "OwnsPieces":
        from .pieces import OwnsPieces

        return OwnsPieces
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
