"""Ranks that keep a part each: of the optimizer's state, also of gradients, also of parameters, in one interface.

A `Sharding` is made once from a layout: it refuses and cuts. What it cuts, an `Ownership` (`OwnsPieces`; `OwnsRows` in
`rows`) puts together and cuts again where state leaves and enters. What goes in here knows modules and optimizers, but
no trainer and no file.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .ownership import Ownership
from .sharding import Sharding

if TYPE_CHECKING:
    from .owns_part import OwnsPart
    from .pieces import OwnsPieces

__all__ = ["Ownership", "OwnsPart", "OwnsPieces", "Sharding"]

_PLACES = {"OwnsPart": "owns_part", "OwnsPieces": "pieces"}
"""Loaded when they are asked for, since most runs cut nothing."""


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
