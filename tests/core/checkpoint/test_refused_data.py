"""Data that torch cannot read, a directory that is none, a lock that is gone: each is refused with its own words."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from ddp_core.base.errors import UserError
from ddp_core.checkpoint import Checkpointer, Fence, load, newest_valid
from ddp_core.checkpoint.fence import _is_still
from tests.core.checkpoint.children import state_of
from tests.support.wording import refusing


def test_data_that_torch_cannot_read_are_refused_without_its_advice(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(state_of(1), step=1, epoch=0)
        assert checkpointer.last is not None
    data = b"not what torch.save writes"
    checkpointer.last.path.write_bytes(data)
    manifest = checkpointer.last.manifest
    content = {name: value for name, value in json.loads(manifest.read_text()).items() if name != "seal"}
    content |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    seal = hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    manifest.write_text(json.dumps(content | {"seal": seal}))
    checkpoint = newest_valid(tmp_path)
    assert checkpoint is not None
    with pytest.raises(UserError, match=r"plain values \(UnpicklingError: Unsupported operand 110\)") as raised:
        load(checkpoint)
    assert "weights_only" not in str(raised.value)


def test_a_lock_that_is_gone_is_nobodys(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with path.open("w") as file:
        assert _is_still(path, file.fileno())
        path.unlink()
        assert not _is_still(path, file.fileno())
        path.write_text("another")
        assert not _is_still(path, file.fileno())


def test_a_fence_needs_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refusing() as raised:
        Fence.take(tmp_path / "file")
    assert isinstance(raised.value.__cause__, OSError)
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]
