from __future__ import annotations

import pytest

from tests.distributed.resuming import WORDS, digests
from tests.support.commands import train


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The digests of a run that was never killed."""
    return digests(train(tmp_path_factory.mktemp("undisturbed"), *WORDS))
