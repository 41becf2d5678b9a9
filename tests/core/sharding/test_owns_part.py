"""A state whose tensors ranks own parts of is put together on the first of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ddp_core.checkpoint import CutTensor
from ddp_core.sharding.owns_part import whole_on_first
from tests.support.thread_group import on_thread_world


def test_the_whole_of_a_state_is_put_together_on_the_first_rank() -> None:
    """Of a group that is not all ranks; one of them has nothing of some tensors, in two pieces others."""
    forms: dict[str, tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]] = {
        "exact": (torch.float64, (2,), (1,)),
        "half": (torch.bfloat16, (4,), (1,)),
        "none": (torch.float32, (0,), (1,)),
        "turned": (torch.int64, (2, 3), (1, 2)),
    }
    pieces: list[dict[str, dict[int, list[float]]]] = [
        {"exact": {}, "half": {0: [1.0], 3: [4.0]}, "none": {}, "turned": {0: [1.0, 2.0, 3.0]}},
        {"exact": {0: [0.1, 0.2]}, "half": {1: [2.0, 3.0]}, "none": {}, "turned": {3: [4.0, 5.0, 6.0]}},
    ]

    def together(world: Any) -> Any:
        group = dist.new_group([1, 2])
        if (rank := world.rank()) == 0:
            return None
        state: dict[str, Any] = {}
        for name, form in forms.items():
            own = {at: torch.tensor(values, dtype=form[0]) for at, values in pieces[rank - 1][name].items()}
            state[name] = CutTensor(*form, own)
        return whole_on_first({**state, "nested": [{"again": state["exact"]}, 7]}, group)

    _, whole, nothing = on_thread_world(3, together)
    assert nothing is None
    values = {"exact": [0.1, 0.2], "half": [1.0, 2.0, 3.0, 4.0], "none": [], "turned": [[1, 3, 5], [2, 4, 6]]}
    for name, (dtype, _, strides) in forms.items():
        assert (whole[name].dtype, whole[name].stride(), whole[name].tolist()) == (dtype, strides, values[name])
    assert whole["nested"] == [{"again": whole["exact"]}, 7]
    assert whole["nested"][0]["again"] is whole["exact"]
