"""Whether a machine computes the published bits: `ddp probe`.

`operations` holds operations of torch and numpy at fixed inputs, `published` the table of their digests, `command`
compares this machine with it, and `child` is the process that computes.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Say whether this CPU computes the published bits."""
    from ddp_lab.probe.command import main as command

    return command(arguments)
