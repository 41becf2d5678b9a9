"""A whole book, cut into samples whose targets are the characters that come next; the package carries it.

The book is Lewis Carroll's "Alice's Adventures in Wonderland"; ddp_core/data/texts/README.md says where it is from.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ddp_core.base.errors import UserError
from ddp_core.data.splits import InMemory, Splits, content_digest

BOOK = Path(__file__).parent / "texts" / "alice.txt"
_SHA256 = "99e53cbb0aeb274344a254733db996ca2d05d5fcd10fc0ca02d6966f2b2bc961"


def characters(length: int = 64, stride: int = 32, test_share: float = 0.1) -> Splits:
    """`Alice's Adventures in Wonderland`: inputs int64 [length] in 0..127, targets int64 [length], the next ones.

    A character is the number that ASCII gives it. Training samples begin every `stride` characters; the last
    `test_share` of the book is held out, cut into samples without overlap. Raises UserError where the book is missing
    or has been changed, or where a split would have no sample.
    """
    if length < 1 or stride < 1:
        raise UserError(f"data characters: length {length} and stride {stride} must be at least 1")
    remedy = "install ddp_core again"
    try:
        content = BOOK.read_bytes()
    except OSError as error:
        raise UserError(f"data characters: {BOOK} cannot be read: {error.strerror}; {remedy}") from None
    found = hashlib.sha256(content).hexdigest()
    if found != _SHA256:
        raise UserError(
            f"data characters: {BOOK} has been changed (SHA-256 {found[:12]}…, not {_SHA256[:12]}…), so no result on "
            f"it could be compared; {remedy}"
        )
    text = torch.from_numpy(np.frombuffer(content, dtype=np.uint8).astype(np.int64))
    held_out = round(test_share * len(text))
    if not length < held_out < len(text) - length:
        raise UserError(
            f"data characters: with test_share {test_share}, {held_out:,} of {len(text):,} characters are held out; "
            f"training and held-out characters must each be more than length {length}"
        )
    train, test = _windows(text[:-held_out], length, stride), _windows(text[-held_out:], length, length)
    digest = content_digest(train.inputs, train.targets, test.inputs, test.targets)
    return Splits(train, test, 128, None, digest)  # as many classes as ASCII has characters


def _windows(text: Tensor, length: int, stride: int) -> InMemory:
    windows = text.unfold(0, length + 1, stride)
    return InMemory(windows[:, :-1], windows[:, 1:])
