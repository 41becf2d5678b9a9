"""`python -m ddp_core` is `ddp`."""

import sys

from ddp_core.cli import main

sys.exit(main())
