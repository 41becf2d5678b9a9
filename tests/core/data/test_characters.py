"""The text that comes with this package, cut into samples."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ddp_core.base.errors import UserError
from ddp_core.data import characters
from ddp_core.data.builders import DATA
from tests.core.data.test_builders import in_memory
from tests.support.wording import refusing


def test_characters_are_followed_by_their_targets() -> None:
    splits = DATA["characters"](length=20, stride=7)
    train, test = in_memory(splits.train), in_memory(splits.test)
    assert torch.equal(train.inputs[:, 1:], train.targets[:, :-1])
    assert torch.equal(train.inputs[1, :14], train.targets[0, 6:])
    begin, end = (bytes(inputs.tolist()).decode("ascii") for inputs in (train.inputs[60], test.targets[-1]))
    assert (begin, end) == ("o\npictures or conver", "                   T")
    held_out = bytes(test.inputs.flatten().tolist())
    assert bytes(train.inputs[-1].tolist()) not in held_out
    assert len(held_out) == 742 * 20
    assert splits.digest != DATA["characters"](length=21, stride=7).digest


@pytest.mark.parametrize("damage", ["missing", "changed"])
def test_a_book_that_is_not_as_it_came_is_refused(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    book = tmp_path / "alice.txt"
    if damage == "changed":
        book.write_bytes(characters.BOOK.read_bytes().replace(b"\n", b"\r\n"))
    monkeypatch.setattr(characters, "BOOK", book)
    with refusing():
        DATA["characters"]()


@pytest.mark.parametrize("options", [{"length": 0}, {"stride": 0}, {"test_share": 0.0}, {"length": 20_000}])
def test_characters_need_room_for_a_sample_and_digits_a_share(options: dict[str, float]) -> None:
    with refusing():
        DATA["characters"](**options)
    for share in (0.0, 1.0):
        with pytest.raises(UserError, match="test_share"):
            DATA["digits"](test_share=share)
