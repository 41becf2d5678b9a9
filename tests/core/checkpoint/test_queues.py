"""Queues in a state: what a file holds of them, and what comes back, also through an optimizer's load_state_dict."""

from __future__ import annotations

import io
from collections import deque
from enum import IntEnum
from typing import Any

import numpy as np
import torch

from ddp_core.checkpoint.state import load_optimizer, with_queues, without_queues


class Kind(IntEnum):
    ONE = 1


def state() -> dict[str, Any]:
    return {
        "queue": deque([1, {"inner": deque([torch.ones(2)], 3)}], 5),
        "endless": deque([2.5]),
        "list": [deque([3], 1), "text"],
        "tuple": (deque(), 4),
        "plain": {"a": [1, (2, 3)], "b": torch.zeros(1)},
    }


def test_a_file_has_dicts_in_their_place_and_plain_numbers() -> None:
    plain = without_queues({**state(), "float": np.float32(1.5), "integer": np.int64(7), "kind": Kind.ONE})
    assert plain["endless"] == {"items of a deque": [2.5], "maxlen": None}
    assert plain["list"] == [{"items of a deque": [3], "maxlen": 1}, "text"]
    file = io.BytesIO()
    torch.save(plain, file)
    file.seek(0)
    expected = state() | {"float": 1.5, "integer": 7, "kind": 1}
    assert repr(with_queues(torch.load(file, weights_only=True))) == repr(expected)


class Wrapped(torch.optim.SGD):
    """Its state has a form of its own, as that of optimizers around another one."""

    def state_dict(self) -> dict[str, Any]:
        return {"base": super().state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict["base"])


def test_a_state_of_another_form_is_left_to_the_optimizer() -> None:
    saved, loaded = (Wrapped([torch.nn.Parameter(torch.ones(2))], lr=rate) for rate in (0.5, 0.1))
    load_optimizer(loaded, saved.state_dict())
    assert loaded.param_groups[0]["lr"] == 0.5
