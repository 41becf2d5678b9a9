"""Do layouts agree on a tiny network: 10-5-1 on 32 random points, without dropout or BatchNorm?

Its layers depend on nothing but the samples. So plain reduction must agree with single-process training up to rounding,
and exact reduction to the last bit: this is the experiment to compare layouts with. Four micro-batches of 4, so at most
four ranks. Inputs and targets are unrelated noise; the loss falls a little and means nothing. Done in a moment.
"""

from ddp_core import Component, Experiment, Optimizer

experiment = Experiment(
    name="toy_mlp",
    model=Component(name="two_layer"),
    data=Component(name="toy_data", options={"size": 32, "seed": 0}),
    loss="mean_squared_error",
    optimizer=Optimizer(name="sgd", lr=0.01),
    global_batch_size=16,
    micro_batch=4,
    epochs=2,
    reduction="exact",
    numerics="portable",
)
