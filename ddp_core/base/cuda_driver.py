"""CUDA's driver, which a process starts where it asks it anything, and which no fork of that process can use.

So the processes that begin a training count devices by NVML, and ask in a fork whether the driver finds them, too.
"""

from __future__ import annotations

import functools
import os

import torch


def is_started() -> bool:
    """Whether anything in this process has started the driver."""
    import ctypes

    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    CUDA_ERROR_NOT_INITIALIZED = 3
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != CUDA_ERROR_NOT_INITIALIZED)


def gpus_here() -> int:
    """The number of GPUs that this process can use; does not start the driver where NVML can count them."""
    count = torch.cuda.device_count()
    return count if count and (torch.cuda.is_available() if is_started() else _is_available_in_a_fork()) else 0


@functools.cache
def _is_available_in_a_fork() -> bool:
    child = os.fork()
    if not child:
        code = 1
        try:
            code = 0 if torch.cuda.is_available() else 1
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return status == 0
