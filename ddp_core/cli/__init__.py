"""The command `ddp`: its words and options, and the function that each of them calls.

What the functions do stands in the rooms below; here is only how it is asked for on a command line.
"""

from ddp_core.cli.commands import main

__all__ = ["main"]
