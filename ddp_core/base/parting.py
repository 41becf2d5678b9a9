"""Lets go of process groups without waiting until their connections are closed."""

from __future__ import annotations

import threading


def let_go(last: list[object]) -> None:
    """Empty this list of destroyed process groups in a thread; the list must hold the last reference to each group.

    The thread that drops the last reference to a group of gloo waits for some milliseconds for each of the group's
    connections, one after the other. The process does not end before that thread.
    """
    threading.Thread(target=last.clear, name="parting").start()
