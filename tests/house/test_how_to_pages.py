"""The how-to pages hold whose commands need nothing but this machine: run as they stand, they print what is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.house.test_tutorials import follow
from tests.support.commands import ROOT


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_reader_who_shards_the_optimizer_sees_what_the_page_shows(installed: Path, tmp_path: Path) -> None:
    follow((ROOT / "docs" / "how-to" / "shard-the-optimizer.md").read_text(), installed, tmp_path)
