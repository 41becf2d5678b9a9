"""A model that computes something else where its parameters are cut, as some of transformers' do."""

import torch
from torch import Tensor, nn

from ddp_core import Component, Experiment


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(10, 8), nn.Linear(8, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        is_cut = type(self).__mro__[0] is not Asks  # fully_shard gives the model another class
        return self.last(torch.tanh(self.first(inputs)) * (2.0 if is_cut else 1.0))


def model() -> nn.Module:
    return Asks()


experiment = Experiment(
    name="asks_whether_cut",
    model=Component(name="model"),
    data=Component(name="toy_data", options={"size": 32}),
    loss="mean_squared_error",
    global_batch_size=16,
    micro_batch=4,
)
