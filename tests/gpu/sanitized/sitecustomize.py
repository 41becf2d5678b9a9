"""Lets torch's sanitizer watch all threads of a process, of which it watches the main thread only.

Python imports this by its name where this folder is on PYTHONPATH. Gradients are exchanged on threads of their own.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

_run = threading.Thread.run


def _watched(self: threading.Thread) -> None:
    sanitizer: Any = sys.modules.get("torch.cuda._sanitizer")
    if sanitizer is None or not sanitizer.cuda_sanitizer.enabled:
        _run(self)
        return
    watching = sanitizer.CUDASanitizerDispatchMode.__new__(sanitizer.CUDASanitizerDispatchMode)
    sanitizer.TorchDispatchMode.__init__(watching)
    # One handler knows what every thread does with memory.
    watching.event_handler = sanitizer.cuda_sanitizer.dispatch.event_handler
    with watching:
        _run(self)


threading.Thread.run = _watched  # type: ignore[method-assign]
