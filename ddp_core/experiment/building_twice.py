"""Whether a model builder gives the same weights again: two layouts, or two runs, could not agree otherwise."""

from __future__ import annotations

import contextlib
import io
import random
import time
from collections.abc import Callable, Iterator
from itertools import chain

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ddp_core.base.digests import same_bits
from ddp_core.base.errors import UserError
from ddp_core.base.seeds import generators_kept
from ddp_core.base.user_code import user_code

_SECONDS = 0.1
"""How long the first call may take, so that there is a second one."""
_ELEMENTS = 2**24
"""How many numbers the model may have, of which there are then two."""
_LATER = 86_461.25
"""Seconds: the clock of the second call is ahead, so that a seed made of whole seconds is another one, too."""


def built_alike(name: str, make: Callable[[], nn.Module]) -> nn.Module:
    """The model that `make` returns, called a second time where that costs little.

    Raises UserError where the second call, from the same states of the random generators, returns other weights.
    """
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    began = time.perf_counter()
    model = make()
    seconds = time.perf_counter() - began
    with user_code("your model"):
        size = sum(tensor.numel() for tensor in chain(model.parameters(), model.buffers()) if not is_lazy(tensor))
        if seconds > _SECONDS or size > _ELEMENTS:
            return model
        with generators_kept():
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.set_rng_state(states[2])
            try:
                with _later(), contextlib.redirect_stdout(io.StringIO()):
                    again = make()
            except Exception:
                return model  # it can be called once only, which says nothing of its weights
        place = _difference(model, again)
    if place is not None:
        raise UserError(
            f"model {name} has other weights when it is built again with the same seed ({place} differs), so layouts "
            "and runs would begin with different ones: it reads a clock or a source of true randomness, or what its "
            "first call has changed; draw from torch, numpy or random as they are, which are seeded before each call"
        )
    return model


def _difference(model: nn.Module, again: nn.Module) -> str | None:
    """The name of the first parameter or buffer whose bytes differ; None where there is none."""
    others = dict(chain(again.named_parameters(), again.named_buffers()))
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        other = others.get(name)
        if other is None or not _same(tensor, other):
            return name
    return None


def _same(tensor: Tensor, other: Tensor) -> bool:
    if is_lazy(tensor) or is_lazy(other):
        return is_lazy(tensor) and is_lazy(other)
    if (tensor.shape, tensor.dtype) != (other.shape, other.dtype):
        return False
    if tensor.is_meta or tensor.layout is not torch.strided:
        return True
    return same_bits(tensor, other)


@contextlib.contextmanager
def _later() -> Iterator[None]:
    """In this block it is a day later."""
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() + _LATER
    time.time_ns = lambda: now_ns() + round(_LATER * 1e9)
    try:
        yield
    finally:
        time.time, time.time_ns = now, now_ns
