"""The process that rehearses a resume, as the run sees it: what it is given, how long it may take, what it says.

It is a fresh interpreter, never a fork of the trainer: a fork made after threads have computed was seen to hang.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from ddp_core.base.beneath import make_folder_beneath, read_file
from ddp_core.base.files import NewFile, replace_file
from ddp_core.base.memory import free_memory
from ddp_core.experiment.request import Request
from ddp_core.record.directory import RunDirectory
from ddp_core.trainers.next_step import Facts, Verdict
from ddp_core.trainers.train_state import TrainState

FOLDER = "rehearsal"
"""In the run directory, as long as a rehearsal lasts; in it are these files."""
REQUEST, FACTS, GRADIENTS, VERDICT = "request.json", "facts.json", "gradients.safetensors", "verdict.json"

_INTERPRETER_SECONDS = 6.0
"""What a fresh interpreter takes until it has torch and an optimizer."""
_LEAST_LIMIT, _LIMIT_PER_BUILDING = 60.0, 10.0
_COPIES = 5
"""How many times as much memory as the weights a job takes: weights, gradients, two of the optimizer, an average."""
_SPARE = 2**30


class FreshProcess:
    """Makes one rehearsal (rank 0); see `Rehearser` in ddp_core/trainers/rehearsal.py.

    `built_seconds`: how long the run itself took to build all parts.
    """

    def __init__(self, request: Request, directory: RunDirectory, device: torch.device, built_seconds: float) -> None:
        self._request, self._directory, self._device = request, directory, device
        self._folder = directory.path / FOLDER
        self.forecast = _INTERPRETER_SECONDS + built_seconds
        self._limit = _LEAST_LIMIT + _LIMIT_PER_BUILDING * built_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._started, self._has_files = 0.0, False
        shutil.rmtree(self._folder, ignore_errors=True)  # a run that was killed may have left it

    def no_room(self, state: TrainState) -> str | None:
        """Why there is not enough memory for a second job beside this one; None where there is."""
        whole = state.ownership.described_weights().values()
        weights = sum(each.numel() * each.element_size() for each in whole if isinstance(each, Tensor))
        free, total = free_memory()
        # What this process has is an estimate of what another one takes; where state is cut, it has less.
        needed = _resident() + (0 if state.ownership.has_whole_weights else _COPIES * weights)
        if free is not None and free < needed + total // 20:
            return f"a second process needs {needed / 2**30:.1f} GiB of memory, and {free / 2**30:.1f} GiB are free"
        if self._device.type == "cuda":
            # Of what the run's own allocator keeps, another process gets nothing.
            left, _ = torch.cuda.mem_get_info(self._device)
            needed = max(torch.cuda.max_memory_allocated(self._device), _COPIES * weights) + _SPARE
            if left < needed:
                return (
                    f"a second process needs {needed / 2**30:.1f} GiB on the GPU, and {left / 2**30:.1f} GiB are free"
                )
        return None

    def keep(self, gradients: Mapping[str, Tensor]) -> None:
        """Write the gradients of the step. Raises OSError."""
        from safetensors.torch import save_file  # here, because most runs need none

        self._has_files = True
        make_folder_beneath(self._folder)
        on_host = {name: each.detach().cpu().contiguous() for name, each in gradients.items()}
        with NewFile(self._folder / GRADIENTS, self._directory.path) as new:
            save_file(on_host, new.temporary)
            new.rename()

    def start(self, facts: Facts) -> None:
        """Start the process. Raises OSError."""
        self._started = time.monotonic()
        here = {"device": str(self._device), "threads": torch.get_num_threads(), "directory": str(self._directory.path)}
        told = {**asdict(facts), **here, "started": self._started}
        for name, text in ((REQUEST, self._request.to_json()), (FACTS, json.dumps(told))):
            replace_file(self._folder / name, text, root=self._directory.path)
        self._process = start_interpreter(self._folder)

    def verdict(self, seconds: float) -> Verdict | None:
        """The verdict, once it is there within so many seconds; the limit of time is a verdict, too."""
        if self._process is None:
            return Verdict(failed="its process was not started")
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            if time.monotonic() - self._started < self._limit:
                return None
            return Verdict(failed=f"it took longer than {self._limit:.0f} s")
        try:
            return Verdict(**json.loads(read_file(self._folder / VERDICT)))
        except (OSError, ValueError, TypeError):
            return Verdict(failed=f"its process ended with code {code} and said nothing")

    def close(self) -> None:
        """End the process, and remove its files."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._has_files:
            shutil.rmtree(self._folder, ignore_errors=True)


def start_interpreter(folder: Path) -> subprocess.Popen[bytes]:
    """A fresh interpreter that rehearses what `folder` tells of.

    It finds the modules that this process finds, has its environment, and is heard by nobody.
    """
    places = os.pathsep.join(str(Path(place).absolute()) for place in sys.path)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "ddp_core.run.rehearse", str(folder), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": places},
        start_new_session=True,
    )


def _resident() -> int:
    """The bytes of memory that this process has alone or shares."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0
