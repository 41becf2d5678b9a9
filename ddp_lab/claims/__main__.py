"""`python -m ddp_lab.claims [C06 ...] [--quick|--full] [--output outputs]`."""

import sys

from ddp_lab.claims import main

if __name__ == "__main__":
    sys.exit(main())
