"""`python -m ddp_lab.sweep`."""

import sys

from ddp_lab.sweep import main

if __name__ == "__main__":
    sys.exit(main())
