"""Scaling out on paper: what this machine's collectives cost, and what a step would cost on thousands of GPUs.

`ddp project` fits a latency-bandwidth model to collectives measured here, checks it on sizes and process counts that
the fit has not seen, and projects step time and efficiency for given GPUs and links. `costs` has the formulas, `nccl`
what NCCL expects and picks; `fit`, `measure`, `counting` and `nodes` are the part that is checked here; `hardware` and
`published` hold every constant with its source; `step` models the overlap of communication with backward.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Project a training step onto more GPUs than there are here."""
    from ddp_lab.projection.command import main as command

    return command(arguments)
