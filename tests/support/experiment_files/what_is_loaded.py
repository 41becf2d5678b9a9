"""A tiny training whose worker tells after its first epoch which modules of ddp_core it has loaded."""

import json
import os
import sys
from pathlib import Path

from ddp_core import Callback, Component, Experiment, Moment, Optimizer

experiment = Experiment(
    name="what_is_loaded",
    model=Component(name="two_layer"),
    data=Component(name="toy_data", options={"size": 32, "seed": 0}),
    loss="mean_squared_error",
    optimizer=Optimizer(name="sgd", lr=0.01),
    global_batch_size=16,
    micro_batch=4,
    epochs=1,
)


class Tells(Callback):
    """Writes the modules' names into the run directory."""

    def on_epoch(self, moment: Moment) -> None:
        names = [name for name in sys.modules if name.partition(".")[0] == "ddp_core"]
        Path(os.environ["DDP_LOADED"]).write_text(json.dumps(names))


def callbacks() -> list[Callback]:
    """The one that tells."""
    return [Tells()]
