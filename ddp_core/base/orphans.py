"""Keeps a process from outliving its parent, however the parent ends."""

from __future__ import annotations

import ctypes
import signal
import sys


def die_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel kill this process when its parent dies, or send it another signal.

    A parent that died before this call goes unnoticed: look at os.getppid() afterwards where that matters.
    """
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, by)
