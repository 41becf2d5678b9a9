"""A clock that is ahead, for the experiment's code in one of two trainings that are compared."""

from __future__ import annotations

import time

_AHEAD = 86_461.25
"""Seconds: a day and a bit, so that a seed made of whole seconds, minutes or days is another one, too."""


def put_clock_ahead() -> None:
    """Let `time.time` and `time.time_ns` of this process be ahead, from here on."""
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() + _AHEAD
    time.time_ns = lambda: now_ns() + round(_AHEAD * 1e9)
