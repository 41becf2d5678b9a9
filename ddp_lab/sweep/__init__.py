"""Many trainings of one experiment with other settings: `ddp sweep FILE`.

`plan` reads the file: a grid, or ranges that Optuna searches. `study` keeps what Optuna has asked for, so that it goes
on after a kill. `command` trains, each trial in a run directory of its own, and names the best.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Train an experiment with many settings, and name the best."""
    from ddp_lab.sweep.command import main as command

    return command(arguments)
