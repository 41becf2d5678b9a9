"""Exact reduction inside other people's training loops: Lightning and Fabric, Accelerate, the HF Trainer, torchft.

One module for each package, which imports that package and nothing of the others; none of them is installed with this
project. What the loops of the first three have in common stands in `dealing` (which samples a rank gets) and in
`micro_steps` (what happens around each forward and backward). A module that is not about such a loop does not belong
here. What others may use is in the `__all__` of the modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ddp_core.base.extras import needs
from ddp_core.base.torchvision_import import import_torchvision

__all__: list[str] = []


@contextmanager
def imports_of(adapter: str, package: str, extra: str = "peers") -> Iterator[None]:
    """Around an adapter's imports of its package: raises ModuleNotFoundError that says what to install."""
    with suppress(ModuleNotFoundError):  # all these packages import it where it is installed
        import_torchvision()
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{needs(f'ddp_core.adapters.{adapter}', extra, package)}, or {package} alone",
            name=package,
        ) from error
