"""One thread that carries out exchanges in the order they were asked for, while the training thread goes on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch
from torch import Tensor


class CommunicationThread:
    """Runs jobs first in, first out, and completes one torch Future for each.

    A chain of `Future.then` callbacks, as torch's PowerSGD hook uses, deadlocks on gloo with more than one bucket:
    the callbacks run on the very threads they wait for. Here nothing waits but this thread. After a failed job every
    later one fails with the same error, so that no rank waits for a peer that gave up.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Tensor], torch.futures.Future[Tensor], Tensor] | None]
        self._jobs = queue.SimpleQueue()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], Tensor], like: Tensor) -> torch.futures.Future[Tensor]:
        """Queue `job`, which may use what the calling thread has computed so far on `like`'s device."""
        future: torch.futures.Future[Tensor]
        if like.device.type == "cuda":
            future = torch.futures.Future(devices=[like.device])
            self._jobs.put((self._on_side_stream(job, like.device), future, like))
        else:
            future = torch.futures.Future()
            self._jobs.put((job, future, like))
        return future

    def close(self, timeout: float = 5.0) -> bool:
        """End the thread after the jobs it has; say whether it ended within `timeout` seconds."""
        self._jobs.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _on_side_stream(self, job: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
        # Not run on a machine with two CUDA devices yet.
        computed = torch.cuda.current_stream(device).record_event()
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]

        def on_stream() -> Tensor:
            stream.wait_event(computed)
            return job()

        return on_stream

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, future, like = item
            stream = self._streams.get(like.device)
            try:
                if self.error is not None:
                    raise self.error
                # The future is completed on the stream too: that is where it records what its waiters wait for.
                with torch.cuda.stream(stream), torch.no_grad():
                    future.set_result(job())
            except Exception as error:
                self.error = error
                # torch hands the exception object to DDP, which fails on it: the training thread looks at `error` then.
                future.set_exception(error)  # type: ignore[arg-type]
            del item, job, future, like
