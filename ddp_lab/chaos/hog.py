"""Use up memory in small pieces, 96 MiB in all, for a moment. Runs inside a node that is near its memory limit."""

import sys
import time

_BYTES = 96 * 2**20
_PIECE = 4 * 2**20


def main() -> int:
    """Returns once the kernel has had reason to kill a larger process."""
    pieces = []
    for _ in range(_BYTES // _PIECE):
        pieces.append(bytearray(b"1") * _PIECE)
        time.sleep(0.01)
    time.sleep(0.5)
    return len(pieces) == 0


if __name__ == "__main__":
    sys.exit(main())
