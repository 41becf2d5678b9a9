"""Lets `import torchvision` succeed beside a torch of another build; `make setup` puts it into such a `.venv`.

The compiled operators of a torchvision for CUDA do not load beside a torch for the CPU, and its import then ends in
"operator torchvision::nms does not exist", because it describes two operators that nothing has declared. Declared, they
can be described; whoever calls a compiled operator gets torchvision's own error. Its models, transforms, data sets and
readers need none.

A `.pth` file has every interpreter of the environment import this file: standard library only, and torch not before
torchvision is asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

_kept: list[object] = []
"""Library objects that have declared operators: torch forgets the declarations of one that is deleted."""


class _BeforeTorchvision(MetaPathFinder):
    """Finds nothing itself; the first time that torchvision is looked for, it declares what would be missing."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            found = PathFinder.find_spec(name, path)
            if found is not None and found.origin is not None:
                declare_unless_loaded(Path(found.origin).parent)
        return None


def declare_unless_loaded(torchvision: Path) -> None:
    """Declare the two operators where the compiled ones in the folder `torchvision` do not load."""
    try:
        import torch
    except ImportError:
        return  # torchvision's own import will say it
    try:
        for library in torchvision.glob("_C*.so"):
            torch.ops.load_library(library)
    except OSError:
        declared = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            declared.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _kept.append(declared)


sys.meta_path.insert(0, _BeforeTorchvision())
