"""Lets torch's sanitizer watch all threads of a process, of which it watches the main thread only.

Python imports this by its name where this folder is on PYTHONPATH. Gradients are exchanged on threads of their own.
"""

from __future__ import annotations

import functools
import sys
import threading
from typing import Any

_run = threading.Thread.run
_lock = threading.RLock()


def _watched(self: threading.Thread) -> None:
    sanitizer: Any = sys.modules.get("torch.cuda._sanitizer")
    if sanitizer is None or not sanitizer.cuda_sanitizer.enabled:
        _run(self)
        return
    watching = sanitizer.CUDASanitizerDispatchMode.__new__(sanitizer.CUDASanitizerDispatchMode)
    sanitizer.TorchDispatchMode.__init__(watching)
    # One handler knows what every thread does with memory.
    watching.event_handler = sanitizer.cuda_sanitizer.dispatch.event_handler
    one_at_a_time(type(watching.event_handler))
    with watching:
        _run(self)


def one_at_a_time(handler: Any) -> None:
    """Let only one thread at a time tell the handlers of this class of a kernel.

    A handler numbers kernels, and reads the number again after it has looked at the stack. If another thread has told
    of a kernel in between, the first one's memory gets that number, and waiting for its stream seems not to be enough.
    """
    tell = handler._handle_kernel_launch
    if hasattr(tell, "__wrapped__"):
        return

    @functools.wraps(tell)
    def alone(*arguments: Any) -> Any:
        with _lock:
            return tell(*arguments)

    handler._handle_kernel_launch = alone


threading.Thread.run = _watched  # type: ignore[method-assign]
