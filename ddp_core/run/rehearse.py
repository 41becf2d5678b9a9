"""`python -m ddp_core.run.rehearse FOLDER PID`: a resume, tried in a fresh interpreter, for the run of process PID."""

import os
import sys
from pathlib import Path

from ddp_core.base.process import die_with_parent

if __name__ == "__main__":
    # Before torch is loaded, which takes seconds: the run may be killed meanwhile.
    die_with_parent()
    if os.getppid() != int(sys.argv[2]):
        sys.exit(1)
    from ddp_core.run.resumed_step import main

    sys.exit(main(Path(sys.argv[1])))
