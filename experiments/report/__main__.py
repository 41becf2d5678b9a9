"""`python -m experiments.report [--output outputs] [--to outputs/report] [--serve HOST:PORT]`."""

import sys

from experiments.report import main

if __name__ == "__main__":
    sys.exit(main())
