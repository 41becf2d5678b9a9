"""How torch's agent starts a worker: out of the nursery, or as a fresh interpreter where there is none."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from typing import Any

from ddp_core.base.torch_internals import starting_workers_by
from ddp_core.launch.nursery import Nursery, Nursling


def started_by(nursery: Nursery | None) -> contextlib.AbstractContextManager[None]:
    """While in the block, torch's agent has its workers from the nursery, if there is one."""
    if nursery is None:
        return contextlib.nullcontext()

    def start(usual: Callable[..., Any], *, args: tuple[str, ...], env: dict[str, str], **others: Any) -> Any:
        _, _, *words = args  # -m PACKAGE
        try:
            return _Handler(nursery.start(words, {**os.environ, **env}))
        except OSError:
            # The nursery was killed, for want of memory perhaps.
            return usual(args=args, env=env, **others)

    return starting_workers_by(start)


class _Handler:
    """A nursling in the place of torch's SubprocessHandler."""

    def __init__(self, nursling: Nursling) -> None:
        self.proc = nursling

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Signal the whole process group, as torch's does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.proc.pid, death_sig or signal.SIGTERM)
