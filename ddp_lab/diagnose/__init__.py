"""What makes the result of somebody's training script depend on the layout: `ddp diagnose -- train.py --its --args`.

`runs` starts the script, unchanged, on several numbers of ranks; `bootstrap` and `tracer` write down, inside of it,
what each rank does in each step; `trace` reads that; `differences`, `checks` and `across` compare ranks and runs, and
name what differs as `findings`. `union` gives one process the batches of all ranks, so that its gradient is the
reference. `command` prints what was found. It is a room of the laboratory: it looks at other people's trainings, trains
nothing, and needs of ddp_core digests, errors and a free port.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Say what makes a training script depend on its ranks."""
    from ddp_lab.diagnose.command import main as command

    return command(arguments)
