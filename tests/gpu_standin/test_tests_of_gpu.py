"""The tests of `tests/gpu` on devices that are played: they are right themselves, before a GPU can be had."""

from __future__ import annotations

import re

import pytest

from tests.support.commands import command
from tests.support.standin_cuda import environment

FILES = {
    "test_input.py": "",
    "test_live.py": "not still_live",
    "test_layouts.py": "fp32 or (pages_commands and not compiled)",
    "test_replicas.py": "not bf16 and not tf32",
    "test_speed.py": "not bf16 and not tf32",
    "test_steps.py": "",
}
"""Which tests of each file: nobody plays the kernels in which precisions differ, nor can a compiler follow this."""


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("file", FILES)
def test_the_tests_of_gpu_pass_as_far_as_they_can(file: str) -> None:
    words = ["-p", "tests.support.standin_cuda.plugin", "-p", "no:cacheprovider", "-m", "gpu or gpu2"]
    chosen = ["-k", FILES[file]] if FILES[file] else []
    ended = command("-m", "pytest", *words, *chosen, f"tests/gpu/{file}", program=(), env=environment(2), timeout=3500)
    assert ended.code == 0, ended.output + ended.errors
    assert int(re.findall(r"(\d+) passed", ended.output)[-1]) > 0
