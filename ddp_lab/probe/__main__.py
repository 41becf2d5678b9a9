"""`python -m ddp_lab.probe [--json]`."""

import sys

from ddp_lab.probe import main

if __name__ == "__main__":
    sys.exit(main())
