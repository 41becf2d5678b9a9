"""What the tests of the fault matrix share: the digest of a run without any fault."""

from __future__ import annotations

import pytest

from tests.faults.launches import undisturbed


@pytest.fixture(scope="session")
def digest(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the weights of `dots` after its 80 steps."""
    return undisturbed(tmp_path_factory.mktemp("undisturbed"))
