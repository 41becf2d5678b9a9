"""Do single-process and data-parallel training of y = 2x + 3 + 0.1 noise both find w = 2 and b = 3?

10,000 points, 32 samples per worker, SGD with a rate of 0.01 per 32 samples (the linear scaling rule, so 0.02 at the
global batch of 64), 10 epochs. Every rank sees the same points: they are drawn once, from a seed of their own. Expect w
and b within 0.02 and a loss at the noise floor of 0.01 (at most 0.0115), with the same bits on every layout. It is far
too small to gain anything from more processes.
"""

from ddp_core import Component, Experiment, Optimizer

experiment = Experiment(
    name="linear_regression",
    model=Component(name="linear"),
    data=Component(name="linear_data", options={"size": 10_000, "noise": 0.1, "seed": 0}),
    loss="mean_squared_error",
    optimizer=Optimizer(name="sgd", lr=0.01, reference_batch=32),
    global_batch_size=64,
    micro_batch=8,
    epochs=10,
    reduction="exact",
    numerics="portable",
)
