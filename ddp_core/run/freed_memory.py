"""Whether freed memory stays with the process, which saves time, or goes back to the kernel, which saves memory.

glibc returns large blocks to the kernel as soon as they are freed, and the kernel hands out each page anew, filled with
zeros, at the first touch. A ResNet-18 on CPU spends a tenth to a fifth of its step on that, though every step allocates
tensors of the same sizes again. Where a GPU trains, so does the loading of data on the host
(`python -m benchmarks.loader`).

Where parameters are sharded, blocks of the model come and go within a step. Memory that stays with the process is then
cut into free pieces that are too small for the next block: 500 MB of them with 25 million parameters on two ranks
(`python -m benchmarks.shard_memory`).
Sources: mallopt(3); glibc, malloc/malloc.c, "M_TRIM_THRESHOLD" and "M_MMAP_THRESHOLD".
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_KEPT = 1 << 30
# The largest value that glibc before 2.35 accepts.
_LARGEST_KEPT_BEFORE_2_35 = 32 << 20
_SMALLEST_RETURNED = 256 << 10


def keep_freed_memory() -> bool:
    """Let malloc keep freed blocks of up to 1 GiB; returns whether that worked (only glibc can do it).

    This changes no result: torch aligns every tensor to 64 bytes by itself.
    """
    kept = _set(_M_MMAP_THRESHOLD, _LARGEST_KEPT) or _set(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BEFORE_2_35)
    return kept and _set(_M_TRIM_THRESHOLD, 2**31 - 1)


def return_large_blocks() -> bool:
    """Let malloc return freed blocks of 256 KiB or more at once; returns whether that worked (only glibc can do it).

    Without a fixed size, glibc keeps larger and larger blocks as it sees them freed.
    """
    return _set(_M_MMAP_THRESHOLD, _SMALLEST_RETURNED)


def _set(parameter: int, value: int) -> bool:
    try:
        return bool(ctypes.CDLL(None).mallopt(parameter, ctypes.c_int(value)))
    except (OSError, AttributeError, TypeError):
        return False
