"""The environment variables by which the command tells the processes of a script what to trace."""

from __future__ import annotations

FOLDER = "DDP_DIAGNOSE_TRACE"
"""The folder of the traces; without it nothing is traced."""
ROOTS = "DDP_DIAGNOSE_ROOTS"
"""The folders of the script's own code, separated as in PATH."""
STEPS = "DDP_DIAGNOSE_STEPS"
"""How many optimizer steps are to be seen."""
UNTIL = "DDP_DIAGNOSE_UNTIL"
"""What else is waited for: `epoch`, `saved`, or nothing."""
TAPE = "DDP_DIAGNOSE_TAPE"
"""Of how many optimizer steps every operation is to be written; without it, of none."""
PARENT = "DDP_DIAGNOSE_PARENT"
"""The process that has started the ranks: they end with it."""
