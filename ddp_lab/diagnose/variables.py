"""What the command and the processes of a script tell each other: environment variables, and a file."""

from __future__ import annotations

from pathlib import Path

FOLDER = "DDP_DIAGNOSE_TRACE"
"""The folder of the traces; without it nothing is traced."""
ROOTS = "DDP_DIAGNOSE_ROOTS"
"""The folders of the script's own code, separated as in PATH."""
STEPS = "DDP_DIAGNOSE_STEPS"
"""How many optimizer steps are to be seen."""
UNTIL = "DDP_DIAGNOSE_UNTIL"
"""What else is waited for: `epoch`, `saved`, or nothing."""
BATCHES = "DDP_DIAGNOSE_BATCHES"
"""The folder for the batches of all ranks. Where it is named, nothing in a step is random, or of some samples alone."""
GIVEN = "DDP_DIAGNOSE_GIVEN"
"""How one process gets them: `together`, `one by one`, or empty where it has its own."""


def ended_file(traces: Path, process: int) -> Path:
    """What a process leaves among the traces when its program is over, before the interpreter clears away."""
    return traces / f"{process}.ended"
