"""`python -m ddp_lab.report [--output outputs] [--to outputs/report] [--serve HOST:PORT]`."""

import sys

from ddp_lab.report import main

if __name__ == "__main__":
    sys.exit(main())
