"""The network of the drills as torchft's replicas, of which one is killed and comes back; for benchmarks.recovery.

    python -m benchmarks.torchft_replicas LIGHTHOUSE NAME FILE [PAUSE]

is one replica: it trains until it is killed, with exact steps over gloo, and writes a line to FILE for each step that
it commits: when, which, and how many replicas took part. PAUSE: seconds that each micro-batch takes longer.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.commands import search_path, wait_until

JOIN_MS = 100
"""Milliseconds that torchft's lighthouse waits for replicas that live and have not come to a step; its tests' value."""
HEARTBEAT_MS = 5000
"""After so many milliseconds of silence it takes a replica for dead; its default."""
_WAIT = 60.0


class Step(NamedTuple):
    """A step that a replica has committed."""

    time: float
    step: int
    replicas: int


class Replica:
    """One replica in a process of its own."""

    def __init__(self, lighthouse: str, name: str, folder: Path, pause: float) -> None:
        self._file = folder / f"{name}-{time.monotonic_ns()}"
        self._file.touch()
        words = ["-m", "benchmarks.torchft_replicas", lighthouse, name, str(self._file), str(pause)]
        env = {**os.environ, "PYTHONPATH": search_path(), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, *words], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def steps(self) -> list[Step]:
        rows = [line.split() for line in self._file.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return [Step(float(when), int(step), int(count)) for when, step, count in rows]

    def wait_for(self, replicas: int, since: float = 0.0) -> Step:
        """The first step after the moment `since` in which so many replicas took part."""
        found: list[Step] = []

        def has_come() -> bool:
            found[:] = [each for each in self.steps if each.time > since and each.replicas == replicas][:1]
            return bool(found)

        wait_until(has_come, _WAIT, f"a step of {replicas} replicas")
        return found[0]


@contextlib.contextmanager
def _three(folder: Path, pause: float) -> Iterator[tuple[list[Replica], Any]]:
    """Three replicas that train together, and a function that starts one more."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=JOIN_MS, heartbeat_timeout_ms=HEARTBEAT_MS
    )
    started: list[Replica] = []

    def start(name: str) -> Replica:
        started.append(Replica(lighthouse.address(), name, folder, pause))
        return started[-1]

    try:
        replicas = [start(name) for name in "abc"]
        replicas[0].wait_for(3)
        time.sleep(1 + random.uniform(0, 0.5))
        yield replicas, start
    finally:
        for each in started:
            each.end()
        lighthouse.shutdown()


def killed(folder: Path, pause: float) -> tuple[float, int]:
    """Seconds from the loss of a replica to the next step of the others, and how many steps these do again."""
    with _three(folder, pause) as (replicas, _):
        struck = time.time()
        replicas[1].process.kill()
        after = min(replicas[number].wait_for(2, struck) for number in (0, 2))
        done = max(each.step for number in (0, 2) for each in replicas[number].steps if each.time < after.time)
        return after.time - struck, max(0, done - after.step + 1)


def joins(folder: Path, pause: float) -> tuple[float, int]:
    """How long the others stand still when a replica comes back, and how many steps they do again."""
    with _three(folder, pause) as (replicas, start):
        struck = time.time()
        replicas[1].end()
        replicas[0].wait_for(2, struck)
        start("b")
        after = replicas[0].wait_for(3, struck)
        before = [each for each in replicas[0].steps if each.time < after.time][-1]
        return after.time - before.time, max(0, before.step - after.step + 1)


def _train(lighthouse: str, name: str, file: str, pause: str = "0") -> None:
    import torch
    from torch import nn
    from torch.distributed import TCPStore
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    from ddp_core.adapters.torchft import ExactSteps
    from ddp_core.sampler import GlobalOrder
    from tests.faults.experiment_files.dots import dots, network

    torch.manual_seed(0)
    data: Any = dots().train
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer}

    def load(state: dict[str, Any]) -> None:
        for key, part in parts.items():
            part.load_state_dict(state[key])

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    patience = timedelta(seconds=5)
    group = ProcessGroupGloo(timeout=patience)
    manager = Manager(
        pg=group,
        load_state_dict=load,
        state_dict=lambda: {key: part.state_dict() for key, part in parts.items()},
        min_replica_size=1,
        use_async_quorum=False,
        timeout=patience,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=name,
    )
    steps, order = ExactSteps(manager, group, model, micro_batches=6), GlobalOrder(len(data), seed=0)
    with Path(file).open("a", buffering=1) as lines:
        while True:
            for index in steps.begin():
                epoch, step = divmod(steps.step, 8)
                inputs, targets = data.__getitems__(order.ids(epoch, 12 * step + 2 * index, 12 * step + 2 * index + 2))
                time.sleep(float(pause))
                with steps.micro_batch(index):
                    nn.functional.cross_entropy(model(inputs), targets).backward()
            if steps.finish(scale=1 / 6):
                optimizer.step()
                lines.write(f"{time.time()} {steps.step} {manager.num_participants()}\n")


if __name__ == "__main__":
    _train(*sys.argv[1:])
