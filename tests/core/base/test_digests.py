"""Digests in their documented format, compared with a second implementation."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_core.base.digests import checksum, optimizer_digest, same_bits, weights_digest

WHOLE = (torch.int64, torch.int32, torch.uint8, torch.bool)


def documented_digest(state: dict[str, Tensor]) -> str:
    """The digest in the format that run.json's documentation gives, computed element by element in plain Python."""
    content = b""
    for name in sorted(state):
        tensor = state[name]
        dtype = repr(tensor.dtype).split(".")[1]
        content += (
            name.encode("utf-8") + b"\0" + dtype.encode() + b"\0" + ",".join(map(str, tensor.shape)).encode() + b"\0"
        )
        integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        for element in tensor.flatten():
            word = element.view(torch.uint8).item() if tensor.element_size() == 1 else element.view(integers).item()
            content += (word % 2 ** (8 * tensor.element_size())).to_bytes(tensor.element_size(), "little")
    return hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 2), (2, 0, 3)], ids=str)
def test_the_weights_digest_is_the_documented_one(shape: tuple[int, ...]) -> None:
    draws = torch.rand(shape, generator=torch.Generator().manual_seed(1)) * 200 - 100
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, *WHOLE):
        state = {"layer.weight": draws.to(dtype), "a": torch.eye(3)[:2].t(), "ü": torch.tensor(-0.0)}
        assert weights_digest(state) == documented_digest(state)


def test_the_optimizer_digest_covers_every_moment_and_step_count() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    empty = optimizer_digest(optimizer.state_dict())
    weight.grad = torch.ones(3)
    optimizer.step()
    trained = optimizer_digest(optimizer.state_dict())
    assert trained != empty
    assert trained == documented_digest({f"000000.{name}": value for name, value in optimizer.state[weight].items()})
    momentum = torch.tensor([0.5, -1.0])
    state = {"state": {0: {"step": 3, "momentum": momentum, "none": None}, 11: {"pair": (0.5, 1.0)}}}
    named = {"000000.step": torch.as_tensor(3), "000000.momentum": momentum, "000011.pair": torch.tensor([0.5, 1.0])}
    assert optimizer_digest(state) == weights_digest(named)


def of_one(**entries: Any) -> dict[str, Any]:
    return {"state": {0: entries}, "param_groups": []}


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
    assert weights_digest({"b": plain, "a": plain}) == weights_digest({"a": plain, "b": nn.Parameter(expanded)})
    assert {checksum(each) for each in (expanded, plain, wide)} == {checksum(plain)}
    assert {weights_digest({"a": each}) for each in (expanded, plain, wide)} == {weights_digest({"a": plain})}
    assert same_bits(expanded, plain)
    assert same_bits(wide, plain)
    alone = torch.empty(size).as_strided((size,), (0,)).fill_(2.0) if size < 2 else plain
    assert checksum(alone) == checksum(plain)
