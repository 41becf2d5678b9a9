"""A stand-in for CUDA, so that the lines which only CUDA reaches run on a torch that has the CPU alone.

A tensor "on cuda:1" is a CPU tensor whose memory carries that tag. Every operation passes `operations.Watch`, which
refuses what CUDA refuses (operands on unlike devices, a wait for the device where waiting is an error, an operation
without a deterministic kernel, …) and tags what comes out. It proves that our Python is right. It proves no number and
no NCCL: products, sums and random numbers are the CPU's, streams run one after another, and NCCL is gloo.

It stays for the life of the process: `install` it in a process of its own. Other processes get it from the environment
that `environment` gives. Whatever such a process records names the device `NAME`.
"""

from __future__ import annotations

# Before the modules below: where the environment asks for the stand-in, loading torch imports all of them.
import torch  # noqa: F401

from tests.support.standin_cuda.installing import environment, install
from tests.support.standin_cuda.world import NAME

__all__ = ["NAME", "environment", "install"]
