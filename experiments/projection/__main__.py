"""`python -m experiments.projection`."""

import sys

from experiments.projection import main

if __name__ == "__main__":
    sys.exit(main())
