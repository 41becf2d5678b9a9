"""Freed memory stays with the process, where it is allocated again without page faults, or goes back to the kernel."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.processes import HANG

FAULTS = """
import resource, sys, torch
from ddp_core.base.process import keep_freed_memory
print(sys.argv[1] == "keep" and keep_freed_memory())
for _ in range(20):
    torch.ones(10_000_000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    torch.ones(10_000_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
def test_what_is_freed_is_used_again_without_page_faults() -> None:
    def run(argument: str) -> tuple[bool, int]:
        done = subprocess.run(
            [sys.executable, "-c", FAULTS, argument],
            capture_output=True,
            text=True,
            check=True,
            timeout=HANG,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        kept, faults = done.stdout.split()
        return kept == "True", int(faults)

    kept, faults = run("keep")
    if not kept:
        pytest.skip("this C library has no mallopt")
    _, faults_otherwise = run("leave")
    # A tensor of 40 MB has 9,766 pages of 4 KiB, and ten tensors are allocated.
    assert faults < 1000
    assert faults_otherwise > 10_000


RETURNED = """
import psutil, torch
from ddp_core.base.process import return_large_blocks
worked = return_large_blocks()
blocks = [torch.ones(elements) for _ in range(100) for elements in (70_000, 700)]
full = psutil.Process().memory_info().rss
del blocks[::2]  # a little of every page range is still in use
print(worked, full - psutil.Process().memory_info().rss)
"""


@pytest.mark.full
def test_large_blocks_go_back_to_the_kernel_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", RETURNED], capture_output=True, text=True, check=True, timeout=HANG)
    worked, returned = done.stdout.split()
    if worked != "True":
        pytest.skip("this C library has no mallopt")
    assert int(returned) > 0.9 * 100 * 70_000 * 4
