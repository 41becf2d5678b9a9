"""Runs first in each Python process of a diagnosed script, also in those that it starts itself: traces what uses torch.

Python imports a module of this name at its start; `ddp_lab.diagnose.runs` puts this folder into PYTHONPATH. The module
of this name that would have been imported otherwise is executed, too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType

_HERE = Path(__file__).resolve().parent


class _TracedTorch(Loader):
    """Loads torch, then hangs the tracer into it."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        root = str(_HERE.parents[2])
        if root not in sys.path:
            sys.path.append(root)  # the last place: it hides nothing of the script's
        from ddp_lab.diagnose.tracer import install

        install()


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # It stays after the first call: `importlib.util.find_spec("torch")` asks for torch, and does not load it.
        if fullname != "torch":
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _TracedTorch(spec.loader)
        return spec


def _execute_the_other() -> None:
    others = [folder for folder in sys.path if Path(folder).resolve() != _HERE]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


if os.environ.get("DDP_DIAGNOSE_TRACE"):
    sys.meta_path.insert(0, _Finder())
_execute_the_other()
