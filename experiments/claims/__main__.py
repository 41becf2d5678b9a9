"""`python -m experiments.claims [C06 ...] [--quick|--full] [--output outputs]`."""

import sys

from experiments.claims import main

if __name__ == "__main__":
    sys.exit(main())
