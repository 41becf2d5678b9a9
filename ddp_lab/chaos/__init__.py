"""The chaos drill: break a running cluster on purpose, and prove that nothing was lost.

`ddp chaos` trains `digits` in exact mode on three nodes while a drill (drills/*.yaml) kills, pauses, cuts off and
starves them, and judges the end: the same weights as an undisturbed run, nothing left running.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Break a cluster on purpose, and judge what was lost."""
    from ddp_lab.chaos.__main__ import main as run

    return run(arguments)
