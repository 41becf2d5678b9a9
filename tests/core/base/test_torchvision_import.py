"""torchvision is imported also where it was built against another torch, and other errors are not kept from anybody."""

from __future__ import annotations

import importlib
from unittest.mock import Mock

import pytest
import torch

from ddp_core.base.torchvision_import import import_torchvision


@pytest.mark.parametrize(("said", "tries"), [("operator torchvision::nms does not exist", 2), ("of another kind", 1)])
def test_an_import_that_lacks_operators_is_tried_again(said: str, tries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def fails_at_first(name: str) -> str:
        tried.append(name)
        if len(tried) < 2:
            raise RuntimeError(said)
        return name

    monkeypatch.setattr(importlib, "import_module", fails_at_first)
    # A process may declare torchvision's operators once, and another test in it may import the real torchvision.
    monkeypatch.setattr(torch.library, "Library", Mock())
    if tries > 1:
        assert str(import_torchvision("ops")) == "torchvision.ops"
    else:
        with pytest.raises(RuntimeError, match=said):
            import_torchvision("ops")
    assert len(tried) == tries
