"""Runs first in each Python process of a diagnosed script, also in those that it starts itself: hangs the tracer in.

Python imports a module of this name at its start; `ddp_lab.diagnose.runs` puts this folder into PYTHONPATH. The module
of this name that would have been imported otherwise is executed, too.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from pathlib import Path

_HERE = Path(__file__).resolve().parent

others = [folder for folder in sys.path if Path(folder).resolve() != _HERE]
other = PathFinder.find_spec("sitecustomize", others)
if other is not None and other.loader is not None:
    other.loader.exec_module(module_from_spec(other))
# The script may start an interpreter that has no torch.
if os.environ.get("DDP_DIAGNOSE_TASK") and find_spec("torch") is not None:
    sys.path.append(str(_HERE.parents[2]))  # the last place: it hides nothing of the script's
    from ddp_lab.diagnose.tracer import install

    install()
