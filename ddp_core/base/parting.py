"""Lets go of process groups without waiting until their connections are closed."""

from __future__ import annotations

import threading


def let_go(last: list[object]) -> None:
    """Empty a list of destroyed process groups in a thread; it must hold the last reference to each of them.

    Whoever drops the last reference to a group of gloo waits for some milliseconds for each of its connections, one
    after the other. The process does not end before the thread.
    """
    threading.Thread(target=last.clear, name="parting").start()
