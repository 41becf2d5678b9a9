"""The command `ddp`: from words to one request, and the commands beside `train` (verify, compare, doctor, bundle).

Starting processes belongs to `launch`, and what a worker does to `run`.
"""

from ddp_core.cli.entry import main

__all__ = ["main"]
