"""Runs at an address of object storage, such as s3://bucket/runs: copied up while they train, and brought back.

All else works on local folders. What talks to a store is a process of its own (`python -m ddp_core.remote`), so that
no training waits for it, loads its packages, or is forked beside its threads. A run without an address loads nothing of
this but `is_address`.
"""

from __future__ import annotations

import os


def is_address(named: str | os.PathLike[str]) -> bool:
    """Whether this names a place in a store, and not a path."""
    return isinstance(named, str) and "://" in named
