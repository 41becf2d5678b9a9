"""Rank 0 puts whole tensors together from the parts that all ranks have of them."""

from __future__ import annotations

from unittest.mock import patch

import torch

from ddp_core.checkpoint import CutTensor
from ddp_core.sharding import owns_part
from ddp_core.sharding.owns_part import whole_on_first
from tests.support.wording import refusing


def test_ranks_with_parts_of_unlike_tensors_are_refused_before_anything_is_gathered() -> None:
    state = {"momentum": CutTensor(torch.float32, (2,), (1,), {0: torch.ones(2)})}
    with (
        patch.object(owns_part, "gathered", lambda shapes, _: [shapes, []]),
        refusing(ValueError),
    ):
        whole_on_first(state, None)
    assert torch.equal((whole_on_first(state, None) or {})["momentum"], torch.ones(2))
