"""Does an optimizer that finds its own steps, and has no rate to set, end with the same bits on every layout?

It trains what updates.py trains, under the built-in constant schedule.
"""

from tests.foreign.experiments.updates import data, experiment, loss, model, optimizer

__all__ = ["data", "experiment", "loss", "model", "optimizer"]
