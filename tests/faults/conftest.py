"""What the tests of the fault matrix share: the digest of a run that nothing happened to."""

from __future__ import annotations

import pytest

from tests.faults.launches import undisturbed


@pytest.fixture(scope="session")
def digest(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Weights of `dots` after its 80 steps."""
    return undisturbed(tmp_path_factory.mktemp("undisturbed"))
