"""`python -m ddp_lab.projection`."""

import sys

from ddp_lab.projection import main

if __name__ == "__main__":
    sys.exit(main())
