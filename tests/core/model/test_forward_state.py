"""What a forward changes of its model is put back."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ddp_core.model.forward_state import ForwardState


class Changing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(3).eval()
        self.register_buffer("grows", torch.zeros(2))
        self.word = "before"

    def forward(self, inputs: Tensor) -> Tensor:
        self.grows.resize_(4).fill_(1)
        self.register_buffer("late", torch.ones(1))
        self.word, self.another = "after", 1
        return self.inner(inputs)  # type: ignore[no-any-return]


def test_what_a_forward_changes_is_put_back() -> None:
    model = Changing()
    buffers, attributes = dict(model.named_buffers()), set(model.__dict__)
    state = ForwardState(model)
    model.train()(torch.randn(4, 3))
    state.put_back()
    assert {name: id(each) for name, each in model.named_buffers()} == {
        name: id(each) for name, each in buffers.items()
    }
    assert torch.equal(model.grows, torch.zeros(2))
    assert torch.equal(model.inner.running_mean, torch.zeros(3))
    assert (model.word, set(model.__dict__)) == ("before", attributes)
    assert (model.training, model.inner.training) == (True, False)
