"""What a result depends on is recorded and compared, torch's own files among it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
import torch

from ddp_core.base import fingerprint
from ddp_core.base.fingerprint import fingerprint_differences

CPU = torch.device("cpu")


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The list of its files that an installed torch has."""
    folder = tmp_path / "torch-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Name: torch\nVersion: 1\n")
    monkeypatch.setattr(metadata, "distribution", lambda _: metadata.Distribution.at(folder))
    fingerprint._torch_files.cache_clear()
    yield folder / "RECORD"
    fingerprint._torch_files.cache_clear()


def recorded(wheel: Path, text: str) -> str | None:
    wheel.write_text(text)
    fingerprint._torch_files.cache_clear()
    found: str | None = fingerprint.fingerprint(CPU)["torch_files"]
    return found


def test_libraries_of_torch_count_and_what_an_installer_or_a_python_adds_does_not(wheel: Path) -> None:
    one = recorded(wheel, "torch/lib/a.so,sha256=x,1\ntorch/lib/b.so,sha256=y,2\n")
    assert one == recorded(
        wheel,
        "../../../bin/torchrun,sha256=here,3\ntorch/lib/b.so,sha256=y,2\ntorch/lib/a.so,sha256=x,1\n"
        "torch/lib/libtorch_python.so,sha256=311,4\ntorch-1.dist-info/INSTALLER,sha256=pip,5\n",
    )
    assert one != recorded(wheel, "torch/lib/a.so,sha256=x,1\ntorch/lib/b.so,sha256=other,2\n")
    assert recorded(wheel, "") is None


def test_another_wheel_is_a_difference_and_an_older_record_none() -> None:
    ours = fingerprint.fingerprint(CPU)
    assert fingerprint_differences(ours, ours | {"torch_files": "other"}) == [
        f"torch_files: here {ours['torch_files']}, there other"
    ]
    older = {name: each for name, each in ours.items() if name not in ("torch_files", "libm")}
    assert fingerprint_differences(ours, older) == []
    portable = fingerprint.fingerprint(CPU, rules=2)
    assert fingerprint_differences(portable, portable | {"libm": "other"}) == [
        f"libm: here {portable['libm']}, there other"
    ]
    assert "torch_files" not in portable
