"""Nodes as local processes that can be broken with signals, where no engine answers.

A node is the process group of `ddp train` with everything below it. There is no network to cut, no link to slow, no
volume to fill and no memory limit; drills skip those faults and say so.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from functools import partial

import psutil

from ddp_lab.chaos.drill import RENDEZVOUS, Planned
from ddp_lab.chaos.faults import BeginAndEnd
from ddp_lab.cluster.cluster import Spec, Write
from ddp_lab.cluster.local import LocalBackend, copy_output, marked

_GRACE_SECONDS = 60


class BreakableProcesses(LocalBackend):
    """A cluster of local processes, with the faults of a drill that need no engine."""

    kinds = frozenset({"kill", "stop", "pause", "down"})

    def __init__(self) -> None:
        super().__init__()
        self._write: Write = lambda node, line: None
        self._commands: dict[str, list[str]] = {}

    def start(self, spec: Spec) -> None:
        """Start as every local cluster does, and keep the commands, so that a node can be started again."""
        super().start(spec)
        for name, process in self._nodes.items():
            self._commands[name] = self._words(process)
        if self._rendezvous is not None:
            endpoint = self._commands["node-1"][self._commands["node-1"].index("--rdzv-endpoint") + 1]
            self._commands[RENDEZVOUS] = ["rendezvous", "--port", endpoint.rpartition(":")[2], "--bind", "127.0.0.1"]

    @staticmethod
    def _words(process: subprocess.Popen[str]) -> list[str]:
        assert isinstance(process.args, list)
        return [str(word) for word in process.args[3:]]

    def follow(self, write: Write) -> None:
        """Hand over the output of every node, and again after it was started again."""
        self._write = write
        super().follow(write)

    def is_running(self, name: str) -> bool:
        """Whether the node's launcher runs; a paused one does."""
        return self._process(name).poll() is None

    def kill(self, name: str) -> float:
        """SIGKILL to the node's launcher and all processes below it; returns the time."""
        moment = time.time()
        self._signal_all(name, signal.SIGKILL)
        self._process(name).wait(timeout=10)
        return moment

    def stop_one(self, name: str) -> None:
        """SIGTERM to the node's launcher, and wait until it has ended."""
        self._process(name).send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process(name).wait(timeout=_GRACE_SECONDS)

    def begin_and_end(self, fault: Planned, node: str) -> BeginAndEnd:
        """How a fault that is neither a kill nor a stop begins, and how it ends."""
        pairs: dict[str, BeginAndEnd] = {
            "pause": (partial(self._signal_all, node, signal.SIGSTOP), partial(self._signal_all, node, signal.SIGCONT)),
            "down": (self.take_down, self.bring_up),
        }
        return pairs[fault.kind]

    def start_again(self, name: str) -> None:
        """Start a node or the rendezvous that has ended, with the same command."""
        before = self._process(name)
        process = self._run(self._commands[name])
        if before.stdout is not None:
            before.stdout.close()
        if name == RENDEZVOUS:
            self._rendezvous = process
        else:
            self._nodes[name] = process
            thread = threading.Thread(target=copy_output, args=(name, process, self._write), daemon=True)
            thread.start()
            self._threads.append(thread)

    def take_down(self) -> None:
        """SIGTERM to every node, wait for all, then to the rendezvous."""
        self.terminate()
        deadline = time.monotonic() + _GRACE_SECONDS
        while any(self.is_running(name) for name in self._nodes) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert self._rendezvous is not None
        self._rendezvous.terminate()
        self._rendezvous.wait(timeout=10)

    def bring_up(self) -> None:
        """Start rendezvous and nodes with the same commands."""
        for name in (RENDEZVOUS, *list(self._nodes)):
            self.start_again(name)

    def exit_codes(self) -> dict[str, int]:
        """The exit codes of the nodes that have ended."""
        return {name: result.exit_code for name, result in self.results().items()}

    def holds(self, name: str, host: str, pid: int) -> bool:
        """Whether the process is one of the node's."""
        return pid in [process.pid for process in self._tree(name)]

    def settle(self) -> None:
        """Nothing to do: local nodes write to the output directory themselves."""

    def left_behind(self) -> list[str]:
        """Processes of this launch that are still there."""
        return [f"process {process.pid}" for process in marked(str(self._launch_id))]

    def _process(self, name: str) -> subprocess.Popen[str]:
        found = self._rendezvous if name == RENDEZVOUS else self._nodes[name]
        assert found is not None
        return found

    def _tree(self, name: str) -> list[psutil.Process]:
        try:
            top = psutil.Process(self._process(name).pid)
            return [top, *top.children(recursive=True)]
        except psutil.Error:
            return []

    def _signal_all(self, name: str, number: signal.Signals) -> None:
        for process in self._tree(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)
