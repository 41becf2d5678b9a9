"""`python -m ddp_lab.diagnose`."""

import sys

from ddp_lab.diagnose import main

if __name__ == "__main__":
    sys.exit(main())
