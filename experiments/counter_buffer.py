"""What does DDP broadcast: does a buffer that counts forward passes end the same on every rank?

A sigmoid classifier on 100 points whose labels are tosses of a coin, with a buffer `cnt` that each forward pass raises
by one. DDP copies rank 0's buffers to all ranks before every forward, so `cnt` ends at 200 everywhere: 100 epochs of
two steps. Plain reduction, one micro-batch per rank, because only the buffer matters here. There is nothing to learn;
the loss stays near ln 2 = 0.69. 48 samples per step divide among 1, 2, 3, 4, 6 and 8 ranks.
"""

from ddp_core import Component, Experiment, Optimizer
from ddp_core.config.experiment import DdpOptions

experiment = Experiment(
    name="counter_buffer",
    model=Component(name="sigmoid_classifier", options={"features": 10}),
    data=Component(name="counter_data", options={"size": 100, "features": 10, "seed": 0}),
    loss="binary_cross_entropy",
    optimizer=Optimizer(name="sgd", lr=0.001),
    global_batch_size=48,
    epochs=100,
    reduction="plain",
    numerics="portable",
    ddp=DdpOptions(broadcast_buffers=True),
)
