"""`python -m ddp_core.run FILE`: a worker that a launcher of ours starts as a fresh interpreter."""

import sys

from ddp_core.base.streams import make_patient
from ddp_core.distributed.stop import die_when_asked

if __name__ == "__main__":
    # Both come before torch is loaded, which takes seconds. The launcher sees from which signal this process has died.
    die_when_asked()
    make_patient()
    from ddp_core.run.worker import main

    sys.exit(main(sys.argv[1:]))
