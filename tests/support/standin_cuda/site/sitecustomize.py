"""Python imports this at its start where the folder is on PYTHONPATH: torch then gets the stand-in for CUDA."""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from typing import Any


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Installs the stand-in as soon as torch is loaded."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def load_and_install(module: Any) -> None:
            load(module)
            from tests.support.standin_cuda.installing import install

            install(int(os.environ["DDP_STANDIN_CUDA"]))

        spec.loader.exec_module = load_and_install  # type: ignore[method-assign]
        return spec


if os.environ.get("DDP_STANDIN_CUDA"):
    sys.meta_path.insert(0, _AfterTorch())
