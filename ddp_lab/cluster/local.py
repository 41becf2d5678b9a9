"""Nodes as local processes: the same launcher and rendezvous as in containers, without an engine."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import psutil

from ddp_core.base.errors import ExitCode, UserError
from ddp_lab.cluster.cluster import Spec, Write
from ddp_lab.cluster.verdict import NodeResult

# A variable that every descendant inherits, even one that has left its parent's session; `stop` finds them by it.
_MARK = "DDP_CLUSTER_LAUNCH"
_START_SECONDS = 60


class LocalBackend:
    """Each node is a `ddp train` process on this machine."""

    name = "local processes"

    def __init__(self) -> None:
        self._nodes: dict[str, subprocess.Popen[str]] = {}
        self._rendezvous: subprocess.Popen[str] | None = None
        self._threads: list[threading.Thread] = []
        self._launch_id: str | None = None

    def start(self, spec: Spec) -> None:
        """Start one process per node, for the layout `ddp` after their rendezvous."""
        self._launch_id = spec.launch_id
        train = ["train", spec.experiment, "--layout", spec.layout, "--device", "cpu"]
        train += ["--output", str(spec.output), "--data-dir", str(spec.data)]
        if spec.layout == "ddp":
            endpoint = f"127.0.0.1:{self._start_rendezvous()}"
            train += ["--nnodes", str(spec.nnodes), "--nproc-per-node", str(spec.nproc_per_node)]
            train += ["--rdzv-endpoint", endpoint, "--rdzv-id", spec.launch_id]
        names = [f"node-{number}" for number in range(1, spec.nnodes + 1)] if spec.layout == "ddp" else ["single"]
        for name in names:
            self._nodes[name] = self._run([*train, *spec.options])

    def _start_rendezvous(self) -> int:
        """Start the rendezvous on a free port that it chooses; returns the port."""
        self._rendezvous = self._run(["rendezvous", "--port", "0", "--bind", "127.0.0.1"])
        assert self._rendezvous.stdout is not None
        guard = threading.Timer(_START_SECONDS, self._rendezvous.kill)
        guard.start()
        try:
            line = self._rendezvous.stdout.readline()
        finally:
            guard.cancel()
        found = re.search(r"port (\d+)", line)
        if found is None:
            raise UserError(f"the rendezvous did not start: {line.strip() or 'no answer'}", ExitCode.RESOURCES)
        return int(found[1])

    def _run(self, arguments: Sequence[str]) -> subprocess.Popen[str]:
        # A session of its own: Ctrl-C then reaches only this program, which asks each node once to leave.
        return subprocess.Popen(
            [sys.executable, "-m", "ddp_core", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=os.environ | {_MARK: str(self._launch_id), "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )

    def nodes(self) -> list[str]:
        """node-1, node-2, … or single."""
        return list(self._nodes)

    def follow(self, write: Write) -> None:
        """Start one thread per node that hands over its output."""
        for name, process in self._nodes.items():
            thread = threading.Thread(target=copy_output, args=(name, process, write), daemon=True)
            thread.start()
            self._threads.append(thread)

    def results(self) -> dict[str, NodeResult]:
        """The nodes whose process has ended."""
        codes = {name: process.poll() for name, process in self._nodes.items()}
        return {name: NodeResult(name, code) for name, code in codes.items() if code is not None}

    def terminate(self) -> None:
        """SIGTERM to every node's launcher."""
        for process in self._nodes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        """Kill every process that carries this launch's mark, then collect the children and their last lines."""
        if self._launch_id is None:
            return
        deadline = time.monotonic() + 5
        while (left := marked(self._launch_id)) and time.monotonic() < deadline:
            for process in left:
                with _gone_is_fine():
                    process.kill()
            psutil.wait_procs(left, timeout=1)
        for child in [*self._nodes.values(), *([self._rendezvous] if self._rendezvous else [])]:
            child.wait(timeout=5)
        for thread in self._threads:
            thread.join(timeout=5)
        for child in [*self._nodes.values(), *([self._rendezvous] if self._rendezvous else [])]:
            if child.stdout is not None:
                child.stdout.close()


def copy_output(name: str, process: subprocess.Popen[str], write: Write) -> None:
    """Hand over every line that the process writes, until it ends."""
    assert process.stdout is not None
    for line in process.stdout:
        write(name, line.rstrip("\n"))


def _gone_is_fine() -> contextlib.AbstractContextManager[None]:
    return contextlib.suppress(psutil.Error)


def marked(launch_id: str) -> list[psutil.Process]:
    """Every living process that carries the mark of this launch."""
    found = []
    for process in psutil.process_iter():
        with _gone_is_fine():
            if process.environ().get(_MARK) == launch_id and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
