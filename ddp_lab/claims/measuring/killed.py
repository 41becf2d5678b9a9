"""torch's DDP alone, without a launcher: two processes train, one kills itself, and the other is left to its fate."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ddp_core.distributed.world import free_port

_PROGRAM = """
import os, signal, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

steps, killed_after, log = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(10, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(1, steps + 1):
    optimizer.zero_grad()
    inputs = torch.randn(8, 10)
    torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True)).backward()
    optimizer.step()
    with open(log, "a") as file:
        print(step, file=file)
    if step == killed_after and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
dist.destroy_process_group()
"""


def train_and_kill(steps: int, killed_after: int, seconds: float) -> dict[str, Any]:
    """Two processes train so many steps; rank 1 kills itself after one of them.

    Returns `exit_code` and `last_step` of rank 0, None for one that was still waiting after `seconds` and was ended
    then, and `killed`, whether rank 1 died by its signal.
    """
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="ddp-claim-") as folder:
        logs = [Path(folder, f"rank-{rank}") for rank in range(2)]
        workers = [
            subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(steps), str(killed_after), str(log)],
                env=os.environ | place | {"RANK": str(rank)},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for rank, log in enumerate(logs)
        ]
        codes: list[int | None] = []
        deadline = time.monotonic() + seconds
        for worker in workers:
            try:
                codes.append(worker.wait(max(0.1, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                codes.append(None)
                worker.kill()
                worker.wait()
        done = logs[0].read_text().split() if logs[0].exists() else []
    return {"exit_code": codes[0], "last_step": int(done[-1]) if done else 0, "killed": codes[1] == -9}
