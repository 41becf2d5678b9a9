"""Parameters in rows on two ranks: state, names, groups and memory of the parts, and what is refused."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ddp_core.base.digests import bytes_of
from ddp_core.base.errors import UserError
from ddp_core.checkpoint import CutTensor
from ddp_core.sharding import OwnsPieces
from ddp_core.sharding.rows import OwnsRows
from tests.core.sharding.thread_world import on_thread_world

MICRO_BATCHES, WIDTH = 5, 6


class Net(nn.Module):
    """Two blocks, a tied weight, one of a single row, a frozen one, buffers, and a state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.row = nn.Parameter(torch.ones(1, WIDTH))
        self.frozen = nn.Parameter(torch.ones(3, WIDTH), requires_grad=False)
        self.told = "at first"

    def forward(self, rows: Tensor) -> Tensor:
        rows = self.norm(self.first(rows) * self.row)
        for layer in self.layers:
            rows = torch.tanh(layer(rows))
        return self.last(rows) + self.frozen.sum(0)

    def get_extra_state(self) -> str:
        return self.told

    def set_extra_state(self, state: str) -> None:
        self.told = state


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01, foreach=True)


def inputs() -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))


with torch.random.fork_rng():
    NETS = [net(0), net(1), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.float64))]
"""Two of other weights, and one of several dtypes: made once, since threads share the random numbers."""


def owns(group: Any, number: int = 0, micro_batches: int = MICRO_BATCHES, **how: Any) -> OwnsRows:
    made = copy.deepcopy(NETS[number])
    return OwnsRows(made, adam(made), micro_batches, process_group=group, **{"fewest_elements": 1, **how})


def message(action: Callable[[], Any], kind: type[Exception] = ValueError) -> str:
    """With which the action fails."""
    with pytest.raises(kind) as raised:
        action()
    return str(raised.value)


def test_blocks_are_freed_after_a_forward_and_what_is_outside_of_them_is_not() -> None:
    def check(group: Any) -> None:
        owned = owns(group)
        module: Any = owned.module
        with torch.no_grad():
            module(inputs())
        assert not isinstance(module.row, DTensor)
        assert all(isinstance(layer.weight, DTensor) for layer in module.layers)
        owned.reduction.close()

    on_thread_world(2, check)


def test_what_does_not_fit_is_refused_on_all_ranks() -> None:
    def check(group: Any) -> None:
        rank = group.rank()
        pattern = r"the parameters of this model cannot be sharded: .*dtype.*; or use shard mode gradients"
        assert re.fullmatch(pattern, message(lambda: owns(group, 2, fewest_elements=99), UserError))
        assert "micro_batches is 5 on rank 0, but 6 on rank 1" in message(lambda: owns(group, 0, MICRO_BATCHES + rank))
        assert " is another on rank 1 than on rank 0" in message(lambda: owns(group, rank))

        def in_pieces() -> None:
            made = copy.deepcopy(NETS[0])
            OwnsPieces(made, adam(made), MICRO_BATCHES, process_group=group)

        said = message(in_pieces if rank else lambda: owns(group))
        assert "shares is strided, in rows on rank 0, but contiguous, in " in said
        assert "2 ranks" in message(lambda: owns(group, 0, 1))

    on_thread_world(2, check)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"norm.bias": None}, "norm.bias is in the state alone, or in the model alone"),
        ({"a": torch.ones(1)}, "a is in the state alone, or in the model alone"),
        ({"row": torch.ones(2, WIDTH)}, "row has the shape [1, 6], not [2, 6]"),
    ],
)
def test_a_state_of_another_model_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    state = {name: value for name, value in (NETS[0].state_dict() | change).items() if value is not None}

    def load(group: Any) -> None:
        owned = owns(group)
        assert words in message(lambda: owned.load_weights(state))
        owned.reduction.close()

    on_thread_world(2, load)


def described(state: Any) -> Any:
    """A text that differs wherever two states do: in names and their sequence, values, dtypes, shapes and strides."""
    if state is None:
        return None
    return [
        (name, each.dtype, each.shape, each.stride(), bytes_of(each.detach()).numpy().tobytes())
        if isinstance(each, Tensor)
        else (name, each)
        for name, each in state.items()
    ]


def test_what_goes_out_has_the_names_and_kinds_of_one_process() -> None:
    reference = NETS[0].state_dict()
    names = [name for name, _ in NETS[0].named_parameters(remove_duplicate=False)]

    def check(group: Any) -> None:
        owned = owns(group)
        weights = owned.described_weights()
        assert list(weights) == list(reference)
        for name, value in reference.items():
            theirs = weights[name]
            if isinstance(value, Tensor):
                assert (theirs.dtype, theirs.shape) == (value.dtype, value.shape), name
                assert theirs.untyped_storage().nbytes() <= theirs.element_size(), "no memory for what is described"
            else:
                assert theirs == value
        own = owned.own_weights()
        assert own["first.weight"] is own["last.weight"]
        assert {name for name, value in own.items() if isinstance(value, CutTensor)} == set(names)
        assert described(owned.whole_weights()) == described(None if group.rank() else dict(reference))
        trained = set(names) - {"frozen"}
        assert set(owned.trained) == trained
        assert {each.name for each in owned.owned} == set(names) - {"last.weight"}
        owned.load_weights(NETS[1].state_dict() | {"_extra_state": "at last", "norm.running_mean": torch.ones(WIDTH)})
        assert owned.module.told == "at last"
        expected = dict(NETS[1].state_dict()) | {"_extra_state": "at last", "norm.running_mean": torch.ones(WIDTH)}
        assert described(owned.whole_weights()) == described(None if group.rank() else expected)
        owned.reduction.close()

    on_thread_world(2, check)
