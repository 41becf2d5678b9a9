"""The library by the project's name: `import samebits` gives what `import ddp_core` gives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ddp_core
from ddp_core import __all__ as __all__

if TYPE_CHECKING:
    from ddp_core import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """A public name, loaded now. Raises AttributeError for any other, also for those that would make it a package."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(ddp_core, name)


def __dir__() -> list[str]:
    return dir(ddp_core)
