"""The command `ddp`: from words to one request, and the commands beside `train` (verify, compare, bundle).

Starting processes belongs to `launch`, and what a worker does to `run`.
"""

import sys
from collections.abc import Sequence

from ddp_core.base.platforms import refused_platform

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; any error is printed in one line."""
    if (reason := refused_platform()) is not None:
        print(f"ddp: error: {reason}", file=sys.stderr)
        return 2
    # Not importable on the platforms that are refused.
    from ddp_core.base.process import fix_hashes

    if arguments is None and sys.argv[1:2] == ["train"] and "--help" not in sys.argv:
        fix_hashes()
    from ddp_core.cli.entry import main as run_command

    return run_command(arguments)
