"""The digest of an optimizer's state: the published one where every entry is a tensor, and of any other state, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ddp_core.base.digests import checksum, optimizer_digest, same_bits, weights_digest


def of_one(**entries: Any) -> dict[str, Any]:
    return {"state": {0: entries}, "param_groups": []}


def test_entries_of_parameters_are_digested_as_named_tensors() -> None:
    momentum = torch.tensor([0.5, -1.0])
    state = {"state": {0: {"step": 3, "momentum": momentum, "none": None}, 11: {"pair": (0.5, 1.0)}}}
    named = {
        "000000.step": torch.as_tensor(3),
        "000000.momentum": momentum,
        "000011.pair": torch.tensor([0.5, 1.0]),
    }
    assert optimizer_digest(state) == weights_digest(named)


OTHERS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (of_one(kept={0.9: torch.ones(2)}), of_one(kept={0.9: torch.zeros(2)})),
    (of_one(kept={0.9: torch.ones(2)}), of_one(kept={0.5: torch.ones(2)})),
    (of_one(kept=[torch.ones(2), 1]), of_one(kept=[torch.ones(2), 2])),
    (of_one(kept="one"), of_one(kept="two")),
    (of_one(kept=""), of_one(kept="x")),
    ({"state": {"k": torch.ones(1)}}, {"state": {"k": torch.zeros(1)}}),
    ({"inner": {"state": {0: {"step": 1}}}}, {"inner": {"state": {0: {"step": 2}}}}),
    ({"state": {"ema": {"fast": 0.5}}}, {"state": {"ema": {"fast": 0.25}}}),
]


@pytest.mark.parametrize(("state", "other"), OTHERS)
def test_whatever_a_state_holds_counts(state: dict[str, Any], other: dict[str, Any]) -> None:
    assert optimizer_digest(state) == optimizer_digest(state) != optimizer_digest(other)


@pytest.mark.parametrize("size", [0, 1, 3])
def test_the_content_counts_however_it_lies_in_memory(size: int) -> None:
    # So lies the gradient of a sum: each element is the same place in memory.
    expanded, plain = torch.tensor(2.0).expand(1, size)[0], torch.full((size,), 2.0)
    wide = torch.full((size, 2), 2.0)[:, 0]
    assert {checksum(each) for each in (expanded, plain, wide)} == {checksum(plain)}
    assert {weights_digest({"a": each}) for each in (expanded, plain, wide)} == {weights_digest({"a": plain})}
    assert same_bits(expanded, plain)
    assert same_bits(wide, plain)
    alone = torch.empty(size).as_strided((size,), (0,)).fill_(2.0) if size < 2 else plain
    assert checksum(alone) == checksum(plain)
