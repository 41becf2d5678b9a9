"""Trainings across nodes of any shape: the same bits as in one process. Sums and bytes: core/reduction/."""

from __future__ import annotations

import pytest

from tests.distributed import level_cases
from tests.distributed.test_exact_reduction import reference
from tests.support.processes import run_processes


@pytest.mark.parametrize("thorough", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_trainings_on_nodes_of_any_shape_end_with_the_digest_of_one_process(thorough: bool) -> None:
    first, *others = run_processes(level_cases.trainings, 6, thorough)
    for (world, name, way), digest in first.items():
        found = {digest, *(other[world, name, way] for other in others)}
        assert found == {reference(name)}, (world, way)
