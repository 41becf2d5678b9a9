"""The sources' sentences, measured: one file per claim, a stated rule for each, and a verdict that nobody writes.

`python -m ddp_lab.claims [C06 ...] [--quick|--full]` measures here and writes OUTPUT/claims/<id>.json for the
report. A file holds `claim` (the sentence and how it is judged), `measure(setting)` and `judge(measurements)`; its name
starts with the claim's number, and nothing else has to be registered.
"""

from __future__ import annotations

import os
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what articles say about DP and DDP, and judge it."""
    from ddp_lab.claims.framework.command import main as command

    # What is measured here is the training alone.
    os.environ.setdefault("DDP_REHEARSAL", "off")
    return command(arguments)
