"""Freed memory stays with the process, because every training step allocates the same tensors again.

glibc returns large blocks to the kernel as soon as they are freed, and the kernel hands out each page anew, filled with
zeros, at the first touch. A ResNet-18 on CPU spends a tenth to a fifth of its step on that. Where a GPU trains, the
host's part of loading allocates the same again (`python -m benchmarks.loader`). Sources: mallopt(3); glibc,
malloc/malloc.c, "M_TRIM_THRESHOLD" and "M_MMAP_THRESHOLD".
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_KEPT = 1 << 30
# The largest value that glibc before 2.35 accepts.
_LARGEST_ONCE = 32 << 20


def keep_freed_memory() -> bool:
    """Let malloc keep freed blocks of up to 1 GiB; returns whether that worked (only glibc can do it).

    This changes no result: torch aligns every tensor to 64 bytes by itself.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    kept = mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT) or mallopt(_M_MMAP_THRESHOLD, _LARGEST_ONCE)
    return bool(kept and mallopt(_M_TRIM_THRESHOLD, ctypes.c_int(2**31 - 1)))
