"""Does `dots` end with the same weights, and the launcher name rank 0, where that takes long to die?

In step 30, rank 0 dies as a killed process does on a busy machine: its connections are closed first, so its peer
notices and leaves, and only then it is gone.
"""

import os
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

import psutil
from dots import dots, experiment, network

from ddp_core import Callback
from ddp_core.observe.callback import Moment

__all__ = ["callbacks", "dots", "experiment", "network"]

# The launcher looks at its workers ten times a second: it sees the end of the peer alone, for this long.
_LATER_SECONDS = 0.4


class DiesSlowly(Callback):
    """Callbacks are called by rank 0 alone."""

    def on_step(self, moment: Moment) -> None:
        if moment.step == 30 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            for opened in list(Path("/proc/self/fd").iterdir()):
                with suppress(OSError), socket.socket(fileno=os.dup(int(opened.name))) as connection:
                    if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        connection.shutdown(socket.SHUT_RDWR)
            nursery = psutil.Process(os.getppid())
            while len(nursery.children()) > 1:
                time.sleep(0.01)
            time.sleep(_LATER_SECONDS)
            os.kill(os.getpid(), signal.SIGKILL)


callbacks = [DiesSlowly()]
