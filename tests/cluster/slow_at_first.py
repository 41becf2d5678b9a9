"""A tiny network whose steps are slow at first, so that a test can do something to a job in mid-training.

They are slow until there is the file that the environment variable SLOW_UNTIL names. No step is slow without the
variable, or in a job that SLURM has started again. How long a step takes does not change the weights.
"""

import os
import time
from pathlib import Path

from ddp_core.config.experiment import Component, Experiment, Optimizer
from ddp_core.observe.callback import Callback, Moment

_SECONDS = 0.3
"""With 300 steps, the training can be found at work for a minute and a half."""


class SlowAtFirst(Callback):
    def on_step(self, moment: Moment) -> None:
        file, end = os.environ.get("SLOW_UNTIL"), time.monotonic() + _SECONDS
        if "SLURM_RESTART_COUNT" in os.environ:
            return
        while file and time.monotonic() < end and not Path(file).exists():
            time.sleep(0.01)


callbacks = [SlowAtFirst()]
experiment = Experiment(
    name="slow_at_first",
    model=Component(name="two_layer"),
    data=Component(name="toy_data", options={"size": 96, "seed": 0}),
    loss="mean_squared_error",
    optimizer=Optimizer(name="sgd", lr=0.01),
    global_batch_size=16,
    micro_batch=2,
    epochs=50,
    reduction="exact",
)
