"""Scripts after public examples, in which nothing is wrong: none is blamed, and each is seen to its second epoch."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.lab.diagnose.cases import CLEAN
from tests.lab.diagnose.test_fixtures import diagnose


class Clean(NamedTuple):
    """The script's arguments, what must be found by design, since it was looked at, and the packages that it needs."""

    words: tuple[str, ...]
    by_design: str
    ranks: str = "1,2,3"
    extras: tuple[str, ...] = ()


SCRIPTS = {
    "imagenet": Clean(("--world-size", "{ranks}"), "order-depends-on-ranks", "1,2"),
    "nanogpt": Clean((), "order-depends-on-ranks"),
    "with_lightning": Clean(("--devices", "{ranks}"), "batch-grows", extras=("lightning",)),
    "with_accelerate": Clean((), "batch-grows", extras=("accelerate",)),
    "with_transformers": Clean((), "batch-grows", extras=("transformers", "accelerate")),
}
NAMES = [
    pytest.param(name, marks=[pytest.mark.extras(*each.extras)] * bool(each.extras)) for name, each in SCRIPTS.items()
]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_clean_script_is_not_blamed(name: str, tmp_path: Path) -> None:
    shutil.copy(CLEAN / f"{name}.py", tmp_path)
    words, by_design, ranks, _ = SCRIPTS[name]
    ended, told = diagnose(tmp_path, "--ranks", ranks, "--", f"{name}.py", *words)
    found = {each["name"]: each for each in told["findings"]}
    assert [each for each in found.values() if each["severity"] == "bug"] == [], ended.output
    assert (ended.code, told["notes"]) == (0, []), ended.output
    assert by_design in found
    assert any(name.startswith("remains-") for name in found), "it was compared with one process"


def test_every_clean_script_is_tried() -> None:
    assert {file.stem for file in CLEAN.glob("*.py")} == SCRIPTS.keys()
