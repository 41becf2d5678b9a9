"""`ddp project`: what a step would take on more GPUs, by formula, from a step measured on one and a link's two numbers.

Nothing here has been held against a run on several GPUs. `formulas` has the arithmetic, `command` the command.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Compute a training step on more GPUs than there are here."""
    from ddp_lab.projection.command import main as command

    return command(arguments)
