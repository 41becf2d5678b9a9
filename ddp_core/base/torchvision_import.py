"""Imports torchvision where it is needed, even if it was built against another torch.

The wheel of the package index is built against CUDA torch. With a CPU-only torch its compiled operators do not load,
and the import ends in "operator torchvision::nms does not exist". This project never calls these operators, so it is
enough to declare the two that the import looks up.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

_kept: list[torch.library.Library] = []
"""Library objects that have declared operators: torch forgets the declarations of one that is deleted."""


def lacks_operators(error: RuntimeError) -> bool:
    """Whether an import of torchvision ended with this error because it was built against another torch."""
    return "torchvision::nms" in str(error)


def import_torchvision(submodule: str = "models") -> ModuleType:
    """The module `torchvision.<submodule>`; the first import takes about a second."""
    try:
        return importlib.import_module(f"torchvision.{submodule}")
    except RuntimeError as error:
        if not lacks_operators(error):
            raise
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)
    return importlib.import_module(f"torchvision.{submodule}")
