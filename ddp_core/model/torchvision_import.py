"""torchvision, imported only where it is needed, also beside a torch that it was not built against.

The wheel of the package index is built against CUDA torch; beside a CPU-only torch its compiled operators do not load
and the import ends in "operator torchvision::nms does not exist". Nothing here calls them, so declaring the two that
are looked up mends it.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch

_kept: list[Any] = []
"""torch.library forgets a declaration together with the object that made it."""


def import_torchvision(submodule: str = "models") -> ModuleType:
    """The module `torchvision.<submodule>`; costs about a second once. Raises ImportError where torchvision is
    missing."""
    try:
        return importlib.import_module(f"torchvision.{submodule}")
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
    _declare_operators()
    return importlib.import_module(f"torchvision.{submodule}")


def _declare_operators() -> None:
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            schema = f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            library.define(schema)
    _kept.append(library)
