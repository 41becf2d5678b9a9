"""`python -m ddp_core.live FILE`: a worker of a live recovery that a launcher starts as a fresh interpreter."""

import sys

from ddp_core.distributed.stop import die_when_asked

if __name__ == "__main__":
    # Before torch is loaded, which takes seconds: the launcher shall see which signal has ended this process.
    die_when_asked()
    from ddp_core.live.launch import worker_main

    sys.exit(worker_main(sys.argv[1:]))
