"""The command `ddp`: its subcommands and options, and the function that each subcommand calls.

The functions themselves are in the packages below; here is only how a command line asks for them.
"""

from ddp_core.cli.entry import main

__all__ = ["main"]
