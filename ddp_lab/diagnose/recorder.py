"""The trace file of one process of a diagnosed script, and what is written of tensors: digests, and a few elements."""

from __future__ import annotations

import json
import os
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from hashlib import blake2b
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, TextIO

import numpy as np
import torch
from torch import Tensor

from ddp_core.base.digests import bytes_of
from ddp_lab.diagnose.task import task

ELEMENTS = 64
"""So many elements of each gradient are written: enough to tell a factor, and sums and means of them stay exact."""
_TORCH = str(Path(torch.__file__).parent)
_LAB = str(Path(__file__).parent)
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
_FEW = 32
"""So many members of a list are looked into, such as transforms; one that is longer has samples."""


class Recorder:
    """Writes events, one JSON line each, into a file of this process; a forked child gets a file of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: TextIO | None = None
        self._process = 0

    def write(self, event: str, **details: Any) -> None:
        """Append one event; it is in the file when this returns."""
        if self._file is None or self._process != os.getpid():
            self._process = os.getpid()
            self._file = (self._folder / f"{self._process}.jsonl").open("a")
        self._file.write(json.dumps({"event": event} | details) + "\n")
        self._file.flush()


def digest(tensor: Tensor) -> str:
    """A short digest of shape, dtype and bytes; of a DTensor, of what this rank holds."""
    here = dense(tensor)
    found = blake2b(f"{here.dtype} {tuple(here.shape)}".encode(), digest_size=8)
    found.update(bytes_of(here.cpu()).contiguous().numpy().tobytes())
    return found.hexdigest()


def digest_of_bytes(content: bytes) -> str:
    """A short digest of bytes."""
    return blake2b(content, digest_size=8).hexdigest()


def dense(tensor: Tensor) -> Tensor:
    """The tensor without gradient, as an ordinary one."""
    here = tensor.detach()
    if hasattr(here, "to_local"):
        here = here.to_local()
    return here.to_dense() if here.layout != torch.strided else here


def some_elements(tensor: Tensor) -> Tensor:
    """ELEMENTS of the tensor at most, as float64, at the same places of each tensor of this shape."""
    flat = dense(tensor).reshape(-1)
    if len(flat) > ELEMENTS:
        flat = flat[torch.linspace(0, len(flat) - 1, ELEMENTS).long()]
    return flat.to("cpu", torch.float64)


def rows(tree: Any) -> list[str]:
    """A digest of each sample of a batch: of the rows of all tensors that are as long as the first one."""
    tensors = [dense(each).cpu() for each in tensors_of(tree) if each.dim()]
    if not tensors:
        return []
    tensors = [each for each in tensors if len(each) == len(tensors[0])]
    return [
        digest_of_bytes(b"".join(bytes_of(each[row]).contiguous().numpy().tobytes() for each in tensors))
        for row in range(len(tensors[0]))
    ]


def tensors_of(tree: Any) -> Iterator[Tensor]:
    """All tensors in mappings and sequences."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for each in tree.values():
            yield from tensors_of(each)
    elif isinstance(tree, Sequence) and not isinstance(tree, str | bytes):
        for each in tree:
            yield from tensors_of(each)


def place() -> tuple[int, int, bool]:
    """Rank, number of ranks, and whether a process group connects them."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size(), True
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")), False


def site() -> str | None:
    """The line of the script's own code that is being executed, as `train.py:31`; None where none is."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_TORCH, _LAB)):
            for root in task().roots:
                if file.startswith(root + os.sep):
                    return f"{file[len(root) + 1 :]}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Let `around(function, …)` be called in the place of a function or method, wherever its module keeps it."""
    function = getattr(owner, name)

    @wraps(function)
    def traced(*words: Any, **named: Any) -> Any:
        return around(function, *words, **named)

    setattr(owner, name, traced)
    home = sys.modules.get(getattr(function, "__module__", None) or "")
    if getattr(home, name, None) is function:
        setattr(home, name, traced)


def generators(holder: Any = None) -> dict[str, str]:
    """Digests of the states of this process's random generators, and of those that are found in an object."""
    _, keys, position, *_ = np.random.get_state(legacy=True)
    found = {
        "torch": digest(torch.get_rng_state()),
        "random": digest_of_bytes(repr(random.getstate()).encode()),
        "numpy": digest_of_bytes(repr((bytes(np.asarray(keys)), position)).encode()),
    }
    return found | dict(_held(holder, "the data set", 3))


def changed(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """By generator, its state before and after, where that is another."""
    return {name: (before[name], state) for name, state in after.items() if before.get(name, state) != state}


def _held(holder: Any, name: str, depth: int) -> Iterator[tuple[str, str]]:
    if isinstance(holder, torch.Generator):
        yield name, digest(holder.get_state())
    elif isinstance(holder, _GENERATORS):
        yield name, digest_of_bytes(pickle.dumps(holder))
    elif isinstance(holder, list | tuple) and len(holder) <= _FEW:
        for index, each in enumerate(holder):
            yield from _held(each, f"{name}[{index}]", depth)
    elif depth and not isinstance(holder, type | ModuleType | Tensor):
        for key, each in list(getattr(holder, "__dict__", {}).items()):
            yield from _held(each, f"{name}'s {key}" if depth == 3 else f"{name}.{key}", depth - 1)
